"""Checkpoints that a kill at any instant leaves loadable: safetensors files, replaced whole."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from .errors import TrainerError

__all__ = ["SCHEMA", "CheckpointError", "Checkpoints", "State", "read_state", "write_state"]

SCHEMA = 2
"""Version of what a checkpoint holds; another one is refused, never guessed at."""

_PREFIX = ".checkpoint-"
_META = "doublure"
_log = logging.getLogger(__name__)

Tensors = dict[str, NDArray[Any]]


class CheckpointError(TrainerError):
    """A checkpoint that is damaged, or that another version wrote."""


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint holds: named arrays, and everything else as plain JSON data."""

    tensors: Tensors
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one job, in one directory: `last`, `previous` and `best`.

    One process writes at a time; the caller sees to that. Opening sweeps temporary files that a
    killed writer left.

    Args:
        directory: Created if missing.
    Raises:
        OSError: The directory cannot be created or read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(f"{_PREFIX}*"):
            leftover.unlink(missing_ok=True)

    @property
    def last(self) -> Path:
        return self.directory / "last.safetensors"

    @property
    def previous(self) -> Path:
        return self.directory / "previous.safetensors"

    @property
    def best(self) -> Path:
        return self.directory / "best.safetensors"

    def save(self, state: State, *, best: State | None = None) -> Path:
        """Write `last`, keeping the one before as `previous`; and `best`, where given.

        At every instant at least one complete checkpoint has its final name.

        Raises:
            OSError: The directory cannot be written, or the disk is full; what was there stays.
        """
        if best is not None:
            self._put(best, self.best)
        if self.last.exists():
            # A second name for the old file, so that there is no moment without `last`.
            spare = self.directory / f"{_PREFIX}previous"
            spare.unlink(missing_ok=True)
            try:
                os.link(self.last, spare)
            except OSError:  # a file system without hard links
                spare.write_bytes(self.last.read_bytes())
            spare.replace(self.previous)
        self._put(state, self.last)
        return self.last

    def load(self) -> State | None:
        """The newest checkpoint that is whole: `last`, else `previous`, else `best`.

        Returns:
            None where there are no checkpoints.
        Raises:
            CheckpointError: There are some, and none can be used.
        """
        problems = []
        for path in (self.last, self.previous, self.best):
            try:
                return read_state(path)
            except FileNotFoundError:
                continue
            except CheckpointError as error:
                _log.warning("%s; trying an older one", error)
                problems.append(error)
        if problems:
            raise problems[0]
        return None

    def _put(self, state: State, path: Path) -> None:
        temporary = self.directory / f"{_PREFIX}{path.stem}"
        try:
            write_state(state, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_directory(self.directory)


def write_state(state: State, path: Path) -> None:
    """Write one file and force it to the disk. Not atomic by itself: see `Checkpoints.save`."""
    tensors = {name: np.ascontiguousarray(value) for name, value in state.tensors.items()}
    header = json.dumps({"schema": SCHEMA, **state.meta}, allow_nan=False)
    metadata = {_META: header, "sha256": _digest(tensors, header)}
    data = safetensors.numpy.save(tensors, metadata=metadata)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_state(path: Path) -> State:
    """Read one file, checking its digest.

    Raises:
        FileNotFoundError: There is none.
        CheckpointError: It is damaged, not ours, or of another schema.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            str(path), expected="a whole safetensors file", got=str(error)
        ) from error
    header = metadata.get(_META)
    if header is None:
        raise CheckpointError(
            str(path), expected="a checkpoint of doublure", got="another safetensors file"
        )
    if _digest(tensors, header) != metadata.get("sha256"):
        raise CheckpointError(
            str(path), expected="contents that match their digest", got="damaged contents"
        )
    meta = json.loads(header)
    if meta.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{path}: schema",
            expected=SCHEMA,
            got=repr(meta.get("schema")),
            next_step="use the version of doublure that wrote it, or another directory",
        )
    return State(tensors, meta)


def _digest(tensors: Mapping[str, NDArray[Any]], header: str) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"\0{name}\0{value.dtype.str}\0{value.shape}\0".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def _sync_directory(directory: Path) -> None:
    """Make a rename durable; where directories cannot be opened (Windows), it already is."""
    try:
        fd = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
