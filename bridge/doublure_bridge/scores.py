"""What the scores on the wire mean: the one definition that both sides measure by.

Three figures together, since each alone can be fooled: a tonemapped PSNR hides errors in
highlights, a relative error overrates the dark, and neither notices that a small sun has lost
its peak.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["RELMSE_EPS", "Scores", "peak_ratio", "psnr_db", "relmse", "score", "tonemap"]

RELMSE_EPS = 1e-2
# The epsilon of the relative MSE that Monte Carlo denoising reports (Rousselle et al. 2011,
# "Adaptive Sampling and Reconstruction using Greedy Error Minimization"): a colour of 0.1 is
# where it turns from relative into absolute.
PEAK_SHARE = 1e-3
_TINY = 1e-12
_SLICE_LIMIT_DB = 60.0

Colours = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one set of weights on one set of rows.

    Attributes:
        psnr_db: PSNR after tone mapping, in dB (see `tonemap`); 120 at most. Held-out and test
            scores of a job are means over slices (see `score`).
        relmse: Relative mean squared error of linear RGB.
        peak_ratio: Bright end of the prediction over that of the source, 1 is right.
        rows: Rows scored.
    """

    psnr_db: float
    relmse: float
    peak_ratio: float
    rows: int

    @property
    def finite(self) -> bool:
        """Whether all are numbers; weights that are not are never published."""
        return all(math.isfinite(v) for v in (self.psnr_db, self.relmse, self.peak_ratio))

    @property
    def merit(self) -> float:
        """One number to choose between models by: PSNR less the peak's error, both in dB.

        Tone mapping hides how bright a lamp is; a model too coarse for it must not win by that.
        NaN when the scores are not finite.
        """
        if not self.finite or self.peak_ratio <= 0:
            return math.nan
        return self.psnr_db - abs(10.0 * math.log10(self.peak_ratio))

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def tonemap(colour: Colours) -> NDArray[np.float64]:
    """Linear RGB to display values in [0, 1]: Reinhard c/(1 + c), then the sRGB curve.

    Reinhard et al. 2002, "Photographic Tone Reproduction for Digital Images", eq. 3, a channel;
    IEC 61966-2-1. Chosen over clamping at 1 because an error in a highlight should count, and
    over a plain logarithm because the eye looks at the display: the sRGB curve is what makes
    errors in the dark visible. Negative light shows as black.
    """
    light = np.maximum(np.asarray(colour, dtype=np.float64), 0.0)
    with np.errstate(invalid="ignore"):
        light = np.where(np.isinf(light), 1.0, light / (1.0 + light))
    return np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def psnr_db(predicted: Colours, true: Colours) -> float:
    """PSNR of tone-mapped colours, peak 1, in dB; NaN when `predicted` has a NaN."""
    mse = float(np.mean((tonemap(predicted) - tonemap(true)) ** 2))
    return -10.0 * math.log10(max(mse, _TINY)) if math.isfinite(mse) else math.nan


def relmse(predicted: Colours, true: Colours) -> float:
    """mean((p - c)^2 / (c^2 + RELMSE_EPS)) over all channels, linear."""
    return float(np.mean(_relative_errors(predicted, true)))


def peak_ratio(predicted: Colours, true: Colours) -> float:
    """Mean of the brightest thousandth (brightest channel a row), predicted over true.

    Not the maximum: on a few thousand rows that is one pixel's luck. Not the 99.9th percentile:
    where a light covers about a thousandth of the image, that lies on its edge, and one pixel more
    or less makes it another number.
    """
    count = max(1, math.ceil(len(true) * PEAK_SHARE))
    bright, ours = (
        float(np.mean(np.partition(np.max(np.asarray(c, np.float64), axis=1), -count)[-count:]))
        for c in (true, predicted)
    )
    if abs(bright) < _TINY:  # a black image: 1 when ours is black too
        return 1.0 + ours
    return ours / bright


def score(
    predicted: Colours, true: Colours, *, slices: NDArray[np.integer[Any]] | None = None
) -> Scores:
    """All scores of predicted against true linear RGB, both [n, 3] with n > 0.

    Args:
        slices: Number of each row's slice, [n]. With it the PSNR is the mean of the slices' own,
            as a film's is the mean over its frames, each counted as 60 dB at most, and the
            relative MSE their geometric mean: where the source jumps inside one held-out slice,
            nobody can know on which side, and a pooled error would be that slice's and nothing
            else.
    Raises:
        ValueError: Shapes differ or there are no rows.
    """
    if predicted.shape != true.shape or predicted.ndim != 2 or not len(true):
        raise ValueError(f"score: expected two equal [n, 3], got {predicted.shape}, {true.shape}")
    if not np.isfinite(predicted).all():
        return Scores(math.nan, math.nan, math.nan, len(true))
    peak = peak_ratio(predicted, true)
    if slices is None:
        return Scores(psnr_db(predicted, true), relmse(predicted, true), peak, len(true))
    _, which = np.unique(slices, return_inverse=True)
    counts = np.bincount(which)
    mse, relative = (
        np.maximum(np.bincount(which, weights=np.mean(each, axis=1)) / counts, _TINY)
        for each in (
            (tonemap(predicted) - tonemap(true)) ** 2,
            _relative_errors(predicted, true),
        )
    )
    psnr = float(np.mean(np.minimum(-10.0 * np.log10(mse), _SLICE_LIMIT_DB)))
    return Scores(psnr, float(np.exp(np.mean(np.log(relative)))), peak, len(true))


def _relative_errors(predicted: Colours, true: Colours) -> NDArray[np.float64]:
    exact = np.asarray(true, dtype=np.float64)
    difference = np.asarray(predicted, dtype=np.float64) - exact
    return difference**2 / (exact**2 + RELMSE_EPS)
