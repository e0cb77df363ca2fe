"""A dataset as frames: which train, which the gate sees, and which only the report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from doublure_bridge.dataset import Dataset
from numpy.typing import NDArray

from ..config import TrainConfig
from ..slices import HELD_OUT, TEST, TRAIN, FramePlan
from .errors import OfflineError

__all__ = ["Frame", "FrameSet", "fitted", "load_frames"]

_TEST_EVERY = 3
_TEST_FIRST = 1  # of the validation frames by t; so that two of them give one of each
_SCORED_ROWS = 1 << 16  # more rows change a score by less than the gate looks at


@dataclass(frozen=True, slots=True)
class Frame:
    """One captured image's rows.

    Attributes:
        t: Normalised parameter, exactly as in the rows.
        parameter: The source's own parameter.
        kind: TRAIN, HELD_OUT or TEST.
        rows: x, y, t and linear r, g, b, float32 [n, 6]; a view of the file.
    """

    t: float
    parameter: float
    kind: int
    rows: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class FrameSet:
    """All frames of a dataset in the order of the files, and the split they make."""

    frames: tuple[Frame, ...]
    plan: FramePlan

    def of(self, kind: int) -> list[Frame]:
        """Frames of one kind, by t."""
        return sorted((f for f in self.frames if f.kind == kind), key=lambda f: f.t)

    def rows_of(self, kind: int) -> NDArray[np.float32]:
        """All rows of one kind, by t, float32 [n, 6]; a copy."""
        parts = [frame.rows for frame in self.of(kind)]
        return np.concatenate(parts) if parts else np.empty((0, 6), dtype=np.float32)


def load_frames(dataset: Dataset) -> FrameSet:
    """The frames of a dataset: all of train.f32 trains, nothing of validation.f32 ever does.

    Of the validation frames, by t, the second of every three is a test frame: only the report
    looks at it, so that no reported figure was chosen by. The others are held out for the gate.

    Raises:
        OfflineError: Rows that are not grouped by frame, or one t in both files.
    """
    manifest = dataset.manifest
    frames = list(_frames("train", dataset.train, manifest.train.parameters, TRAIN))
    seen = list(_frames("validation", dataset.validation, manifest.validation.parameters, HELD_OUT))
    for i, frame in enumerate(sorted(seen, key=lambda f: f.t)):
        kind = TEST if i % _TEST_EVERY == _TEST_FIRST else HELD_OUT
        frames.append(replace(frame, kind=kind))
    if not seen:
        raise OfflineError("dataset.validation", expected="at least one frame", got="none")
    try:
        plan = FramePlan(*([f.t for f in frames if f.kind == k] for k in (TRAIN, HELD_OUT, TEST)))
    except ValueError as error:
        raise OfflineError(
            "dataset", expected="a t of its own for every frame of both files", got=str(error)
        ) from error
    return FrameSet(tuple(frames), plan)


def fitted(config: TrainConfig, frames: FrameSet) -> TrainConfig:
    """The settings with a replay that holds every row, and scores on all held-out ones.

    Raises:
        ConfigError: More rows than a replay can hold.
    """
    counts = {kind: len(frames.of(kind)) for kind in (TRAIN, HELD_OUT, TEST)}
    most = max(len(frame.rows) for frame in frames.frames)
    held_out = sum(len(frame.rows) for frame in frames.of(HELD_OUT))
    return replace(
        config,
        replay_rows=max(1 << 10, most * counts[TRAIN]),
        held_out_rows=max(1 << 8, most * max(counts[HELD_OUT], counts[TEST])),
        score_rows=max(1 << 6, min(held_out, _SCORED_ROWS)),
    )


def _frames(
    split: str, rows: NDArray[np.float32], parameters: tuple[float, ...], kind: int
) -> Iterator[Frame]:
    t = np.asarray(rows[:, 2])
    starts = [0, *(np.flatnonzero(t[1:] != t[:-1]) + 1).tolist()]
    if len(starts) != len(parameters):
        raise OfflineError(
            f"dataset.{split}",
            expected=f"rows grouped by frame, {len(parameters)} of them",
            got=f"{len(starts)} groups of one t",
            next_step="capture it anew",
        )
    for start, stop, parameter in zip(starts, [*starts[1:], len(t)], parameters, strict=True):
        yield Frame(float(t[start]), float(parameter), kind, rows[start:stop])
