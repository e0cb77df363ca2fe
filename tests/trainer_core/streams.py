"""A small source and its stream, for tests of training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from doublure_bridge.models import CompactSpec, GridSpec
from doublure_trainer.config import TrainConfig
from doublure_trainer.slices import SlicePlan

PLAN = SlicePlan(32)


def source(x: np.ndarray, y: np.ndarray, t: np.ndarray) -> np.ndarray:
    """A bright spot that moves over a gradient; linear RGB, up to 9."""
    spot = 8.0 * np.exp(-20.0 * ((x - 0.5 * t) ** 2 + (y + 0.3 * t) ** 2))
    return np.stack([spot + 0.3 + 0.2 * x, 0.5 * spot + 0.3, 0.4 + 0.2 * y * t], axis=-1)


def frame(t: float, n: int = 512, *, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, int((t + 2) * 1e6)])
    rows = np.empty((n, 6), dtype=np.float32)
    rows[:, :2] = rng.uniform(-1, 1, (n, 2))
    rows[:, 2] = t
    rows[:, 3:] = source(rows[:, 0], rows[:, 1], rows[:, 2])
    return rows


def stream(frames: int = 128, n: int = 512) -> Iterator[np.ndarray]:
    for t in np.linspace(-1, 1, frames):
        yield frame(float(t), n)


def small(**changes: Any) -> TrainConfig:
    """Settings that learn the source in a second."""
    settings: dict[str, Any] = {
        "grid": GridSpec(xy=(32, 32), xt=(16, 16), yt=(16, 16), volume=(18, 18, 18)),
        "compact": CompactSpec(hidden=16, layers=2),
        "batch": 512,
        "early_steps": 0,
        "growth": (20,),
        "race_rungs": (5, 10),
        "replay_rows": 1 << 15,
        "held_out_rows": 1 << 12,
        "score_rows": 2048,
        "first_candidate_s": 0.0,
        "candidate_interval_s": 0.0,
        "score_share": 0.9,
        **changes,
    }
    return TrainConfig(**settings)
