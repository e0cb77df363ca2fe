"""Rounding that loses little: texels to 8 bits, and a network to float16.

Both ask what the rounding does to the result rather than to the number. A texel's four channels
are rounded together, each up or down, so that the error falls where the network hardly looks. A
layer's weights are rounded one input after another, and what each loses the inputs still to come
make up for, as far as they can over a sample of points: the method of Frantar et al. 2022, "GPTQ:
Accurate Post-Training Quantization for Generative Pre-trained Transformers", section 3, after a
least-squares fit of the whole layer to the unrounded one.

Measured on grid models trained for 20 s (plasma, fbm, edges, sun; test slices): DECIBELS
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from doublure_bridge.models import LOG_LIMIT, GridSpec, ModelSpec
from torch.nn import functional

__all__ = ["Levels", "choose_levels", "nearest_levels", "round_network", "sample_points"]

Array: TypeAlias = npt.NDArray[Any]

_SAMPLES = 16384
_RIDGE = 1e-6
_CELLS = {2: 16, 3: 7}
_PRIOR = 4.0
_CORNERS = np.array(list(np.ndindex(2, 2, 2, 2)), np.float64)

_AXES = {"plane.xy": (0, 1), "plane.xt": (0, 2), "plane.yt": (1, 2), "volume": (0, 1, 2)}

ACTIVATION_FUNCTIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "relu": (lambda v: np.maximum(v, 0.0), lambda v: (v > 0).astype(np.float64)),
    "sine": (np.sin, np.cos),
}
"""Activation -> itself and its derivative."""


@dataclass(frozen=True, slots=True)
class Levels:
    """One texture in 8 bits: value = stored * scale + offset, a channel; scale, offset [4]."""

    stored: Array
    scale: Array
    offset: Array

    def values(self) -> Array:
        return self.stored.astype(np.float64) * self.scale + self.offset.astype(np.float64)


def sample_points() -> Array:
    """Points in [-1, 1]^3, float64 [n, 3]: the R3 sequence (Roberts 2018), always the same."""
    root = 1.22074408460575947536  # x^4 = x + 1
    steps = root ** -np.arange(1, 4, dtype=np.float64)
    return (0.5 + np.arange(1, _SAMPLES + 1)[:, None] * steps) % 1.0 * 2.0 - 1.0


def network_inputs(spec: ModelSpec, tensors: Mapping[str, Array], points: Array) -> Array:
    """What the network sees at points, float64 [n, inputs]."""
    if not isinstance(spec, GridSpec):
        return points
    found = []
    for name, axes in _AXES.items():
        texels = torch.from_numpy(np.moveaxis(tensors[name].astype(np.float64), -1, 0)[None].copy())
        shape = (1, len(points), *([1] * (len(axes) - 1)), len(axes))
        grid = torch.from_numpy(np.ascontiguousarray(points[:, axes])).reshape(shape)
        looked_up = functional.grid_sample(
            texels, grid, mode="bilinear", padding_mode="border", align_corners=False
        )
        found.append(looked_up.reshape(4, -1).T.numpy())
    return np.concatenate([*found, points], axis=1)


def nearest_levels(texels: Array) -> Levels:
    """The whole range of each channel in 255 equal steps, every value at its nearest level."""
    scale, offset = _range(texels)
    stored = np.rint(np.clip((texels.astype(np.float64) - offset) / scale, 0, 255))
    return Levels(stored.astype(np.uint8), scale, offset)


def choose_levels(
    spec: GridSpec, tensors: Mapping[str, Array], activation: str
) -> dict[str, Levels]:
    """Every texture in 8 bits, each texel's channels rounded together.

    Args:
        activation: Key of `ACTIVATION_FUNCTIONS`.
    """
    points = sample_points()
    slopes = _slopes(spec, tensors, points, activation)
    levels = {}
    for i, name in enumerate(_AXES):
        part = slopes[:, :, 4 * i : 4 * i + 4]
        metric = np.einsum("nca,ncb->nab", part, part)
        place = points[:, _AXES[name][::-1]]  # as the texture's own axes: slices, rows, columns
        levels[name] = _together(tensors[name], _local(metric, place, tensors[name].shape[:-1]))
    return levels


def round_network(
    spec: ModelSpec,
    tensors: Mapping[str, Array],
    stored: Mapping[str, Array],
    activation: str,
) -> dict[str, Array]:
    """The network in float16 numbers (as float32 arrays) that suits the texels as stored.

    Args:
        tensors: The model as learned.
        stored: Its texels as they will be read.
    """
    apply = ACTIVATION_FUNCTIONS[activation][0]
    points = sample_points()
    exact = network_inputs(spec, tensors, points)
    ours = network_inputs(spec, {**tensors, **stored}, points)
    rounded: dict[str, Array] = {}
    for i in range(spec.layers + 1):
        weight, bias = f"mlp.{i}.weight", f"mlp.{i}.bias"
        layer = np.concatenate([tensors[weight], tensors[bias][:, None]], axis=1, dtype=np.float64)
        target = _with_one(exact) @ layer.T
        chosen = _round_layer(layer, _with_one(ours), target)
        rounded[weight] = np.ascontiguousarray(chosen[:, :-1], np.float32)
        rounded[bias] = np.ascontiguousarray(chosen[:, -1], np.float32)
        if i < spec.layers:
            exact, ours = apply(target), apply(_with_one(ours) @ chosen.T)
    return rounded


def _with_one(inputs: Array) -> Array:
    return np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)


def _round_layer(layer: Array, inputs: Array, target: Array) -> Array:
    """Float16 numbers, [outputs, inputs], whose products with `inputs` come close to `target`."""
    gram = inputs.T @ inputs
    gram[np.diag_indices_from(gram)] += _RIDGE * np.trace(gram) / len(gram)
    left = layer.T + np.linalg.solve(gram, inputs.T @ (target - inputs @ layer.T))
    # The heaviest inputs first: those after them can still make up for what they lose.
    order = np.argsort(-np.diag(gram))
    factor = np.linalg.cholesky(np.linalg.inv(gram[np.ix_(order, order)])).T
    left = left[order]
    for j in range(len(left)):
        rounded = left[j].astype(np.float16).astype(np.float64)
        error = (left[j] - rounded) / factor[j, j]
        left[j + 1 :] -= factor[j, j + 1 :, None] * error
        left[j] = rounded
    result = np.empty_like(left)
    result[order] = left
    return result.T


def _range(texels: Array) -> tuple[Array, Array]:
    values = texels.astype(np.float64).reshape(-1, 4)
    low, high = values.min(axis=0), values.max(axis=0)
    scale = np.maximum((high - low) / 255.0, 1e-12).astype(np.float32)
    return scale, low.astype(np.float32)


def _local(metric: Array, place: Array, shape: tuple[int, ...]) -> Array:
    """The mean of `metric` around each texel, float64 [texels, 4, 4], from samples at `place`.

    Over cells with a few dozen samples each, and a little of the mean over all.
    """
    cells = tuple(min(size, _CELLS[len(shape)]) for size in shape)
    counts = np.array(cells)
    cell = np.minimum(((place + 1.0) / 2.0 * counts).astype(np.intp), counts - 1)
    index = np.ravel_multi_index(tuple(cell.T), cells)
    total = np.zeros((int(np.prod(cells)), 4, 4))
    np.add.at(total, index, metric)
    everywhere = total.sum(axis=0) / len(metric)
    number = np.bincount(index, minlength=len(total))[:, None, None]
    local = (total + _PRIOR * everywhere) / (number + _PRIOR)
    axes = [np.arange(size) * count // size for size, count in zip(shape, cells, strict=True)]
    owner = np.ravel_multi_index(tuple(np.meshgrid(*axes, indexing="ij")), cells)
    found: Array = local[owner.ravel()]
    return found


def _together(texels: Array, weight: Array) -> Levels:
    """Round each texel's four channels up or down so that e' `weight` e is least."""
    scale, offset = _range(texels)
    position = np.clip((texels.reshape(-1, 4).astype(np.float64) - offset) / scale, 0.0, 255.0)
    low = np.minimum(np.floor(position), 254.0)
    part = position - low
    metric = weight * np.outer(scale, scale).astype(np.float64)
    metric += 1e-3 / 4.0 * np.trace(metric, axis1=1, axis2=2)[:, None, None] * np.eye(4)
    best = np.full(len(part), np.inf)
    chosen = np.zeros_like(part)
    for corner in _CORNERS:
        error = part - corner
        cost = np.einsum("na,nab,nb->n", error, metric, error, optimize=True)
        better = cost < best
        best[better] = cost[better]
        chosen[better] = corner
    stored = (low + chosen).astype(np.uint8).reshape(texels.shape)
    return Levels(stored, scale, offset)


def _slopes(spec: GridSpec, tensors: Mapping[str, Array], points: Array, activation: str) -> Array:
    """How display values move with the network's inputs, float64 [n, 3, inputs]."""
    apply, derivative = ACTIVATION_FUNCTIONS[activation]
    value = network_inputs(spec, tensors, points)
    slope: Array | None = None
    for i in range(spec.layers + 1):
        weight = tensors[f"mlp.{i}.weight"].astype(np.float64)
        value = value @ weight.T + tensors[f"mlp.{i}.bias"]
        slope = (
            np.broadcast_to(weight, (len(points), *weight.shape))
            if slope is None
            else np.einsum("oh,nhi->noi", weight, slope)
        )
        if i < spec.layers:
            slope = slope * derivative(value)[:, :, None]
            value = apply(value)
    assert slope is not None
    # Of the display: |o| = log(1 + c), Reinhard's c / (1 + c) moves by exp(-|o|), the curve by
    # about light^(1/2.4 - 1), which is kept from growing without limit in the dark.
    light = 1.0 - np.exp(-np.minimum(np.abs(value), LOG_LIMIT))
    shown = (1.0 - light) * np.maximum(light, 0.01) ** (1 / 2.4 - 1.0)
    return slope * shown[:, :, None]
