"""A job without torch: the real job process around a trainer that only counts.

Its config says how it misbehaves, so that tests can reach every state in milliseconds.
"""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from doublure_bridge import CompactSpec, ModelSpec
from doublure_trainer.errors import RefusedError
from doublure_trainer.job import Build, Options, run
from doublure_trainer.link import Task

SPEC = CompactSpec(hidden=4, layers=1)
KNOWN = (
    "publish_every", "fail_at", "die_at", "busy_s", "save_s", "build_s", "save_fails",
)  # fmt: skip


@dataclass
class StandInScores:
    psnr_db: float
    relmse: float = 0.01
    peak_ratio: float = 1.0


@dataclass
class StandInCandidate:
    step: int
    train_seconds: float
    scores: StandInScores
    family: str = "compact"
    spec: ModelSpec = SPEC

    @property
    def _grey(self) -> float:
        return (self.step % 997) / 1000

    @property
    def tensors(self) -> dict[str, Any]:
        """A model that gives one grey everywhere."""
        tensors = {name: np.zeros(t.shape, t.dtype) for name, t in SPEC.tensors().items()}
        tensors["mlp.1.bias"][:] = np.log1p(self._grey)
        return tensors

    @property
    def points(self) -> np.ndarray:
        return np.zeros((2, 3), np.float32)

    @property
    def colours(self) -> np.ndarray:
        return np.full((2, 3), self._grey, np.float32)


@dataclass
class StandInProgress:
    step: int
    samples: int
    rows_seen: int
    published_scores: StandInScores | None
    samples_per_s: float = 1000.0
    steps_per_s: float = 100.0
    loss: float = 0.5
    train_seconds: float = 1.0
    family: str = "compact"
    race: str = "compact"
    candidate_scores: StandInScores | None = None
    rows_kept: int = 0
    rows_rejected: int = 0
    coverage: float = 0.5
    rollbacks: int = 0
    published: int = 0
    verdict: str = ""


@dataclass
class StandInReport:
    loss: float


class StandInTrainer:
    """Counts steps: one a millisecond or so, once it has rows."""

    models: list[ModelSpec] = [SPEC]  # noqa: RUF012
    held_out = [(-0.5, -0.4)]  # noqa: RUF012
    test = [(0.2, 0.3)]  # noqa: RUF012

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.directory = directory
        self.config = config
        self.step = 0
        self.rows = 0
        self.last: StandInCandidate | None = None
        time.sleep(config.get("build_s", 0))

    @property
    def ready(self) -> bool:
        return self.rows > 0

    def add_rows(self, rows: np.ndarray) -> int:
        self.rows += len(rows)
        return len(rows)

    def train_slice(self, seconds: float) -> StandInReport:  # noqa: ARG002
        time.sleep(self.config.get("busy_s", 0.005))
        self.step += 5
        if self.config.get("fail_at", 1 << 60) <= self.step:
            raise FloatingPointError("the stand-in was told to fail")
        if self.config.get("die_at", 1 << 60) <= self.step:
            print("about to abort", flush=True)
            os.abort()
        return StandInReport(0.5)

    def maybe_candidate(self) -> StandInCandidate | None:
        if self.step % self.config.get("publish_every", 50):
            return None
        return StandInCandidate(self.step, 0.1, StandInScores(20 + self.step / 100))

    def published(self, candidate: StandInCandidate) -> None:
        self.last = candidate
        if not self.config.get("save_fails"):
            self.save()

    def last_published(self) -> StandInCandidate | None:
        return self.last

    def progress(self) -> StandInProgress:
        return StandInProgress(
            self.step, self.step * 10, self.rows, self.last.scores if self.last else None
        )

    def report_scores(self) -> StandInScores:
        return StandInScores(19.0)

    def save(self) -> Path:
        path = self.directory / "standin.json"
        part = self.directory / "standin.json.tmp"
        if self.config.get("save_fails"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part.write_text(json.dumps({"step": self.step}))
        time.sleep(self.config.get("save_s", 0))
        part.replace(path)
        return path

    def resume(self) -> bool:
        path = self.directory / "standin.json"
        if not path.is_file():
            return False
        self.step = json.loads(path.read_text())["step"]
        self.last = StandInCandidate(self.step, 0.1, StandInScores(20 + self.step / 100))
        return True


def load() -> Build:
    def build(task: Task, options: Options) -> StandInTrainer:
        for key in options.rest:
            if key not in KNOWN:
                raise RefusedError(
                    f"config.{key}", code="config", expected="a known key",
                    next_step="did you mean publish_every?",
                )  # fmt: skip
        return StandInTrainer(Path(task.assignment.directory), options.rest)

    return build


if __name__ == "__main__":
    run(load)
