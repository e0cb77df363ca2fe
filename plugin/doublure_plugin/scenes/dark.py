"""Dark: a night of linear colours between 0.0001 and 0.01, and nothing brighter.

Here to break losses, scores and gates that measure in absolute light: all of it rounds to black,
and black scores 34 dB. Seen through an exposure of a hundred it is as rich as any image.

A point is warped by sines of itself eight times over; its last two moves are the image.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import Array, colour, inputs
from .scene import Scene

__all__ = ["DARK"]

_WGSL = """
fn scene_color(p: vec2f, t: f32) -> vec3f {
    var q = 1.7 * p + vec2f(0.4, -0.2);
    var d = vec2f(0.0, 0.0);
    for (var i = 0; i < 8; i++) {
        d = vec2f(sin(1.6 * q.y + t + 0.6 * d.x), sin(1.5 * q.x - 0.7 * t + 0.5 * d.y));
        q = q + 0.34 * d;
    }
    let a = 0.5 + 0.5 * sin(2.0 * q.x + 1.1 * q.y);
    let b = 0.25 + 0.25 * d.x + 0.25 * (1.0 + d.y);
    // From 1e-4 at 0 to 1e-2 at 1: 2^6.643856 is a hundred.
    return vec3f(
        1e-4 * exp2(6.643856 * a * a * b),
        1e-4 * exp2(6.643856 * (0.25 + 0.55 * a * b)),
        1e-4 * exp2(6.643856 * (0.35 + 0.65 * b * (1.0 - 0.6 * a)))
    );
}
"""


def _evaluate(x: npt.ArrayLike, y: npt.ArrayLike, t: npt.ArrayLike) -> Array:
    x, y, t = inputs(x, y, t)
    shape = np.broadcast_shapes(x.shape, y.shape, t.shape)
    qx, qy = np.broadcast_to(1.7 * x + 0.4, shape), np.broadcast_to(1.7 * y - 0.2, shape)
    dx: Array = np.zeros(1, np.float32)
    dy: Array = dx
    for _ in range(8):
        dx, dy = np.sin(1.6 * qy + t + 0.6 * dx), np.sin(1.5 * qx - 0.7 * t + 0.5 * dy)
        qx, qy = qx + 0.34 * dx, qy + 0.34 * dy
    a = 0.5 + 0.5 * np.sin(2.0 * qx + 1.1 * qy)
    b = 0.25 + 0.25 * dx + 0.25 * (1.0 + dy)
    rgb = (
        1e-4 * np.exp2(6.643856 * a * a * b),
        1e-4 * np.exp2(6.643856 * (0.25 + 0.55 * a * b)),
        1e-4 * np.exp2(6.643856 * (0.35 + 0.65 * b * (1.0 - 0.6 * a))),
    )
    return colour(rgb, shape)


DARK = Scene(
    name="dark",
    title="a night between 0.0001 and 0.01",
    parameter=(0.0, 6.2831855),
    parameter_name="time",
    wgsl=_WGSL,
    evaluate=_evaluate,
    group="more",
)
