"""Timing a few calls on each backend, and keeping what was learned for this machine and driver.

`device="auto"` reads the file; only `calibrate` writes it (`doublure calibrate`). A calibration
holds for one processor, one number of cores and one version of this package, and what it says of a
GPU for one device and driver. Anything else in the file, or a damaged file, counts as none.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from . import devices
from .backend import Backend
from .costs import Model, Work, fit, touching
from .errors import DeviceError

__all__ = [
    "CELLS",
    "Calibration",
    "Cell",
    "Measured",
    "cache_file",
    "calibrate",
    "cores",
    "identity",
    "load",
    "save",
    "status",
    "warn",
]

_FORMAT = 1
_KEPT = 16  # machines in a file, which may be on a shared home directory
_LEAST = 8  # cells: with fewer the fit says little


@dataclass(frozen=True, slots=True)
class Cell:
    """A call to time: fused forward and backward of made-up scenes.

    Attributes:
        batch: Scenes.
        size: Pixels a side.
        triangles: In each scene.
        sigma: Edge softness.
        wide: Corners anywhere, instead of within .12 of a centre.
    """

    batch: int
    size: int
    triangles: int
    sigma: float = 0.004
    wide: bool = False


CELLS = (
    Cell(1, 64, 4),
    Cell(1, 64, 32),
    Cell(1, 64, 512),
    Cell(4, 64, 128),
    Cell(1, 256, 32),
    Cell(16, 64, 32),
    Cell(4, 256, 4),
    Cell(1, 64, 128, wide=True),
    Cell(1, 256, 128, sigma=0.02),
    Cell(1, 256, 512),
    Cell(1, 128, 2048),
    Cell(16, 64, 512),
    Cell(1, 256, 128, wide=True),
    Cell(4, 128, 512),
    Cell(16, 256, 4, wide=True),
    Cell(4, 64, 512, wide=True),
    Cell(1, 512, 512),
    Cell(16, 128, 128),
    Cell(16, 256, 32),
    Cell(64, 128, 32),
    Cell(1, 512, 2048),
    Cell(16, 128, 128, wide=True),
    Cell(16, 256, 128, sigma=0.02),
    Cell(16, 256, 512),
)
"""The lightest first, so that a slow device that runs out of time has the same ones as others."""


@dataclass(frozen=True)
class Measured:
    """One backend, for tensors in one place.

    Attributes:
        backend: `cpu`, `vulkan` or `cuda`.
        where: `cpu` or `cuda`, where the tensors were.
        device: See `identity`; empty for the processor.
        model: Fitted to `cells`.
        cells: What was timed, and what each call took, milliseconds.
        error: Mean of |expected/timed - 1| over the cells.
    """

    backend: str
    where: str
    device: dict[str, str]
    model: Model
    cells: tuple[tuple[Cell, float], ...]
    error: float


@dataclass(frozen=True)
class Calibration:
    """Of one machine.

    Attributes:
        made: When, ISO 8601, UTC.
        machine: Processor, cores, and this package's version.
        measured: One of each backend and place.
        seconds: What it took.
    """

    made: str
    machine: dict[str, str]
    measured: tuple[Measured, ...]
    seconds: float

    def find(self, backend: str, where: str) -> Measured | None:
        """What is known of a backend, for tensors in a place."""
        for one in self.measured:
            if (one.backend, one.where) == (backend, where):
                return one
        return None

    def to_dict(self) -> dict[str, Any]:
        """As the file has it."""
        return {
            "made": self.made,
            "machine": self.machine,
            "seconds": self.seconds,
            "measured": [
                {
                    "backend": one.backend,
                    "where": one.where,
                    "device": one.device,
                    "error": one.error,
                    "model": one.model.to_dict(),
                    "cells": [{**asdict(cell), "ms": ms} for cell, ms in one.cells],
                }
                for one in self.measured
            ],
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Calibration:
        """The other way.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: It is not what `to_dict` gives.
        """
        return cls(
            str(stored["made"]),
            {str(key): str(value) for key, value in stored["machine"].items()},
            tuple(
                Measured(
                    str(one["backend"]),
                    str(one["where"]),
                    {str(key): str(value) for key, value in one["device"].items()},
                    Model.from_dict(one["model"]),
                    tuple(
                        (Cell(**{k: v for k, v in cell.items() if k != "ms"}), float(cell["ms"]))
                        for cell in one["cells"]
                    ),
                    float(one["error"]),
                )
                for one in stored["measured"]
            ),
            float(stored["seconds"]),
        )


def warn(text: str, *args: object) -> None:
    """Log it; `logging` comes only now, as its import alone registers something to run at exit."""
    import logging

    logging.getLogger(__name__).warning(text, *args)


# What a calibration holds for.


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def machine() -> dict[str, str]:
    """What must be the same for a calibration to hold, but for GPUs."""
    try:
        package = metadata.version("doublure")
    except metadata.PackageNotFoundError:  # vendored into another program
        package = "unknown"
    return {"cpu": _cpu_name(), "cores": str(cores()), "package": package}


@cache
def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


_identities: weakref.WeakKeyDictionary[Backend, dict[str, str]] = weakref.WeakKeyDictionary()


def identity(backend: Backend) -> dict[str, str]:
    """A GPU backend's device and driver, by which a calibration knows it again; {} of others."""
    if backend.name not in devices.GPUS:
        return {}
    known = _identities.get(backend)
    if known is None:
        known = _identities[backend] = _identity(backend)
    return known


def _identity(backend: Backend) -> dict[str, str]:
    uuid, driver = _cuda_identity() if backend.name == "cuda" else ("", "")
    found = {"adapter": backend.adapter or "", "uuid": uuid, "driver": driver}
    for owner in (backend, getattr(backend, "device", None)):
        for key in ("uuid", "driver"):
            value = getattr(owner, key, None)
            if value and not callable(value):
                found[key] = value.hex() if isinstance(value, bytes) else str(value)
    return found


def _cuda_identity() -> tuple[str, str]:
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        driver = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        driver = "unknown"
    return str(getattr(properties, "uuid", "")), f"{driver}, CUDA {torch.version.cuda}"


# The file.


def cache_file() -> Path | None:
    """Where calibrations are kept; None where the user has no home directory."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "doublure" / "calibration.json"


def load() -> Calibration | None:
    """This machine's calibration; None where there is none, and where it is damaged or stale."""
    return status()[0]


def status() -> tuple[Calibration | None, str]:
    """This machine's calibration, and one sentence on it or on why there is none."""
    path = cache_file()
    if path is None or not path.exists():
        return None, "not calibrated; `doublure calibrate` does it in seconds"
    again = "run `doublure calibrate` again"
    try:
        stored = _read(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        return None, f"{path} is damaged ({reason}) and ignored; {again}"
    here = machine()
    for one in stored:
        if one.machine == here:
            return one, f"calibrated at {one.made}, in {path}"
    if not stored:
        return None, f"{path} is of another format and ignored; {again}"
    nearest = max(stored, key=lambda one: len(one.machine.items() & here.items()))
    changed = ", ".join(
        f"{key} {nearest.machine.get(key, 'none')} is now {value}"
        for key, value in here.items()
        if nearest.machine.get(key) != value
    )
    return None, f"{path} is stale ({changed}) and ignored; {again}"


def _read(path: Path) -> list[Calibration]:
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored["format"] != _FORMAT:
        return []
    return [Calibration.from_dict(one) for one in stored["machines"]]


def save(calibration: Calibration) -> Path:
    """Write it among those of other machines; whoever reads meanwhile sees the old file or the new.

    Raises:
        DeviceError: There is no home directory, or it cannot be written to.
    """
    path = cache_file()
    if path is None:
        raise DeviceError(
            "calibration: expected a home directory to keep it in, got none; set XDG_CACHE_HOME"
        )
    try:
        others = [one for one in _read(path) if one.machine != calibration.machine]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        others = []  # damaged or not there: nothing to keep
    machines = [calibration, *others][:_KEPT]
    text = json.dumps({"format": _FORMAT, "machines": [one.to_dict() for one in machines]})
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise DeviceError(
            f"calibration: expected {path.parent} to be writable, got {error}; set XDG_CACHE_HOME"
        ) from error
    return path


# Timing.


def calibrate(
    *, seconds: float = 4.0, note: Callable[[str, str], None] | None = None
) -> Calibration:
    """Time `CELLS` on every backend that there is. Nothing is written; see `save`.

    Blocks, and keeps all cores and the GPU busy. Compiling, where something was not compiled yet,
    comes on top of `seconds`.

    Args:
        seconds: For all timed calls together.
        note: Told backend and place before each is timed.
    Raises:
        ImportError: There is no torch, or no Numba.
    """
    start = time.perf_counter()
    pairs = list(_pairs())
    found = []
    for backend, where in pairs:
        if note is not None:
            note(backend.name, where)
        timed = _time_cells(backend.name, where, seconds / len(pairs))
        if len(timed) < _LEAST:
            warn(
                "calibration: only %d of %d calls were timed on %s (%s) before its time was up; "
                "it is left out. Give it more --seconds",
                len(timed), len(CELLS), backend.name, backend.adapter or "processor",
            )  # fmt: skip
            continue
        works = [work for work, _, _ in timed]
        times = [ms for _, _, ms in timed]
        model = fit(works, times)
        errors = [abs(model.ms(work) / ms - 1) for work, ms in zip(works, times, strict=True)]
        found.append(
            Measured(
                backend.name,
                where,
                identity(backend),
                model,
                tuple((cell, ms) for _, cell, ms in timed),
                statistics.fmean(errors),
            )
        )
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return Calibration(made, machine(), tuple(found), time.perf_counter() - start)


def _pairs() -> Iterator[tuple[Backend, str]]:
    import torch

    gpus = [found for name in devices.GPUS if (found := devices.gpu(name)) is not None]
    places = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for where in places:
        for backend in (devices.default("cpu"), *gpus):
            yield backend, where


def _time_cells(name: str, where: str, seconds: float) -> list[tuple[Work, Cell, float]]:
    found: list[tuple[Work, Cell, float]] = []
    spent = 0.0
    for i, cell in enumerate(CELLS):
        left = seconds - spent
        if left <= 0:
            break
        start = time.perf_counter()
        work, ms, untimed = _time_cell(cell, name, where, left / (len(CELLS) - i))
        # A cell's first call may have compiled, which is not what the time is for.
        spent += time.perf_counter() - start - untimed
        found.append((work, cell, ms))
    return found


def _time_cell(cell: Cell, name: str, where: str, seconds: float) -> tuple[Work, float, float]:
    """What was done, the median of some calls in milliseconds, and seconds until the first."""
    import torch

    from . import api

    params, targets = scene(cell)
    given = torch.from_numpy(params).to(where), torch.from_numpy(targets).to(where)

    def once() -> float:
        start = time.perf_counter()
        api.fused_loss(given[0], given[1], cell.sigma, device=name)
        if where == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    first = time.perf_counter()
    once()
    untimed = time.perf_counter() - first
    times = [once()]
    end = time.perf_counter() + seconds - times[0]
    while time.perf_counter() < end and len(times) < 25:
        times.append(once())
    share = touching(params, np.full(params.shape[:2], cell.sigma))
    work = Work(cell.batch, cell.triangles, cell.size**2, share)
    return work, statistics.median(times) * 1e3, untimed


def scene(cell: Cell) -> tuple[Any, Any]:
    """Made-up params [B, T, 10] and targets [B, H, W, 3], float32; the same ones every time."""
    rng = np.random.default_rng(0)
    shape = (cell.batch, cell.triangles)
    if cell.wide:
        corners = rng.uniform(-0.25, 1.25, (*shape, 6))
    else:
        centres = rng.uniform(0, 1, (*shape, 1, 2))
        corners = (centres + rng.uniform(-0.12, 0.12, (*shape, 3, 2))).reshape(*shape, 6)
    colours, alpha = rng.uniform(0, 1, (*shape, 3)), rng.uniform(0.3, 0.7, (*shape, 1))
    params = np.concatenate([corners, colours, alpha], -1).astype(np.float32)
    return params, rng.uniform(0, 1, (cell.batch, cell.size, cell.size, 3)).astype(np.float32)
