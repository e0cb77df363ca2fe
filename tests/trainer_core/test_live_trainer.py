"""The live trainer: from a stream of rows to candidates, held-out slices untouched."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from doublure_bridge.scores import score
from doublure_trainer import loop
from doublure_trainer.loop import Candidate, LiveTrainer
from doublure_trainer.models import build, load_tensors
from doublure_trainer.slices import HELD_OUT, TEST, TRAIN

from .streams import PLAN, frame, small, stream


def trainer(directory: Any = None, *, seed: int = 0, **changes: Any) -> LiveTrainer:
    return LiveTrainer(small(**changes), PLAN, directory=directory, seed=seed)


def filled(*args: Any, **changes: Any) -> LiveTrainer:
    one = trainer(*args, **changes)
    for rows in stream():
        one.add_rows(rows)
    return one


def first_candidate(one: LiveTrainer, steps: int = 60) -> Candidate:
    for _ in range(20):
        one.train_steps(steps)
        candidate = one.maybe_candidate()
        if candidate is not None:
            return candidate
    raise AssertionError(f"no candidate: {one.progress().verdict}")


def test_nothing_happens_without_rows() -> None:
    one = trainer()
    assert not one.ready
    report = one.train_slice(0.01)
    assert report.steps == 0
    assert math.isnan(report.loss)
    assert one.maybe_candidate() is None
    assert one.report_scores() is None
    assert one.progress().to_dict()["loss"] is None


def test_it_is_ready_once_the_range_is_covered_a_little() -> None:
    one = trainer(min_coverage=0.5)
    one.add_rows(frame(-1.0))
    assert not one.ready
    for rows in stream():
        one.add_rows(rows)
    assert one.ready


def test_a_stream_becomes_a_candidate_that_is_what_was_scored() -> None:
    one = filled()
    candidate = first_candidate(one)
    assert candidate.spec in one.models
    assert list(candidate.tensors) == list(candidate.spec.tensors())
    module = build(candidate.spec)
    load_tensors(module, candidate.tensors)
    seen = module.evaluate(torch.from_numpy(candidate.points)).numpy()
    np.testing.assert_allclose(seen, candidate.colours, rtol=1e-3, atol=1e-3)
    truth = np.concatenate([frame((a + b) / 2, seed=9) for a, b in one.held_out])
    again = score(module.evaluate(torch.from_numpy(truth[:, :3])).numpy(), truth[:, 3:])
    assert again.psnr_db == pytest.approx(candidate.scores.psnr_db, abs=1.5)


def test_each_publication_is_better_than_the_one_before_on_the_same_rows() -> None:
    one = filled(min_gain_db=0.5)
    published = []
    for _ in range(30):
        one.train_steps(20)
        candidate = one.maybe_candidate()
        if candidate is not None:
            before = one.progress().published_scores
            if before is not None:
                assert candidate.scores.psnr_db >= before.psnr_db + 0.5
            one.published(candidate)
            published.append(candidate)
    assert len(published) >= 3
    assert len({c.step for c in published}) == len(published)
    assert one.progress().published == len(published)
    assert one.last_published() is published[-1]


def test_a_candidate_is_a_snapshot() -> None:
    one = filled()
    candidate = first_candidate(one)
    kept = {name: array.copy() for name, array in candidate.tensors.items()}
    one.train_steps(30)
    assert all((candidate.tensors[name] == kept[name]).all() for name in kept)


def test_training_never_draws_held_out_or_test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    original = loop.Learner.step

    def spy(self: Any, rows: np.ndarray, weights: np.ndarray) -> float:
        drawn.append(rows[:, 2].copy())
        return original(self, rows, weights)

    one = filled()
    monkeypatch.setattr(loop.Learner, "step", spy)
    one.train_steps(50)
    t = np.concatenate(drawn)
    assert (PLAN.kind_of(t) == TRAIN).all()
    assert (PLAN.kind_of(np.linspace(-1, 1, 999)) == HELD_OUT).any()


def test_scoring_does_not_change_what_is_learned() -> None:
    scored, plain = filled(), filled()
    for _ in range(6):
        scored.train_steps(10)
        scored.maybe_candidate()
        plain.train_steps(10)
    assert list(scored._learners) == list(plain._learners)
    for name in scored._learners:
        ours, theirs = (one._learners[name].tensors() for one in (scored, plain))
        assert all(ours[t].tobytes() == theirs[t].tobytes() for t in ours)


def test_test_slices_have_no_say() -> None:
    clean, odd = filled(), trainer()
    for rows in stream():
        if PLAN.kind_of(rows[:1, 2])[0] == TEST:
            rows = rows.copy()
            rows[:, 3:] = 100.0
        odd.add_rows(rows)
    ours, theirs = first_candidate(clean), first_candidate(odd)
    assert ours.scores == theirs.scores
    assert all(
        ours.tensors[name].tobytes() == theirs.tensors[name].tobytes() for name in ours.tensors
    )
    for one, candidate in ((clean, ours), (odd, theirs)):
        one.published(candidate)
    better, worse = clean.report_scores(), odd.report_scores()
    assert better is not None
    assert worse is not None
    assert better.psnr_db > worse.psnr_db + 3


def test_nothing_is_published_before_enough_of_the_range_was_seen() -> None:
    one = trainer(min_coverage=0.01, publish_coverage=0.9)
    for t in np.linspace(-1, -0.4, 60):
        one.add_rows(frame(float(t)))
    assert one.ready
    one.train_steps(30)
    assert one.maybe_candidate() is None
    assert "too little data" in one.progress().verdict


def test_a_host_that_stays_in_a_part_of_the_range_is_served_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "_STALLED_S", 0.0)
    one = trainer(min_coverage=0.01, publish_coverage=0.9)
    for t in np.linspace(-1, 0.0, 60):
        one.add_rows(frame(float(t)))
    assert first_candidate(one).scores.finite


def test_weights_that_are_not_finite_are_never_handed_out() -> None:
    one = filled(family="compact")
    one.train_steps(20)
    with torch.no_grad():
        for average in one._learners["compact"]._average:
            average.fill_(math.nan)
    assert one.maybe_candidate() is None
    assert one.progress().verdict == "not finite"


def test_a_flat_guess_is_not_published() -> None:
    one = filled()
    one.train_steps(1)
    assert one.maybe_candidate() is None
    assert "flat colour" in one.progress().verdict


def test_the_race_ends_with_one_family_that_gets_all_the_time() -> None:
    one = filled()
    assert one.progress().race == "racing"
    one.train_steps(200)
    winner = one.progress().race
    assert winner in ("grid", "planes", "fine", "compact")
    before = one._learners[winner].steps
    one.train_steps(10)
    assert one._learners[winner].steps == before + 10
    assert list(one._learners) == [winner]


@pytest.mark.parametrize("family", ["grid", "compact"])
def test_one_family_alone_can_be_asked_for(family: str) -> None:
    one = filled(family=family)
    assert [spec.family for spec in one.models] == [family]
    assert first_candidate(one).family == family


def test_a_family_that_diverges_leaves_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    original = loop.Learner.step

    def step(self: Any, rows: np.ndarray, weights: np.ndarray) -> float:
        if self.family == "compact":
            rows = np.full_like(rows, np.nan)
        return original(self, rows, weights)

    one = filled(race_rungs=(100,))
    monkeypatch.setattr(loop.Learner, "step", step)
    one.train_steps(250)
    assert one.progress().race == "grid"


def test_rows_can_be_added_while_training() -> None:
    one = filled()
    done = threading.Event()
    failures: list[BaseException] = []

    def feed() -> None:
        try:
            while not done.is_set():
                for rows in stream(16, 64):
                    one.add_rows(rows)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        for _ in range(10):
            one.train_steps(5)
            one.maybe_candidate()
    finally:
        done.set()
        thread.join()
    assert not failures
    assert one.progress().rows_seen > 128 * 512


def test_a_slice_of_training_ends_soon_after_its_time() -> None:
    one = filled()
    report = one.train_slice(0.0)
    assert report.steps == 1
    assert report.samples == one.config.batch


def test_closing_twice_is_fine() -> None:
    one = filled()
    one.close()
    one.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_device_learns_the_same_source() -> None:
    one = LiveTrainer(small(), PLAN, device="cuda")
    for rows in stream():
        one.add_rows(rows)
    assert first_candidate(one).scores.psnr_db > 20
