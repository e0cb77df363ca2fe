"""The fixed ring between the render thread and the sender thread.

One producer, one consumer, no lock: each side writes only its own counter. A slot becomes visible
to the consumer when `published` moves, which is the last thing the producer does, so a torn slot
cannot be read; it becomes writable again when `consumed` moves, the last thing the consumer does.
Both counters are plain attributes: reading and writing one is a single step of the interpreter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ROW_BYTES", "Ring", "Slot"]

ROW_BYTES = 24
"""x, y, t, r, g, b in float32."""

_LAYOUTS: tuple[tuple[type[np.floating[Any]], int], ...] = (
    (np.float32, 4),
    (np.float32, 3),
    (np.float16, 4),
    (np.float16, 3),
)


class Slot:
    """One captured frame's worth of preallocated memory.

    A slot holds either finished rows, or pixels as they were gathered from a whole frame at
    `index`; which of them is `layout`. Both share one buffer.
    """

    __slots__ = (
        "bytes",
        "captured_ns",
        "count",
        "flipped",
        "index",
        "layout",
        "pixels",
        "rows",
        "sequence",
        "t",
    )

    def __init__(self, rows: int, gathered: int) -> None:
        buffer = np.zeros(rows * ROW_BYTES, np.uint8)
        self.bytes = buffer.data
        """The whole buffer, for copying finished rows in."""
        self.rows: NDArray[np.float32] = buffer.view(np.float32).reshape(rows, 6)
        self.pixels: dict[tuple[str, int], NDArray[Any]] = {
            (np.dtype(kind).char, channels): buffer[: gathered * channels * np.dtype(kind).itemsize]
            .view(kind)
            .reshape(gathered, channels)
            for kind, channels in _LAYOUTS
        }
        """Views for gathered pixels by (dtype character, channels), [gathered, channels]."""
        self.index: NDArray[np.intp] = np.zeros(gathered, np.intp)
        """Which pixels of a whole frame to take, in the order of memory."""
        self.layout: tuple[str, int] | None = None
        """None for finished rows, else the key into `pixels`."""
        self.flipped = False
        """Whether row 0 in memory is the bottom one."""
        self.count = 0
        self.sequence = 0
        self.t = 0.0
        self.captured_ns = 0


class Ring:
    """Preallocated slots; a full ring refuses, and never waits or overwrites.

    Args:
        slots: How many frames may wait for the sender.
        rows: Capacity of a slot in rows.
        gathered: Pixels taken from a whole frame; at most `rows`.
    """

    def __init__(self, slots: int, rows: int, gathered: int) -> None:
        self.slots = [Slot(rows, gathered) for _ in range(slots)]
        self.size = slots
        self.rows = rows
        self.gathered = gathered
        self.published = 0
        self.consumed = 0

    def __len__(self) -> int:
        """Frames that wait for the consumer."""
        return self.published - self.consumed

    def claim(self) -> Slot | None:
        """Producer: the slot to write next, or None when all wait for the sender."""
        published = self.published
        if published - self.consumed >= self.size:
            return None
        return self.slots[published % self.size]

    def publish(self) -> None:
        """Producer: hand the claimed slot over. Everything in it must be written by now."""
        self.published += 1

    def peek(self) -> Slot | None:
        """Consumer: the oldest published slot, which stays its own until `release`."""
        consumed = self.consumed
        if consumed == self.published:
            return None
        return self.slots[consumed % self.size]

    def release(self) -> None:
        """Consumer: give the slot of `peek` back for writing."""
        self.consumed += 1
