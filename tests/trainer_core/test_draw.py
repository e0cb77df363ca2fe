"""Drawing rows by their errors: compiled and in NumPy, evenly and not, and after bad numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from doublure_trainer import kernels_cpu
from doublure_trainer.replay import Replay, _draw
from doublure_trainer.slices import TRAIN

from .streams import PLAN, frame, stream

BUCKETS, CAPACITY = 8, 64


def drawn(
    draw: object, errors: np.ndarray, *, batch: int = 256, tries: int = 4, share: float = 0.7,
    power: float = 0.5, seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    rng = np.random.default_rng(seed)
    slots = BUCKETS * CAPACITY
    stored = np.arange(slots * 6, dtype=np.float32).reshape(slots, 6)
    rows, weights = np.empty((batch, 6), np.float32), np.empty(batch, np.float32)
    chosen = np.empty(batch, np.int64)
    draw(  # type: ignore[operator]
        stored, errors.astype(np.float32), np.arange(BUCKETS), np.full(BUCKETS, CAPACITY), CAPACITY,
        rng.random(2 * batch, dtype=np.float32), tries, rng.random(), np.float32(share),
        np.float32(power), rows, weights, chosen,
    )  # fmt: skip
    assert (rows == stored[chosen]).all()
    return rows, weights, chosen


def some_errors(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).exponential(1.0, BUCKETS * CAPACITY)


@pytest.mark.parametrize("tries", [1, 3, 8])
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_both_draw_the_same(tries: int, share: float) -> None:
    ours = drawn(kernels_cpu.draw, some_errors(), tries=tries, share=share)
    theirs = drawn(_draw, some_errors(), tries=tries, share=share)
    assert (ours[2] == theirs[2]).mean() > 0.98  # a sum that is rounded otherwise moves one
    same = ours[2] == theirs[2]
    np.testing.assert_allclose(ours[1][same], theirs[1][same], rtol=1e-4)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("draw", [kernels_cpu.draw, _draw])
def test_errors_that_are_not_finite_leave_an_even_draw(draw: object, bad: float) -> None:
    errors = some_errors()
    errors[::37] = bad
    _, weights, slots = drawn(draw, errors)
    assert len(np.unique(slots)) > 150
    assert (weights == 1.0).all()
    # Evenly over the buckets too: 32 of 256 in each.
    assert (np.bincount(slots // CAPACITY, minlength=BUCKETS) == 32).all()


@pytest.mark.parametrize("draw", [kernels_cpu.draw, _draw])
def test_rows_are_drawn_in_proportion_to_their_errors(draw: object) -> None:
    errors = np.ones(BUCKETS * CAPACITY)
    hard = np.arange(len(errors)) % 16 == 0
    errors[hard] = 5.0
    total = np.zeros(2)
    for seed in range(200):
        _, weights, slots = drawn(draw, errors, share=1.0, power=1.0, tries=16, seed=seed)
        total += [hard[slots].sum(), (~hard[slots]).sum()]
        assert weights.mean() == pytest.approx(1.0, abs=1e-3)
        assert weights[hard[slots]].mean() == pytest.approx(
            weights[~hard[slots]].mean() / 5.0, rel=1e-3
        )
    # A sixteenth of the rows, five times as likely: 5 of every 20 that are drawn.
    assert total[0] / total.sum() == pytest.approx(0.25, abs=0.025)


def test_only_training_rows_are_drawn_and_new_ones_take_the_mean_error() -> None:
    replay = Replay(PLAN, train_rows=1 << 13)
    for rows in stream(64, 128):
        replay.add(rows)
    one = replay.draw(512, np.random.default_rng(0), tries=4, share=0.8, power=0.5)
    assert (PLAN.kind_of(one.rows[:, 2]) == TRAIN).all()
    replay.learned(one, np.full(512, 9.0, np.float32))
    errors, unknown = replay.errors()
    assert unknown == pytest.approx(3.0)
    assert (errors[one.slots] == 3.0).all()
    t = next(t for t in np.linspace(-0.9, 0.9, 99) if PLAN.kind_of(np.array([t]))[0] == TRAIN)
    before = (replay.errors()[0] == 3.0).sum()
    replay.add(frame(float(t), 64))
    assert (replay.errors()[0] == 3.0).sum() > before
