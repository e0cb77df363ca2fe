"""Validation of received weights: each fault is found, named, and found in the right order."""

from typing import Any

import numpy as np
import pytest
from doublure_bridge import CompactSpec, GridSpec, pack_tensors, spec_to_dict, tensors_digest
from doublure_plugin import Weights, WeightsError
from doublure_plugin.weights import HOLD_BACK_S, Intake, validate_weights

from .fake_trainer import SPEC, tensors, weights

SESSION = b"x" * 16
SOURCE = b"d" * 32
GRID = GridSpec(xy=(3, 4), xt=(2, 4), yt=(2, 3), volume=(2, 3, 4), hidden=4, layers=1)


def check(message: Any, newest: int = 0) -> Weights:
    return validate_weights(
        message, session=SESSION, newest=newest, source=SOURCE, arrived=1.0
    )  # fmt: skip


@pytest.mark.parametrize("spec", [SPEC, GRID])
def test_good_weights_pass(spec: Any) -> None:
    message = weights(SESSION, 3, spec=spec)
    got = check(message, newest=2)
    assert (got.version, got.step, got.seconds, got.source) == (3, 300, 1.5, SOURCE)
    assert got.spec == spec
    assert list(got.tensors) == list(spec.tensors())
    assert got.evaluator is not None
    assert got.evaluator(message.probe_points) == pytest.approx(message.probe_colors)
    assert not any(t.flags.writeable for t in got.tensors.values())


def spoiled(name: str, value: float) -> dict[str, Any]:
    values = tensors(1)
    values[name].flat[5] = value
    return values


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"session": b"y" * 16}, "weights 5 session: expected the open session"),
        ({"version": 4}, "weights 4 version: expected newer than 4, got 4"),
        ({"digest": b"0" * 32}, "weights 5 digest: expected 3030.*damaged on the way"),
        ({"model": {"family": "splat"}}, "weights 5 model.family: expected one of grid, compact"),
        (
            {"model": spec_to_dict(CompactSpec(hidden=9, layers=2))},
            "weights 5 tensor mlp.0.weight: expected",
        ),
        ({"model": spec_to_dict(CompactSpec(hidden=8, layers=3))}, "missing .'mlp.3.bias'"),
        (
            {"values": spoiled("mlp.1.weight", np.nan)},
            r"mlp.1.weight: .*got nan at \(0, 5\)",
        ),
        ({"values": spoiled("mlp.1.bias", np.inf)}, r"tensor mlp.1.bias: .*got inf at \(5,\)"),
        (
            {"probe_colors": np.full((3, 3), 9.0, np.float32)},
            "expected 9 in .*3 of 3 differ",
        ),
        ({"probe_colors": np.full((3, 3), np.nan, np.float32)}, "probes: expected finite values"),
        (
            {"probe_colors": np.zeros((2, 3), np.float32)},
            "probes: expected as many colours as points, and at least one, got 3 points, 2 colours",
        ),
        (
            {"probe_points": np.zeros((0, 3), np.float32), "probe_colors": np.zeros((0, 3), "f")},
            "got 0 points",
        ),
    ],
)
def test_faults_are_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(WeightsError, match=text):
        check(weights(SESSION, 5, **changes), newest=4)


def test_bytes_that_are_no_tensor_file_are_refused() -> None:
    junk = b"junk" * 10
    with pytest.raises(WeightsError, match="weights 5 weights header: expected at most"):
        check(weights(SESSION, 5, tensors=junk))
    cut = pack_tensors(SPEC, tensors(5))[:-4]
    with pytest.raises(WeightsError, match="expected 12 bytes, got 8"):
        check(weights(SESSION, 5, tensors=cut, digest=tensors_digest(cut)))


def test_a_swapped_axis_shows_in_the_probes() -> None:
    """The fault that no shape check finds: a square matrix the wrong way round."""
    right = tensors(1)
    wrong = right | {"mlp.1.weight": np.ascontiguousarray(right["mlp.1.weight"].T)}
    packed = pack_tensors(SPEC, wrong)
    message = weights(
        SESSION, 1, values=right, tensors=packed, digest=tensors_digest(packed)
    )  # fmt: skip
    with pytest.raises(WeightsError, match="read the model differently"):
        check(message)


def test_rounding_passes_the_probes() -> None:
    message = weights(SESSION, 1)
    near = (message.probe_colors * (1 + 1e-4)).astype(np.float32)
    assert check(weights(SESSION, 1, probe_colors=near)).version == 1


def take(intake: Intake, version: int, score: float | None, at: float) -> str | None:
    message = weights(SESSION, version, scores={} if score is None else {"psnr_db": score})
    return intake.take(message, session=SESSION, source=SOURCE, arrived=at)


def used(score: float | None) -> Intake:
    """An intake whose host draws with weights of this score when a session opens again at 100 s."""
    intake = Intake()
    intake.reopen(resumed=False, now=0.0)
    assert take(intake, 9, score, 1.0) is None
    intake.in_use = intake.ready
    intake.reopen(resumed=False, now=100.0)
    return intake


def test_the_newest_held_back_is_ready_when_its_time_is_over() -> None:
    intake = used(35.2)
    before = intake.ready
    assert "24.1 dB against 35.2 dB" in str(take(intake, 1, 24.1, 101.0))
    assert "25.0 dB against 35.2 dB" in str(take(intake, 2, 25.0, 102.0))
    assert intake.release(100.0 + HOLD_BACK_S - 0.001) is None
    assert intake.ready is before
    released = intake.release(100.0 + HOLD_BACK_S)
    assert released is not None
    assert released is intake.ready
    assert (released.version, intake.held_back, intake.rejected) == (2, 2, 0)
    assert intake.release(200.0) is None


def test_better_or_late_weights_are_not_held_back() -> None:
    intake = used(35.2)
    assert take(intake, 1, 24.1, 101.0) is not None
    assert take(intake, 2, 35.2, 102.0) is None
    assert intake.release(200.0) is None
    assert intake.ready is not None
    assert intake.ready.version == 2
    assert take(used(35.2), 1, 24.1, 100.0 + HOLD_BACK_S) is None


@pytest.mark.parametrize(("before", "after"), [(None, 20.0), (35.0, None), (35.0, np.nan)])
def test_missing_scores_hold_nothing_back(before: float | None, after: float | None) -> None:
    assert take(used(before), 1, after, 101.0) is None


def test_held_back_weights_are_dropped_by_the_next_session_and_the_next_source() -> None:
    for end in (lambda i: i.reopen(resumed=True, now=110.0), Intake.forget):
        intake = used(35.2)
        assert take(intake, 1, 24.1, 101.0) is not None
        end(intake)
        assert intake.release(500.0) is None
