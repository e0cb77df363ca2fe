"""Slices: which intervals of the parameter train, which validate, which only the report sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["HELD_OUT", "TEST", "TRAIN", "FramePlan", "Plan", "SlicePlan"]

TRAIN, HELD_OUT, TEST = 0, 1, 2

DEFAULT_COUNT = 128
# A held-out slice is a gap that the model must bridge, so wide ones measure bridging and not what
# the host will see; narrower than the steps of a host's t, a slice is skipped by most passes. Held
# out, moving hard edges scored 33.1, 34.2 and 34.6 dB with 64, 128 and 256 slices (test slices:
# 31.2, 34.6, 34.3) after 10 s of benchmarks/train.py --slices, and the first candidate came after
# 1.3, 1.1 and 1.4 s. A host that crosses its range in 4 s at 30 frames/s meets each of 128 once.

_GOLDEN = 0.6180339887498949  # 1/phi: i * _GOLDEN mod 1 spreads any run of i evenly over [0, 1)
_HELD_OUT_BAND = (0.0, 1 / 8)
_TEST_BAND = (0.25, 0.25 + 1 / 16)
# The bands are placed so that a step of +-_GOLDEN (a neighbouring slice) leads out of both:
# [0, 1/8) goes to [.618, .743) and [.382, .507), [.25, .3125) to [.868, .931) and [.632, .695).
# So no two slices that do not train ever touch, whatever the count.


class Plan(ABC):
    """A fixed split of t in [-1, 1] into slices, each of one kind.

    Attributes:
        kinds: Kind of each slice, int8 [count].
        strata_per_slice: Equal parts of a slice whose rows the replay keeps apart.
    """

    strata_per_slice: int = 1

    def __init__(self, kinds: NDArray[np.int8]) -> None:
        kinds.setflags(write=False)
        self.kinds = kinds

    @property
    def count(self) -> int:
        """Number of slices."""
        return len(self.kinds)

    @abstractmethod
    def position_of(self, t: NDArray[Any]) -> NDArray[np.float64]:
        """Slice number of each t plus how far into the slice it is, 0..1; same shape."""

    @abstractmethod
    def edges(self) -> NDArray[np.float64]:
        """Bounds of the slices in t, ascending, [count + 1]."""

    def index_of(self, t: NDArray[Any]) -> NDArray[np.int64]:
        """Slice number of each t, int64, same shape; t outside [-1, 1] goes to the end slices."""
        return np.clip(np.floor(self.position_of(t)), 0, self.count - 1).astype(np.int64)

    def stratum_of(self, t: NDArray[Any]) -> NDArray[np.int64]:
        """Number of each t's stratum, `strata_per_slice` to a slice; int64, same shape."""
        position = self.position_of(t)
        whole = np.clip(np.floor(position), 0, self.count - 1)
        last = self.strata_per_slice - 1
        part = np.clip(np.floor((position - whole) * self.strata_per_slice), 0, last)
        return np.asarray(whole * self.strata_per_slice + part, dtype=np.int64)

    def kind_of(self, t: NDArray[Any]) -> NDArray[np.int8]:
        """TRAIN, HELD_OUT or TEST for each t, int8, same shape."""
        return self.kinds[self.index_of(t)]

    def intervals(self, kind: int) -> list[tuple[float, float]]:
        """Bounds (low, high) in t of every slice of one kind, ascending; high is exclusive."""
        edges = self.edges().tolist()
        return [(edges[i], edges[i + 1]) for i in np.flatnonzero(self.kinds == kind)]

    @property
    def held_out(self) -> list[tuple[float, float]]:
        """Held-out slices: the gate looks at them, training never does."""
        return self.intervals(HELD_OUT)

    @property
    def test(self) -> list[tuple[float, float]]:
        """Test slices: only the report looks at them."""
        return self.intervals(TEST)


class SlicePlan(Plan):
    """A fixed split of t in [-1, 1] into equal slices: training, held-out and test.

    Slice i (of count) is held out when i/phi mod 1 falls into the first eighth, and a test slice
    when it falls into a sixteenth elsewhere; the first and the last always train, so that
    nothing is extrapolated. The same count always gives the same split: there is no seed, and
    a resumed job can never train on what it validated on before.

    Args:
        count: Number of slices, 17..4096; fewer would leave no test slice.
    Raises:
        ValueError: `count` is out of range.
    """

    strata_per_slice = 4
    # A host that pauses at one t would fill that slice with a single frame; with finer strata it
    # only ever fills a quarter of the slice.

    def __init__(self, count: int = DEFAULT_COUNT) -> None:
        if type(count) is not int or not 17 <= count <= 4096:
            raise ValueError(f"SlicePlan.count: expected an int in 17..4096, got {count!r}")
        spread = (np.arange(count) * _GOLDEN) % 1.0
        kinds = np.full(count, TRAIN, dtype=np.int8)
        kinds[(spread >= _HELD_OUT_BAND[0]) & (spread < _HELD_OUT_BAND[1])] = HELD_OUT
        kinds[(spread >= _TEST_BAND[0]) & (spread < _TEST_BAND[1])] = TEST
        kinds[[0, -1]] = TRAIN
        super().__init__(kinds)

    def position_of(self, t: NDArray[Any]) -> NDArray[np.float64]:
        position: NDArray[np.float64] = np.asarray(t, dtype=np.float64) + 1.0
        return position * (self.count / 2)

    def edges(self) -> NDArray[np.float64]:
        return np.arange(self.count + 1, dtype=np.float64) * (2.0 / self.count) - 1.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SlicePlan) and other.count == self.count

    def __hash__(self) -> int:
        return hash((SlicePlan, self.count))

    def __repr__(self) -> str:
        return f"SlicePlan(count={self.count})"


class FramePlan(Plan):
    """The split that a dataset of whole frames brings along: a slice a frame.

    A slice reaches half-way to the frames beside it, so every t has one; rows are meant to come
    at the frames' own t, to the last bit.

    Args:
        train, held_out, test: The frames' t in [-1, 1], each t once.
    Raises:
        ValueError: No training frame, two frames at one t, or a t out of range.
    """

    def __init__(
        self, train: Sequence[float], held_out: Sequence[float] = (), test: Sequence[float] = ()
    ) -> None:
        groups = ((TRAIN, train), (HELD_OUT, held_out), (TEST, test))
        t = np.concatenate([np.asarray(found, dtype=np.float64) for _, found in groups])
        kinds = np.concatenate([np.full(len(found), kind, np.int8) for kind, found in groups])
        order = np.argsort(t, kind="stable")
        t = t[order]
        if not len(train) or not (np.abs(t) <= 1.0).all():
            raise ValueError("FramePlan: expected training frames, and every t in [-1, 1]")
        if (same := t[1:] == t[:-1]).any():
            raise ValueError(f"FramePlan: expected each t once, got {t[1:][same][0]:.9g} twice")
        super().__init__(kinds[order])
        self._edges = np.concatenate([[-1.0], (t[1:] + t[:-1]) / 2, [1.0]])

    def position_of(self, t: NDArray[Any]) -> NDArray[np.float64]:
        found = np.searchsorted(self._edges[1:-1], np.asarray(t, dtype=np.float64), side="right")
        return found.astype(np.float64) + 0.5

    def edges(self) -> NDArray[np.float64]:
        return self._edges
