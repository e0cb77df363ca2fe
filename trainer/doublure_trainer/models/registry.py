"""Which module reads which family's specification, and how weights enter and leave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from doublure_bridge.models import CompactSpec, GridSpec, ModelSpec
from numpy.typing import NDArray

from .base import StandIn
from .compact import Compact
from .grid import Grid

__all__ = [
    "FAMILIES",
    "ModelCost",
    "build",
    "cost",
    "export_tensors",
    "load_tensors",
    "round_tensors",
]

FAMILIES: dict[str, type[StandIn]] = {"compact": Compact, "grid": Grid}
"""Family name -> torch module. A new family is one module, one specification, one entry here."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a specification costs to store and to draw.

    Attributes:
        macs: Multiply-accumulates a pixel in the network.
        fetches: Filtered texture fetches a pixel.
        nbytes: Bytes of all tensors.
        parameters: Learned numbers.
    """

    macs: int
    fetches: int
    nbytes: int
    parameters: int


def build(spec: ModelSpec, *, generator: torch.Generator | None = None) -> StandIn:
    """A freshly initialised module for a specification, float32, on the CPU.

    Args:
        generator: Source of the initial weights; the same state gives the same weights.
    """
    return FAMILIES[spec.family](spec, generator=generator)


def cost(spec: GridSpec | CompactSpec) -> ModelCost:
    """Size and cost a pixel of a specification."""
    parameters = sum(int(np.prod(t.shape)) for t in spec.tensors().values())
    return ModelCost(spec.macs, spec.fetches, spec.nbytes, parameters)


def export_tensors(module: StandIn, spec: ModelSpec) -> dict[str, NDArray[np.generic]]:
    """The module's weights as a specification stores them: its order, dtypes and layouts.

    This rounds (planes to float16). Whatever is validated must be loaded back from here, so that
    what was scored is what is drawn.

    Raises:
        ValueError: The module was not built from `spec`.
    """
    return round_tensors(module.layout(list(module.parameters())), spec)


def round_tensors(
    arrays: Mapping[str, torch.Tensor], spec: ModelSpec
) -> dict[str, NDArray[np.generic]]:
    """Torch tensors in the specification's layout to NumPy arrays in its dtypes, copied."""
    wanted = spec.tensors()
    if list(arrays) != list(wanted):
        raise ValueError(f"module: expected tensors {list(wanted)}, got {list(arrays)}")
    out: dict[str, NDArray[np.generic]] = {}
    for name, tensor in wanted.items():
        array = arrays[name].detach().cpu().numpy()
        if array.shape != tensor.shape:
            raise ValueError(f"{name}: expected shape {tensor.shape}, got {array.shape}")
        out[name] = np.array(array, dtype=tensor.dtype, order="C", copy=True)
    return out


def load_tensors(module: StandIn, tensors: Mapping[str, NDArray[np.generic]]) -> None:
    """Put stored tensors into a module, in place.

    Raises:
        ValueError: Names or shapes are not the module's.
    """
    wanted = module.spec.tensors()
    if set(tensors) != set(wanted):
        raise ValueError(f"tensors: expected {sorted(wanted)}, got {sorted(tensors)}")
    for name, tensor in wanted.items():
        if tuple(tensors[name].shape) != tensor.shape:
            raise ValueError(
                f"{name}: expected shape {tensor.shape}, got {tuple(tensors[name].shape)}"
            )
    module.load(
        {name: torch.from_numpy(np.asarray(a, dtype=np.float32)) for name, a in tensors.items()}
    )
