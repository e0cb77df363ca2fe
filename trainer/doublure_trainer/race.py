"""The race between learners: who gets the next step, and who is dropped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Entrant", "Race"]

_WORST_DB = -1e9  # of weights that are not finite


@dataclass(frozen=True, slots=True)
class Entrant:
    """One learner's terms in the race.

    Attributes:
        share: Steps for each step of the others.
        rungs: Steps at which it is compared, rising.
        below_db: It starts only where the winner so far has no more merit than this.
    """

    share: float
    rungs: tuple[int, ...]
    below_db: float = math.inf


class Race:
    """Successive elimination (Jamieson and Talwalkar 2016, "Non-stochastic Best Arm
    Identification") between learners on the same stream.

    First the favourites run side by side; at a few rungs, numbers of steps, they are compared, and
    whoever is behind the best by more than the margin is dropped. After the last rung one is
    left. Then the challengers come, one after the other, each against what the winner has become
    by then; an unlikely one is given few steps, so that the winner loses little.

    Args:
        favourites: The likeliest first; they have the same rungs. One entrant alone has won.
        challengers: In the order of their turns.
        margin_db: How far behind one may be and stay, at a rung almost as high as the last one;
            more at lower ones.
    """

    def __init__(
        self,
        favourites: Mapping[str, Entrant],
        challengers: Mapping[str, Entrant],
        *,
        margin_db: float,
    ) -> None:
        self._favourites = list(favourites)
        self._terms = {**favourites, **challengers}
        self._margin_db = margin_db
        self.active = list(self._terms)
        self._passed = dict.fromkeys(self._terms, 0)  # rungs that each was compared at
        self._admitted: set[str] = set()  # challengers found worth starting
        self._started: dict[str, int] = {}  # the winner's steps when a challenger started

    @property
    def running(self) -> bool:
        """Whether more than one is left."""
        return len(self.active) > 1

    @property
    def state(self) -> str:
        """`racing`, or the winner's name."""
        return "racing" if self.running else self.active[0]

    def runners(self) -> list[str]:
        """Who takes turns now, the likeliest first."""
        favourites = [name for name in self.active if name in self._favourites]
        return favourites if len(favourites) > 1 else self.active[:2]

    def next(self, steps: Mapping[str, int]) -> str:
        """Whose turn it is, from the steps that each has done: who is furthest behind its share."""
        now = self.runners()
        challenger = now[-1]
        start = self._started.setdefault(challenger, steps[now[0]]) if len(now) > 1 else 0
        if challenger in self._favourites:
            start = 0

        def turns(name: str) -> float:
            if name == challenger:
                return (steps[name] + 1) / self._terms[name].share
            return steps[name] - start + 1

        return min(now, key=turns)

    def due(self, steps: Mapping[str, int]) -> list[str]:
        """Who is to be scored now, to be compared; nobody, most of the time."""
        if not self.running:
            return []
        now = self.runners()
        challenger = now[-1]
        rungs, at = self._terms[challenger].rungs, self._passed[challenger]
        if challenger not in self._favourites and challenger not in self._admitted:
            if self._terms[challenger].below_db < math.inf:
                return now[:1]
            self._admitted.add(challenger)
        slowest = min(steps[n] for n in now if n == challenger or n in self._favourites)
        return now if at < len(rungs) and slowest >= rungs[at] else []

    def judge(self, merits: Mapping[str, float | None]) -> list[str]:
        """Compare those that were due. Returns who is dropped.

        Args:
            merits: `Scores.merit` of each in dB; None where there was nothing to score on: then
                the rung decides nothing, and the last one decides for the first. Not finite is
                the worst there is.
        """
        now = self.runners()
        challenger = now[-1]
        terms = self._terms[challenger]
        known = {
            n: m if math.isfinite(m) else _WORST_DB for n, m in merits.items() if m is not None
        }
        if challenger not in merits:  # is it worth starting?
            if known.get(now[0], math.inf) > terms.below_db:
                return [self._drop(challenger)]
            self._admitted.add(challenger)
            return []
        rung = terms.rungs[self._passed[challenger]]
        for name in now:
            self._passed[name] += 1
        last = rung == terms.rungs[-1]
        if len(known) < len(merits):
            return [self._drop(n) for n in list(merits)[1:]] if last else []
        # Early scores say little: who is behind by 4 dB after 100 steps has won after 500.
        margin = self._margin_db * math.sqrt(terms.rungs[-1] / rung)
        best = max(known, key=lambda n: known[n])  # the first of equals: the likelier one
        behind = [n for n in known if n != best and (last or known[n] + margin < known[best])]
        return [self._drop(n) for n in behind]

    def drop(self, name: str) -> None:
        """Take one out, for example one that has diverged."""
        if name in self.active and self.running:
            self._drop(name)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {
            "active": list(self.active),
            "passed": dict(self._passed),
            "started": dict(self._started),
            "admitted": sorted(self._admitted),
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """The inverse of `to_dict`."""
        self.active = list(data["active"])
        self._passed = {name: int(count) for name, count in data["passed"].items()}
        self._started = {name: int(count) for name, count in data["started"].items()}
        self._admitted = set(data["admitted"])

    def _drop(self, name: str) -> str:
        self.active.remove(name)
        return name
