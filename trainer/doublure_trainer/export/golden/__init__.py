"""Golden vectors: one tiny model a family, points, and the colours that any reader finds there.

The numbers come from integer arithmetic and a float64 evaluation, so that anyone can make them
again; whoever ports the evaluation to another engine checks the port against them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from doublure_bridge.models import (
    CompactSpec,
    GridSpec,
    ModelSpec,
    model_spec_from_dict,
    spec_to_dict,
)

from ...models.reference import evaluate

__all__ = ["GOLDEN_SPECS", "GoldenCase", "golden_case", "golden_text", "make_golden"]

Array: TypeAlias = npt.NDArray[Any]

GOLDEN_SPECS: dict[str, ModelSpec] = {
    "compact": CompactSpec(hidden=8, layers=3),
    # No two sizes alike: a swapped axis shows.
    "grid": GridSpec(xy=(5, 7), xt=(4, 6), yt=(3, 8), volume=(3, 4, 5), hidden=8, layers=2),
}
"""Name -> specification of the tiny model. A new family or activation is one entry here."""


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """One tiny model and what it gives.

    Attributes:
        spec: Family and sizes.
        tensors: In the specification's dtypes and shapes.
        points: x, y, t in [-1, 1], float64 [n, 3]: the corners, texel centres, edges between them,
            and points anywhere.
        colours: Linear RGB, float64 [n, 3].
    """

    spec: ModelSpec
    tensors: Mapping[str, Array]
    points: Array
    colours: Array


def golden_case(name: str) -> GoldenCase:
    """Read the stored case of that name (a key of `GOLDEN_SPECS`)."""
    data = json.loads((files(__package__) / f"{name}.json").read_text(encoding="utf-8"))
    spec = model_spec_from_dict(data["model"])
    tensors = {
        key: np.array(data["tensors"][key], want.dtype).reshape(want.shape)
        for key, want in spec.tensors().items()
    }
    points, colours = (np.array(data[key], np.float64) for key in ("points", "colours"))
    return GoldenCase(spec, tensors, points, colours)


def make_golden(name: str) -> GoldenCase:
    """Compute the case anew."""
    spec = GOLDEN_SPECS[name]
    numbers = _Numbers()
    tensors: dict[str, Array] = {}
    for key, want in spec.tensors().items():
        count = int(np.prod(want.shape))
        # Sixteenths and 256ths: float16 and decimal text hold them exactly.
        scale = 1.0 if want.dtype == "float16" else 0.75
        values = numbers.take(count) * scale
        tensors[key] = (np.rint(values * 256) / 256).astype(want.dtype).reshape(want.shape)
    last = f"mlp.{spec.layers}.bias"
    tensors[last] = np.array([-0.5, 0.25, 4.0], np.float32)  # dark, middling and bright
    corners = np.array([[x, y, t] for x in (-1, 1) for y in (-1, 1) for t in (-1, 1)], np.float64)
    inner = numbers.take(40 * 3).reshape(40, 3)
    centres = (2 * np.floor((inner[:8] + 1) * 2) + 1) / 4 - 1  # of 4 texels
    points = np.rint(np.concatenate([corners, centres, np.zeros((1, 3)), inner]) * 4096) / 4096
    return GoldenCase(spec, tensors, points, evaluate(spec, tensors, points))


def golden_text(case: GoldenCase) -> str:
    """The case as the stored JSON."""
    data = {
        "meaning": "x, y, t in [-1, 1] to linear RGB; docs/export.md says how to use this",
        "model": spec_to_dict(case.spec),
        "tensors": {key: value.astype(np.float64).tolist() for key, value in case.tensors.items()},
        "points": case.points.tolist(),
        "colours": [[float(f"{v:.15g}") for v in row] for row in case.colours],
    }
    lines = [f' "{key}": {json.dumps(value)}' for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


class _Numbers:
    """Values in [-1, 1) from a linear congruential generator (Numerical Recipes' constants)."""

    def __init__(self) -> None:
        self._state = 20240229

    def take(self, count: int) -> Array:
        found = np.empty(count, np.float64)
        for i in range(count):
            self._state = (self._state * 1664525 + 1013904223) % 2**32
            found[i] = self._state / 2**31 - 1.0
        return found
