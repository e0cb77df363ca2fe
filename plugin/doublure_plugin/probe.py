"""The determinism probe: does the same parameter draw the same image?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import NondeterministicSourceError

__all__ = ["probe_determinism"]


def probe_determinism(
    draw: Callable[[float], NDArray[Any]],
    parameter: tuple[float, float],
    samples: int = 3,
    *,
    tolerance: float = 0.0,
) -> float:
    """Draw the same parameters twice, with others in between, and compare.

    Noise by frame number, feedback from the last frame and accumulated state all show: what lies
    between the two drawings of t is another t each time.

    Args:
        draw: Draws the source at t and returns its pixels, linear float [H, W, C].
        parameter: Range of t, (low, high).
        samples: Parameters to compare, 1 or more.
        tolerance: Largest accepted difference, in colour.
    Returns:
        The largest difference found.
    Raises:
        NondeterministicSourceError: It is larger than `tolerance`; names where and how much.
    """
    low, high = parameter
    # The golden ratio spreads any number of parameters evenly and meets no period of the host's.
    golden = (5**0.5 - 1) / 2
    largest = 0.0
    for i in range(max(1, samples)):
        t = low + (high - low) * ((0.5 + i * golden) % 1.0)
        between = low + (high - low) * ((0.5 + (i + 0.5) * golden) % 1.0)
        first = np.array(draw(t), dtype=np.float64)
        draw(between)
        second = np.array(draw(t), dtype=np.float64)
        if first.shape != second.shape:
            raise NondeterministicSourceError(
                f"source at t = {t:.6g}", expected=f"the same size twice, {list(first.shape)}",
                got=list(second.shape),
            )  # fmt: skip
        # Equal infinities are equal; a NaN never is.
        with np.errstate(invalid="ignore"):
            difference = np.where(first == second, 0.0, np.abs(first - second))
        difference = np.where(np.isnan(difference), np.inf, difference)
        worst = float(difference.max(initial=0.0))
        if worst > tolerance:
            line, column, channel = np.unravel_index(int(difference.argmax()), difference.shape)
            changed = int((difference.max(axis=-1) > tolerance).sum())
            raise NondeterministicSourceError(
                f"source at t = {t:.6g}", expected="the same image each time it is drawn",
                got=f"a difference of {worst:.6g} at pixel ({column}, {line}), channel {channel}; "
                f"{changed} pixels differ",
                next_step="freeze what else varies: random seeds, frame counters, feedback "
                "buffers, temporal antialiasing",
            )  # fmt: skip
        largest = max(largest, worst)
    return largest
