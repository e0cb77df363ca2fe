"""Datasets on disk: those of any engine that keeps to the format load, and nothing damaged does."""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doublure_bridge import (
    DatasetError,
    DatasetManifest,
    Split,
    open_dataset,
    read_manifest,
    write_manifest,
)

PIXELS = 16
SIZE = (40, 30)
# An engine on the JVM: floats in the shortest form without trailing zeros, exponents in capitals,
# keys in the order of a hash map, and none that the format does not name.
FOREIGN = """{
  "rowFormat": "little-endian float32: x,y,t,r,g,b",
  "color": "linear RGB, unclamped, opaque",
  "seed": 4090,
  "sourceShaderDigest": "%s",
  "parameterRange": [
    -1,
    1
  ],
  "coordinates": "pixel centers; x right, y down; x,y,t normalized to [-1,1]",
  "resolution": [
    40,
    30
  ],
  "schema": 1,
  "sourceKind": "captured-module",
  "splits": {
    "validation": {
      "sha256": "%s",
      "file": "validation.f32",
      "parameters": [
        -0.618034,
        1.0E-4
      ],
      "rows": 32
    },
    "train": {
      "sha256": "%s",
      "file": "train.f32",
      "parameters": [
        -1,
        0,
        1
      ],
      "rows": 48
    }
  },
  "fixedState": "Fixed camera, geometry, textures and all other uniforms"
}
"""


def row_bytes(parameters: list[float]) -> bytes:
    """Rows packed one number at a time, as a ByteBuffer is filled."""
    out = b""
    for i, t in enumerate(parameters):
        for j in range(PIXELS):
            x, y = (j * 7 + i) % SIZE[0], (j * 3) % SIZE[1]
            out += struct.pack(
                "<6f", (x + 0.5) / SIZE[0] * 2 - 1, (y + 0.5) / SIZE[1] * 2 - 1, t,
                0.25 * j, -0.5, 1000.0 + i,
            )  # fmt: skip
    return out


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    directory = tmp_path / "foreign"
    directory.mkdir()
    train, validation = row_bytes([-1.0, 0.0, 1.0]), row_bytes([-0.618034, 1e-4])
    (directory / "train.f32").write_bytes(train)
    (directory / "validation.f32").write_bytes(validation)
    (directory / "source-0.vert").write_text("void main() {}")
    (directory / "source-0.frag").write_text("void main() {}")
    digests = [hashlib.sha256(data).hexdigest() for data in (b"source", validation, train)]
    (directory / "dataset.json").write_text(FOREIGN % tuple(digests))
    return directory


def change(directory: Path, edit: Callable[[Any], object]) -> None:
    """Edit the manifest in place."""
    path = directory / "dataset.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def replace_rows(directory: Path, split: str, edit: Callable[[Any], object]) -> None:
    """Edit rows, and the digest with them: as an engine at fault would have written them."""
    path = directory / f"{split}.f32"
    rows = np.frombuffer(path.read_bytes(), "<f4").reshape(-1, 6).copy()
    edit(rows)
    path.write_bytes(rows.tobytes())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    change(directory, lambda d: d["splits"][split].update(sha256=digest))


def test_a_dataset_of_another_engine_loads(foreign: Path) -> None:
    data = open_dataset(foreign)
    manifest = data.manifest
    assert (data.train.shape, data.validation.shape) == ((48, 6), (32, 6))
    assert data.train.dtype == np.float32
    assert not data.train.flags.writeable
    assert data.train[17].tolist() == pytest.approx(
        [(8.5 / 40) * 2 - 1, (3.5 / 30) * 2 - 1, 0.0, 0.25, -0.5, 1001.0]
    )
    assert manifest.train.parameters == (-1.0, 0.0, 1.0)
    assert manifest.validation.parameters == (-0.618034, 1e-4)
    assert manifest.parameter_range == (-1.0, 1.0)
    assert manifest.resolution == SIZE
    assert manifest.seed == 4090
    assert manifest.source_kind == "captured-module"
    assert manifest.fixed_state.startswith("Fixed camera")
    assert manifest.source_digest == ""
    assert manifest.extra == {}


def test_a_manifest_reads_back_with_further_keys(foreign: Path) -> None:
    change(foreign, lambda d: d.update(sourceDigest="ab" * 32, studio={"take": 3}))
    manifest = read_manifest(foreign)
    assert manifest.extra == {"studio": {"take": 3}}
    assert manifest.source_digest == "ab" * 32
    (foreign / "dataset.json").unlink()
    assert write_manifest(foreign, manifest) == foreign / "dataset.json"
    assert read_manifest(foreign) == manifest
    assert open_dataset(foreign).manifest == manifest
    assert not list(foreign.glob(".*"))


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    split = Split("a.f32", 4, (0.0, 0.5), "0" * 64)
    manifest = DatasetManifest(
        train=split, validation=split, source_shader_digest="ab", parameter_range=(0.0, 1.0),
        resolution=(8, 8), seed=1,
    )  # fmt: skip
    with pytest.raises(DatasetError, match="other rows than those of train"):
        write_manifest(tmp_path, manifest)
    assert not list(tmp_path.iterdir())


MANIFESTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "another schema": (
        lambda d: d.update(schema=2),
        "schema: expected 1, got 2; read it with the version that wrote it",
    ),
    "schema as text": (lambda d: d.update(schema="1"), "schema: expected 1, got '1'"),
    "schema true": (lambda d: d.update(schema=True), "schema: expected 1, got True"),
    "another row format": (lambda d: d.update(rowFormat="x,y"), "rowFormat: expected 'little"),
    "other coordinates": (lambda d: d.update(coordinates="y up"), "coordinates: expected 'pixel"),
    "another colour": (lambda d: d.update(color="sRGB"), "color: expected 'linear RGB"),
    "no fixed state": (lambda d: d.pop("fixedState"), "fixedState: expected text, got None"),
    "no digest": (lambda d: d.pop("sourceShaderDigest"), "sourceShaderDigest: expected hex"),
    "an odd digest": (lambda d: d.update(sourceDigest=7), "sourceDigest: expected hexadecimal"),
    "a range that falls": (
        lambda d: d.update(parameterRange=[1, -1]), "parameterRange: expected two numbers, rising"
    ),
    "a range of three": (lambda d: d.update(parameterRange=[0, 1, 2]), "parameterRange: expected"),
    "a range without end": (
        lambda d: d.update(parameterRange=[0, float("inf")]), "finite numbers, got inf"
    ),
    "an endless number": (
        lambda d: d.update(parameterRange=[0, 10**400]), "parameterRange: expected finite numbers"
    ),
    "no size": (lambda d: d.update(resolution=[0, 30]), "resolution: expected a width and a heig"),
    "half a size": (lambda d: d.update(resolution=[40.5, 30]), "resolution: expected a width"),
    "an endless seed": (lambda d: d.update(seed=1 << 70), "seed: expected a whole number of 64"),
    "a broken seed": (lambda d: d.update(seed=1.5), "seed: expected a whole number of 64"),
    "no splits": (lambda d: d.pop("splits"), "splits: expected a map of train and validation"),
    "one split": (lambda d: d["splits"].pop("validation"), "splits: expected a map of train and"),
    "a third split": (
        lambda d: d["splits"].update(test=d["splits"]["train"]), "a map of train and validation"
    ),
    "rows that frames do not divide": (
        lambda d: d["splits"]["train"].update(rows=47),
        "splits.train.rows: expected 1..268435456, as many for each of 3 frames, got 47",
    ),
    "no rows": (lambda d: d["splits"]["train"].update(rows=0), "splits.train.rows: expected 1.."),
    "rows beyond reason": (
        lambda d: d["splits"]["train"].update(rows=3 << 60), "splits.train.rows: expected 1.."
    ),
    "rows in halves": (lambda d: d["splits"]["train"].update(rows=48.0), "splits.train.rows"),
    "more rows than there are": (
        lambda d: d["splits"]["train"].update(rows=3 << 26),
        "train.f32: expected 201326592 rows, 4831838208 bytes, got 1152 bytes",
    ),
    "no frames": (
        lambda d: d["splits"]["train"].update(parameters=[]), "parameters: expected one number a"
    ),
    "a frame outside": (
        lambda d: d["splits"]["train"].update(parameters=[-1, 0, 1.5]),
        "splits.train.parameters: expected numbers in -1..1, got 1.5",
    ),
    "a frame nowhere": (
        lambda d: d["splits"]["train"].update(parameters=[-1, float("nan"), 1]),
        "splits.train.parameters: expected finite numbers, got nan",
    ),
    "a short digest": (
        lambda d: d["splits"]["train"].update(sha256="ab"), "expected 64 hexadecimal digits"
    ),
    "the same file twice": (
        lambda d: d["splits"]["validation"].update(file="train.f32"), "other rows than those of"
    ),
    "the same rows twice": (
        lambda d: d["splits"]["validation"].update(sha256=d["splits"]["train"]["sha256"]),
        "other rows than those of",
    ),
    **{
        f"a way out: {file}": (
            lambda d, file=file: d["splits"]["train"].update(file=file),  # type: ignore[misc]
            "splits.train.file: expected a file's name, got",
        )
        for file in ("../train.f32", "/etc/passwd", "a/b", "a\\b", "..", ".", "", "a\n", "c:x")
    },
}  # fmt: skip


@pytest.mark.parametrize("fault", MANIFESTS)
def test_a_wrong_manifest_is_refused(foreign: Path, fault: str) -> None:
    edit, text = MANIFESTS[fault]
    change(foreign, edit)
    with pytest.raises(DatasetError) as caught:
        open_dataset(foreign)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "expected JSON"),
        (b"\xff\xfe", "expected JSON"),
        (b'{"schema": 1', "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b'{"schema": ' + b"9" * 5000 + b"}", "expected JSON"),
        (b"[1]", "expected a map, got list"),
        (b" " * (4 << 20) + b"{}", "expected at most 4194304 bytes"),
    ],
)
def test_what_is_no_manifest_is_refused(foreign: Path, data: bytes, text: str) -> None:
    (foreign / "dataset.json").write_bytes(data)
    with pytest.raises(DatasetError, match=text):
        read_manifest(foreign)


def test_a_directory_without_a_manifest_is_no_dataset(foreign: Path) -> None:
    (foreign / "dataset.json").unlink()
    with pytest.raises(DatasetError, match=r"dataset.json: expected a dataset, got No such file"):
        open_dataset(foreign)


def test_a_missing_file_is_named(foreign: Path) -> None:
    (foreign / "validation.f32").unlink()
    with pytest.raises(DatasetError, match=r"validation.f32: expected rows, got No such file"):
        open_dataset(foreign)


@pytest.mark.parametrize("bytes_", [-24, -1, 1, 24])
def test_a_file_of_another_size_is_refused(foreign: Path, bytes_: int) -> None:
    path = foreign / "train.f32"
    data = path.read_bytes()
    path.write_bytes(data[:bytes_] if bytes_ < 0 else data + bytes(bytes_))
    text = f"expected 48 rows, 1152 bytes, got {1152 + bytes_} bytes"
    with pytest.raises(DatasetError, match=text):
        open_dataset(foreign, verify=False)


@pytest.mark.parametrize("at", [0, 500, 1151])
def test_one_changed_bit_is_found(foreign: Path, at: int) -> None:
    path = foreign / "train.f32"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"train.f32: expected sha256 [0-9a-f]{64}, got"):
        open_dataset(foreign)
    assert len(open_dataset(foreign, verify=False).train) == 48


@pytest.mark.parametrize("column", range(6))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_are_refused(foreign: Path, column: int, value: float) -> None:
    replace_rows(foreign, "validation", lambda rows: rows.__setitem__((31, column), value))
    with pytest.raises(DatasetError, match=r"validation.f32: row 31: expected finite numbers"):
        open_dataset(foreign)


@pytest.mark.parametrize("column", range(3))
@pytest.mark.parametrize("value", [1.0001, -1.0001, 40.0])
def test_coordinates_outside_are_refused(foreign: Path, column: int, value: float) -> None:
    replace_rows(foreign, "train", lambda rows: rows.__setitem__((5, column), value))
    with pytest.raises(DatasetError, match=r"train.f32: row 5: expected x, y, t in \[-1, 1\]"):
        open_dataset(foreign)
