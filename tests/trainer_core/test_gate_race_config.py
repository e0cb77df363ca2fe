"""Scores, gate, race and settings."""

from __future__ import annotations

import math

import numpy as np
import pytest
from doublure_bridge.models import GridSpec
from doublure_bridge.scores import Scores, peak_ratio, psnr_db, relmse, score, tonemap
from doublure_trainer.config import ConfigError, TrainConfig
from doublure_trainer.gate import GateLimits, constant_scores, judge
from doublure_trainer.race import Entrant, Race

FLOOR = Scores(15.0, 1.0, 0.5, 1000)
LIMITS = GateLimits()


def test_tonemap_is_reinhard_then_srgb() -> None:
    np.testing.assert_allclose(tonemap(np.array([0.0, 1.0, -5.0])), [0.0, 0.735357, 0.0], atol=1e-6)
    assert tonemap(np.array([1e30]))[0] == pytest.approx(1.0)
    assert tonemap(np.array([0.001]))[0] == pytest.approx(12.92 * 0.001 / 1.001)


def test_psnr_of_a_known_error() -> None:
    true = np.full((10, 3), 0.3)
    shift = tonemap(np.array([0.35]))[0] - tonemap(np.array([0.3]))[0]
    assert psnr_db(np.full((10, 3), 0.35), true) == pytest.approx(-20 * math.log10(shift))
    assert psnr_db(true, true) == 120.0


def test_relmse_is_relative_where_bright_and_absolute_where_dark() -> None:
    assert relmse(np.full((4, 3), 110.0), np.full((4, 3), 100.0)) == pytest.approx(0.01, rel=1e-3)
    assert relmse(np.full((4, 3), 0.1), np.zeros((4, 3))) == pytest.approx(1.0)


def test_peak_ratio_looks_at_the_brightest_thousandth() -> None:
    true = np.full((10_000, 3), 0.5)
    true[:10] = 80.0
    dim = true.copy()
    dim[:10] = 20.0
    assert peak_ratio(dim, true) == pytest.approx(0.25)
    assert peak_ratio(np.zeros((5, 3)), np.zeros((5, 3))) == 1.0


def test_colours_that_are_not_finite_score_as_not_finite() -> None:
    bad = np.full((4, 3), 0.5)
    bad[1, 1] = np.inf
    assert not score(bad, np.full((4, 3), 0.5)).finite


def test_scoring_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="expected two equal"):
        score(np.empty((0, 3)), np.empty((0, 3)))


@pytest.mark.parametrize(
    ("candidate", "published", "reason"),
    [
        (Scores(30.0, 0.01, 1.0, 1000), None, ""),
        (Scores(15.5, 0.01, 1.0, 1000), None, "flat colour (PSNR)"),
        (Scores(30.0, 1.0, 1.0, 1000), None, "flat colour (relative MSE)"),
        (Scores(math.nan, 0.01, 1.0, 1000), None, "not finite"),
        (Scores(40.0, math.inf, 1.0, 1000), Scores(30.0, 0.01, 1.0, 1000), "not finite"),
        (Scores(30.2, 0.01, 1.0, 1000), Scores(30.0, 0.01, 1.0, 1000), ""),
        (Scores(30.04, 0.009, 1.0, 1000), Scores(30.0, 0.01, 1.0, 1000), "PSNR gains too little"),
        (Scores(30.2, 0.012, 1.0, 1000), Scores(30.0, 0.01, 1.0, 1000), "relative MSE"),
        (Scores(36.0, 0.012, 1.0, 1000), Scores(30.0, 0.01, 1.0, 1000), ""),
        (Scores(31.0, 0.009, 0.85, 1000), Scores(30.0, 0.01, 1.0, 1000), "peak ratio"),
        (Scores(31.0, 0.009, 1.2, 1000), Scores(30.0, 0.01, 1.0, 1000), "peak ratio"),
        (Scores(31.0, 0.009, 0.7, 1000), Scores(30.0, 0.01, 0.6, 1000), ""),
        (Scores(31.0, 0.009, 0.0, 1000), Scores(30.0, 0.01, 0.6, 1000), "peak ratio"),
    ],
)
def test_the_gate(candidate: Scores, published: Scores | None, reason: str) -> None:
    verdict = judge(candidate, published, FLOOR, limits=LIMITS)
    assert verdict.passed == (reason == "")
    assert reason in verdict.reason


def test_the_floor_is_the_mean_colour() -> None:
    true = np.random.default_rng(1).uniform(0, 1, (500, 3)).astype(np.float32)
    found = constant_scores(true)
    assert found.psnr_db == pytest.approx(
        psnr_db(np.broadcast_to(true.mean(axis=0), true.shape), true), abs=1e-4
    )
    # A constant scored against itself has no spread to beat: nothing passes by luck.
    assert not judge(found, None, found, limits=LIMITS).passed


def race() -> Race:
    return Race(
        {"grid": Entrant(1.0, (50, 100))}, {"compact": Entrant(0.25, (50, 100))}, margin_db=1.0
    )


def test_a_challenger_far_behind_is_dropped_at_its_first_rung() -> None:
    contest = race()
    steps = {"grid": 200, "compact": 50}
    assert contest.due(steps) == ["grid", "compact"]
    assert contest.judge({"grid": 30.0, "compact": 20.0}) == ["compact"]
    assert contest.state == "grid"


def test_a_score_that_is_not_finite_loses() -> None:
    contest = race()
    assert contest.judge({"grid": math.nan, "compact": 10.0}) == ["grid"]


def test_a_race_goes_on_from_its_plain_data() -> None:
    contest = race()
    contest.judge({"grid": 30.0, "compact": 30.0})
    again = race()
    again.restore(contest.to_dict())
    assert again.judge({"grid": 30.0, "compact": 29.9}) == ["compact"]


def test_settings_round_trip() -> None:
    config = TrainConfig(batch=512, growth=(10, 20), family="grid")
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert TrainConfig.from_dict({}) == TrainConfig()
    assert TrainConfig.from_dict({"growth": []}).growth == ()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"bach": 512}, "config.bach: expected a known setting; did you mean batch?"),
        ({"zzz": 1}, "known: family"),
        ({"batch": 512.0}, "config.batch: expected a whole number in 16..131072, got 512.0"),
        ({"batch": True}, "got True"),
        ({"batch": 0}, "expected a whole number in 16"),
        ({"ema": "0.9"}, "config.ema: expected a number in 0..0.99999, got '0.9'"),
        ({"ema": math.nan}, "got nan"),
        ({"family": "gird"}, "did you mean grid?"),
        ({"growth": [5, 5]}, "config.growth: expected rising step numbers"),
        ({"growth": 5}, "config.growth"),
        ({"race_rungs": []}, "config.race_rungs"),
        ({"grid": {"family": "grid", "version": 1, "xx": 3}}, "config.grid.model.xx"),
        ({"grid": {"family": "compact", "version": 1}}, "sizes of the grid model"),
        ({"grid": 5}, "config.grid"),
        ([], "expected a mapping, got list"),
    ],
)
def test_settings_that_are_wrong_are_named(data: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict(data)  # type: ignore[arg-type]
    assert text in str(caught.value)


def test_sizes_can_be_given_as_plain_data() -> None:
    sizes = {"family": "grid", "version": 1, "xy": [8, 8], "xt": [4, 8], "yt": [4, 8]}
    config = TrainConfig.from_dict({"grid": {**sizes, "volume": [4, 4, 4]}})
    assert config.grid == GridSpec(xy=(8, 8), xt=(4, 8), yt=(4, 8), volume=(4, 4, 4))
