"""The part of an iteration that is not the rasterizer's: Adam and the projection, compiled."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# The signature that is compiled stands above the function.

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, float32, float64, int64, njit

__all__ = ["adam_project"]

_compiled: Any = njit  # its stubs know no set of fast-math flags
_f1, _f2 = float32[::1], float32[:, ::1]


# Not nnan and ninf: whether a number is finite must stay a question that can be asked.
@_compiled(
    boolean(_f2, _f2, _f2, _f2, _f1, _f1, _f1, float64, float64, float64, int64),
    fastmath={"contract", "nsz"},
    error_model="numpy",
    nogil=True,
    cache=True,
)
def adam_project(values, gradients, first, second, rates, low, high, beta1, beta2, epsilon, count):
    """One step of Adam (Kingma and Ba 2015) in place, then each column cut to its range.

    Args:
        values: [T, 10], as are the gradients and the two moments.
        rates, low, high: [10], one a column.
        count: Steps so far, this one included, for the bias correction.
    Returns:
        False where a gradient is not finite; then nothing was changed.
    """
    rows, columns = values.shape
    for i in range(rows):
        for j in range(columns):
            if not np.isfinite(gradients[i, j]):
                return False
    step = 1.0 / (1.0 - beta1**count)
    root = np.float32(1.0 / np.sqrt(1.0 - beta2**count))
    keep1, keep2 = np.float32(beta1), np.float32(beta2)
    grow1, grow2 = np.float32(1.0 - beta1), np.float32(1.0 - beta2)
    least = np.float32(epsilon)
    for i in range(rows):
        for j in range(columns):
            g = gradients[i, j]
            m = keep1 * first[i, j] + grow1 * g
            v = keep2 * second[i, j] + grow2 * g * g
            first[i, j], second[i, j] = m, v
            moved = values[i, j] - np.float32(step) * rates[j] * m / (np.sqrt(v) * root + least)
            values[i, j] = min(max(moved, low[j]), high[j])
    return True
