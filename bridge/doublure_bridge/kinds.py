"""What a message field may hold: one small class a kind, each checking before it allocates.

A message declares its fields as ``name: Annotated[type, Kind("doc", ...)]``. The kind checks the
value on the way out and on the way in, and its text is the field's documentation: the tables in
`docs/protocol.md` are written from it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from .errors import CodecError, LimitError

__all__ = ["Array", "Blob", "Flag", "Kind", "Payload", "Plain", "Real", "Text", "UInt"]

Parts = Sequence[Any]


class Kind(ABC):
    """How one field is checked and carried.

    Args:
        doc: What the field means, with its unit.
    """

    wire: ClassVar[str]

    def __init__(self, doc: str) -> None:
        self.doc = doc

    def describe(self) -> str:
        """The wire type in a few words, for `docs/protocol.md`."""
        return self.wire

    @abstractmethod
    def check(self, where: str, value: Any) -> Any:
        """Return the value as it goes on the wire, or raise `CodecError` naming `where`."""

    def encode(self, where: str, value: Any, parts: list[Any]) -> Any:
        """The header's entry for `value`; bulk data is appended to `parts`."""
        del parts
        return self.check(where, value)

    def decode(self, where: str, entry: Any, parts: Parts) -> Any:
        """The field's value from the header's entry and the raw parts."""
        del parts
        return self.check(where, entry)


class UInt(Kind):
    """An integer in 0..`limit`."""

    wire = "uint"

    def __init__(self, doc: str, *, limit: int = 2**63 - 1) -> None:
        super().__init__(doc)
        self.limit = limit

    def check(self, where: str, value: Any) -> int:
        if type(value) is not int or not 0 <= value <= self.limit:
            raise CodecError(where, expected=f"an integer in 0..{self.limit}", got=_brief(value))
        return value


class Real(Kind):
    """A finite float64."""

    wire = "float"

    def check(self, where: str, value: Any) -> float:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise CodecError(where, expected="a finite number", got=_brief(value))
        return float(value)


class Flag(Kind):
    """True or false."""

    wire = "bool"

    def check(self, where: str, value: Any) -> bool:
        if type(value) is not bool:
            raise CodecError(where, expected="true or false", got=_brief(value))
        return value


class Text(Kind):
    """UTF-8 text of at most `limit` bytes."""

    wire = "str"

    def __init__(self, doc: str, *, limit: int = 1024) -> None:
        super().__init__(doc)
        self.limit = limit

    def describe(self) -> str:
        return f"str, at most {self.limit} bytes"

    def check(self, where: str, value: Any) -> str:
        if not isinstance(value, str):
            raise CodecError(where, expected="text", got=_brief(value))
        size = len(value.encode("utf-8", "surrogatepass"))
        if size > self.limit:
            raise LimitError(where, expected=f"at most {self.limit} bytes", got=f"{size} bytes")
        return value


class Blob(Kind):
    """Bytes inside the header: identities, tokens, digests. One of the given lengths."""

    wire = "bin"

    def __init__(self, doc: str, *, lengths: tuple[int, ...]) -> None:
        super().__init__(doc)
        self.lengths = lengths

    def describe(self) -> str:
        return f"bin of {' or '.join(map(str, self.lengths))} bytes"

    def check(self, where: str, value: Any) -> bytes:
        if not isinstance(value, bytes) or len(value) not in self.lengths:
            raise CodecError(where, expected=self.describe(), got=_brief(value))
        return value


class Plain(Kind):
    """Plain data (maps, lists, numbers, text), for what has a schema of its own.

    The codec bounds its depth and entries; whoever reads it checks its meaning.
    """

    wire = "map or list"

    def __init__(self, doc: str, *, shape: type[dict[Any, Any]] | type[list[Any]] = dict) -> None:
        super().__init__(doc)
        self.shape = shape

    def describe(self) -> str:
        return "map" if self.shape is dict else "list"

    def check(self, where: str, value: Any) -> Any:
        plain = _plain(where, value, depth=6)
        if not isinstance(plain, self.shape):
            raise CodecError(where, expected=f"a {self.describe()}", got=_brief(value))
        return plain


class Array(Kind):
    """A C-contiguous array in a raw part of its own; dtype, shape and byte order in the header.

    Args:
        dtypes: Accepted dtypes, as NumPy spells them with byte order: ``<f4``.
        shape: Accepted sizes; `None` accepts any, a tuple one of several.
        limit: Most bytes accepted.
    """

    wire = "array"

    def __init__(
        self,
        doc: str,
        *,
        dtypes: tuple[str, ...],
        shape: tuple[int | tuple[int, ...] | None, ...],
        limit: int,
    ) -> None:
        super().__init__(doc)
        self.dtypes = dtypes
        self.shape = shape
        self.limit = limit

    def describe(self) -> str:
        sizes = ", ".join(
            "n" if s is None else "|".join(map(str, s)) if isinstance(s, tuple) else str(s)
            for s in self.shape
        )
        return f"array {'|'.join(self.dtypes)} [{sizes}], at most {self.limit} bytes"

    def check(self, where: str, value: Any) -> np.ndarray[Any, np.dtype[Any]]:
        if not isinstance(value, np.ndarray):
            raise CodecError(where, expected=self.describe(), got=_brief(value))
        self._check_header(where, value.dtype.str, value.shape)
        if not value.flags.c_contiguous:
            raise CodecError(
                where, expected="a C-contiguous array", got=f"strides {value.strides}",
                next_step="pass numpy.ascontiguousarray(...)",
            )  # fmt: skip
        return value

    def encode(self, where: str, value: Any, parts: list[Any]) -> Any:
        array = self.check(where, value)
        # A memoryview of an empty array cannot be cast to bytes, so it goes as empty bytes.
        parts.append(array if array.size else b"")
        return [array.dtype.str, list(array.shape), len(parts)]

    def decode(self, where: str, entry: Any, parts: Parts) -> np.ndarray[Any, np.dtype[Any]]:
        if not (isinstance(entry, list) and len(entry) == 3):
            raise CodecError(where, expected="[dtype, shape, part]", got=_brief(entry))
        dtype, shape, part = entry
        if not (
            isinstance(dtype, str)
            and isinstance(shape, list)
            and len(shape) <= 8
            and all(type(s) is int and 0 <= s <= 2**32 for s in shape)
        ):
            raise CodecError(where, expected="[dtype, shape, part]", got=_brief(entry))
        nbytes = self._check_header(where, dtype, tuple(shape))
        data = _part(where, part, parts)
        if len(data) != nbytes:
            raise CodecError(where, expected=f"{nbytes} bytes for {shape}", got=f"{len(data)}")
        return np.frombuffer(data, dtype=dtype).reshape(shape)

    def _check_header(self, where: str, dtype: str, shape: tuple[int, ...]) -> int:
        """Bytes that an array of this dtype and shape takes, if it is one this field accepts."""
        fits = len(shape) == len(self.shape) and all(
            want is None or (size in want if isinstance(want, tuple) else size == want)
            for size, want in zip(shape, self.shape, strict=True)
        )
        if dtype not in self.dtypes or not fits:
            got = f"{dtype[:16]} {list(shape)}"
            raise CodecError(where, expected=self.describe(), got=got)
        nbytes = math.prod(shape) * int(dtype[2:])
        if nbytes > self.limit:
            raise LimitError(where, expected=f"at most {self.limit} bytes", got=f"{nbytes} bytes")
        return nbytes


class Payload(Kind):
    """Opaque bytes in a raw part of their own, such as a safetensors file."""

    wire = "payload"

    def __init__(self, doc: str, *, limit: int) -> None:
        super().__init__(doc)
        self.limit = limit

    def describe(self) -> str:
        return f"payload, at most {self.limit} bytes"

    def check(self, where: str, value: Any) -> bytes:
        if not isinstance(value, bytes):
            raise CodecError(where, expected="bytes", got=_brief(value))
        if len(value) > self.limit:
            raise LimitError(where, expected=f"at most {self.limit} bytes", got=f"{len(value)}")
        return value

    def encode(self, where: str, value: Any, parts: list[Any]) -> Any:
        parts.append(self.check(where, value))
        return [len(parts[-1]), len(parts)]

    def decode(self, where: str, entry: Any, parts: Parts) -> bytes:
        if not (isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int):
            raise CodecError(where, expected="[bytes, part]", got=_brief(entry))
        size, part = entry
        if size > self.limit:
            raise LimitError(where, expected=f"at most {self.limit} bytes", got=f"{size}")
        data = _part(where, part, parts)
        if len(data) != size:
            raise CodecError(where, expected=f"{size} bytes", got=f"{len(data)}")
        return bytes(data)


def _part(where: str, index: Any, parts: Parts) -> memoryview:
    """Raw part number `index` (1 is the first after the header) as bytes."""
    if type(index) is not int or not 1 <= index <= len(parts):
        raise CodecError(where, expected=f"a part in 1..{len(parts)}", got=_brief(index))
    return memoryview(parts[index - 1]).cast("B")


def _plain(where: str, value: Any, depth: int) -> Any:
    if depth == 0:
        raise LimitError(where, expected="at most 6 levels of nesting", got="more")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_plain(where, v, depth - 1) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: _plain(f"{where}.{k}", v, depth - 1) for k, v in value.items()}
    raise CodecError(where, expected="maps, lists, finite numbers and text", got=_brief(value))


def _brief(value: Any) -> str:
    """A short, safe rendering of something a peer sent."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{type(value).__name__} {text[:57]}..."
