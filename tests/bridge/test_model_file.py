"""Models on disk: what is written is what is read, and nothing else is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doublure_bridge import (
    CompactSpec,
    GridSpec,
    ModelFile,
    ModelFileError,
    ModelSpec,
    TensorFileError,
    read_model,
    tensors_metadata,
    write_model,
)
from doublure_bridge.model_file import _decimals

GRID = GridSpec(xy=(8, 12), xt=(4, 12), yt=(4, 8), volume=(3, 5, 6))
COMPACT = CompactSpec(hidden=8, layers=2)
SCORES = {"psnr_db": 41.5, "relmse": 1e-3, "peak_ratio": 0.98, "rows": 4096}
both = pytest.mark.parametrize("spec", [GRID, COMPACT], ids=lambda s: s.family)
either = pytest.mark.parametrize("file", ["weights.safetensors", "weights.json"])


def example(spec: ModelSpec, seed: int = 1) -> ModelFile:
    rng = np.random.default_rng(seed)
    return ModelFile(
        spec=spec,
        tensors={n: rng.normal(size=t.shape).astype(t.dtype) for n, t in spec.tensors().items()},
        name="plasma",
        parameter=(0.0, 6.25),
        resolution=(64, 48),
        source_digest="ab" * 32,
        seed=3,
        steps=500,
        scores={"held_out": SCORES},
        probes=(rng.uniform(-1, 1, (32, 3)).astype(np.float32), rng.normal(size=(32, 3))),
    )


@both
@either
def test_both_files_read_back_exactly(spec: ModelSpec, file: str, tmp_path: Path) -> None:
    model = example(spec)
    assert write_model(tmp_path / "m", model) == tmp_path / "m" / "weights.safetensors"
    back = read_model(tmp_path / "m" / file)
    for name, tensor in model.tensors.items():
        assert back.tensors[name].tobytes() == tensor.tobytes()
    assert back.probes is not None
    assert model.probes is not None
    for mine, theirs in zip(model.probes, back.probes, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.tobytes() == theirs.tobytes()
    assert back.scores == {"held_out": SCORES, "test": None}
    skip: dict[str, Any] = {"tensors": {}, "probes": None, "scores": {}}
    assert replace(back, **skip) == replace(model, **skip)


def test_a_directory_is_read_by_its_safetensors_file(tmp_path: Path) -> None:
    write_model(tmp_path, example(COMPACT))
    (tmp_path / "weights.json").unlink()
    assert read_model(tmp_path).name == "plasma"


@both
def test_the_same_model_gives_the_same_bytes(spec: ModelSpec, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_model(tmp_path / name, example(spec))
    for file in ("weights.safetensors", "weights.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "weights.json",
        "weights.safetensors",
    ]


def test_the_json_file_can_be_read_by_hand(tmp_path: Path) -> None:
    write_model(tmp_path, example(GRID))
    text = (tmp_path / "weights.json").read_text()
    plain = json.loads(text)
    assert list(plain)[:4] == ["format", "model", "schema", "name"]
    assert list(plain)[-1] == "tensors"
    assert max(map(len, text.splitlines())) < 1000
    assert len(plain["golden"]["points"]) == 32
    assert np.array(plain["tensors"]["volume"]).shape == (3, 5, 6, 4)
    words = " ".join(plain["arithmetic"])
    for name in ("plane.xy", "plane.xt", "plane.yt", "volume", "mlp.i.weight", "mlp.2", "19"):
        assert name in words


def test_every_float16_has_a_decimal_that_reads_back() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)]
    texts = _decimals(finite)
    back = np.array([json.loads(t) for t in texts], np.float64).astype(np.float16)
    assert back.tobytes() == finite.tobytes()
    assert max(map(len, texts)) <= len("-6.1035e-05")


def test_a_foreign_reader_finds_metadata_and_tensors(tmp_path: Path) -> None:
    numpy_io = pytest.importorskip("safetensors.numpy", reason="needs the safetensors package")
    model = example(GRID)
    data = write_model(tmp_path, model).read_bytes()
    assert list(tensors_metadata(data)) == ["model", "doublure", "sha256"]
    found = numpy_io.load(data)
    assert found.keys() == model.tensors.keys()
    assert np.array_equal(found["volume"], model.tensors["volume"])


@both
@either
def test_a_changed_number_is_noticed(spec: ModelSpec, file: str, tmp_path: Path) -> None:
    write_model(tmp_path, example(spec))
    path = tmp_path / file
    if path.suffix == ".json":
        plain = json.loads(path.read_text())
        plain["tensors"]["mlp.0.bias"][0] += 1.0
        path.write_text(json.dumps(plain))
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(ModelFileError, match=f"{file}: contents: expected numbers that match"):
        read_model(path)


@either
def test_a_specification_and_a_header_that_know_more_by_now_are_still_whole(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, example(COMPACT))
    monkeypatch.setattr(
        "doublure_bridge.model_file.spec_to_dict", lambda spec: {"family": spec.family, "more": 1}
    )
    monkeypatch.setattr("doublure_bridge.model_file._header", lambda _: {"more": 1})
    assert read_model(tmp_path / file).name == "plasma"


@pytest.mark.parametrize("length", [0, 7, 100, -1])
@either
def test_a_torn_file_is_refused(file: str, length: int, tmp_path: Path) -> None:
    write_model(tmp_path, example(COMPACT))
    path = tmp_path / file
    path.write_bytes(path.read_bytes()[: length if length >= 0 else -2])
    with pytest.raises(ModelFileError, match=file):
        read_model(path)


def test_a_missing_model_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"give a directory with weights\.safetensors"):
        read_model(tmp_path)


def test_another_schema_and_another_file_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, example(COMPACT))
    path = tmp_path / "weights.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(ModelFileError, match=r"header\.schema: expected 1, got 2"):
        read_model(path)
    foreign = tmp_path / "other.safetensors"
    foreign.write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelFileError, match="expected a model of doublure, got no model"):
        read_model(foreign)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "two\nlines"}, "model.name: expected one line"),
        ({"parameter": (1.0, 1.0)}, "model.parameter: expected two finite numbers, rising"),
        ({"parameter": (0.0, float("inf"))}, "model.parameter"),
        ({"resolution": (64, -1)}, "model.resolution: expected a width"),
        ({"source_digest": "xyz"}, "model.source_digest: expected hexadecimal"),
        ({"steps": -1}, "model.steps: expected a whole number"),
        ({"scores": {"test": {"psnr_db": float("nan")}}}, "model.scores: expected finite"),
        ({"probes": (np.zeros((4, 2)), np.zeros((4, 3)))}, "model.probes: expected finite points"),
    ],
)
def test_parts_that_do_not_fit_are_not_written(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=message):
        write_model(tmp_path / "m", replace(example(COMPACT), **change))
    assert not (tmp_path / "m").exists()


def test_weights_that_are_not_finite_or_not_the_specified_are_not_written(tmp_path: Path) -> None:
    model = example(COMPACT)
    bad = {**model.tensors, "mlp.0.bias": np.full(8, np.nan, np.float32)}
    with pytest.raises(ModelFileError, match=r"tensors\.mlp\.0\.bias: expected finite numbers"):
        write_model(tmp_path / "m", replace(model, tensors=bad))
    wide = {**model.tensors, "mlp.0.bias": np.zeros(9, np.float32)}
    with pytest.raises(TensorFileError, match=r"mlp\.0\.bias: expected float32 \[8\]"):
        write_model(tmp_path / "m", replace(model, tensors=wide))
    assert not (tmp_path / "m").exists()


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, example(COMPACT, seed=1))
    before = (tmp_path / "weights.safetensors").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("doublure_bridge.model_file.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_model(tmp_path, example(COMPACT, seed=2))
    assert (tmp_path / "weights.safetensors").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2
