"""The job process: trains for one session, in its main thread, until it is told to stop.

Started by the server as `python -m doublure_trainer.job`; told where to connect on stdin, whose
end is its own end. It imports torch first, and only then reports for work.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from doublure_bridge import (
    Message,
    ModelSpec,
    Progress,
    SessionOpened,
    Weights,
    pack_tensors,
    spec_to_dict,
    tensors_digest,
)
from numpy.typing import NDArray

from .errors import DirectoryError, RefusedError, error_message
from .link import Link, Task
from .logs import ScalarLog
from .parent import kill_on_parent_exit, read_line, watch_parent

__all__ = ["Build", "Options", "Trainee", "main", "run"]

log = logging.getLogger("doublure.job")

SLICE_S = 0.05
PROGRESS_S = 0.25
TEST_SCORES_S = 2.0
CHECKPOINT_S = 5.0
# A checkpoint must not take more than this share of the training time.
_CHECKPOINT_SHARE = 0.02
_FINAL_SAVE_S = 0.1
_LEAST_CHECKPOINT_S = 1.0
_LOCK_FILE = "lock"
_LOCK_WAIT_S = 2.0
_VERSIONS_FILE = "published.json"
_VERSIONS_KEPT = 64


class Trainee(Protocol):
    """What a job needs of a trainer; `loop.LiveTrainer`, or a stand-in in tests.

    `add_rows` and `ready` from any thread; everything else from the one training thread.
    """

    @property
    def ready(self) -> bool: ...
    @property
    def models(self) -> list[ModelSpec]: ...
    @property
    def held_out(self) -> list[tuple[float, float]]: ...
    @property
    def test(self) -> list[tuple[float, float]]: ...
    def add_rows(self, rows: NDArray[np.float32]) -> int: ...
    def train_slice(self, seconds: float) -> Any: ...
    def maybe_candidate(self) -> Any: ...
    def published(self, candidate: Any) -> None: ...
    def last_published(self) -> Any: ...
    def progress(self) -> Any: ...
    def report_scores(self) -> Any: ...
    def save(self) -> Any: ...
    def resume(self) -> bool: ...


class Options:
    """Options of a job that are not the trainer's; taken out of the session's config.

    Attributes:
        nice: How much priority the job gives up, 0..19, so that the engine's threads win.
        tensorboard: Whether to write curves; by default only into a persistent directory.
        device: auto, cpu or cuda.
        seed: For everything random in training.
    """

    NAMES = ("nice", "tensorboard", "device", "seed")

    def __init__(self, config: Mapping[str, Any], *, persistent: bool, device: str) -> None:
        self.nice = config.get("nice", 5)
        self.tensorboard = config.get("tensorboard", persistent)
        self.device = config.get("device", device)
        self.seed = config.get("seed", 0)
        self.rest = {k: v for k, v in config.items() if k not in self.NAMES}
        for name, limit in (("nice", 19), ("seed", 2**63 - 1)):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= limit:
                raise RefusedError(
                    f"config.{name}",
                    code="config",
                    expected=f"an integer in 0..{limit}",
                    got=repr(value),
                )
        if type(self.tensorboard) is not bool:
            raise RefusedError(
                "config.tensorboard",
                code="config",
                expected="true or false",
                got=repr(self.tensorboard),
            )
        if self.device not in ("auto", "cpu", "cuda"):
            raise RefusedError(
                "config.device",
                code="config",
                expected="auto, cpu or cuda",
                got=repr(self.device),
            )


Build = Callable[[Task, Options], Trainee]
"""Makes the trainer for a task; raises `RefusedError` for a config it does not take."""


def run(load: Callable[[], Build]) -> NoReturn:
    """Be a job: import what `load` imports, wait for a session, train, end.

    Never returns: interpreter and library teardown would only delay Stop, and the system frees
    everything, GPU memory included, when the process is gone.
    """
    parent = os.getppid()
    kill_on_parent_exit(parent)
    launch = json.loads(read_line())
    watch_parent(lambda: os._exit(1), parent=parent)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
    )
    code = 1
    try:
        build = load()
        link = Link(launch["endpoint"], bytes.fromhex(launch["secret"]))
        link.start()
        task = link.wait_task()
        code = 0 if task is None else _serve(link, task, build)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _serve(link: Link, task: Task, build: Build) -> int:
    """Serve one session; whatever goes wrong reaches the host with its traceback."""
    try:
        _Job(link, task, build).train()
    except RefusedError as error:
        problem = error_message(error.code, "", session=task.session, cause=error)
    except DirectoryError as error:
        problem = error_message("disk", "", session=task.session, cause=error)
    except Exception as error:
        problem = error_message(
            "job_failed",
            f"{type(error).__name__}: {error}",
            session=task.session,
            next_step="see the traceback",
            detail=traceback.format_exc(),
        )
    else:
        return 0
    log.error("%s\n%s", problem.what, problem.detail)
    link.post(problem)
    # The server answers with Stop, after which the link ends the process.
    link.stop.wait(2.0)
    return 1


class _Job:
    """One session's training, from assignment to Stop."""

    def __init__(self, link: Link, task: Task, build: Build) -> None:
        self._link = link
        self._task = task
        assignment = task.assignment
        self._directory = Path(assignment.directory)
        self._enter_directory()
        options = Options(
            task.request.config, persistent=assignment.persistent, device=assignment.device
        )
        with contextlib.suppress(OSError, AttributeError):
            os.nice(options.nice)
        self._trainer = build(task, options)
        resumed = assignment.load and self._trainer.resume()
        # Also without a checkpoint: a host may have what a job published that died before its
        # first one.
        self._versions = self._read_versions()
        self._version = self._versions[-1][0] if self._versions else 0
        self._test: dict[str, float] = {}
        self._test_at = 0.0
        self._saved_at = time.monotonic()
        self._save_s = 0.0
        self._save_soon = False
        self._disk_told = False
        self._loss = 0.0
        self._curves = ScalarLog(self._directory / "tensorboard") if options.tensorboard else None
        link.sink = self._trainer
        step = int(self._trainer.progress().step)
        log.info("session for %s, step %d", task.request.source, step)
        link.post(
            SessionOpened(
                session=task.session,
                resume=bytes.fromhex(assignment.resume),
                credit=assignment.credit,
                step=step,
                models=[spec_to_dict(spec) for spec in self._trainer.models],
                held_out=[list(map(float, pair)) for pair in self._trainer.held_out],
                test=[list(map(float, pair)) for pair in self._trainer.test],
                job_pid=os.getpid(),
            )
        )
        if resumed and assignment.republish:
            self._republish()

    def train(self) -> None:
        """Train until told to stop."""
        link, trainer = self._link, self._trainer
        progress_at = 0.0
        while not link.stop.is_set():
            if link.failure:
                raise RuntimeError(f"the job's communication has failed:\n{link.failure}")
            ready = trainer.ready
            if ready:
                self._loss = _finite(trainer.train_slice(SLICE_S).loss)
                candidate = trainer.maybe_candidate()
                if candidate is not None:
                    self._publish(candidate)
                self._checkpoint()
            else:
                link.arrived.wait(SLICE_S)
                link.arrived.clear()
            now = time.monotonic()
            if now - progress_at >= PROGRESS_S:
                progress_at = now
                self._report(ready)
        if self._task.assignment.persistent and self._save_s < _FINAL_SAVE_S:
            self._save()
        if self._curves is not None:
            self._curves.close(timeout_s=0.03)

    # --- publishing ----------------------------------------------------------------------------

    def _publish(self, candidate: Any) -> None:
        self._version += 1
        # Before it goes out: a version that a host has seen is never given to other weights,
        # not even by a successor that resumes from an older checkpoint.
        self._write_versions(int(candidate.step))
        self._send(candidate, self._version)
        self._trainer.published(candidate)
        # Soon, so that a successor knows the weights that the host draws with.
        self._save_soon = True
        if not self._save_s:
            self._saved_at = -math.inf  # nothing saved yet: at once
        if time.monotonic() - self._test_at >= TEST_SCORES_S:
            self._test_at = time.monotonic()
            self._test = _scores(self._trainer.report_scores())

    def _republish(self) -> None:
        """Send the weights of the checkpoint, under their old version: a host that has them, or
        newer ones, can tell."""
        candidate = self._trainer.last_published()
        if candidate is None:
            return
        known = [v for v, step in self._versions if step == candidate.step]
        if not known:
            self._version += 1
            self._write_versions(int(candidate.step))
            known = [self._version]
        self._send(candidate, known[-1])

    def _send(self, candidate: Any, version: int) -> None:
        session = self._task.session

        def make() -> Message:
            data = pack_tensors(candidate.spec, candidate.tensors)
            return Weights(
                session=session,
                version=version,
                step=int(candidate.step),
                digest=tensors_digest(data),
                model=spec_to_dict(candidate.spec),
                scores=_scores(candidate.scores),
                tensors=data,
                probe_points=np.ascontiguousarray(candidate.points, dtype="<f4"),
                probe_colors=np.ascontiguousarray(candidate.colours, dtype="<f4"),
                seconds=float(candidate.train_seconds),
            )

        self._link.post_weights(make)

    def _read_versions(self) -> list[tuple[int, int]]:
        try:
            pairs = json.loads((self._directory / _VERSIONS_FILE).read_text())
            return [(int(version), int(step)) for version, step in pairs]
        except (OSError, ValueError, TypeError):
            return []

    def _write_versions(self, step: int) -> None:
        self._versions = [*self._versions[-_VERSIONS_KEPT:], (self._version, step)]
        path = self._directory / _VERSIONS_FILE
        part = path.with_name(f"{_VERSIONS_FILE}.tmp")
        try:
            part.write_text(json.dumps(self._versions))
            part.replace(path)
        except OSError as error:
            self._disk_failed("list of versions", error)

    # --- reporting -----------------------------------------------------------------------------

    def _report(self, ready: bool) -> None:
        now = self._trainer.progress()
        racing = now.race == "racing"
        state = "waiting" if not ready else "racing" if racing else "training"
        held_out = _scores(now.published_scores)
        candidate = _scores(now.candidate_scores)
        loss = _finite(now.loss) or self._loss
        message = Progress(
            session=self._task.session,
            state=state,
            step=int(now.step),
            seconds=_finite(now.train_seconds),
            samples=int(now.samples),
            samples_per_s=_finite(now.samples_per_s),
            loss=loss,
            family=str(now.family),
            version=self._version,
            held_out=held_out,
            test=self._test,
            rows=int(now.rows_seen),
            coverage=_finite(now.coverage),
            detail={
                "verdict": str(now.verdict),
                "race": str(now.race),
                "steps_per_s": _finite(now.steps_per_s),
                "candidate": candidate,
                "rows_kept": int(now.rows_kept),
                "rows_rejected": int(now.rows_rejected),
                "frames_refused": self._link.frames_refused,
                "rollbacks": int(now.rollbacks),
                "checkpoint_ms": round(self._save_s * 1000, 1),
            },
        )
        self._link.post_progress(message)
        if self._curves is not None and ready:
            scalars = {"loss": loss, "samples_per_s": message.samples_per_s}
            for group, scores in (
                ("held_out", held_out), ("candidate", candidate), ("test", self._test)
            ):  # fmt: skip
                scalars.update({f"{group}/{name}": value for name, value in scores.items()})
            self._curves.add(message.step, scalars)

    def _checkpoint(self) -> None:
        """Save every few seconds, and after publications; less often where it is slow."""
        start = time.monotonic()
        wish = _LEAST_CHECKPOINT_S if self._save_soon else CHECKPOINT_S
        if start - self._saved_at < max(wish, self._save_s / _CHECKPOINT_SHARE):
            return
        self._save()
        self._saved_at = time.monotonic()
        self._save_s = self._saved_at - start
        self._save_soon = False

    def _save(self) -> None:
        """Write a checkpoint; a disk that does not take it costs the checkpoint, not the job."""
        try:
            self._trainer.save()
            self._disk_told = False
        except OSError as error:
            self._disk_failed("checkpoint", error)

    def _disk_failed(self, what: str, error: OSError) -> None:
        log.error("%s: %s", what, error)
        if not self._disk_told:
            self._disk_told = True
            problem = error_message(
                "disk",
                f"{what} in {self._directory}",
                session=self._task.session,
                expected="to be written",
                got=error.strerror or str(error),
                next_step="free some space; training goes on, but cannot be resumed from here",
                fatal=False,
            )
            self._link.post(problem)

    # --- the directory -------------------------------------------------------------------------

    def _enter_directory(self) -> None:
        """Take the directory for this job alone, and let its log go there.

        Raises:
            DirectoryError: It cannot be written, or another job holds it.
        """
        try:
            # Held until the process ends, however it ends: no second job writes here.
            self._lock = os.open(self._directory / _LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o600)
            output = os.open(
                self._directory / "job.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600
            )
        except OSError as error:
            raise DirectoryError(
                f"job directory {self._directory}",
                expected="one that can be written",
                got=error.strerror or str(error),
            ) from None
        sys.stderr.flush()
        for fd in (1, 2):
            os.dup2(output, fd)
        os.close(output)
        deadline = time.monotonic() + _LOCK_WAIT_S
        while not _lock(self._lock):
            if time.monotonic() > deadline:
                raise DirectoryError(
                    f"job directory {self._directory}",
                    expected="one that no other job uses",
                    got="another process holds its lock",
                    next_step="stop the other session of this source, or name another directory",
                )
            time.sleep(0.05)


def _lock(fd: int) -> bool:
    try:
        import fcntl
    except ImportError:  # not POSIX
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _finite(value: Any) -> float:
    """The value, or 0.0 where there is none that a message could carry."""
    number = 0.0 if value is None else float(value)
    return number if math.isfinite(number) else 0.0


def _scores(scores: Any) -> dict[str, float]:
    """Scores as messages carry them; empty for none."""
    if scores is None:
        return {}
    names = ("psnr_db", "relmse", "peak_ratio")
    values = {name: float(getattr(scores, name)) for name in names}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def main() -> NoReturn:
    """Entry of `python -m doublure_trainer.job`."""
    from .live import load

    run(load)


if __name__ == "__main__":
    main()
