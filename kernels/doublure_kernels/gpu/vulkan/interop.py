"""Drawing torch's CUDA tensors through Vulkan without a way over the host.

Vulkan exports its buffers' memory, CUDA maps it, and torch's kernels copy in and out on the
device. A timeline semaphore, exported too, orders both on torch's current stream, so that nobody
waits on the host: copies in, CUDA signals n, Vulkan waits for n, draws and signals n + 1, for which
CUDA waits before copies out.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import vulkan as vk
from torch import Tensor

from ...errors import DeviceError
from .. import plan
from .device import Buffer, Buffers, Device, Program

__all__ = ["Shared", "refuse_capture", "uuid_of"]

_ffi, _lib = vk.ffi, vk.lib
_WAIT_NS = 200_000_000
_TYPES = {"counts": torch.int32}


def uuid_of(index: int) -> str:
    """Of a CUDA device, as Vulkan's adapters have it; empty where torch does not know."""
    found = getattr(torch.cuda.get_device_properties(index), "uuid", "")
    return str(found).lower().removeprefix("gpu-").replace("-", "")


def refuse_capture(index: int) -> None:
    """Raise where torch's current stream records a CUDA graph, which Vulkan cannot be part of.

    Raises:
        DeviceError: It does.
    """
    with torch.cuda.device(index):
        if torch.cuda.is_current_stream_capturing():
            raise DeviceError(
                'device "vulkan": expected a stream that records no CUDA graph, got one that '
                'does; draw with device="cuda" there'
            )


class Shared:
    """Buffers and a timeline that Vulkan and CUDA have together. Called by one thread at a time.

    Args:
        device: Vulkan's, with a shareable adapter.
        index: CUDA's, of the same UUID.
    Raises:
        DeviceError: cuda-bindings is not there, or CUDA refuses.
        vk.VkError: Vulkan does.
    """

    def __init__(self, device: Device, index: int) -> None:
        try:
            self._driver: Any = import_module("cuda.bindings.driver")
        except ImportError as error:
            raise DeviceError(
                f"expected the package cuda-bindings, got an environment without it ({error})"
            ) from error
        self.device, self._index = device, index
        self._where = torch.device("cuda", index)
        self._imported: dict[str, tuple[Buffer, Any, Any, Tensor]] = {}
        self._closed = self.broken = False
        self._last = 0  # of the timeline, once all that was submitted is done
        self._free: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stack = contextlib.ExitStack()
        try:
            with torch.cuda.device(index):
                torch.cuda.current_stream().synchronize()  # makes the context, if none is there
                self._make_timeline()
            self.buffers = Buffers(device, exported=True, settle=self.settle)
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Wait for what runs, on both sides, and free everything."""
        with contextlib.suppress(vk.VkError, RuntimeError):
            self.settle()
        self._closed = True  # of a lost device nothing can be waited for any more
        with contextlib.suppress(RuntimeError):
            self._release(tuple(self._imported))
        with contextlib.suppress(vk.VkError):
            self.buffers.close()
        with contextlib.suppress(RuntimeError), torch.cuda.device(self._index):
            self._stack.close()

    def settle(self) -> None:
        """Wait until neither side uses the buffers."""
        if self._closed:
            return
        self.device.settle()
        stream = torch.cuda.current_stream(self._index)
        semaphores = _ffi.new("VkSemaphore[1]", [self._semaphore])
        values = _ffi.new("uint64_t[1]", [self._last])
        info = _ffi.new(
            "VkSemaphoreWaitInfo *",
            {
                "sType": vk.VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO,
                "semaphoreCount": 1,
                "pSemaphores": semaphores,
                "pValues": values,
            },
        )
        while (status := _lib.vkWaitSemaphores(self.device.handle, info, _WAIT_NS)) != 0:
            if status != vk.VK_TIMEOUT:
                raise vk.exception_codes.get(status, vk.VkErrorUnknown)
            try:
                stream.query()
            except RuntimeError:
                self._let_go()
                raise
        self._free.synchronize()

    def measure(
        self, settings: plan.Settings, region: plan.Region, inputs: Mapping[str, Tensor]
    ) -> int:
        """How many slots a region needs; waits for the answer.

        Args:
            settings: Of the call; everything is in buffers.
            region: See `plan.measure_steps`.
            inputs: By binding, the region's part.
        """
        lanes = self.device.adapter.lanes
        self._prepare(plan.sizes(settings, region, 0, lanes))
        program = self.buffers.program(
            (settings, region, "measure"),
            lambda: plan.measure_steps(settings, region, lanes),
            {},
            {},
        )
        first = {name: tensor for name, tensor in inputs.items() if name != "given"}
        with self._running(program, first):
            low, high = self._view("totals", (2,)).view(torch.int32).tolist()
        return int(low & 0xFFFFFFFF) | int(high & 0xFFFFFFFF) << 32

    def draw(
        self,
        settings: plan.Settings,
        region: plan.Region,
        slots: int,
        total: int,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
    ) -> None:
        """Draw a region on torch's current stream; returns before it is done.

        Args:
            settings: Of the call; everything is in buffers.
            region: See `plan.draw_steps`.
            slots: A triangle; 0 where `measure` came just before, for the same region.
            total: Slots in all.
            inputs: By binding, the region's part.
            outputs: By binding, likewise; written, or added to where others drew the item before.
        """
        lanes = self.device.adapter.lanes
        self._prepare(plan.sizes(settings, region, total, lanes))
        add = region.x > 0 or region.y > 0
        program = self.buffers.program(
            (settings, region, slots, add),
            lambda: plan.draw_steps(settings, region, slots, lanes, add),
            {},
            {},
        )
        before = {**inputs}
        if add:
            before |= {name: tensor for name, tensor in outputs.items() if name != "images"}
        with self._running(program, before):
            for name, tensor in outputs.items():
                tensor.copy_(self._view(name, tensor.shape))

    # Inside.

    @contextlib.contextmanager
    def _running(self, program: Program, inputs: Mapping[str, Tensor]) -> Iterator[None]:
        """Copies in and kernels; what is asked of torch's stream inside comes after them."""
        with torch.cuda.device(self._index):
            stream = torch.cuda.current_stream()
            stream.query()  # makes the context this thread's, where it has done nothing yet
            try:
                stream.wait_event(self._free)  # another stream may still copy out
                for name, tensor in inputs.items():
                    self._view(name, tensor.shape).copy_(tensor)
                begin, end = self._last + 1, self._last + 2
                self._signal(begin, stream.cuda_stream)
                self._last = begin
                self._submit(program.commands, begin, end)
                self._last = end
                self._wait(end, stream.cuda_stream)
                yield
                self._free.record(stream)
            except BaseException:  # who knows what was asked for: the next call makes another
                self.broken = True
                raise

    def _prepare(self, needs: Mapping[str, int]) -> None:
        """Make buffers large enough; those that grow are unmapped first."""
        refuse_capture(self._index)
        grow = tuple(name for name, size in needs.items() if self.buffers[name].size < size)
        if grow:
            self.settle()
            self._release(grow)
            self.buffers.reserve(needs)

    def _let_go(self) -> None:
        """Signal for a CUDA that failed, so that Vulkan ends and can be closed."""
        reached = _ffi.new("uint64_t *")
        _lib.vkGetSemaphoreCounterValue(self.device.handle, self._semaphore, reached)
        if reached[0] < self._last - 1:
            info = _ffi.new(
                "VkSemaphoreSignalInfo *",
                {
                    "sType": vk.VK_STRUCTURE_TYPE_SEMAPHORE_SIGNAL_INFO,
                    "semaphore": self._semaphore,
                    "value": self._last - 1,
                },
            )
            _lib.vkSignalSemaphore(self.device.handle, info)

    def _make_timeline(self) -> None:
        kind = vk.VK_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD_BIT
        export = vk.VkExportSemaphoreCreateInfo(handleTypes=kind)
        timeline = vk.VkSemaphoreTypeCreateInfo(
            pNext=export, semaphoreType=vk.VK_SEMAPHORE_TYPE_TIMELINE, initialValue=0
        )
        info = vk.VkSemaphoreCreateInfo(pNext=timeline)
        handle = self.device.handle
        self._semaphore = vk.vkCreateSemaphore(handle, info, None)
        self._stack.callback(vk.vkDestroySemaphore, handle, self._semaphore, None)
        ask = vk.VkSemaphoreGetFdInfoKHR(semaphore=self._semaphore, handleType=kind)
        fd = vk.vkGetDeviceProcAddr(handle, "vkGetSemaphoreFdKHR")(handle, ask)
        driver = self._driver
        described = driver.CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC()
        kinds = driver.CUexternalSemaphoreHandleType
        described.type = kinds.CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD
        described.handle.fd = fd
        self._timeline = self._imported_by("cuImportExternalSemaphore", described, fd)
        self._stack.callback(driver.cuDestroyExternalSemaphore, self._timeline)

    def _release(self, names: tuple[str, ...]) -> None:
        with torch.cuda.device(self._index):
            torch.cuda.current_stream().query()  # see `_running`
            for name in names:
                if name in self._imported:
                    _, memory, address, _ = self._imported.pop(name)
                    self._driver.cuMemFree(address)
                    self._driver.cuDestroyExternalMemory(memory)

    def _view(self, name: str, shape: Sequence[int]) -> Tensor:
        """A buffer's beginning as a tensor of a shape."""
        buffer = self.buffers[name]
        found = self._imported.get(name)
        if found is None:
            found = self._imported[name] = (buffer, *self._import(buffer))
        flat = found[3].view(_TYPES.get(name, torch.float32))
        return flat[: math.prod(shape)].view(*shape)

    def _import(self, buffer: Buffer) -> tuple[Any, Any, Tensor]:
        handle, driver = self.device.handle, self._driver
        ask = vk.VkMemoryGetFdInfoKHR(
            memory=buffer.memory, handleType=vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT
        )
        fd = vk.vkGetDeviceProcAddr(handle, "vkGetMemoryFdKHR")(handle, ask)
        described = driver.CUDA_EXTERNAL_MEMORY_HANDLE_DESC()
        described.type = driver.CUexternalMemoryHandleType.CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD
        described.handle.fd = fd
        described.size = buffer.allocated
        memory = self._imported_by("cuImportExternalMemory", described, fd)
        mapping = driver.CUDA_EXTERNAL_MEMORY_BUFFER_DESC()
        mapping.size = buffer.size
        address: Any = None
        try:
            address = self._called("cuExternalMemoryGetMappedBuffer", memory, mapping)
            with torch.inference_mode(False):  # it is written to outside of that mode too
                mapped = _Mapped(int(address), buffer.size // 4)
                view = torch.as_tensor(mapped, device=self._where)
        except BaseException:
            if address is not None:
                driver.cuMemFree(address)
            driver.cuDestroyExternalMemory(memory)
            raise
        return memory, address, view

    def _imported_by(self, function: str, described: Any, fd: int) -> Any:
        try:
            return self._called(function, described)
        except DeviceError:
            os.close(fd)  # CUDA takes it over only where it succeeds
            raise

    def _called(self, function: str, *args: Any) -> Any:
        status, *values = getattr(self._driver, function)(*args)
        if status != 0:
            raise DeviceError(f'device "vulkan": expected {function} to succeed, got {status!r}')
        return values[0] if values else None

    def _signal(self, value: int, stream: int) -> None:
        params = self._driver.CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS()
        params.params.fence.value = value
        self._called("cuSignalExternalSemaphoresAsync", [self._timeline], [params], 1, stream)

    def _wait(self, value: int, stream: int) -> None:
        params = self._driver.CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS()
        params.params.fence.value = value
        self._called("cuWaitExternalSemaphoresAsync", [self._timeline], [params], 1, stream)

    def _submit(self, commands: Any, begin: int, end: int) -> None:
        pointer = _ffi.new("VkCommandBuffer[1]", [commands])
        semaphore = _ffi.new("VkSemaphore[1]", [self._semaphore])
        stages = _ffi.new("VkPipelineStageFlags[1]", [vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT])
        first, last = _ffi.new("uint64_t[1]", [begin]), _ffi.new("uint64_t[1]", [end])
        timeline = _ffi.new(
            "VkTimelineSemaphoreSubmitInfo *",
            {
                "sType": vk.VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO,
                "waitSemaphoreValueCount": 1,
                "pWaitSemaphoreValues": first,
                "signalSemaphoreValueCount": 1,
                "pSignalSemaphoreValues": last,
            },
        )
        info = _ffi.new(
            "VkSubmitInfo *",
            {
                "sType": vk.VK_STRUCTURE_TYPE_SUBMIT_INFO,
                "pNext": timeline,
                "waitSemaphoreCount": 1,
                "pWaitSemaphores": semaphore,
                "pWaitDstStageMask": stages,
                "commandBufferCount": 1,
                "pCommandBuffers": pointer,
                "signalSemaphoreCount": 1,
                "pSignalSemaphores": semaphore,
            },
        )
        status = _lib.vkQueueSubmit(self.device.queue, 1, info, _ffi.NULL)
        if status != vk.VK_SUCCESS:
            raise vk.exception_codes.get(status, vk.VkErrorUnknown)
        self.device.note_timed()


class _Mapped:
    """Floats at an address, as torch takes them."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
