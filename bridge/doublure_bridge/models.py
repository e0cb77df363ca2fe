"""Model specifications: what travels beside weights so that any reader can evaluate them.

A specification names the family, its sizes and every tensor's dtype, shape and layout. The NumPy
evaluator (plugin), the torch module (trainer) and the shader (plugin, export) are three readings
of the same text, and tests hold them together. `docs/protocol.md` repeats the arithmetic in words.

All families map (x, y, t) in [-1, 1] (pixel centres, x right, y down) to a pre-activation o in
log space, and colour = sign(o) * expm1(min(|o|, LOG_LIMIT)): linear RGB, unclamped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from itertools import pairwise
from math import prod
from typing import Any, ClassVar, TypeAlias

from .errors import SpecError

__all__ = [
    "LOG_LIMIT",
    "MODEL_FAMILIES",
    "CompactSpec",
    "GridSpec",
    "ModelSpec",
    "TensorSpec",
    "model_spec_from_dict",
    "spec_to_dict",
]

LOG_LIMIT = 11.0
"""Largest |o| before expm1: e^11 - 1 = 59873, just inside float16, so no reader overflows."""

SPEC_VERSION = 1
_MAX_SIDE = 4096
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor: dtype as NumPy spells it, C-contiguous, little-endian."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * (2 if self.dtype == "float16" else 4)


def _mlp_tensors(inputs: int, hidden: int, layers: int) -> dict[str, TensorSpec]:
    """`layers` hidden layers and a linear output to 3; weights are [out, in]."""
    widths = [inputs, *([hidden] * layers), 3]
    tensors: dict[str, TensorSpec] = {}
    for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
        tensors[f"mlp.{i}.weight"] = TensorSpec("float32", (fan_out, fan_in))
        tensors[f"mlp.{i}.bias"] = TensorSpec("float32", (fan_out,))
    return tensors


def _mlp_macs(inputs: int, hidden: int, layers: int) -> int:
    return inputs * hidden + hidden * hidden * (layers - 1) + hidden * 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSpec:
    """Three feature planes, one small feature volume and a tiny ReLU network.

    Inputs of the network, in order: plane.xy(x, y), plane.xt(x, t), plane.yt(y, t),
    volume(x, y, t), four channels each, then x, y, t themselves: 19 values.

    Planes are float16 [rows, columns, 4], the volume float16 [T, Y, X, 4]; a texel centre i of N
    lies at (2i + 1)/N - 1. Lookups are linear between texel centres and clamped at the edge, as a
    GPU's linear sampler with clamp-to-edge does it.

    Attributes:
        xy: Texels of plane.xy as (rows along y, columns along x).
        xt: Texels of plane.xt as (rows along t, columns along x).
        yt: Texels of plane.yt as (rows along t, columns along y).
        volume: Texels as (slices along t, rows along y, columns along x).
        hidden: Width of each hidden layer.
        layers: Number of hidden layers.
    """

    family: ClassVar[str] = "grid"
    inputs: ClassVar[int] = 19
    fetches: ClassVar[int] = 4

    xy: tuple[int, int]
    xt: tuple[int, int]
    yt: tuple[int, int]
    volume: tuple[int, int, int]
    hidden: int = 16
    layers: int = 2

    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor by name, in the order it is stored."""
        return {
            "plane.xy": TensorSpec("float16", (*self.xy, 4)),
            "plane.xt": TensorSpec("float16", (*self.xt, 4)),
            "plane.yt": TensorSpec("float16", (*self.yt, 4)),
            "volume": TensorSpec("float16", (*self.volume, 4)),
            **_mlp_tensors(self.inputs, self.hidden, self.layers),
        }

    @property
    def macs(self) -> int:
        """Multiply-accumulates a pixel in the network; the four filtered fetches come on top."""
        return _mlp_macs(self.inputs, self.hidden, self.layers)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors().values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactSpec:
    """A sine network (SIREN; Sitzmann et al. 2020): no textures, a few kilobytes.

    h0 = sin(W0 [x, y, t] + b0), hk = sin(Wk h + bk), o = W h + b. The usual frequency factor is
    folded into the stored weights, so that a reader has nothing to multiply.

    Attributes:
        hidden: Width of each hidden layer.
        layers: Number of hidden layers, the first included.
    """

    family: ClassVar[str] = "compact"
    inputs: ClassVar[int] = 3
    fetches: ClassVar[int] = 0

    hidden: int = 32
    layers: int = 3

    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor by name, in the order it is stored."""
        return _mlp_tensors(self.inputs, self.hidden, self.layers)

    @property
    def macs(self) -> int:
        """Multiply-accumulates a pixel; the sines come on top."""
        return _mlp_macs(self.inputs, self.hidden, self.layers)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors().values())


ModelSpec: TypeAlias = GridSpec | CompactSpec

MODEL_FAMILIES: dict[str, type[GridSpec] | type[CompactSpec]] = {
    spec.family: spec for spec in (GridSpec, CompactSpec)
}
"""Family name -> specification class. A new family is one class and one entry here."""


def spec_to_dict(spec: ModelSpec) -> dict[str, Any]:
    """Plain data for a message header or a JSON file: family, version and sizes."""
    sizes = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(spec).items()}
    return {"family": spec.family, "version": SPEC_VERSION, **sizes}


def model_spec_from_dict(data: object) -> ModelSpec:
    """Read and check a specification written by `spec_to_dict`.

    Raises:
        SpecError: Unknown family, version or key, a size out of range, or over 64 MiB in all.
    """
    if not isinstance(data, Mapping):
        raise SpecError("model", expected="a mapping with a family", got=type(data).__name__)
    family = data.get("family")
    known = ", ".join(MODEL_FAMILIES)
    if not isinstance(family, str) or family not in MODEL_FAMILIES:
        raise SpecError(
            "model.family", expected=f"one of {known}", got=repr(family), next_step=_update_hint
        )
    version = data.get("version")
    if version != SPEC_VERSION:
        raise SpecError(
            "model.version", expected=SPEC_VERSION, got=repr(version), next_step=_update_hint
        )
    cls = MODEL_FAMILIES[family]
    templates: dict[str, int] = {"xy": 2, "xt": 2, "yt": 2, "volume": 3}
    names = [f.name for f in fields(cls)]
    sizes: dict[str, Any] = {}
    for key, value in data.items():
        if key in ("family", "version"):
            continue
        if key not in names:
            near = get_close_matches(str(key), names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
            raise SpecError(f"model.{key}", expected="a known key", next_step=hint)
        if key in templates:
            count = templates[key]
            if not (
                isinstance(value, list | tuple)
                and len(value) == count
                and all(type(v) is int and 1 <= v <= _MAX_SIDE for v in value)
            ):
                raise SpecError(
                    f"model.{key}", expected=f"{count} sizes in 1..{_MAX_SIDE}", got=repr(value)
                )
            sizes[key] = tuple(value)
        else:
            limit = 8 if key == "layers" else 256
            if not (type(value) is int and 1 <= value <= limit):
                raise SpecError(f"model.{key}", expected=f"a size in 1..{limit}", got=repr(value))
            sizes[key] = value
    missing = [n for n in templates if n in names and n not in sizes]
    if missing:
        raise SpecError("model", expected=f"sizes for {', '.join(missing)}", got="none")
    spec = cls(**sizes)
    if spec.nbytes > _MAX_BYTES:
        raise SpecError("model", expected=f"at most {_MAX_BYTES} bytes", got=f"{spec.nbytes}")
    return spec


_update_hint = "update the older side: pip install -U doublure"
