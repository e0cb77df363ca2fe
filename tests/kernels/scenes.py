"""Scenes by name, seeded, in float32; and which of their pixels are away from any kink.

Float32 whatever is tested: its values are exact in float64, so one truth serves both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from doublure_kernels.scene import CULL_WEIGHT, Raster, Scene
from numpy.random import Generator
from numpy.typing import NDArray

Array = NDArray[Any]


def make(
    kind: str,
    *,
    batch: int = 3,
    triangles: int | None = None,
    sigma: float = 0.004,
    ragged: bool = True,
    seed: int = 0,
) -> Scene:
    """A batch of scenes of one of `KINDS`.

    Args:
        triangles: In each; None is what suits the kind.
        ragged: Items have fewer and fewer triangles; else all have all of them.
    """
    rng = np.random.default_rng([seed, sorted(KINDS).index(kind)])
    amount = _AMOUNT.get(kind, 12) if triangles is None else triangles
    params = KINDS[kind](rng, batch, amount)
    sigmas = np.full((batch, amount), sigma)
    if kind == "mixed_sigma":
        sigmas *= np.exp(rng.uniform(np.log(0.2), np.log(20), sigmas.shape))
    counts = np.full(batch, amount)
    if ragged and batch > 1:
        counts = np.linspace(amount, amount // 2, batch).astype(np.int64)
    background = rng.uniform(-0.5, 1.5, (batch, 3))
    return Scene(
        params.astype(np.float32),
        sigmas.astype(np.float32),
        background.astype(np.float32),
        counts.astype(np.int64),
    )


def cast(scene: Scene, dtype: Any) -> Scene:
    """The same scene with floating arrays of another dtype."""
    arrays = (scene.params, scene.sigma, scene.background)
    return Scene(*(np.asarray(array, dtype) for array in arrays), counts=scene.counts)


def double(scene: Scene) -> Scene:
    return cast(scene, np.float64)


# --- kinds ----------------------------------------------------------------------------------------


def _looks(rng: Generator, batch: int, amount: int, alpha: Array | float | None = None) -> Array:
    looks = rng.random((batch, amount, 4))
    looks[..., 3] = rng.uniform(0.2, 0.95, (batch, amount)) if alpha is None else alpha
    return looks


def _with_looks(vertices: Array, looks: Array) -> Array:
    return np.concatenate([vertices.reshape(*looks.shape[:2], 6), looks], -1)


def _around(rng: Generator, batch: int, amount: int, reach: float) -> Array:
    centres = rng.random((batch, amount, 1, 2))
    return centres + rng.uniform(-reach, reach, (batch, amount, 3, 2))


def _small(rng: Generator, batch: int, amount: int) -> Array:
    return _with_looks(_around(rng, batch, amount, 0.12), _looks(rng, batch, amount))


def _full_canvas(rng: Generator, batch: int, amount: int) -> Array:
    angle = rng.uniform(0, 2 * np.pi, (batch, amount, 1)) + np.arange(3) * 2 * np.pi / 3
    vertices = 0.5 + 3 * np.stack([np.cos(angle), np.sin(angle)], -1)
    return _with_looks(vertices, _looks(rng, batch, amount))


def _opaque(rng: Generator, batch: int, amount: int) -> Array:
    return _with_looks(_around(rng, batch, amount, 0.4), _looks(rng, batch, amount, 1.0))


def _stacked(rng: Generator, batch: int, amount: int) -> Array:
    looks = _looks(rng, batch, amount, rng.uniform(0, 0.002, (batch, amount)))
    return _with_looks(_around(rng, batch, amount, 0.5), looks)


def _half_planes(rng: Generator, batch: int, amount: int) -> Array:
    """One edge across the canvas each, the others far: of thousands, no pixel is near a kink."""
    v = np.empty((batch, amount, 3, 2))
    v[:, :, :2, 0] = rng.uniform(0, 1, (batch, amount, 2))
    v[:, :, :2, 1] = (-20, 20)
    v[:, :, 2, 0] = rng.choice([-40, 40], (batch, amount))
    v[:, :, 2, 1] = rng.random((batch, amount))
    return _with_looks(v, _looks(rng, batch, amount))


def _degenerate(rng: Generator, batch: int, amount: int) -> Array:
    v = _around(rng, batch, amount, 0.3)
    for t in range(amount):
        if t % 6 == 0:  # a point
            v[:, t, 1:] = v[:, t, :1]
        elif t % 6 == 1:  # two vertices in one, then two others
            v[:, t, 1] = v[:, t, 0]
        elif t % 6 == 2:
            v[:, t, 0] = v[:, t, 2]
        elif t % 6 == 3:  # collinear, exactly: along an axis
            v[:, t, :, t // 6 % 2] = v[:, t, :1, t // 6 % 2]
        elif t % 6 == 4:  # collinear, exactly: a binary fraction of the way
            v[:, t] = np.round(v[:, t] * 64) / 64
            v[:, t, 2] = v[:, t, 0] + (v[:, t, 1] - v[:, t, 0]) / 4
        else:  # the same twice
            v[:, t] = v[:, t - 1]
    return _with_looks(v, _looks(rng, batch, amount))


def _slivers(rng: Generator, batch: int, amount: int) -> Array:
    v = _around(rng, batch, amount, 0.4)
    thin = 10.0 ** -rng.uniform(2, 8, (batch, amount, 1))
    along = rng.uniform(0, 1, (batch, amount, 1))
    v[:, :, 2] = v[:, :, 0] + along * (v[:, :, 1] - v[:, :, 0])
    v[:, :, 2] += thin * rng.uniform(-1, 1, (batch, amount, 2))
    return _with_looks(v, _looks(rng, batch, amount))


def _on_centres(rng: Generator, batch: int, amount: int) -> Array:
    """Vertices exactly on pixel centres of 5 x 7, 33 x 65, 64 x 64, or 96 x 128 pixels."""
    v = _around(rng, batch, amount, 0.3)
    for t in range(amount):
        size = np.array([(7, 5), (65, 33), (64, 64), (128, 96)][t % 4])
        v[:, t] = (np.round(v[:, t] * size) + 0.5) / size
    return _with_looks(v, _looks(rng, batch, amount))


def _huge(rng: Generator, batch: int, amount: int) -> Array:
    size = 10.0 ** rng.uniform(0, 5, (batch, amount, 1, 1))
    v = 0.5 + size * rng.uniform(-1, 1, (batch, amount, 3, 2))
    return _with_looks(v, _looks(rng, batch, amount))


def _off_canvas(rng: Generator, batch: int, amount: int) -> Array:
    v = _around(rng, batch, amount, 0.1)
    side = np.array([(-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (1, 1)])
    v += side[np.arange(amount) % 6][:, None] * rng.uniform(0.2, 2, (batch, amount, 1, 1))
    return _with_looks(v, _looks(rng, batch, amount))


def _hdr(rng: Generator, batch: int, amount: int) -> Array:
    params = _small(rng, batch, amount)
    params[..., 6:9] = rng.normal(size=(batch, amount, 3)) * 10.0 ** rng.uniform(
        0, 3, (batch, amount, 1)
    )
    return params


def _odd_alpha(rng: Generator, batch: int, amount: int) -> Array:
    params = _with_looks(_around(rng, batch, amount, 0.4), _looks(rng, batch, amount))
    params[..., 9] = np.array([0, 1, -0.5, 1.5, 0.5, 1e-5, 0.99999, 1e-7])[np.arange(amount) % 8]
    return params


def _non_finite(rng: Generator, batch: int, amount: int) -> Array:
    params = _small(rng, batch, amount)
    bad = np.array([np.nan, np.inf, -np.inf])
    for t in range(0, amount, 2):
        params[:, t, (3 * t) % 10] = bad[t // 2 % 3]
    return params


KINDS: dict[str, Callable[[Generator, int, int], Array]] = {
    "degenerate": _degenerate,
    "full_canvas": _full_canvas,
    "half_planes": _half_planes,
    "hdr": _hdr,
    "huge": _huge,
    "mixed_sigma": _small,
    "non_finite": _non_finite,
    "odd_alpha": _odd_alpha,
    "off_canvas": _off_canvas,
    "on_centres": _on_centres,
    "opaque": _opaque,
    "slivers": _slivers,
    "small": _small,
    "stacked": _stacked,
}

_AMOUNT = {"stacked": 40}


# --- kinks ----------------------------------------------------------------------------------------


def smooth_pixels(
    scene: Scene, raster: Raster, *, gradient: bool = True, margin: float = 1e-6
) -> Array:
    """Pixels at which no triangle is near a jump of the image, or of its gradient: [B, H, W].

    The image jumps where a weight passes the threshold, and on the padded box of `bbox6`. Its
    gradient also jumps where two edges are equally near but pull different vertices, and it has a
    hole where the pixel's centre lies on the boundary.

    Args:
        gradient: Whether jumps of the gradient count.
        margin: How near is near, in image widths; weights are compared to 1000 times that.
    """
    found = np.ones((len(scene.params), raster.height, raster.width), bool)
    py = ((np.arange(raster.height) + 0.5) / raster.height)[:, None]
    px = (np.arange(raster.width) + 0.5) / raster.width
    for item, count in enumerate(scene.counts):
        for t in range(count):
            row = np.asarray(scene.params[item, t], np.float64)
            sigma = float(scene.sigma[item, t])
            if np.isfinite(row).all() and np.isfinite(sigma):
                found[item] &= _smooth(row, sigma, px, py, raster, gradient, margin)
    return found


def _smooth(
    row: Array, sigma: float, px: Array, py: Array, raster: Raster, gradient: bool, margin: float
) -> Array:
    v = row[:6].reshape(3, 2)
    # How well float64 itself knows a distance from coordinates of this size.
    margin = max(margin, 1e-14 * float(np.abs(v).max()) ** 2)
    squares, pulls, sides = [], [], []
    for k in range(3):
        a, b = v[k], v[(k + 1) % 3]
        ab = b - a
        length = ab @ ab
        t = np.zeros(np.broadcast_shapes(px.shape, py.shape))
        if length > 0:
            t = np.clip(((px - a[0]) * ab[0] + (py - a[1]) * ab[1]) / length, 0, 1)
        dx, dy = px - a[0] - t * ab[0], py - a[1] - t * ab[1]
        share = np.zeros((3, *t.shape))  # what each vertex gets
        share[k] += 1 - t
        share[(k + 1) % 3] += t
        distance = np.hypot(dx, dy)
        unit = np.stack([dx, dy]) / np.maximum(distance, 1e-300)
        pulls.append(share[:, None] * unit)
        squares.append(distance)
        sides.append((b[0] - a[0]) * (py - a[1]) - (b[1] - a[1]) * (px - a[0]))
    distance = np.min(squares, 0)
    area = (v[1, 0] - v[0, 0]) * (v[2, 1] - v[0, 1]) - (v[1, 1] - v[0, 1]) * (v[2, 0] - v[0, 0])
    inside = (np.min(sides, 0) >= 0) | (np.max(sides, 0) <= 0)
    z = np.where(inside & (area != 0), distance, -distance) / sigma
    u = np.clip(0.5 + z / 6, 0, 1)
    cover = u * u * (3 - 2 * u) if raster.kernel == "compact" else 1 / (1 + np.exp(-z.clip(-700)))
    weight = np.clip(row[9], 0, 1) * cover

    smooth = np.abs(weight / CULL_WEIGHT - 1) > 1000 * margin
    seen = weight > 0.9 * CULL_WEIGHT
    if raster.support == "bbox6":
        for p, values in ((px, v[:, 0]), (py, v[:, 1])):
            for end in (values.min() - 6 * sigma, values.max() + 6 * sigma):
                smooth &= (np.abs(p - end) > margin) | ~seen
    if gradient:
        # Where coverage is flat nothing is pulled, whichever edge is nearest.
        felt = seen & (cover * (1 - cover) > 1e-12)
        smooth &= (distance > margin) | ~felt
        for i, j in ((0, 1), (1, 2), (2, 0)):
            nearest = np.minimum(squares[i], squares[j]) <= distance + margin
            tie = nearest & (np.abs(squares[i] - squares[j]) <= margin)
            differ = np.abs(pulls[i] - pulls[j]).max((0, 1)) > 1e-6
            smooth &= ~(tie & differ & felt)
    return smooth
