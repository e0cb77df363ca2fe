"""From a model to the files of an export."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from doublure_bridge.model_file import ModelFile
from doublure_bridge.models import spec_to_dict

from ..models.reference import evaluate
from .body import inlined, symbol
from .errors import ExportError
from .files import destinations, write_files
from .layout import WORD, layout, pack
from .onnx_graph import onnx_bytes
from .shader import (
    CONSTANT_WORDS,
    SHADER_TARGETS,
    check_points,
    constant_words,
    normalised,
    shader_text,
)
from .variant import Variant, make_variant

__all__ = ["TARGETS", "Exported", "build_files", "export_model", "function_name"]

TARGETS = (*SHADER_TARGETS, "safetensors", "onnx")

_SUFFIX = {"shadertoy": "shadertoy.glsl"}
_RESERVED = {"main", "mainImage", "texture", "sample", "linear", "color", "image", "t", "p"}
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        paths: The files, in the order they were written; the one to start from last.
        variant: The numbers as they are stored there.
        storage: Where a shader has them; "" for files that are not shaders.
        name: The function's name.
    """

    paths: tuple[Path, ...]
    variant: Variant
    storage: str
    name: str


def export_model(
    model: ModelFile,
    target: str,
    *,
    out: Path | None = None,
    precision: str = "fp32",
    storage: str = "",
    name: str = "",
    force: bool = False,
) -> Exported:
    """Write a model for another engine.

    Args:
        target: One of `TARGETS`.
        out: File or directory; None for the working directory.
        precision: One of `PRECISIONS`.
        storage: One of `STORAGES`, for shaders; "" for constants where they fit, else textures.
        name: Name of the function and of the files; "" to make one from the model's.
        force: Replace what is there.
    Raises:
        ExportError: With what is wrong and what to do; nothing has been written then.
    """
    check_target(target)
    name = function_name(name or _from_title(model.name))
    variant = make_variant(model.spec, model.tensors, precision)
    if target in SHADER_TARGETS:
        storage = storage or _best_storage(variant, target)
    elif storage:
        raise ExportError(
            f"--storage {storage}", expected=f"a shader target ({', '.join(SHADER_TARGETS)})"
        )
    contents = build_files(model, variant, target, storage=storage, name=name)
    paths = destinations(list(contents), out, folder=f"{name}-{target}")
    write_files(contents, paths, force=force)
    return Exported(tuple(paths.values()), variant, storage, name)


def check_target(target: str) -> None:
    """Refuse unknown targets.

    Raises:
        ExportError: Naming the nearest one.
    """
    if target in TARGETS:
        return
    near = get_close_matches(target, TARGETS, n=1)
    raise ExportError(
        "--to",
        expected=f"one of {', '.join(TARGETS)}",
        got=target,
        next_step=f"did you mean {near[0]}?" if near else "",
    )


def build_files(
    model: ModelFile, variant: Variant, target: str, *, storage: str, name: str
) -> dict[str, bytes]:
    """The files' contents by name; nothing is written.

    Raises:
        ExportError: The model does not go into this target so.
    """
    if target == "onnx":
        return {f"{name}.onnx": onnx_bytes(model, variant, name=name)}
    if target == "safetensors":
        return _safetensors(model, variant, name)
    text = shader_text(model, variant, target, storage, name=name)
    shader = {f"{name}.{_SUFFIX.get(target, target)}": text.encode()}
    if storage == "constants":
        return shader
    block = pack(variant, network=True).tobytes()
    note = _about(model, variant, name) | _block_layout(variant, name, storage, block)
    return {f"{name}.bin": block, f"{name}.json": _json(note), **shader}


def function_name(name: str) -> str:
    """`name`, if every target can use it.

    Raises:
        ExportError: It is not an identifier everywhere.
    """
    if not _IDENTIFIER.fullmatch(name) or name in _RESERVED or name.startswith("gl_"):
        raise ExportError(
            "--name",
            expected="letters, digits and single underscores, a letter first, no reserved word",
            got=repr(name),
            next_step="for example --name stand_in",
        )
    return name


def _from_title(title: str) -> str:
    """A function name from a model's name: `Sun, low` to `stand_in_sun_low`."""
    words = re.findall(r"[a-z0-9]+", title.lower())
    return "_".join(["stand_in", *words])[:48].rstrip("_")


def _best_storage(variant: Variant, target: str) -> str:
    if target == "shadertoy":
        return "constants"
    if variant.texels:
        fits = inlined(variant, "constants") and constant_words(variant) <= CONSTANT_WORDS[target]
        return "constants" if fits else "textures"
    return "constants" if constant_words(variant) <= CONSTANT_WORDS[target] else "buffers"


def _about(model: ModelFile, variant: Variant, name: str) -> dict[str, Any]:
    """What is the same beside every kind of export."""
    points = check_points(model.parameter)
    colours = evaluate(variant.spec, variant.tensors(), normalised(points, model.parameter))
    return {
        "schema": 1,
        "name": name,
        "source": model.name,
        "source_digest": model.source_digest,
        "model": spec_to_dict(variant.spec),
        "precision": variant.precision,
        "parameter": list(model.parameter),
        "scores_before_rounding": {k: dict(v) if v else None for k, v in model.scores.items()},
        "golden": {
            "meaning": "x, y in [-1, 1] and raw t; linear RGB that these stored numbers give",
            "points": points.tolist(),
            "colours": colours.tolist(),
        },
    }


def _block_layout(variant: Variant, name: str, storage: str, block: bytes) -> dict[str, Any]:
    parts = {p.name: p for p in layout(variant, network=True)}
    network = parts["network"]
    textures = []
    for i, texels in enumerate(variant.texels):
        part = parts[texels.name]
        entry = {
            "tensor": texels.name,
            "offset": part.word * WORD,
            "bytes": texels.stored.nbytes,
            "size": list(reversed(texels.stored.shape[:-1])),
            "format": "rgba8unorm" if texels.eight_bit else "rgba16float",
        }
        if storage == "textures":
            entry |= {"symbol": symbol(name, texels.name), "binding": i + 2}
        if texels.eight_bit:
            entry |= {"scale": texels.scale.tolist(), "plus": texels.offset.tolist()}
        textures.append(entry)
    return {
        "storage": storage,
        "block": {
            "file": f"{name}.bin",
            "bytes": len(block),
            "sha256": hashlib.sha256(block).hexdigest(),
            "endian": "little",
        },
        "network": {
            "offset": network.word * WORD,
            "bytes": network.words * WORD,
            "vector": "float16 x 4" if variant.half_network else "float32 x 4",
            "order": "for every layer, for every four outputs: the bias, then one vector for every "
            "input (padded to four) with the four outputs' weights",
        },
        "textures": textures,
    }


def _safetensors(model: ModelFile, variant: Variant, name: str) -> dict[str, bytes]:
    from safetensors.numpy import save

    tensors: dict[str, Any] = {}
    for texels in variant.texels:
        tensors[texels.name] = np.ascontiguousarray(texels.stored)
        if texels.eight_bit:
            tensors[f"{texels.name}.scale"] = texels.scale
            tensors[f"{texels.name}.offset"] = texels.offset
    kind = np.float16 if variant.half_network else np.float32
    tensors |= {key: np.ascontiguousarray(v.astype(kind)) for key, v in variant.network.items()}
    note = _about(model, variant, name)
    note["tensors"] = {
        key: {"dtype": str(v.dtype), "shape": list(v.shape)} for key, v in tensors.items()
    }
    note["layout"] = {
        "texels": "planes are [rows, columns, 4], the volume [slices along t, rows along y, columns"
        " along x, 4]; plane.xy has columns along x and rows along y, plane.xt columns along x and "
        "rows along t, plane.yt columns along y and rows along t; centre i of N at (2i + 1)/N - 1; "
        "linear, clamped to the edge",
        "8 bits": "value = stored * scale + offset, a channel",
        "network": "weights are [out, in]; inputs are plane.xy, plane.xt, plane.yt, volume, x, y, t"
        " for the grid family and x, y, t for the compact one",
        "t": "normalised: (t - low) / (high - low) * 2 - 1, clamped to [-1, 1]",
        "colour": "sign(o) * (exp(min(|o|, 11)) - 1)",
    }
    metadata = {"doublure": json.dumps(_about(model, variant, name))}
    return {f"{name}.json": _json(note), f"{name}.safetensors": save(tensors, metadata)}


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
