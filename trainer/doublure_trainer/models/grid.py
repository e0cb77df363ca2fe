"""The grid family: feature planes, a small feature volume and a tiny ReLU network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from doublure_bridge.models import GridSpec, ModelSpec
from torch import Tensor, nn
from torch.nn import functional

from .base import StandIn
from .spline import Taps, taps

__all__ = ["LEAST_VOLUME", "Grid", "Stage", "has_coarse_planes"]

_FEATURE_SCALE = 0.01
# Texels that start as noise stay noisy where few pixels fall: with 0.1 instead, moving hard edges
# came out more ragged (about half a dB less, held out, after 10 s).
_COARSEST = 8  # texels a side below which a volume is not shrunk any further
LEAST_VOLUME = 4
"""Texels a side of a volume that only says roughly where and when."""
_COARSE_XY = 128
_CONTROLS = 32
# Control points a side of the coarse xt and yt planes. Free texels make a path that moves over
# them uneven; smooth ones gained 0.7 to 1.5 dB on hard moving edges.


@dataclass(frozen=True, slots=True)
class Stage:
    """At which resolutions a grid learns.

    Attributes:
        volume: Index into `Grid.volumes()`; 0 is hardly a volume at all.
        fine: Whether every texel of the planes is free, and not a coarser grid's.
    """

    volume: int
    fine: bool


class Grid(StandIn):
    """Planes xy, xt, yt and a volume, looked up linearly, then a ReLU network.

    Tensors are held as `grid_sample` wants them, channels first. With align_corners=False and
    padding_mode="border" its texel centres, clamping and weights are those of a GPU's linear
    sampler with clamp-to-edge, which the specification asks for.

    While it learns, it can be held at coarser resolutions (`set_stage`): with few texels each is
    visited often, so the coarse image is there within a second, and finer texels start from it.
    The coarse xt and yt planes are cubic splines. `layout` always answers at the specification's
    size, so a reader never sees the difference.
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
        self._matrices: dict[tuple[int, int], Tensor] = {}
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
                _lookup(self._texels(self.xt, self.spec.xt), x_t),
                _lookup(self._texels(self.yt, self.spec.yt), y_t),
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

    def volumes(self) -> list[tuple[int, int, int]]:
        """Sizes of the volume to learn at: hardly any, then the specification's halved twice at
        most, and the specification's last."""
        sizes = [self.spec.volume]
        while len(sizes) < 3 and min(sizes[0]) > _COARSEST:
            sizes.insert(0, _triple(max(1, n // 2) for n in sizes[0]))
        return [_triple(min(n, LEAST_VOLUME) for n in self.spec.volume), *sizes]

    def sizes(self, stage: Stage) -> tuple[tuple[int, ...], ...]:
        """Sizes of the parameters xy, xt, yt and volume at a stage."""
        return (*_planes(self.spec, fine=stage.fine), self.volumes()[stage.volume])

    def resized(self, index: int, stage: Stage, value: Tensor) -> Tensor:
        """`value`, shaped as the parameter number `index` is, as it is at a stage."""
        if index >= _TEXTURES:
            return value
        size = self.sizes(stage)[index]
        if index in (1, 2) and size == (self.spec.xy, self.spec.xt, self.spec.yt)[index]:
            return self._texels(value, size)  # from control points to the texels they stand for
        return _resample(value, size)

    def set_stage(self, stage: Stage) -> None:
        """Hold the textures at a stage's resolution, resampled; they become new parameters."""
        for i, name in enumerate(("xy", "xt", "yt", "volume")):
            value = getattr(self, name).detach()
            setattr(self, name, nn.Parameter(self.resized(i, stage, value).clone()))

    def plane_taps(self, texels: tuple[int, ...], controls: tuple[int, ...]) -> tuple[Taps, Taps]:
        """The splines along rows and columns of a plane held as control points."""
        return taps(texels[0], controls[0]), taps(texels[1], controls[1])

    def layout(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        xy, xt, yt, volume, *network = values
        xy, volume = _resample(xy, self.spec.xy), _resample(volume, self.spec.volume)
        xt, yt = self._texels(xt, self.spec.xt), self._texels(yt, self.spec.yt)
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
        found = [
            tensors["plane.xy"].permute(2, 0, 1)[None],
            tensors["plane.xt"].permute(2, 0, 1)[None],
            tensors["plane.yt"].permute(2, 0, 1)[None],
            tensors["volume"].permute(3, 0, 1, 2)[None],
        ]
        textures = (self.xy, self.xt, self.yt, self.volume)
        return [
            *(_resample(v, tuple(p.shape[2:])) for v, p in zip(found, textures, strict=True)),
            *(tensors[f"mlp.{i}.weight"] for i in half),
            *(tensors[f"mlp.{i}.bias"] for i in half),
        ]

    def _texels(self, controls: Tensor, size: tuple[int, ...]) -> Tensor:
        """A plane [1, 4, rows, columns] of its control points; itself where it has texels."""
        if tuple(controls.shape[2:]) == size:
            return controls
        along = [
            self._matrix(n, c, controls) for n, c in zip(size, controls.shape[2:], strict=True)
        ]
        return torch.matmul(torch.matmul(along[0], controls), along[1].t())

    def _matrix(self, texels: int, controls: int, like: Tensor) -> Tensor:
        key = (texels, controls)
        found = self._matrices.get(key)
        if found is None or found.device != like.device:
            found = self._matrices[key] = taps(texels, controls).matrix().to(like.device)
        return found


_TEXTURES = 4  # xy, xt, yt, volume: the first parameters, in the order of registration


def has_coarse_planes(spec: GridSpec) -> bool:
    """Whether this model's coarse planes are any coarser than its fine ones."""
    return _planes(spec, fine=False) != _planes(spec, fine=True)


def _planes(spec: GridSpec, *, fine: bool) -> tuple[tuple[int, ...], ...]:
    sizes: tuple[tuple[int, ...], ...] = (spec.xy, spec.xt, spec.yt)
    if fine:
        return sizes
    limits = (_COARSE_XY, _CONTROLS, _CONTROLS)
    return tuple(
        tuple(min(n, limit) for n in size) for size, limit in zip(sizes, limits, strict=True)
    )


def _triple(sizes: Iterable[int]) -> tuple[int, int, int]:
    first, second, third = sizes
    return first, second, third


def _lookup(texels: Tensor, where: Tensor) -> Tensor:
    """Linear lookup at `where` [n, d] in texels [1, 4, ...]: features first, [4, n]."""
    grid = where.reshape(*([1] * where.shape[1]), *where.shape)
    found = functional.grid_sample(
        texels, grid, mode="bilinear", padding_mode="border", align_corners=False
    )
    return found.reshape(texels.shape[1], len(where))


def _resample(texels: Tensor, size: tuple[int, ...]) -> Tensor:
    if tuple(texels.shape[2:]) == size:
        return texels
    mode = "trilinear" if len(size) == 3 else "bilinear"
    return functional.interpolate(texels, size=size, mode=mode, align_corners=False)
