"""What every backend is handed: a batch of scenes in one canonical form, and how to draw it.

The public functions accept sigma as a number, one value a triangle or one an item, one background
or one an item, and so on; here everything has its full shape, so that a backend checks nothing and
broadcasts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "COMPACT_RADIUS",
    "CULL_WEIGHT",
    "PARAMS",
    "Gradients",
    "Kernel",
    "Raster",
    "Scene",
    "Support",
]

PARAMS = 10
"""x0 y0 x1 y1 x2 y2 r g b a: normalised image coordinates, linear RGB, opacity."""

CULL_WEIGHT = 1e-6
"""A weight (opacity times coverage) of this or less counts as nothing."""

COMPACT_RADIUS = 3.0
"""Where the compact kernel ends, in sigmas: its slope on the edge then equals the sigmoid's."""

Kernel = Literal["sigmoid", "compact"]
Support = Literal["exact", "bbox6"]


@dataclass(frozen=True, slots=True)
class Raster:
    """How scenes are drawn.

    Attributes:
        height: Pixels, 1 or more.
        width: Pixels, 1 or more.
        kernel: Coverage of a signed distance sd, positive inside. `sigmoid`: 1/(1 + e^(-sd/sigma)).
            `compact`: u²(3 - 2u) of u = clamp(½ + sd/(6 sigma), 0, 1), nothing beyond 3 sigma.
        support: `exact` draws whatever weighs more than `CULL_WEIGHT`; `bbox6` also leaves out
            pixels whose centres lie outside the triangle's bounding box padded by 6 sigma.
        alpha: Draw a fourth channel, 1 - Π(1 - w), beside the three of colour.
    """

    height: int
    width: int
    kernel: Kernel = "sigmoid"
    support: Support = "exact"
    alpha: bool = False

    @property
    def channels(self) -> int:
        return 4 if self.alpha else 3


@dataclass(frozen=True, slots=True)
class Scene:
    """A batch of triangle scenes, in arrays of the backend's own kind (NumPy, or torch on CUDA).

    All floating arrays share one dtype, float32 or float64. Axes that were broadcast have stride 0.

    Attributes:
        params: [B, T, 10], index 0 furthest back.
        sigma: [B, T], greater than 0.
        background: [B, 3].
        counts: [B] int64, 0..T: item b has its first `counts[b]` triangles only.
    """

    params: Any
    sigma: Any
    background: Any
    counts: Any


@dataclass(frozen=True, slots=True)
class Gradients:
    """Of a loss, in the dtype of the scene; zero for triangles that are not there or not finite.

    Attributes:
        params: [B, T, 10].
        sigma: [B, T].
        background: [B, 3].
    """

    params: Any
    sigma: Any
    background: Any
