"""The race: favourites first, then challengers one by one; one is left whatever happens."""

from __future__ import annotations

import json

from doublure_trainer.race import Entrant, Race
from hypothesis import given, settings
from hypothesis import strategies as st

RUNGS = (4, 8, 16)


def race() -> Race:
    return Race(
        {"grid": Entrant(1.0, RUNGS), "planes": Entrant(1.0, RUNGS)},
        {"compact": Entrant(0.25, RUNGS), "fine": Entrant(1.0, RUNGS, 30.0)},
        margin_db=1.5,
    )


MERIT = st.one_of(st.none(), st.floats(10, 50), st.just(float("nan")))


@settings(deadline=None, max_examples=200)
@given(st.lists(MERIT, min_size=40, max_size=40), st.integers(0, 200))
def test_one_is_left_and_a_restored_race_ends_alike(
    merits: list[float | None], restored_at: int
) -> None:
    contest, steps = race(), dict.fromkeys(("grid", "planes", "compact", "fine"), 0)
    scores, gone = iter(merits), set()
    for turn in range(400):
        if turn == restored_at:
            again = race()
            again.restore(json.loads(json.dumps(contest.to_dict())))
            contest = again
        name = contest.next(steps)
        assert name not in gone
        steps[name] += 1
        if due := contest.due(steps):
            dropped = contest.judge({n: next(scores, 20.0) for n in due})
            gone |= set(dropped)
            assert not gone & set(contest.active)
    assert len(contest.active) == 1
    assert contest.state == contest.active[0]


def test_favourites_run_side_by_side_before_any_challenger() -> None:
    contest, steps = race(), dict.fromkeys(("grid", "planes", "compact", "fine"), 0)
    for _ in range(6):
        steps[contest.next(steps)] += 1
    assert steps == {"grid": 3, "planes": 3, "compact": 0, "fine": 0}


def test_a_good_winner_meets_no_fine_grid_and_is_asked_once() -> None:
    for merit, left in ((35.0, ["grid"]), (25.0, ["grid", "fine"])):
        contest = race()
        contest.drop("planes")
        contest.drop("compact")
        steps = {"grid": 20, "fine": 0}
        assert contest.due(steps) == ["grid"]
        contest.judge({"grid": merit})
        assert contest.active == left
        assert contest.due(steps) == []


def test_a_challenger_gets_its_share_from_when_it_starts() -> None:
    contest, steps = race(), {"grid": 16, "compact": 0, "fine": 0}
    contest.drop("planes")
    assert contest.due(steps) == []
    for _ in range(15):
        steps[contest.next(steps)] += 1
    assert steps["compact"] == 3
    assert steps["grid"] == 28
