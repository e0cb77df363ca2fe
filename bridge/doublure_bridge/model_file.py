"""A learned model on disk: weights.safetensors for programs, weights.json for people.

Both hold the same header and the same numbers exactly; `docs/offline-training.md` describes them.
Reading needs neither torch nor the safetensors package.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import BridgeError, ModelFileError
from .models import LOG_LIMIT, GridSpec, ModelSpec, model_spec_from_dict, spec_to_dict
from .tensors import pack_tensors, tensors_metadata, unpack_tensors

__all__ = ["MODEL_SCHEMA", "ModelFile", "read_model", "write_model"]

MODEL_SCHEMA = 1
"""Version of the header; a reader refuses another one."""

WEIGHTS = "weights.safetensors"
READABLE = "weights.json"

_LARGEST_FILE = 1 << 30
_TEMPORARY = ".writing-"
_NOT_HEADER = ("format", "model", "sha256", "arithmetic", "tensors")
# Keys of weights.json that are not the header's.

Array: TypeAlias = npt.NDArray[Any]
ScoreFigures: TypeAlias = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """One model with what is to be known about it.

    Attributes:
        spec: Family and sizes.
        tensors: Exactly the tensors that `spec` names, finite.
        name: What was learned, for people; one line.
        parameter: The source's parameter at t = -1 and at t = +1.
        resolution: Width and height in pixels of what was captured; (0, 0) where there is none.
        source_digest: Digest of the source it was learned from, hexadecimal; "" where unknown.
        seed: Seed of the training.
        steps: Steps of the training.
        scores: Figures by split, `held_out` and `test`, as `Scores.to_dict` gives them; None or
            absent where there are none.
        probes: Golden vectors: points x, y, t, float32 [n, 3], and the linear RGB that any reader
            must find there, float64 [n, 3]; None for none.
        versions: What it was made with, by name.
    """

    spec: ModelSpec
    tensors: Mapping[str, Array]
    name: str
    parameter: tuple[float, float] = (-1.0, 1.0)
    resolution: tuple[int, int] = (0, 0)
    source_digest: str = ""
    seed: int = 0
    steps: int = 0
    scores: Mapping[str, ScoreFigures | None] = field(default_factory=dict)
    probes: tuple[Array, Array] | None = None
    versions: Mapping[str, str] = field(default_factory=lambda: {"doublure": version("doublure")})


def write_model(directory: Path, model: ModelFile) -> Path:
    """Write weights.json and weights.safetensors, each whole or not at all, the latter last.

    Args:
        directory: Created if missing; the same two files there are replaced.
    Returns:
        The path of weights.safetensors.
    Raises:
        ModelFileError: The model's parts do not fit together, or are not finite.
        OSError: The directory cannot be written, or the disk is full; what was there stays.
    """
    header = json.dumps(_header(model), allow_nan=False)
    tensors = {name: np.asarray(model.tensors[name]) for name in model.spec.tensors()}
    digest = _digest(json.dumps(spec_to_dict(model.spec)), header, tensors)
    packed = pack_tensors(model.spec, tensors, metadata={"doublure": header, "sha256": digest})
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / READABLE, "".join(_readable(model, header, digest)).encode())
    _replace(directory / WEIGHTS, packed)
    return directory / WEIGHTS


def read_model(path: Path) -> ModelFile:
    """Read a model, checking its digest.

    Args:
        path: A model directory, or either of its two files.
    Raises:
        ModelFileError: There is none, or it is damaged, not ours or of another schema.
    """
    path = Path(path)
    if path.is_dir():
        path = path / WEIGHTS
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ModelFileError(str(path), expected=f"at most {_LARGEST_FILE} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise ModelFileError(
            str(path),
            expected="a model",
            got=error.strerror or type(error).__name__,
            next_step=f"give a directory with {WEIGHTS}, as `doublure train` writes it",
        ) from error
    try:
        return _from_json(data) if path.suffix == ".json" else _from_safetensors(data)
    except BridgeError as error:
        raise ModelFileError(
            f"{path}: {error.what}",
            expected=error.expected,
            got=error.got,
            next_step=error.next_step,
        ) from error


# --- header --------------------------------------------------------------------------------------


def _header(model: ModelFile) -> dict[str, Any]:
    """The header as plain data, in the order people read it; checks the whole model."""
    _check(model)
    probes = None
    if model.probes is not None:
        points, colours = model.probes
        probes = {"points": _numbers(points), "colours": np.asarray(colours, np.float64).tolist()}
    return {
        "schema": MODEL_SCHEMA,
        "name": model.name,
        "parameter": [float(v) for v in model.parameter],
        "resolution": [int(v) for v in model.resolution],
        "source_digest": model.source_digest,
        "seed": int(model.seed),
        "steps": int(model.steps),
        "scores": {
            key: None if (figures := model.scores.get(key)) is None else dict(figures)
            for key in dict.fromkeys(("held_out", "test", *model.scores))
        },
        "versions": dict(model.versions),
        "golden": probes,
    }


def _parsed_header(data: object) -> dict[str, Any]:
    """Arguments of `ModelFile`, spec and tensors aside."""
    if not isinstance(data, dict):
        raise ModelFileError("header", expected="a map", got=type(data).__name__)
    if data.get("schema") != MODEL_SCHEMA:
        raise ModelFileError(
            "header.schema",
            expected=MODEL_SCHEMA,
            got=repr(data.get("schema")),
            next_step="read it with the version of doublure that wrote it",
        )
    try:
        golden = data["golden"]
        probes = None
        if golden is not None:
            probes = (
                np.array(golden["points"], np.float32),
                np.array(golden["colours"], np.float64),
            )
        return {
            "name": data["name"],
            "parameter": tuple(data["parameter"]),
            "resolution": tuple(data["resolution"]),
            "source_digest": data["source_digest"],
            "seed": data["seed"],
            "steps": data["steps"],
            "scores": dict(data["scores"]),
            "versions": dict(data["versions"]),
            "probes": probes,
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFileError("header", expected="a model's header", got=str(error)) from error


def _check(model: ModelFile) -> None:
    low_high, size = model.parameter, model.resolution
    problems = {
        "name": (isinstance(model.name, str) and model.name.isprintable(), "one line of text"),
        "parameter": (
            len(low_high) == 2
            and all(_is_number(v) for v in low_high)
            and low_high[0] < low_high[1],
            "two finite numbers, rising",
        ),
        "resolution": (
            len(size) == 2 and all(_is_whole(v) for v in size),
            "a width and a height in pixels",
        ),
        "source_digest": (
            isinstance(model.source_digest, str)
            and re.fullmatch("[0-9a-f]*", model.source_digest) is not None,
            "hexadecimal digits",
        ),
        "seed": (_is_whole(model.seed), "a whole number from 0 up"),
        "steps": (_is_whole(model.steps), "a whole number from 0 up"),
        "scores": (
            all(
                figures is None or all(_is_number(v) for v in figures.values())
                for figures in model.scores.values()
            ),
            "finite numbers",
        ),
    }
    for key, (right, expected) in problems.items():
        if not right:
            raise ModelFileError(f"model.{key}", expected=expected, got=repr(getattr(model, key)))
    for name, want in model.spec.tensors().items():
        got = model.tensors.get(name)
        if got is None:
            raise ModelFileError(f"model.tensors.{name}", expected=want.dtype, got="nothing")
        if not np.isfinite(got).all():
            raise ModelFileError(f"model.tensors.{name}", expected="finite numbers")
    if model.probes is not None:
        points, colours = model.probes
        shapes = points.ndim == 2 and points.shape[1] == 3 and points.shape == colours.shape
        if not shapes or not (np.isfinite(points).all() and np.isfinite(colours).all()):
            raise ModelFileError(
                "model.probes",
                expected="finite points [n, 3] and colours [n, 3]",
                got=f"{list(points.shape)} and {list(colours.shape)}",
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.floating | np.integer) and math.isfinite(value)


def _digest(spec: str, header: str, tensors: Mapping[str, Array]) -> str:
    """SHA-256 over specification, header and numbers, the same for both files.

    Over the texts as they were written, and not as this version would write them.
    """
    digest = hashlib.sha256(f"{spec}\0{header}\0".encode())
    for tensor in tensors.values():
        little = tensor.dtype.newbyteorder("<")
        digest.update(np.ascontiguousarray(tensor, little).tobytes())
    return digest.hexdigest()


# --- weights.safetensors -------------------------------------------------------------------------


def _from_safetensors(data: bytes) -> ModelFile:
    metadata = tensors_metadata(data)
    missing = [key for key in ("model", "doublure", "sha256") if key not in metadata]
    if missing:
        raise ModelFileError(
            "metadata", expected="a model of doublure", got=f"no {', '.join(missing)}"
        )
    try:
        plain_spec, plain = json.loads(metadata["model"]), json.loads(metadata["doublure"])
    except (ValueError, RecursionError) as error:
        raise ModelFileError("metadata", expected="JSON", got=str(error)[:80]) from None
    parts = _parsed_header(plain)
    spec = model_spec_from_dict(plain_spec)
    tensors = unpack_tensors(data, spec)
    _verify(_digest(metadata["model"], metadata["doublure"], tensors), metadata["sha256"])
    return _checked(ModelFile(spec=spec, tensors=tensors, **parts))


# --- weights.json --------------------------------------------------------------------------------


def _from_json(data: bytes) -> ModelFile:
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelFileError("file", expected="JSON", got=str(error)[:80]) from None
    parts = _parsed_header(plain)
    spec = model_spec_from_dict(plain.get("model"))
    tensors = {}
    for name, want in spec.tensors().items():
        try:
            tensors[name] = np.array(plain["tensors"][name], np.float64).astype(want.dtype)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFileError(
                f"tensors.{name}", expected=f"{list(want.shape)} numbers", got=str(error)[:80]
            ) from None
        if tensors[name].shape != want.shape:
            raise ModelFileError(
                f"tensors.{name}", expected=list(want.shape), got=list(tensors[name].shape)
            )
    header = json.dumps({key: value for key, value in plain.items() if key not in _NOT_HEADER})
    _verify(_digest(json.dumps(plain["model"]), header, tensors), plain.get("sha256"))
    return _checked(ModelFile(spec=spec, tensors=tensors, **parts))


def _readable(model: ModelFile, header: str, digest: str) -> Iterator[str]:
    """The text of weights.json: header, arithmetic, golden vectors, then the numbers."""
    plain = json.loads(header)
    golden = plain.pop("golden")
    yield '{\n  "format": "doublure model: (x, y, t) to linear RGB",\n'
    yield f'  "model": {json.dumps(spec_to_dict(model.spec))},\n'
    for key, value in plain.items():
        yield f'  "{key}": {json.dumps(value)},\n'
    yield f'  "sha256": "{digest}",\n  "arithmetic": [\n'
    yield ",\n".join(f"    {json.dumps(line)}" for line in arithmetic(model.spec))
    if golden is None:
        yield '\n  ],\n  "golden": null,\n'
    else:
        for key, start in (("points", '\n  ],\n  "golden": {\n'), ("colours", ",\n")):
            rows = ",\n".join(f"      {json.dumps(row)}" for row in golden[key])
            yield f'{start}    "{key}": [\n{rows}\n    ]'
        yield "\n  },\n"
    yield '  "tensors": {\n'
    for i, name in enumerate(model.spec.tensors()):
        start = ",\n    " if i else "    "
        yield f'{start}"{name}": '
        yield _nested(_decimals(np.asarray(model.tensors[name])), "    ")
    yield "\n  }\n}\n"


def arithmetic(spec: ModelSpec) -> list[str]:
    """How any reader computes the colour from x, y, t and the tensors, in a few sentences."""
    lines = [
        "x, y, t are in [-1, 1]: pixel centres, x right, y down; t is the parameter, "
        "-1 at parameter[0] and +1 at parameter[1].",
    ]
    if isinstance(spec, GridSpec):
        lines += [
            "A lookup is linear between texel centres and clamped at the edge; the centre of "
            "texel i of N is at (2i + 1)/N - 1, as for a GPU's linear, clamp-to-edge sampler.",
            "plane.xy is [y][x][channel], plane.xt [t][x][channel], plane.yt [t][y][channel], "
            "volume [t][y][x][channel].",
            "h is plane.xy at (x, y), plane.xt at (x, t), plane.yt at (y, t), volume at "
            f"(x, y, t), one after another, then x, y, t: {spec.inputs} values.",
        ]
        activation = "max(0, W h + b)"
    else:
        lines.append("h is x, y, t.")
        activation = "sin(W h + b)"
    return [
        *lines,
        f"For i in 0..{spec.layers - 1}: h becomes {activation} with W = mlp.i.weight, "
        "[out][in], and b = mlp.i.bias.",
        f"o = W h + b with mlp.{spec.layers}; colour = sign(o) (exp(min(|o|, {LOG_LIMIT:g})) - 1), "
        "linear RGB, not clamped.",
    ]


def _nested(values: Array, indent: str) -> str:
    """Nested lists of ready-made numbers, with a row of texels or of weights on a line."""
    if values.ndim == 1:
        return f"[{', '.join(values.tolist())}]"
    if values.ndim == 2 and values.shape[1] == 4 and len(indent) > 4:
        return f"[{', '.join(_nested(row, '') for row in values)}]"
    inner = indent + "  "
    rows = ",\n".join(inner + _nested(row, inner) for row in values)
    return f"[\n{rows}\n{indent}]"


def _decimals(values: Array) -> Array:
    """Shortest decimals that read back to the same numbers, as an array of texts."""
    found, inverse = np.unique(values.ravel().view(f"u{values.itemsize}"), return_inverse=True)
    numbers = found.view(values.dtype)
    texts = np.array([_shortest(v) for v in numbers], dtype=object)
    return texts[inverse].reshape(values.shape)


def _shortest(value: Any) -> str:
    text = str(value)
    # A reader rounds twice, to float64 and then down; check that this ends where it should.
    return text if value.dtype.type(float(text)) == value else repr(float(value))


def _numbers(values: Array) -> list[Any]:
    """Nested lists of float64 that print as the shortest decimals of the float32 values."""
    rows = np.asarray(values, np.float32)
    return [[float(_shortest(v)) for v in row] for row in rows]


# --- both ----------------------------------------------------------------------------------------


def _checked(model: ModelFile) -> ModelFile:
    _check(model)
    return model


def _verify(found: str, stored: object) -> None:
    if found != stored:
        raise ModelFileError(
            "contents",
            expected="numbers that match their sha256",
            got="damaged or changed ones",
            next_step="train again, or restore the file",
        )


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole, or leave what was there."""
    temporary = path.with_name(f"{_TEMPORARY}{path.name}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
