"""Model specifications and the safetensors subset that carries their tensors."""

import json
import struct
from typing import Any

import numpy as np
import pytest
from doublure_bridge import (
    BridgeError,
    CompactSpec,
    GridSpec,
    ModelSpec,
    SpecError,
    TensorFileError,
    model_spec_from_dict,
    pack_tensors,
    spec_to_dict,
    tensors_digest,
    unpack_tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st

GRID = GridSpec(xy=(8, 12), xt=(4, 12), yt=(4, 8), volume=(3, 5, 6))
COMPACT = CompactSpec(hidden=8, layers=2)
both = pytest.mark.parametrize("spec", [GRID, COMPACT], ids=lambda s: s.family)


def random_tensors(spec: ModelSpec, seed: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=t.shape).astype(t.dtype) for n, t in spec.tensors().items()}


def test_costs_are_what_the_arithmetic_says() -> None:
    assert (GRID.macs, GRID.fetches) == (19 * 16 + 16 * 16 + 16 * 3, 4)
    assert (COMPACT.macs, COMPACT.fetches) == (3 * 8 + 8 * 8 + 8 * 3, 0)
    texels = 8 * 12 + 4 * 12 + 4 * 8 + 3 * 5 * 6
    assert GRID.nbytes == texels * 4 * 2 + (608 + 16 + 16 + 3) * 4


@both
def test_specs_round_trip_through_plain_data(spec: ModelSpec) -> None:
    assert model_spec_from_dict(json.loads(json.dumps(spec_to_dict(spec)))) == spec


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"family": "gird"}, "model.family: expected one of grid, compact, got 'gird'"),
        ({"version": 2}, "model.version: expected 1, got 2"),
        ({"hiden": 16}, "model.hiden: expected a known key; did you mean hidden?"),
        ({"xy": [8]}, "model.xy: expected 2 sizes in 1..4096, got [8]"),
        ({"xy": [8, 0]}, "model.xy: expected 2 sizes in 1..4096"),
        ({"hidden": 16.0}, "model.hidden: expected a size in 1..256, got 16.0"),
        ({"volume": [4096, 4096, 8]}, "model: expected at most 67108864 bytes, got"),
    ],
)
def test_bad_specs_are_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError) as caught:
        model_spec_from_dict(spec_to_dict(GRID) | change)
    assert str(caught.value).startswith(text)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5) | st.floats(), st.lists))
@settings(max_examples=200, deadline=None)
def test_any_value_in_any_place_gives_a_spec_or_a_spec_error(value: Any) -> None:
    for key in [*spec_to_dict(GRID), "other"]:
        try:
            model_spec_from_dict(spec_to_dict(GRID) | {key: value})
        except SpecError:
            continue


@both
def test_tensors_round_trip(spec: ModelSpec) -> None:
    tensors = random_tensors(spec)
    data = pack_tensors(spec, tensors)
    read = unpack_tensors(data, spec)
    assert list(read) == list(spec.tensors())
    for name, array in tensors.items():
        np.testing.assert_array_equal(read[name], array)
        assert not read[name].flags.writeable
    assert tensors_digest(data) != tensors_digest(pack_tensors(spec, random_tensors(spec, 2)))


@both
def test_the_safetensors_package_reads_our_files(spec: ModelSpec) -> None:
    reader = pytest.importorskip("safetensors.numpy", reason="safetensors not installed")
    tensors = random_tensors(spec)
    read = reader.load(pack_tensors(spec, tensors))
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(read[name], array)


def test_what_does_not_fit_the_spec_is_refused_by_name() -> None:
    tensors = random_tensors(GRID)
    with pytest.raises(TensorFileError, match=r"tensor volume: expected float16 .*, got none"):
        pack_tensors(GRID, {k: v for k, v in tensors.items() if k != "volume"})
    with pytest.raises(TensorFileError, match=r"tensor plane\.xy: expected float16 \[8, 12, 4\]"):
        pack_tensors(GRID, tensors | {"plane.xy": tensors["plane.xy"][:4]})
    with pytest.raises(TensorFileError, match=r"expected the tensors of a compact model, got"):
        unpack_tensors(pack_tensors(GRID, tensors), COMPACT)
    bigger = GridSpec(xy=(16, 12), xt=(4, 12), yt=(4, 8), volume=(3, 5, 6))
    with pytest.raises(TensorFileError, match=r"tensor plane\.xy: expected"):
        unpack_tensors(pack_tensors(GRID, tensors), bigger)


def test_truncated_and_padded_files_are_refused() -> None:
    data = pack_tensors(COMPACT, random_tensors(COMPACT))
    for cut in (0, 4, 8, 100, len(data) - 1):
        with pytest.raises(TensorFileError):
            unpack_tensors(data[:cut], COMPACT)
    with pytest.raises(TensorFileError, match="bytes of data"):
        unpack_tensors(data + b"\0", COMPACT)
    with pytest.raises(TensorFileError, match="weights header: expected at most"):
        unpack_tensors(struct.pack("<Q", 2**60) + data[8:], COMPACT)


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_mutated_files_give_tensors_or_an_error(data: st.DataObject) -> None:
    raw = bytearray(pack_tensors(COMPACT, random_tensors(COMPACT)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, min(len(raw) - 1, 800)))] = data.draw(st.integers(0, 255))
    try:
        tensors = unpack_tensors(bytes(raw), COMPACT)
    except BridgeError:
        return
    assert {n: (a.dtype.name, a.shape) for n, a in tensors.items()} == {
        n: (t.dtype, t.shape) for n, t in COMPACT.tensors().items()
    }
