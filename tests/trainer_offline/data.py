"""A small captured dataset, written out by the format's text and by nothing of ours."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from doublure_trainer.config import TrainConfig

PARAMETER = (2.0, 6.0)


def source(x: np.ndarray, y: np.ndarray, t: np.ndarray) -> np.ndarray:
    """A bright spot that moves over a gradient; linear RGB, up to 9."""
    spot = 8.0 * np.exp(-20.0 * ((x - 0.5 * t) ** 2 + (y + 0.3 * t) ** 2))
    return np.stack([spot + 0.3 + 0.2 * x, 0.5 * spot + 0.3, 0.4 + 0.2 * y * t], axis=-1)


def write_dataset(
    directory: Path,
    *,
    train: int = 16,
    validation: int = 7,
    pixels: int = 200,
    size: tuple[int, int] = (64, 48),
    seed: int = 5,
    **changes: Any,
) -> Path:
    """dataset.json, train.f32 and validation.f32, as a capture of the source leaves them."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    width, height = size
    splits = {}
    for name, count in (("train", train), ("validation", validation)):
        parts, parameters = [], []
        for i in range(count):
            fraction = i / (count - 1) if name == "train" else (i + 0.381966) / count
            parameters.append(float(np.float32(PARAMETER[0] + fraction * 4.0)))
            rows = np.empty((pixels, 6), dtype="<f4")
            rows[:, 0] = (rng.integers(0, width, pixels) + 0.5) / width * 2 - 1
            rows[:, 1] = (rng.integers(0, height, pixels) + 0.5) / height * 2 - 1
            rows[:, 2] = fraction * 2 - 1
            rows[:, 3:] = source(rows[:, 0], rows[:, 1], rows[:, 2])
            parts.append(rows)
        data = np.concatenate(parts).tobytes()
        (directory / f"{name}.f32").write_bytes(data)
        splits[name] = {
            "file": f"{name}.f32",
            "rows": count * pixels,
            "parameters": parameters,
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    manifest = {
        "schema": 1,
        "sourceKind": "captured-module",
        "sourceShaderDigest": "ab" * 32,
        "fixedState": "Fixed camera, geometry, textures and all other uniforms",
        "resolution": [width, height],
        "parameterRange": list(PARAMETER),
        "rowFormat": "little-endian float32: x,y,t,r,g,b",
        "coordinates": "pixel centers; x right, y down; x,y,t normalized to [-1,1]",
        "color": "linear RGB, unclamped, opaque",
        "seed": seed,
        "splits": splits,
        **changes,
    }
    (directory / "dataset.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return directory


SMALL: dict[str, Any] = {
    "batch": 256,
    "growth": [20],
    "race_rungs": [20, 40],
    "threads": 1,
    "grid": {
        "family": "grid",
        "version": 1,
        "xy": [16, 16],
        "xt": [12, 12],
        "yt": [12, 12],
        "volume": [10, 10, 10],
        "hidden": 16,
        "layers": 2,
    },
    "compact": {"family": "compact", "version": 1, "hidden": 16, "layers": 2},
}
"""Settings as `--config` takes them, that learn the source in a second."""


def small(**changes: Any) -> TrainConfig:
    return TrainConfig.from_dict({**SMALL, **changes})
