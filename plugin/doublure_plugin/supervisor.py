"""Keeping a trainer of our own alive: started, watched, started again, ended."""

from __future__ import annotations

import secrets
import shutil
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from doublure_bridge import parse_address

from .errors import SpawnError, TrainerError
from .options import Options
from .spawn import (
    LocalTrainer,
    describe_exit,
    find_python,
    make_runtime_directory,
    sweep_stale_directories,
)

__all__ = ["Death", "Supervisor"]

_DEATHS = 5
_WITHIN_S = 60.0
_LONGEST_PAUSE_S = 5.0


class Death(NamedTuple):
    """The trainer ended by itself, and another should be started."""

    text: str
    pause_s: float
    """How long to wait before that."""
    log: str
    """The end of its log."""


class Supervisor:
    """Sender thread only. `close` is what waits, for the trainer to leave; nothing else does.

    The runtime directory is made at the first start and kept over deaths, so that another trainer
    finds the jobs of the last one.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.token = secrets.token_bytes(32)
        """The secret that our trainer asks hosts for."""
        self.started = 0
        self._deaths: deque[float] = deque(maxlen=_DEATHS)
        self._trainer: LocalTrainer | None = None
        self._runtime: Path | None = None
        self._since = 0.0
        self._ready = False

    @property
    def pid(self) -> int | None:
        return None if self._trainer is None else self._trainer.pid

    @property
    def ready_fd(self) -> int | None:
        """What to wait on while it starts."""
        return None if self._trainer is None else self._trainer.ready_fd

    def log_tail(self) -> str:
        return "" if self._trainer is None else self._trainer.log_tail()

    def start(self) -> None:
        """Start a trainer.

        Raises:
            SpawnError: It cannot be started, and trying again would not help.
        """
        python = find_python(self._options.python)
        # A cleaner of temporary folders may have been there.
        if self._runtime is None or not self._runtime.is_dir():
            sweep_stale_directories()
            try:
                self._runtime = make_runtime_directory()
            except OSError as error:
                raise SpawnError(
                    "runtime directory", expected="a writable temporary directory", got=str(error),
                    next_step="free space, or set TMPDIR to a directory that can be written",
                ) from None  # fmt: skip
        self._trainer = LocalTrainer(python, self._runtime, self.token, self._options.directory)
        self.started += 1
        self._since = time.monotonic()
        self._ready = False

    def poll_ready(self) -> str | None:
        """The endpoint of the trainer once it listens.

        Raises:
            SpawnError: It says that it cannot, or says nothing in time.
        """
        trainer = self._trainer
        assert trainer is not None
        said = trainer.read_ready()
        if said is not None:
            self._ready = True
            return parse_address(str(said["endpoint"])).endpoint
        if time.monotonic() - self._since > self._options.timing.ready:
            raise SpawnError(
                "trainer process",
                expected=f"it to be ready within {self._options.timing.ready:.0f} s",
                got="no word", next_step=f"see `{trainer.python} -m doublure_plugin doctor`",
            )  # fmt: skip
        return None

    def watch(self) -> Death | None:
        """Look whether it still runs; what to know when it does not.

        Raises:
            SpawnError: It ended before it was ready, by itself: another would do the same.
            TrainerError: It has died too often.
        """
        trainer = self._trainer
        if trainer is None or (status := trainer.exit_status) is None:
            return None
        if not self._ready:
            # It may have said why.
            trainer.read_ready()
            if status > 0:
                raise trainer.explain_exit()
        now = time.monotonic()
        self._deaths.append(now)
        what = f"the trainer (process {trainer.pid}) has ended: {describe_exit(status)}"
        log = trainer.log_tail()
        recent = sum(now - death < _WITHIN_S for death in self._deaths)
        if recent == _DEATHS:
            raise TrainerError(
                what, expected="it to run", got=f"{recent} deaths within a minute",
                next_step=f"see `{trainer.python} -m doublure_plugin doctor`",
            )  # fmt: skip
        pause = min(_LONGEST_PAUSE_S, self._options.timing.respawn * 2 ** (recent - 1))
        self.end()
        return Death(f"{what}; starting another in {pause:.1f} s", pause, log)

    def end(self) -> None:
        """End the trainer at once, and keep the directory for another one."""
        if self._trainer is not None:
            # Told to leave in order, it would take the directory along.
            self._trainer.kill()
            self._trainer.close(grace_s=self._options.timing.end)
            self._trainer = None

    def close(self) -> None:
        """End the trainer, waiting at most for its grace, and remove the directory. Idempotent."""
        if self._trainer is not None:
            self._trainer.close(grace_s=self._options.timing.end)
            self._trainer = None
        if self._runtime is not None:
            shutil.rmtree(self._runtime, ignore_errors=True)
            self._runtime = None
