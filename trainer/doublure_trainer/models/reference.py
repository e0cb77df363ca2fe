"""The specification once more in float64 NumPy: the truth that golden probes carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from doublure_bridge.models import LOG_LIMIT, GridSpec, ModelSpec
from numpy.typing import NDArray

__all__ = ["evaluate"]

Array = NDArray[np.float64]


def evaluate(
    spec: ModelSpec, tensors: Mapping[str, NDArray[Any]], points: NDArray[np.floating[Any]]
) -> Array:
    """Linear RGB, float64 [n, 3], of stored tensors at points x, y, t, [n, 3]."""
    where = np.asarray(points, dtype=np.float64)
    weights = {name: np.asarray(value, dtype=np.float64) for name, value in tensors.items()}
    hidden = where
    if isinstance(spec, GridSpec):
        x, y, t = where.T
        hidden = np.concatenate(
            [
                _lookup(weights["plane.xy"], (y, x)),
                _lookup(weights["plane.xt"], (t, x)),
                _lookup(weights["plane.yt"], (t, y)),
                _lookup(weights["volume"], (t, y, x)),
                where,
            ],
            axis=1,
        )
    for i in range(spec.layers + 1):
        hidden = hidden @ weights[f"mlp.{i}.weight"].T + weights[f"mlp.{i}.bias"]
        if i < spec.layers:
            hidden = np.maximum(hidden, 0.0) if isinstance(spec, GridSpec) else np.sin(hidden)
    return np.copysign(np.expm1(np.minimum(np.abs(hidden), LOG_LIMIT)), hidden)


def _lookup(texels: Array, where: tuple[Array, ...]) -> Array:
    """Linear, clamp to edge, texel centre i of N at (2i + 1)/N - 1; axes as in `texels`."""
    count = len(where[0])
    found = np.zeros((count, texels.shape[-1]))
    lows, parts = [], []
    for axis, coordinate in enumerate(where):
        size = texels.shape[axis]
        position = np.clip(((coordinate + 1.0) * size - 1.0) / 2.0, 0.0, size - 1.0)
        low = np.minimum(np.floor(position).astype(np.int64), max(0, size - 2))
        lows.append(low)
        parts.append(position - low)
    for corner in np.ndindex(*([2] * len(where))):
        weight = np.ones(count)
        index = []
        for axis, side in enumerate(corner):
            weight = weight * (parts[axis] if side else 1.0 - parts[axis])
            index.append(np.minimum(lows[axis] + side, texels.shape[axis] - 1))
        found += weight[:, None] * texels[tuple(index)]
    return found
