"""The NumPy reading of a model specification: what every other reading is checked against.

Plain float32 arithmetic in the order that `doublure_bridge.models` and `docs/protocol.md` give.
Correct first: the plugin judges received weights and the host's own shader by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from doublure_bridge.errors import SpecError
from doublure_bridge.models import LOG_LIMIT, CompactSpec, GridSpec, ModelSpec

__all__ = ["Evaluator", "check_tensors"]

Array: TypeAlias = npt.NDArray[Any]

_CHUNK = 8192
"""Points a step: the activations of 32 channels then stay within a core's cache."""


def check_tensors(spec: ModelSpec, tensors: Mapping[str, Array], *, finite: bool = True) -> None:
    """Check that `tensors` are exactly the ones that `spec` names, in dtype and shape, and finite.

    Args:
        finite: Look at every value; false for tensors that have been looked at before.

    Raises:
        SpecError: Naming the first tensor that is missing, unknown, misshaped or not finite.
    """
    wanted = spec.tensors()
    for name, tensor in wanted.items():
        text = f"{tensor.dtype} {list(tensor.shape)}"
        got = tensors.get(name)
        if got is None:
            raise SpecError(f"tensors.{name}", expected=text, got="nothing")
        if not isinstance(got, np.ndarray):
            raise SpecError(f"tensors.{name}", expected=text, got=type(got).__name__)
        if got.dtype != np.dtype(tensor.dtype) or got.shape != tensor.shape:
            raise SpecError(f"tensors.{name}", expected=text, got=f"{got.dtype} {list(got.shape)}")
        if finite and not np.isfinite(got).all():
            count = int(got.size - np.count_nonzero(np.isfinite(got)))
            raise SpecError(
                f"tensors.{name}", expected="finite values", got=f"{count} that are not"
            )
    unknown = sorted(set(tensors) - set(wanted))
    if unknown:
        raise SpecError(f"tensors.{unknown[0]}", expected=f"only {', '.join(wanted)}")


class Evaluator:
    """One model's weights as a function of (x, y, t) in [-1, 1].

    Args:
        spec: Family and sizes.
        tensors: Every tensor that `spec.tensors()` names; borrowed, not copied where the dtype
            already is float32, so do not write to them afterwards.
    Raises:
        SpecError: A tensor is missing, unknown, of another dtype or shape, or not finite.
    """

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Array]) -> None:
        check_tensors(spec, tensors)
        self.spec = spec
        self._layers = [
            (
                np.ascontiguousarray(tensors[f"mlp.{i}.weight"].T, dtype=np.float32),
                tensors[f"mlp.{i}.bias"].astype(np.float32, copy=False),
            )
            for i in range(spec.layers + 1)
        ]
        self._textures = {
            name: tensors[name].astype(np.float32)
            for name, tensor in spec.tensors().items()
            if tensor.dtype == "float16"
        }

    def __call__(self, points: Array) -> Array:
        """Linear RGB, float32 [N, 3], at float32 [N, 3] points (x, y, t).

        Raises:
            SpecError: `points` is not [N, 3].
        """
        points = np.asarray(points, dtype=np.float32)
        if points.ndim != 2 or points.shape[1] != 3:
            raise SpecError("points", expected="float32 [N, 3]", got=list(points.shape))
        out = np.empty((len(points), 3), np.float32)
        for start in range(0, len(points), _CHUNK):
            part = points[start : start + _CHUNK]
            first, bias = self._layers[0]
            out[start : start + _CHUNK] = self._finish(self._features(part) @ first + bias)
        return out

    def image(self, width: int, height: int, t: float) -> Array:
        """The whole image, float32 [height, width, 3], at normalised `t`.

        Rows and columns share their lookups here, so this is faster than `__call__` at every
        pixel and equal to it within float32 rounding.
        """
        x, y = _centres(width), _centres(height)
        u = np.array([t], np.float32)
        first, bias = self._layers[0]
        out = np.empty((height, width, 3), np.float32)
        if isinstance(self.spec, CompactSpec):
            columns = x[:, None] * first[0]
            rows = y[:, None] * first[1] + (u * first[2] + bias)
            for part in _row_chunks(height, width):
                h = rows[part, None, :] + columns[None]
                out[part] = self._finish(h.reshape(-1, h.shape[-1])).reshape(-1, width, 3)
            return out
        xy, volume = self._textures["plane.xy"], self._textures["volume"]
        xt = _linear(_linear(self._textures["plane.xt"], 0, u)[0], 0, x)
        yt = _linear(_linear(self._textures["plane.yt"], 0, u)[0], 0, y)
        # Both image-sized textures at this t, side by side: columns filtered, rows still to do.
        across = (_linear(xy, 1, x), _linear(_linear(volume, 0, u)[0], 1, x))
        columns = xt @ first[4:8] + x[:, None] * first[16]
        rows = yt @ first[8:12] + y[:, None] * first[17] + (u * first[18] + bias)
        weight = np.concatenate([first[0:4], first[12:16]])
        for part in _row_chunks(height, width):
            features = np.concatenate([_linear(a, 0, y[part]) for a in across], axis=-1)
            h = features @ weight
            h += rows[part, None, :]
            h += columns[None]
            out[part] = self._finish(h.reshape(-1, h.shape[-1])).reshape(-1, width, 3)
        return out

    def _features(self, points: Array) -> Array:
        """Inputs of the network, float32 [N, inputs]."""
        if isinstance(self.spec, GridSpec):
            x, y, t = points[:, 0], points[:, 1], points[:, 2]
            return np.concatenate(
                [
                    _bilinear(self._textures["plane.xy"], x, y),
                    _bilinear(self._textures["plane.xt"], x, t),
                    _bilinear(self._textures["plane.yt"], y, t),
                    _trilinear(self._textures["volume"], x, y, t),
                    points,
                ],
                axis=1,
            )
        return points

    def _finish(self, h: Array) -> Array:
        """From the first layer's sums, [N, hidden], to linear RGB, [N, 3]; overwrites `h`."""
        for weight, bias in self._layers[1:]:
            if isinstance(self.spec, GridSpec):
                np.maximum(h, np.float32(0.0), out=h)
            else:
                np.sin(h, out=h)
            h = h @ weight
            h += bias
        size = np.minimum(np.abs(h), np.float32(LOG_LIMIT))
        return np.copysign(np.expm1(size), h)


def _centres(count: int) -> Array:
    """Pixel centres of `count` columns or rows in [-1, 1]."""
    i = np.arange(count, dtype=np.float32)
    return (np.float32(2.0) * i + np.float32(1.0)) / np.float32(count) - np.float32(1.0)


def _row_chunks(height: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK // max(1, width))
    for start in range(0, height, step):
        yield slice(start, min(height, start + step))


def _texels(u: Array, count: int) -> tuple[Array, Array, Array]:
    """Lower and upper texel and the upper one's weight, for coordinates in [-1, 1].

    Texel centre i lies at (2i + 1)/count - 1; beyond the outer centres the edge texel holds.
    """
    half = np.float32(0.5)
    position = (u * half + half) * np.float32(count) - half
    position = np.minimum(np.maximum(position, np.float32(0.0)), np.float32(count - 1))
    lower = position.astype(np.intp)
    return lower, np.minimum(lower + 1, count - 1), position - lower.astype(np.float32)


def _linear(texture: Array, axis: int, u: Array) -> Array:
    """Filter one axis at the coordinates `u`: that axis becomes as long as `u`."""
    lower, upper, weight = _texels(u, texture.shape[axis])
    shape = [1] * texture.ndim
    shape[axis] = len(u)
    weight = weight.reshape(shape)
    low, high = np.take(texture, lower, axis), np.take(texture, upper, axis)
    filtered: Array = low + (high - low) * weight
    return filtered


def _bilinear(plane: Array, column: Array, row: Array) -> Array:
    """[N, 4] from [rows, columns, 4]."""
    height, width, _ = plane.shape
    x0, x1, fx = _texels(column, width)
    y0, y1, fy = _texels(row, height)
    flat = plane.reshape(-1, 4)
    fx, fy = fx[:, None], fy[:, None]
    top = _lerp(flat[y0 * width + x0], flat[y0 * width + x1], fx)
    return _lerp(top, _lerp(flat[y1 * width + x0], flat[y1 * width + x1], fx), fy)


def _trilinear(volume: Array, column: Array, row: Array, depth: Array) -> Array:
    """[N, 4] from [slices, rows, columns, 4]."""
    slices, height, width, _ = volume.shape
    z0, z1, fz = _texels(depth, slices)
    x0, x1, fx = _texels(column, width)
    y0, y1, fy = _texels(row, height)
    flat = volume.reshape(-1, 4)
    fx, fy, fz = fx[:, None], fy[:, None], fz[:, None]

    def at(z: Array) -> Array:
        low, high = (z * height + y0) * width, (z * height + y1) * width
        top = _lerp(flat[low + x0], flat[low + x1], fx)
        return _lerp(top, _lerp(flat[high + x0], flat[high + x1], fx), fy)

    return _lerp(at(z0), at(z1), fz)


def _lerp(a: Array, b: Array, weight: Array) -> Array:
    result: Array = a + (b - a) * weight
    return result
