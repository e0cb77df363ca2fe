"""The evaluator against the specification read one point at a time in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from doublure_bridge.errors import SpecError
from doublure_bridge.models import LOG_LIMIT, CompactSpec, GridSpec, ModelSpec
from doublure_plugin.evaluate import Evaluator

from .fakes import COMPACT, GRID, weights


def fetch(texture: Any, *coordinates: float) -> Any:
    """Linear lookup, last texture axis first among `coordinates`, clamped at the edge."""
    value: Any = texture.astype(np.float64)
    for coordinate in reversed(coordinates):  # the slowest axis comes first in memory
        count = len(value)
        at = min(max((coordinate + 1.0) / 2.0 * count - 0.5, 0.0), count - 1.0)
        lower = int(at)
        upper = min(lower + 1, count - 1)
        value = value[lower] * (1.0 - (at - lower)) + value[upper] * (at - lower)
    return value


def literal(spec: ModelSpec, tensors: dict[str, Any], point: Any) -> Any:
    x, y, t = (float(v) for v in point)
    if isinstance(spec, GridSpec):
        h = np.concatenate(
            [
                fetch(tensors["plane.xy"], x, y),
                fetch(tensors["plane.xt"], x, t),
                fetch(tensors["plane.yt"], y, t),
                fetch(tensors["volume"], x, y, t),
                [x, y, t],
            ]
        )
    else:
        h = np.array([x, y, t])
    for i in range(spec.layers + 1):
        h = tensors[f"mlp.{i}.weight"].astype(np.float64) @ h + tensors[f"mlp.{i}.bias"]
        if i < spec.layers:
            h = np.maximum(h, 0.0) if isinstance(spec, GridSpec) else np.sin(h)
    return np.sign(h) * np.expm1(np.minimum(np.abs(h), LOG_LIMIT))


@pytest.mark.parametrize("spec", [GRID, COMPACT, GridSpec(xy=(1, 1), xt=(1, 2), yt=(3, 1),
                         volume=(1, 1, 2), hidden=5, layers=1), CompactSpec(hidden=3, layers=1)],
                         ids=["grid", "compact", "tiny grid", "tiny compact"])  # fmt: skip
def test_evaluator_equals_the_literal_reading(spec: ModelSpec) -> None:
    w = weights(spec, seed=3)
    # Beyond the square too: lookups clamp there.
    points = np.random.default_rng(4).uniform(-1.2, 1.2, (200, 3)).astype(np.float32)
    points[:4] = [(-1, -1, -1), (1, 1, 1), (0, 0, 0), (1, -1, 1)]
    got = Evaluator(spec, w.tensors)(points)
    wanted = np.array([literal(spec, w.tensors, p) for p in points])
    assert got.dtype == np.float32
    assert got.shape == (200, 3)
    # float32 sums of at most 24 terms, magnified by expm1's own slope: relative to 1 + colour.
    assert (np.abs(got - wanted) / (1.0 + np.abs(wanted))).max() < 1e-5


@pytest.mark.parametrize("spec", [GRID, COMPACT], ids=["grid", "compact"])
def test_image_is_the_evaluator_at_pixel_centres(spec: ModelSpec) -> None:
    evaluator = Evaluator(spec, weights(spec, seed=5).tensors)
    image = evaluator.image(37, 23, -0.35)
    x, y = (2 * np.arange(37) + 1) / 37 - 1, (2 * np.arange(23) + 1) / 23 - 1
    grid_x, grid_y = np.meshgrid(x, y)
    points = np.stack([grid_x, grid_y, np.full_like(grid_x, -0.35)], -1).reshape(-1, 3)
    wanted = evaluator(points.astype(np.float32)).reshape(23, 37, 3)
    assert (np.abs(image - wanted) / (1.0 + np.abs(wanted))).max() < 1e-5


def test_outputs_stay_finite_at_the_log_limit() -> None:
    w = weights(COMPACT)
    w.tensors["mlp.2.bias"] = np.array([1e6, -1e6, 0.0], np.float32)
    colour = Evaluator(COMPACT, w.tensors)(np.zeros((1, 3), np.float32))[0]
    assert colour[0] == -colour[1] == np.float32(np.expm1(np.float32(LOG_LIMIT)))


def test_wrong_tensors_are_refused_by_name() -> None:
    good = weights(GRID).tensors

    def refusal(**changes: Any) -> str:
        changed = {k: v for k, v in {**good, **changes}.items() if v is not None}
        with pytest.raises(SpecError) as caught:
            Evaluator(GRID, changed)
        return str(caught.value)

    names = {"volume": None}
    expected = "tensors.volume: expected float16 [4, 6, 7, 4], got nothing"
    assert refusal(**names) == expected
    assert "tensors.plane.xy: expected float16 [24, 20, 4], got float16 [20, 24, 4]" in refusal(
        **{"plane.xy": good["plane.xy"].transpose(1, 0, 2)}
    )
    assert "got float64 [3]" in refusal(**{"mlp.2.bias": np.zeros(3)})
    assert "tensors.mlp.1.bias: expected float32 [16], got list" in refusal(
        **{"mlp.1.bias": [0.0] * 16}
    )
    assert "tensors.extra" in refusal(extra=np.zeros(1, np.float32))
    bad = good["mlp.0.bias"].copy()
    bad[2] = np.nan
    assert "tensors.mlp.0.bias: expected finite values, got 1" in refusal(**{"mlp.0.bias": bad})
    with pytest.raises(SpecError, match=r"points: expected float32 \[N, 3\]"):
        Evaluator(GRID, good)(np.zeros((3, 2), np.float32))
