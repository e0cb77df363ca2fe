"""The least that `raster.py`'s cells can take: moving their bytes, and computing their pairs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from _raster_cells import Cell

__all__ = ["floors_ms", "host_bandwidth", "host_peak"]

# Floating-point operations a pair: where the edge is soft, a special function counting as 8, and
# where coverage is 1. A fused pass over the latter needs colours and transmittance alone.
_SOFT, _SOLID = 120 + 6 * 8, 30


def floors_ms(
    cell: Cell, soft: int, solid: int, bandwidth: float, peak: float
) -> tuple[float, float]:
    """Milliseconds of moving the bytes, and of computing the pairs."""
    pixels = cell.batch * cell.size**2
    moved = 12 * pixels + (80 if cell.op == "fused" else 40) * cell.batch * cell.triangles
    share = 1.0 if cell.op == "fused" else 1 / 3  # forward: no way back
    return moved / bandwidth * 1e3, share * (_SOFT * soft + _SOLID * solid) / peak * 1e3


def host_bandwidth() -> float:
    """Bytes a second, read and written, of copying what no cache holds."""
    source, sink = torch.zeros(32 << 20), torch.empty(32 << 20)
    sink.copy_(source)
    best = min(_seconds(lambda: sink.copy_(source)) for _ in range(5))
    return 2 * source.nbytes / best


def host_peak() -> float:
    """Floating-point operations a second of multiplying matrices."""
    a = torch.rand(1024, 1024)
    a @ a
    return 2 * 1024**3 / min(_seconds(lambda: a @ a) for _ in range(9))


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
