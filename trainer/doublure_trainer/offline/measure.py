"""The finished weights on every frame of the dataset, for the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from doublure_bridge.models import ModelSpec
from doublure_bridge.scores import Scores, score
from numpy.typing import NDArray

from ..models import build, load_tensors
from ..slices import HELD_OUT, TEST
from .frames import Frame, FrameSet

__all__ = ["FrameScore", "Measured", "Predictor", "measure"]


class Predictor:
    """Stored tensors as a function of x, y, t; on the CPU, where the report is made.

    Args:
        spec: Family and sizes.
        tensors: The tensors it names.
    """

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, NDArray[Any]]) -> None:
        self._module = build(spec)
        load_tensors(self._module, tensors)

    def __call__(self, points: NDArray[np.float32]) -> NDArray[np.float32]:
        """Linear RGB, float32 [n, 3], at points [n, 3]."""
        where = torch.from_numpy(np.array(points, dtype=np.float32))
        return self._module.evaluate(where).numpy()

    def image(self, width: int, height: int, t: float) -> NDArray[np.float32]:
        """A whole image at normalised t, float32 [height, width, 3]."""
        x = (2 * np.arange(width, dtype=np.float32) + 1) / width - 1
        y = (2 * np.arange(height, dtype=np.float32) + 1) / height - 1
        points = np.empty((height, width, 3), dtype=np.float32)
        points[..., 0], points[..., 1], points[..., 2] = x, y[:, None], t
        return self(points.reshape(-1, 3)).reshape(height, width, 3)


@dataclass(frozen=True, slots=True)
class FrameScore:
    """Scores of one frame."""

    frame: Frame
    scores: Scores


@dataclass(frozen=True, slots=True)
class Measured:
    """Scores of one set of weights.

    Attributes:
        frames: Of every frame, by t.
        held_out: Of all rows of the held-out frames.
        test: Of all rows of the test frames; None where there is none.
    """

    frames: tuple[FrameScore, ...]
    held_out: Scores
    test: Scores | None


def measure(spec: ModelSpec, tensors: Mapping[str, NDArray[Any]], frames: FrameSet) -> Measured:
    """Score stored weights on all rows of every frame."""
    predict = Predictor(spec, tensors)
    every = sorted(frames.frames, key=lambda f: f.t)
    found = [predict(frame.rows[:, :3]) for frame in every]

    def of(kind: int) -> Scores | None:
        chosen = [i for i, frame in enumerate(every) if frame.kind == kind]
        if not chosen:
            return None
        return score(
            np.concatenate([found[i] for i in chosen]),
            np.concatenate([every[i].rows[:, 3:] for i in chosen]),
            slices=np.repeat(chosen, [len(every[i].rows) for i in chosen]),
        )

    held_out = of(HELD_OUT)
    assert held_out is not None  # load_frames makes one of any two
    scores = (score(mine, frame.rows[:, 3:]) for mine, frame in zip(found, every, strict=True))
    return Measured(
        tuple(FrameScore(f, s) for f, s in zip(every, scores, strict=True)), held_out, of(TEST)
    )
