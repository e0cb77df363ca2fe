"""What `raster.py` times: the cells, their made-up scenes, and how many pairs those have."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import doublure_kernels as kernels
import numpy as np
import torch
from doublure_kernels.scene import CULL_WEIGHT
from numba import njit, prange
from torch import Tensor

__all__ = ["SEED_GPU_MS", "SEED_MS", "Cell", "call", "cells", "count_pairs", "scene"]

SEED_MS = {
    (64, 32): 5.9, (64, 128): 23, (64, 512): 102,
    (128, 32): 22, (128, 128): 83, (128, 512): 348,
    (256, 32): 89, (256, 128): 341, (256, 512): 1396,
}  # fmt: skip
"""What a single-threaded Rust rasterizer takes for B=16, sigma .004 on a 2-core machine of the kind
this was written on: milliseconds of forward and backward, by size and triangles."""

SEED_GPU_MS = {(256, 32): 3.3, (256, 128): 9.0, (256, 512): 42.5}
"""What that rasterizer's authors published for an RTX 4090, likewise."""

GPU_CELLS = (
    *((16, size, triangles, 0.004, "small") for size, triangles in SEED_MS),
    (1, 64, 32, 0.004, "small"), (1, 256, 512, 0.004, "small"), (64, 64, 128, 0.004, "small"),
    (1, 512, 2048, 0.004, "small"), (16, 512, 2048, 0.004, "small"),
    (1, 1024, 8192, 0.004, "small"), (16, 256, 512, 0.02, "small"), (16, 256, 512, 0.0015, "small"),
    (16, 256, 512, 0.004, "opaque"), (16, 256, 512, 0.004, "full"),
)  # fmt: skip
"""Batch, size, triangles, sigma and scene: the published table, small, large, soft, sharp, deep."""


@dataclass(frozen=True)
class Cell:
    op: str
    batch: int
    size: int
    triangles: int
    sigma: float
    scene: str


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    ops = args.op.split(",")
    if args.cells == "seed":
        for op, (size, triangles) in itertools.product(ops, SEED_MS):
            yield Cell(op, 16, size, triangles, 0.004, "small")
        return
    if args.cells == "gpu":
        for op in ops:
            yield from (Cell(op, *cell) for cell in GPU_CELLS)
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


def call(cell: Cell, params: Tensor, targets: Tensor, device: str) -> Callable[[], Any]:
    if cell.op == "fused":
        return lambda: kernels.fused_loss(params, targets, cell.sigma, device=device)
    return lambda: kernels.rasterize(
        params, cell.size, cell.size, cell.sigma, channels_first=False, device=device
    )


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
