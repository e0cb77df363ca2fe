"""Noise: every pixel of every t an independent random colour.

Here to be refused. There is nothing to learn but the mean, so no stand-in is better than one flat
colour, and whoever publishes one has learned its training pixels by heart.

The hash is pcg3d (Jarzynski and Olano, "Hash Functions for GPU Rendering", JCGT 9(3), 2020) over
column, row and the bits of t itself: integers throughout, so both texts agree bit for bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import Array, colour, inputs
from .scene import Scene

__all__ = ["NOISE"]

# Cells of 1/256: one pixel of 512 x 512. The offset keeps the centres of pixels of the usual sizes
# off the cells' edges, where a rounding would change the cell.
_WGSL = """
fn scene_color(p: vec2f, t: f32) -> vec3f {
    let cell = floor((p + 1.0) * 256.0 + 0.37);
    var v = vec3u(vec2u(cell), bitcast<u32>(t)) * 1664525u + 1013904223u;
    v.x = v.x + v.y * v.z;
    v.y = v.y + v.z * v.x;
    v.z = v.z + v.x * v.y;
    v = v ^ (v >> vec3u(16u));
    v.x = v.x + v.y * v.z;
    v.y = v.y + v.z * v.x;
    v.z = v.z + v.x * v.y;
    return vec3f(v >> vec3u(8u)) * (1.0 / 16777216.0);
}
"""


def _evaluate(x: npt.ArrayLike, y: npt.ArrayLike, t: npt.ArrayLike) -> Array:
    x, y, t = inputs(x, y, t)
    shape = np.broadcast_shapes(x.shape, y.shape, t.shape)
    column, row = (
        np.broadcast_to(np.floor((v + 1.0) * 256.0 + 0.37), shape).astype(np.uint32) for v in (x, y)
    )
    bits = np.broadcast_to(np.ascontiguousarray(t).view(np.uint32), shape)
    a, b, c = (v * np.uint32(1664525) + np.uint32(1013904223) for v in (column, row, bits))
    for last in (False, True):
        a = a + b * c
        b = b + c * a
        c = c + a * b
        if not last:
            a, b, c = (v ^ (v >> np.uint32(16)) for v in (a, b, c))
    scale = np.float32(1.0 / 16777216.0)
    red, green, blue = ((v >> np.uint32(8)).astype(np.float32) * scale for v in (a, b, c))
    return colour((red, green, blue), shape)


NOISE = Scene(
    name="noise",
    title="independent random pixels",
    parameter=(0.0, 1.0),
    parameter_name="time",
    wgsl=_WGSL,
    evaluate=_evaluate,
    group="more",
)
