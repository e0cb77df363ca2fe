"""The compiled loops against torch: losses, gradients, Adam, smoothing and splines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from doublure_bridge.models import GridSpec
from doublure_trainer import fused, kernels_cpu, smoothing
from doublure_trainer.adam import Adam
from doublure_trainer.models.grid import Grid, Stage
from doublure_trainer.models.spline import taps

RELATIVE = 0.5
TINY = GridSpec(xy=(1, 1), xt=(1, 2), yt=(2, 1), volume=(1, 1, 1), hidden=4, layers=1)
ODD = GridSpec(xy=(16, 24), xt=(5, 12), yt=(6, 10), volume=(4, 6, 8), hidden=7, layers=2)
LARGE = GridSpec(xy=(9, 7), xt=(48, 40), yt=(64, 33), volume=(10, 12, 9), hidden=12, layers=3)
CASES = [(s, f) for s in (TINY, ODD, LARGE) for f in (False, True)]


def made(spec: GridSpec, *, fine: bool, seed: int = 0) -> tuple[Grid, list[torch.Tensor]]:
    """A grid whose weights are large enough to matter, in the memory the loops want."""
    generator = torch.Generator().manual_seed(seed)
    grid = Grid(spec, generator=generator)
    grid.set_stage(Stage(len(grid.volumes()) - 1, fine))
    for p in grid.parameters():
        if p.dim() > 2:
            layout = torch.channels_last if p.dim() == 4 else torch.channels_last_3d
            p.data = (torch.randn(p.shape, generator=generator) * 0.5).contiguous(
                memory_format=layout
            )
    return grid, list(grid.parameters())


def engine(grid: Grid, values: list[torch.Tensor], *, threads: int = 1) -> fused.FusedGrid:
    spare = [[v.detach().clone() for v in values] for _ in range(3)]
    return fused.FusedGrid(grid, values, *spare, threads=threads)


def some_rows(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, n])
    rows = rng.uniform(-1, 1, (n, 6)).astype(np.float32)
    rows[:, 3:] = rng.normal(0, 3, (n, 3))  # log space: up to some thousands of nits
    rows[: min(n, 2), :3] = [[-1, -1, -1], [1, 1, 1]][: min(n, 2)]
    weights = rng.uniform(0.2, 3.0, n).astype(np.float32)
    return rows, weights / weights.mean()


def near(ours: np.ndarray, theirs: np.ndarray, *, rtol: float = 1e-4) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol * 0.1 * abs(theirs).max() + 1e-9)


@pytest.mark.parametrize("n", [1, 127, 128, 1000])
@pytest.mark.parametrize(("spec", "fine"), CASES, ids=str)
def test_loss_errors_and_gradients_are_autograds(spec: GridSpec, fine: bool, n: int) -> None:
    grid, values = made(spec, fine=fine)
    rows, weights = some_rows(n)
    loops = engine(grid, values)
    errors = np.empty(n, np.float32)
    loss = loops.gradients(rows, weights, errors, RELATIVE)

    data = torch.from_numpy(rows)
    soft = data[:, 3:].abs().clamp(max=1.0) + RELATIVE
    own = ((grid(data[:, :3]) - data[:, 3:]) / soft).square().sum(1)
    true = (own * torch.from_numpy(weights)).mean() / 3
    true.backward()
    assert loss == pytest.approx(float(true.detach()), rel=1e-5)
    near(errors, own.detach().numpy())
    found = loops._gradients[0]
    textures = list(found[:4])
    for i, plane in zip((1, 2), loops._planes, strict=True):
        if plane is not None:
            r, c, scratch, _ = plane
            textures[i] = np.zeros(fused.view(values[i]).shape, np.float32)
            kernels_cpu.spline_down(
                found[i], r.at, r.weights, c.at, c.weights, scratch, textures[i]
            )
    ours = [*textures, found[4], *found[6], found[8], found[5], *found[7], found[9]]
    for mine, parameter in zip(ours, values, strict=True):
        assert parameter.grad is not None
        near(mine, fused.view(parameter.grad))


def test_the_cases_hold_coarse_planes() -> None:
    grid, values = made(LARGE, fine=False)
    assert sum(plane is not None for plane in engine(grid, values)._planes) == 2


def test_gradients_add_up_and_are_forgotten() -> None:
    grid, values = made(ODD, fine=True)
    rows, weights = some_rows(300)
    loops, errors = engine(grid, values), np.empty(300, np.float32)
    loops.gradients(rows, weights, errors, RELATIVE)
    once = [g.copy() for g in loops._gradients[0]]
    loops.gradients(rows, weights, errors, RELATIVE)
    for one, two in zip(once, loops._gradients[0], strict=True):
        np.testing.assert_allclose(two, 2 * one, rtol=1e-5, atol=1e-6 * abs(one).max())
    loops.forget()
    assert not any(g.any() for g in loops._gradients[0])


def test_two_threads_are_close_to_one_and_the_same_every_time() -> None:
    grid, values = made(LARGE, fine=True)
    rows, weights = some_rows(3000)
    found = []
    for threads in (1, 2, 2):
        loops, errors = engine(grid, values, threads=threads), np.empty(3000, np.float32)
        loss = loops.gradients(rows, weights, errors, RELATIVE)
        loops.close()
        found.append((loss, errors, [g.copy() for g in loops._gradients[0]]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert (found[0][1] == found[1][1]).all()
    for one, two in zip(found[0][2], found[1][2], strict=True):
        near(two, one)
    assert found[1][0] == found[2][0]
    assert all((a == b).all() for a, b in zip(found[1][2], found[2][2], strict=True))


def test_adam_is_the_classes() -> None:
    rng = np.random.default_rng(3)
    parameter = torch.nn.Parameter(torch.from_numpy(rng.normal(0, 1, 77).astype(np.float32)))
    adam = Adam([parameter], [0.02])
    value, first, second = parameter.detach().numpy().copy(), *np.zeros((2, 77), np.float32)
    average, theirs = value.copy(), value.copy()
    for count in range(1, 40):
        gradient = (rng.normal(0, 1, 77) * 10.0 ** rng.integers(-6, 3, 77)).astype(np.float32)
        parameter.grad = torch.from_numpy(gradient.copy())
        adam.step(0.7)
        kernels_cpu.adam_step(
            value, gradient, first, second, average, np.float32(0.02 * 0.7), np.float32(0.9),
            np.float32(0.99), float(count), np.float32(0.95),
        )  # fmt: skip
        assert not gradient.any()
        theirs += np.float32(0.05) * (parameter.detach().numpy() - theirs)
    near(value, parameter.detach().numpy())
    near(first, adam.first[0].numpy())
    near(second, adam.second[0].numpy())
    near(average, theirs)


@pytest.mark.parametrize("spec", [TINY, ODD, LARGE], ids=str)
def test_smoothing_is_the_learners(spec: GridSpec) -> None:
    for texture, axis in [*((i, a) for i in range(3) for a in (0, 1)), *((3, a) for a in range(3))]:
        grid, values = made(spec, fine=True)
        expected = values[texture].detach().clone()
        smoothing.bend(expected, axis + 2, 0.05)
        engine(grid, values).smooth(texture, axis, 0.05)
        torch.testing.assert_close(values[texture].detach(), expected, rtol=1e-5, atol=1e-6)


SHAPES = [((48, 40), (32, 32)), ((64, 33), (5, 32)), ((9, 7), (9, 3)), ((6, 5), (1, 2))]


@pytest.mark.parametrize(("texels", "controls"), SHAPES)
def test_splines_are_their_matrices_and_transposes(
    texels: tuple[int, int], controls: tuple[int, int]
) -> None:
    rng = np.random.default_rng(5)
    control = rng.normal(0, 1, (*controls, 4)).astype(np.float32)
    weight = rng.normal(0, 1, (*texels, 4)).astype(np.float32)
    r, c = (taps(n, m) for n, m in zip(texels, controls, strict=True))
    scratch = np.full((controls[0], texels[1], 4), np.nan, np.float32)
    up, down = np.empty((*texels, 4), np.float32), np.zeros((*controls, 4), np.float32)
    kernels_cpu.spline_up(control, r.at, r.weights, c.at, c.weights, scratch, up)
    kernels_cpu.spline_down(weight, r.at, r.weights, c.at, c.weights, scratch, down)
    rows, columns = r.matrix().numpy(), c.matrix().numpy()
    near(up, np.einsum("ir,jc,rck->ijk", rows, columns, control), rtol=1e-5)
    near(down, np.einsum("ir,jc,ijk->rck", rows, columns, weight), rtol=1e-5)
    inner = float((up.astype(np.float64) * weight).sum())
    assert inner == pytest.approx(float((down.astype(np.float64) * control).sum()), rel=1e-4)


@pytest.mark.parametrize(("texels", "controls"), [(n, m) for n, m in ((48, 32), (9, 3), (6, 2))])
def test_a_spline_keeps_sums_and_straight_lines(texels: int, controls: int) -> None:
    matrix = taps(texels, controls).matrix().numpy().astype(np.float64)
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0, atol=1e-6)
    line = (2 * np.arange(controls) + 1) / controls - 1
    np.testing.assert_allclose(matrix @ line, (2 * np.arange(texels) + 1) / texels - 1, atol=1e-6)


@pytest.mark.parametrize("part", range(8))
def test_a_weight_that_is_no_number_shows_in_the_loss(part: int) -> None:
    grid, values = made(ODD, fine=True)
    with torch.no_grad():
        values[part].fill_(float("nan"))
    rows, weights = some_rows(64)
    assert not np.isfinite(
        engine(grid, values).gradients(rows, weights, np.empty(64, np.float32), 0.5)
    )


def test_layout_of_coarse_planes_is_the_matrices_product() -> None:
    grid, values = made(LARGE, fine=False)
    named = grid.layout(values)
    for name, i, size in (
        ("plane.xy", 0, LARGE.xy),
        ("plane.xt", 1, LARGE.xt),
        ("plane.yt", 2, LARGE.yt),
    ):
        assert tuple(named[name].shape) == (*size, 4)
        r, c = (taps(n, m).matrix() for n, m in zip(size, values[i].shape[2:], strict=True))
        expected = torch.einsum("ir,jc,rck->ijk", r, c, values[i][0].permute(1, 2, 0))
        torch.testing.assert_close(named[name], expected, rtol=1e-4, atol=1e-5)
    assert tuple(named["volume"].shape) == (*LARGE.volume, 4)
