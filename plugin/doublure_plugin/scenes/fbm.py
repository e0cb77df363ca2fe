"""Domain-warped fractal noise: five octaves of gradient noise looked up through two layers of it.

The construction is Inigo Quilez's (https://iquilezles.org/articles/warp/): f(p + g(p + h(p))).
Gradients come from the integer hash pcg2d (Jarzynski and Olano, "Hash Functions for GPU
Rendering", JCGT 9(3), 2020), so that shader and NumPy agree bit for bit on the lattice. The
highest octave has about 30 cells across the image before warping: visible at 512 x 512.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import Array, colour, inputs, mix, mix3, smoothstep
from .scene import Scene

__all__ = ["FBM"]

_WGSL = """
fn fbm_hash(cell: vec2i) -> vec2f {
    var v = bitcast<vec2u>(cell) * 1664525u + 1013904223u;
    v.x = v.x + v.y * 1664525u;
    v.y = v.y + v.x * 1664525u;
    v = v ^ (v >> vec2u(16u));
    v.x = v.x + v.y * 1664525u;
    v.y = v.y + v.x * 1664525u;
    v = v ^ (v >> vec2u(16u));
    return vec2f(v >> vec2u(8u)) * (1.0 / 8388608.0) - 1.0;
}

fn fbm_noise(p: vec2f) -> f32 {
    let cell = floor(p);
    let f = p - cell;
    let i = vec2i(cell);
    let u = f * f * f * (f * (f * 6.0 - 15.0) + 10.0);
    let a = dot(fbm_hash(i), f);
    let b = dot(fbm_hash(i + vec2i(1, 0)), f - vec2f(1.0, 0.0));
    let c = dot(fbm_hash(i + vec2i(0, 1)), f - vec2f(0.0, 1.0));
    let d = dot(fbm_hash(i + vec2i(1, 1)), f - vec2f(1.0, 1.0));
    return mix(mix(a, b, u.x), mix(c, d, u.x), u.y);
}

fn fbm_sum(start: vec2f, octaves: i32) -> f32 {
    var p = start;
    var sum = 0.0;
    var amplitude = 0.5;
    for (var o = 0; o < octaves; o++) {
        sum += amplitude * fbm_noise(p);
        p = vec2f(1.6 * p.x + 1.2 * p.y, 1.6 * p.y - 1.2 * p.x) + vec2f(3.7, 9.2);
        amplitude *= 0.5;
    }
    return sum;
}

fn scene_color(p: vec2f, t: f32) -> vec3f {
    let s = p * 1.1 + vec2f(4.3, 2.9);
    let drift = vec2f(0.5 * cos(0.35 * t), 0.5 * sin(0.35 * t));
    let q = vec2f(fbm_sum(s + drift, 4), fbm_sum(s + vec2f(5.2, 1.3) - drift, 4));
    let r = vec2f(
        fbm_sum(s + 0.9 * q + vec2f(1.7, 9.2), 4),
        fbm_sum(s + 0.9 * q + vec2f(8.3, 2.8) + 0.4 * drift, 4)
    );
    let f = fbm_sum(s + 1.1 * r, 5);
    let level = smoothstep(-0.34, 0.36, f);
    let fold = smoothstep(0.05, 0.42, sqrt(q.x * q.x + q.y * q.y));
    let ridge = smoothstep(-0.06, 0.28, r.y);
    var c = mix(vec3f(0.008, 0.022, 0.075), vec3f(0.09, 0.40, 0.46), level);
    c = mix(c, vec3f(0.95, 0.60, 0.24), fold * level);
    c = mix(c, vec3f(0.42, 0.03, 0.05), 0.85 * ridge * (1.0 - level));
    return c * (0.45 + 1.1 * level * level);
}
"""

_MULTIPLIER = np.uint32(1664525)
_INCREMENT = np.uint32(1013904223)


def _hash(cx: npt.NDArray[np.int32], cy: npt.NDArray[np.int32]) -> tuple[Array, Array]:
    """pcg2d: wraps modulo 2^32, as WGSL's u32 does; the top 24 bits become [-1, 1)."""
    x = cx.view(np.uint32) * _MULTIPLIER + _INCREMENT
    y = cy.view(np.uint32) * _MULTIPLIER + _INCREMENT
    for _ in range(2):
        x = x + y * _MULTIPLIER
        y = y + x * _MULTIPLIER
        x = x ^ (x >> np.uint32(16))
        y = y ^ (y >> np.uint32(16))
    scale = np.float32(1.0 / 8388608.0)
    return (
        (x >> np.uint32(8)).astype(np.float32) * scale - np.float32(1.0),
        (y >> np.uint32(8)).astype(np.float32) * scale - np.float32(1.0),
    )


def _noise(x: Array, y: Array) -> Array:
    cx, cy = np.floor(x), np.floor(y)
    fx, fy = x - cx, y - cy
    ix, iy = cx.astype(np.int32), cy.astype(np.int32)
    one = np.int32(1)

    def corner(dx: int, dy: int) -> Array:
        gx, gy = _hash(ix + one if dx else ix, iy + one if dy else iy)
        return np.asarray(gx * (fx - dx) + gy * (fy - dy), dtype=np.float32)

    ux = fx * fx * fx * (fx * (fx * 6.0 - 15.0) + 10.0)
    uy = fy * fy * fy * (fy * (fy * 6.0 - 15.0) + 10.0)
    return mix(mix(corner(0, 0), corner(1, 0), ux), mix(corner(0, 1), corner(1, 1), ux), uy)


def _sum(x: Array, y: Array, octaves: int) -> Array:
    total: Array = np.float32(0.5) * _noise(x, y)
    amplitude = 0.25
    for _ in range(octaves - 1):
        x, y = 1.6 * x + 1.2 * y + 3.7, 1.6 * y - 1.2 * x + 9.2
        total = total + amplitude * _noise(x, y)
        amplitude *= 0.5
    return np.asarray(total, dtype=np.float32)


def _evaluate(x: npt.ArrayLike, y: npt.ArrayLike, t: npt.ArrayLike) -> Array:
    x, y, t = inputs(x, y, t)
    shape = np.broadcast_shapes(x.shape, y.shape, t.shape)
    sx, sy = x * 1.1 + 4.3, y * 1.1 + 2.9
    dx, dy = 0.5 * np.cos(0.35 * t), 0.5 * np.sin(0.35 * t)
    sx, sy = np.broadcast_to(sx, shape), np.broadcast_to(sy, shape)
    qx = _sum(sx + dx, sy + dy, 4)
    qy = _sum(sx + 5.2 - dx, sy + 1.3 - dy, 4)
    wx, wy = sx + 0.9 * qx, sy + 0.9 * qy
    rx = _sum(wx + 1.7, wy + 9.2, 4)
    ry = _sum(wx + 8.3 + 0.4 * dx, wy + 2.8 + 0.4 * dy, 4)
    f = _sum(sx + 1.1 * rx, sy + 1.1 * ry, 5)
    level = smoothstep(-0.34, 0.36, f)
    fold = smoothstep(0.05, 0.42, np.sqrt(qx * qx + qy * qy))
    ridge = smoothstep(-0.06, 0.28, ry)
    c = mix3((0.008, 0.022, 0.075), (0.09, 0.40, 0.46), level)
    c = mix3(c, (0.95, 0.60, 0.24), fold * level)
    c = mix3(c, (0.42, 0.03, 0.05), 0.85 * ridge * (1.0 - level))
    lift = 0.45 + 1.1 * level * level
    return colour((c[0] * lift, c[1] * lift, c[2] * lift), shape)


FBM = Scene(
    name="fbm",
    title="domain-warped fractal noise",
    parameter=(0.0, 10.0),
    parameter_name="time",
    wgsl=_WGSL,
    evaluate=_evaluate,
)
