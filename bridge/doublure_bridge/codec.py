"""Messages to and from multipart bytes. Checks tag, types, sizes and limits before allocating.

Part 0 is a msgpack array: protocol version, tag, then the fields in order. Arrays and payloads
follow as raw parts, in field order, each described in the header.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from .errors import CodecError, LimitError, VersionError
from .messages import MESSAGES, PROTOCOL_OLDEST, PROTOCOL_VERSION, Hello, Message, Welcome

__all__ = [
    "MAX_HEADER_BYTES",
    "Envelope",
    "UnknownTagError",
    "decode",
    "encode",
    "peek",
    "version_mismatch",
]

MAX_HEADER_BYTES = 64 << 10
_MAX_PARTS = 8


class UnknownTagError(CodecError):
    """A tag from a newer peer: ignore the message, and log that once."""


class Envelope(NamedTuple):
    """What a router needs to know of a message without decoding it."""

    version: int
    tag: int
    first: Any
    """The first field: the session's name in every message that has one."""


def encode(message: Message) -> list[Any]:
    """The message as parts to send: header bytes, then arrays and payloads as they are.

    Raises:
        CodecError: A field is not what its kind accepts; nothing is sent.
    """
    parts: list[Any] = []
    name = type(message).__name__
    header: list[Any] = [PROTOCOL_VERSION, message.tag]
    for field, kind in message.kinds.items():
        header.append(kind.encode(f"{name}.{field}", getattr(message, field), parts))
    packed: bytes = msgpack.packb(header, use_bin_type=True)
    if len(packed) > MAX_HEADER_BYTES:
        raise LimitError(
            f"{name} header", expected=f"at most {MAX_HEADER_BYTES} bytes", got=f"{len(packed)}"
        )
    return [packed, *parts]


def decode(parts: Sequence[Any]) -> Message:
    """The message in these parts. Arrays are read-only views of the parts, not copies.

    Raises:
        VersionError: The peer's protocol version is one this side does not understand.
        UnknownTagError: A message this side does not know; ignore it.
        LimitError: Something is larger than accepted.
        CodecError: Anything else that is not a message.
    """
    header = _header(parts)
    version, tag = header[0], header[1]
    cls = MESSAGES.get(tag)
    # Hello and Welcome are how versions are compared, so they are read whatever the version says.
    if cls not in (Hello, Welcome) and not PROTOCOL_OLDEST <= version <= PROTOCOL_VERSION:
        raise version_mismatch(version, version)
    if cls is None:
        raise UnknownTagError("message tag", expected=f"one of 1..{max(MESSAGES)}", got=tag)
    name = cls.__name__
    entries = header[2:]
    if len(entries) < cls.required:
        raise CodecError(name, expected=f"{cls.required} fields or more", got=len(entries))
    # A newer peer may send more fields than we know: zip stops at ours.
    values = {
        field: kind.decode(f"{name}.{field}", entry, parts[1:])
        for (field, kind), entry in zip(cls.kinds.items(), entries, strict=False)
    }
    return cls(**values)


def peek(parts: Sequence[Any]) -> Envelope:
    """Version, tag and first field, without touching the rest: enough to route and meter.

    Raises:
        CodecError: The header is not one.
    """
    header = _header(parts)
    return Envelope(header[0], header[1], header[2] if len(header) > 2 else None)


def version_mismatch(oldest: int, newest: int) -> VersionError:
    """The error both sides print when no version is common: both ranges and what to run."""
    theirs_is_newer = oldest > PROTOCOL_VERSION
    side = "this side" if theirs_is_newer else "the other side"
    return VersionError(
        "protocol version",
        expected=f"{PROTOCOL_OLDEST}..{PROTOCOL_VERSION} (this side)",
        got=f"{oldest}..{newest} (the other side)",
        next_step=f"run `pip install -U doublure` on {side}",
    )


def _header(parts: Sequence[Any]) -> list[Any]:
    if not 1 <= len(parts) <= _MAX_PARTS:
        raise LimitError("message", expected=f"1..{_MAX_PARTS} parts", got=len(parts))
    raw = memoryview(parts[0])
    if raw.nbytes > MAX_HEADER_BYTES:
        raise LimitError(
            "message header", expected=f"at most {MAX_HEADER_BYTES} bytes", got=raw.nbytes
        )
    try:
        header = msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            use_list=True,
            max_str_len=MAX_HEADER_BYTES,
            max_bin_len=1024,
            max_array_len=4096,
            max_map_len=512,
            max_ext_len=0,
        )
    # msgpack raises a family of its own, and ValueError, for every kind of bad input.
    except (msgpack.UnpackException, ValueError, RecursionError) as error:
        raise CodecError("message header", expected="msgpack", got=str(error) or "junk") from None
    if not (
        isinstance(header, list)
        and len(header) >= 2
        and type(header[0]) is int
        and type(header[1]) is int
    ):
        raise CodecError("message header", expected="[version, tag, fields…]", got="something else")
    return header
