"""What every family's module offers, and the log space they all answer in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from doublure_bridge.models import LOG_LIMIT, ModelSpec
from torch import Tensor, nn

__all__ = ["StandIn", "decode", "encode"]


def encode(colour: Tensor) -> Tensor:
    """Linear RGB to log space: sign(c) log(1 + |c|)."""
    return torch.copysign(torch.log1p(colour.abs()), colour)


def decode(log_colour: Tensor) -> Tensor:
    """Log space to linear RGB: sign(o) expm1(min(|o|, LOG_LIMIT)); NaN stays NaN."""
    return torch.copysign(torch.expm1(log_colour.abs().clamp(max=LOG_LIMIT)), log_colour)


class StandIn(nn.Module, ABC):
    """A model of one specification: rows (x, y, t) to log-space RGB.

    Parameters fall into groups that learn at their own rates (see `groups`).
    """

    spec: ModelSpec

    @abstractmethod
    def forward(self, points: Tensor) -> Tensor:
        """Points x, y, t in [-1, 1], [n, 3], to log-space RGB, [n, 3]."""

    @abstractmethod
    def groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by learning-rate group; together all of `parameters()`, each once."""

    @abstractmethod
    def layout(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """Values shaped as `parameters()` are, in the specification's names, order and layouts.

        Takes values and not the parameters themselves so that averages and moments go the same
        way.
        """

    @abstractmethod
    def unlayout(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The inverse of `layout`: tensors in the specification's layout to `parameters()`'s."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors in the specification's layout into the parameters."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), self.unlayout(tensors), strict=True):
                parameter.copy_(value)

    def evaluate(self, points: Tensor, *, chunk: int = 1 << 16) -> Tensor:
        """Linear RGB [n, 3] of many points, without gradients and with bounded memory."""
        with torch.no_grad():
            return torch.cat([decode(self(part)) for part in _chunks(points, chunk)])


def _chunks(points: Tensor, size: int) -> Iterator[Tensor]:
    for start in range(0, max(1, len(points)), size):
        yield points[start : start + size]
