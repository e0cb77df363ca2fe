"""Which Vulkan devices there are, which of them can run the kernels, and which one is taken."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import vulkan as vk

from ...devices import VULKAN_DEVICE
from ...errors import DeviceError
from .. import plan

__all__ = ["KINDS", "Adapter", "adapters", "choose", "instance"]

KINDS = ("discrete", "integrated", "virtual", "other", "cpu")
"""Of a device, the better first."""

_KIND_OF = {
    vk.VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU: "discrete",
    vk.VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU: "integrated",
    vk.VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU: "virtual",
    vk.VK_PHYSICAL_DEVICE_TYPE_CPU: "cpu",
}
_VERSION = vk.VK_MAKE_VERSION(1, 1, 0)
_TEAM = 32  # lanes, where a device leaves the choice
_SUBGROUP = {
    "basic": vk.VK_SUBGROUP_FEATURE_BASIC_BIT,
    "vote": vk.VK_SUBGROUP_FEATURE_VOTE_BIT,
    "ballot": vk.VK_SUBGROUP_FEATURE_BALLOT_BIT,
    "arithmetic": vk.VK_SUBGROUP_FEATURE_ARITHMETIC_BIT,
}
_SHARED = 16_384  # bytes a workgroup; the kernels take less, and every device has as much
SIZE_CONTROL = "VK_EXT_subgroup_size_control"
SHARING = ("VK_KHR_external_memory_fd", "VK_KHR_external_semaphore_fd")


@dataclass(frozen=True)
class Adapter:
    """A physical device.

    Attributes:
        index: Among those that the loader lists.
        name: As its driver calls it.
        kind: One of `KINDS`.
        uuid: 32 hexadecimal digits; CUDA gives the same device the same ones.
        driver: Name and version.
        api: Vulkan version.
        lanes: Of a subgroup that the kernels run in.
        fixed: The subgroup's size is asked for, by `SIZE_CONTROL`.
        queue: Index of the queue family.
        timestamp_bits: Of that queue; 0 where it keeps no time.
        timestamp_ns: Nanoseconds a tick.
        largest: Bytes of a storage buffer at most.
        shareable: Its memory and timeline semaphores can be handed to CUDA, as file descriptors.
        extensions: What the driver offers.
        lacks: What the kernels need and it does not have; empty where it can be used.
        handle: `VkPhysicalDevice`; valid while the instance is.
    """

    index: int
    name: str
    kind: str
    uuid: str
    driver: str
    api: str
    lanes: int
    fixed: bool
    queue: int
    timestamp_bits: int
    timestamp_ns: float
    largest: int
    shareable: bool
    extensions: frozenset[str] = field(repr=False)
    lacks: tuple[str, ...]
    handle: Any


@contextmanager
def instance() -> Iterator[Any]:
    """A `VkInstance` for a while.

    Raises:
        DeviceError: There is no driver, or it fails.
    """
    handle = open_instance()
    try:
        yield handle
    finally:
        vk.vkDestroyInstance(handle, None)


def open_instance() -> Any:
    """A `VkInstance`; destroy it when done.

    Raises:
        DeviceError: There is no driver, or it fails.
    """
    application = vk.VkApplicationInfo(
        pApplicationName="doublure", applicationVersion=1, pEngineName="doublure",
        engineVersion=1, apiVersion=vk.VK_MAKE_VERSION(1, 3, 0),
    )  # fmt: skip
    # On macOS devices of portability drivers are only listed for those who ask.
    portability = "VK_KHR_portability_enumeration"
    try:
        offered = {one.extensionName for one in vk.vkEnumerateInstanceExtensionProperties(None)}
        extensions = [portability] if portability in offered else []
        info = vk.VkInstanceCreateInfo(
            pApplicationInfo=application,
            flags=0x00000001 if extensions else 0,
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=extensions,
        )
        return vk.vkCreateInstance(info, None)
    except vk.VkErrorIncompatibleDriver as error:
        raise DeviceError(
            'device "vulkan": expected a Vulkan driver, got none; install your GPU\'s, or '
            "Mesa's (Debian, Ubuntu: mesa-vulkan-drivers)"
        ) from error
    except vk.VkError as error:
        raise DeviceError(
            f'device "vulkan": expected Vulkan to start, got {error_name(error)}; look at what '
            "`doublure doctor` and `vulkaninfo` list"
        ) from error


def adapters(handle: Any) -> list[Adapter]:
    """All devices of an instance, those that cannot be used too."""
    try:
        found = vk.vkEnumeratePhysicalDevices(handle)
    except vk.VkError as error:
        raise DeviceError(
            f'device "vulkan": expected devices to be listed, got {error_name(error)}; '
            "reinstall the driver"
        ) from error
    return [_adapter(index, device) for index, device in enumerate(found)]


def choose(found: Sequence[Adapter], choice: str | None = None) -> Adapter:
    """The device to take.

    Args:
        found: What `adapters` lists.
        choice: A UUID, an index, a kind, or a part of a name; None takes what the environment
            variable DOUBLURE_VULKAN_DEVICE says, else the best usable one, by kind.
    Raises:
        DeviceError: There is none, none that fits, or what fits cannot run the kernels.
    """
    asked = str(choice if choice is not None else os.environ.get(VULKAN_DEVICE) or "").strip()
    whence = "" if choice is not None else f" ({VULKAN_DEVICE})"
    if not found:
        raise DeviceError(
            'device "vulkan": expected a Vulkan device, got none; install your GPU\'s driver, or '
            "Mesa's (Debian, Ubuntu: mesa-vulkan-drivers)"
        )
    fitting = [one for one in found if _fits(one, asked, len(found))] if asked else list(found)
    if not fitting:
        names = [one.name for one in found]
        near = difflib.get_close_matches(str(asked), names, n=1, cutoff=0.3)
        raise DeviceError(
            f'device "vulkan"{whence}: expected an index, a UUID, one of {", ".join(KINDS)}, or a '
            f"part of one of these names: {'; '.join(names)}; got {asked!r}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    usable = [one for one in fitting if not one.lacks]
    if not usable:
        reasons = "; ".join(f"{one.name}: {', '.join(one.lacks)}" for one in fitting)
        raise DeviceError(
            f'device "vulkan"{whence}: expected a device with all that the kernels need, got ones '
            f"that lack it: {reasons}; update the driver, or take another device"
        )
    return min(usable, key=lambda one: (KINDS.index(one.kind), one.index))


def _fits(one: Adapter, asked: str, count: int) -> bool:
    text = asked.lower()
    if text.isascii() and text.isdecimal() and len(text) < 8 and int(text) < count:
        return one.index == int(text)
    if text in KINDS:
        return one.kind == text
    digits = text.removeprefix("gpu-").replace("-", "")
    if re.fullmatch("[0-9a-f]{32}", digits):
        return one.uuid == digits
    return text in one.name.lower()


def _adapter(index: int, device: Any) -> Adapter:
    # Chained structs are read before anything that they hold is let go.
    properties = vk.vkGetPhysicalDeviceProperties(device)
    limits = properties.limits
    version = properties.apiVersion
    extensions = frozenset(
        one.extensionName for one in vk.vkEnumerateDeviceExtensionProperties(device, None)
    )
    lacks: list[str] = []
    uuid, driver, lanes, fixed, shareable = "", "", 0, False, False
    largest = int(limits.maxStorageBufferRange)
    if version < _VERSION:
        lacks.append(f"Vulkan 1.1 (it has {_version(version)})")
    else:
        modern = version >= vk.VK_MAKE_VERSION(1, 2, 0)
        controls = SIZE_CONTROL in extensions
        maintenance = vk.VkPhysicalDeviceMaintenance3Properties()
        ids = vk.VkPhysicalDeviceIDProperties(pNext=maintenance)
        groups = vk.VkPhysicalDeviceSubgroupProperties(pNext=ids)
        drivers = vk.VkPhysicalDeviceDriverProperties(pNext=groups) if modern else groups
        sizes = vk.VkPhysicalDeviceSubgroupSizeControlProperties(pNext=drivers)
        both = vk.VkPhysicalDeviceProperties2(pNext=sizes if controls else drivers)
        vk.vkGetPhysicalDeviceProperties2(device, both)
        uuid = bytes(ids.deviceUUID).hex()
        largest = min(largest, int(maintenance.maxMemoryAllocationSize))
        if modern:
            timeline = vk.VkPhysicalDeviceTimelineSemaphoreFeatures()
            features = vk.VkPhysicalDeviceFeatures2(pNext=timeline)
            vk.vkGetPhysicalDeviceFeatures2(device, features)
            shareable = bool(timeline.timelineSemaphore) and extensions.issuperset(SHARING)
            driver = f"{_text(drivers.driverName)} {_text(drivers.driverInfo)}".strip()
        lanes = int(groups.subgroupSize)
        if controls:
            feature = vk.VkPhysicalDeviceSubgroupSizeControlFeatures()
            features = vk.VkPhysicalDeviceFeatures2(pNext=feature)
            vk.vkGetPhysicalDeviceFeatures2(device, features)
            stages = sizes.requiredSubgroupSizeStages & vk.VK_SHADER_STAGE_COMPUTE_BIT
            fixed = bool(feature.subgroupSizeControl and feature.computeFullSubgroups and stages)
            if fixed and sizes.minSubgroupSize <= _TEAM <= sizes.maxSubgroupSize:
                lanes = _TEAM
        if not groups.supportedStages & vk.VK_SHADER_STAGE_COMPUTE_BIT:
            lacks.append("subgroup operations in compute shaders")
        lacks += [
            f"subgroup {name} operations"
            for name, bit in _SUBGROUP.items()
            if not groups.supportedOperations & bit
        ]
        if not 4 <= lanes <= 128:
            lacks.append(f"subgroups of 4 to 128 lanes (it has {lanes})")
    per_stage = min(
        limits.maxPerStageDescriptorStorageBuffers, limits.maxDescriptorSetStorageBuffers
    )
    if per_stage < len(plan.BINDINGS):
        lacks.append(f"{len(plan.BINDINGS)} storage buffers in a shader (it has {per_stage})")
    if limits.maxComputeSharedMemorySize < _SHARED:
        lacks.append(
            f"{_SHARED} bytes of shared memory (it has {limits.maxComputeSharedMemorySize})"
        )
    queue, bits = _queue(device)
    if queue < 0:
        lacks.append("a queue for compute")
    return Adapter(
        index=index,
        name=_text(properties.deviceName),
        kind=_KIND_OF.get(properties.deviceType, "other"),
        uuid=uuid,
        driver=driver or f"driver {properties.driverVersion:#x}",
        api=_version(version),
        lanes=lanes,
        fixed=fixed,
        queue=queue,
        timestamp_bits=bits,
        timestamp_ns=float(limits.timestampPeriod),
        largest=largest & ~255,  # as buffers are rounded up
        shareable=shareable,
        extensions=extensions,
        lacks=tuple(lacks),
        handle=device,
    )


def _queue(device: Any) -> tuple[int, int]:
    """A family for compute and its timestamps' bits, one without graphics if there is one."""
    found = [
        (bool(family.queueFlags & vk.VK_QUEUE_GRAPHICS_BIT), index, family.timestampValidBits)
        for index, family in enumerate(vk.vkGetPhysicalDeviceQueueFamilyProperties(device))
        if family.queueFlags & vk.VK_QUEUE_COMPUTE_BIT
    ]
    if not found:
        return -1, 0
    _, index, bits = min(found)
    return index, int(bits)


def _text(field: Any) -> str:
    found = field if isinstance(field, str) else vk.ffi.string(field)
    return found if isinstance(found, str) else found.decode(errors="replace")


def _version(packed: int) -> str:
    return f"{packed >> 22 & 0x7F}.{packed >> 12 & 0x3FF}.{packed & 0xFFF}"


def error_name(error: Exception) -> str:
    """As Vulkan spells it: VK_ERROR_DEVICE_LOST."""
    return re.sub("(?<!^)(?=[A-Z])", "_", type(error).__name__).upper()
