"""The determinism probe finds what depends on more than t, and passes what does not."""

from typing import Any

import numpy as np
import pytest
from doublure_plugin import NondeterministicSourceError, probe_determinism


def still(t: float) -> np.ndarray[Any, Any]:
    return np.full((4, 6, 3), t, np.float32)


def test_a_source_of_t_alone_passes() -> None:
    drawn: list[float] = []

    def draw(t: float) -> np.ndarray[Any, Any]:
        drawn.append(t)
        return still(t)

    assert probe_determinism(draw, (2.0, 5.0), samples=4) == 0.0
    assert len(drawn) == 12
    assert all(2.0 <= t <= 5.0 for t in drawn)
    for first, between, second in zip(drawn[::3], drawn[1::3], drawn[2::3], strict=True):
        assert first == second != between


def test_noise_is_refused_and_placed() -> None:
    frames = iter(range(100))

    def draw(t: float) -> np.ndarray[Any, Any]:
        pixels = still(t)
        pixels[1, 5, 2] += 0.25 * next(frames)
        return pixels

    text = (
        r"source at t = 0.5: expected the same image each time it is drawn, "
        r"got a difference of 0.5 at pixel \(5, 1\), channel 2; 1 pixels differ; freeze what"
    )
    with pytest.raises(NondeterministicSourceError, match=text):
        probe_determinism(draw, (0.0, 1.0))


def test_feedback_from_another_parameter_is_refused() -> None:
    last = [0.0]

    def draw(t: float) -> np.ndarray[Any, Any]:
        pixels = still(t + 0.1 * last[0])
        last[0] = t
        return pixels

    with pytest.raises(NondeterministicSourceError, match="a difference of"):
        probe_determinism(draw, (0.0, 1.0))


def test_a_nan_never_equals_itself_and_a_buffer_may_be_reused() -> None:
    with pytest.raises(NondeterministicSourceError, match="a difference of inf"):
        probe_determinism(lambda t: still(t) * np.nan, (0.0, 1.0))
    buffer = np.zeros((4, 6, 3), np.float32)

    def draw(t: float) -> np.ndarray[Any, Any]:
        buffer[:] = t
        return buffer

    assert probe_determinism(draw, (0.0, 1.0)) == 0.0


def test_the_tolerance_is_in_colour() -> None:
    frames = iter(range(100))
    assert probe_determinism(
        lambda t: still(t) + 1e-3 * (next(frames) % 2), (0.0, 1.0), samples=1, tolerance=0.01
    ) == pytest.approx(0.0, abs=1e-2)
    sizes = iter([4, 4, 5])
    with pytest.raises(NondeterministicSourceError, match=r"the same size twice, \[4, 4, 3\]"):
        probe_determinism(lambda _: np.zeros((next(sizes), 4, 3)), (0.0, 1.0))
