"""Does a device draw right? A small scene against numbers of the float64 reference.

Drivers compile what they are given, and some get it wrong: a device that draws zeros, or whose
subgroups are not what it says, is refused by name before anybody trains on it. What passed is
remembered beside the compiled kernels, for the same device, driver and shaders.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..backend import Backend
from ..errors import DeviceError
from ..scene import PARAMS, Raster, Scene

__all__ = ["EXPECTED", "RASTER", "check", "numbers", "scene", "targets"]

Array = NDArray[Any]

_TRIANGLES = 150  # more than one chunk, so that light is handed on from one to the next
RASTER: Final = Raster(28, 40)  # several tiles, some of them partly outside
EXPECTED: Final = (
    0.415129, 0.418762, 0.572312, 0.376032, 0.529794, 0.667142, 0.256501, 0.556531, 0.735547,
    0.327999, 0.516575, 0.729937, 0.236082, 0.496294, 0.728726, 0.386857, 0.537969, 0.6048,
    0.270744, 0.482003, 0.737719, 0.261576, 0.529059, 0.694239, 0.344273, 0.427991, 0.650936,
    0.104552, -0.116685, 0.155167, -0.011372, 0.595111, 0.097099, -0.041996, -1.912088, 0.254196,
    1.91693, -5.894477, 0.0, 0.0, 7e-06, 5e-06, -5.9e-05, 0.007051, -0.000155, -0.000136,
    0.000188, -0.001132, 0.0023, -0.001367, -0.000635, 0.006962, 0.012698, -0.008152, -0.007113,
    -0.000699, 0.007112, -0.021096,
)  # fmt: skip
"""`numbers` of what the reference draws; a test works them out again."""

_TOLERANCE = 1e-3


def _spread(count: int, first: int) -> Array:
    """Numbers that look random, 0..1, the same ones everywhere."""
    values: Array = np.sin(np.arange(first, first + count) * 12.9898) * 43758.5453
    return np.abs(values) % 1.0


def scene() -> Scene:
    """One item: triangles of half the image, opaque ones among them."""
    values = _spread(_TRIANGLES * PARAMS, 1).reshape(1, _TRIANGLES, PARAMS)
    centres = np.tile(values[..., :2], 3)
    values[..., :6] = centres + (_spread(_TRIANGLES * 6, 7001).reshape(-1, 6) - 0.5) * 0.5
    values[..., 9] *= 0.3
    values[0, ::40, 9] = 1.0
    return Scene(
        values.astype(np.float32),
        np.full((1, _TRIANGLES), 0.02, np.float32),
        np.array([[0.2, 0.5, 0.8]], np.float32),
        np.array([_TRIANGLES], np.int64),
    )


def targets() -> Array:
    """To compare with, [1, H, W, 3] float32."""
    shape = (1, RASTER.height, RASTER.width, 3)
    return _spread(int(np.prod(shape)), 9001).reshape(shape).astype(np.float32)


def numbers(images: Array, losses: Array, grads: Array) -> Array:
    """What is compared: some pixels, the loss, sums and some triangles' gradients.

    Args:
        images: [1, H, W, 3].
        losses: [1].
        grads: [1, T, 10].
    """
    weights = _spread(_TRIANGLES, 3)[:, None]
    return np.concatenate(
        [
            images[0, 3::9, 5::12].ravel(),
            losses,
            100 * (grads[0] * weights).sum(0),
            100 * grads[0, -1],
            100 * grads[0, 70],
        ]
    ).astype(np.float64)


def check(backend: Backend) -> None:
    """Draw, and compare.

    Raises:
        DeviceError: The device draws something else.
    """
    losses, gradients = backend.fused_mse(scene(), RASTER, targets())
    found = numbers(backend.forward(scene(), RASTER), losses, gradients.params)
    off = np.abs(found - np.array(EXPECTED))
    if not (off < _TOLERANCE).all():  # so written that NaN is refused too
        count = int((~(off < _TOLERANCE)).sum())
        worst = int(np.argmax(np.where(np.isnan(off), np.inf, off)))
        raise DeviceError(
            f'device "{backend.name}": expected {backend.adapter} to draw a known scene right, got '
            f"{found[worst]:.6g} instead of {EXPECTED[worst]:.6g} ({count} of "
            f"{len(off)} numbers are off); update its driver, or use another device"
        )
