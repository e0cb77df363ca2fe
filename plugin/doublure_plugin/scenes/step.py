"""Steps in t: a relief under three lamps that are switched on and off, and a cut to another relief.

Here to break what takes the image for continuous in its parameter: between the switches nearly
nothing moves, at each of them the whole image jumps, and one shot lasts for a twenty-fifth of the
range only. Whoever interpolates along t shows a fade where there is a cut.

The relief is a sum of plane waves, turned by the golden angle from one to the next.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import Array, Vec3, colour, inputs
from .scene import Scene

__all__ = ["STEP"]

_WGSL = """
fn step_gradient(p: vec2f, shot: f32, t: f32) -> vec2f {
    var d = vec2f(1.0 - 0.4 * shot, 0.8 * shot);
    var f = 2.0 + shot;
    var phase = 0.3 + 1.1 * shot;
    var g = vec2f(0.0, 0.0);
    for (var i = 0; i < 10; i++) {
        g += d * (0.5 * cos(f * (d.x * p.x + d.y * p.y) + phase + 0.3 * t));
        d = vec2f(-0.7373688 * d.x - 0.6754903 * d.y, 0.6754903 * d.x - 0.7373688 * d.y);
        f = f * 1.14;
        phase = phase * -0.83 + 0.7;
    }
    return g;
}

fn step_lamp(p: vec2f, g: vec2f, lamp: vec3f) -> f32 {
    let to = vec3f(lamp.xy - p, lamp.z);
    let square = to.x * to.x + to.y * to.y + to.z * to.z;
    let facing = (to.z - 0.4 * (g.x * to.x + g.y * to.y))
        / sqrt(square * (1.0 + 0.16 * (g.x * g.x + g.y * g.y)));
    // Squared, so that it falls to zero without an edge.
    let lit = max(facing, 0.0);
    return lit * lit / (0.35 + square);
}

fn scene_color(p: vec2f, t: f32) -> vec3f {
    let shot = select(0.0, 1.0, t >= 0.54);
    let g = step_gradient(p, shot, t);
    let warm = select(0.0, 1.0, (t >= 0.17 && t < 0.40) || (t >= 0.54 && t < 0.83))
        * step_lamp(p, g, vec3f(-0.6 + 0.3 * t, -0.4, 0.5));
    let cool = select(0.0, 1.0, t < 0.29 || t >= 0.66)
        * step_lamp(p, g, vec3f(0.7, 0.1 + 0.3 * t, 0.6));
    let green = select(0.0, 1.0, (t >= 0.40 && t < 0.58) || t >= 0.83)
        * step_lamp(p, g, vec3f(-0.1, 0.7 - 0.2 * t, 0.4));
    let lift = 1.0 + 0.5 * shot;
    return vec3f(
        0.012 + lift * (0.70 * warm + 0.08 * cool + 0.22 * green),
        0.014 + lift * (0.34 * warm + 0.24 * cool + 0.50 * green),
        0.020 + lift * (0.10 * warm + 0.72 * cool + 0.20 * green)
    );
}
"""


def _gradient(x: Array, y: Array, shot: Array, t: Array) -> tuple[Array, Array]:
    dx, dy = 1.0 - 0.4 * shot, 0.8 * shot
    f = 2.0 + shot
    phase = 0.3 + 1.1 * shot
    gx: Array = np.zeros(1, np.float32)
    gy: Array = gx
    for _ in range(10):
        slope = 0.5 * np.cos(f * (dx * x + dy * y) + phase + 0.3 * t)
        gx, gy = gx + dx * slope, gy + dy * slope
        dx, dy = -0.7373688 * dx - 0.6754903 * dy, 0.6754903 * dx - 0.7373688 * dy
        f = f * 1.14
        phase = phase * -0.83 + 0.7
    return gx, gy


def _lamp(x: Array, y: Array, g: tuple[Array, Array], lamp: Vec3) -> Array:
    tx, ty, tz = lamp[0] - x, lamp[1] - y, lamp[2]
    square = tx * tx + ty * ty + tz * tz
    facing = (tz - 0.4 * (g[0] * tx + g[1] * ty)) / np.sqrt(
        square * (1.0 + 0.16 * (g[0] * g[0] + g[1] * g[1]))
    )
    lit = np.maximum(facing, np.float32(0.0))
    return np.asarray(lit * lit / (0.35 + square), dtype=np.float32)


def _on(t: Array, *spans: tuple[float, float]) -> Array:
    """1 where t lies in a span, its end not included."""
    found = np.zeros(t.shape, np.bool_)
    for low, high in spans:
        found |= (t >= np.float32(low)) & (t < np.float32(high))
    return found.astype(np.float32)


def _evaluate(x: npt.ArrayLike, y: npt.ArrayLike, t: npt.ArrayLike) -> Array:
    x, y, t = inputs(x, y, t)
    shape = np.broadcast_shapes(x.shape, y.shape, t.shape)
    forever = np.inf
    shot = _on(t, (0.54, forever))
    g = _gradient(x, y, shot, t)
    zero = np.zeros_like(t)
    warm = _on(t, (0.17, 0.40), (0.54, 0.83)) * _lamp(
        x, y, g, (-0.6 + 0.3 * t, zero - np.float32(0.4), zero + np.float32(0.5))
    )
    cool = _on(t, (-forever, 0.29), (0.66, forever)) * _lamp(
        x, y, g, (zero + np.float32(0.7), 0.1 + 0.3 * t, zero + np.float32(0.6))
    )
    green = _on(t, (0.40, 0.58), (0.83, forever)) * _lamp(
        x, y, g, (zero - np.float32(0.1), 0.7 - 0.2 * t, zero + np.float32(0.4))
    )
    lift = 1.0 + 0.5 * shot
    rgb = (
        0.012 + lift * (0.70 * warm + 0.08 * cool + 0.22 * green),
        0.014 + lift * (0.34 * warm + 0.24 * cool + 0.50 * green),
        0.020 + lift * (0.10 * warm + 0.72 * cool + 0.20 * green),
    )
    return colour(rgb, shape)


STEP = Scene(
    name="step",
    title="a relief whose lamps are switched, and a cut",
    parameter=(0.0, 1.0),
    parameter_name="time",
    wgsl=_WGSL,
    evaluate=_evaluate,
    group="more",
)
