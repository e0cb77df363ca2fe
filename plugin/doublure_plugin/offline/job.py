"""Offline training in a process of its own, watched from a render loop."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from doublure_bridge.dataset import MANIFEST

from ..errors import SpawnError, TrainerError
from ..spawn import describe_exit, find_python, scrubbed_environment

__all__ = ["MAX_STEPS", "TrainingError", "TrainingJob", "TrainingStatus", "train_async"]

MAX_STEPS = 200_000
LOG_TAIL = 3000
"""Characters of the log that a failure quotes."""

_KEEPER = Path(__file__).with_name("keeper.py")
_LOG = "training.log"
_PROGRESS = "progress.json"
_WEIGHTS = "weights.json"
_WATCH_S = 0.1
_END_S = 5.0  # the keeper takes two seconds for SIGTERM, and at most two for SIGKILL

State: TypeAlias = Literal["starting", "training", "reporting", "done", "failed", "stopped"]


class TrainingError(TrainerError):
    """A training that ended without weights.

    Attributes:
        exit_status: Negative for a signal; None if there is none to tell.
        log_tail: The last 3000 characters of its log.
        stopped: Whether `TrainingJob.close` or `stop` ended it.
    """

    def __init__(
        self, what: str, *, exit_status: int | None, log_tail: str, stopped: bool = False
    ) -> None:
        super().__init__(what, got=log_tail or "an empty log")
        self.exit_status = exit_status
        self.log_tail = log_tail
        self.stopped = stopped


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """Where a training stands.

    Attributes:
        state: `starting` until the trainer has reported; `training`, then `reporting` while the
            weights and the report are written; `done`, `failed` or `stopped` at the end.
        step, steps: Optimiser steps done, and in all.
        loss: None before there is one.
        held_out_psnr_db: Of the best weights so far; None before.
        eta_s: Seconds until the last step, as the trainer estimates; None before it can.
        error: Why it failed.
    """

    state: State
    step: int
    steps: int
    loss: float | None = None
    held_out_psnr_db: float | None = None
    eta_s: float | None = None
    error: TrainingError | None = None


class TrainingJob:
    """One training that runs. Made by `train_async`; close it, or use it as a context manager.

    `poll` and `stop` never wait; `close` waits until all of its processes have ended. The job ends
    with this process, however that ends. Any thread may call any of it.
    """

    def __init__(self, command: Sequence[str], model_directory: Path, steps: int) -> None:
        self.model_directory = model_directory
        self.log = model_directory / _LOG
        """Everything that the trainer prints."""
        self.result: Future[Path] = Future()
        """The model directory once it holds weights, or a `TrainingError`."""
        self._progress = model_directory / _PROGRESS
        # What an interrupted job left says nothing about this one.
        self._seen = _stamp(self._progress)
        self._status = TrainingStatus("starting", 0, steps)
        self._stopping = False
        self._lock = threading.Lock()
        environment = scrubbed_environment()
        environment["PYTHONUNBUFFERED"] = "1"
        environment.setdefault("OPENBLAS_NUM_THREADS", "1")
        try:
            self._keeper: subprocess.Popen[bytes] = subprocess.Popen(
                [command[0], "-I", "-S", str(_KEEPER), str(self.log), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # `-m` looks for modules here first: no place for those of an engine.
                cwd=model_directory,
                env=environment,
                # Ctrl-C in the host's terminal goes to the host, which stops us in order.
                start_new_session=True,
            )
        except OSError as error:
            raise SpawnError(
                "training process", expected=f"{command[0]} to start", got=str(error),
                next_step="set DOUBLURE_PYTHON to a Python that has doublure[trainer]",
            ) from None  # fmt: skip
        self.result.set_running_or_notify_cancel()
        self._watcher = threading.Thread(target=self._watch, name="doublure-training", daemon=True)
        atexit.register(self.close)
        self._watcher.start()

    def __repr__(self) -> str:
        return f"TrainingJob({str(self.model_directory)!r}, {self._status.state})"

    def poll(self) -> TrainingStatus:
        """What was last known, a tenth of a second old. Never waits, reads no file."""
        return self._status

    def stop(self) -> None:
        """Ask it to end and return at once; within two seconds it is killed. Idempotent."""
        with self._lock:
            self._stopping = True
            stdin = self._keeper.stdin
            if stdin is not None and not stdin.closed:
                with contextlib.suppress(OSError):
                    stdin.close()

    def close(self) -> None:
        """End the training and every process that came from it; waits for that. Idempotent.

        A training that has ended stays as it is. SIGTERM first, upon which the trainer writes a
        checkpoint, and SIGKILL after two seconds.
        """
        self.stop()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(_END_S)
            if self._watcher.is_alive():
                # The keeper itself is stopped or stuck.
                self._kill()
                self._watcher.join(1.0)

    def __enter__(self) -> TrainingJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the watching thread ------------------------------------------------------------------

    def _watch(self) -> None:
        """Follow progress.json until the keeper has ended, then complete the result."""
        while True:
            try:
                self._keeper.wait(_WATCH_S)
                break
            except subprocess.TimeoutExpired:
                self._read_progress()
        if self._keeper.returncode != 0:
            # Killed; what it kept is left to us.
            self._kill()
        self._read_progress()
        stdout = self._keeper.stdout
        assert stdout is not None
        said = stdout.read(4096)
        stdout.close()
        with self._lock:
            stopped = self._stopping
        self._complete(said, stopped)
        self.stop()
        atexit.unregister(self.close)

    def _complete(self, said: bytes, stopped: bool) -> None:
        try:
            end: dict[str, Any] = json.loads(said)
        except ValueError:
            end = {"error": f"its keeper was {describe_exit(self._keeper.returncode)}"}
        status = end.get("status")
        if status == 0 and (self.model_directory / _WEIGHTS).is_file():
            self._status = replace(self._status, state="done", step=self._status.steps, eta_s=0.0)
            self.result.set_result(self.model_directory)
            return
        if stopped:
            what = "training was stopped by close()"
        elif status == 0:
            what = f"training ended (exit status 0) without {_WEIGHTS} in {self.model_directory}"
        elif status is None:
            what = f"training failed ({end.get('error', 'no status')})"
        else:
            what = f"training failed ({describe_exit(status)})"
        error = TrainingError(what, exit_status=status, log_tail=_tail(self.log), stopped=stopped)
        self._status = replace(
            self._status, state="stopped" if stopped else "failed", eta_s=None, error=error
        )
        self.result.set_exception(error)

    def _kill(self) -> None:
        """SIGKILL for the keeper's process group, the training's too."""
        with contextlib.suppress(OSError):
            os.killpg(self._keeper.pid, signal.SIGKILL)

    def _read_progress(self) -> None:
        stamp = _stamp(self._progress)
        if stamp is None or stamp == self._seen:
            return
        try:
            data = json.loads(self._progress.read_bytes())
            state = data.get("state")
            status = replace(
                self._status,
                # How it ends is told by the process, not by this file.
                state="reporting" if state in ("reporting", "done") else "training",
                step=int(data["step"]),
                steps=int(data.get("steps", self._status.steps)),
                loss=_number(data.get("loss")),
                held_out_psnr_db=_number(data.get("held_out_psnr_db")),
                eta_s=_number(data.get("eta_s")),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            # Another trainer's, or gone: what was known before stays.
            return
        self._seen = stamp
        self._status = status


def train_async(
    dataset: Path | str,
    model_directory: Path | str,
    steps: int = 12_000,
    *,
    python: str | os.PathLike[str] | None = None,
    options: Sequence[str] = (),
    resume: bool = False,
) -> TrainingJob:
    """Start to learn a stand-in from a captured dataset, in a process of its own.

    Args:
        dataset: Directory that `capture_dataset` wrote.
        model_directory: A new or an empty one.
        steps: 1..200000.
        python: Interpreter that has doublure[trainer]; DOUBLURE_PYTHON or this one unless given.
        options: Further words for `doublure train`, as `("--threads", "2")`.
        resume: Go on in a directory where the same training was interrupted.
    Returns:
        The job; its owner closes it.
    Raises:
        TrainerError: There is no dataset, steps are out of range, or the directory holds something.
        SpawnError: The interpreter is not there.
    """
    dataset, model_directory = Path(dataset).absolute(), Path(model_directory).absolute()
    if not (dataset / MANIFEST).is_file():
        raise TrainerError(
            f"dataset {dataset}", expected=f"a directory with {MANIFEST}", got="none",
            next_step="make one with capture_dataset",
        )  # fmt: skip
    if type(steps) is not int or not 1 <= steps <= MAX_STEPS:
        raise TrainerError(
            "steps", expected=f"a whole number in 1..{MAX_STEPS}", got=repr(steps)[:60]
        )
    interpreter = find_python(python)
    try:
        model_directory.mkdir(parents=True, exist_ok=True)
        empty = not any(model_directory.iterdir())
    except OSError as error:
        raise TrainerError(
            f"model directory {model_directory}", expected="one that can be written",
            got=error.strerror or str(error),
        ) from error  # fmt: skip
    if not empty and not resume:
        raise TrainerError(
            f"model directory {model_directory}", expected="a new or an empty one",
            got="one that is not empty",
            next_step="Use a new model directory so a failed job cannot replace working weights, "
            "or resume=True to go on with the training in it",
        )  # fmt: skip
    command = [
        interpreter, "-m", "doublure_trainer", "train",
        "--dataset", str(dataset), "--out", str(model_directory), "--steps", str(steps),
        *(("--resume",) if resume else ()), *options,
    ]  # fmt: skip
    return TrainingJob(command, model_directory, steps)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is replaced; None where there is none."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as log:
            # A character takes four bytes at most.
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4 * LOG_TAIL))
            return log.read().decode("utf-8", "replace")[-LOG_TAIL:]
    except OSError:
        return ""
