"""The model directory while a job works in it: who may, and what lies there."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from .errors import OfflineError

__all__ = ["Workplace", "write_whole"]

_CHECKPOINTS = "checkpoints"
_SETTINGS = "settings.json"
_HISTORY = "history.json"
_LOCK = ".lock"
_SCHEMA = 1
_ALLOWED = ("training.log", "progress.json")
# A parent that starts the job as a child has made these already.


class Workplace:
    """A model directory held by one job: settings, history, progress, log and lock.

    Leaving the context closes the log and frees the lock; files stay.

    Args:
        directory: Created if missing.
        settings: Plain data that a resumed job must have in common with the one before.
        resume: Go on in a directory that holds a job of the same settings.
    Raises:
        OfflineError: The directory is in use, is not empty, or holds a job of other settings.
        OSError: It cannot be created or written.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.directory = Path(directory)
        self.checkpoints = self.directory / _CHECKPOINTS
        self.history: list[dict[str, Any]] = []
        """One entry a scored step; `resumed_at` cuts it."""
        wanted = {"schema": _SCHEMA, **settings}
        known = self._known()
        if known is None:
            self._check_empty()
        elif not resume:
            raise _not_empty(self.directory, ours=True)
        else:
            _check_same(self.directory, known, wanted)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = _locked(self.checkpoints / _LOCK)
        self._log: IO[str] | None = None
        try:
            if known is None:
                write_whole(self.checkpoints / _SETTINGS, json.dumps(wanted, indent=2) + "\n")
            elif (path := self.checkpoints / _HISTORY).exists():
                self.history = json.loads(path.read_text())
            # A parent may have sent our output there already: then printing it is writing it.
            log = self.directory / "training.log"
            if not _is_output(log):
                self._log = log.open("a", buffering=1)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Workplace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the log and free the lock; idempotent."""
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def resumed_at(self, step: int) -> None:
        """Forget what was noted after the checkpoint: it will be noted again."""
        self.history = [entry for entry in self.history if entry["step"] <= step]

    def save_history(self) -> None:
        """Write the history; before the checkpoint, which then never knows more than it."""
        write_whole(self.checkpoints / _HISTORY, json.dumps(self.history, allow_nan=False))

    def say(self, text: str) -> None:
        """One line for training.log; a full disk costs the line, not the job."""
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def progress(self, figures: Mapping[str, Any]) -> None:
        """Replace progress.json; a full disk costs the figures, not the job."""
        path = self.directory / "progress.json"
        temporary = path.with_name(f".{path.name}.tmp")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(figures, allow_nan=False) + "\n")
            temporary.replace(path)

    def _known(self) -> dict[str, Any] | None:
        """Settings of the job that is here already; None for none."""
        path = self.checkpoints / _SETTINGS
        try:
            known = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise OfflineError(
                str(path),
                expected="settings of a training",
                got=str(error),
                next_step="use a new model directory",
            ) from error
        if not isinstance(known, dict) or known.get("schema") != _SCHEMA:
            raise OfflineError(
                str(path),
                expected=f"settings of schema {_SCHEMA}",
                next_step="use a new model directory",
            )
        return known

    def _check_empty(self) -> None:
        """A directory that a killed job only just began counts as empty."""
        if not self.directory.exists():
            return
        if not self.directory.is_dir():
            raise OfflineError(f"model directory {self.directory}", got="a file")
        for path in self.directory.iterdir():
            begun = path.name == _CHECKPOINTS and path.is_dir()
            if begun and all(p.name.startswith(".") for p in path.iterdir()):
                continue
            if path.name not in _ALLOWED and not path.name.startswith(".progress"):
                raise _not_empty(self.directory, ours=False)


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file whole, or leave what was there."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data if isinstance(data, bytes) else data.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _not_empty(directory: Path, *, ours: bool) -> OfflineError:
    next_step = "Use a new model directory so a failed job cannot replace working weights"
    return OfflineError(
        f"model directory {directory}",
        expected="an empty or a new one",
        got="one that is not empty",
        next_step=next_step + (", or go on with --resume" if ours else ""),
    )


def _check_same(directory: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key in wanted:
        if known.get(key) != wanted[key]:
            ours, theirs = wanted[key], known.get(key)
            if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
                inner = next(k for k in {**ours, **theirs} if ours.get(k) != theirs.get(k))
                key, ours, theirs = f"{key}.{inner}", ours.get(inner), theirs.get(inner)
            raise OfflineError(
                f"model directory {directory}: {key}",
                expected=theirs,
                got=ours,
                next_step="resume with the dataset and settings it was begun with, "
                "or use a new model directory",
            )


def _is_output(path: Path) -> bool:
    """Whether standard output goes to this file."""
    try:
        output, file = os.fstat(1), path.stat()
    except OSError:
        return False
    return (output.st_dev, output.st_ino) == (file.st_dev, file.st_ino)


def _locked(path: Path) -> int:
    """A lock that ends with this process, however it ends.

    Raises:
        OfflineError: Another process holds it.
    """
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        import fcntl
    except ImportError:  # not POSIX
        return fd
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise OfflineError(
            f"model directory {path.parent.parent}",
            expected="one that no other job works in",
            got="one whose job still runs",
            next_step="wait for it, or stop it",
        ) from None
    return fd
