"""An opened Vulkan device: pipelines, pooled buffers, and recorded programs over them.

Everything is made by one thread at a time; the backend has the lock. Errors of Vulkan pass through
as the package's own; `backend.py` gives them words.

Buffers are named as in `plan.BINDINGS`, and grow to twice what they were. Where the host can reach
a device's own memory as fast as the device does, it writes and reads there; else copies to and from
staging memory are part of a program.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import vulkan as vk
from numpy.typing import NDArray

from .. import cache, plan
from . import adapters

__all__ = ["Buffers", "Device", "Program"]

_log = logging.getLogger(__name__)

_ffi, _lib = vk.ffi, vk.lib  # a call through the package's functions takes several times as long
_NULL = _ffi.NULL
_LEAST = 256  # bytes of a buffer: none may be empty
_ALIGN = 256
_PROGRAMS = 64
_TESTED = b"draws right"
_FULL_SUBGROUPS = 0x2  # VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT
_WAIT_NS = 200_000_000  # between two looks at the keyboard

Bytes = NDArray[np.uint8]


class Device:
    """A device with a queue, and what all its buffers and programs share.

    Args:
        choice: See `adapters.choose`.
        staged: Copy through staging memory even where the host could write in place.
    Raises:
        DeviceError: There is none that fits.
        vk.VkError: It cannot be opened.
    """

    def __init__(self, choice: str | None = None, *, staged: bool = False) -> None:
        self._instance = adapters.open_instance()
        self._stack = contextlib.ExitStack()
        self._stack.callback(vk.vkDestroyInstance, self._instance, None)
        try:
            self.adapter = adapters.choose(adapters.adapters(self._instance), choice)
            self._open(staged)
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Wait for what runs, and destroy everything. Buffers and programs are void then."""
        with contextlib.suppress(vk.VkError):
            vk.vkDeviceWaitIdle(self.handle)
        self._stack.close()

    @property
    def tested(self) -> bool:
        """Whether this device, with this driver and these shaders, was once seen to draw right."""
        return cache.kept(self._tested_path) == _TESTED

    def note_tested(self) -> None:
        """Remember that it does."""
        cache.keep(self._tested_path, _TESTED)

    @property
    def uuid(self) -> str:
        """Of the adapter."""
        return self.adapter.uuid

    @property
    def driver(self) -> str:
        """Of the adapter."""
        return self.adapter.driver

    @property
    def elapsed_ns(self) -> float | None:
        """Time that the last program took on the device, copies included; None if not kept."""
        if not self.adapter.timestamp_bits or not self._timed:
            return None
        found = _ffi.new("uint64_t[2]")
        flags = vk.VK_QUERY_RESULT_64_BIT | vk.VK_QUERY_RESULT_WAIT_BIT
        _check(_lib.vkGetQueryPoolResults(self.handle, self.queries, 0, 2, 16, found, 8, flags))
        mask = (1 << self.adapter.timestamp_bits) - 1
        return float(((found[1] - found[0]) & mask) * self.adapter.timestamp_ns)

    def _open(self, staged: bool) -> None:
        adapter = self.adapter
        device = adapter.handle
        wanted = [adapters.SIZE_CONTROL] if adapter.fixed else []
        if adapter.shareable:
            wanted += adapters.SHARING
        if "VK_KHR_portability_subset" in adapter.extensions:
            wanted.append("VK_KHR_portability_subset")
        priority = vk.VkDeviceQueueCreateInfo(
            queueFamilyIndex=adapter.queue, queueCount=1, pQueuePriorities=[1.0]
        )
        features: Any = None
        if adapter.fixed:
            features = vk.VkPhysicalDeviceSubgroupSizeControlFeatures(
                subgroupSizeControl=1, computeFullSubgroups=1
            )
        timeline: Any = features
        if adapter.shareable:
            timeline = vk.VkPhysicalDeviceTimelineSemaphoreFeatures(
                pNext=features, timelineSemaphore=1
            )
        info = vk.VkDeviceCreateInfo(
            pNext=timeline, queueCreateInfoCount=1, pQueueCreateInfos=[priority],
            enabledExtensionCount=len(wanted), ppEnabledExtensionNames=wanted,
        )  # fmt: skip
        self.handle = vk.vkCreateDevice(device, info, None)
        self._stack.callback(vk.vkDestroyDevice, self.handle, None)
        self.queue = vk.vkGetDeviceQueue(self.handle, adapter.queue, 0)
        self._memory_types = vk.vkGetPhysicalDeviceMemoryProperties(device)
        reached = vk.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | vk.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
        own = vk.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT
        quick = vk.VK_MEMORY_PROPERTY_HOST_CACHED_BIT
        self._staging_flags = (reached | quick, reached)
        # A discrete device's memory can often be reached too, but reading there is very slow.
        near = adapter.kind in ("integrated", "cpu") and not staged
        self.direct = near and self._type(~0, (own | reached | quick,)) is not None
        self._flags = (own | reached | quick,) if self.direct else (own, 0)
        self.scratch = max(self._heap() // 16, 1 << 24)
        self._make_layouts()
        self.commands = vk.vkCreateCommandPool(
            self.handle,
            vk.VkCommandPoolCreateInfo(
                flags=vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT,
                queueFamilyIndex=adapter.queue,
            ),
            None,
        )
        self._stack.callback(vk.vkDestroyCommandPool, self.handle, self.commands, None)
        self.fence = vk.vkCreateFence(self.handle, vk.VkFenceCreateInfo(), None)
        self._stack.callback(vk.vkDestroyFence, self.handle, self.fence, None)
        self._pending = False
        self._timed = False
        self.queries = _NULL
        if adapter.timestamp_bits:
            queries = vk.VkQueryPoolCreateInfo(queryType=vk.VK_QUERY_TYPE_TIMESTAMP, queryCount=2)
            self.queries = vk.vkCreateQueryPool(self.handle, queries, None)
            self._stack.callback(vk.vkDestroyQueryPool, self.handle, self.queries, None)
        self._barrier = _ffi.new(
            "VkMemoryBarrier *",
            {
                "sType": vk.VK_STRUCTURE_TYPE_MEMORY_BARRIER,
                "srcAccessMask": vk.VK_ACCESS_SHADER_WRITE_BIT | vk.VK_ACCESS_TRANSFER_WRITE_BIT,
                "dstAccessMask": (
                    vk.VK_ACCESS_SHADER_READ_BIT
                    | vk.VK_ACCESS_SHADER_WRITE_BIT
                    | vk.VK_ACCESS_TRANSFER_READ_BIT
                    | vk.VK_ACCESS_TRANSFER_WRITE_BIT
                ),
            },
        )
        self._to_host = _ffi.new(
            "VkMemoryBarrier *",
            {
                "sType": vk.VK_STRUCTURE_TYPE_MEMORY_BARRIER,
                "srcAccessMask": vk.VK_ACCESS_SHADER_WRITE_BIT | vk.VK_ACCESS_TRANSFER_WRITE_BIT,
                "dstAccessMask": vk.VK_ACCESS_HOST_READ_BIT,
            },
        )
        self._load_kernels(staged)

    def _make_layouts(self) -> None:
        compute = vk.VK_SHADER_STAGE_COMPUTE_BIT
        bindings = [
            vk.VkDescriptorSetLayoutBinding(
                binding=i, descriptorType=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
                descriptorCount=1, stageFlags=compute,
            )
            for i in range(len(plan.BINDINGS))
        ]  # fmt: skip
        self.set_layout = vk.vkCreateDescriptorSetLayout(
            self.handle,
            vk.VkDescriptorSetLayoutCreateInfo(bindingCount=len(bindings), pBindings=bindings),
            None,
        )
        self._stack.callback(vk.vkDestroyDescriptorSetLayout, self.handle, self.set_layout, None)
        push = vk.VkPushConstantRange(stageFlags=compute, offset=0, size=plan.SETTINGS_BYTES)
        self.layout = vk.vkCreatePipelineLayout(
            self.handle,
            vk.VkPipelineLayoutCreateInfo(
                setLayoutCount=1, pSetLayouts=[self.set_layout],
                pushConstantRangeCount=1, pPushConstantRanges=[push],
            ),
            None,
        )  # fmt: skip
        self._stack.callback(vk.vkDestroyPipelineLayout, self.handle, self.layout, None)

    # Kernels.

    def _load_kernels(self, staged: bool) -> None:
        folder = files("doublure_kernels.gpu") / "shaders"
        code = {name: (folder / f"{name}.spv").read_bytes() for name in plan.KERNELS}
        self._modules = {}
        for name, words in code.items():
            info = vk.VkShaderModuleCreateInfo(codeSize=len(words), pCode=words)
            self._modules[name] = vk.vkCreateShaderModule(self.handle, info, None)
            self._stack.callback(vk.vkDestroyShaderModule, self.handle, self._modules[name], None)
        adapter = self.adapter
        digest = hashlib.sha256(
            repr((adapter.uuid, adapter.name, adapter.driver, adapter.lanes, staged)).encode()
        )
        for words in code.values():
            digest.update(words)
        kept = cache.folder("vulkan")
        self._cache_path = None if kept is None else kept / f"{digest.hexdigest()}.pipelines"
        self._tested_path = None if kept is None else kept / f"{digest.hexdigest()}.tested"
        known = cache.kept(self._cache_path) or b""
        data = _ffi.new("char[]", known) if known else _NULL
        info = vk.VkPipelineCacheCreateInfo(initialDataSize=len(known), pInitialData=data)
        self._cache = vk.vkCreatePipelineCache(self.handle, info, None)
        self._stack.callback(vk.vkDestroyPipelineCache, self.handle, self._cache, None)
        self._cached = len(known)
        self._pipelines: dict[tuple[str, tuple[tuple[int, int], ...]], Any] = {}
        self._stack.callback(self._destroy_pipelines)

    def _destroy_pipelines(self) -> None:
        for pipeline in self._pipelines.values():
            vk.vkDestroyPipeline(self.handle, pipeline, None)
        self._pipelines.clear()

    def prepare(self, steps: Iterable[plan.Dispatch]) -> None:
        """Compile what these need and was not compiled yet."""
        missing = {
            (step.kernel, step.constants)
            for step in steps
            if (step.kernel, step.constants) not in self._pipelines
        }
        if not missing:
            return
        notice = threading.Timer(
            1.0, _log.warning, ("compiling the rasterizer for this GPU, once a machine",)
        )
        notice.daemon = True
        notice.start()
        try:
            for kernel, constants in sorted(missing):
                self._pipelines[kernel, constants] = self._compile(kernel, constants)
        finally:
            notice.cancel()
        self._keep_cache()

    def _compile(self, kernel: str, constants: tuple[tuple[int, int], ...]) -> Any:
        # Every struct is kept until the call: the package lets nested ones go early.
        values = _ffi.new("int32_t[]", [value for _, value in constants])
        entries = [
            vk.VkSpecializationMapEntry(constantID=number, offset=4 * i, size=4)
            for i, (number, _) in enumerate(constants)
        ]
        special = vk.VkSpecializationInfo(
            mapEntryCount=len(entries), pMapEntries=entries,
            dataSize=4 * len(entries), pData=_ffi.cast("void *", values),
        )  # fmt: skip
        size: Any = None
        flags = 0
        if self.adapter.fixed:
            size = vk.VkPipelineShaderStageRequiredSubgroupSizeCreateInfo(
                requiredSubgroupSize=self.adapter.lanes
            )
            flags = _FULL_SUBGROUPS
        name = _ffi.new("char[]", b"main")
        stage = vk.VkPipelineShaderStageCreateInfo(
            pNext=size, flags=flags, stage=vk.VK_SHADER_STAGE_COMPUTE_BIT,
            module=self._modules[kernel], pName=name, pSpecializationInfo=special,
        )  # fmt: skip
        info = vk.VkComputePipelineCreateInfo(stage=stage, layout=self.layout)
        made = vk.vkCreateComputePipelines(self.handle, self._cache, 1, [info], None)
        del values, entries, special, size, name, stage
        return made[0]

    def _keep_cache(self) -> None:
        size = _ffi.new("size_t *")
        _check(_lib.vkGetPipelineCacheData(self.handle, self._cache, size, _NULL))
        if size[0] == self._cached or not size[0]:
            return
        data = _ffi.new("char[]", size[0])
        if _lib.vkGetPipelineCacheData(self.handle, self._cache, size, data) == vk.VK_SUCCESS:
            cache.keep(self._cache_path, bytes(_ffi.buffer(data, size[0])))
            self._cached = size[0]

    # Memory.

    def _heap(self) -> int:
        index = self._type(~0, self._flags)
        types = self._memory_types
        return (
            0 if index is None else int(types.memoryHeaps[types.memoryTypes[index].heapIndex].size)
        )

    def _type(self, allowed: int, choices: Sequence[int]) -> int | None:
        types = self._memory_types
        for flags in choices:
            for i in range(types.memoryTypeCount):
                if allowed >> i & 1 and types.memoryTypes[i].propertyFlags & flags == flags:
                    return i
        return None

    def allocate(self, size: int, staging: bool = False, exported: bool = False) -> Buffer:
        """A buffer of so many bytes; the caller frees it.

        Args:
            staging: To copy through, on the host's side.
            exported: Its memory can be handed to others; the host cannot reach it.
        Raises:
            vk.VkErrorOutOfDeviceMemory: As the device says, or one of its like.
        """
        usage = (
            vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
            | vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
            | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        )
        kind = vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT
        outer = vk.VkExternalMemoryBufferCreateInfo(handleTypes=kind) if exported else None
        info = vk.VkBufferCreateInfo(pNext=outer, size=size, usage=usage)
        with contextlib.ExitStack() as undo:
            handle = vk.vkCreateBuffer(self.handle, info, None)
            undo.callback(vk.vkDestroyBuffer, self.handle, handle, None)
            needs = vk.vkGetBufferMemoryRequirements(self.handle, handle)
            flags = self._staging_flags if staging else self._flags
            if exported:
                flags = (vk.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT,)
            index = self._type(needs.memoryTypeBits, flags)
            if index is None:
                raise vk.VkErrorOutOfDeviceMemory
            export = vk.VkExportMemoryAllocateInfo(handleTypes=kind) if exported else None
            ask = vk.VkMemoryAllocateInfo(
                pNext=export, allocationSize=needs.size, memoryTypeIndex=index
            )
            memory = vk.vkAllocateMemory(self.handle, ask, None)
            undo.callback(vk.vkFreeMemory, self.handle, memory, None)
            vk.vkBindBufferMemory(self.handle, handle, memory, 0)
            view = None
            if staging or (self.direct and not exported):
                mapped = vk.vkMapMemory(self.handle, memory, 0, size, 0)
                view = np.frombuffer(mapped, np.uint8)
            undo.pop_all()
        return Buffer(self, handle, memory, size, int(needs.size), view)

    # Running.

    def submit(self, commands: Any) -> None:
        """Run recorded commands and wait for their end; Ctrl-C gets through meanwhile."""
        self.settle()
        pointer = _ffi.new("VkCommandBuffer[1]", [commands])
        info = _ffi.new(
            "VkSubmitInfo *",
            {
                "sType": vk.VK_STRUCTURE_TYPE_SUBMIT_INFO,
                "commandBufferCount": 1,
                "pCommandBuffers": pointer,
            },
        )
        # In this order, since Ctrl-C may come in between.
        _check(_lib.vkResetFences(self.handle, 1, _ffi.new("VkFence[1]", [self.fence])))
        self._pending = True
        status = _lib.vkQueueSubmit(self.queue, 1, info, self.fence)
        if status != vk.VK_SUCCESS:
            self._pending = False
            _check(status)
        self.settle()
        self._timed = True

    def settle(self) -> None:
        """Wait for what an interrupted call left running."""
        fences = _ffi.new("VkFence[1]", [self.fence])
        while self._pending:
            status = _lib.vkWaitForFences(self.handle, 1, fences, 1, _WAIT_NS)
            if status != vk.VK_TIMEOUT:
                _check(status)
                self._pending = False

    def note_timed(self) -> None:
        """A program was submitted by somebody else; its time will be there."""
        self._timed = True

    def forget_pending(self) -> None:
        """Of a lost device nothing will ever be done."""
        self._pending = False

    def begin(self, again: bool = False) -> Any:
        """A new command buffer, its clock running.

        Args:
            again: It may be submitted before it is done with the last time.
        """
        info = vk.VkCommandBufferAllocateInfo(
            commandPool=self.commands, level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY,
            commandBufferCount=1,
        )  # fmt: skip
        commands = vk.vkAllocateCommandBuffers(self.handle, info)[0]
        flags = vk.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT if again else 0
        vk.vkBeginCommandBuffer(commands, vk.VkCommandBufferBeginInfo(flags=flags))
        if self.adapter.timestamp_bits:
            _lib.vkCmdResetQueryPool(commands, self.queries, 0, 2)
            first = vk.VK_PIPELINE_STAGE_TOP_OF_PIPE_BIT
            _lib.vkCmdWriteTimestamp(commands, first, self.queries, 0)
        return commands

    def end(self, commands: Any) -> None:
        """Stop its clock, and let the host see what it wrote."""
        if self.adapter.timestamp_bits:
            last = vk.VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT
            _lib.vkCmdWriteTimestamp(commands, last, self.queries, 1)
        _lib.vkCmdPipelineBarrier(
            commands,
            vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | vk.VK_PIPELINE_STAGE_TRANSFER_BIT,
            vk.VK_PIPELINE_STAGE_HOST_BIT, 0, 1, self._to_host, 0, _NULL, 0, _NULL,
        )  # fmt: skip
        vk.vkEndCommandBuffer(commands)

    def drop(self, commands: Any) -> None:
        """Free a command buffer that does not run."""
        pointer = _ffi.new("VkCommandBuffer[1]", [commands])
        _lib.vkFreeCommandBuffers(self.handle, self.commands, 1, pointer)

    def barrier(self, commands: Any) -> None:
        """What comes after sees what was written before."""
        both = vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | vk.VK_PIPELINE_STAGE_TRANSFER_BIT
        _lib.vkCmdPipelineBarrier(commands, both, both, 0, 1, self._barrier, 0, _NULL, 0, _NULL)

    def dispatch(self, commands: Any, descriptors: Any, steps: Sequence[plan.Dispatch]) -> None:
        """Record kernels in order, each after what the one before wrote."""
        self.prepare(steps)
        compute = vk.VK_SHADER_STAGE_COMPUTE_BIT
        point = vk.VK_PIPELINE_BIND_POINT_COMPUTE
        sets = _ffi.new("VkDescriptorSet[1]", [descriptors])
        _lib.vkCmdBindDescriptorSets(commands, point, self.layout, 0, 1, sets, 0, _NULL)
        bound: object = None
        for step in steps:
            self.barrier(commands)
            pipeline = self._pipelines[step.kernel, step.constants]
            if pipeline is not bound:
                _lib.vkCmdBindPipeline(commands, point, pipeline)
                bound = pipeline
            _lib.vkCmdPushConstants(
                commands, self.layout, compute, 0, len(step.settings),
                _ffi.from_buffer(step.settings),
            )  # fmt: skip
            _lib.vkCmdDispatch(commands, *step.groups)


class Buffer:
    """A buffer with memory of its own.

    Attributes:
        size: Bytes that were asked for.
        allocated: Bytes of its memory.
        view: Its bytes, where the host can reach them.
    """

    def __init__(
        self,
        device: Device,
        handle: Any,
        memory: Any,
        size: int,
        allocated: int,
        view: Bytes | None,
    ) -> None:
        self._device = device
        self.handle, self.memory = handle, memory
        self.size, self.allocated, self.view = size, allocated, view

    def free(self) -> None:
        """Nothing may run that uses it."""
        self.view = None
        vk.vkDestroyBuffer(self._device.handle, self.handle, None)
        vk.vkFreeMemory(self._device.handle, self.memory, None)


class Buffers:
    """One buffer for each binding, and the descriptor set that names them.

    Args:
        device: Where. `close` comes before the device's.
        exported: They can be handed to others; the host cannot reach them.
        settle: Waits until nothing runs that uses them; None takes the device's.
    """

    def __init__(
        self,
        device: Device,
        exported: bool = False,
        settle: Callable[[], None] | None = None,
    ) -> None:
        self.device = device
        self.exported = exported
        self._settle = settle or device.settle
        self._named: dict[str, Buffer] = {}
        self._stale: set[str] = set()  # what the set may name though it is gone
        self._staging: dict[str, Buffer] = {}
        self._programs: dict[Any, Program] = {}
        size = vk.VkDescriptorPoolSize(
            type=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, descriptorCount=len(plan.BINDINGS)
        )
        self._pool = vk.vkCreateDescriptorPool(
            device.handle,
            vk.VkDescriptorPoolCreateInfo(maxSets=1, poolSizeCount=1, pPoolSizes=[size]),
            None,
        )
        try:
            layouts = [device.set_layout]
            self.descriptors = vk.vkAllocateDescriptorSets(
                device.handle,
                vk.VkDescriptorSetAllocateInfo(
                    descriptorPool=self._pool, descriptorSetCount=1, pSetLayouts=layouts
                ),
            )[0]
            self.reserve(dict.fromkeys(plan.BINDINGS, _LEAST))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free everything."""
        self._forget()
        for buffer in (*self._named.values(), *self._staging.values()):
            buffer.free()
        self._named.clear()
        self._staging.clear()
        vk.vkDestroyDescriptorPool(self.device.handle, self._pool, None)

    def __getitem__(self, name: str) -> Buffer:
        return self._named[name]

    @property
    def allocated(self) -> int:
        """Bytes on the device."""
        return sum(buffer.allocated for buffer in self._named.values())

    def reserve(self, needs: Mapping[str, int]) -> bool:
        """Make buffers at least so large; what was in those that grow is lost.

        Returns:
            Whether any had to grow, which makes programs void.
        """
        grow = {
            name: size
            for name, size in {**dict.fromkeys(self._stale, _LEAST), **needs}.items()
            if name in self._stale or name not in self._named or self._named[name].size < size
        }
        if not grow:
            return False
        self._forget()
        limit = self.device.adapter.largest
        for name, size in grow.items():
            self._stale.add(name)  # until the set names the new one: Ctrl-C may come any time
            old = self._named.pop(name, None)
            before = 0 if old is None else old.size
            if old is not None:
                old.free()  # first, so that both need not fit
            # A failure leaves what works: the set never names a buffer that is gone.
            generous = _rounded(min(max(size, 2 * before), limit))
            try:
                self._named[name] = self._allocated(generous, _rounded(size))
            except vk.VkError:
                self._named[name] = self.device.allocate(_LEAST, exported=self.exported)
                self._describe([name])
                raise
            self._describe([name])
        return True

    def _allocated(self, generous: int, least: int) -> Buffer:
        try:
            return self.device.allocate(generous, exported=self.exported)
        except vk.VkError:
            if generous == least:
                raise
            return self.device.allocate(least, exported=self.exported)

    def _describe(self, names: Sequence[str]) -> None:
        # Kept until the call, as everything nested is.
        infos = []
        for name in names:
            one = self._named[name]
            infos.append([vk.VkDescriptorBufferInfo(buffer=one.handle, offset=0, range=one.size)])
        writes = [
            vk.VkWriteDescriptorSet(
                dstSet=self.descriptors, dstBinding=plan.BINDINGS.index(name),
                dstArrayElement=0, descriptorCount=1,
                descriptorType=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, pBufferInfo=info,
            )
            for name, info in zip(names, infos, strict=True)
        ]  # fmt: skip
        vk.vkUpdateDescriptorSets(self.device.handle, len(writes), writes, 0, None)
        self._stale.difference_update(names)

    def staging(self, kind: str, size: int) -> Buffer:
        """Memory to copy through, `up` or `down`."""
        found = self._staging.get(kind)
        if found is None or found.size < size:
            self._forget()
            if found is not None:
                del self._staging[kind]
                found.free()
            generous = max(_rounded(size), 2 * (found.size if found else 0))
            found = self._staging[kind] = self.device.allocate(generous, staging=True)
        return found

    def program(
        self,
        key: Any,
        steps: Callable[[], Sequence[plan.Dispatch]],
        up: Mapping[str, int],
        down: Mapping[str, int],
    ) -> Program:
        """Kernels with the bytes that go in before and come out after; recorded once.

        Args:
            key: Equal only for equal programs.
            steps: Makes the kernels, where they were not recorded; buffers were reserved for them.
            up: Bytes by buffer that the host writes.
            down: Bytes by buffer that it reads.
        """
        found = self._programs.get(key)
        if found is None:
            if not self.device.direct:  # may make all programs void, so before this one
                self.staging("up", _span(up))
                self.staging("down", _span(down))
            found = Program(self, steps(), up, down)
            if len(self._programs) >= _PROGRAMS:
                self._settle()
                self._programs.pop(next(iter(self._programs))).close()
            self._programs[key] = found
        return found

    def _forget(self) -> None:
        self._settle()
        programs, self._programs = self._programs, {}  # first, so that none is found closed
        for program in programs.values():
            program.close()


class Program:
    """A recorded command buffer: copies in, kernels, copies out."""

    def __init__(
        self,
        buffers: Buffers,
        steps: Sequence[plan.Dispatch],
        up: Mapping[str, int],
        down: Mapping[str, int],
    ) -> None:
        device = self._device = buffers.device
        device.prepare(steps)
        self._views: dict[tuple[str, str], Bytes] = {}
        copies: dict[str, list[tuple[Any, Any, int, int]]] = {"up": [], "down": []}
        for kind, sizes in (("up", up), ("down", down)):
            at = 0
            for name, size in sizes.items():
                whole = buffers[name]
                if device.direct:
                    assert whole.view is not None
                    self._views[kind, name] = whole.view[:size]
                    continue
                staging = buffers.staging(kind, 0)
                assert staging.view is not None
                self._views[kind, name] = staging.view[at : at + size]
                if size:
                    copies[kind].append((staging.handle, whole.handle, at, size))
                at += _rounded(size)
        self._commands = device.begin(again=buffers.exported)
        device.barrier(self._commands)
        for source, sink, at, size in copies["up"]:
            _copy(self._commands, source, at, sink, 0, size)
        device.dispatch(self._commands, buffers.descriptors, steps)
        device.barrier(self._commands)
        for sink, source, at, size in copies["down"]:
            _copy(self._commands, source, 0, sink, at, size)
        device.end(self._commands)

    @property
    def commands(self) -> Any:
        """`VkCommandBuffer`."""
        return self._commands

    def put(self, name: str, values: NDArray[Any]) -> None:
        """Write what a buffer begins with; `values` may be broadcast."""
        sink = self._views["up", name].view(values.dtype)
        if values.size:
            np.copyto(sink[: values.size].reshape(values.shape), values)

    def get(self, name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
        """A copy of what a buffer begins with."""
        count = int(np.prod(shape))
        found: NDArray[Any] = self._views["down", name].view(dtype)[:count]
        return found.reshape(shape).copy()

    def run(self) -> None:
        """Submit, and wait for the end."""
        self._device.submit(self._commands)

    def close(self) -> None:
        """Nothing may run."""
        self._views.clear()
        self._device.drop(self._commands)


def _copy(commands: Any, source: Any, at: int, sink: Any, to: int, size: int) -> None:
    region = _ffi.new("VkBufferCopy *", {"srcOffset": at, "dstOffset": to, "size": size})
    _lib.vkCmdCopyBuffer(commands, source, sink, 1, region)


def _span(sizes: Mapping[str, int]) -> int:
    return sum(_rounded(size) for size in sizes.values())


def _rounded(size: int) -> int:
    return max(_LEAST, -(-size // _ALIGN) * _ALIGN)


def _check(status: int) -> None:
    if status != vk.VK_SUCCESS:
        raise vk.exception_codes.get(status, vk.VkErrorUnknown)
