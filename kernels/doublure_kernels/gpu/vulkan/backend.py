"""`Backend` on NumPy arrays through Vulkan, and the engine of a fit that stays on the device."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import vulkan as vk
from numpy.typing import NDArray

from ...errors import DeviceError, DtypeError
from ...scene import PARAMS, Gradients, Raster, Scene
from .. import plan, selftest
from .adapters import error_name
from .device import Buffers, Device

if TYPE_CHECKING:
    from .interop import Shared

__all__ = ["VulkanBackend", "VulkanEngine"]

_log = logging.getLogger(__name__)

Array = NDArray[Any]


class VulkanBackend:
    """`Backend` on one Vulkan device.

    Calls from several threads take turns. A device that is lost gives an error to the call that it
    failed; the next call opens it anew.

    Args:
        choice: A device's UUID, index, kind or a part of its name; None takes what
            DOUBLURE_VULKAN_DEVICE says, else the best one.
        staged: Copy through staging memory even where the host could write in place.
    Raises:
        DeviceError: There is none that fits, it cannot be opened, or it draws wrong.
    """

    name = "vulkan"

    def __init__(self, choice: str | None = None, *, staged: bool = False) -> None:
        self._choice, self._staged = choice, staged
        self._lock = threading.RLock()
        self._opened: tuple[Device, Buffers] | None = None
        self._engines: list[VulkanEngine] = []
        self._shared: dict[int, Shared] = {}
        self._no_sharing: set[int] = set()
        self._closed = False
        self.adapter: str | None = None
        with self._lock, self._worded():
            adapter = self._open()[0].adapter
        self.adapter = adapter.name
        self.kind = adapter.kind
        self.discrete = adapter.kind in ("discrete", "virtual")
        self.uuid, self.driver = adapter.uuid, adapter.driver

    def close(self) -> None:
        """See `Backend.close`."""
        with self._lock:
            self._closed = True
            self._drop()

    def __enter__(self) -> VulkanBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def device(self) -> Device | None:
        """What is open now."""
        return self._opened[0] if self._opened else None

    def forward(self, scene: Scene, raster: Raster) -> Any:
        """See `Backend.forward`."""
        shape = (len(scene.params), raster.height, raster.width, raster.channels)
        images = _zeros(scene.params, shape)
        self._draw(scene, raster, plan.FORWARD, None, {"images": images})
        return images

    def backward(self, scene: Scene, raster: Raster, grad_images: Any) -> Gradients:
        """See `Backend.backward`."""
        return self._differentiate(scene, raster, plan.BACKWARD, grad_images)[1]

    def fused_mse(self, scene: Scene, raster: Raster, targets: Any) -> tuple[Any, Gradients]:
        """See `Backend.fused_mse`."""
        return self._differentiate(scene, raster, plan.FUSED, targets)

    def fit_engine(self) -> VulkanEngine:
        """For a fit that stays on the device."""
        with self._lock, self._worded():
            engine = VulkanEngine(self, self._open()[0])
            self._engines.append(engine)
        return engine

    def shares(self, index: int) -> bool:
        """Whether torch tensors of a CUDA device can be drawn without passing through the host.

        Then they may stand in scenes, targets and gradients, and what is returned is on that
        device too.
        """
        with self._lock:
            if self._closed or index in self._no_sharing:
                return False
            if index not in self._shared:
                from .interop import refuse_capture

                refuse_capture(index)
            try:
                with self._worded():
                    return self._share(index) is not None
            except RuntimeError as error:  # CUDA's too
                _log.warning("copying CUDA tensors through the host: %s", error)
                if not isinstance(error.__cause__, vk.VkError):  # else it may pass
                    self._no_sharing.add(index)
                return False

    # Inside.

    def _share(self, index: int) -> Shared | None:
        """What shares memory with a CUDA device; None where it is another one, or cannot."""
        device = self._open()[0]
        found = self._shared.get(index)
        if found is not None and found.broken:
            del self._shared[index]
            found.close()
            found = None
        if found is None:
            if not device.adapter.shareable:
                return None
            from .interop import Shared, uuid_of

            if uuid_of(index) != device.adapter.uuid:
                return None
            found = self._shared[index] = Shared(device, index)
        return found

    def _differentiate(
        self, scene: Scene, raster: Raster, mode: int, given: Any
    ) -> tuple[Any, Gradients]:
        params = scene.params
        batch, triangles = params.shape[:2]
        outputs = {
            "grads": _zeros(params, (batch, triangles, PARAMS)),
            "grad_sigma": _zeros(params, (batch, triangles)),
            "grad_background": _zeros(params, (batch, 3)),
            "losses": _zeros(params, (batch,)),
        }
        self._draw(scene, raster, mode, given, outputs)
        losses = outputs.pop("losses")
        return losses, Gradients(*outputs.values())

    def _draw(
        self, scene: Scene, raster: Raster, mode: int, given: Any, outputs: dict[str, Any]
    ) -> None:
        """All of a call, in as many regions as it takes."""
        if not isinstance(scene.params, np.ndarray):
            self._draw_shared(scene, raster, mode, given, outputs)
            return
        _check_dtype(scene.params.dtype, "float32")
        settings, inputs = _settings(scene, raster, mode)
        if given is not None:
            inputs["given"] = np.asarray(given, np.float32)
        with self._lock, self._worded():
            device, buffers = self._open()

            def measure(region: plan.Region) -> int:
                return self._measure(device, buffers, settings, region, inputs)

            for region, slots, total in _regions(device, settings, measure):
                self._region(device, buffers, settings, region, slots, total, inputs, outputs)

    def _draw_shared(
        self, scene: Scene, raster: Raster, mode: int, given: Any, outputs: dict[str, Any]
    ) -> None:
        """As `_draw`, of tensors on a CUDA device, for which `shares` is true."""
        params = scene.params
        _check_dtype(params.dtype, "torch.float32")
        settings = plan.Settings(params.shape[0], params.shape[1], raster, mode)
        inputs = {
            "params": params,
            "sigma": scene.sigma,
            "background": scene.background,
            "counts": scene.counts,
        }
        if given is not None:
            inputs["given"] = given
        with self._lock, self._worded():
            shared = self._share(params.device.index)
            if shared is None:
                raise DeviceError(
                    f'device "vulkan": expected tensors on the host or on {self._who()}, got '
                    f"some on {params.device}; move them"
                )
            device = shared.device

            def measure(region: plan.Region) -> int:
                _fits(device, plan.sizes(settings, region, 0, device.adapter.lanes))
                return shared.measure(settings, region, _part(inputs, region, device, settings))

            for region, slots, total in _regions(device, settings, measure):
                _fits(device, plan.sizes(settings, region, total, device.adapter.lanes))
                before = _part(inputs, region, device, settings)
                after = _part(outputs, region, device, settings)
                shared.draw(settings, region, slots, total, before, after)

    def _measure(
        self,
        device: Device,
        buffers: Buffers,
        settings: plan.Settings,
        region: plan.Region,
        inputs: dict[str, Array],
    ) -> int:
        lanes = device.adapter.lanes
        sizes = plan.sizes(settings, region, 0, lanes)
        _fits(device, sizes)
        buffers.reserve(sizes)
        up = _part(inputs, region, device, settings)
        up.pop("given", None)
        program = buffers.program(
            (settings, region, "measure"),
            lambda: plan.measure_steps(settings, region, lanes),
            {name: values.size * 4 for name, values in up.items()},
            {"totals": 8},
        )
        for name, values in up.items():
            program.put(name, values)
        program.run()
        low, high = program.get("totals", (2,), np.uint32)
        return int(low) | int(high) << 32

    def _region(
        self,
        device: Device,
        buffers: Buffers,
        settings: plan.Settings,
        region: plan.Region,
        slots: int,
        total: int,
        inputs: dict[str, Array],
        outputs: dict[str, Array],
    ) -> None:
        """Draw a region and fetch what it gives.

        Where its slots were measured, bounds and geometry are still those of its `_measure`.
        """
        lanes = device.adapter.lanes
        sizes = plan.sizes(settings, region, total, lanes)
        _fits(device, sizes)
        up = _part(inputs, region, device, settings)
        down = _part(outputs, region, device, settings)
        add = region.x > 0 or region.y > 0
        if add:  # gradients so far are what this one's are added to
            up |= {name: down[name] for name in down if name != "images"}
        buffers.reserve(sizes)
        program = buffers.program(
            (settings, region, slots, add),
            lambda: plan.draw_steps(settings, region, slots, lanes, add),
            {name: values.size * 4 for name, values in up.items()},
            {name: values.size * 4 for name, values in down.items()},
        )
        for name, values in up.items():
            program.put(name, values)
        program.run()
        for name, values in down.items():
            values[...] = program.get(name, values.shape)

    def _open(self) -> tuple[Device, Buffers]:
        """The device, opened if it is not; the caller holds the lock."""
        if self._closed:
            raise DeviceError(
                "this VulkanBackend is closed, by close() or shutdown(); open another, or call "
                "again where it was the process's own"
            )
        if self._opened is None:
            device = Device(self._choice, staged=self._staged)
            try:
                self._opened = device, Buffers(device)
            except BaseException:
                device.close()
                raise
            if not device.tested:
                self._test(device)
        return self._opened

    def _test(self, device: Device) -> None:
        self.adapter = device.adapter.name
        try:
            selftest.check(self)
        except BaseException:
            self._drop()
            raise
        device.note_tested()

    def _drop(self) -> None:
        """Free everything; buffers before the device that they are on."""
        engines, self._engines = self._engines, []
        shared, self._shared = self._shared, {}
        opened, self._opened = self._opened, None
        if opened is None:
            return
        device, buffers = opened
        # First, as only they know what to do where CUDA will never let Vulkan go on.
        for one in shared.values():
            one.close()
        self._no_sharing.clear()
        # Of a lost device nothing succeeds, and everything still has to be destroyed.
        with contextlib.suppress(vk.VkError):
            vk.vkDeviceWaitIdle(device.handle)
        device.forget_pending()
        for engine in engines:
            engine.drop()
        buffers.close()
        device.close()

    @contextlib.contextmanager
    def _worded(self) -> Iterator[None]:
        """Vulkan's errors in words; a lost device is closed, so that the next call opens it."""
        try:
            yield
        except vk.VkErrorDeviceLost as error:
            self._drop()
            raise DeviceError(
                f'device "vulkan": expected the device to finish, got a lost one ({self._who()}); '
                "nothing was drawn, and the next call opens it anew. If it happens again, draw "
                "less at once (drivers end what runs for seconds), or look at the system's log"
            ) from error
        except (vk.VkErrorOutOfDeviceMemory, vk.VkErrorOutOfHostMemory) as error:
            raise DeviceError(
                f'device "vulkan": expected more free memory on {self._who()}, got none; draw a '
                "smaller batch or image, or call shutdown() in whatever else draws there"
            ) from error
        except vk.VkError as error:
            raise DeviceError(
                f'device "vulkan": expected every call to succeed on {self._who()}, got '
                f"{error_name(error)}; update the driver if it happens again"
            ) from error

    def _who(self) -> str:
        return str(getattr(self, "adapter", None) or "the device")


class VulkanEngine:
    """`Engine` of a fit on a Vulkan device: buffers of its own, one submission a run."""

    def __init__(self, backend: VulkanBackend, device: Device) -> None:
        self._backend, self._device = backend, device
        self.lanes, self.largest = device.adapter.lanes, device.adapter.largest
        self._buffers: Buffers | None = None

    def open(self, sizes: dict[str, int]) -> None:
        """See `Engine.open`."""
        with self._backend._lock, self._backend._worded():
            _fits(self._device, sizes)
            self._alive().reserve(sizes)

    def write(self, name: str, values: Any) -> None:
        """See `Engine.write`."""
        flat = np.ascontiguousarray(values, np.float32).ravel()
        with self._backend._lock, self._backend._worded():
            program = self._alive().program(
                ("write", name, flat.size), tuple, {name: flat.nbytes}, {}
            )
            program.put(name, flat)
            program.run()

    def read(self, name: str, count: int) -> Any:
        """See `Engine.read`."""
        with self._backend._lock, self._backend._worded():
            program = self._alive().program(("read", name, count), tuple, {}, {name: 4 * count})
            program.run()
            return program.get(name, (count,))

    def run(self, steps: Sequence[plan.Dispatch]) -> None:
        """See `Engine.run`."""
        if not steps:
            return
        with self._backend._lock, self._backend._worded():
            buffers, device = self._alive(), self._device
            commands = device.begin()
            try:
                device.dispatch(commands, buffers.descriptors, steps)
                device.end(commands)
                device.submit(commands)
            finally:
                device.settle()
                device.drop(commands)

    def close(self) -> None:
        """See `Engine.close`."""
        with self._backend._lock:
            if self in self._backend._engines:
                self._backend._engines.remove(self)
                self.drop()

    def drop(self) -> None:
        """Free the buffers; the backend does it too, before it closes the device."""
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None

    def _alive(self) -> Buffers:
        if self not in self._backend._engines:
            raise DeviceError(
                'device "vulkan": expected the device that this fit began on, got one that was '
                "lost or closed since; resume the fit from its last checkpoint"
            )
        if self._buffers is None:
            self._buffers = Buffers(self._device)
        return self._buffers


def _settings(scene: Scene, raster: Raster, mode: int) -> tuple[plan.Settings, dict[str, Array]]:
    """What a call is, and the arrays it takes: broadcast values go with its settings."""
    batch, triangles = scene.params.shape[:2]
    inputs = {"params": scene.params}
    sigma: float | None = None
    background: tuple[float, float, float] | None = None
    if scene.sigma.size and not any(scene.sigma.strides):
        sigma = float(scene.sigma.flat[0])
    else:
        inputs["sigma"] = np.asarray(scene.sigma, np.float32)
    if batch and (batch == 1 or scene.background.strides[0] == 0):
        r, g, b = (float(value) for value in scene.background[0])
        background = r, g, b
    else:
        inputs["background"] = np.asarray(scene.background, np.float32)
    all_counts = bool((scene.counts >= triangles).all())
    if not all_counts:
        inputs["counts"] = np.asarray(scene.counts, np.int32)
    settings = plan.Settings(
        batch, triangles, raster, mode, sigma, background, all_counts=all_counts
    )
    return settings, inputs


def _check_dtype(dtype: Any, wanted: str) -> None:
    if str(dtype) != wanted:
        raise DtypeError(
            f'params: expected float32 on device "vulkan", got {dtype}; use '
            'device="cpu" or "reference" for float64'
        )


def _zeros(like: Any, shape: tuple[int, ...]) -> Any:
    """Float32 where `like` is: NumPy's, or torch's on its device."""
    return np.zeros(shape, np.float32) if isinstance(like, np.ndarray) else like.new_zeros(shape)


def _regions(
    device: Device, settings: plan.Settings, measure: Callable[[plan.Region], int]
) -> Iterator[tuple[plan.Region, int, int]]:
    adapter = device.adapter
    return plan.regions(
        settings, adapter.lanes, largest=adapter.largest, scratch=device.scratch, measure=measure
    )


def _part(
    arrays: dict[str, Any], region: plan.Region, device: Device, settings: plan.Settings
) -> dict[str, Any]:
    """Of arrays or tensors, what a region needs."""
    height = plan.tile_size(device.adapter.lanes)[1]
    first = region.first_row(height)
    items = slice(region.item, region.item + region.items)
    rows = slice(first, first + region.pixel_rows(height, settings.raster.height))
    return {
        name: values[items, rows] if name in ("given", "images") else values[items]
        for name, values in arrays.items()
    }


def _fits(device: Device, sizes: dict[str, int]) -> None:
    """Raise where even the smallest piece needs too large a buffer."""
    largest = device.adapter.largest
    for name, size in sizes.items():
        if size > largest:
            raise DeviceError(
                f'device "vulkan": expected buffers of at most {largest / 2**20:.1f} MiB, which '
                f"{device.adapter.name} allows, got {size / 2**20:.1f} MiB for {name}; use fewer "
                'triangles or a smaller image, or device="cpu"'
            )
