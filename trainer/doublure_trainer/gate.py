"""The gate: what may be published, and the probes that prove it arrived whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from doublure_bridge.models import ModelSpec
from doublure_bridge.scores import Scores, score
from numpy.typing import NDArray

from .models.reference import evaluate

__all__ = ["FLOOR_GAIN_DB", "GateLimits", "Verdict", "constant_scores", "golden_probes", "judge"]

FLOOR_GAIN_DB = 1.0
"""How much better than one flat colour the first published weights must be, in dB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """How the three scores are weighed; see the same names in `TrainConfig`."""

    min_gain_db: float = 0.05
    relmse_tolerance: float = 0.05
    peak_tolerance: float = 0.1


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a candidate may be published, and why not if not."""

    passed: bool
    reason: str = ""


def judge(
    candidate: Scores, published: Scores | None, floor: Scores, *, limits: GateLimits
) -> Verdict:
    """Compare a candidate with what is published, all scored on the same rows.

    Args:
        published: Scores of the weights that are out; None before the first publication.
        floor: Scores of the best flat colour (`constant_scores`); the first must beat it.
    """
    if not candidate.finite:
        return Verdict(False, "not finite")
    if published is None:
        if candidate.psnr_db < floor.psnr_db + FLOOR_GAIN_DB:
            return Verdict(False, "no better than one flat colour (PSNR)")
        if candidate.relmse >= floor.relmse:
            return Verdict(False, "no better than one flat colour (relative MSE)")
        return Verdict(True)
    if not published.finite:
        return Verdict(True)
    if candidate.psnr_db < published.psnr_db + limits.min_gain_db:
        return Verdict(False, "PSNR gains too little")
    # One pixel on the wrong side of a lamp's edge can double the relative MSE of a good image, so
    # a gain in PSNR buys some: as much in amplitude as it gains itself.
    bought = 10.0 ** ((candidate.psnr_db - published.psnr_db) / 20.0)
    if candidate.relmse > published.relmse * (1.0 + limits.relmse_tolerance) * bought:
        return Verdict(False, "relative MSE is worse")
    if _peak_error(candidate) > _peak_error(published) + limits.peak_tolerance:
        return Verdict(False, "peak ratio is worse")
    return Verdict(True)


def constant_scores(true: NDArray[np.float32], slices: NDArray[np.int64] | None = None) -> Scores:
    """Scores of the mean colour of some rows, [n, 3], as the prediction for all of them.

    Args:
        slices: Number of each row's slice, [n]; see `doublure_bridge.scores.score`.
    """
    flat = np.broadcast_to(true.mean(axis=0, dtype=np.float64), true.shape)
    return score(flat, true, slices=slices)


def golden_probes(
    spec: ModelSpec, tensors: Mapping[str, NDArray[np.generic]], *, n: int = 32, seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Points and the colours that any reader must find there, evaluated in float64 NumPy.

    From the stored (rounded) tensors and without torch, so that a reader is held to the
    specification and not to a second run of the same code. The first points are the corners of
    [-1, 1]^3, where clamping shows.

    Returns:
        Points [n, 3] and linear RGB [n, 3], float32.
    """
    rng = np.random.default_rng([seed, 0x50524F42])
    points = rng.uniform(-1.0, 1.0, (n, 3)).astype(np.float32)
    corners = np.array([[x, y, t] for t in (-1, 1) for y in (-1, 1) for x in (-1, 1)], np.float32)
    points[: min(n, 8)] = corners[:n]
    return points, evaluate(spec, tensors, points).astype(np.float32)


def _peak_error(scores: Scores) -> float:
    return abs(math.log(scores.peak_ratio)) if scores.peak_ratio > 0 else math.inf
