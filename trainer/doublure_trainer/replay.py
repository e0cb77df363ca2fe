"""Bounded memory of the stream: reservoirs along t, for training, validation and the report."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from .fused import compiled_draw
from .slices import HELD_OUT, TEST, TRAIN, Plan

__all__ = ["WEIGHT_STEPS", "Changes", "Drawn", "Replay", "ReplayCounters", "Reservoir"]

Rows = NDArray[np.float32]

_FULL_WEIGHT_ROWS = 512
# A stratum with fewer rows than this is drawn proportionally less, so that a handful of pixels
# from a frame that was cut short is not repeated until it is learned by heart.
WEIGHT_STEPS = 8
_COORDINATE_SLACK = 1e-3  # float32 rounding on the far side; anything further out is refused


@dataclass(frozen=True, slots=True)
class ReplayCounters:
    """What came in, in rows.

    Attributes:
        seen: Rows given to `add`.
        rejected: Of these, rows that are not finite or lie outside [-1, 1].
        train: Rows that went to training reservoirs.
        held_out: Rows that went to held-out reservoirs.
        test: Rows that went to test reservoirs.
    """

    seen: int = 0
    rejected: int = 0
    train: int = 0
    held_out: int = 0
    test: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Rows to learn from.

    Attributes:
        rows: x, y, t and log-space RGB, float32 [n, 6], roughly ascending in t.
        weights: Of each in the loss, float32 [n], of mean 1.
        slots: Where they lie in their reservoir, int64 [n].
    """

    rows: Rows
    weights: NDArray[np.float32]
    slots: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Changes:
    """What a mirror of the training rows has to bring over.

    Attributes:
        slots: Slots that were written, each once, int64 [n].
        rows: What lies there now, float32 [n, 6], colours in log space.
        table: Buckets to draw from, int64, ascending.
        sizes: Rows in each bucket, int64.
    """

    slots: NDArray[np.int64]
    rows: Rows
    table: NDArray[np.int64]
    sizes: NDArray[np.int64]


class Reservoir:
    """Equal, preallocated buckets of rows, one a stratum; a full bucket overwrites at random.

    Overwriting always (rather than with the falling probability of Vitter's algorithm R) keeps a
    full bucket a random sample of the stratum's *recent* rows: the source is a function of
    (x, y, t), so old rows are not worth more, and training goes on seeing pixels it has not seen.

    Not thread-safe: `Replay` holds the lock.

    Args:
        strata: Number of buckets.
        capacity: Rows a bucket.
    """

    def __init__(self, strata: int, capacity: int) -> None:
        self.capacity = capacity
        self.sizes = np.zeros(strata, dtype=np.int64)
        self._rows = np.empty((strata * capacity, 6), dtype=np.float32)
        self.errors = np.ones(strata * capacity, dtype=np.float32)
        """Root of each row's last known error; `unknown` for one not learned from yet."""
        self.unknown = 1.0
        self.written: list[NDArray[np.int64]] | None = None
        """Slots written since somebody last looked; None where nobody does."""

    def add(self, stratum: int, rows: Rows, rng: np.random.Generator) -> bool:
        """Put rows [n, 6] into one bucket. Returns whether the bucket had room to grow."""
        if len(rows) > self.capacity:
            rows = rows[rng.permutation(len(rows))[: self.capacity]]
        start, size = stratum * self.capacity, int(self.sizes[stratum])
        fresh = min(self.capacity - size, len(rows))
        self._rows[start + size : start + size + fresh] = rows[:fresh]
        self.errors[start + size : start + size + fresh] = self.unknown
        self.sizes[stratum] = size + fresh
        if fresh < len(rows):
            places = start + rng.integers(0, self.capacity, len(rows) - fresh)
            self._rows[places] = rows[fresh:]
            self.errors[places] = self.unknown
            if self.written is not None:
                self.written.append(places)
        if self.written is not None and fresh:
            self.written.append(np.arange(start + size, start + size + fresh))
        return fresh > 0

    def rows_at(self, slots: NDArray[np.int64]) -> Rows:
        """The rows in some slots, a copy, float32 [n, 6]."""
        return self._rows.take(slots, axis=0)

    def draw(
        self,
        table: NDArray[np.int64],
        batch: int,
        rng: np.random.Generator,
        *,
        tries: int = 1,
        share: float = 0.0,
        power: float = 0.0,
    ) -> Drawn:
        """Random rows of the (non-empty) buckets that a table names; see `Replay.draw`."""
        random = rng.random(2 * batch, dtype=np.float32)
        offset = rng.random()
        drawn = Drawn(
            np.empty((batch, 6), np.float32),
            np.empty(batch, np.float32),
            np.empty(batch, np.int64),
        )
        draw: Callable[..., None] = compiled_draw() or _draw
        draw(
            self._rows, self.errors, table, self.sizes, self.capacity, random, tries, offset,
            np.float32(share), np.float32(power), drawn.rows, drawn.weights, drawn.slots,
        )  # fmt: skip
        return drawn

    def snapshot(self, limit: int, rng: np.random.Generator) -> Rows:
        """Up to `limit` rows, as evenly from every non-empty bucket as they allow; a copy."""
        filled = np.flatnonzero(self.sizes)
        if not len(filled):
            return np.empty((0, 6), dtype=np.float32)
        share = max(1, limit // len(filled))
        parts = []
        for i in filled:
            start, size = i * self.capacity, int(self.sizes[i])
            if size <= share:
                parts.append(self._rows[start : start + size].copy())
            else:
                parts.append(self._rows[start + rng.permutation(size)[:share]])
        return np.concatenate(parts)


class Replay:
    """The stream's memory: one reservoir for each kind of slice.

    Rows are x, y, t in [-1, 1] and linear RGB, float32 [n, 6]. Training rows are kept with their
    colour already in log space (sign(c) log(1 + |c|)), because each is drawn many times;
    held-out and test rows keep linear RGB.

    `add` may be called from any thread; it holds a lock for the copy only. Memory is allocated
    once, here: 24 bytes a row of capacity.

    Args:
        plan: The split of t.
        train_rows: Capacity for training rows, over the whole range of t.
        held_out_rows: Capacity for held-out rows.
        test_rows: Capacity for test rows.
        seed: For which rows a full bucket keeps.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        train_rows: int = 1 << 21,
        held_out_rows: int = 1 << 16,
        test_rows: int = 1 << 16,
        seed: int = 0,
    ) -> None:
        self.plan = plan
        self._lock = threading.Lock()
        self._rng = np.random.default_rng([seed, 0x5245504C])
        self._strata_count = plan.count * plan.strata_per_slice
        kinds = np.repeat(plan.kinds, plan.strata_per_slice)
        self._kinds = kinds
        # The bucket of each stratum, counted within its own kind.
        self._bucket = np.zeros(self._strata_count, dtype=np.int64)
        self._reservoirs: dict[int, Reservoir] = {}
        for kind, limit in ((TRAIN, train_rows), (HELD_OUT, held_out_rows), (TEST, test_rows)):
            members = np.flatnonzero(kinds == kind)
            self._bucket[members] = np.arange(len(members))
            count = max(1, len(members))
            self._reservoirs[kind] = Reservoir(count, max(1, limit // count))
        self._seen = self._rejected = 0
        self._taken = {TRAIN: 0, HELD_OUT: 0, TEST: 0}
        self._table = np.empty(0, dtype=np.int64)
        self._table_stale = False

    def add(self, rows: Rows) -> int:
        """Sort rows into their reservoirs; any thread. Returns how many were kept.

        Raises:
            ValueError: `rows` is not float32 [n, 6].
        """
        if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.shape[1] != 6:
            shape = getattr(rows, "shape", type(rows).__name__)
            raise ValueError(f"rows: expected float32 [n, 6] (x, y, t, r, g, b), got {shape}")
        if rows.dtype != np.float32:
            raise ValueError(f"rows: expected float32 [n, 6], got {rows.dtype}")
        seen = len(rows)
        # NaN fails the comparison too, so this is the whole check of the coordinates.
        inside = (np.abs(rows[:, :3]) <= 1.0 + _COORDINATE_SLACK).all(axis=1)
        good = inside & np.isfinite(rows[:, 3:]).all(axis=1)
        kept = rows if good.all() else rows[good]
        if not len(kept):
            with self._lock:
                self._seen += seen
                self._rejected += seen
            return 0
        t = kept[:, 2]
        if t[0] == t[-1] and (t == t[0]).all():  # one frame has one t: the usual case
            groups = [(int(self.plan.stratum_of(t[:1])[0]), kept)]
        else:
            strata = self.plan.stratum_of(t)
            order = np.argsort(strata, kind="stable")
            names, starts = np.unique(strata[order], return_index=True)
            groups = list(
                zip(names.tolist(), np.split(kept[order], starts[1:].tolist()), strict=True)
            )
        prepared = [(s, self._prepared(s, part)) for s, part in groups]
        with self._lock:
            self._seen += seen
            self._rejected += seen - len(kept)
            for stratum, part in prepared:
                kind = int(self._kinds[stratum])
                grew = self._reservoirs[kind].add(int(self._bucket[stratum]), part, self._rng)
                self._taken[kind] += len(part)
                self._table_stale |= grew and kind == TRAIN
        return len(kept)

    def sample(self, batch: int, rng: np.random.Generator) -> Rows:
        """Training rows spread evenly over the covered range of t; colours in log space.

        Args:
            batch: Rows to draw, with replacement.
            rng: The caller's generator, so that a resumed run draws what it would have drawn.
        Returns:
            float32 [batch, 6], a copy; [0, 6] while nothing has come in.
        """
        return self.draw(batch, rng).rows

    def draw(
        self,
        batch: int,
        rng: np.random.Generator,
        *,
        tries: int = 1,
        share: float = 0.0,
        power: float = 0.0,
    ) -> Drawn:
        """Training rows over the covered range of t, more of those that are learned badly.

        Sampling-importance-resampling (Rubin 1988, "Using the SIR algorithm to simulate posterior
        distributions"): `tries` candidates a row, spread evenly over t, and of them as many as are
        asked for, with a density that is 1 - share even and `share` in proportion to the root of
        each candidate's error when it was last learned from (`learned`). So both pixels and
        parameter are drawn by error, of training rows alone: held-out and test rows lie elsewhere.

        Args:
            batch: Rows to draw, with replacement.
            rng: The caller's generator.
            power: Weights are density^-power: 1 leaves the loss what even drawing has, 0 counts
                what is drawn more often more.
        Returns:
            No rows while nothing has come in.
        """
        with self._lock:
            table = self._refreshed_table()
            if not len(table):
                none = np.empty(0, np.float32)
                return Drawn(none.reshape(0, 6), none, np.empty(0, np.int64))
            reservoir = self._reservoirs[TRAIN]
            return reservoir.draw(table, batch, rng, tries=tries, share=share, power=power)

    def learned(self, drawn: Drawn, errors: NDArray[np.float32]) -> None:
        """Note the errors of rows that were drawn, [n]."""
        with self._lock:
            reservoir = self._reservoirs[TRAIN]
            roots = np.sqrt(errors)
            reservoir.errors[drawn.slots] = roots
            # Rows that nobody has learned from are drawn as the present ones are on average.
            mean = float(roots.mean())
            if np.isfinite(mean):
                reservoir.unknown = mean

    def watch(self) -> tuple[int, int]:
        """From now on note what is written for training, for `changes`.

        Returns:
            Slots a bucket, and slots in all.
        """
        with self._lock:
            reservoir = self._reservoirs[TRAIN]
            filled = np.flatnonzero(reservoir.sizes)
            reservoir.written = [
                np.arange(i * reservoir.capacity, i * reservoir.capacity + reservoir.sizes[i])
                for i in filled
            ]
            return reservoir.capacity, len(reservoir.errors)

    def changes(self) -> Changes | None:
        """What was written since the last call, after `watch`; None for nothing."""
        with self._lock:
            reservoir = self._reservoirs[TRAIN]
            if not reservoir.written:
                return None
            slots = np.unique(np.concatenate(reservoir.written))
            reservoir.written = []
            return Changes(
                slots, reservoir.rows_at(slots), self._refreshed_table().copy(),
                reservoir.sizes.copy(),
            )  # fmt: skip

    def errors(self) -> tuple[NDArray[np.float32], float]:
        """What is known of every training slot, for a checkpoint: a copy, and the unknown's."""
        with self._lock:
            reservoir = self._reservoirs[TRAIN]
            return reservoir.errors.copy(), reservoir.unknown

    def restore_errors(self, errors: NDArray[np.float32], unknown: float) -> None:
        """The inverse of `errors`, once the same rows are in again.

        Raises:
            ValueError: For another number of slots.
        """
        with self._lock:
            reservoir = self._reservoirs[TRAIN]
            if errors.shape != reservoir.errors.shape:
                raise ValueError(f"{len(errors)} errors, not {len(reservoir.errors)}")
            reservoir.errors[:] = errors
            reservoir.unknown = unknown

    def snapshot(self, kind: int, limit: int, rng: np.random.Generator) -> Rows:
        """A copy of up to `limit` rows of one kind, spread evenly over its covered strata."""
        with self._lock:
            return self._reservoirs[kind].snapshot(limit, rng)

    def covered(self, kind: int = TRAIN) -> int:
        """Slices of one kind that have data."""
        with self._lock:
            has = self._reservoirs[kind].sizes > 0
        of_slice = np.flatnonzero(self._kinds == kind)[has[: (self._kinds == kind).sum()]]
        return len(np.unique(of_slice // self.plan.strata_per_slice))

    def coverage(self, kind: int = TRAIN) -> float:
        """Share of the slices of one kind that have data, 0..1."""
        total = int((self.plan.kinds == kind).sum())
        return self.covered(kind) / total if total else 0.0

    def span(self, kind: int) -> float:
        """Share of the eighths of t's range that have data of one kind, 0..1.

        Unlike `coverage` it does not ask for every slice: a host that moves fast skips many.
        """
        members = np.flatnonzero(self._kinds == kind)
        with self._lock:
            filled = members[self._reservoirs[kind].sizes[: len(members)] > 0]
        eighths = np.unique(members * 8 // self._strata_count)
        return len(np.unique(filled * 8 // self._strata_count)) / max(1, len(eighths))

    @property
    def counters(self) -> ReplayCounters:
        with self._lock:
            taken = self._taken
            return ReplayCounters(
                self._seen, self._rejected, taken[TRAIN], taken[HELD_OUT], taken[TEST]
            )

    def _prepared(self, stratum: int, rows: Rows) -> Rows:
        if self._kinds[stratum] != TRAIN:
            return rows
        out = rows.copy()
        colour = out[:, 3:]
        np.copysign(np.log1p(np.abs(colour)), colour, out=colour)
        return out

    def _refreshed_table(self) -> NDArray[np.int64]:
        """Training buckets to draw from, each repeated by its weight; the lock is held."""
        if self._table_stale:
            sizes = self._reservoirs[TRAIN].sizes
            filled = np.flatnonzero(sizes)
            weight = np.minimum(sizes[filled], _FULL_WEIGHT_ROWS) * WEIGHT_STEPS
            self._table = np.repeat(filled, np.maximum(1, weight // _FULL_WEIGHT_ROWS))
            self._table_stale = False
        return self._table


def _draw(
    stored: Rows,
    errors: NDArray[np.float32],
    table: NDArray[np.int64],
    sizes: NDArray[np.int64],
    capacity: int,
    random: NDArray[np.float32],
    tries: int,
    offset: float,
    share: float,
    power: float,
    rows: Rows,
    weights: NDArray[np.float32],
    slots: NDArray[np.int64],
) -> None:
    """What `kernels_cpu.draw` does, in NumPy."""
    batch = len(slots)
    at = ((np.arange(batch) + random[:batch].astype(np.float64)) * len(table) / batch).astype(int)
    buckets = table[np.minimum(at, len(table) - 1)]
    inside = (random[batch:] * sizes[buckets].astype(np.float32)).astype(np.int64)
    # float32 rounding can reach the size itself
    inside = np.minimum(inside, sizes[buckets] - 1)
    side_by_side = (inside[:, None] + np.arange(tries)) % sizes[buckets][:, None]
    candidates = (buckets[:, None] * capacity + side_by_side).ravel()
    density = errors[candidates]
    mean = float(density.mean(dtype=np.float64))
    if mean > 0 and np.isfinite(mean):
        density = (1.0 - share) + share * density / np.float32(mean)
    else:
        density = np.ones(len(candidates), np.float32)
    passed = np.cumsum(density, dtype=np.float64)
    due = (np.arange(batch) + offset) * (passed[-1] / batch)
    chosen = np.minimum(np.searchsorted(passed, due, side="right"), len(candidates) - 1)
    slots[:] = candidates[chosen]
    rows[:] = stored[slots]
    weights[:] = density[chosen] ** -power
    weights /= weights.mean()
