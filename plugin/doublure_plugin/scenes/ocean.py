"""Ocean: twenty-eight waves under a low sun, each carrying the ones after it along.

Here to break what mixes up sharp and bright: hundreds of glints of radiance 60, each a few pixels
wide and gone within a few frames, over a sea that is dark between them.

The waves' profile is exp(sin(x) - 1), which is peaked as water is; their speeds are those of deep
water, proportional to the root of the wavelength. Each wave moves the point at which the next is
looked up, along its own slope. Fresnel's reflection is Schlick's ("An Inexpensive BRDF Model for
Physically-based Rendering", 1994).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import Array, Vec3, colour, inputs, mix3
from .scene import Scene

__all__ = ["OCEAN"]

# Whole turns are taken off before sin and cos, whose precision WGSL promises in [-pi, pi] alone.
# Waves fade with distance and frequency as their pixels outgrow them.
_WGSL = """
fn ocean_sky(d: vec3f, sun: vec3f) -> vec3f {
    let up = max(d.y, 0.0);
    // 1 - cos of the angle to the sun, without taking it from 1, where few digits would be left.
    let off = d - sun;
    let away = 0.5 * (off.x * off.x + off.y * off.y + off.z * off.z);
    let base = mix(vec3f(0.055, 0.13, 0.30), vec3f(0.62, 0.42, 0.30), exp(-5.0 * up));
    return base + vec3f(1.0, 0.72, 0.42) * (0.5 * exp(-7.0 * away) + 60.0 * exp(-2200.0 * away));
}

// Slope along x and z, and how much of a crest it is, 0..1.
fn ocean_waves(start: vec2f, far: f32, t: f32) -> vec3f {
    var q = start;
    var d = vec2f(0.28, 0.96);
    var f = 0.55;
    var weight = 1.0;
    var g = vec2f(0.0, 0.0);
    var crest = 0.0;
    for (var i = 0; i < 28; i++) {
        let turns = 0.15915494 * (f * (d.x * q.x + d.y * q.y) + 2.2 * sqrt(f) * t + 1.7 * f32(i));
        let r = 6.2831855 * (turns - floor(turns) - 0.5);
        let blur = 0.006 * far * f;
        let share = weight / (1.0 + blur * blur);
        let e = exp(sin(r) - 1.0);
        let slope = share * e * cos(r);
        g = g + d * (f * slope);
        crest = crest + share * e;
        q = q - d * (0.5 * slope);
        d = vec2f(-0.3623578 * d.x - 0.9320390 * d.y, 0.9320390 * d.x - 0.3623578 * d.y);
        f = f * 1.17;
        weight = weight * 0.81;
    }
    return vec3f(0.17 * g, 0.19 * crest);
}

fn scene_color(p: vec2f, t: f32) -> vec3f {
    let d = normalize(vec3f(0.75 * p.x, -0.75 * p.y - 0.30, 1.7));
    let sun = vec3f(0.16, 0.16, 0.9740637);
    if (d.y > -0.004) {
        return ocean_sky(vec3f(d.x, max(d.y, 0.004), d.z), sun);
    }
    let far = 1.5 / -d.y;
    let w = ocean_waves(vec2f(d.x * far, d.z * far), far, t);
    let n = normalize(vec3f(-w.x, 1.0, -w.y));
    let facing = d.x * n.x + d.y * n.y + d.z * n.z;
    let m = d - 2.0 * facing * n;
    let graze = clamp(1.0 + facing, 0.0, 1.0);
    let fresnel = 0.02 + 0.98 * graze * graze * graze * graze * graze;
    let mirrored = ocean_sky(vec3f(m.x, abs(m.y), m.z), sun);
    let body = vec3f(0.003, 0.016, 0.026) + vec3f(0.010, 0.075, 0.070) * (w.z * w.z);
    let haze = 1.0 - exp(-0.012 * far);
    let horizon = ocean_sky(vec3f(d.x, 0.004, d.z), sun);
    return mix(mix(body, mirrored, fresnel), horizon, haze);
}
"""

_SUN = (0.16, 0.16, 0.9740637)


def _sky(d: Vec3) -> Vec3:
    up = np.maximum(d[1], np.float32(0.0))
    ox, oy, oz = d[0] - _SUN[0], d[1] - _SUN[1], d[2] - _SUN[2]
    away = 0.5 * (ox * ox + oy * oy + oz * oz)
    base = mix3((0.055, 0.13, 0.30), (0.62, 0.42, 0.30), np.exp(-5.0 * up))
    light = 0.5 * np.exp(-7.0 * away) + 60.0 * np.exp(-2200.0 * away)
    return base[0] + light, base[1] + 0.72 * light, base[2] + 0.42 * light


def _waves(x: Array, z: Array, far: Array, t: Array) -> Vec3:
    one = np.float32(1.0)  # the running numbers in float32, as the shader has them
    dx, dz = one * np.float32(0.28), one * np.float32(0.96)
    f, weight = np.float32(0.55), one
    gx: Array = np.zeros(1, np.float32)
    gz: Array = gx
    crest: Array = gx
    for i in range(28):
        turns = 0.15915494 * (f * (dx * x + dz * z) + np.float32(2.2) * np.sqrt(f) * t + 1.7 * i)
        r = 6.2831855 * (turns - np.floor(turns) - 0.5)
        blur = np.float32(0.006) * far * f
        share = weight / (1.0 + blur * blur)
        e = np.exp(np.sin(r) - 1.0)
        slope = share * e * np.cos(r)
        gx, gz = gx + dx * (f * slope), gz + dz * (f * slope)
        crest = crest + share * e
        x, z = x - dx * (0.5 * slope), z - dz * (0.5 * slope)
        c, s = np.float32(-0.3623578), np.float32(0.9320390)
        dx, dz = c * dx - s * dz, s * dx + c * dz
        f, weight = f * np.float32(1.17), weight * np.float32(0.81)
    return 0.17 * gx, 0.17 * gz, 0.19 * crest


def _normalise(x: Array, y: Array, z: Array) -> Vec3:
    length = np.sqrt(x * x + y * y + z * z)
    return x / length, y / length, z / length


def _evaluate(x: npt.ArrayLike, y: npt.ArrayLike, t: npt.ArrayLike) -> Array:
    x, y, t = inputs(x, y, t)
    shape = np.broadcast_shapes(x.shape, y.shape, t.shape)
    d = _normalise(
        np.broadcast_to(0.75 * x, shape), -0.75 * y - 0.30, np.full(1, 1.7, dtype=np.float32)
    )
    above = d[1] > np.float32(-0.004)
    far = 1.5 / -np.minimum(d[1], np.float32(-0.004))
    gx, gz, crest = _waves(d[0] * far, d[2] * far, far, t)
    n = _normalise(-gx, np.ones(1, np.float32), -gz)
    facing = d[0] * n[0] + d[1] * n[1] + d[2] * n[2]
    m = tuple(a - 2.0 * facing * b for a, b in zip(d, n, strict=True))
    graze = np.clip(1.0 + facing, np.float32(0.0), np.float32(1.0))
    fresnel = 0.02 + 0.98 * graze * graze * graze * graze * graze
    mirrored = _sky((m[0], np.abs(m[1]), m[2]))
    glow = crest * crest
    body = 0.003 + 0.010 * glow, 0.016 + 0.075 * glow, 0.026 + 0.070 * glow
    haze = 1.0 - np.exp(-0.012 * far)
    horizon = _sky((d[0], np.full_like(d[1], 0.004), d[2]))
    water = mix3(mix3(body, mirrored, fresnel), horizon, haze)
    sky = _sky((d[0], np.maximum(d[1], np.float32(0.004)), d[2]))
    rgb = [np.where(above, over, under) for over, under in zip(sky, water, strict=True)]
    return colour((rgb[0], rgb[1], rgb[2]), shape)


OCEAN = Scene(
    name="ocean",
    title="waves that glint under a low sun",
    parameter=(0.0, 3.0),
    parameter_name="time",
    wgsl=_WGSL,
    evaluate=_evaluate,
    group="more",
)
