"""java.util.Random's sequence, so that a seed picks the same pixels as an engine on the JVM.

The generator and `nextInt(bound)` are as the class's documentation specifies them: 48 bits of
state, s <- s * 0x5DEECE66D + 0xB, of which a draw takes the upper 31.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["JavaRandom"]

_MULTIPLIER = 0x5DEECE66D
_INCREMENT = 0xB
_MASK = (1 << 48) - 1

Ints = npt.NDArray[np.int64]


class JavaRandom:
    """A java.util.Random that draws whole arrays.

    Args:
        seed: Any whole number; its lower 48 bits count.
    """

    def __init__(self, seed: int) -> None:
        self._state = (seed ^ _MULTIPLIER) & _MASK
        # State i draws from now is scale[i] * state + shift[i].
        self._scale = np.array([_MULTIPLIER], np.uint64)
        self._shift = np.array([_INCREMENT], np.uint64)

    def next_int(self, bound: int) -> int:
        """The next number in 0..bound-1, as `nextInt(bound)`."""
        power_of_two = bound & (bound - 1) == 0
        while True:
            self._state = (self._state * _MULTIPLIER + _INCREMENT) & _MASK
            bits = self._state >> 17
            if power_of_two:
                return (bound * bits) >> 31
            value = bits % bound
            # The last, incomplete run of `bound` numbers would favour the small ones.
            if bits - value + bound - 1 < 1 << 31:
                return value

    def pixels(self, count: int, width: int, height: int) -> tuple[Ints, Ints]:
        """Columns and rows, int64 [count] each: `nextInt(width)`, `nextInt(height)` by turns."""
        found = np.empty((count, 2), np.int64)
        done = 0
        while done < count:
            states = self._ahead(2 * (count - done))
            bits = (states >> np.uint64(17)).astype(np.int64).reshape(-1, 2)
            pairs, refused = _bounded(bits, width, height)
            # At most a few of 100,000 draws are refused, for any size of image; the others shift.
            good = int(np.argmax(refused)) if refused.any() else len(pairs)
            found[done : done + good] = pairs[:good]
            done += good
            if good:
                self._state = int(states[2 * good - 1])
            if done < count:
                found[done] = self.next_int(width), self.next_int(height)
                done += 1
        return found[:, 0], found[:, 1]

    def _ahead(self, count: int) -> npt.NDArray[np.uint64]:
        """The next `count` states. Unsigned overflow is harmless: 2^48 divides 2^64."""
        while len(self._scale) < count:
            scale, shift = self._scale, self._shift
            self._scale = np.concatenate([scale, scale * scale[-1]])
            self._shift = np.concatenate([shift, scale * shift[-1] + shift])
        states: Any = self._scale[:count] * np.uint64(self._state) + self._shift[:count]
        masked: npt.NDArray[np.uint64] = states & np.uint64(_MASK)
        return masked


def _bounded(bits: Ints, *bounds: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Draws [n, k] to numbers below each of k bounds, and which of the n `nextInt` would redraw."""
    values = np.empty_like(bits)
    refused = np.zeros(len(bits), np.bool_)
    for i, bound in enumerate(bounds):
        column = bits[:, i]
        if bound & (bound - 1) == 0:
            values[:, i] = (column * bound) >> 31
        else:
            values[:, i] = column % bound
            refused |= column - values[:, i] + (bound - 1) >= 1 << 31
    return values, refused
