"""What `raster.py` measures on a GPU beside end-to-end time: kernels, floors, plain torch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _raster_cells import Cell
from doublure_kernels import devices, reference
from doublure_kernels.backend import Backend
from doublure_kernels.scene import Raster
from torch import Tensor

__all__ = ["TORCH", "Eager", "floors", "kernel_ms", "places", "synchronize", "times"]

TORCH = ("eager", "compiled")
"""Not backends of the package, but what one would write in torch, on the GPU where there is one."""

# Pairs of a pixel and a triangle at once: some 250 bytes each with what autograd keeps.
_HOST_PAIRS, _GPU_PAIRS = 1 << 22, 1 << 27
_SLEEP_CYCLES = 4_000_000  # about 2 ms, in which the host gets ahead of the GPU


def places(device: str) -> tuple[str, ...]:
    """Where tensors are put for a device: where it works first, then on the host."""
    cuda = torch.cuda.is_available()
    if device in TORCH:
        return ("cuda",) if cuda else ("cpu",)
    return ("cuda", "cpu") if device in devices.GPUS and cuda else ("cpu",)


def synchronize(where: str) -> None:
    """Wait until a place has done all that it was given."""
    if where == "cuda":
        torch.cuda.synchronize()


def times(
    run: Callable[[], Any], where: str, repeats: int, seconds: float
) -> tuple[list[float], float]:
    """Milliseconds of calls that are waited for, and of a call among many that are not."""
    for _ in range(3):
        run()
    synchronize(where)
    start = time.perf_counter()
    found: list[float] = []
    while len(found) < 3 or (len(found) < repeats and time.perf_counter() - start < seconds):
        begin = time.perf_counter()
        run()
        synchronize(where)
        found.append((time.perf_counter() - begin) * 1e3)
    count = max(1, min(50, round(100 / statistics.median(found))))
    start = time.perf_counter()
    for _ in range(count):
        run()
    synchronize(where)
    return found, (time.perf_counter() - start) / count * 1e3


def kernel_ms(run: Callable[[], Any], device: str, where: str) -> float | None:
    """Milliseconds that the GPU itself works on a call; None where it cannot be told.

    CUDA: events around ten calls that the GPU begins after a pause, in which they were all put into
    its queue; what it idles between calls counts only where a call waits for it. Not told where
    the tensors are on the host, as such calls wait for their copies. Vulkan: its own timestamps.
    """
    if device == "vulkan":
        return _vulkan_ms(run, where)
    if where != "cuda":
        return None
    best = math.inf
    for _ in range(3):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(_SLEEP_CYCLES)
        first.record()
        for _ in range(10):
            run()
        last.record()
        last.synchronize()
        best = min(best, first.elapsed_time(last) / 10)
    return best


def _vulkan_ms(run: Callable[[], Any], where: str) -> float | None:
    backend = devices.default("vulkan")
    found = []
    for _ in range(7):
        run()
        synchronize(where)
        spent = _vulkan_ns(backend)
        if spent is None:
            return None
        found.append(spent * 1e-6)
    return statistics.median(found)


def _vulkan_ns(backend: Backend) -> float | None:
    return getattr(getattr(backend, "device", None), "elapsed_ns", None)


def floors() -> tuple[float, float]:
    """Of the GPU: bytes a second, read and written, and float32 operations a second, multiplied."""
    source = torch.zeros(1 << 28, device="cuda")
    sink = torch.empty_like(source)
    moved = 2 * source.nbytes / _event_seconds(lambda: sink.copy_(source))
    a = torch.rand(8192, 8192, device="cuda")
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no tensor cores: kernels here have none
    try:
        peak = 2 * 8192**3 / _event_seconds(lambda: a @ a)
    finally:
        torch.set_float32_matmul_precision(precision)
    return moved, peak


def _event_seconds(run: Callable[[], Any]) -> float:
    run()
    best = math.inf
    for _ in range(5):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        best = min(best, first.elapsed_time(last) * 1e-3)
    return best


class Eager:
    """The same function in plain torch, eager or compiled.

    It evaluates every triangle at every pixel, a strip of rows of some items at a time.

    Args:
        compiled: By `torch.compile`, for sizes that vary.
        budget_s: Seconds that compiling, and what else comes before timing, may take in all.
    """

    def __init__(self, compiled: bool = False, budget_s: float = math.inf) -> None:
        self.compiled = compiled
        self.left_s = budget_s
        self._draw: Any = None if compiled else _strip

    def measure(self, cell: Cell, params: Tensor, targets: Tensor) -> tuple[float, float]:
        """Milliseconds of the whole cell, and the share of it that was timed."""
        if self._draw is None:
            # Past its limit torch would go on without compiling, and say nothing.
            torch._dynamo.config.recompile_limit = 64
            self._draw = torch.compile(_strip, dynamic=True)
        where = params.device.type
        pairs = _GPU_PAIRS if where == "cuda" else _HOST_PAIRS
        rows = max(1, min(cell.size, pairs // (cell.size * cell.triangles)))
        items = max(1, min(cell.batch, pairs // (cell.size * cell.triangles * rows)))
        strips = -(-cell.size // rows) * -(-cell.batch // items)
        graded = cell.op == "fused"
        some = params[:items].clone().requires_grad_(graded)
        sigma = torch.full(some.shape[:2], cell.sigma, device=where)
        counts = torch.full((items,), cell.triangles, device=where)

        def strip(top: int) -> None:
            with torch.set_grad_enabled(graded):
                loss = self._draw(
                    some, sigma, counts, cell.size, top, targets[:items, top : top + rows]
                )
                if graded:
                    torch.autograd.grad(loss, some)

        timed = min(strips, 3)
        tops = [(i * rows) % max(1, cell.size - rows + 1) for i in range(timed)]
        begin = time.perf_counter()
        try:
            # Untimed: takes the memory, and compiles, for a first row of 0 and for another.
            for top in 2 * tops if self.compiled or where == "cuda" else tops[:1]:
                strip(top)
            synchronize(where)
        finally:
            self.left_s -= time.perf_counter() - begin
        begin = time.perf_counter()
        for top in tops:
            strip(top)
        synchronize(where)
        spent = time.perf_counter() - begin
        whole = cell.batch * cell.size / (timed * items * rows)
        return spent * whole * 1e3, min(1.0, 1 / whole)


def _strip(
    params: Tensor, sigma: Tensor, counts: Tensor, size: int, top: int, targets: Tensor
) -> Tensor:
    raster = Raster(size, size)  # here, or its numbers would be constants to the compiler
    triangles = reference._prepare(params, sigma, counts)
    black = params.new_zeros(params.shape[0], 3)
    bottom = top + targets.shape[1]
    image = reference._draw_rows(triangles, black, raster, top, bottom)
    return (image - targets).square().sum() if params.requires_grad else image
