"""What a session counted and measured."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

__all__ = ["Notice", "SessionStats", "Timings"]


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that happened, for people.

    Attributes:
        time: Seconds since the epoch.
        level: ``info``, ``warning`` or ``error``.
        text: One sentence.
        detail: Traceback or log tail, often empty.
    """

    time: float
    level: str
    text: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """A snapshot of a session's counters.

    Attributes:
        frames: Calls of capture that were well-formed.
        dropped: Of these, not taken: ring full, or no trainer at the time.
        refused: Taken but refused for their content: NaN, transparency, positions.
        discarded: Taken but thrown away because the trainer was lost or the source changed.
        sent: Frames sent to the trainer.
        rows: Rows in them.
        reloads: Weights the host confirmed as drawn with.
        rejected: Weights refused by validation or by the host.
        held_back: Weights made to wait after a re-open, for being worse than those in use.
        spawns: Local trainers started.
        losses: Times the trainer was lost.
        capture_us_median: Time capture took on the render thread over the last 4096 calls, µs.
        capture_us_p99: The same, 99th percentile.
        capture_us_histogram: Upper bound in µs (powers of two) to number of calls.
        apply_us: From the arrival of the last applied weights to their application, µs.
        stop_ms: From stop() to the trainer's word that the job's process is gone; None before.
        waiting: Frames in the ring now.
    """

    frames: int = 0
    dropped: int = 0
    refused: int = 0
    discarded: int = 0
    sent: int = 0
    rows: int = 0
    reloads: int = 0
    rejected: int = 0
    held_back: int = 0
    spawns: int = 0
    losses: int = 0
    capture_us_median: float = 0.0
    capture_us_p99: float = 0.0
    capture_us_histogram: dict[float, int] = field(default_factory=dict)
    apply_us: int = 0
    stop_ms: float | None = None
    waiting: int = 0


class Timings:
    """The last 4096 durations; adding one allocates nothing and takes no lock."""

    CAPACITY = 4096

    def __init__(self) -> None:
        self._values = array("q", bytes(8 * self.CAPACITY))
        self._count = 0

    def add(self, ns: int) -> None:
        """One more duration, nanoseconds. Render thread only."""
        self._values[self._count & (self.CAPACITY - 1)] = ns
        self._count += 1

    def summary(self) -> tuple[float, float, dict[float, int]]:
        """Median and 99th percentile in µs, and counts by upper bound. Any thread.

        Written to meanwhile it may see one value of the next lap, which a percentile can bear.
        """
        values = sorted(self._values[: min(self._count, self.CAPACITY)])
        if not values:
            return 0.0, 0.0, {}
        histogram: dict[float, int] = {}
        for value in values:
            bound = float(1 << max(0, (value // 1000).bit_length()))
            histogram[bound] = histogram.get(bound, 0) + 1
        last = len(values) - 1
        return values[last // 2] / 1e3, values[(last * 99) // 100] / 1e3, histogram
