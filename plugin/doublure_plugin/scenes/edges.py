"""Hard edges: a checker, and a disc that slides over it in its own colours. Nothing is smoothed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import Array, inputs
from .scene import Scene

__all__ = ["EDGES"]

_WGSL = """
fn scene_color(p: vec2f, t: f32) -> vec3f {
    let cell = vec2i(floor(p * 4.0));
    let odd = ((cell.x + cell.y) & 1) == 1;
    let c = p - vec2f(0.55 * cos(t), 0.45 * sin(2.0 * t));
    let inside = c.x * c.x + c.y * c.y < 0.1225;
    let floor_color = select(vec3f(0.035, 0.075, 0.14), vec3f(0.62, 0.60, 0.52), odd);
    let disc_color = select(vec3f(0.85, 0.36, 0.10), vec3f(0.36, 0.045, 0.035), odd);
    return select(floor_color, disc_color, inside);
}
"""

# Rows: checker even, checker odd, disc even, disc odd.
_COLOURS = np.array(
    [(0.035, 0.075, 0.14), (0.62, 0.60, 0.52), (0.85, 0.36, 0.10), (0.36, 0.045, 0.035)], np.float32
)


def _evaluate(x: npt.ArrayLike, y: npt.ArrayLike, t: npt.ArrayLike) -> Array:
    x, y, t = inputs(x, y, t)
    odd = (np.floor(x * 4.0).astype(np.int32) + np.floor(y * 4.0).astype(np.int32)) & 1
    cx, cy = x - 0.55 * np.cos(t), y - 0.45 * np.sin(2.0 * t)
    inside = cx * cx + cy * cy < np.float32(0.1225)
    return _COLOURS[odd + 2 * inside]


EDGES = Scene(
    name="edges",
    title="hard-edged checker with a moving disc",
    parameter=(0.0, 6.2831855),
    parameter_name="phase",
    wgsl=_WGSL,
    evaluate=_evaluate,
)
