"""Uniform cubic B-splines: a few control points that stand for many texels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Taps", "taps"]


@dataclass(frozen=True, slots=True)
class Taps:
    """Four control points and their weights for each texel of a line.

    Attributes:
        at: Control points, int32 [texels, 4]; ends are clamped, so an index may come twice.
        weights: float32 [texels, 4], each row of sum 1.
        controls: Number of control points.
    """

    at: NDArray[np.int32]
    weights: NDArray[np.float32]
    controls: int

    def matrix(self) -> Tensor:
        """The same as one float32 matrix [texels, controls]."""
        dense = np.zeros((len(self.at), self.controls), dtype=np.float32)
        np.add.at(dense, (np.arange(len(self.at))[:, None], self.at), self.weights)
        return torch.from_numpy(dense)


def taps(texels: int, controls: int) -> Taps:
    """Taps of a line of texels whose controls lie as coarser texels would, (2i + 1)/N - 1.

    The weights are the uniform cubic B-spline's (de Boor 1978, "A Practical Guide to Splines").
    Beyond an end the line goes on straight: that control is 2 c0 - c1, so that a straight line
    stays one up to the edge. As many controls as texels are the texels themselves.
    """
    if texels == controls:
        at = np.repeat(np.arange(texels, dtype=np.int32)[:, None], 4, axis=1)
        weights = np.zeros((texels, 4), dtype=np.float32)
        weights[:, 0] = 1.0
        return Taps(at, weights, controls)
    position = (np.arange(texels) + 0.5) / texels * controls - 0.5
    low = np.floor(position).astype(np.int64)
    f = position - low
    basis = [
        (1 - f) ** 3 / 6,
        (3 * f**3 - 6 * f**2 + 4) / 6,
        (-3 * f**3 + 3 * f**2 + 3 * f + 1) / 6,
        f**3 / 6,
    ]
    dense = np.zeros((texels, controls + 4))
    for k, weight in enumerate(basis):
        dense[np.arange(texels), low + k + 1] += weight  # column c + 2 is control c
    for outer, end, inner in ((1, 2, 3), (0, 2, 3), (-2, -3, -4), (-1, -3, -4)):
        reach = 2 if outer in (0, -1) else 1  # controls beyond the end
        if controls > 1:
            dense[:, end] += (1 + reach) * dense[:, outer]
            dense[:, inner] -= reach * dense[:, outer]
        else:
            dense[:, 2] += dense[:, outer]
        dense[:, outer] = 0.0
    inside = dense[:, 2 : controls + 2]
    start = np.clip(low - 1, 0, max(0, controls - 4))
    at = np.minimum(start[:, None] + np.arange(4), controls - 1)
    weights = inside[np.arange(texels)[:, None], at]
    weights[:, 1:][at[:, 1:] == at[:, :-1]] = 0.0  # fewer than four controls: count none twice
    return Taps(at.astype(np.int32), weights.astype(np.float32), controls)
