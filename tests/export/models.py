"""Models to export in tests."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from doublure_bridge.model_file import ModelFile
from doublure_bridge.models import CompactSpec, GridSpec, ModelSpec
from doublure_plugin.scenes import SCENES, pixel_centres
from doublure_trainer.config import TrainConfig
from doublure_trainer.export.golden import golden_case
from doublure_trainer.loop import LiveTrainer
from doublure_trainer.models.reference import evaluate
from doublure_trainer.slices import SlicePlan
from numpy.typing import NDArray

Array = NDArray[Any]

PARAMETER = (0.5, 3.0)  # neither symmetric nor of a size that does nothing


@cache
def golden_model(name: str) -> ModelFile:
    """The golden case as a model of something."""
    case = golden_case(name)
    return ModelFile(
        spec=case.spec,
        tensors=case.tensors,
        name=f"golden {name}",
        parameter=PARAMETER,
        source_digest="ab" * 32,
        scores={"held_out": {"psnr_db": 40.25, "relmse": 0.001}, "test": None},
    )


def random_model(spec: ModelSpec, *, seed: int = 3, scale: float = 0.4) -> ModelFile:
    """Random weights."""
    rng = np.random.default_rng(seed)
    tensors = {
        name: rng.normal(0.0, scale, t.shape).astype(t.dtype) for name, t in spec.tensors().items()
    }
    return ModelFile(spec=spec, tensors=tensors, name="random", parameter=PARAMETER)


@cache
def trained_model(scene_name: str, family: str) -> ModelFile:
    """A model that has learned a scene for some seconds: a small grid, or a compact one."""
    scene = SCENES[scene_name]
    config = TrainConfig(
        family=family,
        threads=1,
        grid=GridSpec(xy=(32, 32), xt=(16, 16), yt=(16, 16), volume=(16, 16, 16)),
        compact=CompactSpec(hidden=16, layers=3),
        first_candidate_s=0.0,
        candidate_interval_s=0.0,
        score_share=0.9,
    )
    plan = SlicePlan()
    trainer = LiveTrainer(config, plan, device="cpu", seed=0)
    rng = np.random.default_rng(0)
    for t in np.linspace(-1, 1, 256):
        rows = np.empty((2048, 6), np.float32)
        rows[:, :2] = rng.uniform(-1, 1, (2048, 2))
        rows[:, 2] = t
        rows[:, 3:] = scene.evaluate(rows[:, 0], rows[:, 1], np.float32(scene.denormalise(t)))
        trainer.add_rows(rows)
    best = None
    for _ in range(6):
        trainer.train_steps(100)
        found = trainer.maybe_candidate()
        if found is not None:
            trainer.published(found)
            best = found
    trainer.close()
    assert best is not None, "nothing passed the gate in 600 steps"
    return ModelFile(
        spec=best.spec,
        tensors=best.tensors,
        name=scene_name,
        parameter=scene.parameter,
        scores={"held_out": {k: float(v) for k, v in best.scores.to_dict().items()}},
    )


def frame_points(size: int, t: float) -> Array:
    """Pixel centres of a whole frame at normalised t, float64 [size * size, 3]."""
    x, y = pixel_centres(size, size)
    grid_y, grid_x = np.meshgrid(y.astype(np.float64), x.astype(np.float64), indexing="ij")
    return np.stack([grid_x.ravel(), grid_y.ravel(), np.full(size * size, t)], axis=1)


def frame(spec: ModelSpec, tensors: Any, size: int, t: float) -> Array:
    """The whole frame in float64, [size, size, 3]; t normalised."""
    return evaluate(spec, tensors, frame_points(size, t)).reshape(size, size, 3)


def raw(model: ModelFile, t: float) -> float:
    """Normalised t as the source declares it."""
    low, high = model.parameter
    return low + (t + 1.0) / 2.0 * (high - low)


def largest_error(got: Array, wanted: Array) -> float:
    """Largest |difference| / (1 + |wanted|): absolute in the dark, relative in highlights."""
    return float((np.abs(got - wanted) / (1.0 + np.abs(wanted))).max())


def renamed(model: ModelFile, **changes: Any) -> ModelFile:
    return replace(model, **changes)
