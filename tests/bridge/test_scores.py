"""The scores that both sides measure by, on cases that can be worked out by hand."""

import numpy as np
import pytest
from doublure_bridge.scores import RELMSE_EPSILON, score_image, tonemap


def test_tonemap_is_reinhard_then_srgb() -> None:
    # 1 -> 1/2; sRGB of 1/2 is 1.055 * 0.5^(1/2.4) - 0.055.
    np.testing.assert_allclose(tonemap(np.array([-1.0, 0.0, 1.0])), [0, 0, 0.735357], atol=1e-6)
    # 0.002 lies on the linear toe: 12.92 * 0.002 / 1.002.
    np.testing.assert_allclose(tonemap(np.array([0.002])), [0.0257884], atol=1e-6)
    assert tonemap(np.array([1e30]))[0] == pytest.approx(1.0)


def test_a_uniform_error_gives_the_psnr_of_its_size() -> None:
    reference = np.full((8, 8, 3), 1.0)
    prediction = np.full((8, 8, 3), 1.2)
    difference = float((tonemap(prediction) - tonemap(reference))[0, 0, 0])
    scores = score_image(prediction, reference)
    assert scores.psnr_db == pytest.approx(-20 * np.log10(difference), abs=1e-4)
    assert scores.relmse == pytest.approx(0.2**2 / (1 + RELMSE_EPSILON))
    assert scores.peak_ratio == pytest.approx(1.2)


def test_identical_pictures_score_a_finite_hundred() -> None:
    picture = np.random.default_rng(1).random((16, 16, 3))
    scores = score_image(picture, picture)
    assert (scores.psnr_db, scores.relmse, scores.peak_ratio) == (100.0, 0.0, 1.0)
    assert scores.finite


def test_a_lost_peak_shows_where_psnr_does_not() -> None:
    """A sun of 3 pixels cut from 80 to 20: the tonemapped score stays high, the peak does not."""
    reference = np.full((64, 64, 3), 0.3)
    reference[30, 30:33] = 80.0
    prediction = np.minimum(reference, 20.0)
    scores = score_image(prediction, reference)
    assert scores.psnr_db > 50
    assert scores.peak_ratio < 0.4


def test_non_finite_predictions_are_never_finite_scores() -> None:
    reference = np.full((4, 4, 3), 0.5)
    for bad in (np.nan, np.inf):
        prediction = reference.copy()
        prediction[1, 2, 0] = bad
        with np.errstate(all="ignore"):
            assert not score_image(prediction, reference).finite
