"""What the training benchmarks share: a simulated host's rows, true frames, and their scores."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from _machine import cpu_name
from doublure_bridge.scores import peak_ratio, psnr_db, relmse, tonemap
from doublure_plugin.scenes import Scene
from doublure_trainer.loop import Candidate
from doublure_trainer.models import build, load_tensors
from numpy.typing import NDArray

__all__ = [
    "FRAMES_PER_S",
    "ROWS_PER_FRAME",
    "Array",
    "Picture",
    "frame",
    "hardware",
    "predict",
    "scores",
    "spread",
    "stream",
]

FRAMES_PER_S = 30
ROWS_PER_FRAME = 16384  # as the demo hands over

Array = NDArray[np.float32]
Picture = tuple[Array, Array]
"""Points [n, 3] and true colours [n, 3] of a whole frame."""


def stream(scene: Scene, seconds: float, sweep_s: float, seed: int) -> list[Array]:
    """A host's rows, one array a frame: random pixel centres of 512 x 512, one t a frame.

    Frame times vary by a third, as a real loop's do: with perfectly even ones t would repeat
    itself on the way back and most of the range would never be drawn.

    Args:
        seconds: How long the host runs.
        sweep_s: Seconds from one end of t to the other.
    """
    count = int(seconds * FRAMES_PER_S) + 2
    rng = np.random.default_rng(seed)
    phases = np.cumsum(rng.uniform(0.67, 1.33, count)) / FRAMES_PER_S / sweep_s % 2.0
    rows = np.empty((count, ROWS_PER_FRAME, 6), dtype=np.float32)
    for one, t in zip(rows, 1.0 - 2.0 * np.abs(1.0 - phases), strict=True):
        one[:, :2] = (rng.integers(0, 512, (ROWS_PER_FRAME, 2)) * 2 + 1) / 512 - 1
        one[:, 2] = t
        one[:, 3:] = scene.evaluate(one[:, 0], one[:, 1], np.float32(scene.denormalise(t)))
    return list(rows)


def frame(scene: Scene, t: float, size: int) -> Picture:
    """A whole frame at t in [-1, 1], `size` pixels a side, true colours and no noise."""
    centres = ((np.arange(size) * 2 + 1) / size - 1).astype(np.float32)
    y, x = np.meshgrid(centres, centres, indexing="ij")
    points = np.stack([x.ravel(), y.ravel(), np.full(size * size, t, np.float32)], axis=1)
    colours = scene.evaluate(points[:, 0], points[:, 1], np.float32(scene.denormalise(t)))
    return points, np.asarray(colours, dtype=np.float32)


def spread(bounds: list[tuple[float, float]], count: int) -> list[float]:
    """The middles of `count` slices, evenly over all of a kind."""
    chosen = np.linspace(0, len(bounds) - 1, min(count, len(bounds))).round().astype(int)
    return [(bounds[i][0] + bounds[i][1]) / 2 for i in sorted(set(chosen.tolist()))]


def predict(candidate: Candidate, points: Array) -> Array:
    """What a host would draw with a candidate's stored weights: linear RGB [n, 3]."""
    module = build(candidate.spec)
    load_tensors(module, candidate.tensors)
    return module.evaluate(torch.from_numpy(points)).numpy()


def scores(predicted: Sequence[Array], pictures: Sequence[Picture]) -> dict[str, float]:
    """Scores of predicted frames: PSNR over all pixels of all frames, and its spread over them."""
    each, errors, relative, peaks = [], [], [], []
    for ours, (_, true) in zip(predicted, pictures, strict=True):
        each.append(psnr_db(ours, true))
        errors.append(np.mean((tonemap(ours) - tonemap(true)) ** 2))
        relative.append(relmse(ours, true))
        peaks.append(peak_ratio(ours, true))
    return {
        "psnr_db": float(-10 * np.log10(max(np.mean(errors), 1e-12))),
        "psnr_db_median": statistics.median(each),
        "psnr_db_worst": min(each),
        "psnr_db_best": max(each),
        "relmse": float(np.mean(relative)),
        "peak_ratio": statistics.median(peaks),
    }


def hardware(threads: int) -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
