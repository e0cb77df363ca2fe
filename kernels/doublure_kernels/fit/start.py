"""The first triangles of a fit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..scene import PARAMS
from .pictures import linear_to_srgb
from .settings import FitSettings

__all__ = ["first_triangles"]

Array = NDArray[Any]

_REACH = 0.15  # of `random`: how far vertices lie from their centre, each way
_BACK, _FRONT = 0.3, 0.06  # of `detail`: the radii of the first and of the last triangle
_WINDOWS = 8  # detail is averaged over this fraction of the height


def first_triangles(target: Array, settings: FitSettings) -> Array:
    """Triangles strewn over the picture, each in the picture's colour at its centroid.

    Args:
        target: Linear RGB, [H, W, 3].
    Returns:
        [T, 10] float32, opacities between 0.3 and 0.7.
    """
    rng = np.random.default_rng(settings.seed)
    count = settings.triangles
    centres = rng.uniform(0.0, 1.0, (count, 1, 2))
    if settings.start == "random":
        corners = centres + rng.uniform(-_REACH, _REACH, (count, 3, 2))
    else:
        # What is in front hides what is behind: large shapes anywhere first, and upon them ever
        # smaller ones, more and more of which lie where there is something to be seen.
        through = np.linspace(0.0, 1.0, count) if count > 1 else np.zeros(1)
        chosen = rng.uniform(0.0, 1.0, count) < through
        centres = np.where(chosen[:, None, None], _at_detail(target, count, rng), centres)
        radius = (_BACK * (_FRONT / _BACK) ** through)[:, None, None]
        turn = rng.uniform(0.0, 2 * np.pi, (count, 1)) + rng.uniform(-0.5, 0.5, (count, 3))
        angle = turn + np.arange(3) * (2 * np.pi / 3)
        corners = centres + radius * np.stack([np.cos(angle), np.sin(angle)], axis=2)
    triangles = np.empty((count, PARAMS), np.float32)
    triangles[:, :6] = corners.reshape(count, 6)
    height, width = target.shape[:2]
    middle = corners.mean(axis=1)
    column = np.clip((middle[:, 0] * width).astype(np.int64), 0, width - 1)
    row = np.clip((middle[:, 1] * height).astype(np.int64), 0, height - 1)
    triangles[:, 6:9] = target[row, column]
    triangles[:, 9] = rng.uniform(0.3, 0.7, count)
    return triangles


def _at_detail(target: Array, count: int, rng: np.random.Generator) -> Array:
    """Points [count, 1, 2], denser where brightness, as the eye sees it, changes."""
    bright = linear_to_srgb(np.clip(target, 0.0, 1.0).mean(axis=2, dtype=np.float64))
    height, width = bright.shape
    steps = np.zeros_like(bright)
    steps[1:] += np.abs(np.diff(bright, axis=0))
    steps[:, 1:] += np.abs(np.diff(bright, axis=1))
    window = max(1, height // _WINDOWS)
    for axis in (0, 1):
        steps = _box(steps, window, axis)
    density = steps.ravel() + 1e-6  # a flat picture has no detail, so any place is as good
    places = rng.choice(density.size, count, p=density / density.sum())
    points = np.stack([(places % width + 0.5) / width, (places // width + 0.5) / height], axis=1)
    return points[:, None]


def _box(values: Array, window: int, axis: int) -> Array:
    """Running sums over `window` values, of which those outside are 0."""
    sums = np.cumsum(values, axis=axis)
    length = values.shape[axis]
    at = np.arange(length)
    upper = np.take(sums, np.minimum(at + window // 2, length - 1), axis=axis)
    below = at - (window - window // 2)
    lower = np.take(sums, np.maximum(below, 0), axis=axis)
    shape = [1, 1]
    shape[axis] = length
    result: Array = upper - np.where((below >= 0).reshape(shape), lower, 0.0)
    return result
