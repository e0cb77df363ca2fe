"""Offline capture: a dataset from any engine that can draw its source at a parameter.

`capture_dataset` blocks and is called between frames. What it writes is `docs/datasets.md`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from doublure_bridge import DatasetManifest, Split, write_manifest
from doublure_bridge.dataset import MANIFEST

from ..errors import CaptureError
from .java_random import JavaRandom

__all__ = ["FORMATS", "OfflineHost", "capture_dataset", "shader_digest"]

FORMATS = {"rgba16float": np.dtype(np.float16), "rgba32float": np.dtype(np.float32)}
"""Formats of a colour attachment that hold linear colour unclamped."""

_FIXED = "Fixed camera, geometry, textures and all other uniforms"
_OPAQUE = 1e-3
_MAX_SIDE = 65536
_HELD_OUT_OFFSET = np.float32(0.381966)  # the golden section: never on a training frame

Array: TypeAlias = npt.NDArray[Any]
Progress: TypeAlias = Callable[[int, int], None]


class OfflineHost(Protocol):
    """An engine with a render target whose image depends on one parameter, between two frames."""

    @property
    def name(self) -> str:
        """Of the engine, for the manifest."""

    @property
    def width(self) -> int: ...

    @property
    def height(self) -> int: ...

    @property
    def formats(self) -> Sequence[str]:
        """Of the target's colour attachments, in WebGPU's words; one of `FORMATS`, once."""

    @property
    def shaders(self) -> Mapping[str, str]:
        """Texts of the shaders that draw the source now, by file name: `sky.vert`, `sky.frag`."""

    @property
    def in_frame(self) -> bool:
        """Whether a frame is being recorded, so that nothing can be drawn here."""

    def source_digest(self) -> str:
        """Digest over shaders and fixed state as they are now, hexadecimal: `Source.digest`."""

    def render(self, t: float) -> Array:
        """Draw the source at parameter `t` and wait: float16|float32 [height, width, 4], linear.

        The array is read before the next call, and may be the same one each time.
        """


def capture_dataset(
    host: OfflineHost,
    directory: Path | str,
    *,
    parameter: tuple[float, float] = (-1.0, 1.0),
    training_frames: int = 48,
    validation_frames: int = 13,
    pixels_per_frame: int = 2048,
    seed: int = 4090,
    fixed_state: str = _FIXED,
    progress: Progress | None = None,
) -> Path:
    """Draw the source over its parameter's range and write random pixels of each frame. Blocks.

    Training frames lie at i/(n-1) of the range, validation frames at (i + 0.381966)/m: other
    frames, not other pixels of the same. Rows go to disk frame by frame. The manifest is written
    last; a failure, an interrupt too, removes what was written, and leaves no manifest if it
    cannot even do that.

    Args:
        host: Borrowed; draws on this thread.
        directory: A new or an empty one.
        parameter: Range of t, as `host.render` takes it.
        training_frames: 2..512; `validation_frames` 2..128, `pixels_per_frame` 1..65536.
        seed: Of the pixels; the same sequence as java.util.Random gives.
        fixed_state: What stays fixed while t moves, in words.
        progress: Called with frames done and frames in all.
    Returns:
        `directory`.
    Raises:
        CaptureError: A setting is out of range, the host cannot be captured, the source draws
            numbers that are not finite or not opaque, or it changed meanwhile; the disk is full.
    """
    directory = Path(directory)
    _check_host(host)
    _check_count("training_frames", training_frames, 2, 512)
    _check_count("validation_frames", validation_frames, 2, 128)
    _check_count("pixels_per_frame", pixels_per_frame, 1, 65536)
    _check_count("seed", seed, -(1 << 63), (1 << 63) - 1)
    if not isinstance(fixed_state, str):
        raise CaptureError("fixed_state", expected="text", got=type(fixed_state).__name__)
    low, high = _range(parameter)
    frames = {
        "train": np.arange(training_frames, dtype=np.float32) / np.float32(training_frames - 1),
        "validation": (np.arange(validation_frames, dtype=np.float32) + _HELD_OUT_OFFSET)
        / np.float32(validation_frames),
    }
    _check_apart(np.concatenate(list(frames.values())), low, high)
    watch = _Watch(host)
    files = _source_files(host.shaders)
    random = JavaRandom(seed)
    total, done = training_frames + validation_frames, 0
    with _writing(directory) as made:
        for file_name, text in files.items():
            with made.create(file_name) as out:
                out.write(text.encode("utf-8", "surrogatepass"))
        splits: dict[str, Split] = {}
        for split, fractions in frames.items():
            digest, parameters = hashlib.sha256(), []
            with made.create(f"{split}.f32") as out:
                for fraction in fractions:
                    at = low + fraction * (high - low)
                    # The shortest decimal that reads back to the same float32.
                    parameters.append(float(str(at)))
                    watch.check()
                    image = _render(host, float(at))
                    columns, lines = random.pixels(pixels_per_frame, host.width, host.height)
                    rows = _rows(image, columns, lines, fraction * 2 - 1).tobytes()
                    digest.update(rows)
                    out.write(rows)
                    done += 1
                    if progress is not None:
                        progress(done, total)
                out.flush()
                os.fsync(out.fileno())
            count = len(fractions) * pixels_per_frame
            splits[split] = Split(f"{split}.f32", count, tuple(parameters), digest.hexdigest())
        watch.check()
        manifest = DatasetManifest(
            train=splits["train"],
            validation=splits["validation"],
            source_shader_digest=watch.shaders,
            source_digest=watch.source,
            parameter_range=(float(str(low)), float(str(high))),
            resolution=(host.width, host.height),
            seed=seed,
            fixed_state=fixed_state,
            extra={
                "doublure": {
                    "version": _version(),
                    "host": host.name,
                    "format": host.formats[0],
                    "shaders": list(files),
                }
            },
        )
        made.names.append(MANIFEST)
        write_manifest(directory, manifest)
    return directory


def shader_digest(shaders: Mapping[str, str]) -> str:
    """SHA-256 over the shaders sorted by name, each its name, 0, its text, 0; hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(shaders):
        digest.update(f"{name}\0{shaders[name]}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


class _Watch:
    """What the source was at first, compared before every frame."""

    def __init__(self, host: OfflineHost) -> None:
        self._host = host
        self.shaders = shader_digest(host.shaders)
        self.source = str(host.source_digest())
        if not re.fullmatch("[0-9a-f]{2,}", self.source):
            raise CaptureError(
                "OfflineHost.source_digest()", expected="lower-case hexadecimal digits",
                got=repr(self.source)[:60], next_step="return Source(...).digest.hex()",
            )  # fmt: skip

    def check(self) -> None:
        if shader_digest(self._host.shaders) != self.shaders:
            changed = "Source shader changed during capture"
        elif str(self._host.source_digest()) != self.source:
            changed = "Source state changed during capture"
        else:
            return
        raise CaptureError(changed, next_step="let nothing reload meanwhile, and capture anew")


def _check_host(host: OfflineHost) -> None:
    if host.in_frame:
        raise CaptureError("capture", expected="to be called between frames", got="a frame begun")
    formats = tuple(host.formats)
    if len(formats) != 1 or formats[0] not in FORMATS:
        raise CaptureError(
            "OfflineHost.formats", expected="one linear RGBA16F or RGBA32F attachment "
            f"({', '.join(FORMATS)})", got=", ".join(map(str, formats)) or "none",
        )  # fmt: skip
    for side in ("width", "height"):
        _check_count(f"OfflineHost.{side}", getattr(host, side), 1, _MAX_SIDE)
    texts = host.shaders
    empty = [name for name, text in texts.items() if not (isinstance(text, str) and text.strip())]
    if empty or not texts:
        raise CaptureError(
            "OfflineHost.shaders", expected="at least one valid shader",
            got=f"no text for {empty[0]!r}" if empty else "none",
        )  # fmt: skip


def _check_count(what: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise CaptureError(what, expected=f"a whole number in {low}..{high}", got=repr(value)[:60])


def _range(parameter: tuple[float, float]) -> tuple[np.float32, np.float32]:
    """The range in float32, as it is computed with."""
    with np.errstate(over="ignore", invalid="ignore"):
        try:
            low, high = (np.float32(value) for value in parameter)
        except (TypeError, ValueError, OverflowError):
            raise CaptureError(
                "parameter", expected="two numbers", got=repr(parameter)[:60]
            ) from None
        if not (np.isfinite(low) and np.isfinite(high) and low < high and np.isfinite(high - low)):
            raise CaptureError(
                "parameter", expected="a finite range with low < high in float32",
                got=f"{parameter[0]!r}, {parameter[1]!r}"[:60],
            )  # fmt: skip
    return low, high


def _check_apart(fractions: npt.NDArray[np.float32], low: np.float32, high: np.float32) -> None:
    parameters = low + fractions * (high - low)
    if len(np.unique(parameters)) < len(parameters):
        raise CaptureError(
            "parameter", expected=f"a range that holds {len(parameters)} float32 numbers",
            got=f"{low} to {high}", next_step="move it towards 0, or capture fewer frames",
        )  # fmt: skip


def _source_files(shaders: Mapping[str, str]) -> dict[str, str]:
    """Texts by the file they go to: source-0.vert and source-0.frag for `sky.vert`, `sky.frag`."""
    files: dict[str, str] = {}
    modules: dict[tuple[str, str], int] = {}
    for name in sorted(shaders):
        match = re.fullmatch(r"(.+)(\.[A-Za-z0-9]{1,8})", name, re.DOTALL)
        stem, suffix = match.groups() if match else (name, "")
        # A name without an ending is a module of its own, also beside one of that stem.
        number = modules.setdefault((stem, "" if suffix else "alone"), len(modules))
        files[f"source-{number}{suffix or '.txt'}"] = shaders[name]
    return files


def _render(host: OfflineHost, at: float) -> Array:
    """One image, checked whole."""
    try:
        image = host.render(at)
    except OSError as error:
        # Not the dataset's directory, which other errors of the system are about.
        raise CaptureError("OfflineHost.render()", got=str(error)) from error
    want = (host.height, host.width, 4)
    kinds = (np.dtype(np.float16), np.dtype(np.float32))
    if not isinstance(image, np.ndarray) or image.shape != want or image.dtype not in kinds:
        got = (
            f"{image.dtype} {list(image.shape)}"
            if isinstance(image, np.ndarray)
            else type(image).__name__
        )
        raise CaptureError(
            "OfflineHost.render()", expected=f"float16|float32 {list(want)}", got=got,
            next_step="return linear float pixels with alpha",
        )  # fmt: skip
    if not np.isfinite(image).all():
        row, column = np.argwhere(~np.isfinite(image).all(axis=2))[0]
        raise CaptureError(
            f"Source produced NaN/Inf at parameter {at:.9g}", expected="finite colours",
            got=f"{image[row, column].tolist()} at column {column}, row {row}",
        )  # fmt: skip
    # In float32: 1 - alpha of a float16 is exact, its comparison in float16 would not be.
    clear = np.abs(image[..., 3].astype(np.float32) - 1) >= _OPAQUE
    if clear.any():
        row, column = np.argwhere(clear)[0]
        raise CaptureError(
            f"The learned RGB model requires opaque output; at parameter {at:.9g}",
            expected="alpha 1", got=f"{image[row, column, 3]} at column {column}, row {row}",
            next_step="handle coverage separately",
        )  # fmt: skip
    return image


def _rows(
    image: Array, columns: npt.NDArray[np.int64], lines: npt.NDArray[np.int64], t: np.float32
) -> npt.NDArray[np.float32]:
    """x, y, t, r, g, b of the pixels, float32 [n, 6], little-endian; all arithmetic in float32."""
    height, width, _ = image.shape
    half, two, one = np.float32(0.5), np.float32(2), np.float32(1)
    rows = np.empty((len(columns), 6), "<f4")
    rows[:, 0] = (columns.astype(np.float32) + half) / np.float32(width) * two - one
    rows[:, 1] = (lines.astype(np.float32) + half) / np.float32(height) * two - one
    rows[:, 2] = t
    rows[:, 3:] = image[lines, columns, :3]
    return rows


class _Files:
    """Files of one capture, in the order they were made."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.names: list[str] = []

    def create(self, name: str) -> IO[bytes]:
        # Exclusive: of two captures into one directory one fails, and neither mixes.
        file = (self._directory / name).open("xb")
        self.names.append(name)
        return file


@contextmanager
def _writing(directory: Path) -> Iterator[_Files]:
    """A new or an empty directory to write to; a failure takes all of it back."""
    new: list[Path] = []
    files = _Files(directory)
    try:
        missing = directory
        while not missing.exists() and missing != missing.parent:
            new.append(missing)
            missing = missing.parent
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise CaptureError(
                f"dataset directory {directory}", expected="a new or an empty one",
                got="one that is not empty", next_step="Choose a new dataset directory",
            )  # fmt: skip
        yield files
    except BaseException as error:
        # The manifest first, if it is there: without it the rest is no dataset.
        for name in reversed(files.names):
            with contextlib.suppress(OSError):
                (directory / name).unlink(missing_ok=True)
        for path in new:
            with contextlib.suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError):
            raise CaptureError(
                f"dataset directory {directory}", expected="one that can be written",
                got=error.strerror or str(error), next_step="choose another, or free space",
            ) from error  # fmt: skip
        raise


def _version() -> str:
    try:
        return version("doublure")
    except PackageNotFoundError:
        return "unknown"
