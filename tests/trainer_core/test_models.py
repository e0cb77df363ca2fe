"""Models: torch against the float64 reading of the specification, export, growth, cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from doublure_bridge.models import LOG_LIMIT, CompactSpec, GridSpec, ModelSpec
from doublure_trainer.gate import golden_probes
from doublure_trainer.models import build, cost, decode, encode, export_tensors, load_tensors
from doublure_trainer.models.grid import Grid, Stage
from doublure_trainer.models.reference import evaluate

GRID = GridSpec(xy=(16, 24), xt=(5, 12), yt=(6, 10), volume=(4, 6, 8))
SPECS: list[ModelSpec] = [
    GRID,
    GridSpec(xy=(1, 1), xt=(1, 2), yt=(2, 1), volume=(1, 1, 1)),
    GridSpec(xy=(8, 8), xt=(8, 8), yt=(8, 8), volume=(8, 8, 8), hidden=5, layers=1),
    CompactSpec(),
    CompactSpec(hidden=8, layers=1),
]


def scrambled(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors large enough that every texel matters."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.5, t.shape).astype(t.dtype) for name, t in spec.tensors().items()}


def points(n: int = 500) -> np.ndarray:
    rng = np.random.default_rng(11)
    inside = rng.uniform(-1, 1, (n, 3))
    corners = [[x, y, t] for x in (-1, 1) for y in (-1, 1) for t in (-1, 1)]
    return np.concatenate([inside, corners]).astype(np.float32)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_torch_agrees_with_the_specification_in_float64(spec: ModelSpec) -> None:
    tensors = scrambled(spec)
    module = build(spec)
    load_tensors(module, tensors)
    ours = module.evaluate(torch.from_numpy(points())).numpy()
    true = evaluate(spec, tensors, points())
    # float32 texel positions: 1e-6 of a texel times the largest step between texels
    np.testing.assert_allclose(ours, true, rtol=2e-4, atol=2e-4)


def test_a_texel_is_found_exactly_at_its_centre_and_the_edge_is_clamped() -> None:
    module = build(GRID)
    tensors = scrambled(GRID)
    load_tensors(module, tensors)
    assert isinstance(module, Grid)
    centre = torch.tensor([[(2 * 7 + 1) / 24 - 1, (2 * 3 + 1) / 16 - 1]])
    from doublure_trainer.models.grid import _lookup

    found = _lookup(module.xy, centre).detach().numpy()[:, 0]
    np.testing.assert_allclose(found, tensors["plane.xy"][3, 7].astype(np.float32), atol=1e-5)
    corner = _lookup(module.xy, torch.tensor([[-1.0, 1.0]])).detach().numpy()[:, 0]
    np.testing.assert_allclose(corner, tensors["plane.xy"][15, 0].astype(np.float32), atol=1e-5)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_export_has_the_specifications_names_order_dtypes_and_shapes(spec: ModelSpec) -> None:
    tensors = export_tensors(build(spec), spec)
    wanted = spec.tensors()
    assert list(tensors) == list(wanted)
    for name, array in tensors.items():
        assert (str(array.dtype), array.shape) == (wanted[name].dtype, wanted[name].shape)
        assert array.flags.c_contiguous


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_export_of_loaded_tensors_gives_the_same_bytes(spec: ModelSpec) -> None:
    tensors = scrambled(spec)
    module = build(spec)
    load_tensors(module, tensors)
    again = export_tensors(module, spec)
    assert all(again[name].tobytes() == tensors[name].tobytes() for name in tensors)


def test_an_export_is_a_copy() -> None:
    module = build(GRID)
    before = export_tensors(module, GRID)
    kept = {name: array.copy() for name, array in before.items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    assert all((before[name] == kept[name]).all() for name in kept)


def test_a_coarse_volume_is_exported_at_full_size() -> None:
    spec = GridSpec(xy=(8, 8), xt=(8, 8), yt=(8, 8), volume=(32, 32, 32))
    module = build(spec)
    assert isinstance(module, Grid)
    assert module.volumes()[1:] == [(8, 8, 8), (16, 16, 16), (32, 32, 32)]
    module.set_stage(Stage(1, fine=True))
    with torch.no_grad():
        module.volume.fill_(0.25)
    assert module.volume.shape[2:] == (8, 8, 8)
    exported = export_tensors(module, spec)["volume"]
    assert exported.shape == (32, 32, 32, 4)
    assert (exported == 0.25).all()


def test_growing_changes_a_smooth_volume_little() -> None:
    spec = GridSpec(xy=(8, 8), xt=(8, 8), yt=(8, 8), volume=(32, 32, 32))
    module = build(spec)
    assert isinstance(module, Grid)
    module.set_stage(Stage(2, fine=True))
    ramp = torch.linspace(-1, 1, 16)
    with torch.no_grad():
        module.volume.copy_(ramp.expand_as(module.volume))
    where = torch.from_numpy(points())
    before = module.evaluate(where)
    module.set_stage(Stage(3, fine=True))
    assert (module.evaluate(where) - before).abs().max() < 0.03


def test_wrong_tensors_are_named() -> None:
    tensors = scrambled(GRID)
    with pytest.raises(ValueError, match=r"plane\.xy: expected shape \(16, 24, 4\), got \(1, 4\)"):
        load_tensors(build(GRID), {**tensors, "plane.xy": np.zeros((1, 4), np.float16)})
    tensors.pop("volume")
    with pytest.raises(ValueError, match="expected"):
        load_tensors(build(GRID), tensors)


def test_log_space_round_trips_and_is_limited() -> None:
    colour = torch.tensor([-40000.0, -1.0, -1e-4, 0.0, 1e-4, 1.0, 40000.0])
    torch.testing.assert_close(decode(encode(colour)), colour)
    huge = decode(torch.tensor([1e9, -1e9]))
    assert torch.isfinite(huge).all()
    assert float(huge[0]) == pytest.approx(np.expm1(LOG_LIMIT))


def test_the_default_grid_costs_what_is_promised() -> None:
    found = cost(GRID)
    assert (found.macs, found.fetches) == (608, 4)
    assert found.nbytes == GRID.nbytes
    assert cost(CompactSpec()).fetches == 0


def test_the_same_generator_gives_the_same_weights() -> None:
    first, second = (
        export_tensors(build(GRID, generator=torch.Generator().manual_seed(3)), GRID)
        for _ in range(2)
    )
    assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_golden_probes_hold_for_the_torch_reading(spec: ModelSpec) -> None:
    tensors = scrambled(spec)
    where, colours = golden_probes(spec, tensors, n=32, seed=5)
    assert (where.dtype, where.shape) == (np.float32, (32, 3))
    assert (colours.dtype, colours.shape) == (np.float32, (32, 3))
    module = build(spec)
    load_tensors(module, tensors)
    ours = module.evaluate(torch.from_numpy(where)).numpy()
    np.testing.assert_allclose(ours, colours, rtol=2e-4, atol=2e-4)


def test_no_points_give_no_colours() -> None:
    assert build(GRID).evaluate(torch.empty(0, 3)).shape == (0, 3)
