"""Negative: saturated colours of a wide gamut, written in a narrower one.

Here to break what clamps, takes a logarithm or assumes that light is positive: a pure Rec. 2020
green is -0.59 red in Rec. 709's linear primaries, and the brightest colours are above two. The
score after tone mapping cannot see below zero; the relative error can.

The matrix is that of ITU-R BT.2087-0, inverted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import Array, colour, inputs, smoothstep
from .scene import Scene

__all__ = ["NEGATIVE"]

_WGSL = """
fn negative_band(v: f32) -> f32 {
    let s = smoothstep(-0.6, 0.9, cos(v));
    return s * s;
}

fn scene_color(p: vec2f, t: f32) -> vec3f {
    var q = p;
    for (var i = 0; i < 12; i++) {
        let f = 1.3 + 0.11 * f32(i);
        q = q + 0.16 * vec2f(sin(f * q.y + 0.9 * t + f), cos(f * q.x - 0.6 * t + 1.9 * f));
    }
    let v = 2.6 * q.x + 1.4 * q.y + 0.5 * t;
    let light = 0.25 + 2.2 * negative_band(1.7 * q.y - 0.8 * q.x - 0.4 * t);
    let r = light * negative_band(v);
    let g = light * negative_band(v - 2.0943952);
    let b = light * negative_band(v + 2.0943952);
    return vec3f(
        1.660491 * r - 0.587641 * g - 0.072850 * b,
        -0.124550 * r + 1.132900 * g - 0.008349 * b,
        -0.018151 * r - 0.100579 * g + 1.118730 * b
    );
}
"""


def _band(v: Array) -> Array:
    s = smoothstep(-0.6, 0.9, np.cos(v))
    return np.asarray(s * s, dtype=np.float32)


def _evaluate(x: npt.ArrayLike, y: npt.ArrayLike, t: npt.ArrayLike) -> Array:
    x, y, t = inputs(x, y, t)
    shape = np.broadcast_shapes(x.shape, y.shape, t.shape)
    qx, qy = np.broadcast_to(x, shape), np.broadcast_to(y, shape)
    for i in range(12):
        f = 1.3 + 0.11 * i
        qx, qy = (
            qx + 0.16 * np.sin(f * qy + 0.9 * t + f),
            qy + 0.16 * np.cos(f * qx - 0.6 * t + 1.9 * f),
        )
    v = 2.6 * qx + 1.4 * qy + 0.5 * t
    light = 0.25 + 2.2 * _band(1.7 * qy - 0.8 * qx - 0.4 * t)
    r = light * _band(v)
    g = light * _band(v - 2.0943952)
    b = light * _band(v + 2.0943952)
    rgb = (
        1.660491 * r - 0.587641 * g - 0.072850 * b,
        -0.124550 * r + 1.132900 * g - 0.008349 * b,
        -0.018151 * r - 0.100579 * g + 1.118730 * b,
    )
    return colour(rgb, shape)


NEGATIVE = Scene(
    name="negative",
    title="wide-gamut colours below zero",
    parameter=(0.0, 6.2831855),
    parameter_name="time",
    wgsl=_WGSL,
    evaluate=_evaluate,
    group="more",
)
