"""Both ways of making a step, weights of rows, scores over slices, and sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from doublure_bridge.models import GridSpec
from doublure_bridge.scores import RELMSE_EPS, score, tonemap
from doublure_trainer import kernels_cpu
from doublure_trainer import learner as module
from doublure_trainer.config import TrainConfig
from doublure_trainer.learner import Learner
from doublure_trainer.models.presets import PRESETS, BudgetError, preset, within_budget
from doublure_trainer.replay import _draw

CPU = torch.device("cpu")
SPEC = GridSpec(xy=(32, 32), xt=(40, 40), yt=(40, 40), volume=(18, 18, 18))


def config(**changes: object) -> TrainConfig:
    return TrainConfig(grid=SPEC, batch=512, **{"growth": (20,), **changes})  # type: ignore[arg-type]


def batch(i: int, n: int = 512) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([7, i])
    rows = rng.uniform(-1, 1, (n, 6)).astype(np.float32)
    x, y, t = rows[:, 0], rows[:, 1], rows[:, 2]
    for c in range(3):
        rows[:, 3 + c] = np.log1p(4 * np.exp(-8 * ((x - 0.5 * t) ** 2 + (y + 0.3 * t * c) ** 2)))
    rows = rows[np.argsort(rows[:, 2])]
    weights = rng.uniform(0.5, 1.5, n).astype(np.float32)
    return rows, weights / weights.mean()


def go(one: Learner, steps: range) -> None:
    for i in steps:
        one.step(*batch(i))
        if one.wants_score:
            one.trial_score(30.0 + one.steps % 7)


def biggest(a: Learner, b: Learner) -> float:
    return max(
        float(np.abs(x.astype(np.float64) - y.astype(np.float64)).max())
        for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True)
    )


NAMES = ["grid", "planes", "fine"]


@pytest.mark.parametrize("name", NAMES)
def test_compiled_follows_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loops, plain = (Learner(SPEC, config(), device=CPU, seed=1, name=name) for _ in range(2))
    for i in range(50):
        ours = loops.step(*batch(i))
        with monkeypatch.context() as m:
            m.setattr(module, "ready", lambda: False)
            theirs = plain.step(*batch(i))
        assert ours == pytest.approx(theirs, rel=0.02)
    assert loops._engine is not None
    assert plain._engine is None
    assert biggest(loops, plain) < 0.05


@pytest.mark.parametrize("name", NAMES)
def test_switch_keeps_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Learner(SPEC, config(), device=CPU, seed=1, name=name)
    with monkeypatch.context() as m:
        m.setattr(module, "ready", lambda: False)
        go(one, range(15))
        before = one.state()
        assert one._engine is None
    one.restore(one.state())
    assert one._engine is not None
    after = one.state()
    for a, b in (
        (before.values, after.values),
        (before.first, after.first),
        (before.second, after.second),
        (before.averages, after.averages),
    ):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert one.steps == 15
    assert after.adam_steps == 15


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_dump_take_exact(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(module, "ready", lambda: False)
    for at in (5, 40, 190):
        whole, part = (Learner(SPEC, config(), device=CPU, seed=1, name=name) for _ in range(2))
        go(whole, range(at))
        part.take(*whole.dump())
        go(whole, range(at, at + 180))
        go(part, range(at, at + 180))
        assert (whole._engine is not None) == compiled
        assert whole.steps == part.steps
        assert biggest(whole, part) == 0.0


def test_rollback_compiled() -> None:
    one, clean = (Learner(SPEC, config(), device=CPU, seed=1, name="planes") for _ in range(2))
    go(one, range(10))
    one.mark_good()
    rows, weights = batch(10)
    bad = rows.copy()
    bad[3, 4] = np.nan
    assert math.isnan(one.step(bad, weights))
    assert one._engine is not None
    go(clean, range(10))
    clean.rate = 0.5
    go(one, range(11, 14))
    clean.steps = 10
    go(clean, range(11, 14))
    assert biggest(one, clean) == 0.0


@pytest.mark.parametrize("draw", [kernels_cpu.draw, _draw])
def test_power_one_is_unbiased(draw) -> None:
    rng = np.random.default_rng(0)
    cap, b = 64, 8
    stored = rng.normal(0, 1, (cap * b, 6)).astype(np.float32)
    errors = rng.exponential(1.0, cap * b).astype(np.float32)
    stored[:, 5] = errors  # correlated with the density: an unweighted mean is far off
    est, plain = [], []
    for seed in range(300):
        r = np.random.default_rng(seed)
        rows, w, s = (
            np.empty((256, 6), np.float32),
            np.empty(256, np.float32),
            np.empty(256, np.int64),
        )
        draw(
            stored,
            errors,
            np.arange(b),
            np.full(b, cap),
            cap,
            r.random(512, dtype=np.float32),
            8,
            r.random(),
            np.float32(0.8),
            np.float32(1.0),
            rows,
            w,
            s,
        )
        est.append(float((rows[:, 5] * w).mean()))
        plain.append(float(rows[:, 5].mean()))
    true, se = float(errors.mean()), np.std(est) / math.sqrt(len(est))
    assert abs(np.mean(est) - true) < 4 * se + 0.01 * true
    assert np.mean(plain) > true * 1.2


def test_slices() -> None:
    true = np.full((8, 3), 1.0)
    predicted = true.copy()
    predicted[4:] = 1.2
    slices = np.array([5, 5, 5, 5, 9, 9, 9, 9])
    e = float(tonemap(np.array([1.2]))[0] - tonemap(np.array([1.0]))[0])
    found = score(predicted, true, slices=slices)
    assert found.psnr_db == pytest.approx((60 + -20 * math.log10(e)) / 2)
    predicted[:4] = 1.1
    found = score(predicted, true, slices=slices)
    assert found.relmse == pytest.approx(math.sqrt(0.1**2 * 0.2**2) / (1 + RELMSE_EPS))
    one = score(predicted, true, slices=np.zeros(8, int))
    pooled = score(predicted, true)
    assert (one.psnr_db, one.relmse) == pytest.approx((pooled.psnr_db, pooled.relmse))
    order = np.random.default_rng(0).permutation(8)
    assert score(predicted[order], true[order], slices=slices[order]).psnr_db == pytest.approx(
        found.psnr_db
    )


def test_presets() -> None:
    for sizes in PRESETS.values():
        costs = [(s.macs, s.nbytes) for s in sizes.values()]
        assert costs == sorted(costs)
    for nbytes in (2000, 10_000, 100_000, 10**6, 10**7, 10**8):
        for macs in (300, 700, 1500, None):
            try:
                found = within_budget(macs, nbytes)
            except BudgetError:
                continue
            for s in found.values():
                assert s.nbytes <= nbytes
                assert macs is None or s.macs <= macs
    # more of either never gives less
    for macs in (700, 1500, None):
        best = {"grid": 0, "compact": 0}
        for nbytes in range(5_000, 3_000_000, 50_000):
            try:
                found = within_budget(macs, nbytes)
            except BudgetError:
                continue
            for f, s in found.items():
                assert s.nbytes >= best[f], (macs, nbytes, f)
                best[f] = s.nbytes
    with pytest.raises(BudgetError, match="did you mean medium"):
        preset("grid", "mediun")
    with pytest.raises(BudgetError, match="at least"):
        within_budget(1, 1)
    for bad in (0, -1, True, 1.5):
        with pytest.raises(BudgetError, match="positive whole number"):
            within_budget(bad)  # type: ignore[arg-type]
