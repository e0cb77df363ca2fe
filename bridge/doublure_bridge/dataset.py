"""A captured dataset on disk: its manifest, and its rows after they were checked.

The format is `docs/datasets.md`'s: dataset.json of schema 1, and a file of rows for each split, six
little-endian float32 a row: x, y, t in [-1, 1], then linear r, g, b. Reading needs NumPy alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import DatasetError

__all__ = [
    "DATASET_SCHEMA",
    "MANIFEST",
    "ROW_BYTES",
    "Dataset",
    "DatasetManifest",
    "Split",
    "open_dataset",
    "read_manifest",
    "write_manifest",
]

DATASET_SCHEMA = 1
ROW_BYTES = 24
MANIFEST = "dataset.json"
"""The file that makes a directory a dataset."""
ROW_FORMAT = "little-endian float32: x,y,t,r,g,b"
COORDINATES = "pixel centers; x right, y down; x,y,t normalized to [-1,1]"
COLOR = "linear RGB, unclamped, opaque"

_MAX_MANIFEST = 4 << 20
_MAX_ROWS = 1 << 28
_SLACK = 1e-6  # of coordinates: an engine may round the outermost frame's t
_CHUNK_ROWS = 1 << 18
_MAX_FLOAT = float(np.finfo(np.float64).max)

Rows: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Split:
    """One file of rows.

    Attributes:
        file: Its name beside dataset.json.
        rows: Number of rows; the same for each frame.
        parameters: The source's own parameter of each frame, in the order of the file.
        sha256: Of the file, hexadecimal.
    """

    file: str
    rows: int
    parameters: tuple[float, ...]
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the format's keys."""
        return {
            "file": self.file,
            "rows": self.rows,
            "parameters": list(self.parameters),
            "sha256": self.sha256,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetManifest:
    """What dataset.json says.

    Attributes:
        train, validation: The two splits.
        source_shader_digest: Over the source's shaders, hexadecimal.
        parameter_range: The source's parameter at t = -1 and t = +1.
        resolution: Width and height of the captured images, pixels.
        seed: Of the pixels that were picked.
        source_kind: `captured-module`, or what another capture calls itself.
        fixed_state: What stayed fixed, in words.
        source_digest: Over shaders and fixed state, hexadecimal; "" where the capture had none.
        extra: Further keys, kept as they are.
    """

    train: Split
    validation: Split
    source_shader_digest: str
    parameter_range: tuple[float, float]
    resolution: tuple[int, int]
    seed: int
    source_kind: str = "captured-module"
    fixed_state: str = ""
    source_digest: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for dataset.json, with the format's keys in its order, further ones last."""
        data: dict[str, Any] = {
            "schema": DATASET_SCHEMA,
            "sourceKind": self.source_kind,
            "sourceShaderDigest": self.source_shader_digest,
            "fixedState": self.fixed_state,
            "resolution": list(self.resolution),
            "parameterRange": list(self.parameter_range),
            "rowFormat": ROW_FORMAT,
            "coordinates": COORDINATES,
            "color": COLOR,
            "seed": self.seed,
            "splits": {"train": self.train.to_dict(), "validation": self.validation.to_dict()},
        }
        if self.source_digest:
            data["sourceDigest"] = self.source_digest
        return data | dict(self.extra)

    @classmethod
    def from_dict(cls, data: object) -> DatasetManifest:
        """Read and check a manifest.

        Raises:
            DatasetError: Naming the first key that is missing or wrong.
        """
        if not isinstance(data, Mapping):
            raise DatasetError(MANIFEST, expected="a map", got=type(data).__name__)
        if type(data.get("schema")) is not int or data["schema"] != DATASET_SCHEMA:
            raise DatasetError(
                f"{MANIFEST}: schema",
                expected=DATASET_SCHEMA,
                got=repr(data.get("schema")),
                next_step="read it with the version that wrote it",
            )
        if data.get("rowFormat") != ROW_FORMAT:
            raise _wrong("rowFormat", repr(ROW_FORMAT), data.get("rowFormat"))
        # What the numbers mean: another meaning would train as well, and wrongly.
        for key, meaning in (("coordinates", COORDINATES), ("color", COLOR)):
            if data.get(key) != meaning:
                raise _wrong(key, repr(meaning), data.get(key))
        splits = data.get("splits")
        if not isinstance(splits, Mapping) or sorted(splits) != ["train", "validation"]:
            raise _wrong("splits", "a map of train and validation", splits)
        known = {
            *("schema", "sourceKind", "sourceShaderDigest", "fixedState", "resolution"),
            *("parameterRange", "rowFormat", "coordinates", "color", "seed", "splits"),
            "sourceDigest",
        }
        low, high = _numbers(data, "parameterRange", 2)
        if not low < high:
            raise _wrong("parameterRange", "two numbers, rising", data["parameterRange"])
        size = data.get("resolution")
        if not (
            isinstance(size, list | tuple)
            and len(size) == 2
            and all(type(v) is int and 1 <= v <= 1 << 16 for v in size)
        ):
            raise _wrong("resolution", "a width and a height in pixels", size)
        if type(data.get("seed")) is not int or not -(1 << 63) <= data["seed"] < 1 << 63:
            raise _wrong("seed", "a whole number of 64 bits", data.get("seed"))
        train, validation = (_split(splits, n, (low, high)) for n in ("train", "validation"))
        # Held-out rows never train, whatever a manifest says.
        if train.file == validation.file or train.sha256 == validation.sha256:
            raise _wrong("splits.validation", "other rows than those of train", validation.file)
        return cls(
            train=train,
            validation=validation,
            source_shader_digest=_hexadecimal(data, "sourceShaderDigest", ""),
            parameter_range=(low, high),
            resolution=(size[0], size[1]),
            seed=data["seed"],
            source_kind=_text(data, "sourceKind"),
            fixed_state=_text(data, "fixedState"),
            source_digest=_hexadecimal(data, "sourceDigest", "") if "sourceDigest" in data else "",
            extra={key: value for key, value in data.items() if key not in known},
        )


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset that was opened: float32 [n, 6] rows, memory-mapped and read-only."""

    directory: Path
    manifest: DatasetManifest
    train: Rows
    validation: Rows


def read_manifest(directory: Path) -> DatasetManifest:
    """The manifest of a dataset directory; looks at no rows.

    Raises:
        DatasetError: There is none, or it is not one.
    """
    path = Path(directory) / MANIFEST
    try:
        if path.stat().st_size > _MAX_MANIFEST:
            raise DatasetError(str(path), expected=f"at most {_MAX_MANIFEST} bytes")
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise DatasetError(
            str(path),
            expected="a dataset",
            got=error.strerror or type(error).__name__,
            next_step="capture one; a capture that failed leaves no manifest",
        ) from error
    except (ValueError, RecursionError) as error:
        raise DatasetError(str(path), expected="JSON", got=str(error)[:80]) from None
    return DatasetManifest.from_dict(data)


def write_manifest(directory: Path, manifest: DatasetManifest) -> Path:
    """Write dataset.json, whole or not at all. It makes the files beside it a dataset: do it last.

    Raises:
        DatasetError: `read_manifest` would refuse it.
        OSError: It cannot be written.
    """
    data = manifest.to_dict()
    DatasetManifest.from_dict(data)
    path = Path(directory) / MANIFEST
    part = path.with_name(f".{MANIFEST}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def open_dataset(directory: Path, *, verify: bool = True) -> Dataset:
    """Open a dataset's rows.

    Args:
        verify: Check each file's SHA-256 and every number, which reads all of it once.
    Raises:
        DatasetError: A file is missing, changed, of another size, or holds rows that are none.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    return Dataset(
        directory,
        manifest,
        _open_rows(directory, manifest.train, verify),
        _open_rows(directory, manifest.validation, verify),
    )


def _open_rows(directory: Path, split: Split, verify: bool) -> Rows:
    path = directory / split.file
    try:
        size = path.stat().st_size
        if size != split.rows * ROW_BYTES:
            raise DatasetError(
                str(path),
                expected=f"{split.rows} rows, {split.rows * ROW_BYTES} bytes",
                got=f"{size} bytes",
                next_step="copy or capture it anew",
            )
        rows: Rows = np.memmap(path, dtype="<f4", mode="r").reshape(-1, 6)
    except OSError as error:
        raise DatasetError(
            str(path), expected="rows", got=error.strerror or type(error).__name__
        ) from error
    if verify:
        _verify(path, split, rows)
    return rows


def _verify(path: Path, split: Split, rows: Rows) -> None:
    digest = hashlib.sha256()
    wrong: DatasetError | None = None
    for start in range(0, len(rows), _CHUNK_ROWS):
        part = np.asarray(rows[start : start + _CHUNK_ROWS])
        digest.update(part.data)
        wrong = wrong or _find_wrong(path, part, start)
    # First, since what was changed has no other fault worth telling.
    if digest.hexdigest() != split.sha256:
        raise DatasetError(
            str(path),
            expected=f"sha256 {split.sha256}",
            got=digest.hexdigest(),
            next_step="the file was changed since its capture: copy or capture it anew",
        )
    if wrong is not None:
        raise wrong


def _find_wrong(path: Path, part: Rows, start: int) -> DatasetError | None:
    """The first row that no capture writes; `start` is the number of the first one here."""
    finite = np.isfinite(part).all(axis=1)
    if not finite.all():
        bad = int(np.argmin(finite))
        return DatasetError(
            f"{path}: row {start + bad}", expected="finite numbers", got=part[bad].tolist()
        )
    inside = (np.abs(part[:, :3]) <= 1.0 + _SLACK).all(axis=1)
    if not inside.all():
        bad = int(np.argmin(inside))
        return DatasetError(
            f"{path}: row {start + bad}",
            expected="x, y, t in [-1, 1]",
            got=part[bad, :3].tolist(),
        )
    return None


def _split(splits: Mapping[str, Any], name: str, span: tuple[float, float]) -> Split:
    where, data = f"splits.{name}", splits.get(name)
    if not isinstance(data, Mapping):
        raise _wrong(where, "a map", data)
    file, rows = data.get("file"), data.get("rows")
    # A name, and no way out of the directory.
    if not isinstance(file, str) or not re.fullmatch(r"[\w][\w.\-]*", file):
        raise _wrong(f"{where}.file", "a file's name", file)
    parameters = _numbers(data, "parameters", None, where=f"{where}.")
    if not parameters:
        raise _wrong(f"{where}.parameters", "one number a frame", data.get("parameters"))
    low, high = span
    slack = 1e-5 * max(abs(low), abs(high))  # they are sums in float32
    for parameter in parameters:
        if not low - slack <= parameter <= high + slack:
            raise _wrong(f"{where}.parameters", f"numbers in {low:g}..{high:g}", parameter)
    if type(rows) is not int or not 1 <= rows <= _MAX_ROWS or rows % len(parameters):
        raise _wrong(
            f"{where}.rows",
            f"1..{_MAX_ROWS}, as many for each of {len(parameters)} frames",
            rows,
        )
    digest = _hexadecimal(data, "sha256", f"{where}.")
    if len(digest) != 64:
        raise _wrong(f"{where}.sha256", "64 hexadecimal digits", digest)
    return Split(file, rows, parameters, digest)


def _numbers(
    data: Mapping[str, Any], key: str, count: int | None, *, where: str = ""
) -> tuple[float, ...]:
    values = data.get(key)
    if not isinstance(values, list | tuple) or count not in (None, len(values)):
        raise _wrong(f"{where}{key}", "finite numbers", values)
    for value in values:
        # By comparison: a whole number may be too long for a float.
        right = isinstance(value, int | float) and not isinstance(value, bool)
        if not right or not -_MAX_FLOAT <= value <= _MAX_FLOAT:
            raise _wrong(f"{where}{key}", "finite numbers", value)
    return tuple(float(value) for value in values)


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        raise _wrong(key, "text", value)
    return value


def _hexadecimal(data: Mapping[str, Any], key: str, where: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]+", value):
        raise _wrong(f"{where}{key}", "hexadecimal digits", value)
    return value


def _wrong(key: str, expected: str, got: object) -> DatasetError:
    text = repr(got)
    return DatasetError(
        f"{MANIFEST}: {key}",
        expected=expected,
        got=text if len(text) < 80 else f"{text[:77]}...",
    )
