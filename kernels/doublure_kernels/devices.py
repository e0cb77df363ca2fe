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

from .backend import Backend
from .errors import DeviceError

__all__ = [
    "DEVICES",
    "adapter",
    "best_gpu",
    "check_device",
    "default",
    "gpu_trouble",
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


def _absent(name: str) -> Callable[[], Backend]:
    def refuse() -> Backend:
        raise DeviceError(
            f'device "{name}": expected a {name} backend, got none: doublure_kernels.{name} is not '
            'part of this installation; use device="cpu"'
        )

    return refuse


_OPENERS: dict[str, Callable[[], Backend]] = {
    "reference": _reference,
    "cpu": _cpu,
    "vulkan": _absent("vulkan"),
    "cuda": _absent("cuda"),
}
_GPUS = ("cuda", "vulkan")  # the better one first: it needs no copy through the host

DEVICES = ("auto", "cpu", "gpu", *_GPUS, "reference")
"""What `device=` accepts. `gpu` is the best GPU backend there is; `auto` decides by size."""

_lock = threading.RLock()
_opened: dict[str, Backend] = {}  # in the order of opening
_refused: dict[str, DeviceError] = {}  # why a GPU could not be opened, so that it is tried once
_inherited: list[Backend] = []  # a parent's, which a forked child must neither use nor close
_hooked = False
_last: str | None = None
_thread = threading.local()


def check_device(device: str) -> None:
    """Whether `device` is one of `DEVICES`; opens nothing.

    Raises:
        DeviceError: It is not. The text names the nearest one that is.
    """
    if device not in DEVICES:
        raise _unknown("device", device, DEVICES)


def open_device(name: str) -> Backend:
    """Open a backend of your own; close it when done.

    Args:
        name: `reference` (torch, slow, the truth), `cpu`, `vulkan` or `cuda`.
    Raises:
        DeviceError: There is no such backend, it is not installed, or this machine has no such
            device.
    """
    if name not in _OPENERS:
        raise _unknown("open_device", name, tuple(_OPENERS))
    try:
        return _OPENERS[name]()
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
    for name in _GPUS:
        backend = _opened.get(name)
        if backend is not None:
            return backend
        with _lock:
            if name in _refused:
                continue
            try:
                return default(name)
            except DeviceError as error:
                _refused[name] = error
    return None


def gpu_trouble() -> str:
    """Why `best_gpu` found none, one sentence a backend."""
    return "; ".join(str(error) for error in list(_refused.values()))


def adapter() -> str | None:
    """The GPU that `device="gpu"` draws on, as its driver calls it; None where there is none.

    Opens it if need be, which may take a moment the first time.
    """
    gpu = best_gpu()
    return None if gpu is None else gpu.adapter


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
    with _lock:
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
    global _lock, _last, _thread
    _lock = threading.RLock()
    _thread = threading.local()
    _last = None
    _inherited.extend(_opened.values())  # kept alive, so that nothing finalises them here
    _opened.clear()
    _refused.clear()
