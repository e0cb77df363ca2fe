"""What the rasterizer finds on this machine: one record a thing looked at, for `doublure doctor`.

Never raises, whatever is missing: each look is made for itself, and what it stumbles over is its
answer. A driver that crashes takes the process with it, so the caller asks a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module, metadata
from typing import Any

from . import calibrate, devices

__all__ = ["checks"]

Record = dict[str, str]
"""`name`, `status` (`ok`, or `note` where something optional is missing) and `text`."""


def checks() -> Iterator[Record]:
    """Every look, as it is made."""
    for name, look in (
        ("rasterizer cpu", _cpu),
        ("rasterizer cuda", _cuda),
        ("rasterizer vulkan", _vulkan),
        ("rasterizer auto", _auto),
        ("rasterizer calibration", _calibration),
    ):
        yield from _guarded(name, look)


def _guarded(name: str, look: Callable[[], Iterator[tuple[str, str]]]) -> Iterator[Record]:
    try:
        for status, text in look():
            yield {"name": name, "status": status, "text": text}
    except Exception as error:  # a doctor that stumbles still has to finish the round
        yield {"name": name, "status": "note", "text": f"{type(error).__name__}: {error}"}


def _cpu() -> Iterator[tuple[str, str]]:
    backend = devices.open_device("cpu")
    threads = getattr(backend, "threads", 1)
    backend.close()
    folder = os.environ.get("NUMBA_CACHE_DIR", "not set")
    yield "ok", f"numba {_version('numba')}, {threads} threads; NUMBA_CACHE_DIR {folder}"


def _cuda() -> Iterator[tuple[str, str]]:
    try:
        import torch
    except ImportError as error:
        yield "note", f"{error}; it draws torch's tensors: install doublure[kernels]"
        return
    packages = ", ".join(
        f"{name} {_version(name)}" for name in ("cuda-bindings", "cuda-pathfinder")
    )
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield "ok", f"torch {torch.__version__} {built}; {packages}; NVRTC {_nvrtc()}"
    for index in range(torch.cuda.device_count() if torch.version.cuda else 0):
        found = torch.cuda.get_device_properties(index)
        yield (
            "ok",
            (
                f"device {index}: {found.name}, compute capability {found.major}.{found.minor}, "
                f"{found.total_memory >> 20} MiB, {getattr(found, 'uuid', 'no UUID')}"
            ),
        )
    yield _taken("cuda")


def _nvrtc() -> str:
    """The version of CUDA's compiler, or why there is none."""
    try:
        nvrtc = import_module("cuda.bindings.nvrtc")
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the package, the library behind it, or a symbol in that
        return f"not found ({type(error).__name__}: {error})"
    return f"{major}.{minor}" if int(status) == 0 else f"not usable ({status})"


def _vulkan() -> Iterator[tuple[str, str]]:
    chosen = os.environ.get(devices.VULKAN_DEVICE)
    yield "ok", f"vulkan {_version('vulkan')}; {devices.VULKAN_DEVICE} {chosen or 'not set'}"
    try:
        diagnose = import_module(".gpu.vulkan.diagnose", __package__)
    except (ImportError, OSError) as error:
        yield "note", f"{error}; install doublure[kernels] and a Vulkan driver"
        return
    for record in diagnose.diagnose():
        yield "ok", _line(record)
    yield _taken("vulkan")


def _line(record: Any) -> str:
    """A plain record as text: its fields, but for those that are empty."""
    found = record if isinstance(record, dict) else _fields(record)
    return "; ".join(f"{key}: {value}" for key, value in found.items() if value not in (None, ""))


def _fields(record: Any) -> dict[str, Any]:
    if is_dataclass(record):
        return {field.name: getattr(record, field.name) for field in fields(record)}
    return {"found": record}


def _taken(name: str) -> tuple[str, str]:
    gpu = devices.gpu(name)
    if gpu is None:
        return "note", f"not used: {devices.gpu_refusals().get(name, 'not there')}"
    return "ok", f"used: {gpu.adapter}, {calibrate.identity(gpu)}"


def _auto() -> Iterator[tuple[str, str]]:
    from . import policy

    gpu, cores = devices.best_gpu(), calibrate.cores()
    best = f'device="gpu" is {gpu.name} ({gpu.adapter})' if gpu else "no GPU backend"
    yield (
        "ok" if gpu else "note",
        f"{best}; the CPU draws with {cores} cores",
    )
    for batch, triangles, size in ((1, 32, 64), (1, 512, 256), (16, 512, 256)):
        found = policy.explain(batch, triangles, size, size)
        times = ", ".join(
            f"{one.name} {one.expected_ms:.2f} ms {one.source}"
            for one in found.candidates
            if one.expected_ms is not None
        )
        call = f"{batch} x {size} x {size}, {triangles} triangles"
        yield "ok", f'{call}: device="auto" is {found.chosen} ({times})'


def _calibration() -> Iterator[tuple[str, str]]:
    found, text = calibrate.status()
    if found is None:
        yield "note", text
        return
    known = ", ".join(f"{one.backend} on {one.where}" for one in found.measured)
    yield "ok", f"{text}: {known}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
