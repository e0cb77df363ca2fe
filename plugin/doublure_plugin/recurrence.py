"""A passive look at determinism: does a parameter that comes again bring the same colours?"""

from __future__ import annotations

import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .errors import NondeterministicSourceError

__all__ = ["Recurrence"]

_REMEMBERED: Final = 16
_INTERVAL_S: Final = 0.25
# Drivers may reorder a sum, and half floats round; noise and feedback are far above.
_TOLERANCE: Final = 4e-3


class Recurrence:
    """Sender thread only. Remembers the first few parameters' rows; about 64 kB each.

    The first ones are kept for good rather than the last ones, because a host that sweeps its
    parameter comes back to each only after all the others.

    Args:
        width: Pixels of the source.
        height: Pixels of the source.
    """

    def __init__(self, width: int, height: int) -> None:
        self._width = width
        self._height = height
        self._seen: dict[float, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._checked = 0.0
        self._found = False

    def look(self, t: float, rows: NDArray[np.float32], place: str) -> None:
        """Compare with the pixels in common, four times a second at most, until one finding.

        Raises:
            NondeterministicSourceError: The same pixel of the same t has another colour.
        """
        if self._found:
            return
        known = self._seen.get(t)
        if known is None:
            if len(self._seen) < _REMEMBERED:
                self._seen[t] = (self._pixels(rows), rows[:, 3:].copy())
            return
        now = time.monotonic()
        if now - self._checked < _INTERVAL_S:
            return
        self._checked = now
        pixels = self._pixels(rows)
        common, old, new = np.intersect1d(known[0], pixels, return_indices=True)
        if len(common) == 0:
            return
        before, after = known[1][old], rows[new, 3:]
        difference = np.abs(before - after).max(axis=1)
        limit = _TOLERANCE * (1.0 + np.abs(before).max(axis=1))
        if (difference <= limit).all():
            return
        self._found = True
        worst = int(np.argmax(difference - limit))
        line, column = divmod(int(common[worst]), self._width)
        raise NondeterministicSourceError(
            f"{place}: pixel ({column}, {line})",
            expected="the colour that the same parameter gave before",
            got=f"a difference of {difference[worst]:.4g}; "
            f"{int((difference > limit).sum())} of {len(common)} pixels in common differ",
            next_step="freeze what else varies (seeds, frame counters, feedback), or call "
            "session.source_changed when something fixed has changed",
        )

    def _pixels(self, rows: NDArray[np.float32]) -> NDArray[np.int64]:
        """Each row's pixel, numbered from the top left."""
        column = np.floor((rows[:, 0] + 1.0) * (self._width / 2)).astype(np.int64)
        line = np.floor((rows[:, 1] + 1.0) * (self._height / 2)).astype(np.int64)
        numbered: NDArray[np.int64] = line * self._width + column
        return numbered
