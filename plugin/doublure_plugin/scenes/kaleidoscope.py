"""Kaleidoscope: sixteen mirrors, and behind them the plane folded ten times more.

Here to break what spends its texels evenly: an exact symmetry of which no family knows anything,
creases along every mirror, and detail that doubles with each fold.

A kaleidoscopic iterated function system in the manner of Knighty (fractalforums.com, 2010): fold,
turn, scale, and remember how near the point came to a circle.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import Array, colour, inputs
from .scene import Scene

__all__ = ["KALEIDOSCOPE"]

_WGSL = """
fn scene_color(p: vec2f, t: f32) -> vec3f {
    // Into the first of sixteen sectors: mirrors at 0, 90, 45 and 22.5 degrees.
    var q = abs(p);
    q = select(q, q.yx, q.y > q.x);
    let past = max(-0.38268343 * q.x + 0.92387953 * q.y, 0.0);
    q = q - 2.0 * past * vec2f(-0.38268343, 0.92387953);

    let c = cos(0.35 + 0.22 * t);
    let s = sin(0.35 + 0.22 * t);
    var ring = 9.0;
    var line = 9.0;
    var sum = 0.0;
    var scale = 1.0;
    for (var i = 0; i < 10; i++) {
        q = abs(q) - vec2f(0.31, 0.17);
        q = 1.23 * vec2f(c * q.x - s * q.y, s * q.x + c * q.y);
        scale = scale * 1.23;
        let r = sqrt(q.x * q.x + q.y * q.y + 1e-6);
        ring = min(ring, abs(r - 0.42) / scale);
        line = min(line, abs(q.x + 0.3 * q.y) / scale);
        sum = sum + exp(-3.0 * r);
    }
    let glow = exp(-90.0 * ring);
    let edge = exp(-140.0 * line);
    let tone = 0.5 + 0.5 * cos(2.1 * sum + 0.4 * t);
    return vec3f(
        0.010 + 1.30 * glow * tone + 0.20 * edge,
        0.012 + 0.55 * glow * (1.0 - 0.5 * tone) + 0.34 * edge * tone,
        0.030 + 0.95 * glow * (1.0 - tone) + 0.42 * edge
    );
}
"""


def _evaluate(x: npt.ArrayLike, y: npt.ArrayLike, t: npt.ArrayLike) -> Array:
    x, y, t = inputs(x, y, t)
    shape = np.broadcast_shapes(x.shape, y.shape, t.shape)
    ax, ay = np.broadcast_to(np.abs(x), shape), np.broadcast_to(np.abs(y), shape)
    qx, qy = np.where(ay > ax, ay, ax), np.where(ay > ax, ax, ay)
    past = np.maximum(-0.38268343 * qx + 0.92387953 * qy, np.float32(0.0))
    qx, qy = qx - 2.0 * past * -0.38268343, qy - 2.0 * past * 0.92387953

    c, s = np.cos(0.35 + 0.22 * t), np.sin(0.35 + 0.22 * t)
    ring: Array = np.full(1, 9.0, np.float32)
    line: Array = ring
    total: Array = np.zeros(1, np.float32)
    scale = np.float32(1.0)
    for _ in range(10):
        qx, qy = np.abs(qx) - 0.31, np.abs(qy) - 0.17
        qx, qy = 1.23 * (c * qx - s * qy), 1.23 * (s * qx + c * qy)
        scale = scale * np.float32(1.23)
        r = np.sqrt(qx * qx + qy * qy + 1e-6)
        ring = np.minimum(ring, np.abs(r - 0.42) / scale)
        line = np.minimum(line, np.abs(qx + 0.3 * qy) / scale)
        total = total + np.exp(-3.0 * r)
    glow, edge = np.exp(-90.0 * ring), np.exp(-140.0 * line)
    tone = 0.5 + 0.5 * np.cos(2.1 * total + 0.4 * t)
    rgb = (
        0.010 + 1.30 * glow * tone + 0.20 * edge,
        0.012 + 0.55 * glow * (1.0 - 0.5 * tone) + 0.34 * edge * tone,
        0.030 + 0.95 * glow * (1.0 - tone) + 0.42 * edge,
    )
    return colour(rgb, shape)


KALEIDOSCOPE = Scene(
    name="kaleidoscope",
    title="sixteen mirrors over a folded plane",
    parameter=(0.0, 6.2831855),
    parameter_name="turn",
    wgsl=_WGSL,
    evaluate=_evaluate,
    group="more",
)
