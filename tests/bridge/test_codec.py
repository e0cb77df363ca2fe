"""The codec: round trips, golden bytes, and everything a peer may send that is not a message."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import doublure_bridge
import msgpack
import numpy as np
import pytest
from doublure_bridge import (
    MESSAGES,
    PROTOCOL_VERSION,
    BridgeError,
    CodecError,
    Credit,
    Heartbeat,
    Hello,
    LimitError,
    Message,
    Rows,
    UnknownTagError,
    VersionError,
    Weights,
    decode,
    encode,
    peek,
)
from doublure_bridge.kinds import Array, Blob, Flag, Kind, Payload, Plain, Real, Text, UInt
from doublure_bridge.messages import MAX_ROWS_BYTES
from hypothesis import given, settings
from hypothesis import strategies as st

from .examples import EXAMPLES, ROWS, SESSION

GOLDEN = Path(__file__).parent / "golden"
by_name = pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)


def wire(parts: list[Any]) -> list[bytes]:
    """Parts as they would arrive."""
    return [bytes(memoryview(part).cast("B")) for part in parts]


def assert_same(a: Message, b: Message) -> None:
    assert type(a) is type(b)
    for field in fields(a):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)
        else:
            assert left == right, field.name


def test_every_message_has_an_example() -> None:
    assert {type(m) for m in EXAMPLES} == set(MESSAGES.values())


def test_public_names_exist_once() -> None:
    assert len(set(doublure_bridge.__all__)) == len(doublure_bridge.__all__)
    assert all(hasattr(doublure_bridge, name) for name in doublure_bridge.__all__)


@by_name
def test_round_trip(message: Message) -> None:
    assert_same(decode(wire(encode(message))), message)


@by_name
def test_golden_bytes(message: Message, regenerate: bool) -> None:
    """Bytes of this protocol version never change: an old peer has them compiled in."""
    path = GOLDEN / f"v{PROTOCOL_VERSION}" / f"{type(message).__name__}.hex"
    text = "\n".join(part.hex() for part in wire(encode(message))) + "\n"
    if regenerate:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    assert path.read_text() == text
    parts = [bytes.fromhex(line) for line in path.read_text().splitlines()]
    assert_same(decode(parts), message)


@by_name
def test_peek_finds_tag_and_session(message: Message) -> None:
    version, tag, first = peek(wire(encode(message)))
    assert (version, tag) == (PROTOCOL_VERSION, message.tag)
    assert first == getattr(message, fields(message)[0].name)


def strategy(kind: Kind) -> st.SearchStrategy[Any]:
    """Values that a kind accepts."""
    match kind:
        case UInt():
            return st.integers(0, kind.limit)
        case Real():
            return st.floats(allow_nan=False, allow_infinity=False)
        case Flag():
            return st.booleans()
        case Text():
            return st.text(st.characters(codec="utf-8"), max_size=kind.limit // 4)
        case Blob():
            return st.sampled_from(kind.lengths).flatmap(
                lambda n: st.binary(min_size=n, max_size=n)
            )
        case Plain():
            leaf = (
                st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8) | st.booleans() | st.none()
            )
            items = st.lists(leaf, max_size=4) | leaf
            lists = st.lists(items, max_size=4)
            return lists if kind.shape is list else st.dictionaries(st.text(max_size=8), items)
        case Payload():
            return st.binary(max_size=256)
        case Array():
            sizes = [
                st.integers(0, 5) if s is None else st.sampled_from(s) if isinstance(s, tuple)
                else st.just(s)
                for s in kind.shape
            ]  # fmt: skip
            return st.tuples(st.sampled_from(kind.dtypes), st.tuples(*sizes)).map(
                lambda d: np.arange(int(np.prod(d[1])), dtype=d[0]).reshape(d[1])
            )
    raise AssertionError(kind)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_valid_message_survives(data: st.DataObject) -> None:
    cls = data.draw(st.sampled_from(list(MESSAGES.values())))
    message = cls(**{name: data.draw(strategy(kind)) for name, kind in cls.kinds.items()})
    assert_same(decode(wire(encode(message))), message)


@given(st.data())
@settings(max_examples=1500, deadline=None)
def test_mutated_bytes_give_a_message_or_a_bridge_error(data: st.DataObject) -> None:
    """Flips, cuts, insertions, dropped and doubled parts: never another exception."""
    parts = wire(encode(data.draw(st.sampled_from(EXAMPLES))))
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(parts) - 1)) if parts else 0
        action = data.draw(st.sampled_from(["flip", "cut", "insert", "drop", "double"]))
        if not parts:
            break
        part = bytearray(parts[index])
        at = data.draw(st.integers(0, max(len(part) - 1, 0)))
        match action:
            case "flip" if part:
                part[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del part[at:]
            case "insert":
                part[at:at] = data.draw(st.binary(max_size=8))
            case "drop":
                del parts[index]
                continue
            case "double":
                parts.insert(index, bytes(part))
                continue
        parts[index] = bytes(part)
    try:
        message = decode(parts)
    except BridgeError:
        return
    encode(message)  # whatever was accepted is well-formed


@given(st.lists(st.binary(max_size=64), max_size=4))
@settings(max_examples=500, deadline=None)
def test_junk_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(BridgeError):
        decode(parts)


def header(*entries: Any) -> list[bytes]:
    return [msgpack.packb([PROTOCOL_VERSION, *entries], use_bin_type=True)]


@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        ([], LimitError, "message: expected 1..8 parts, got 0"),
        ([b"\x90"], CodecError, "message header: expected [version, tag, fields…]"),
        ([b"\xc1"], CodecError, "message header: expected msgpack"),
        ([b"\x00" * 70_000], LimitError, "message header: expected at most 65536 bytes, got 70000"),
        (header(7, SESSION), CodecError, "Credit: expected 2 fields or more, got 1"),
        (
            header(7, SESSION, -1),
            CodecError,
            "Credit.frames: expected an integer in 0..4096",
        ),
        (header(7, SESSION, True), CodecError, "Credit.frames: expected an integer"),
        (
            header(7, b"short", 1),
            CodecError,
            "Credit.session: expected bin of 16 bytes, got 5",
        ),
        (
            header(5, SESSION, 1, float("nan"), ["<f4", [0, 6], 1]),
            CodecError,
            "Rows.t: expected a finite number, got nan",
        ),
        (
            [*header(5, SESSION, 1, 0.0, ["<f8", [1, 6], 1]), bytes(48)],
            CodecError,
            "Rows.rows: expected array <f4 [n, 6], at most 8388608 bytes, got <f8 [1, 6]",
        ),
        (
            [*header(5, SESSION, 1, 0.0, ["<f4", [2, 6], 1]), bytes(24)],
            CodecError,
            "Rows.rows: expected 48 bytes for [2, 6], got 24",
        ),
        (
            header(5, SESSION, 1, 0.0, ["<f4", [2, 6], 1]),
            CodecError,
            "Rows.rows: expected a part in 1..0, got 1",
        ),
        (
            # A size that would take 96 GiB is refused by arithmetic alone.
            [*header(5, SESSION, 1, 0.0, ["<f4", [2**32, 6], 1]), b""],
            LimitError,
            f"Rows.rows: expected at most {MAX_ROWS_BYTES} bytes, got 103079215104 bytes",
        ),
    ],
)
def test_refusals_name_the_field(parts: list[bytes], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        decode(parts)
    assert str(caught.value).startswith(text)


def test_unknown_tags_and_extra_fields_of_a_newer_peer() -> None:
    with pytest.raises(UnknownTagError, match="message tag"):
        decode(header(999, SESSION))
    assert decode(header(7, SESSION, 3, "a field of the future")) == Credit(
        session=SESSION, frames=3
    )


def test_missing_trailing_fields_of_an_older_peer_take_their_defaults() -> None:
    rows = encode(Rows(session=SESSION, sequence=1, t=0.0, rows=ROWS, age_us=9))
    entries = msgpack.unpackb(rows[0])[:-1]
    assert decode([msgpack.packb(entries, use_bin_type=True), ROWS.tobytes()]).age_us == 0  # type: ignore[attr-defined]


def test_a_foreign_version_is_named_with_both_versions_and_what_to_run() -> None:
    newer = [msgpack.packb([9, 16, b"", 1, False], use_bin_type=True)]
    with pytest.raises(VersionError) as caught:
        decode(newer)
    assert str(caught.value) == (
        "protocol version: expected 1..1 (this side), got 9..9 (the other side); "
        "run `pip install -U doublure` on this side"
    )


def test_hello_is_read_whatever_the_version_says() -> None:
    hello = Hello(protocol=9, oldest=8, software="x", host="y", pid=1, token=b"")
    entries = msgpack.unpackb(encode(hello)[0])
    assert decode([msgpack.packb([9, *entries[1:]], use_bin_type=True)]) == hello


def test_encoding_refuses_before_anything_is_sent() -> None:
    with pytest.raises(CodecError, match=r"Rows\.rows: expected array <f4 .* got <f8 \[2, 6\]"):
        encode(Rows(session=SESSION, sequence=1, t=0.0, rows=ROWS.astype(np.float64)))
    with pytest.raises(CodecError, match=r"C-contiguous.*ascontiguousarray"):
        encode(Rows(session=SESSION, sequence=1, t=0.0, rows=np.zeros((4, 12), "<f4")[:, ::2]))
    with pytest.raises(CodecError, match=r"Heartbeat\.session: expected bin of 0 or 16 bytes"):
        encode(Heartbeat(session=b"123", sequence=0, reply=False))


def test_arrays_are_read_only_views_not_copies() -> None:
    part = ROWS.tobytes()
    message = decode([encode(Rows(session=SESSION, sequence=1, t=0.0, rows=ROWS))[0], part])
    assert isinstance(message, Rows)
    assert not message.rows.flags.writeable
    assert np.shares_memory(message.rows, np.frombuffer(part, np.uint8))


def test_a_huge_payload_size_is_refused_before_it_is_looked_at() -> None:
    example = next(m for m in EXAMPLES if isinstance(m, Weights))
    parts = encode(example)
    entries = msgpack.unpackb(parts[0])
    entries[2 + list(Weights.kinds).index("tensors")] = [2**40, 1]
    with pytest.raises(LimitError, match=r"Weights\.tensors: expected at most"):
        decode([msgpack.packb(entries, use_bin_type=True), *parts[1:]])
