"""Raymarched solids: a ball gliding through a ring beside a rounded block, on a lit floor.

Distance functions, the smooth union and the soft shadow are Inigo Quilez's
(https://iquilezles.org/articles/distfunctions/, .../smin/, .../rmshadows/). A pixel walks up to 96
steps to the surface, 48 to the light and 5 for occlusion, as a real one does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import Array, Vec3, clamp, colour, inputs, mix3, smoothstep
from .scene import Scene

__all__ = ["SDF"]

_WGSL = """
fn sdf_smin(a: f32, b: f32, k: f32) -> f32 {
    let h = max(k - abs(a - b), 0.0) / k;
    return min(a, b) - h * h * k * 0.25;
}

fn sdf_ball(p: vec3f, t: f32) -> f32 {
    let c = p - vec3f(1.25 * cos(t), 0.78 + 0.22 * sin(2.0 * t), 0.35 * sin(t));
    return length(c) - 0.42;
}

fn sdf_ring(p: vec3f) -> f32 {
    let c = p - vec3f(-0.35, 0.80, 0.0);
    let q = vec2f(length(vec2f(c.y, 0.8 * c.z - 0.6 * c.x)) - 0.72, 0.8 * c.x + 0.6 * c.z);
    return length(q) - 0.17;
}

fn sdf_block(p: vec3f) -> f32 {
    let c = p - vec3f(1.05, 0.40, 0.55);
    let q = abs(vec3f(0.8 * c.x - 0.6 * c.z, c.y, 0.6 * c.x + 0.8 * c.z)) - vec3f(0.34);
    return length(max(q, vec3f(0.0))) + min(max(q.x, max(q.y, q.z)), 0.0) - 0.08;
}

fn sdf_map(p: vec3f, t: f32) -> f32 {
    let solids = sdf_smin(sdf_smin(sdf_ball(p, t), sdf_ring(p), 0.35), sdf_block(p), 0.30);
    return min(solids, p.y);
}

fn sdf_normal(p: vec3f, t: f32) -> vec3f {
    let e = 0.002;
    let a = sdf_map(p + vec3f(e, -e, -e), t);
    let b = sdf_map(p + vec3f(-e, -e, e), t);
    let c = sdf_map(p + vec3f(-e, e, -e), t);
    let d = sdf_map(p + vec3f(e, e, e), t);
    return normalize(vec3f(a - b - c + d, -a - b + c + d, -a + b - c + d));
}

fn sdf_shadow(p: vec3f, l: vec3f, t: f32) -> f32 {
    var light = 1.0;
    var s = 0.03;
    for (var i = 0; i < 48; i++) {
        let h = sdf_map(p + l * s, t);
        light = min(light, 0.5 + 0.5 * h / (0.09 * s));
        if (light < 0.0 || s > 6.0) { break; }
        s += clamp(h, 0.03, 0.35);
    }
    light = max(light, 0.0);
    return light * light * (3.0 - 2.0 * light);
}

fn sdf_occlusion(p: vec3f, n: vec3f, t: f32) -> f32 {
    var sum = 0.0;
    var weight = 1.0;
    for (var i = 0; i < 5; i++) {
        let h = 0.02 + 0.11 * f32(i);
        sum += (h - sdf_map(p + n * h, t)) * weight;
        weight *= 0.8;
    }
    return clamp(1.0 - 1.4 * sum, 0.0, 1.0);
}

fn sdf_sky(up: f32) -> vec3f {
    return mix(vec3f(0.55, 0.58, 0.62), vec3f(0.10, 0.19, 0.38), smoothstep(-0.05, 0.55, up));
}

fn scene_color(p: vec2f, t: f32) -> vec3f {
    let eye = vec3f(0.0, 1.75, -4.6);
    // Focal length 2.6; looks down by the angle whose cosine and sine are 0.976 and 0.218.
    let d = normalize(vec3f(p.x, -0.976 * p.y - 0.5668, 2.5376 - 0.218 * p.y));
    let sky = sdf_sky(d.y);
    var s = 2.0;
    var hit = false;
    for (var i = 0; i < 96; i++) {
        let h = sdf_map(eye + d * s, t);
        if (h < 0.0005 * s) { hit = true; break; }
        s += h;
        if (s > 30.0) { break; }
    }
    if (!hit) { return sky; }
    let q = eye + d * s;
    let n = sdf_normal(q, t);
    let l = normalize(vec3f(-0.8 + 0.5 * cos(t), 1.1, -0.65 + 0.3 * sin(t)));
    let ball = sdf_ball(q, t);
    let ring = sdf_ring(q);
    let block = sdf_block(q);
    var albedo = mix(vec3f(0.78, 0.20, 0.055), vec3f(0.12, 0.40, 0.42),
                     smoothstep(-0.18, 0.18, ball - ring));
    albedo = mix(albedo, vec3f(0.70, 0.60, 0.42),
                 smoothstep(-0.15, 0.15, min(ball, ring) - block));
    albedo = mix(albedo, vec3f(0.20, 0.19, 0.20),
                 smoothstep(0.0, 0.02, min(ball, min(ring, block)) - q.y));
    let lit = max(dot(n, l), 0.0);
    let shadow = sdf_shadow(q, l, t);
    let open = sdf_occlusion(q, n, t);
    let half_way = normalize(l - d);
    let shine = pow(max(dot(n, half_way), 0.0), 48.0);
    let key = vec3f(2.3, 2.0, 1.6) * (lit * shadow);
    let fill = vec3f(0.22, 0.30, 0.42) * ((0.6 + 0.4 * n.y) * open);
    let bounce = vec3f(0.20, 0.16, 0.12) * ((0.5 - 0.5 * n.y) * open);
    let c = albedo * (key + fill + bounce) + vec3f(1.2, 1.1, 0.9) * (shine * lit * shadow);
    return mix(c, sky, 1.0 - exp(-0.00035 * s * s * s));
}
"""


def _smin(a: Array, b: Array, k: float) -> Array:
    h = np.maximum(k - np.abs(a - b), np.float32(0.0)) / k
    return np.asarray(np.minimum(a, b) - h * h * k * 0.25, dtype=np.float32)


def _length(*components: Array) -> Array:
    total = components[0] * components[0]
    for c in components[1:]:
        total = total + c * c
    return np.asarray(np.sqrt(total), dtype=np.float32)


def _normalise(x: Array, y: Array, z: Array) -> Vec3:
    scale = _length(x, y, z)
    return x / scale, y / scale, z / scale


class _Solids:
    """The distance functions for points that each have their own t; `take` narrows the points."""

    def __init__(self, t: Array) -> None:
        self.t = t
        self._ball = (1.25 * np.cos(t), 0.78 + 0.22 * np.sin(2.0 * t), 0.35 * np.sin(t))

    def take(self, keep: npt.NDArray[np.bool_]) -> _Solids:
        return _Solids(self.t[keep]) if self.t.size > 1 else self

    def ball(self, p: Vec3) -> Array:
        bx, by, bz = self._ball
        return _length(p[0] - bx, p[1] - by, p[2] - bz) - np.float32(0.42)

    def ring(self, p: Vec3) -> Array:
        x, y, z = p[0] + 0.35, p[1] - 0.80, p[2]
        radial = _length(y, 0.8 * z - 0.6 * x) - np.float32(0.72)
        return _length(radial, 0.8 * x + 0.6 * z) - np.float32(0.17)

    def block(self, p: Vec3) -> Array:
        x, y, z = p[0] - 1.05, p[1] - 0.40, p[2] - 0.55
        half, zero = np.float32(0.34), np.float32(0.0)
        qx = np.abs(0.8 * x - 0.6 * z) - half
        qy = np.abs(y) - half
        qz = np.abs(0.6 * x + 0.8 * z) - half
        outside = _length(np.maximum(qx, zero), np.maximum(qy, zero), np.maximum(qz, zero))
        inside = np.minimum(np.maximum(qx, np.maximum(qy, qz)), zero)
        return np.asarray(outside + inside - np.float32(0.08), dtype=np.float32)

    def map(self, p: Vec3) -> Array:
        solids = _smin(_smin(self.ball(p), self.ring(p), 0.35), self.block(p), 0.30)
        return np.minimum(solids, p[1])

    def at(self, p: Vec3, d: Vec3, s: Array | float) -> Array:
        return self.map((p[0] + d[0] * s, p[1] + d[1] * s, p[2] + d[2] * s))


def _narrow(v: Vec3, keep: npt.NDArray[np.bool_]) -> Vec3:
    return v[0][keep], v[1][keep], v[2][keep]


def _march(eye: Vec3, d: Vec3, solids: _Solids) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Distance to the surface for every ray, and which rays met one. Finished rays are dropped."""
    distance = np.full(d[0].shape, 2.0, np.float32)
    hit = np.zeros(d[0].shape, np.bool_)
    active = np.arange(distance.size)
    s = distance.copy()
    for _ in range(96):
        h = solids.at(eye, d, s)
        found = h < 0.0005 * s
        s = np.where(found, s, s + h)
        hit[active[found]] = True
        distance[active] = s
        keep = ~(found | (s > 30.0))
        if not keep.any():
            break
        active, s, d, solids = active[keep], s[keep], _narrow(d, keep), solids.take(keep)
    return distance, hit


def _shadow(p: Vec3, light_dir: Vec3, solids: _Solids) -> Array:
    light: Array = np.ones(p[0].shape, np.float32)
    active = np.arange(light.size)
    s = np.full(light.shape, 0.03, np.float32)
    current = light.copy()
    for _ in range(48):
        h = solids.at(p, light_dir, s)
        current = np.minimum(current, 0.5 + 0.5 * h / (0.09 * s))
        light[active] = current
        keep = ~((current < 0.0) | (s > 6.0))
        if not keep.any():
            break
        s = (s + clamp(h, 0.03, 0.35))[keep]
        active, current, p, solids = (
            active[keep],
            current[keep],
            _narrow(p, keep),
            solids.take(keep),
        )
        light_dir = _narrow(light_dir, keep) if light_dir[0].size > 1 else light_dir
    light = np.maximum(light, np.float32(0.0))
    return light * light * (3.0 - 2.0 * light)


def _occlusion(p: Vec3, n: Vec3, solids: _Solids) -> Array:
    total: Array = np.zeros(p[0].shape, np.float32)
    weight = 1.0
    for i in range(5):
        h = 0.02 + 0.11 * i
        total = total + (h - solids.at(p, n, h)) * weight
        weight *= 0.8
    return clamp(1.0 - 1.4 * total, 0.0, 1.0)


def _normal(p: Vec3, solids: _Solids) -> Vec3:
    e = np.float32(0.002)
    x, y, z = p
    a = solids.map((x + e, y - e, z - e))
    b = solids.map((x - e, y - e, z + e))
    c = solids.map((x - e, y + e, z - e))
    d = solids.map((x + e, y + e, z + e))
    return _normalise(a - b - c + d, -a - b + c + d, -a + b - c + d)


def _sky(up: Array) -> Vec3:
    return mix3((0.55, 0.58, 0.62), (0.10, 0.19, 0.38), smoothstep(-0.05, 0.55, up))


def _dot(a: Vec3, b: Vec3) -> Array:
    return np.asarray(a[0] * b[0] + a[1] * b[1] + a[2] * b[2], dtype=np.float32)


def _albedo(q: Vec3, solids: _Solids) -> Vec3:
    ball, ring, block = solids.ball(q), solids.ring(q), solids.block(q)
    near = np.minimum(ball, np.minimum(ring, block)) - q[1]
    c = mix3((0.78, 0.20, 0.055), (0.12, 0.40, 0.42), smoothstep(-0.18, 0.18, ball - ring))
    c = mix3(c, (0.70, 0.60, 0.42), smoothstep(-0.15, 0.15, np.minimum(ball, ring) - block))
    return mix3(c, (0.20, 0.19, 0.20), smoothstep(0.0, 0.02, near))


def _shade(q: Vec3, d: Vec3, solids: _Solids) -> Vec3:
    t = solids.t
    n = _normal(q, solids)
    light = _normalise(-0.8 + 0.5 * np.cos(t), np.full_like(t, 1.1), -0.65 + 0.3 * np.sin(t))
    zero = np.float32(0.0)
    lit = np.maximum(_dot(n, light), zero)
    key = lit * _shadow(q, light, solids)
    occlusion = _occlusion(q, n, solids)
    half_way = _normalise(light[0] - d[0], light[1] - d[1], light[2] - d[2])
    shine = np.maximum(_dot(n, half_way), zero) ** np.float32(48.0) * key
    fill = (0.6 + 0.4 * n[1]) * occlusion
    bounce = (0.5 - 0.5 * n[1]) * occlusion
    r, g, b = _albedo(q, solids)
    return (
        r * (2.3 * key + 0.22 * fill + 0.20 * bounce) + 1.2 * shine,
        g * (2.0 * key + 0.30 * fill + 0.16 * bounce) + 1.1 * shine,
        b * (1.6 * key + 0.42 * fill + 0.12 * bounce) + 0.9 * shine,
    )


def _evaluate(x: npt.ArrayLike, y: npt.ArrayLike, t: npt.ArrayLike) -> Array:
    x, y, t = inputs(x, y, t)
    shape = np.broadcast_shapes(x.shape, y.shape, t.shape)
    flat_x, flat_y = np.broadcast_to(x, shape).ravel(), np.broadcast_to(y, shape).ravel()
    # One t for the whole image stays one value: its sines are then computed once, not a pixel.
    flat_t = t.ravel() if t.size == 1 else np.broadcast_to(t, shape).ravel()
    solids = _Solids(flat_t)

    zero = np.zeros(1, np.float32)
    eye = (zero, zero + np.float32(1.75), zero - np.float32(4.6))
    d = _normalise(flat_x, -0.976 * flat_y - 0.5668, 2.5376 - 0.218 * flat_y)
    distance, hit = _march(eye, d, solids)
    out = colour(_sky(d[1]), flat_x.shape)
    if hit.any():
        s, d = distance[hit], _narrow(d, hit)
        q = eye[0] + d[0] * s, eye[1] + d[1] * s, eye[2] + d[2] * s
        rgb = _shade(q, d, solids.take(hit))
        fog = 1.0 - np.exp(-0.00035 * s * s * s)
        out[hit] = colour(mix3(rgb, _sky(d[1]), fog), s.shape)
    return out.reshape((*shape, 3))


SDF = Scene(
    name="sdf",
    title="raymarched solids with soft shadows",
    parameter=(0.0, 6.2831855),
    parameter_name="time",
    wgsl=_WGSL,
    evaluate=_evaluate,
)
