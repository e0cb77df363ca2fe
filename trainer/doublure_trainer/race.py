"""The race between families: who gets the next step, and who is dropped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Race"]

HEAD_START = 100
# Steps of the default family before the challenger's first, so that the first useful candidate,
# which comes from the default, is not delayed.

_WORST_DB = -1e9  # of weights that are not finite; a number, so that a checkpoint can hold it


class Race:
    """Successive elimination (Jamieson and Talwalkar 2016, "Non-stochastic Best Arm
    Identification") between a default family and one challenger, on the same stream.

    Both are compared after the same number of their own steps, at a few rungs. At each the one
    that is behind by more than the margin is dropped, at the last rung whoever is behind. The
    challenger is given a share of the steps only, so that the likely winner loses little.

    Args:
        families: The default first; one family alone has won already.
        share: Steps of the challenger for each step of the default.
        rungs: Steps at which they are compared, rising.
        margin_db: How far behind one may be and stay, before the last rung.
    """

    def __init__(
        self, families: Sequence[str], *, share: float, rungs: Sequence[int], margin_db: float
    ) -> None:
        self.active = list(families)
        self._share = share
        self._rungs = list(rungs)
        self._margin_db = margin_db
        self._credit = 0.0
        self._records: dict[str, dict[int, float | None]] = {name: {} for name in families}

    @property
    def running(self) -> bool:
        """Whether more than one family is left."""
        return len(self.active) > 1

    @property
    def state(self) -> str:
        """`racing`, or the winner's name."""
        return "racing" if self.running else self.active[0]

    def next(self, steps: Mapping[str, int]) -> str:
        """The family whose turn it is, from the steps that each has done."""
        default = self.active[0]
        if not self.running or steps[default] < HEAD_START:
            return default
        self._credit += self._share
        if self._credit >= 1.0:
            self._credit -= 1.0 + self._share  # the challenger's own turn earns nothing
            return self.active[1]
        return default

    def rung_due(self, family: str, steps: int) -> int | None:
        """The rung at which this family is now to be scored, if it has not been yet."""
        if not self.running or steps not in self._rungs or steps in self._records[family]:
            return None
        return steps

    def record(self, family: str, rung: int, merit: float | None) -> str | None:
        """Note a held-out score at a rung. Returns the family that is dropped, if one is.

        Args:
            merit: `Scores.merit` in dB; None where there was nothing to score on: then the rung
                decides nothing, and the last one decides for the default. Not finite is the worst
                there is.
        """
        if merit is not None and not math.isfinite(merit):
            merit = _WORST_DB
        self._records[family][rung] = merit
        if not self.running or any(rung not in self._records[name] for name in self.active):
            return None
        first, second = (self._records[name][rung] for name in self.active)
        last = rung == self._rungs[-1]
        if first is None or second is None:
            return self._drop(1) if last else None
        margin = 0.0 if last else self._margin_db
        if first + margin < second:
            return self._drop(0)
        if second + margin < first or last:
            return self._drop(1)
        return None

    def drop(self, family: str) -> None:
        """Take a family out, for example one that has diverged."""
        if family in self.active and self.running:
            self._drop(self.active.index(family))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        records = {
            name: {str(r): v for r, v in record.items()} for name, record in self._records.items()
        }
        return {"active": list(self.active), "credit": self._credit, "records": records}

    def restore(self, data: Mapping[str, Any]) -> None:
        """The inverse of `to_dict`."""
        self.active = list(data["active"])
        self._credit = float(data["credit"])
        self._records = {
            name: {int(rung): value for rung, value in record.items()}
            for name, record in data["records"].items()
        }

    def _drop(self, index: int) -> str:
        return self.active.pop(index)
