"""A session that records what a host does to it, and weights to give it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from doublure_bridge.models import CompactSpec, GridSpec, ModelSpec
from doublure_plugin.evaluate import Evaluator

GRID = GridSpec(xy=(24, 20), xt=(6, 20), yt=(5, 24), volume=(4, 6, 7))
COMPACT = CompactSpec(hidden=16, layers=2)


@dataclass
class FakeWeights:
    version: int
    spec: ModelSpec
    tensors: dict[str, Any]
    probes: tuple[Any, Any]


def weights(spec: ModelSpec, version: int = 1, *, seed: int = 0) -> FakeWeights:
    """Random weights whose golden probes are right."""
    rng = np.random.default_rng(seed)
    tensors = {
        name: rng.normal(0.0, 0.4, t.shape).astype(t.dtype) for name, t in spec.tensors().items()
    }
    points = rng.uniform(-1.0, 1.0, (64, 3)).astype(np.float32)
    return FakeWeights(version, spec, tensors, (points, Evaluator(spec, tensors)(points)))


def constant_weights(spec: ModelSpec, version: int, grey: float) -> FakeWeights:
    """Weights that draw one grey everywhere, whatever features they are mixed with."""
    tensors = {name: np.zeros(t.shape, t.dtype) for name, t in spec.tensors().items()}
    tensors[f"mlp.{spec.layers}.bias"][:] = np.log1p(grey)
    points = np.zeros((4, 3), np.float32)
    return FakeWeights(version, spec, tensors, (points, np.full((4, 3), grey, np.float32)))


@dataclass
class FakeSession:
    """Records; hands out `queue` one a poll."""

    opened: bool = True
    wants_frames: bool = True
    model_specs: tuple[ModelSpec, ...] = ()
    queue: list[FakeWeights] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    applied_versions: list[int] = field(default_factory=list)
    rejections: list[tuple[int, str]] = field(default_factory=list)

    def capture_rows(self, rows: Any) -> bool:
        self.rows.append(rows.copy())
        return True

    def capture(self, pixels: Any, t: float) -> bool:
        raise AssertionError(f"this host hands over rows, not frames: {pixels.shape} at {t}")

    def poll(self) -> FakeWeights | None:
        return self.queue.pop(0) if self.queue else None

    def reject(self, weights: FakeWeights, reason: str) -> None:
        self.rejections.append((weights.version, reason))

    def applied(self, weights: FakeWeights) -> None:
        self.applied_versions.append(weights.version)


class BrokenSession:
    """Raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError(f"{name} is broken")
