"""Moire: two zone plates laid over each other, of which the parameter moves one.

Here to break what stores an image in texels or blurs what it cannot resolve: the rings grow finer
without end, up to 0.41 of the Nyquist frequency of 512 x 512 in the corners, and all of them move
at once. Every pixel is smooth; the fringes that the eye sees are in no pixel by themselves.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import Array, colour, inputs
from .scene import Scene

__all__ = ["MOIRE"]

# cos(100 r^2), with the phase in turns: 100 / (2 pi). WGSL promises the precision of cos in
# [-pi, pi] alone, so both texts take off whole turns first.
_WGSL = """
fn moire_plate(d: vec2f) -> f32 {
    let turns = 15.915494 * (d.x * d.x + d.y * d.y);
    return 0.5 + 0.5 * cos(6.2831855 * (turns - floor(turns) - 0.5));
}

fn scene_color(p: vec2f, t: f32) -> vec3f {
    let fixed = moire_plate(p);
    let moved = moire_plate(p - vec2f(0.5 * (t - 0.5), 0.2 * (t - 0.5)));
    return vec3f(
        0.015 + 0.60 * fixed + 0.22 * moved,
        0.020 + 0.40 * fixed + 0.38 * moved,
        0.035 + 0.20 * fixed + 0.62 * moved
    );
}
"""


def _plate(x: Array, y: Array) -> Array:
    turns = 15.915494 * (x * x + y * y)
    return np.asarray(0.5 + 0.5 * np.cos(6.2831855 * (turns - np.floor(turns) - 0.5)))


def _evaluate(x: npt.ArrayLike, y: npt.ArrayLike, t: npt.ArrayLike) -> Array:
    x, y, t = inputs(x, y, t)
    shape = np.broadcast_shapes(x.shape, y.shape, t.shape)
    fixed = _plate(x, y)
    moved = _plate(x - 0.5 * (t - 0.5), y - 0.2 * (t - 0.5))
    rgb = (
        0.015 + 0.60 * fixed + 0.22 * moved,
        0.020 + 0.40 * fixed + 0.38 * moved,
        0.035 + 0.20 * fixed + 0.62 * moved,
    )
    return colour(rgb, shape)


MOIRE = Scene(
    name="moire",
    title="two zone plates, one of them moving",
    parameter=(0.0, 1.0),
    parameter_name="shift",
    wgsl=_WGSL,
    evaluate=_evaluate,
    group="more",
)
