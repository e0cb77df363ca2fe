"""From the ring to the frames socket: checked, metered by credit, counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
from doublure_bridge import Dealer, Rows
from numpy.typing import NDArray

from .capture import FrameReader
from .errors import CaptureError, NondeterministicSourceError
from .options import Options
from .recurrence import Recurrence
from .ring import Ring

__all__ = ["Feeder"]

# A single wrong frame is a glitch; this many in a row are a mistake in the host.
_REFUSALS: Final = 8
_BUSY_FOR_S: Final = 0.25


class Feeder:
    """Sender thread only. Frames go out while `open`; else they are dropped, and counted.

    Args:
        options: The session's.
        ring: Where captured frames wait.
        reader: Turns them into rows.
        notice: Called as notice(level, text) with what people should know.
    """

    def __init__(
        self, options: Options, ring: Ring, reader: FrameReader, notice: Callable[[str, str], None]
    ) -> None:
        self._options = options
        self._ring = ring
        self._reader = reader
        self._notice = notice
        self._recurrence = Recurrence(reader.width, reader.height)
        self.open = False
        """Whether captured frames have somewhere to go. The render thread reads it."""
        self.refusal: CaptureError | None = None
        """What is wrong with the host's frames, once several in a row were refused."""
        self.sent = 0
        self.rows = 0
        self.refused = 0
        self.discarded = 0
        self._credit = 0
        self._granted = 0.0
        self._last_frame = 0.0
        self._in_a_row = 0

    @property
    def busy(self) -> bool:
        """Whether frames have been coming lately."""
        return self.open and time.monotonic() - self._last_frame < _BUSY_FOR_S

    def replace(self, ring: Ring, reader: FrameReader) -> None:
        """Another source: forget the frames of the old one."""
        self.shut()
        self._ring, self._reader = ring, reader
        self._recurrence = Recurrence(reader.width, reader.height)
        self._in_a_row = 0
        self.refusal = None

    def begin(self, credit: int) -> None:
        """Let frames flow, this many before more is granted."""
        self._credit = credit
        self._granted = time.monotonic()
        self.open = True

    def grant(self, frames: int) -> None:
        """The trainer took frames in."""
        self._credit += frames
        self._granted = time.monotonic()

    def shut(self) -> None:
        """Nobody to send to: drop what waits."""
        self.open = False
        self.drop()

    def drop(self) -> None:
        """Throw away what waits, and count it."""
        ring = self._ring
        while (slot := ring.peek()) is not None:
            self.discarded += 1
            if slot.layout is not None:
                self._reader.refill(slot)
            ring.release()

    def feed(self, channel: Dealer, session: bytes) -> None:
        """Send what waits, as far as credit goes; the ring holds the rest."""
        ring = self._ring
        starved = time.monotonic() - self._granted > self._options.timing.starved
        if self._credit <= 0 and starved:
            # Credit may be lost together with a connection; one frame finds out.
            self.begin(1)
        for _ in range(ring.size):
            if self._credit <= 0 or (slot := ring.peek()) is None:
                return
            self._last_frame = time.monotonic()
            try:
                rows = self._reader.read(slot, self._options.low, self._options.high)
            except CaptureError as error:
                self._refuse(error)
            else:
                self._in_a_row = 0
                self.refusal = None
                self._look(slot.t, slot.sequence, rows)
                age_ns = time.perf_counter_ns() - slot.captured_ns
                message = Rows(
                    session=session,
                    sequence=slot.sequence,
                    t=slot.t,
                    rows=rows,
                    age_us=max(0, age_ns // 1000),
                )
                if channel.send(message):
                    self._credit -= 1
                    self.sent += 1
                    self.rows += len(rows)
                else:
                    self.discarded += 1
            if slot.layout is not None:
                self._reader.refill(slot)
            ring.release()

    def _look(self, t: float, sequence: int, rows: NDArray[np.float32]) -> None:
        """Warn once of a source that is not a function of t. Training goes on, on the mean."""
        try:
            self._recurrence.look(t, rows, f"frame {sequence}")
        except NondeterministicSourceError as error:
            self._notice("warning", str(error))

    def _refuse(self, error: CaptureError) -> None:
        self.refused += 1
        self._in_a_row += 1
        if self._in_a_row == 1:
            self._notice("warning", f"refused {error}")
        elif self._in_a_row == _REFUSALS:
            self._notice("error", f"refused {_REFUSALS} frames in a row: {error}")
        if self._in_a_row >= _REFUSALS:
            self.refusal = error
