"""What a source is, and its digest: SHA-256 over its shaders and its fixed state.

The encoding is a small tagged, length-prefixed tree, written here so that it stays the same over
Python versions, platforms and NumPy versions. Every value is one tag byte, an unsigned 64-bit
little-endian length, and that many bytes; containers hold the encodings of their items.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import SourceError

__all__ = ["Source", "source_digest"]

_SCHEMA = "doublure source 1"
_MAX_SIDE = 65536
_MAX_DEPTH = 16


class Source:
    """The render target being learned: its shaders and everything that stays fixed while `t` moves.

    The digest is taken once, here; later changes to the mappings or arrays given do not show in
    it. When anything fixed changes, make a new `Source` and tell `Session.source_changed`.

    Args:
        name: For people and directory listings; not part of the digest. At most 128 bytes.
        shaders: Text or compiled bytes by name, all stages that draw the source.
        state: Plain data that fixes the image: format, uniforms other than `t`, camera, textures
            (arrays or bytes). Numbers, text, bytes, booleans, None, arrays, lists, and mappings
            with text keys.
        width: Pixels.
        height: Pixels.
    Raises:
        SourceError: A value has no unambiguous encoding, or a size is out of range.
    """

    __slots__ = ("digest", "height", "name", "width")

    def __init__(
        self,
        name: str,
        shaders: Mapping[str, str | bytes],
        state: Mapping[str, Any] | None = None,
        width: int = 512,
        height: int = 512,
    ) -> None:
        try:
            named = isinstance(name, str) and 1 <= len(name.encode()) <= 128
        except UnicodeEncodeError:
            named = False
        if not named:
            raise SourceError("Source.name", expected="text of 1..128 bytes", got=repr(name)[:60])
        for side, value in (("width", width), ("height", height)):
            if type(value) is not int or not 1 <= value <= _MAX_SIDE:
                raise SourceError(
                    f"Source.{side}", expected=f"pixels in 1..{_MAX_SIDE}", got=repr(value)[:60]
                )
        self.name = name
        self.width = width
        self.height = height
        self.digest = source_digest(shaders, state or {}, width, height)
        """SHA-256, 32 bytes."""

    def __repr__(self) -> str:
        return f"Source({self.name!r}, {self.width}x{self.height}, {self.digest.hex()[:12]})"


def source_digest(
    shaders: Mapping[str, str | bytes], state: Mapping[str, Any], width: int, height: int
) -> bytes:
    """SHA-256 over shaders sorted by name and over the fixed state, 32 bytes.

    Integers and floats of the same value differ on purpose: a uniform's type is part of the state.

    Raises:
        SourceError: A value that has no unambiguous encoding: an object, a NaN, an object array.
    """
    if not isinstance(shaders, Mapping) or not shaders:
        raise SourceError(
            "Source.shaders", expected="a mapping of at least one name to its text or bytes",
            got=type(shaders).__name__ if not isinstance(shaders, Mapping) else "none",
        )  # fmt: skip
    for name, text in shaders.items():
        if not isinstance(text, str | bytes):
            raise SourceError(
                f"Source.shaders[{name!r}]", expected="text or bytes", got=type(text).__name__
            )
    tree = {
        "schema": _SCHEMA,
        "shaders": shaders,
        "size": [width, height],
        "state": state,
    }
    hasher = hashlib.sha256()
    for chunk in _encode("Source", tree, _MAX_DEPTH):
        hasher.update(chunk)
    return hasher.digest()


def _encode(where: str, value: Any, depth: int) -> list[bytes]:
    if depth == 0:
        raise SourceError(where, expected=f"at most {_MAX_DEPTH} levels of nesting", got="more")
    if value is None:
        return _item(b"N", [])
    if isinstance(value, bool | np.bool_):
        return _item(b"B", [b"\1" if value else b"\0"])
    if isinstance(value, int | np.integer):
        return _item(b"I", [str(int(value)).encode()])
    if isinstance(value, float | np.floating):
        number = float(value)
        if math.isnan(number):
            raise SourceError(where, expected="numbers that equal themselves", got="nan")
        # -0.0 and 0.0 compare equal and draw the same.
        return _item(b"F", [struct.pack("<d", number + 0.0)])
    if isinstance(value, str):
        return _item(b"S", [value.encode("utf-8", "surrogatepass")])
    if isinstance(value, bytes | bytearray | memoryview):
        return _item(b"Y", [bytes(value)])
    if isinstance(value, np.ndarray):
        return _array(where, value)
    if isinstance(value, Mapping):
        keys = list(value)
        if not all(isinstance(key, str) for key in keys):
            bad = next(key for key in keys if not isinstance(key, str))
            raise SourceError(where, expected="text keys", got=f"{type(bad).__name__} {bad!r}"[:60])
        chunks: list[bytes] = []
        # By code point: the same on every platform, whatever the mapping's own order.
        for key in sorted(keys):
            chunks += _item(b"S", [key.encode("utf-8", "surrogatepass")])
            chunks += _encode(f"{where}.{key}", value[key], depth - 1)
        return _item(b"M", chunks)
    if isinstance(value, list | tuple):
        chunks = []
        for i, entry in enumerate(value):
            chunks += _encode(f"{where}[{i}]", entry, depth - 1)
        return _item(b"L", chunks)
    raise SourceError(
        where, expected="plain data (numbers, text, bytes, arrays, lists, mappings)",
        got=type(value).__name__, next_step="pass what it draws with, not the object",
    )  # fmt: skip


def _array(where: str, array: np.ndarray[Any, np.dtype[Any]]) -> list[bytes]:
    if array.dtype.kind not in "biufc":
        raise SourceError(where, expected="an array of numbers", got=f"dtype {array.dtype}")
    little = array.dtype.newbyteorder("<")
    data = np.ascontiguousarray(array).astype(little, copy=False).tobytes()
    shape = ",".join(map(str, array.shape))
    # NumPy writes single bytes as "|u1" whatever the platform.
    return _item(b"A", [*_item(b"S", [f"{little.str} {shape}".encode()]), *_item(b"Y", [data])])


def _item(tag: bytes, chunks: list[bytes]) -> list[bytes]:
    return [tag + struct.pack("<Q", sum(map(len, chunks))), *chunks]
