"""The compact family: a sine network without textures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from doublure_bridge.models import CompactSpec, ModelSpec
from torch import Tensor, nn

from .base import StandIn

__all__ = ["Compact"]

FIRST_FREQUENCY = 12.0
# SIREN's 30 is meant for images alone, where every frequency is wanted at once; along t, where
# the held-out gaps are, a lower one interpolates instead of oscillating.
HIDDEN_FREQUENCY = 30.0


class Compact(StandIn):
    """SIREN (Sitzmann et al. 2020, "Implicit Neural Representations with Periodic Activations").

    h0 = sin(W0 [x, y, t] + b0), hk = sin(Wk h + bk), o = W h + b. The frequency factor is folded
    into the weights that are learned, as it is in those that are stored: with Adam, whose steps
    do not depend on the gradient's scale, this only rescales the learning rate.
    """

    def __init__(self, spec: ModelSpec, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if not isinstance(spec, CompactSpec):
            raise TypeError(f"Compact: expected a CompactSpec, got {type(spec).__name__}")
        self.spec: CompactSpec = spec
        widths = [spec.inputs, *([spec.hidden] * spec.layers), 3]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
            if i == 0:
                bound = FIRST_FREQUENCY / fan_in
            elif i < spec.layers:
                bound = math.sqrt(6.0 / fan_in)  # sqrt(6/n)/30 in the paper, times its 30
            else:
                bound = math.sqrt(6.0 / fan_in) / HIDDEN_FREQUENCY
            weight = torch.empty(fan_out, fan_in).uniform_(-bound, bound, generator=generator)
            limit = 1.0 / math.sqrt(fan_in)
            bias = torch.empty(fan_out).uniform_(-limit, limit, generator=generator)
            if i < spec.layers:
                bias *= math.pi * math.sqrt(fan_in)  # any phase
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(bias))

    def forward(self, points: Tensor) -> Tensor:
        hidden = points
        last = len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.addmm(bias, hidden, weight.t())
            if i < last:
                hidden = torch.sin(hidden)
        return hidden

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {"compact": list(self.parameters())}

    def layout(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        half = len(self.weights)
        named: dict[str, Tensor] = {}
        for i in range(half):
            named[f"mlp.{i}.weight"] = values[i]
            named[f"mlp.{i}.bias"] = values[half + i]
        return named

    def unlayout(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        half = range(len(self.weights))
        return [
            *(tensors[f"mlp.{i}.weight"] for i in half),
            *(tensors[f"mlp.{i}.bias"] for i in half),
        ]
