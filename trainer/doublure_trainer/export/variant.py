"""A model's numbers as one export stores them: whole, in half precision, or in 8 bits.

Whatever the target, the arithmetic is float32 on the decoded numbers; only what is stored differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from doublure_bridge.models import GridSpec, ModelSpec

from .errors import ExportError
from .rounding import Levels, choose_levels, round_network

__all__ = ["ACTIVATIONS", "PRECISIONS", "Texels", "Variant", "activation", "make_variant", "widths"]

Array: TypeAlias = npt.NDArray[Any]

_LARGEST_HALF = 32752.0
"""Half of what float16 holds: rounding a layer moves its weights a little."""

PRECISIONS = ("fp32", "fp16", "int8")

ACTIVATIONS = {"relu": "max({0}, {1}(0.0, 0.0, 0.0, 0.0))", "sine": "sin({0})"}
"""Activation -> shader text of one vector; {0} is the value and {1} the vector type's name."""

_BY_FAMILY = {"grid": "relu", "compact": "sine"}


@dataclass(frozen=True, slots=True)
class Texels:
    """One texture as it is stored: value = stored * scale + offset, a channel.

    Attributes:
        name: The tensor's name, `plane.xy` and so on.
        stored: float16 or uint8, [rows, columns, 4] or [slices, rows, columns, 4].
        scale: float32 [4]; ones where `stored` is float16.
        offset: float32 [4]; zeros where `stored` is float16.
    """

    name: str
    stored: Array
    scale: Array
    offset: Array

    @property
    def eight_bit(self) -> bool:
        return self.stored.dtype == np.uint8

    @property
    def count(self) -> int:
        """Texels in all."""
        return self.stored.size // 4

    def values(self) -> Array:
        """What a reader finds there, float64, shaped as `stored`."""
        return self.stored.astype(np.float64) * self.scale + self.offset.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Variant:
    """A model as one export stores it.

    Attributes:
        precision: One of `PRECISIONS`.
        texels: Textures in the specification's order; none for families without.
        network: `mlp.*` tensors, float32, already rounded to what is stored.
    """

    spec: ModelSpec
    precision: str
    texels: tuple[Texels, ...]
    network: Mapping[str, Array]

    @property
    def half_network(self) -> bool:
        """Whether every number of the network is one that float16 can hold."""
        return self.precision != "fp32"

    def tensors(self) -> dict[str, Array]:
        """Every tensor as a reader of this export finds it: float64 texels, float32 network."""
        return {t.name: t.values() for t in self.texels} | dict(self.network)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored numbers, without padding."""
        size = 2 if self.half_network else 4
        network = sum(a.size for a in self.network.values()) * size
        return network + sum(t.stored.nbytes for t in self.texels)


def activation(spec: ModelSpec) -> str:
    """The hidden layers' activation: a key of `ACTIVATIONS`.

    Raises:
        ExportError: The specification names one that no exporter knows.
    """
    name = str(getattr(spec, "activation", _BY_FAMILY.get(spec.family, spec.family)))
    if name not in ACTIVATIONS:
        raise ExportError(
            f"{spec.family} model: activation",
            expected=f"one of {', '.join(ACTIVATIONS)}",
            got=repr(name),
        )
    return name


def widths(spec: ModelSpec) -> list[int]:
    """Values before, between and after the network's layers."""
    return [spec.inputs, *([spec.hidden] * spec.layers), 3]


def make_variant(spec: ModelSpec, tensors: Mapping[str, Array], precision: str) -> Variant:
    """Round a model's tensors to a precision.

    Raises:
        ExportError: Unknown precision, 8 bits of a family without texels, a tensor of another
            shape than the specification's, or weights beyond float16.
    """
    if precision not in PRECISIONS:
        raise ExportError("--precision", expected=", ".join(PRECISIONS), got=precision)
    for name, wanted in spec.tensors().items():
        if name not in tensors or tensors[name].shape != wanted.shape:
            got = list(tensors[name].shape) if name in tensors else "none"
            raise ExportError(f"tensor {name}", expected=list(wanted.shape), got=got)
    textures = [name for name in spec.tensors() if not name.startswith("mlp.")]
    if precision == "int8" and not textures:
        raise ExportError(
            f"--precision int8 of a {spec.family} model",
            expected="a family with texels",
            got="network weights only, which 8 bits spoil",
            next_step="use --precision fp16: half the size of fp32",
        )
    levels: Mapping[str, Levels] = {}
    if precision == "int8":
        assert isinstance(spec, GridSpec)
        levels = choose_levels(spec, tensors, activation(spec))
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    texels = []
    for name in textures:
        if name in levels:
            chosen = levels[name]
            texels.append(Texels(name, chosen.stored, chosen.scale, chosen.offset))
        else:
            texels.append(Texels(name, tensors[name].astype(np.float16), ones, zeros))
    network: dict[str, Array]
    if precision == "fp32":
        network = {k: v.astype(np.float32) for k, v in tensors.items() if k.startswith("mlp.")}
    else:
        _check_half(tensors)
        stored = {t.name: t.values() for t in texels}
        network = round_network(spec, tensors, stored, activation(spec))
    return Variant(spec, precision, tuple(texels), network)


def _check_half(tensors: Mapping[str, Array]) -> None:
    for name, value in tensors.items():
        largest = float(np.abs(value).max())
        if largest > _LARGEST_HALF:
            raise ExportError(
                f"tensor {name}",
                expected=f"values that float16 can hold, to {_LARGEST_HALF:g}",
                got=f"{largest:g}",
                next_step="use --precision fp32",
            )
