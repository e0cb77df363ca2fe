"""The rasterizer in plain torch, written to be read: what every backend must compute.

`render` says the whole function (docs/rasterizer.md gives it in words) in operations that autograd
differentiates, twice if asked. It is also how one would write it in eager torch without a kernel of
one's own, so benchmarks compare with it. `ReferenceBackend` evaluates it in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .scene import COMPACT_RADIUS, CULL_WEIGHT, Gradients, Raster, Scene

__all__ = ["ReferenceBackend", "render"]

Array = NDArray[Any]

_POINT = 1e-9  # nearer to the boundary than this, the direction away from it is not known
_SATURATED = 1000.0  # sigmas at which either kernel has been flat for long, in float64 too
_PAIRS = 1 << 18  # of a pixel and a triangle that `ReferenceBackend` holds at once


def render(
    params: Tensor,
    sigma: Tensor,
    background: Tensor,
    counts: Tensor,
    raster: Raster,
    *,
    chunk: int | None = None,
) -> Tensor:
    """Draw a batch of scenes.

    Coordinates are limited to ±1e150 (float32: ±1e18), where their squares are still finite.

    Args:
        params: [B, T, 10], back to front; any floating dtype, any device, as are the next two.
        sigma: [B, T], greater than 0.
        background: [B, 3].
        counts: [B] int64: item b has its first `counts[b]` triangles.
        raster: How to draw.
        chunk: Rows of pixels drawn at a time; None draws all at once. Bounds the memory that is
            needed where no gradient is recorded.
    Returns:
        [B, H, W, `raster.channels`]. Its derivatives are finite for every finite input. At kinks
        they are one-sided; where the spec says "no gradient", they are zero.
    """
    triangles = _prepare(params, sigma, counts)
    step = max(1, raster.height if chunk is None else chunk)
    parts = [
        _draw_rows(triangles, background, raster, top, min(top + step, raster.height))
        for top in range(0, raster.height, step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@dataclass(frozen=True, slots=True)
class _Triangles:
    """Those that are drawn, and harmless numbers in the place of the others.

    Attributes:
        x: Three of [B, T], the vertices.
        y: Likewise.
        sigma: [B, T].
        colour: [B, T, 3].
        opacity: [B, T], clamped, and 0 for what is not drawn.
        solid: [B, T] bool, whether it has an area and therefore an inside.
    """

    x: tuple[Tensor, Tensor, Tensor]
    y: tuple[Tensor, Tensor, Tensor]
    sigma: Tensor
    colour: Tensor
    opacity: Tensor
    solid: Tensor


def _prepare(params: Tensor, sigma: Tensor, counts: Tensor) -> _Triangles:
    index = torch.arange(params.shape[1], device=params.device)
    live = (index < counts[:, None]) & params.isfinite().all(-1) & sigma.isfinite()
    # Selected before anything is computed, so that no NaN can reach a gradient.
    params = torch.where(live[..., None], params, 0.0)
    sigma = torch.where(live, sigma, 1.0)
    limit = 1e150 if params.dtype == torch.float64 else 1e18
    x0, y0, x1, y1, x2, y2 = params[..., :6].clamp(-limit, limit).unbind(-1)
    alpha = params[..., 9]
    # A clamped opacity gets no gradient, not even at exactly 0 or 1 (where `clamp` passes one).
    opacity = torch.where((alpha > 0.0) & (alpha < 1.0), alpha, alpha.detach().clamp(0.0, 1.0))
    with torch.no_grad():
        # float64 holds products of float32 differences: no triangle is flat by rounding alone.
        a, b, c, d = (v.double() for v in (x0, y0, x1, y1))
        area = (c - a) * (y2.double() - b) - (d - b) * (x2.double() - a)
    colour = params[..., 6:9]
    return _Triangles((x0, x1, x2), (y0, y1, y2), sigma, colour, opacity, area != 0.0)


def _draw_rows(t: _Triangles, background: Tensor, raster: Raster, top: int, bottom: int) -> Tensor:
    """[B, bottom - top, W, C]."""
    dtype, device = t.opacity.dtype, t.opacity.device
    # Axes are [B, rows, W, T] throughout.
    py = (torch.arange(top, bottom, device=device, dtype=dtype) + 0.5) / raster.height
    px = (torch.arange(raster.width, device=device, dtype=dtype) + 0.5) / raster.width
    weights = _weights(t, px[:, None], py[:, None, None], raster)

    # Π(1 - w) over this triangle and all in front of it; then over those in front alone.
    through = torch.cat(
        [(1.0 - weights).flip(-1).cumprod(-1).flip(-1), weights.new_ones(*weights.shape[:3], 1)], -1
    )
    visible = weights * through[..., 1:]

    colour = t.colour
    if raster.alpha:  # opacity is a colour of 1 over a background of 0
        colour = torch.cat([colour, torch.ones_like(colour[..., :1])], -1)
        background = torch.cat([background, torch.zeros_like(background[:, :1])], -1)
    drawn = visible.flatten(1, 2) @ colour
    behind = through[..., 0].flatten(1, 2)[..., None] * background[:, None]
    return (drawn + behind).reshape(*weights.shape[:3], raster.channels)


def _weights(t: _Triangles, px: Tensor, py: Tensor, raster: Raster) -> Tensor:
    """Opacity times coverage, [B, rows, W, T]; 0 where that is next to nothing."""
    sigma = t.sigma[:, None, None]
    distance = _signed_distance(t, px, py)
    # Keeps the quotient finite however small sigma is; nothing changes out there.
    limit = _SATURATED * sigma.detach()
    distance = torch.minimum(torch.maximum(distance, -limit), limit)
    if raster.kernel == "compact":
        u = (0.5 + distance / (2.0 * COMPACT_RADIUS * sigma)).clamp(0.0, 1.0)
        coverage = u * u * (3.0 - 2.0 * u)
    else:
        coverage = torch.sigmoid(distance / sigma)
    weights = t.opacity[:, None, None] * coverage
    kept = weights > CULL_WEIGHT
    if raster.support == "bbox6":
        kept = kept & _in_box(t, px, py)
    return torch.where(kept, weights, 0.0)


@torch.no_grad()
def _in_box(t: _Triangles, px: Tensor, py: Tensor) -> Tensor:
    x, y = torch.stack(t.x)[:, :, None, None], torch.stack(t.y)[:, :, None, None]
    pad = 6.0 * t.sigma[:, None, None]
    across = (px >= x.amin(0) - pad) & (px <= x.amax(0) + pad)
    return across & (py >= y.amin(0) - pad) & (py <= y.amax(0) + pad)


def _signed_distance(t: _Triangles, px: Tensor, py: Tensor) -> Tensor:
    """To the nearest of the three edges, positive inside, [B, rows, W, T]."""
    edges = []
    for k in range(3):
        n = (k + 1) % 3
        ax, ay, bx, by = (v[:, None, None] for v in (t.x[k], t.y[k], t.x[n], t.y[n]))
        edges.append(_from_edge(px - ax, py - ay, px - bx, py - by, bx - ax, by - ay))
    dx, dy = edges[0][1:]
    for _, ex, ey in edges[1:]:
        closer = ex * ex + ey * ey < dx * dx + dy * dy  # of equally near ones the first counts
        dx, dy = torch.where(closer, ex, dx), torch.where(closer, ey, dy)
    sides = [side for side, _, _ in edges]
    left = (sides[0] >= 0.0) & (sides[1] >= 0.0) & (sides[2] >= 0.0)
    right = (sides[0] <= 0.0) & (sides[1] <= 0.0) & (sides[2] <= 0.0)
    inside = (left | right) & t.solid[:, None, None]
    distance = _root(dx * dx + dy * dy, _POINT)
    return torch.where(inside, distance, -distance)


def _from_edge(
    apx: Tensor, apy: Tensor, bpx: Tensor, bpy: Tensor, abx: Tensor, aby: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Distance to the left of the line through A and B, and the vector from the segment to p.

    The vector is taken from the vertex where that is nearest, and along the normal elsewhere: what
    A + t (B - A) would lose to rounding between far vertices stays.
    """
    length = _root(abx * abx + aby * aby, 0.0)
    known = length > 0.0  # a point has no direction
    divisor = torch.where(known, length, 1.0)
    tx, ty = abx / divisor, aby / divisor
    along, side = apx * tx + apy * ty, tx * apy - ty * apx
    before, after = along <= 0.0, along >= length
    dx = torch.where(before, apx, torch.where(after, bpx, -ty * side))
    dy = torch.where(before, apy, torch.where(after, bpy, tx * side))
    return side.detach(), dx, dy


def _root(square: Tensor, least: float) -> Tensor:
    """√, with a gradient of zero where it is `least` or less, instead of infinity."""
    near = square <= least * least
    # Both branches must be finite: `where` sends 0 times the other's gradient into each.
    return torch.where(near, square.detach().sqrt(), torch.where(near, 1.0, square).sqrt())


class ReferenceBackend:
    """`Backend` on NumPy arrays: `render` and autograd in float64, a few rows at a time. Slow."""

    name = "reference"
    adapter = None

    def close(self) -> None:
        """Nothing to free."""

    def forward(self, scene: Scene, raster: Raster) -> Array:
        """See `Backend.forward`."""
        images = np.empty(
            (len(scene.params), raster.height, raster.width, raster.channels), scene.params.dtype
        )
        with torch.no_grad():
            for part in _parts(scene, raster):
                images[part.items, part.rows] = part.draw().numpy()
        return images

    def backward(self, scene: Scene, raster: Raster, grad_images: Any) -> Gradients:
        """See `Backend.backward`."""
        return self._differentiate(scene, raster, grad_images, fused=False)[1]

    def fused_mse(self, scene: Scene, raster: Raster, targets: Any) -> tuple[Array, Gradients]:
        """See `Backend.fused_mse`."""
        return self._differentiate(scene, raster, targets, fused=True)

    def _differentiate(
        self, scene: Scene, raster: Raster, given: Any, *, fused: bool
    ) -> tuple[Array, Gradients]:
        losses = np.zeros(len(scene.params))
        sums = [np.zeros(array.shape) for array in (scene.params, scene.sigma, scene.background)]
        # Callers may have switched recording off; inference tensors could not be recorded at all.
        with torch.inference_mode(False), torch.enable_grad():
            for part in _parts(scene, raster):
                images = part.draw()
                data = _tensor(given[part.items, part.rows])
                if fused:
                    errors = images - data
                    each = errors.square().sum((1, 2, 3)) / (3.0 * raster.height * raster.width)
                    losses[part.items] += each.detach().numpy()
                    total = each.sum()
                else:
                    total = (images * data).sum()
                found = torch.autograd.grad(total, part.leaves, materialize_grads=True)
                for whole, gradient in zip(sums, found, strict=True):
                    whole[part.items] += gradient.numpy()
        dtype = scene.params.dtype
        return losses.astype(dtype), Gradients(*(whole.astype(dtype) for whole in sums))


@dataclass(frozen=True, slots=True)
class _Part:
    """Some items' rows of pixels, and the tensors to draw them from."""

    items: slice
    rows: slice
    leaves: tuple[Tensor, Tensor, Tensor]
    counts: Tensor
    raster: Raster

    def draw(self) -> Tensor:
        params, sigma, background = self.leaves
        triangles = _prepare(params, sigma, self.counts)
        return _draw_rows(triangles, background, self.raster, self.rows.start, self.rows.stop)


def _parts(scene: Scene, raster: Raster) -> Iterator[_Part]:
    batch, triangles = scene.params.shape[:2]
    a_row = raster.width * max(1, triangles)
    rows = min(raster.height, max(1, _PAIRS // a_row))
    items = max(1, _PAIRS // (a_row * rows))
    for first in range(0, batch, items):
        some = slice(first, min(first + items, batch))
        leaves = tuple(
            _tensor(array[some]).requires_grad_()
            for array in (scene.params, scene.sigma, scene.background)
        )
        counts = torch.from_numpy(np.array(scene.counts[some]))
        for top in range(0, raster.height, rows):
            few = slice(top, min(top + rows, raster.height))
            yield _Part(some, few, leaves, counts, raster)  # type: ignore[arg-type]


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array, np.float64))  # a copy: inputs are never written to
