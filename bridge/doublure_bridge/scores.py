"""What the scores on the wire mean, in NumPy: the one definition that both sides measure by.

Three figures together, since each alone can be fooled: a tonemapped PSNR hides errors in
highlights, a relative error hides nothing bright but overrates the dark, and neither notices that
a small sun has lost its peak.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["RELMSE_EPSILON", "Scores", "score_image", "tonemap"]

RELMSE_EPSILON = 0.01
"""Added to the squared reference, so that black does not divide by nothing."""

_PEAK_SHARE = 0.001
"""The peak is the mean of this share of the brightest values: a single pixel is noise."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How close a picture is to its reference.

    Attributes:
        psnr_db: PSNR between the tonemapped pictures, peak 1, dB.
        relmse: Mean of (p - c)² / (c² + 0.01), linear.
        peak_ratio: Mean of the brightest 0.1 % of predicted values over that of the reference's.
    """

    psnr_db: float
    relmse: float
    peak_ratio: float

    @property
    def finite(self) -> bool:
        return isfinite(self.psnr_db) and isfinite(self.relmse) and isfinite(self.peak_ratio)

    def to_dict(self) -> dict[str, float]:
        """As `Weights.scores` and `Progress.held_out` carry them."""
        return asdict(self)


def tonemap(color: NDArray[Any]) -> NDArray[np.floating[Any]]:
    """Linear RGB to display values in [0, 1]: c / (1 + c), then the sRGB curve.

    The first is Reinhard's simple operator (Reinhard et al. 2002, eq. 3), the second IEC 61966-2-1.
    """
    c: NDArray[np.floating[Any]] = np.maximum(np.asarray(color, np.float32), 0)
    c = c / (1 + c)
    return np.where(c <= 0.0031308, 12.92 * c, 1.055 * np.power(c, 1 / 2.4) - 0.055)


def score_image(prediction: NDArray[Any], reference: NDArray[Any]) -> Scores:
    """Score linear RGB against its reference; any shape, the same for both.

    Identical pictures score 100 dB, so that the figure stays finite.
    """
    p = np.asarray(prediction, np.float64)
    c = np.asarray(reference, np.float64)
    mse = float(np.mean(np.square(tonemap(p) - tonemap(c), dtype=np.float64)))
    psnr = -10 * np.log10(max(mse, 1e-10)) if isfinite(mse) else float("nan")
    relmse = float(np.mean((p - c) ** 2 / (c * c + RELMSE_EPSILON)))
    count = max(1, round(c.size * _PEAK_SHARE))
    peaks = [float(np.mean(np.partition(v.ravel(), -count)[-count:])) for v in (p, c)]
    return Scores(float(psnr), relmse, peaks[0] / max(peaks[1], 1e-6))
