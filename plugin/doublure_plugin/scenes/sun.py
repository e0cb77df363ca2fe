"""Sun over the sea: a small disc of radiance 80 whose glow crosses a sky with a hard horizon.

Two hundred times brighter than the sky around it, as photographed skies are: what a stand-in that
clamps, or that learns mean colour, gets wrong.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import Array, Vec3, clamp, colour, inputs, mix, mix3, smoothstep
from .scene import Scene

__all__ = ["SUN"]

_WGSL = """
fn sun_sky(p: vec2f, s: vec2f, low: f32, peak: f32) -> vec3f {
    let h = clamp((0.3 - p.y) / 1.3, 0.0, 1.0);
    let zenith = mix(vec3f(0.055, 0.14, 0.40), vec3f(0.035, 0.05, 0.16), low);
    let horizon = mix(vec3f(0.42, 0.50, 0.60), vec3f(0.75, 0.27, 0.09), low);
    let k = exp(-3.2 * h);
    let d = p - s;
    let r = sqrt(d.x * d.x + d.y * d.y);
    let tint = mix(vec3f(1.0, 0.92, 0.78), vec3f(1.0, 0.55, 0.22), low);
    let glow = 0.55 * exp(-2.6 * r) + 3.5 * exp(-14.0 * r);
    let disc = peak * (1.0 - smoothstep(0.022, 0.04, r));
    return mix(zenith, horizon, k) + tint * (glow + disc);
}

fn scene_color(p: vec2f, t: f32) -> vec3f {
    let a = 2.2 * (t - 0.5);
    let s = vec2f(0.75 * sin(a), 0.42 - 1.0 * cos(a));
    let low = smoothstep(-0.6, 0.12, s.y);
    if (p.y < 0.3) {
        return sun_sky(p, s, low, 80.0);
    }
    // The sea mirrors the sky about the horizon, rippled more the nearer it is to the eye; the disc
    // itself breaks up into the glittering path.
    let depth = (p.y - 0.3) / 0.7;
    let wave = sin(26.0 * log(1.0 + 3.0 * depth) + 3.0 * sin(5.0 * p.x) + 2.0 * a);
    let m = vec2f(p.x + 0.03 * wave * depth, 0.3 - (p.y - 0.3) * 0.8);
    let sky = sun_sky(m, s, low, 0.0);
    let path = 0.9 * exp(-abs(m.x - s.x) * 9.0 / (0.5 + depth)) * (0.55 + 0.45 * wave);
    let tint = mix(vec3f(1.0, 0.92, 0.78), vec3f(1.0, 0.55, 0.22), low);
    let body = vec3f(0.006, 0.022, 0.04);
    return mix(body, sky, 0.55 - 0.3 * depth) + tint * path * (1.0 - 0.6 * depth);
}
"""


def _sky(x: Array, y: Array, sun: tuple[Array, Array], low: Array, tint: Vec3, peak: Array) -> Vec3:
    h = clamp((0.3 - y) / 1.3, 0.0, 1.0)
    zenith = mix3((0.055, 0.14, 0.40), (0.035, 0.05, 0.16), low)
    horizon = mix3((0.42, 0.50, 0.60), (0.75, 0.27, 0.09), low)
    k = np.exp(-3.2 * h)
    dx, dy = x - sun[0], y - sun[1]
    r = np.sqrt(dx * dx + dy * dy)
    glow = 0.55 * np.exp(-2.6 * r) + 3.5 * np.exp(-14.0 * r)
    light = glow + peak * (1.0 - smoothstep(0.022, 0.04, r))
    base = mix3(zenith, horizon, k)
    return base[0] + tint[0] * light, base[1] + tint[1] * light, base[2] + tint[2] * light


def _evaluate(x: npt.ArrayLike, y: npt.ArrayLike, t: npt.ArrayLike) -> Array:
    x, y, t = inputs(x, y, t)
    shape = np.broadcast_shapes(x.shape, y.shape, t.shape)
    a = 2.2 * (t - 0.5)
    sx, sy = 0.75 * np.sin(a), 0.42 - 1.0 * np.cos(a)
    low = smoothstep(-0.6, 0.12, sy)
    tint = mix3((1.0, 0.92, 0.78), (1.0, 0.55, 0.22), low)

    depth = np.maximum((y - 0.3) / 0.7, np.float32(0.0))
    wave = np.sin(26.0 * np.log(1.0 + 3.0 * depth) + 3.0 * np.sin(5.0 * x) + 2.0 * a)
    above = np.asarray(y < np.float32(0.3))
    # One sky lookup serves both halves: below the horizon it is taken at the mirrored point.
    mx = np.where(above, x, x + 0.03 * wave * depth)
    my = np.where(above, y, 0.3 - (y - 0.3) * 0.8)
    peak = np.where(above, np.float32(80.0), np.float32(0.0))
    sky = _sky(mx, my, (sx, sy), low, tint, peak)
    path = 0.9 * np.exp(-np.abs(mx - sx) * 9.0 / (0.5 + depth)) * (0.55 + 0.45 * wave)
    path = path * (1.0 - 0.6 * depth)
    weight = 0.55 - 0.3 * depth

    def channel(i: int, body: float) -> Array:
        return np.where(above, sky[i], mix(body, sky[i], weight) + tint[i] * path)

    return colour((channel(0, 0.006), channel(1, 0.022), channel(2, 0.04)), shape)


SUN = Scene(
    name="sun",
    title="HDR sun over the sea",
    parameter=(0.0, 1.0),
    parameter_name="time of day",
    wgsl=_WGSL,
    evaluate=_evaluate,
)
