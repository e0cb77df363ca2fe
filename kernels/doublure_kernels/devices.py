"""Which backends there are, and the process's own ones: opened at first use, closed at exit.

The public functions draw on backends that the process owns together. `open_device` gives one to
whoever wants to own it instead. Nothing here imports torch before it is asked for `reference`.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import importlib.util
import os
import threading
from collections.abc import Callable, Sequence
from importlib import import_module

from .backend import Backend
from .errors import DeviceError

__all__ = [
    "DEVICES",
    "GPUS",
    "VULKAN_DEVICE",
    "adapter",
    "best_gpu",
    "check_device",
    "default",
    "generation",
    "gpu",
    "gpu_refusals",
    "gpu_trouble",
    "is_software",
    "last_device",
    "note_device",
    "open_device",
    "shutdown",
]


def _reference() -> Backend:
    from .reference import ReferenceBackend

    return ReferenceBackend()


def _cpu() -> Backend:
    if importlib.util.find_spec("numba") is None:  # or the first draw would find out
        raise ModuleNotFoundError("No module named 'numba'", name="numba")
    from .cpu import CpuBackend

    return CpuBackend()


def _vulkan(choice: str | None = None) -> Backend:
    if importlib.util.find_spec("vulkan") is None:
        raise ModuleNotFoundError("No module named 'vulkan'", name="vulkan")
    try:
        backend: Backend = import_module(".gpu.vulkan.backend", __package__).VulkanBackend(choice)
    except OSError as error:  # which the package vulkan raises without the loader's library
        raise DeviceError(
            'device "vulkan": expected the Vulkan loader, got none '
            f"({error}); install it (Debian, Ubuntu: libvulkan1) and your GPU's driver"
        ) from error
    return backend


def _cuda() -> Backend:
    import torch

    if torch.version.cuda is None:
        raise DeviceError(
            f'device "cuda": expected a torch built for CUDA, got torch {torch.__version__}; '
            "install one of pytorch.org's CUDA wheels"
        )
    if not torch.cuda.is_available():
        raise DeviceError(
            f'device "cuda": expected an NVIDIA GPU that torch {torch.__version__} can use, got '
            "none; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    if not _there("cuda.bindings"):
        major = torch.version.cuda.split(".")[0]
        raise DeviceError(
            'device "cuda": expected the package cuda-bindings, got an environment without it; '
            f"run `pip install 'cuda-bindings=={major}.*'`, the version that fits this torch"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # a forked child, or a driver that is too old
        raise DeviceError(
            f'device "cuda": expected CUDA to start, got: {error}; in a child process start with '
            'multiprocessing\'s "spawn", or use device="cpu"'
        ) from error
    backend: Backend = import_module(".gpu.cuda.backend", __package__).CudaBackend()
    return backend


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # its parent is not there, or is only half
        return False


_OPENERS: dict[str, Callable[[], Backend]] = {
    "reference": _reference,
    "cpu": _cpu,
    "vulkan": _vulkan,
    "cuda": _cuda,
}
GPUS = ("cuda", "vulkan")
"""GPU backends, the better one first: it needs no copy through the host."""

DEVICES = ("auto", "cpu", "gpu", *GPUS, "reference")
"""What `device=` accepts. `gpu` is the best GPU backend there is; `auto` decides by size."""

VULKAN_DEVICE = "DOUBLURE_VULKAN_DEVICE"
"""The environment variable that chooses Vulkan's device; setting it admits software devices too."""

_lock = threading.RLock()
_opened: dict[str, Backend] = {}  # in the order of opening
_refused: dict[str, DeviceError] = {}  # why a GPU could not be opened, so that it is tried once
_inherited: list[Backend] = []  # a parent's, which a forked child must neither use nor close
_hooked = False
_last: str | None = None
_generation = 0
_thread = threading.local()


def check_device(device: str) -> None:
    """Whether `device` is one of `DEVICES`; opens nothing.

    Raises:
        DeviceError: It is not. The text names the nearest one that is.
    """
    if device not in DEVICES:
        raise _unknown("device", device, DEVICES)


def open_device(name: str, choice: str | None = None) -> Backend:
    """Open a backend of your own; close it when done.

    Args:
        name: `reference` (torch, slow, the truth), `cpu`, `vulkan` or `cuda`.
        choice: Which of Vulkan's devices: a part of its name, its kind (`discrete`, `integrated`,
            `virtual`, `cpu`), its UUID or its index. None takes what DOUBLURE_VULKAN_DEVICE says,
            else the best one. CUDA draws on the device that its tensors are on.
    Raises:
        DeviceError: There is no such backend, it is not installed, or this machine has no such
            device.
    """
    if name not in _OPENERS:
        raise _unknown("open_device", name, tuple(_OPENERS))
    if choice is not None and name != "vulkan":
        raise DeviceError(
            f'open_device: expected a choice of device for "vulkan" only, got {choice!r} for '
            f'"{name}"; leave it out'
        )
    try:
        return _OPENERS[name]() if choice is None else _vulkan(choice)
    except ModuleNotFoundError as error:
        raise DeviceError(
            f'device "{name}": expected the package {error.name}, got an environment without it; '
            "install doublure[kernels]"
        ) from error


def default(name: str) -> Backend:
    """The process's own backend of that name, opened now if it was not yet; never close it.

    Raises:
        DeviceError: As `open_device`.
    """
    backend = _opened.get(name)
    if backend is not None:
        return backend
    with _lock:
        if name not in _opened:
            backend = open_device(name)
            _hook()
            _opened[name] = backend
        return _opened[name]


def best_gpu() -> Backend | None:
    """The process's own best GPU backend; None where there is none, `gpu_trouble` says why."""
    for name in GPUS:
        backend = gpu(name)
        if backend is not None:
            return backend
    return None


def _admitted(name: str) -> Backend:
    """As `default`, but software devices are refused. The caller holds the lock."""
    backend = _opened.get(name)
    found = backend or open_device(name)
    if is_software(found) and not os.environ.get(VULKAN_DEVICE):
        text = (
            f'device "{name}": expected a GPU, got the software device {found.adapter}; '
            f'use device="{name}", or set {VULKAN_DEVICE} before the first call (shutdown() makes '
            "the next one the first) to draw on it all the same"
        )
        if backend is None:
            found.close()
        raise DeviceError(text)
    if backend is None:
        _hook()
        _opened[name] = found
    return found


def is_software(backend: Backend) -> bool:
    """Whether a GPU backend's device is really the processor, as lavapipe and SwiftShader are."""
    return getattr(backend, "kind", None) == "cpu"


def gpu(name: str) -> Backend | None:
    """The process's own GPU backend of that name; None where it is not there, or is software.

    It is tried once; `gpu_refusals` then says why it was refused.
    """
    with _lock:
        if name not in _refused:
            try:
                return _admitted(name)
            except DeviceError as error:
                _refused[name] = error
    return None


def gpu_refusals() -> dict[str, str]:
    """Why GPU backends that were tried are not used, by name."""
    return {name: str(error) for name, error in list(_refused.items())}


def gpu_trouble() -> str:
    """Why `best_gpu` found none, one sentence a backend."""
    return "; ".join(gpu_refusals().values())


def adapter() -> str | None:
    """The GPU that `device="gpu"` draws on, as its driver calls it; None where there is none.

    Opens it if need be, which may take a moment the first time.
    """
    gpu = best_gpu()
    return None if gpu is None else gpu.adapter


def generation() -> int:
    """Another number after each `shutdown` and fork: what was decided on devices before is void."""
    return _generation


def last_device() -> str | None:
    """The backend that the last call in this thread really ran on: `cpu`, `reference`, …

    In a thread that made no call, that of the process; None before the first one. A backward pass
    counts too, in the thread that autograd ran it in.
    """
    return getattr(_thread, "last", None) or _last


def note_device(backend: Backend) -> None:
    """Remember what ran, for `last_device`."""
    global _last
    _thread.last = _last = backend.name


def shutdown() -> bool:
    """Close the process's own backends, the last opened first; the next call opens them anew.

    Runs by itself when the interpreter exits. Call it while no other thread draws.

    Returns:
        Whether there was anything to close.
    """
    global _generation
    with _lock:
        _generation += 1
        backends = list(_opened.values())
        _opened.clear()
        _refused.clear()
        with contextlib.ExitStack() as stack:  # one that fails keeps none of the others open
            for backend in backends:
                stack.callback(backend.close)
    return bool(backends)


def _unknown(where: str, name: object, known: Sequence[str]) -> DeviceError:
    names = ", ".join(f'"{one}"' for one in known)
    near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.0)[0]
    return DeviceError(f'{where}: expected one of {names}, got {name!r}; did you mean "{near}"?')


def _hook() -> None:
    """At first opening, not at import, so that importing changes nothing about a process."""
    global _hooked
    if not _hooked:
        _hooked = True
        # While the interpreter still works: drivers unloaded after it have crashed at exit.
        atexit.register(shutdown)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """In a forked child: threads, contexts and a held lock are the parent's, not ours."""
    global _lock, _last, _thread, _generation
    _generation += 1
    _lock = threading.RLock()
    _thread = threading.local()
    _last = None
    _inherited.extend(_opened.values())  # kept alive, so that nothing finalises them here
    _opened.clear()
    _refused.clear()
