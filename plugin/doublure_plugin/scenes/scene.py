"""What a scene is: one function of (x, y, t), written twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from .arrays import Array

__all__ = ["Scene", "pixel_centres"]


@dataclass(frozen=True, slots=True)
class Scene:
    """A procedural image with one parameter.

    Attributes:
        name: Key in `SCENES` and on the command line.
        title: What it shows, in a few words.
        parameter: Range of t as it is declared and sent, (low, high).
        parameter_name: What t means in this scene.
        wgsl: Defines `fn scene_color(p: vec2f, t: f32) -> vec3f`: p in [-1, 1] with x right and y
            down, t raw; linear RGB, unclamped. Every other name in it starts with the scene's own.
        evaluate: The same function in NumPy, `evaluate(x, y, t)` over broadcastable arrays, to
            float32 [..., 3].
        group: `main` for those that `all` means and the figures are of; `more` for those that are
            here to break things, which are asked for by name, or all together as `every`.
    """

    name: str
    title: str
    parameter: tuple[float, float]
    parameter_name: str
    wgsl: str = field(repr=False)
    evaluate: Callable[[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], Array] = field(repr=False)
    group: Literal["main", "more"] = "main"

    def image(self, width: int, height: int, t: float) -> Array:
        """The whole image in NumPy, float32 [height, width, 3]; t raw."""
        x, y = pixel_centres(width, height)
        return self.evaluate(x[None, :], y[:, None], np.float32(t))

    def normalise(self, t: float) -> float:
        """Raw t to [-1, 1]."""
        low, high = self.parameter
        return (t - low) / (high - low) * 2.0 - 1.0

    def denormalise(self, u: float) -> float:
        """[-1, 1] to raw t."""
        low, high = self.parameter
        return low + (u + 1.0) * 0.5 * (high - low)


def pixel_centres(width: int, height: int) -> tuple[Array, Array]:
    """Normalised centres of the columns [width] and rows [height]: (2i + 1)/N - 1."""
    x = (2.0 * np.arange(width, dtype=np.float32) + 1.0) / np.float32(width) - 1.0
    y = (2.0 * np.arange(height, dtype=np.float32) + 1.0) / np.float32(height) - 1.0
    return x.astype(np.float32), y.astype(np.float32)
