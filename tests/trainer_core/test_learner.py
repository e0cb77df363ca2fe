"""One learner: it learns, goes back from bad numbers, and goes on from a dump exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from doublure_trainer.learner import DivergedError, Learner
from doublure_trainer.replay import Replay

from .streams import PLAN, small, stream

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def batches() -> list[np.ndarray]:
    replay = Replay(PLAN, train_rows=1 << 15)
    for rows in stream():
        replay.add(rows)
    rng = np.random.default_rng(1)
    return [replay.sample(512, rng) for _ in range(120)]


def learner(family: str = "grid", *, seed: int = 0, **changes: object) -> Learner:
    config = small(**changes)
    spec = config.grid if family == "grid" else config.compact
    return Learner(spec, config, device=CPU, seed=seed)


def run(one: Learner, batches: list[np.ndarray], scores: float = 30.0) -> list[float]:
    losses = []
    for rows in batches:
        losses.append(one.step(rows))
        if one.wants_score:
            one.trial_score(scores)
    return losses


def same(first: Learner, second: Learner) -> bool:
    ours, theirs = first.tensors(), second.tensors()
    return all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


@pytest.mark.parametrize("family", ["grid", "compact"])
def test_the_loss_falls(family: str, batches: list[np.ndarray]) -> None:
    losses = run(learner(family), batches)
    assert np.mean(losses[-10:]) < 0.25 * np.mean(losses[:5])


@pytest.mark.parametrize("family", ["grid", "compact"])
def test_the_same_seed_and_batches_give_the_same_bytes(
    family: str, batches: list[np.ndarray]
) -> None:
    first, second, other = learner(family), learner(family), learner(family, seed=1)
    for one in (first, second, other):
        run(one, batches[:40])
    assert same(first, second)
    assert not same(first, other)


@pytest.mark.parametrize("family", ["grid", "compact"])
@pytest.mark.parametrize("at", [5, 40, 190, 250])
def test_a_dump_goes_on_as_if_nothing_had_happened(
    family: str, at: int, batches: list[np.ndarray]
) -> None:
    # Before the growth (5), in both halves of its trial (40, 190), and after it (250).
    whole, part = learner(family, growth=(20,)), learner(family, growth=(20,))
    scores = {id(one): iter([30.0, math.nan, 31.0]) for one in (whole, part)}

    def go(one: Learner, steps: range) -> None:
        for i in steps:
            one.step(batches[i % len(batches)])
            if one.wants_score:
                one.trial_score(next(scores[id(one)]))

    go(whole, range(at))
    left = list(scores[id(whole)])
    scores = {id(one): iter(left) for one in (whole, part)}
    part.take(*whole.dump())
    go(whole, range(at, 400))
    go(part, range(at, 400))
    assert whole.steps == part.steps
    assert same(whole, part)


def test_a_dump_brings_the_way_back_too(batches: list[np.ndarray]) -> None:
    whole, part = learner("compact"), learner("compact")
    run(whole, batches[:10])
    whole.mark_good()
    run(whole, batches[10:20])
    part.take(*whole.dump())
    for one in (whole, part):
        one.step(np.full((16, 6), np.nan, dtype=np.float32))
        one.step(batches[20])
    assert whole.rollbacks == part.rollbacks == 1
    assert same(whole, part)


def test_moments_are_part_of_a_dump(batches: list[np.ndarray]) -> None:
    one, without = learner("compact"), learner("compact")
    run(one, batches[:10])
    arrays, meta = one.dump(one.state())
    without.take(arrays, {**meta, "states": {"": {"stage": 0, "adam_steps": 0}}})
    one.step(batches[10])
    without.step(batches[10])
    assert not same(one, without)


@pytest.mark.parametrize("family", ["grid", "compact"])
def test_a_loss_that_is_not_finite_goes_back_to_the_good_state(
    family: str, batches: list[np.ndarray]
) -> None:
    one = learner(family)
    run(one, batches[:15])
    one.mark_good()
    good = one.tensors()
    run(one, batches[15:18])
    bad = batches[0].copy()
    bad[0, 3] = np.nan
    assert math.isnan(one.step(bad))
    assert one.rollbacks == 1
    assert one.rate == 0.5
    assert all((one.tensors()[name] == good[name]).all() for name in good)
    assert math.isfinite(one.step(batches[20]))


def test_a_parameter_that_is_not_finite_is_found_and_undone(batches: list[np.ndarray]) -> None:
    one = learner("compact")
    with torch.no_grad():
        # A weight that no gradient shows: it only poisons the average.
        one._average[0][0, 0] = math.inf
    for rows in batches[:64]:
        one.step(rows)
    assert one.rollbacks == 1
    assert one.finite()


def test_training_that_cannot_be_kept_finite_ends_with_an_error() -> None:
    one = learner("compact")
    bad = np.full((16, 6), np.nan, dtype=np.float32)
    for _ in range(12):
        assert math.isnan(one.step(bad))
    with pytest.raises(DivergedError, match="expected a finite loss, got 13 rollbacks"):
        one.step(bad)


def grown(one: Learner) -> bool:
    return tuple(one.module.volume.shape[2:]) == one.spec.volume


@pytest.mark.parametrize(("gain", "kept"), [(3.0, True), (0.1, False), (-3.0, False)])
def test_the_fine_volume_stays_only_if_held_out_rows_gain(
    gain: float, kept: bool, batches: list[np.ndarray]
) -> None:
    one = learner(growth=(20,))
    scores = iter([30.0, 30.0 + gain])
    sizes = set()
    for i in range(340):
        one.step(batches[i % len(batches)])
        if one.wants_score:
            one.trial_score(next(scores))
            sizes.add(tuple(one.module.volume.shape[2:]))
    assert grown(one) == kept
    assert (18, 18, 18) in sizes
    assert one.tensors()["volume"].shape == (18, 18, 18, 4)


def test_without_held_out_data_the_fine_volume_stays(batches: list[np.ndarray]) -> None:
    one = learner(growth=(20,))
    for i in range(340):
        one.step(batches[i % len(batches)])
        if one.wants_score:
            one.trial_score(None)
    assert grown(one)


def test_a_rollback_during_the_trial_ends_it(batches: list[np.ndarray]) -> None:
    one = learner(growth=(5,))
    run(one, batches[:10])
    bad = np.full((16, 6), np.nan, dtype=np.float32)
    one.step(bad)
    assert not one.wants_score
    assert math.isfinite(one.step(batches[0]))
