"""Slices and replay: what trains, what is held out, and that memory is bounded and even."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from doublure_trainer.replay import Replay
from doublure_trainer.slices import HELD_OUT, TEST, TRAIN, FramePlan, Plan, SlicePlan


def rows_at(t: float, n: int = 256, *, seed: int = 0, colour: float = 0.5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = np.full((n, 6), colour, dtype=np.float32)
    rows[:, :2] = rng.uniform(-1, 1, (n, 2))
    rows[:, 2] = t
    return rows


def middles(plan: Plan, kind: int) -> list[float]:
    return [(low + high) / 2 for low, high in plan.intervals(kind)]


@pytest.mark.parametrize("count", [17, 18, 31, 64, 100, 128, 1000, 4096])
def test_no_two_slices_that_do_not_train_touch_and_the_ends_train(count: int) -> None:
    kinds = SlicePlan(count).kinds
    assert kinds[0] == TRAIN
    assert kinds[-1] == TRAIN
    held = kinds != TRAIN
    assert not (held[1:] & held[:-1]).any()


def test_shares_are_an_eighth_and_a_sixteenth() -> None:
    kinds = SlicePlan(1024).kinds
    assert (kinds == HELD_OUT).mean() == pytest.approx(1 / 8, abs=0.01)
    assert (kinds == TEST).mean() == pytest.approx(1 / 16, abs=0.01)


@pytest.mark.parametrize("count", [17, 21, 64, 128])
def test_intervals_and_kind_of_agree(count: int) -> None:
    plan = SlicePlan(count)
    for kind, bounds in ((HELD_OUT, plan.held_out), (TEST, plan.test)):
        assert bounds
        for low, high in bounds:
            inside = np.linspace(low, high, 9)[1:-1]
            assert (plan.kind_of(inside) == kind).all()
            outside = np.array([low - 1e-6, high + 1e-6])
            assert (plan.kind_of(outside) == TRAIN).all()


def test_t_beyond_the_range_belongs_to_the_end_slices() -> None:
    assert (SlicePlan(64).kind_of(np.array([-1.5, -1.0, 1.0, 1.5])) == TRAIN).all()


@pytest.mark.parametrize("count", [16, 4097, 64.0, "64"])
def test_a_count_out_of_range_is_refused(count: object) -> None:
    with pytest.raises(ValueError, match="expected an int in 17"):
        SlicePlan(count)  # type: ignore[arg-type]


FRAMES = FramePlan([-1.0, -0.2, 0.5, 1.0], [-0.7, 0.9], [0.1])


def test_a_plan_of_frames_has_a_slice_and_a_stratum_for_each() -> None:
    assert FRAMES.count == 7
    assert FRAMES.kind_of(np.array([-1.0, -0.2, 0.5, 1.0])).tolist() == [TRAIN] * 4
    assert FRAMES.kind_of(np.array([-0.7, 0.9])).tolist() == [HELD_OUT] * 2
    assert FRAMES.kind_of(np.array([0.1])).tolist() == [TEST]
    strata = FRAMES.stratum_of(np.array([-1.0, -0.7, -0.2, 0.1, 0.5, 0.9, 1.0]))
    assert strata.tolist() == list(range(7))
    assert sum(FRAMES.held_out, ()) == pytest.approx((-0.85, -0.45, 0.7, 0.95))
    assert FRAMES.test[0] == pytest.approx((-0.05, 0.3))


def test_frames_that_are_neighbouring_numbers_are_told_apart() -> None:
    low = np.float32(0.25)
    high = np.nextafter(low, np.float32(1))
    plan = FramePlan([float(low)], [float(high)])
    assert plan.kind_of(np.array([low, high])).tolist() == [TRAIN, HELD_OUT]


def test_the_replay_keeps_every_row_of_every_frame_in_its_kind() -> None:
    replay = Replay(FRAMES, train_rows=4 * 100, held_out_rows=2 * 100, test_rows=100)
    for t in (-1.0, -0.2, 0.5, 1.0, -0.7, 0.9, 0.1):
        replay.add(rows_at(t, 100))
    counters = replay.counters
    assert (counters.train, counters.held_out, counters.test) == (400, 200, 100)
    rng = np.random.default_rng(0)
    assert [len(replay.snapshot(kind, 1000, rng)) for kind in (TRAIN, HELD_OUT, TEST)] == [
        400,
        200,
        100,
    ]
    assert set(replay.sample(5000, rng)[:, 2]) == set(np.float32([-1.0, -0.2, 0.5, 1.0]))
    assert replay.coverage(TRAIN) == replay.coverage(HELD_OUT) == 1.0


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        (([], [0.1]), "expected training frames"),
        (([0.0, 1.5],), "every t in"),
        (([0.0, float("nan")],), "every t in"),
        (([0.0, 0.5], [0.5]), "expected each t once, got 0.5 twice"),
    ],
)
def test_a_plan_of_frames_refuses_what_is_not_one(frames: tuple[list[float]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FramePlan(*frames)


def test_held_out_and_test_rows_never_come_back_as_training_rows() -> None:
    plan = SlicePlan(64)
    replay = Replay(plan, train_rows=1 << 14)
    rng = np.random.default_rng(1)
    for t in np.linspace(-1, 1, 400):
        replay.add(rows_at(float(t), 64))
    drawn = replay.sample(20_000, rng)
    assert (plan.kind_of(drawn[:, 2]) == TRAIN).all()
    assert (plan.kind_of(replay.snapshot(HELD_OUT, 5000, rng)[:, 2]) == HELD_OUT).all()
    assert (plan.kind_of(replay.snapshot(TEST, 5000, rng)[:, 2]) == TEST).all()


def test_rows_of_many_t_at_once_are_sorted_like_rows_of_one() -> None:
    plan = SlicePlan(64)
    mixed = np.concatenate([rows_at(float(t), 8) for t in np.linspace(-1, 1, 300)])
    replay = Replay(plan)
    replay.add(np.random.default_rng(2).permutation(mixed))
    kinds = plan.kind_of(mixed[:, 2])
    counters = replay.counters
    assert counters.train == (kinds == TRAIN).sum()
    assert counters.held_out == (kinds == HELD_OUT).sum()
    assert counters.test == (kinds == TEST).sum()


def test_a_slice_seldom_visited_is_drawn_as_often_as_one_visited_a_thousand_times() -> None:
    plan = SlicePlan(64)
    often, seldom = middles(plan, TRAIN)[3], middles(plan, TRAIN)[20]
    replay = Replay(plan, train_rows=1 << 14)
    for i in range(1000):
        replay.add(rows_at(often, 512, seed=i))
    replay.add(rows_at(seldom, 512))
    drawn = replay.sample(20_000, np.random.default_rng(3))
    share = (np.abs(drawn[:, 2] - seldom) < 1e-3).mean()
    assert share == pytest.approx(0.5, abs=0.02)


def test_a_few_rows_of_a_cut_frame_are_not_repeated_as_often_as_a_whole_one() -> None:
    plan = SlicePlan(64)
    whole, cut = middles(plan, TRAIN)[3], middles(plan, TRAIN)[20]
    replay = Replay(plan)
    replay.add(rows_at(whole, 2048))
    replay.add(rows_at(cut, 4))
    drawn = replay.sample(20_000, np.random.default_rng(4))
    assert (np.abs(drawn[:, 2] - cut) < 1e-3).mean() < 0.2


def test_a_full_stratum_goes_on_taking_new_rows_without_growing() -> None:
    replay = Replay(SlicePlan(17), train_rows=1 << 8)
    t = middles(SlicePlan(17), TRAIN)[1]
    for i in range(200):
        replay.add(rows_at(t, 64, colour=float(i)))
    drawn = replay.sample(4000, np.random.default_rng(5))
    newest = np.expm1(drawn[:, 3])
    assert newest.min() > 150
    assert replay.counters.train == 200 * 64


def test_training_colours_are_in_log_space_and_held_out_ones_linear() -> None:
    plan = SlicePlan(64)
    replay = Replay(plan)
    replay.add(rows_at(middles(plan, TRAIN)[5], colour=-7.0))
    replay.add(rows_at(middles(plan, HELD_OUT)[0], colour=-7.0))
    rng = np.random.default_rng(6)
    np.testing.assert_allclose(replay.sample(8, rng)[:, 3:], -np.log(8.0), rtol=1e-6)
    np.testing.assert_array_equal(replay.snapshot(HELD_OUT, 8, rng)[:, 3:], -7.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", range(6))
def test_rows_that_are_not_finite_are_dropped_and_counted(bad: float, column: int) -> None:
    replay = Replay(SlicePlan(64))
    rows = rows_at(0.0, 10)
    rows[3, column] = bad
    assert replay.add(rows) == 9
    assert replay.counters.rejected == 1
    assert np.isfinite(replay.sample(100, np.random.default_rng(7))).all()


def test_rows_outside_the_range_are_dropped() -> None:
    replay = Replay(SlicePlan(64))
    rows = rows_at(0.0, 10)
    rows[0, 0], rows[1, 2] = 1.2, -3.0
    assert replay.add(rows) == 8


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (np.zeros((4, 5), np.float32), r"\(4, 5\)"),
        (np.zeros((4, 6), np.float64), "float64"),
        (np.zeros(6, np.float32), r"\(6,\)"),
        ([[0.0] * 6], "list"),
    ],
)
def test_rows_of_another_shape_or_dtype_are_refused(rows: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Replay(SlicePlan(64)).add(rows)  # type: ignore[arg-type]


def test_an_empty_replay_gives_no_rows() -> None:
    replay = Replay(SlicePlan(64))
    rng = np.random.default_rng(8)
    assert replay.sample(16, rng).shape == (0, 6)
    assert replay.snapshot(HELD_OUT, 16, rng).shape == (0, 6)
    assert replay.add(np.empty((0, 6), np.float32)) == 0
    assert replay.coverage() == 0.0
    assert replay.span(TRAIN) == 0.0


def test_coverage_counts_slices_and_span_counts_eighths() -> None:
    plan = SlicePlan(64)
    replay = Replay(plan)
    chosen = middles(plan, TRAIN)
    for t in chosen[: len(chosen) // 2]:
        replay.add(rows_at(t))
    assert replay.coverage() == pytest.approx(0.5, abs=0.02)
    assert replay.span(TRAIN) == pytest.approx(0.5, abs=0.13)
    replay = Replay(plan)
    for t in chosen[::4]:
        replay.add(rows_at(t))
    assert replay.coverage() == pytest.approx(0.25, abs=0.02)
    assert replay.span(TRAIN) == 1.0


def test_adding_and_drawing_from_two_threads_loses_nothing() -> None:
    replay = Replay(SlicePlan(64), train_rows=1 << 12)
    failures: list[BaseException] = []

    def add(offset: int) -> None:
        try:
            for i in range(200):
                replay.add(rows_at(((i * 7 + offset) % 101) / 50.5 - 1.0, 64))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=add, args=(k,)) for k in (0, 50)]
    for thread in threads:
        thread.start()
    rng = np.random.default_rng(9)
    while any(thread.is_alive() for thread in threads):
        assert np.isfinite(replay.sample(256, rng)).all()
    for thread in threads:
        thread.join()
    assert not failures
    counters = replay.counters
    assert counters.seen == 2 * 200 * 64
    assert counters.train + counters.held_out + counters.test == counters.seen
