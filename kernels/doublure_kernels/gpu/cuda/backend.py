"""`Backend` on torch CUDA tensors: launches on torch's current stream, in its own memory.

Nothing waits and nothing is copied, so a call can be captured in a CUDA graph; but where the
scratch memory of the worst case is more than a sixteenth of the device's, one number is read back
to take less.

What a call needs besides its results is one piece of memory a stream, which grows and stays until
`close`. Calls on one stream follow each other, so they may share it. Under capture it comes from
the graph's own memory instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import DeviceError, DtypeError
from ...scene import Gradients, Kernel, Raster, Scene, Support
from .. import plan
from .compiler import compiled

__all__ = ["CudaBackend", "CudaEngine", "OnHost"]

LANES = 32
_ALIGN = 256
_SCRATCH = ("bounds", "geometry", "partials", "tiles", "totals")
_INDEX = {name: i for i, name in enumerate(plan.BINDINGS)}
_PARAMS, _GIVEN, _GRADS = _INDEX["params"], _INDEX["given"], _INDEX["grads"]
_LOSSES, _GRAD_SIGMA = _INDEX["losses"], _INDEX["grad_sigma"]
_GRAD_BACKGROUND = _INDEX["grad_background"]
_SHARE = 16  # of the device's memory may be scratch without asking how much is needed
_LARGEST = 1 << 34  # bytes of a buffer: kernels count its floats in 32 bits
_PLANS = 64


class Prepared:
    """The launches of one region, and the arguments that they share.

    Arguments are copied by a launch, so they are written anew for each call. All that a launch is
    told is made here once, since that took as long as the launch.
    """

    __slots__ = ("_blob", "_parameters", "_stream", "calls", "offsets", "pointers", "scratch")

    def __init__(self, settings: bytes, offsets: dict[str, int], scratch: int) -> None:
        size = 8 * len(plan.BINDINGS)
        self._blob = ctypes.create_string_buffer(bytes(size) + settings, size + len(settings) + 16)
        self.pointers = (ctypes.c_uint64 * len(plan.BINDINGS)).from_buffer(self._blob)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._blob))
        self._stream = ctypes.c_void_p()
        self.calls: list[tuple[Any, ...]] = []
        self.offsets = [(_INDEX[name], at) for name, at in offsets.items() if name in _INDEX]
        self.scratch = scratch

    def add(self, function: int, groups: tuple[int, int, int]) -> None:
        """Launch a kernel too, after those before."""
        numbers = (ctypes.c_uint(n) for n in (*groups, LANES, 1, 1, 0))
        call = (ctypes.c_void_p(function), *numbers, self._stream, self._parameters, None)
        self.calls.append(call)

    def settings(self, packed: bytes) -> None:
        """Replace the settings, as they come from `Settings.pack`."""
        at = 8 * len(plan.BINDINGS)
        ctypes.memmove(ctypes.addressof(self._blob) + at, packed, len(packed))

    def launch(self, start: Any, stream: int, base: int = 0) -> None:
        """Start all kernels on a stream.

        Args:
            start: `cuLaunchKernel`.
            stream: As an address.
            base: Of the scratch memory.
        """
        pointers = self.pointers
        for i, at in self.offsets:
            pointers[i] = base + at
        self._stream.value = stream
        for call in self.calls:
            status = start(*call)
            if status:
                raise DeviceError(f'device "cuda": expected a kernel to start, got error {status}')


class CudaBackend:
    """`Backend` on torch tensors, float32, of any CUDA device.

    Tensors are contiguous. A triangle with a sigma that is not positive and finite is not there,
    and counts are cut to what there is: to look at them would mean to wait for the device.

    Raises:
        DeviceError: CUDA, cuda-bindings or NVRTC is not there.
    """

    name = "cuda"
    discrete = True

    def __init__(self) -> None:
        try:
            driver = import_module("cuda.bindings.driver")
        except ImportError as error:
            raise DeviceError(
                'device "cuda": expected the package cuda-bindings, got an environment without '
                "it; install the one of torch's CUDA version, such as cuda-bindings==13.*"
            ) from error
        if not torch.cuda.is_available():
            raise DeviceError(
                'device "cuda": expected an NVIDIA GPU that torch can use, got none; look at '
                "torch.cuda.is_available()"
            )
        self._driver: Any = driver
        # cuda-bindings' own call looks at each argument, which takes as long as the launch.
        self._start: Any = ctypes.CDLL(_library()).cuLaunchKernel
        self._bound = threading.local()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.adapter: str | None = torch.cuda.get_device_name(self.device)
        self._lock = threading.Lock()
        self._modules: dict[tuple[int, tuple[tuple[int, int], ...]], dict[str, int]] = {}
        self._loaded: list[tuple[int, Any]] = []
        self._plans: dict[Any, Prepared] = {}
        self._scratch: dict[tuple[int, int], Tensor] = {}
        self._budgets: dict[int, int] = {}
        self._closed = False

    def close(self) -> None:
        """Free scratch memory and kernels, once the device has done what was asked of it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._plans.clear()
            self._modules.clear()
            loaded, self._loaded = self._loaded, []
            devices = {index for index, _ in loaded} | {index for index, _ in self._scratch}
            for index in sorted(devices):
                with contextlib.suppress(RuntimeError), torch.cuda.device(index):
                    torch.cuda.synchronize()
                    for owner, module in loaded:
                        if owner == index:
                            self._driver.cuModuleUnload(module)
            self._scratch.clear()

    def __enter__(self) -> CudaBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What `Backend` asks for.

    def forward(self, scene: Scene, raster: Raster) -> Tensor:
        """See `Backend.forward`."""
        settings = self._settings(scene, raster, plan.FORWARD)
        params: Tensor = scene.params
        images = params.new_empty((settings.items, raster.height, raster.width, raster.channels))
        self._draw(settings, _inputs(scene) | {"images": images})
        return images

    def backward(self, scene: Scene, raster: Raster, grad_images: Any) -> Gradients:
        """See `Backend.backward`."""
        return self._differentiate(scene, raster, plan.BACKWARD, grad_images)[1]

    def fused_mse(self, scene: Scene, raster: Raster, targets: Any) -> tuple[Tensor, Gradients]:
        """See `Backend.fused_mse`."""
        return self._differentiate(scene, raster, plan.FUSED, targets)

    def fused_loss(
        self,
        params: Tensor,
        targets: Tensor,
        sigma: float,
        background: tuple[float, float, float],
        kernel: Kernel,
        support: Support,
    ) -> tuple[Tensor, Tensor]:
        """`fused_mse` of full scenes with numbers, and without gradients to those: the short way.

        Args:
            params: [B, T, 10] float32, contiguous; B of 1 or more.
            targets: [B, H, W, 3] float32, contiguous, on the same device.
            sigma: Of all triangles.
            background: Of all items.
            kernel: As in `Raster`.
            support: As in `Raster`.
        Returns:
            Losses [B] and gradients [B, T, 10].
        """
        shape = targets.shape
        device = params.device
        key = (params.shape, shape, sigma, background, kernel, support, device.index)
        found = self._plans.get(key)
        if found is None:
            raster = Raster(shape[1], shape[2], kernel, support)
            settings = plan.Settings(
                shape[0], params.shape[1], raster, plan.FUSED, sigma, background, all_counts=True
            )
            found = self._prepared(key, settings, device.index)
            if found is None:  # too large for one piece
                return self._fused_in_pieces(settings, params, targets)
        grads, losses = torch.empty_like(params), params.new_empty(shape[0])
        with self._lock, _on(device.index):
            stream = _stream(device.index)
            base = self._memory(found.scratch, device, stream)
            spare = base + found.scratch - 4 * shape[0] * (params.shape[1] + 3)
            pointers = found.pointers
            pointers[_PARAMS] = params.data_ptr()
            pointers[_GIVEN] = targets.data_ptr()
            pointers[_GRADS] = grads.data_ptr()
            pointers[_LOSSES] = losses.data_ptr()
            pointers[_GRAD_SIGMA] = spare
            pointers[_GRAD_BACKGROUND] = spare + 4 * shape[0] * params.shape[1]
            self._bind(device.index)
            found.launch(self._start, stream, base)
        return losses, grads

    def _fused_in_pieces(
        self, settings: plan.Settings, params: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        grads, losses = torch.empty_like(params), params.new_empty(params.shape[0])
        tensors = {"params": params, "given": targets, "grads": grads, "losses": losses}
        tensors["grad_sigma"] = params.new_empty(params.shape[:2])
        tensors["grad_background"] = params.new_empty((params.shape[0], 3))
        self._draw(settings, tensors)
        return losses, grads

    def fit_engine(self) -> CudaEngine:
        """For a fit that stays on the device."""
        return CudaEngine(self)

    # Inside.

    def _settings(self, scene: Scene, raster: Raster, mode: int) -> plan.Settings:
        params = scene.params
        if self._closed:
            raise DeviceError("this CudaBackend is closed; open another")
        if params.dtype != torch.float32:
            raise DtypeError(
                f'params: expected float32 on device "cuda", got {params.dtype}; use '
                'device="cpu" or "reference" for float64'
            )
        if params.device.type != "cuda":
            raise DeviceError(f'device "cuda": expected CUDA tensors, got {params.device}')
        return plan.Settings(params.shape[0], params.shape[1], raster, mode)

    def _differentiate(
        self, scene: Scene, raster: Raster, mode: int, given: Tensor
    ) -> tuple[Tensor, Gradients]:
        settings = self._settings(scene, raster, mode)
        params = scene.params
        batch, triangles = params.shape[0], params.shape[1]
        grads: Tensor = torch.empty_like(params, memory_format=torch.contiguous_format)
        grad_sigma = params.new_empty((batch, triangles))
        grad_background = params.new_empty((batch, 3))
        losses: Tensor = params.new_empty(batch)
        outputs = {
            "grads": grads,
            "grad_sigma": grad_sigma,
            "grad_background": grad_background,
            "losses": losses,
        }
        self._draw(settings, _inputs(scene) | {"given": given.contiguous()} | outputs)
        return losses, Gradients(grads, grad_sigma, grad_background)

    def _draw(self, settings: plan.Settings, tensors: dict[str, Tensor]) -> None:
        """All of a call, in as many regions as it takes."""
        device = tensors["params"].device
        if settings.items == 0:
            return
        with self._lock, _on(device.index):
            key = (settings, device.index)
            found = self._plans.get(key) or self._prepare(key, settings, device.index)
            if found is not None:
                self._point(found, tensors)
                stream = _stream(device.index)
                self._bind(device.index)
                found.launch(self._start, stream, self._memory(found.scratch, device, stream))
                return
            self._draw_regions(settings, tensors, device)

    def _draw_regions(
        self, settings: plan.Settings, tensors: dict[str, Tensor], device: torch.device
    ) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise DeviceError(
                'device "cuda": expected a call whose scratch memory is known beforehand, to '
                "capture it in a CUDA graph, got one that has to be measured; make the batch or "
                "the image smaller"
            )
        height = plan.tile_size(LANES)[1]
        measured: dict[str, Tensor] = {}

        def scratch(sizes: dict[str, int]) -> dict[str, Tensor]:
            return {
                name: torch.empty(max(16, size), dtype=torch.uint8, device=device)
                for name, size in sizes.items()
                if name in _SCRATCH
            }

        def sliced(region: plan.Region) -> dict[str, Tensor]:
            items = slice(region.item, region.item + region.items)
            first = region.first_row(height)
            rows = slice(first, first + region.pixel_rows(height, settings.raster.height))
            return {
                name: (tensor[items, rows] if name in ("given", "images") else tensor[items])
                for name, tensor in tensors.items()
            }

        def measure(region: plan.Region) -> int:
            measured.clear()
            measured.update(scratch(plan.sizes(settings, region, 0, LANES)))
            steps = plan.measure_steps(settings, region, LANES)
            self._run(steps, {**sliced(region), **measured}, device)
            return int(measured["totals"][:8].view(torch.int64).item())

        for region, slots, total in plan.regions(
            settings, LANES, largest=_LARGEST, scratch=self._budget(device), measure=measure
        ):
            found = scratch(plan.sizes(settings, region, total, LANES))
            if slots == 0 and settings.mode != plan.FORWARD:
                found |= {name: measured[name] for name in ("bounds", "geometry") if measured}
            part = sliced(region)
            contiguous = {name: tensor.contiguous() for name, tensor in part.items()}
            add = region.x > 0 or region.y > 0
            steps = plan.draw_steps(settings, region, slots, LANES, add)
            self._run(steps, {**contiguous, **found}, device)
            for name, tensor in part.items():
                if contiguous[name] is not tensor and name not in ("given", "params"):
                    tensor.copy_(contiguous[name])

    def _run(
        self, steps: tuple[plan.Dispatch, ...], tensors: dict[str, Tensor], device: torch.device
    ) -> None:
        prepared = self._launches(steps, device.index, {}, 0)
        self._point(prepared, tensors)
        self._bind(device.index)
        prepared.launch(self._start, _stream(device.index))

    def _point(self, prepared: Prepared, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            prepared.pointers[_INDEX[name]] = tensor.data_ptr()

    def _prepared(self, key: Any, settings: plan.Settings, index: int) -> Prepared | None:
        with self._lock:
            if self._closed:
                raise DeviceError("this CudaBackend is closed; open another")
            return self._prepare(key, settings, index)

    def _prepare(self, key: Any, settings: plan.Settings, index: int) -> Prepared | None:
        """Launches of a call in one piece; None where it takes several, or has to be measured."""
        device = torch.device("cuda", index)
        everything = plan.whole(settings, LANES, _LARGEST, self._budget(device))
        if everything is None:
            return None
        region, slots, total = everything
        offsets, end = {}, 0
        needs = plan.sizes(settings, region, total, LANES)
        for name in _SCRATCH:
            if name in needs:
                offsets[name] = end
                end += -(-needs[name] // _ALIGN) * _ALIGN
        # And at the end, gradients that nobody asked for.
        end += 4 * settings.items * (settings.triangles + 3)
        steps = plan.draw_steps(settings, region, slots, LANES)
        prepared = self._launches(steps, index, offsets, end)
        if len(self._plans) >= _PLANS:  # the oldest goes
            del self._plans[next(iter(self._plans))]
        self._plans[key] = prepared
        return prepared

    def _memory(self, size: int, device: torch.device, stream: int) -> int:
        """The address of scratch memory for a call on the current stream."""
        kept = self._scratch.get((device.index, stream))
        if torch.cuda.is_current_stream_capturing():
            kept = self._take(size, device)
        elif kept is None or kept.numel() < size:
            self._scratch.pop((device.index, stream), None)  # first, so that both need not fit
            kept = None
            kept = self._scratch[device.index, stream] = self._take(size, device)
        address: int = kept.data_ptr()
        return address

    def _take(self, size: int, device: torch.device) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f'device "cuda": expected {size / 2**20:.0f} MiB of scratch memory, got: {error}; '
                "draw a smaller batch"
            ) from error

    def _budget(self, device: torch.device) -> int:
        found = self._budgets.get(device.index)
        if found is None:
            total = torch.cuda.get_device_properties(device).total_memory
            found = self._budgets[device.index] = int(total) // _SHARE
        return found

    def _launches(
        self, steps: Sequence[plan.Dispatch], index: int, offsets: dict[str, int], scratch: int
    ) -> Prepared:
        prepared = Prepared(steps[0].settings, offsets, scratch)
        for step in steps:
            prepared.add(self._functions(index, step.constants)[step.kernel], step.groups)
        return prepared

    def functions(self, index: int, constants: tuple[tuple[int, int], ...]) -> dict[str, int]:
        """Kernels by name, compiled for some constants."""
        with self._lock:
            if self._closed:
                raise DeviceError("this CudaBackend is closed; open another")
            return self._functions(index, constants)

    def _functions(self, index: int, constants: tuple[tuple[int, int], ...]) -> dict[str, int]:
        found = self._modules.get((index, constants))
        if found is None:
            major, minor = torch.cuda.get_device_capability(index)
            macros = [(plan.CONSTANT_NAMES[i], value) for i, value in constants]
            code = compiled(f"sm_{major}{minor}", macros)
            with _on(index):
                self._bind(index)
                module = self._called("cuModuleLoadData", code)
                found = {
                    name: int(self._called("cuModuleGetFunction", module, name.encode()))
                    for name in plan.KERNELS
                }
            self._loaded.append((index, module))
            self._modules[index, constants] = found
        return found

    def _bind(self, index: int) -> None:
        """Make torch's context current in this thread, where torch has done nothing yet."""
        if getattr(self._bound, "index", None) != index:
            context = self._called("cuDevicePrimaryCtxRetain", index)
            (status,) = self._driver.cuCtxSetCurrent(context)
            if status != 0:
                raise DeviceError(f'device "cuda": expected a context, got {status!r}')
            self._driver.cuDevicePrimaryCtxRelease(index)  # torch holds it
            self._bound.index = index

    def _called(self, function: str, *args: Any) -> Any:
        status, value = getattr(self._driver, function)(*args)
        if status != 0:
            raise DeviceError(f'device "cuda": expected {function} to succeed, got {status!r}')
        return value


class CudaEngine:
    """`Engine` of a fit on a CUDA device: kernels launched one after the other, without waiting."""

    lanes = LANES

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._device = backend.device
        self._buffers: dict[str, Tensor] = {}
        self._prepared = Prepared(bytes(plan.SETTINGS_BYTES), {}, 0)
        self.largest = backend._budget(self._device)

    def open(self, sizes: dict[str, int]) -> None:
        """See `Engine.open`."""
        for name, size in sizes.items():
            buffer = torch.zeros(-(-size // 4), dtype=torch.float32, device=self._device)
            self._buffers[name] = buffer
            self._prepared.pointers[_INDEX[name]] = buffer.data_ptr()

    def write(self, name: str, values: Any) -> None:
        """See `Engine.write`."""
        flat = torch.from_numpy(np.ascontiguousarray(values, np.float32)).ravel()
        self._buffers[name][: flat.numel()].copy_(flat)

    def read(self, name: str, count: int) -> Any:
        """See `Engine.read`."""
        return self._buffers[name][:count].cpu().numpy()

    def run(self, steps: Sequence[plan.Dispatch]) -> None:
        """See `Engine.run`."""
        prepared = self._prepared
        functions: dict[str, int] = {}
        constants: object = None
        with _on(self._device.index):
            self._backend._bind(self._device.index)
            stream = _stream(self._device.index)
            for step in steps:
                if step.constants is not constants:
                    constants = step.constants
                    functions = self._backend.functions(self._device.index, step.constants)
                prepared.settings(step.settings)
                prepared.calls.clear()
                prepared.add(functions[step.kernel], step.groups)
                prepared.launch(self._backend._start, stream)

    def close(self) -> None:
        """See `Engine.close`."""
        self._buffers.clear()


class OnHost:
    """A `CudaBackend` for NumPy arrays, which go there and back."""

    name = "cuda"
    discrete = True

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self.adapter = backend.adapter

    def forward(self, scene: Scene, raster: Raster) -> Any:
        """See `Backend.forward`."""
        return self._backend.forward(self._scene(scene), raster).cpu().numpy()

    def backward(self, scene: Scene, raster: Raster, grad_images: Any) -> Gradients:
        """See `Backend.backward`."""
        there = self._there(grad_images)
        return _fetched(self._backend.backward(self._scene(scene), raster, there))

    def fused_mse(self, scene: Scene, raster: Raster, targets: Any) -> tuple[Any, Gradients]:
        """See `Backend.fused_mse`."""
        there = self._there(targets)
        losses, gradients = self._backend.fused_mse(self._scene(scene), raster, there)
        return losses.cpu().numpy(), _fetched(gradients)

    def fit_engine(self) -> CudaEngine:
        """See `CudaBackend.fit_engine`."""
        return self._backend.fit_engine()

    def close(self) -> None:
        """Close the backend."""
        self._backend.close()

    def _scene(self, scene: Scene) -> Scene:
        arrays = (scene.params, scene.sigma, scene.background, scene.counts)
        return Scene(*(self._there(array) for array in arrays))

    def _there(self, array: Any) -> Tensor:
        # Copied: torch warns of what may not be written to, though nobody will.
        return torch.from_numpy(np.array(array, order="C")).to(self._backend.device)


def _fetched(gradients: Gradients) -> Gradients:
    found = (gradients.params, gradients.sigma, gradients.background)
    return Gradients(*(one.cpu().numpy() for one in found))


def _inputs(scene: Scene) -> dict[str, Tensor]:
    return {
        "params": scene.params.contiguous(),
        "sigma": scene.sigma.contiguous(),
        "background": scene.background.contiguous(),
        "counts": scene.counts.to(torch.int32).contiguous(),
    }


def _library() -> str:
    return "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def _stream(index: int) -> int:
    """torch's current stream of a device, as the driver knows it."""
    if _raw_stream is not None:
        raw: int = _raw_stream(index)
        return raw
    found: int = torch.cuda.current_stream(index).cuda_stream
    return found


# Without making an object of it, which takes longer than a launch.
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


@contextlib.contextmanager
def _guarded(index: int) -> Iterator[None]:
    with torch.cuda.device(index):
        yield


def _on(index: int) -> contextlib.AbstractContextManager[Any]:
    """Makes a device the current one; costs nothing where it is."""
    if torch.cuda.current_device() == index:
        return contextlib.nullcontext()
    return _guarded(index)
