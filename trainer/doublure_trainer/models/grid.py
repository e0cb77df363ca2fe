"""The grid family: feature planes, a small feature volume and a tiny ReLU network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from doublure_bridge.models import GridSpec, ModelSpec
from torch import Tensor, nn
from torch.nn import functional

from .base import StandIn

__all__ = ["Grid"]

_FEATURE_SCALE = 0.01
# Texels that start as noise stay noisy where few pixels fall: with 0.1 instead, moving hard edges
# came out more ragged (about half a dB less, held out, after 10 s).
_COARSEST = 8  # texels a side below which a volume is not shrunk any further


class Grid(StandIn):
    """Planes xy, xt, yt and a volume, looked up linearly, then a ReLU network.

    Tensors are held as `grid_sample` wants them, channels first. With align_corners=False and
    padding_mode="border" its texel centres, clamping and weights are those of a GPU's linear
    sampler with clamp-to-edge, which the specification asks for.

    The volume can learn at a lower resolution first (`shrink`, `grow`): with few texels each is
    visited often, so the coarse image is there within a second, and finer texels start from it.
    `layout` always answers at the specification's size, so a reader never sees the difference.
    """

    def __init__(self, spec: ModelSpec, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if not isinstance(spec, GridSpec):
            raise TypeError(f"Grid: expected a GridSpec, got {type(spec).__name__}")
        self.spec: GridSpec = spec

        def texels(*size: int) -> nn.Parameter:
            noise = torch.empty(1, 4, *size).uniform_(-1.0, 1.0, generator=generator)
            return nn.Parameter(noise * _FEATURE_SCALE)

        self.xy = texels(*spec.xy)
        self.xt = texels(*spec.xt)
        self.yt = texels(*spec.yt)
        self.volume = texels(*spec.volume)
        widths = [spec.inputs, *([spec.hidden] * spec.layers), 3]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for fan_in, fan_out in pairwise(widths):
            bound = 1.0 / math.sqrt(fan_in)  # torch.nn.Linear's own
            for target, shape in ((self.weights, (fan_out, fan_in)), (self.biases, (fan_out,))):
                start = torch.empty(*shape).uniform_(-bound, bound, generator=generator)
                target.append(nn.Parameter(start))

    def forward(self, points: Tensor) -> Tensor:
        count = len(points)
        if not count:
            return points.new_zeros(0, 3)
        x_t, y_t = points[:, ::2], points[:, 1:]
        features = torch.cat(
            [
                _lookup(self.xy, points[:, :2]),
                _lookup(self.xt, x_t),
                _lookup(self.yt, y_t),
                _lookup(self.volume, points),
                points.t(),
            ]
        )
        hidden = features.t()
        last = len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.addmm(bias, hidden, weight.t())
            if i < last:
                hidden = torch.relu_(hidden)
        return hidden

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {
            "texels": [self.xy, self.xt, self.yt, self.volume],
            "network": [*self.weights, *self.biases],
        }

    def stages(self) -> list[tuple[int, int, int]]:
        """Volume sizes to learn at in turn: halved twice at most, the specification's last."""
        sizes = [self.spec.volume]
        while len(sizes) < 3 and min(sizes[0]) > _COARSEST:
            coarser = [max(1, n // 2) for n in sizes[0]]
            sizes.insert(0, (coarser[0], coarser[1], coarser[2]))
        return sizes

    def resized(self, index: int, stage: int, value: Tensor) -> Tensor:
        """`value`, shaped as the parameter number `index` is, as it is at a stage."""
        if index == _VOLUME_INDEX:
            return _resample(value, self.stages()[stage])
        return value

    def set_stage(self, stage: int) -> None:
        """Hold the volume at a stage's resolution, resampled; it becomes a new parameter."""
        self.volume = nn.Parameter(_resample(self.volume.detach(), self.stages()[stage]))

    def layout(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        xy, xt, yt, volume, *network = values
        volume = _resample(volume, self.spec.volume)
        named = {
            "plane.xy": xy[0].permute(1, 2, 0),
            "plane.xt": xt[0].permute(1, 2, 0),
            "plane.yt": yt[0].permute(1, 2, 0),
            "volume": volume[0].permute(1, 2, 3, 0),
        }
        half = len(self.weights)
        for i in range(half):
            named[f"mlp.{i}.weight"] = network[i]
            named[f"mlp.{i}.bias"] = network[half + i]
        return named

    def unlayout(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        half = range(len(self.weights))
        return [
            tensors["plane.xy"].permute(2, 0, 1)[None],
            tensors["plane.xt"].permute(2, 0, 1)[None],
            tensors["plane.yt"].permute(2, 0, 1)[None],
            _resample(tensors["volume"].permute(3, 0, 1, 2)[None], tuple(self.volume.shape[2:])),
            *(tensors[f"mlp.{i}.weight"] for i in half),
            *(tensors[f"mlp.{i}.bias"] for i in half),
        ]


_VOLUME_INDEX = 3  # xy, xt, yt, volume: the order of registration, hence of parameters()


def _lookup(texels: Tensor, where: Tensor) -> Tensor:
    """Linear lookup at `where` [n, d] in texels [1, 4, ...]: features first, [4, n]."""
    grid = where.reshape(*([1] * where.shape[1]), *where.shape)
    found = functional.grid_sample(
        texels, grid, mode="bilinear", padding_mode="border", align_corners=False
    )
    return found.reshape(texels.shape[1], len(where))


def _resample(volume: Tensor, size: tuple[int, ...]) -> Tensor:
    if tuple(volume.shape[2:]) == size:
        return volume
    return functional.interpolate(volume, size=size, mode="trilinear", align_corners=False)
