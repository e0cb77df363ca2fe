"""The digest: golden, unambiguous, and blind to what does not change the image."""

from typing import Any

import numpy as np
import pytest
from doublure_plugin import Source, SourceError, source_digest
from hypothesis import given
from hypothesis import strategies as st

SHADERS = {"scene.wgsl": "fn scene() {}", "blit.spv": b"\x03\x02\x23\x07"}
STATE: dict[str, Any] = {
    "format": "rgba16float",
    "exposure": 1.5,
    "steps": 64,
    "camera": {"eye": [0.0, 1.0, -3.0], "fov": 0.8},
    "shadows": True,
    "texture": np.arange(12, dtype=np.float32).reshape(3, 4),
    "lut": None,
}
GOLDEN = "48667431e62c7d2b74742dfed783a509ac65737b8185602c4a218cd4836365e6"


def digest(state: Any, shaders: Any = SHADERS, width: int = 64, height: int = 48) -> str:
    return source_digest(shaders, state, width, height).hex()


def test_golden_value() -> None:
    assert digest(STATE) == GOLDEN


def test_order_of_mappings_does_not_matter() -> None:
    turned = dict(reversed(STATE.items()))
    assert digest(turned, dict(reversed(SHADERS.items()))) == GOLDEN


def test_byte_order_and_memory_layout_of_arrays_do_not_matter() -> None:
    big = STATE | {"texture": STATE["texture"].astype(">f4")}
    fortran = STATE | {"texture": np.asfortranarray(STATE["texture"])}
    assert digest(big) == digest(fortran) == GOLDEN


def test_the_name_is_for_people() -> None:
    sources = [Source(name, SHADERS, STATE, 64, 48) for name in ("a", "b")]
    assert {s.digest.hex() for s in sources} == {GOLDEN}


@pytest.mark.parametrize(
    "change",
    [
        {"exposure": 1.25},
        {"steps": 64.0},
        {"steps": "64"},
        {"shadows": 1},
        {"lut": ""},
        {"lut": b""},
        {"texture": STATE["texture"].reshape(4, 3)},
        {"texture": STATE["texture"].astype(np.float64)},
        {"texture": STATE["texture"].tobytes()},
        {"camera": {"eye": [0.0, 1.0], "fov": 0.8, "far": -3.0}},
        {"more": 1},
    ],
)
def test_any_change_of_state_is_another_source(change: dict[str, Any]) -> None:
    assert digest(STATE | change) != GOLDEN


def test_shaders_and_size_are_part_of_it() -> None:
    assert digest(STATE, SHADERS | {"scene.wgsl": "fn scene() { }"}) != GOLDEN
    assert digest(STATE, {"a": SHADERS["scene.wgsl"], "blit.spv": SHADERS["blit.spv"]}) != GOLDEN
    assert digest(STATE, width=48, height=64) != GOLDEN


def test_negative_zero_is_zero() -> None:
    assert digest({"x": -0.0}) == digest({"x": 0.0})


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"a": {"b": object()}}, r"Source.state.a.b: expected plain data .*, got object"),
        ({"a": float("nan")}, "Source.state.a: expected numbers that equal themselves, got nan"),
        ({"a": np.array([object()])}, "an array of numbers, got dtype object"),
        ({1: 2}, "Source.state: expected text keys, got int 1"),
    ],
)
def test_what_has_no_clear_encoding_is_refused(state: Any, text: str) -> None:
    with pytest.raises(SourceError, match=text):
        digest(state)


def test_shaders_are_needed_and_checked() -> None:
    with pytest.raises(SourceError, match=r"Source.shaders: expected a mapping of at least one"):
        source_digest({}, {}, 1, 1)
    with pytest.raises(SourceError, match=r"shaders\['a'\]: expected text or bytes, got int"):
        source_digest({"a": 1}, {}, 1, 1)  # type: ignore[dict-item]
    with pytest.raises(SourceError, match=r"Source.width: expected pixels in 1..65536, got 0"):
        Source("a", SHADERS, {}, 0, 1)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


def canonical(value: Any) -> Any:
    """Equal exactly when two plain values must share a digest; types kept apart."""
    if isinstance(value, dict):
        return ("map", frozenset((k, canonical(v)) for k, v in value.items()))
    if isinstance(value, list):
        return ("list", tuple(canonical(v) for v in value))
    return (type(value).__name__, value)


@given(PLAIN, PLAIN)
def test_two_states_share_a_digest_only_when_equal(first: Any, second: Any) -> None:
    same = canonical(first) == canonical(second)
    assert (digest({"v": first}) == digest({"v": second})) is same


@given(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6), st.text(max_size=6))
def test_names_and_texts_cannot_run_into_each_other(a: str, b: str, c: str, d: str) -> None:
    same = (a, b) == (c, d)
    assert (digest({}, {a: b}) == digest({}, {c: d})) is same


@pytest.mark.parametrize("name", ["", "\u00e9" * 65, "\ud800", 3])
def test_names_that_no_message_can_carry_are_refused(name: Any) -> None:
    with pytest.raises(SourceError, match=r"Source.name: expected text of 1..128 bytes"):
        Source(name, SHADERS)
