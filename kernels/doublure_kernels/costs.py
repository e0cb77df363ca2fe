"""What a call is expected to take: fitted to a few timed ones, and exact at those.

A sum of costs explains most of it: a call, a pixel, a triangle, a pair that is looked at, a pair
that touches, a triangle in turn. The coefficients are the non-negative ones of least squared
relative error. What remains at the timed calls (threads that are not worth waking, a GPU that is
not full) is interpolated between them in logarithmic sizes, by a Gaussian kernel, and fades out
away from them. Copies need no term of their own: their bytes are so many a pixel and a triangle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["TYPICAL_SHARE", "Model", "Work", "fit", "touching"]

TYPICAL_SHARE = 0.06
"""Of all pairs, those that touch, in scenes of triangles a fifth of the image across."""

_REACH = 13.0  # sigmas: coverage over 1e-6 at half opacity
_SAMPLE = 64  # triangles looked at by `touching`
# Of 1.5 to 6 octaves and noise of .01 to .3 these did well on 110 calls that were not fitted: the
# times expected of one core (AMD EPYC) were off by 16 to 20 % on average, those fitted by 3 to 9.
_OCTAVES = 6.0  # how far a timed call tells about others, in factors of two
_NOISE = 0.05  # of the timed calls, against the spread of what remains
_LIMIT = math.log(2.0)  # what remains corrects by a factor of two at most


@dataclass(frozen=True, slots=True)
class Work:
    """The sizes of a call.

    Attributes:
        batch: Scenes.
        triangles: In each.
        pixels: Of each image.
        share: Of the pairs of a pixel and a triangle, those that touch, 0..1.
    """

    batch: int
    triangles: int
    pixels: int
    share: float = TYPICAL_SHARE

    @property
    def terms(self) -> tuple[float, ...]:
        """What costs are counted by; see `TERMS`."""
        items, each = float(self.batch), float(self.triangles)
        pairs = items * each * self.pixels
        return (
            1.0,
            items * self.pixels,
            items * each,
            pairs,
            pairs * self.share,
            each * self.share,
        )

    @property
    def place(self) -> tuple[float, ...]:
        """Where it lies between others: logarithms of its sizes, in octaves."""
        sizes = (self.batch, self.triangles, self.pixels, self.share)
        return tuple(math.log2(max(float(size), 1e-4)) for size in sizes)


TERMS = ("a call", "a pixel", "a triangle", "a pair", "a touching pair", "a triangle in turn")
"""The last one is latency: what one pixel must wait for, however many pixels there are."""


@dataclass(frozen=True, eq=False)
class Model:
    """Expected times of one backend, for tensors in one place.

    Attributes:
        costs: Nanoseconds for each of `TERMS`.
        places: Of the timed calls, [n, 4]: `Work.place`.
        weights: Of the correction that each of them spreads, [n].
    """

    costs: tuple[float, ...]
    places: tuple[tuple[float, ...], ...] = ()
    weights: tuple[float, ...] = ()

    def ms(self, work: Work) -> float:
        """Milliseconds that a call is expected to take."""
        return _expected(self, work)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"costs": self.costs, "places": self.places, "weights": self.weights}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Model:
        """The other way.

        Raises:
            ValueError, TypeError, KeyError: It is not what `to_dict` gives.
        """
        costs = _numbers(stored["costs"], len(TERMS))
        weights = _numbers(stored["weights"], len(stored["places"]))
        places = tuple(_numbers(place, 4) for place in stored["places"])
        if min(costs) < 0 or max(costs) == 0:
            raise ValueError(f"costs: expected numbers of 0 or more, one over 0, got {costs}")
        return cls(costs, places, weights)


@lru_cache(maxsize=4096)
def _expected(model: Model, work: Work) -> float:
    ns = sum(cost * term for cost, term in zip(model.costs, work.terms, strict=True))
    place = work.place
    correction = 0.0
    for other, weight in zip(model.places, model.weights, strict=True):
        correction += weight * _near(place, other)
    return ns * 1e-6 * math.exp(min(max(correction, -_LIMIT), _LIMIT))


def _near(a: Sequence[float], b: Sequence[float]) -> float:
    return math.exp(-0.5 * sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / _OCTAVES**2)


def fit(works: Sequence[Work], times_ms: Sequence[float]) -> Model:
    """The model of some timed calls.

    Args:
        works: Their sizes; as many as there are terms or more, or the fit is loose.
        times_ms: What each took, over 0.
    """
    times = np.asarray(times_ms, np.float64) * 1e6
    terms = np.array([work.terms for work in works], np.float64)
    scaled = terms / times[:, None]  # so that errors count relatively
    best, costs = math.inf, np.zeros(terms.shape[1])
    # Non-negative least squares by trying all subsets of the terms: 63 small systems.
    for size in range(1, terms.shape[1] + 1):
        for subset in itertools.combinations(range(terms.shape[1]), size):
            some = scaled[:, subset]
            norms = np.linalg.norm(some, axis=0)  # or the largest term alone would have a rank
            if not norms.all():
                continue
            found = np.linalg.lstsq(some / norms, np.ones(len(times)), rcond=None)[0] / norms
            error = float(np.square(some @ found - 1.0).sum())
            if found.min() >= 0 and error < best * 0.999:
                best, costs = error, np.zeros(terms.shape[1])
                costs[list(subset)] = found
    left = np.log(times / (terms @ costs))
    places = tuple(work.place for work in works)
    kernel = np.array([[_near(a, b) for b in places] for a in places])
    weights = np.linalg.solve(kernel + _NOISE * np.eye(len(times)), left)
    return Model(tuple(map(float, costs)), places, tuple(map(float, weights)))


def touching(params: Any, sigma: Any) -> float:
    """About which share of the pairs touch, from a sample of the triangles.

    The area within reach of a triangle is that of the triangle, its circumference times the reach,
    and a disc (Steiner's formula); of it, as much is taken to be in the image as of its box.

    Args:
        params: NumPy [B, T, 10].
        sigma: NumPy [B, T].
    """
    batch, triangles = params.shape[:2]
    count = batch * triangles
    if not count:
        return TYPICAL_SHARE
    # A step that shares a factor with the triangles of an item would look at the same few of them.
    some = (np.arange(min(count, _SAMPLE)) * (max(1, count // _SAMPLE) | 1)) % count
    items, each = some // triangles, some % triangles
    corners = np.asarray(params[items, each, :6], np.float64).reshape(-1, 3, 2)
    reach = _REACH * np.asarray(sigma[items, each], np.float64)
    with np.errstate(all="ignore"):
        edges = np.roll(corners, -1, axis=1) - corners
        twice = np.abs(edges[:, 0, 0] * edges[:, 1, 1] - edges[:, 0, 1] * edges[:, 1, 0])
        around = np.sqrt(np.square(edges).sum(2)).sum(1)
        area = twice / 2 + around * reach + math.pi * reach**2
        low, high = corners.min(1) - reach[:, None], corners.max(1) + reach[:, None]
        seen = np.clip(np.minimum(high, 1.0) - np.maximum(low, 0.0), 0.0, None).prod(1)
        found = seen * np.minimum(area / (high - low).prod(1), 1.0)
    return float(np.nan_to_num(found, nan=0.0).mean())


def _numbers(values: Any, count: int) -> tuple[float, ...]:
    found = tuple(float(value) for value in values)
    if len(found) != count or not all(map(math.isfinite, found)):
        raise ValueError(f"expected {count} finite numbers, got {values}")
    return found
