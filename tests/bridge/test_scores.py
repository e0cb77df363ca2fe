"""The scores that both sides measure by, on cases that can be worked out by hand."""

import numpy as np
import pytest
from doublure_bridge.scores import RELMSE_EPS, score, tonemap


def rows(value: float, count: int = 64) -> np.ndarray:
    return np.full((count, 3), value)


def test_tonemap_is_reinhard_then_srgb() -> None:
    # 1 -> 1/2; sRGB of 1/2 is 1.055 * 0.5^(1/2.4) - 0.055.
    np.testing.assert_allclose(tonemap(np.array([-1.0, 0.0, 1.0])), [0, 0, 0.735357], atol=1e-6)
    # 0.002 lies on the linear toe: 12.92 * 0.002 / 1.002.
    np.testing.assert_allclose(tonemap(np.array([0.002])), [0.0257884], atol=1e-6)
    assert tonemap(np.array([1e30]))[0] == pytest.approx(1.0)


def test_a_uniform_error_gives_the_psnr_of_its_size() -> None:
    difference = float(tonemap(np.array([1.2]))[0] - tonemap(np.array([1.0]))[0])
    scores = score(rows(1.2), rows(1.0))
    assert scores.psnr_db == pytest.approx(-20 * np.log10(difference), abs=1e-4)
    assert scores.relmse == pytest.approx(0.2**2 / (1 + RELMSE_EPS))
    assert scores.peak_ratio == pytest.approx(1.2)
    assert scores.rows == 64


def test_identical_colours_score_a_finite_limit() -> None:
    colours = np.random.default_rng(1).random((256, 3))
    scores = score(colours, colours)
    assert (scores.psnr_db, scores.relmse, scores.peak_ratio) == (pytest.approx(120), 0.0, 1.0)
    assert scores.finite


def test_a_lost_peak_shows_where_psnr_does_not() -> None:
    """A sun of 3 pixels in 4096 cut from 80 to 20: PSNR stays high, peak and merit do not."""
    reference = rows(0.3, 4096)
    reference[2000:2003] = 80.0
    scores = score(np.minimum(reference, 20.0), reference)
    assert scores.psnr_db > 50
    assert scores.peak_ratio < 0.3
    assert scores.merit < scores.psnr_db - 5


def test_non_finite_predictions_never_have_finite_scores() -> None:
    for bad in (np.nan, np.inf):
        prediction = rows(0.5)
        prediction[7, 2] = bad
        assert not score(prediction, rows(0.5)).finite
