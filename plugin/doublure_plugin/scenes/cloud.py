"""Cloud: light that is absorbed on its way through a noise of five octaves.

Here for what it costs: up to 476 evaluations of three-dimensional noise a pixel (28 steps of five
octaves, and from each four steps towards the sun of three), of which a stand-in needs none. Its
fringes are half transparent and fine, its shadows soft, and all of it moves.

Beer's law along both marches. The lattice is hashed by the lowbias32 of Wellons ("Prospecting for
Hash Functions", nullprogram.com, 2018), integers in both texts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import Array, Vec3, clamp, colour, inputs, mix, mix3
from .scene import Scene

__all__ = ["CLOUD"]

_WGSL = """
fn cloud_hash(cell: vec3u) -> f32 {
    var h = (cell.x * 0x8da6b343u) ^ (cell.y * 0xd8163841u) ^ (cell.z * 0xcb1ab31fu);
    h = (h ^ (h >> 16u)) * 0x7feb352du;
    h = (h ^ (h >> 15u)) * 0x846ca68bu;
    h = h ^ (h >> 16u);
    return f32(h >> 8u) * (1.0 / 16777216.0);
}

fn cloud_noise(q: vec3f) -> f32 {
    let base = floor(q);
    let f = q - base;
    let i = bitcast<vec3u>(vec3i(base));
    let u = f * f * (3.0 - 2.0 * f);
    let a = mix(cloud_hash(i), cloud_hash(i + vec3u(1, 0, 0)), u.x);
    let b = mix(cloud_hash(i + vec3u(0, 1, 0)), cloud_hash(i + vec3u(1, 1, 0)), u.x);
    let c = mix(cloud_hash(i + vec3u(0, 0, 1)), cloud_hash(i + vec3u(1, 0, 1)), u.x);
    let d = mix(cloud_hash(i + vec3u(0, 1, 1)), cloud_hash(i + vec3u(1, 1, 1)), u.x);
    return mix(mix(a, b, u.y), mix(c, d, u.y), u.z);
}

fn cloud_density(q: vec3f, t: f32, octaves: i32) -> f32 {
    let shape = 1.0 - (q.x * q.x / 1.7 + (q.y + 0.1) * (q.y + 0.1) / 0.6 + q.z * q.z / 1.1);
    var p = q * 1.9 + vec3f(7.3 + 0.35 * t, 3.1 - 0.2 * t, 5.7 + 0.15 * t);
    var sum = 0.0;
    var amplitude = 0.5;
    for (var o = 0; o < octaves; o++) {
        sum += amplitude * cloud_noise(p);
        p = vec3f(
            1.62 * p.x + 1.2 * p.z + 1.7, 2.02 * p.y + 9.2, 1.62 * p.z - 1.2 * p.x + 4.4
        );
        amplitude *= 0.5;
    }
    return clamp(3.2 * (sum + 0.55 * shape - 0.66), 0.0, 1.0);
}

fn scene_color(p: vec2f, t: f32) -> vec3f {
    let d = normalize(vec3f(0.46 * p.x, -0.46 * p.y, 1.0));
    let sun = normalize(vec3f(0.9 * cos(0.4 * t + 0.4), 0.75, -0.7 + 0.8 * sin(0.4 * t + 0.4)));
    var clear = 1.0;
    var light = 0.0;
    var shade = 0.0;
    for (var i = 0; i < 28; i++) {
        let q = vec3f(0.0, 0.0, -3.3) + d * (2.05 + 0.09 * f32(i));
        let density = cloud_density(q, t, 5);
        if (density > 0.0) {
            var depth = 0.0;
            for (var j = 1; j < 5; j++) {
                depth += cloud_density(q + sun * (0.15 * f32(j)), t, 3);
            }
            let through = exp(-0.81 * density);
            let taken = clear * (1.0 - through);
            light += taken * (0.85 * exp(-1.0 * depth) + 0.15 * exp(-0.18 * depth));
            shade += taken * (0.5 + 0.5 * clamp(q.y + 0.4, 0.0, 1.0));
            clear = clear * through;
            if (clear < 0.01) {
                break;
            }
        }
    }
    let height = clamp(0.45 - 0.5 * p.y, 0.0, 1.0);
    let sky = mix(vec3f(0.34, 0.46, 0.62), vec3f(0.06, 0.16, 0.42), height);
    return sky * clear + light * vec3f(1.9, 1.62, 1.30) + shade * vec3f(0.13, 0.18, 0.27);
}
"""

_PRIMES = (np.uint32(0x8DA6B343), np.uint32(0xD8163841), np.uint32(0xCB1AB31F))
_CHUNK = 8192  # rays at a time, whose arrays stay in the cache
_ONE = np.float32(1.0)


def _hash(h: npt.NDArray[np.uint32]) -> Array:
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    h = h ^ (h >> np.uint32(16))
    return (h >> np.uint32(8)).astype(np.float32) * np.float32(1.0 / 16777216.0)


def _noise(q: Vec3) -> Array:
    low, high, u = [], [], []
    for v, prime in zip(q, _PRIMES, strict=True):
        base = np.floor(v)
        f = v - base
        cell = base.astype(np.int32).view(np.uint32) * prime
        low.append(cell)
        high.append(cell + prime)
        u.append(f * f * (3.0 - 2.0 * f))

    def plane(z: Array) -> Array:
        rows = []
        for y in (low[1], high[1]):
            yz = y ^ z
            rows.append(mix(_hash(low[0] ^ yz), _hash(high[0] ^ yz), u[0]))
        return mix(rows[0], rows[1], u[1])

    return mix(plane(low[2]), plane(high[2]), u[2])


def _density(q: Vec3, t: Array, octaves: int) -> Array:
    x, y, z = q
    shape = _ONE - (x * x / 1.7 + (y + 0.1) * (y + 0.1) / 0.6 + z * z / 1.1)
    px = x * 1.9 + (7.3 + 0.35 * t)
    py = y * 1.9 + (3.1 - 0.2 * t)
    pz = z * 1.9 + (5.7 + 0.15 * t)
    total: Array = 0.5 * _noise((px, py, pz))
    amplitude = 0.25
    for _ in range(octaves - 1):
        px, py, pz = 1.62 * px + 1.2 * pz + 1.7, 2.02 * py + 9.2, 1.62 * pz - 1.2 * px + 4.4
        total = total + amplitude * _noise((px, py, pz))
        amplitude *= 0.5
    return clamp(3.2 * (total + 0.55 * shape - 0.66), 0.0, 1.0)


def _normalise(x: Array, y: Array, z: Array) -> Vec3:
    length = np.sqrt(x * x + y * y + z * z)
    return x / length, y / length, z / length


def _march(d: Vec3, t: Array) -> tuple[Array, Array, Array]:
    """What is left of the sky's light, sunlight and ambient light of rays [n]; t is [n]."""
    a = 0.4 * t + 0.4
    sun = _normalise(0.9 * np.cos(a), np.full_like(t, 0.75), -0.7 + 0.8 * np.sin(a))
    clear = np.ones_like(t)
    light, shade = np.zeros_like(t), np.zeros_like(t)
    active = np.arange(t.size)
    for i in range(28):
        s = 2.05 + 0.09 * i
        q = d[0][active] * s, d[1][active] * s, d[2][active] * s - 3.3
        density = _density(q, t[active], 5)
        inside = density > 0
        if not inside.any():
            continue
        at, density = active[inside], density[inside]
        q = q[0][inside], q[1][inside], q[2][inside]
        depth: Array = np.zeros_like(density)
        for j in range(1, 5):
            step = 0.15 * j
            towards = tuple(v + w[at] * step for v, w in zip(q, sun, strict=True))
            depth = depth + _density((towards[0], towards[1], towards[2]), t[at], 3)
        through = np.exp(-0.81 * density)
        taken = clear[at] * (_ONE - through)
        light[at] += taken * (0.85 * np.exp(-1.0 * depth) + 0.15 * np.exp(-0.18 * depth))
        shade[at] += taken * (0.5 + 0.5 * clamp(q[1] + 0.4, 0.0, 1.0))
        clear[at] *= through
        active = active[clear[active] >= np.float32(0.01)]
        if not active.size:
            break
    return clear, light, shade


def _evaluate(x: npt.ArrayLike, y: npt.ArrayLike, t: npt.ArrayLike) -> Array:
    x, y, t = inputs(x, y, t)
    shape = np.broadcast_shapes(x.shape, y.shape, t.shape)
    flat = [np.broadcast_to(v, shape).ravel() for v in (x, y, t)]
    out = np.empty((flat[0].size, 3), np.float32)
    for start in range(0, flat[0].size, _CHUNK):
        px, py, pt = (v[start : start + _CHUNK] for v in flat)
        d = _normalise(0.46 * px, -0.46 * py, np.ones_like(px))
        clear, light, shade = _march(d, pt)
        height = clamp(0.45 - 0.5 * py, 0.0, 1.0)
        sky = mix3((0.34, 0.46, 0.62), (0.06, 0.16, 0.42), height)
        rgb = (
            sky[0] * clear + light * 1.9 + shade * 0.13,
            sky[1] * clear + light * 1.62 + shade * 0.18,
            sky[2] * clear + light * 1.30 + shade * 0.27,
        )
        out[start : start + _CHUNK] = colour(rgb, px.shape)
    return out.reshape((*shape, 3))


CLOUD = Scene(
    name="cloud",
    title="a cloud that the sun shines through",
    parameter=(0.0, 4.0),
    parameter_name="time",
    wgsl=_WGSL,
    evaluate=_evaluate,
    group="more",
)
