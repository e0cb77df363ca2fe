"""Plasma: the demo-scene classic, a sum of travelling and circular sines through a palette.

The palette is the cosine palette of Inigo Quilez (https://iquilezles.org/articles/palettes/),
squared so that its dark ends are dark in linear light.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import Array, colour, inputs
from .scene import Scene

__all__ = ["PLASMA"]

_WGSL = """
fn plasma_wave(p: vec2f, t: f32) -> f32 {
    let a = sin(3.4 * p.x + t);
    let b = sin(4.2 * (p.x * sin(0.5 * t) + p.y * cos(0.33 * t)) + 0.8 * t);
    let c = p + vec2f(0.55 * sin(0.4 * t), 0.45 * cos(0.6 * t));
    let r = sin(6.0 * sqrt(c.x * c.x + c.y * c.y + 0.04) - 1.3 * t);
    let d = sin(5.2 * p.y + 1.7 * sin(2.1 * p.x - 0.7 * t));
    return 0.25 * (a + b + r + d);
}

fn plasma_ramp(v: f32, shift: f32) -> f32 {
    let c = 0.5 + 0.5 * cos(4.6 * v + shift);
    return c * c;
}

fn scene_color(p: vec2f, t: f32) -> vec3f {
    let v = plasma_wave(p, t);
    let base = 0.25 * t;
    let glow = 0.06 + 0.94 * v * v;
    return vec3f(
        0.04 + 0.96 * plasma_ramp(v, base + 5.6),
        0.02 + 0.70 * plasma_ramp(v, base + 4.2),
        0.05 + 0.90 * plasma_ramp(v, base + 2.7)
    ) * (0.75 + 0.5 * glow);
}
"""


def _ramp(v: Array, shift: Array) -> Array:
    c = 0.5 + 0.5 * np.cos(4.6 * v + shift)
    return np.asarray(c * c, dtype=np.float32)


def _evaluate(x: npt.ArrayLike, y: npt.ArrayLike, t: npt.ArrayLike) -> Array:
    x, y, t = inputs(x, y, t)
    a = np.sin(3.4 * x + t)
    b = np.sin(4.2 * (x * np.sin(0.5 * t) + y * np.cos(0.33 * t)) + 0.8 * t)
    cx, cy = x + 0.55 * np.sin(0.4 * t), y + 0.45 * np.cos(0.6 * t)
    r = np.sin(6.0 * np.sqrt(cx * cx + cy * cy + 0.04) - 1.3 * t)
    d = np.sin(5.2 * y + 1.7 * np.sin(2.1 * x - 0.7 * t))
    v = 0.25 * (a + b + r + d)
    base = 0.25 * t
    lift = 0.75 + 0.5 * (0.06 + 0.94 * v * v)
    red = (0.04 + 0.96 * _ramp(v, base + 5.6)) * lift
    green = (0.02 + 0.70 * _ramp(v, base + 4.2)) * lift
    blue = (0.05 + 0.90 * _ramp(v, base + 2.7)) * lift
    return colour((red, green, blue), v.shape)


PLASMA = Scene(
    name="plasma",
    title="travelling and circular sines",
    parameter=(0.0, 10.0),
    parameter_name="time",
    wgsl=_WGSL,
    evaluate=_evaluate,
)
