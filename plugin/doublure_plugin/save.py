"""Live weights to disk, in the model directory that offline training writes too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from doublure_bridge import ModelFile, write_model

from .weights import Weights

__all__ = ["save_model"]


def save_model(
    weights: Weights,
    directory: Path,
    *,
    name: str,
    parameter: tuple[float, float],
    resolution: tuple[int, int] = (0, 0),
    seed: int = 0,
    test: Mapping[str, float] | None = None,
) -> Path:
    """Write weights.json and weights.safetensors, as `doublure export` reads them.

    Blocks on the disk for some tenths of a second: call it between scenes, not between frames.

    Args:
        weights: What `Session.poll` or `Session.current` gave.
        directory: Created if missing; the same two files there are replaced.
        name: What was learned, for people.
        parameter: The source's parameter at t = -1 and at t = +1, as the session was given it.
        resolution: Width and height in pixels of what was captured.
        seed: Seed of the training.
        test: Scores on slices that the gate never saw, where the host has measured them.
    Returns:
        The path of weights.safetensors.
    Raises:
        ModelFileError: The arguments do not fit together.
        OSError: The directory cannot be written.
    """
    points, colours = weights.probes
    return write_model(
        directory,
        ModelFile(
            spec=weights.spec,
            tensors=weights.tensors,
            name=name,
            parameter=parameter,
            resolution=resolution,
            source_digest=weights.source.hex() if any(weights.source) else "",
            seed=seed,
            steps=weights.step,
            scores={"held_out": _numbers(weights.scores), "test": _numbers(test or {})},
            probes=(points, colours.astype(np.float64)),
        ),
    )


def _numbers(scores: Mapping[str, object]) -> dict[str, float] | None:
    """The finite figures of some scores; None where there is none."""
    found = {
        key: float(value)
        for key, value in scores.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return found or None
