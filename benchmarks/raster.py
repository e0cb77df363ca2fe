"""What drawing, comparing and differentiating soft triangles costs, cell by cell.

Each cell is timed through the public functions, on torch tensors, beside eager torch computing the
same function in the same run, and beside two floors of this machine: moving the bytes that must be
moved, and computing what the (pixel, triangle) pairs need.

    python benchmarks/raster.py --cells seed --json raster.json

Eager torch evaluates every triangle at every pixel, a strip of rows at a time; where an image would
take minutes it is timed on some of its rows and items, and multiplied (`eager_share` says of how
much it was timed; its cost is proportional to rows and items).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import doublure_kernels as kernels
import numpy as np
import torch
from _streams import hardware
from doublure_kernels import reference
from doublure_kernels.scene import CULL_WEIGHT, Raster
from numba import njit, prange
from torch import Tensor

SEED_MS = {
    (64, 32): 5.9, (64, 128): 23, (64, 512): 102,
    (128, 32): 22, (128, 128): 83, (128, 512): 348,
    (256, 32): 89, (256, 128): 341, (256, 512): 1396,
}  # fmt: skip
"""What a single-threaded Rust rasterizer takes for B=16, sigma .004 on a 2-core machine of the kind
this was written on: milliseconds of forward and backward, by size and triangles."""

# Floating-point operations a pair: where the edge is soft, a special function counting as 8, and
# where coverage is 1. A fused pass over the latter needs colours and transmittance alone.
_SOFT, _SOLID = 120 + 6 * 8, 30

_HEAD = (
    "op         B  size     T  sigma scene         ms   spread      eager   ratio   Mpairs    floor"
)


@dataclass(frozen=True)
class Cell:
    op: str
    batch: int
    size: int
    triangles: int
    sigma: float
    scene: str


def main() -> None:
    args = _arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = []
    print(f"{hardware(torch.get_num_threads())}; backend {args.device}")
    bandwidth, peak = _bandwidth(), _peak()
    print(f"floors from {bandwidth / 1e9:.1f} GB/s copied and {peak / 1e9:.0f} GFLOP/s multiplied")
    print(_HEAD)
    for cell in _cells(args):
        row = measure(cell, args, bandwidth, peak)
        rows.append(row)
        ratio = f"{row['eager_ms'] / row['ms_median']:.0f}x" if row["eager_ms"] else "-"
        line = (
            f"{cell.op:8} {cell.batch:3} {cell.size:5} {cell.triangles:5} {cell.sigma:6} "
            f"{cell.scene:6} {row['ms_median']:9.3f} {row['ms_spread']:8.3f} "
            f"{row['eager_ms'] or math.nan:10.1f} {ratio:>7} {row['pairs'] / 1e6:8.2f} "
            f"{row['floor_ms']:8.3f}"
        )
        known = SEED_MS.get((cell.size, cell.triangles))
        if known and (cell.op, cell.batch, cell.sigma, cell.scene) == ("fused", 16, 0.004, "small"):
            line += f"   {known / row['ms_median']:.1f}x as fast as {known} ms"
        print(line, flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


def measure(cell: Cell, args: argparse.Namespace, bandwidth: float, peak: float) -> dict[str, Any]:
    params, targets = scene(cell)
    with torch.no_grad():
        run = _call(cell, params, targets, args.device)
        run()
        times = _times(run, args)
    soft, solid = count_pairs(params, cell)
    pixels = cell.batch * cell.size**2
    moved = 12 * pixels + (80 if cell.op == "fused" else 40) * cell.batch * cell.triangles
    share = 1.0 if cell.op == "fused" else 1 / 3  # forward: no way back
    floor = max(moved / bandwidth, share * (_SOFT * soft + _SOLID * solid) / peak) * 1e3
    eager, timed = (None, 0.0) if args.no_eager else _eager(cell, params, targets)
    return {
        "backend": kernels.last_device(), "op": cell.op, "B": cell.batch, "H": cell.size,
        "W": cell.size, "T": cell.triangles, "sigma": cell.sigma, "scene": cell.scene,
        "ms_median": statistics.median(times), "ms_spread": max(times) - min(times),
        "ms_min": min(times), "eager_ms": eager, "eager_share": timed, "pairs": soft + solid,
        "floor_ms": floor, "hardware": hardware(torch.get_num_threads()),
    }  # fmt: skip


def scene(cell: Cell) -> tuple[Tensor, Tensor]:
    """`small`: vertices within .12 of a centre; `opaque`: with alpha 1; `full`: anywhere."""
    rng = np.random.default_rng(0)
    shape = (cell.batch, cell.triangles)
    if cell.scene == "full":
        corners = rng.uniform(-0.25, 1.25, (*shape, 6))
    else:
        centres = rng.uniform(0, 1, (*shape, 1, 2))
        corners = (centres + rng.uniform(-0.12, 0.12, (*shape, 3, 2))).reshape(*shape, 6)
    alpha = np.ones((*shape, 1)) if cell.scene == "opaque" else rng.uniform(0.3, 0.7, (*shape, 1))
    params = np.concatenate([corners, rng.uniform(0, 1, (*shape, 3)), alpha], -1)
    targets = rng.uniform(0, 1, (cell.batch, cell.size, cell.size, 3))
    return torch.tensor(params, dtype=torch.float32), torch.tensor(targets, dtype=torch.float32)


def _call(cell: Cell, params: Tensor, targets: Tensor, device: str) -> Callable[[], Any]:
    if cell.op == "fused":
        return lambda: kernels.fused_loss(params, targets, cell.sigma, device=device)
    return lambda: kernels.rasterize(
        params, cell.size, cell.size, cell.sigma, channels_first=False, device=device
    )


def _times(run: Callable[[], Any], args: argparse.Namespace) -> list[float]:
    """Milliseconds a call: as many as fit the time, 3 at least, in groups where they are short."""
    start = time.perf_counter()
    run()
    once = time.perf_counter() - start
    group = max(1, round(0.004 / once))
    repeats = max(3, min(args.repeats, round(args.seconds / (once * group))))
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(group):
            run()
        found.append((time.perf_counter() - start) / group * 1e3)
    return found


def _eager(cell: Cell, params: Tensor, targets: Tensor) -> tuple[float, float]:
    """Milliseconds of eager torch for the whole cell, and the share of it that was timed."""
    pairs = 1 << 22  # at once: about a gigabyte with what autograd keeps
    rows = max(1, min(cell.size, pairs // (cell.size * cell.triangles)))
    items = max(1, min(cell.batch, pairs // (cell.size * cell.triangles * rows)))
    strips = -(-cell.size // rows) * -(-cell.batch // items)
    timed = min(strips, 3)
    some = params[:items].clone().requires_grad_(cell.op == "fused")
    sigma = torch.full(some.shape[:2], cell.sigma)
    counts = torch.full((items,), cell.triangles)
    raster = Raster(cell.size, cell.size)
    prepared = reference._prepare(some.detach(), sigma, counts)  # the first call, untimed
    reference._draw_rows(prepared, torch.zeros(items, 3), raster, 0, 1)
    start = time.perf_counter()
    for strip in range(timed):
        top = (strip * rows) % max(1, cell.size - rows + 1)
        with torch.set_grad_enabled(cell.op == "fused"):
            prepared = reference._prepare(some, sigma, counts)
            image = reference._draw_rows(prepared, torch.zeros(items, 3), raster, top, top + rows)
            if cell.op == "fused":
                loss = (image - targets[:items, top : top + rows]).square().sum()
                torch.autograd.grad(loss, some)
    spent = time.perf_counter() - start
    whole = cell.batch * cell.size / (timed * items * rows)
    return spent * whole * 1e3, min(1.0, 1 / whole)


def count_pairs(params: Tensor, cell: Cell) -> tuple[int, int]:
    """(pixel, triangle) pairs that weigh over the threshold: softly, and with a coverage of 1.

    Counted in four items at most, and multiplied.
    """
    few = params[:4].double().numpy()
    soft, solid = _count(few, cell.size, cell.sigma, CULL_WEIGHT)
    return round(soft * cell.batch / len(few)), round(solid * cell.batch / len(few))


@njit(parallel=True, fastmath=True, cache=True)
def _count(params: Any, size: int, sigma: float, cull: float) -> Any:  # pragma: no cover
    soft, solid = 0, 0
    for index in prange(params.shape[0] * params.shape[1]):
        v = params[index // params.shape[1], index % params.shape[1]]
        reach = sigma * math.log(max(v[9] / cull - 1.0, 1e-300))
        first = max(0, int((min(v[1], v[3], v[5]) - reach) * size))
        last = min(size, int((max(v[1], v[3], v[5]) + reach) * size) + 1)
        left = max(0, int((min(v[0], v[2], v[4]) - reach) * size))
        right = min(size, int((max(v[0], v[2], v[4]) + reach) * size) + 1)
        for y in range(first, last):
            for x in range(left, right):
                px, py = (x + 0.5) / size, (y + 0.5) / size
                near, positive, negative = 1e300, True, True
                for k in range(3):
                    n = (k + 1) % 3
                    ex, ey = v[2 * n] - v[2 * k], v[2 * n + 1] - v[2 * k + 1]
                    qx, qy = px - v[2 * k], py - v[2 * k + 1]
                    along = (qx * ex + qy * ey) / max(ex * ex + ey * ey, 1e-300)
                    along = min(max(along, 0.0), 1.0)
                    near = min(near, (qx - along * ex) ** 2 + (qy - along * ey) ** 2)
                    side = ex * qy - ey * qx
                    positive = positive and side >= 0
                    negative = negative and side <= 0
                near = math.sqrt(near)
                if positive or negative:
                    if near > 17.5 * sigma:
                        solid += 1
                    else:
                        soft += 1
                elif near < reach:
                    soft += 1
    return soft, solid


def _bandwidth() -> float:
    """Bytes a second, read and written, of copying what no cache holds."""
    source, sink = torch.zeros(32 << 20), torch.empty(32 << 20)
    sink.copy_(source)
    best = min(_seconds(lambda: sink.copy_(source)) for _ in range(5))
    return 2 * source.nbytes / best


def _peak() -> float:
    """Floating-point operations a second of multiplying matrices."""
    a = torch.rand(1024, 1024)
    a @ a
    return 2 * 1024**3 / min(_seconds(lambda: a @ a) for _ in range(9))


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cells(args: argparse.Namespace) -> Iterator[Cell]:
    ops = args.op.split(",")
    if args.cells == "seed":
        for op, (size, triangles) in itertools.product(ops, SEED_MS):
            yield Cell(op, 16, size, triangles, 0.004, "small")
        return
    batches, sizes, counts = (1, 16, 64), (64, 128, 256, 512), (32, 128, 512, 2048)
    sigmas, scenes = (0.02, 0.004, 0.0015), ("small", "opaque", "full")
    if args.cells == "few":
        batches, sizes, counts, scenes = (1, 16), (64, 256), (32, 512), ("small", "full")
    one = Cell("fused", 1, 256, 256, 0.004, "small")
    for op in ops:
        yield Cell(op, *(one.batch, one.size, one.triangles, one.sigma, one.scene))
        for what, batch, size, count, sigma in itertools.product(
            scenes, batches, sizes, counts, sigmas
        ):
            if what == "small" or (batch == 16 and sigma == 0.004):
                yield Cell(op, batch, size, count, sigma, what)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cells", choices=["seed", "few", "all"], default="few",
        help="seed: nine of a published table; few: minutes; all: the whole grid, hours",
    )  # fmt: skip
    parser.add_argument("--op", default="fused", help="fused, forward, or both with a comma")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="torch's, for eager")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--seconds", type=float, default=1.0, help="at most, a cell")
    parser.add_argument("--no-eager", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
