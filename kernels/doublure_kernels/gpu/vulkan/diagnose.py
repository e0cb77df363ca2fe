"""What Vulkan finds on this machine, for `doublure doctor`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ...errors import DeviceError
from . import adapters

__all__ = ["diagnose"]

_FOLDERS = ("/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/usr/share/vulkan/icd.d")
_CHOSEN = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_ADD_DRIVER_FILES", "VK_INSTANCE_LAYERS")


def diagnose() -> Iterator[dict[str, str]]:
    """The loader, its drivers' manifests, and every device with why it is taken or not."""
    yield {"loader": _loader()}
    for name in _CHOSEN:
        if os.environ.get(name):
            yield {"environment": f"{name}={os.environ[name]}"}
    manifests = [str(path) for folder in _FOLDERS for path in sorted(Path(folder).glob("*.json"))]
    yield {"drivers": ", ".join(manifests) or f"no manifest in {', '.join(_FOLDERS)}"}
    with adapters.instance() as instance:
        found = adapters.adapters(instance)
        try:
            taken = adapters.choose(found).index
            reason = ""
        except DeviceError as error:
            taken, reason = -1, str(error)
        for one in found:
            if one.index == taken:
                verdict = "taken"
            elif one.lacks:
                verdict = f"not taken: it lacks {', '.join(one.lacks)}"
            else:
                verdict = "not taken: another one was chosen or is of a better kind"
            yield {
                "device": f"{one.index}, {one.name}",
                "kind": one.kind,
                "uuid": one.uuid,
                "driver": one.driver,
                "vulkan": one.api,
                "subgroup": f"{one.lanes} lanes" + (", asked for" if one.fixed else ""),
                "largest buffer": f"{one.largest >> 20} MiB",
                "verdict": verdict,
            }
        if reason:
            yield {"choice": reason}


def _loader() -> str:
    import vulkan as vk

    try:
        version = vk.vkEnumerateInstanceVersion()
    except Exception as error:  # a loader of Vulkan 1.0 has no such function
        return f"there, without its version ({type(error).__name__})"
    return f"Vulkan {version >> 22}.{version >> 12 & 0x3FF}.{version & 0xFFF}"
