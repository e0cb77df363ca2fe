"""The few WGSL built-ins the scenes use, on float32 arrays and in the same order of operations.

Vectors are tuples of arrays rather than a last axis of 2 or 3: every operation then runs over
contiguous memory, and components that do not vary over the image stay small.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Vec3", "clamp", "colour", "inputs", "mix", "mix3", "smoothstep"]

# float32 throughout. NumPy's stubs call `0.5 * float32 array` float64, which it is not, so the
# alias cannot say so; the scenes' tests do.
Array: TypeAlias = npt.NDArray[Any]
Vec3: TypeAlias = tuple[Array, Array, Array]


def inputs(x: npt.ArrayLike, y: npt.ArrayLike, t: npt.ArrayLike) -> Vec3:
    """x, y and t as float32 arrays of one number of axes, still to be broadcast.

    At least one axis: NumPy before 2.0 promotes a float32 scalar times a Python float to float64.
    """
    arrays = [np.asarray(v, dtype=np.float32) for v in (x, y, t)]
    axes = max(1, *(a.ndim for a in arrays))
    first, second, third = (a.reshape((1,) * (axes - a.ndim) + a.shape) for a in arrays)
    return first, second, third


def colour(rgb: Vec3, shape: tuple[int, ...]) -> Array:
    """Three broadcastable components as one [*shape, 3] array."""
    out = np.empty((*shape, 3), np.float32)
    for channel, component in enumerate(rgb):
        out[..., channel] = component
    return out


def clamp(value: Array, low: float, high: float) -> Array:
    return np.minimum(np.maximum(value, np.float32(low)), np.float32(high))


def mix(a: Array | float, b: Array | float, weight: Array) -> Array:
    return np.asarray(a * (1.0 - weight) + b * weight, dtype=np.float32)


def mix3(
    a: Vec3 | tuple[float, float, float], b: Vec3 | tuple[float, float, float], weight: Array
) -> Vec3:
    return mix(a[0], b[0], weight), mix(a[1], b[1], weight), mix(a[2], b[2], weight)


def smoothstep(low: float, high: float, value: Array) -> Array:
    u = clamp((value - low) / (high - low), 0.0, 1.0)
    return np.asarray(u * u * (3.0 - 2.0 * u), dtype=np.float32)
