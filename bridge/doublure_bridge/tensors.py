"""Named tensors to and from safetensors bytes, with NumPy alone.

The format (https://github.com/huggingface/safetensors, "Format"): eight bytes little-endian header
size, a JSON header {name: {dtype, shape, data_offsets}}, then the data. The host side must not need
the safetensors package, and reads only what a model specification asks for, so this is a strict
subset: float16 and float32, no gaps, no overlaps.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import TensorFileError
from .models import ModelSpec, spec_to_dict

__all__ = ["pack_tensors", "tensors_digest", "tensors_metadata", "unpack_tensors"]

_NAMES = {"float16": "F16", "float32": "F32"}
_MAX_HEADER = 64 << 10

TensorMap = Mapping[str, NDArray[np.floating[Any]]]


def pack_tensors(
    spec: ModelSpec, tensors: TensorMap, *, metadata: Mapping[str, str] | None = None
) -> bytes:
    """A safetensors file holding the tensors of `spec`, in its order, the model in its metadata.

    Args:
        metadata: Further entries of the file's metadata.
    Raises:
        TensorFileError: A tensor is missing, or not of the specified dtype and shape.
    """
    model = {"model": json.dumps(spec_to_dict(spec))}
    header: dict[str, Any] = {"__metadata__": model | dict(metadata or {})}
    chunks: list[bytes] = []
    offset = 0
    for name, want in spec.tensors().items():
        if name not in tensors:
            raise TensorFileError(
                f"tensor {name}", expected=f"{want.dtype} {want.shape}", got="none"
            )
        array = tensors[name]
        if array.dtype != want.dtype or array.shape != want.shape:
            raise TensorFileError(
                f"tensor {name}",
                expected=f"{want.dtype} {list(want.shape)}",
                got=f"{array.dtype} {list(array.shape)}",
            )
        data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
        chunks.append(data.tobytes())
        header[name] = {
            "dtype": _NAMES[want.dtype],
            "shape": list(want.shape),
            "data_offsets": [offset, offset + want.nbytes],
        }
        offset += want.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *chunks])


def unpack_tensors(data: bytes, spec: ModelSpec) -> dict[str, NDArray[np.floating[Any]]]:
    """The tensors of `spec` from a safetensors file, as read-only views of `data`.

    Raises:
        TensorFileError: Not a safetensors file, or not exactly the specified tensors.
    """
    header, size = _header(data)
    header.pop("__metadata__", None)
    wanted = spec.tensors()
    if header.keys() != wanted.keys():
        missing = sorted(wanted.keys() - header.keys())
        extra = sorted(map(str, header.keys() - wanted.keys()))
        raise TensorFileError(
            "weights",
            expected=f"the tensors of a {spec.family} model",
            got=f"missing {missing or 'none'}, unknown {extra[:4] or 'none'}",
        )
    tensors: dict[str, NDArray[np.floating[Any]]] = {}
    body = memoryview(data)[8 + size :]
    expected_start = 0
    for name, want in wanted.items():
        entry = {
            "dtype": _NAMES[want.dtype],
            "shape": list(want.shape),
            "data_offsets": [expected_start, expected_start + want.nbytes],
        }
        if header[name] != entry:
            got = str(header[name])[:120]
            raise TensorFileError(f"tensor {name}", expected=entry, got=got)
        chunk = body[expected_start : expected_start + want.nbytes]
        if len(chunk) != want.nbytes:
            raise TensorFileError(f"tensor {name}", expected=f"{want.nbytes} bytes", got=len(chunk))
        dtype = np.dtype(want.dtype).newbyteorder("<")
        tensors[name] = np.frombuffer(chunk, dtype=dtype).reshape(want.shape)
        expected_start += want.nbytes
    if len(body) != expected_start:
        raise TensorFileError("weights", expected=f"{expected_start} bytes of data", got=len(body))
    return tensors


def tensors_metadata(data: bytes) -> dict[str, str]:
    """The metadata of a safetensors file; empty where it has none.

    Raises:
        TensorFileError: Not a safetensors file, or metadata that is not text by name.
    """
    metadata = _header(data)[0].get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise TensorFileError("weights metadata", expected="texts by name")
    return metadata


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """The parsed header of a safetensors file, and its size in bytes."""
    if len(data) < 8:
        raise TensorFileError("weights", expected="a safetensors file", got=f"{len(data)} bytes")
    (size,) = struct.unpack_from("<Q", data)
    if size > min(_MAX_HEADER, len(data) - 8):
        raise TensorFileError("weights header", expected=f"at most {_MAX_HEADER} bytes", got=size)
    try:
        header = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError) as error:
        raise TensorFileError("weights header", expected="JSON", got=str(error)[:80]) from None
    if not isinstance(header, dict):
        raise TensorFileError("weights header", expected="a map", got=type(header).__name__)
    return header, size


def tensors_digest(data: bytes) -> bytes:
    """SHA-256 of a packed file, 32 bytes."""
    return hashlib.sha256(data).digest()
