"""Mandelbrot: a zoom of two hundred and fifty times into the valley between head and body.

Here to break what expects an image to be smooth somewhere: the boundary has detail at every scale,
and the zoom brings new detail into the middle at every t, while the inside stays black.

Up to 256 iterations a pixel, coloured by the continuous count of Vepstas ("Renormalizing the
Mandelbrot escape", linas.org, 1997). At the deepest a pixel of 512 x 512 is 2.5e-5 wide, four
hundred times the last place of a float32 there: deeper, blocks would show. Along the boundary the
iteration multiplies roundings until they decide: one pixel in twenty-five differs by device there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arrays import Array, colour, inputs
from .scene import Scene

__all__ = ["MANDELBROT"]

_WGSL = """
fn scene_color(p: vec2f, t: f32) -> vec3f {
    let width = 1.6 * exp(-5.52 * t);
    let c = vec2f(-0.7436439, 0.1318259) + width * p - vec2f(0.25 * width * (1.0 - t), 0.0);
    var z = vec2f(0.0, 0.0);
    var square = 0.0;
    var count = 0;
    while (count < 256 && square < 4096.0) {
        z = vec2f(z.x * z.x - z.y * z.y + c.x, 2.0 * z.x * z.y + c.y);
        square = z.x * z.x + z.y * z.y;
        count++;
    }
    if (square < 4096.0) {
        return vec3f(0.002, 0.004, 0.010);
    }
    // 4096 = 2^12, so that this is 1 at the circle and 0 a whole iteration further.
    let smooth_count = f32(count) + 1.0 - log2(0.16666667 * log2(square) * 0.5);
    let v = 1.15 * log2(smooth_count) - 1.2 * t;
    let dim = 1.0 - exp(-0.16 * smooth_count);
    return dim * vec3f(
        0.36 + 0.34 * cos(2.1 * v + 2.9),
        0.26 + 0.25 * cos(2.1 * v + 3.7),
        0.30 + 0.28 * cos(2.1 * v + 5.0)
    );
}
"""

_INSIDE = (0.002, 0.004, 0.010)


def _escape(cx: Array, cy: Array) -> tuple[Array, Array]:
    """Iterations [n] until |z|^2 reaches 4096, and |z|^2 there; pixels that did drop out."""
    count = np.full(cx.shape, 256, np.int32)
    final = np.zeros(cx.shape, np.float32)
    active = np.arange(cx.size)
    x, y = np.zeros_like(cx), np.zeros_like(cy)
    for i in range(1, 257):
        x, y = x * x - y * y + cx, 2.0 * x * y + cy
        square = x * x + y * y
        out = square >= np.float32(4096.0)
        if out.any():
            count[active[out]] = i
            final[active[out]] = square[out]
            keep = ~out
            active, x, y, cx, cy = active[keep], x[keep], y[keep], cx[keep], cy[keep]
    return count, final


def _evaluate(x: npt.ArrayLike, y: npt.ArrayLike, t: npt.ArrayLike) -> Array:
    x, y, t = inputs(x, y, t)
    shape = np.broadcast_shapes(x.shape, y.shape, t.shape)
    width = 1.6 * np.exp(-5.52 * t)
    cx = -0.7436439 + width * x - 0.25 * width * (1.0 - t)
    cy = 0.1318259 + width * y
    count, square = _escape(
        *(np.broadcast_to(v, shape).ravel().astype(np.float32) for v in (cx, cy))
    )
    outside = (square > 0).reshape(shape)
    square = np.maximum(square, np.float32(4096.0))
    smooth = count.astype(np.float32) + 1.0 - np.log2(0.16666667 * np.log2(square) * 0.5)
    smooth = np.maximum(smooth.reshape(shape), np.float32(1e-3))
    v = 1.15 * np.log2(smooth) - 1.2 * t
    dim = 1.0 - np.exp(-0.16 * smooth)
    rgb = [
        np.where(outside, dim * (a + b * np.cos(2.1 * v + shift)), np.float32(inside))
        for a, b, shift, inside in zip(
            (0.36, 0.26, 0.30), (0.34, 0.25, 0.28), (2.9, 3.7, 5.0), _INSIDE, strict=True
        )
    ]
    return colour((rgb[0], rgb[1], rgb[2]), shape)


MANDELBROT = Scene(
    name="mandelbrot",
    title="a zoom into the Mandelbrot set",
    parameter=(0.0, 1.0),
    parameter_name="zoom",
    wgsl=_WGSL,
    evaluate=_evaluate,
    group="more",
)
