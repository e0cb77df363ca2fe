"""Job processes: started, greeted, assigned, stopped, killed and reaped, by the server's loop.

Everything here is quick and is called from the server's one thread. A job is started without a
session (torch takes seconds to import) and gets one by an `Assignment`, so that a warm spare can
serve the next session at once.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from doublure_bridge import Hello

from .errors import LaunchError

__all__ = ["Assignment", "Job", "JobPool", "Launch", "Process", "launcher", "log_tail"]

log = logging.getLogger("doublure.trainer")

_TAIL_BYTES = 8000
# A new spare costs seconds of CPU that the session which took the last one needs more.
_SPARE_DELAY_S = 8.0
_SPARE_RETRIES = 3


class Process(Protocol):
    """What the pool needs of a job's process; `subprocess.Popen` behind it, or a fake in tests."""

    pid: int

    def poll(self) -> int | None:
        """The exit code once it has ended and been reaped, negative for a signal; else None."""

    def kill(self) -> None:
        """End it and all its children now; harmless when it has ended."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a starting job is told, on its stdin: never in arguments, which others can read."""

    id: str
    endpoint: str
    secret: bytes
    log: Path

    def line(self) -> bytes:
        """One line of JSON."""
        fields = {"id": self.id, "endpoint": self.endpoint, "secret": self.secret.hex()}
        return json.dumps(fields).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Assignment:
    """Binds a waiting job to a session. Travels before the host's `OpenSession`, as JSON.

    Attributes:
        session: The session's id, hex.
        resume: The resume token, hex.
        directory: Where checkpoints and logs go.
        load: Whether to load the checkpoint that lies there.
        persistent: Whether the directory outlives the session.
        credit: Frames the host may have on the way.
        device: Device asked for by the server's user: auto, cpu or cuda.
        republish: Whether the host may have lost its weights and wants the last ones again.
    """

    session: str
    resume: str
    directory: str
    load: bool
    persistent: bool
    credit: int
    device: str = "auto"
    republish: bool = True

    def encode(self, open_parts: Sequence[Any]) -> list[Any]:
        return [json.dumps(asdict(self)).encode(), *open_parts]

    @classmethod
    def decode(cls, parts: Sequence[Any]) -> tuple[Self, list[Any]] | None:
        """The assignment and the `OpenSession` after it; None when these parts are none.

        A codec's header is a msgpack array and never begins with a brace.
        """
        head = bytes(parts[0])
        if not head.startswith(b"{"):
            return None
        return cls(**json.loads(head)), list(parts[1:])


@dataclass(slots=True, eq=False)
class Job:
    """One job process, from start to the return of waitpid."""

    launch: Launch
    process: Process
    peer: bytes | None = None
    session: Any = None
    last_seen: float = field(default_factory=time.monotonic)
    kill_at: float | None = None
    killed: bool = False
    returncode: int | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ready(self) -> bool:
        """Whether it has said Hello and can take an assignment."""
        return self.peer is not None

    @property
    def stopped(self) -> bool:
        """Whether it is held by SIGSTOP or a debugger, and so cannot obey (Linux; else False)."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    def kill(self) -> None:
        self.killed = True
        self.process.kill()

    def ending(self) -> str:
        """How it ended, for people."""
        code = self.returncode
        if code is None:
            return "still running"
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"


class _ChildProcess:
    """A real job: its own process group, stdin held open for as long as we live."""

    def __init__(self, command: Sequence[str], launch: Launch) -> None:
        group: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}
        # Libraries leave things in the temporary folder (torch makes torchinductor_USER there);
        # in ours they go when we do.
        scratch = launch.log.parent / "tmp"
        scratch.mkdir(mode=0o700, exist_ok=True)
        environment = {**os.environ, "TMPDIR": str(scratch)}
        with launch.log.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                **group,
            )
        self.pid = self._popen.pid
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(launch.line())
            self._popen.stdin.flush()
        except BrokenPipeError:
            pass  # already dead; reaped and reported like any other death

    def poll(self) -> int | None:
        code = self._popen.poll()
        if code is not None:
            stdin = self._popen.stdin
            if stdin is not None and not stdin.closed:
                with contextlib.suppress(OSError):
                    stdin.close()
                # Whatever the job may have started goes with it.
                self._kill_group()
        return code

    def kill(self) -> None:
        if self._popen.returncode is None:
            self._popen.kill()
            self._kill_group()

    def _kill_group(self) -> None:
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


Launcher = Callable[[Launch], Process]


def launcher(module: str = "doublure_trainer.job") -> Launcher:
    """Starts `python -m module` as the job."""

    def start(launch: Launch) -> Process:
        return _ChildProcess([sys.executable, "-m", module], launch)

    return start


class JobPool:
    """All job processes of a server.

    Args:
        endpoint: Where jobs connect to.
        logs: Directory for the output of jobs that have no session yet.
        start: Starts a process; `launcher()` for real ones.
        spares: Warm jobs to keep in waiting.
    """

    def __init__(self, endpoint: str, logs: Path, *, start: Launcher, spares: int = 1) -> None:
        self._endpoint = endpoint
        self._logs = logs
        self._start = start
        self._spares = spares
        self._count = 0
        self._failures = 0
        self._next_spare = time.monotonic()
        self.jobs: list[Job] = []

    def launch(self) -> Job:
        """Start a job without a session.

        Raises:
            LaunchError: The process could not be started.
        """
        self._count += 1
        name = f"{os.getpid()}-{self._count}"
        launch = Launch(name, self._endpoint, secrets.token_bytes(32), self._logs / f"{name}.log")
        try:
            process = self._start(launch)
        except OSError as error:
            raise LaunchError(
                "job process", expected=f"{sys.executable} to start", got=str(error)
            ) from None
        job = Job(launch, process)
        self.jobs.append(job)
        log.debug("job %d started", job.pid)
        return job

    def take(self, session: object) -> Job:
        """A job for a session: a warm one, else one that is on its way, else a new one.

        Raises:
            LaunchError: None could be started.
        """
        spare = [job for job in self.jobs if job.session is None and not job.killed]
        spare.sort(key=lambda job: not job.ready)
        job = spare[0] if spare else self.launch()
        job.session = session
        job.last_seen = time.monotonic()
        self._next_spare = time.monotonic() + _SPARE_DELAY_S
        return job

    def greet(self, peer: bytes, hello: Hello) -> Job | None:
        """The job that says Hello, found by its secret; None for a stranger."""
        for job in self.jobs:
            if job.peer is None and hmac.compare_digest(job.launch.secret, hello.token):
                job.peer = peer
                job.last_seen = time.monotonic()
                self._failures = 0
                log.info("job %d is warm", job.pid)
                return job
        return None

    def by_peer(self, peer: bytes) -> Job | None:
        return next((job for job in self.jobs if job.peer == peer), None)

    def stop_within(self, job: Job, seconds: float) -> None:
        """Kill a job unless it has ended by itself after so many seconds."""
        at = time.monotonic() + seconds
        job.kill_at = at if job.kill_at is None else min(job.kill_at, at)

    def reap(self) -> list[Job]:
        """Kill what is overdue; return, and forget, the jobs that have ended."""
        now = time.monotonic()
        ended = []
        for job in self.jobs:
            if job.kill_at is not None and now >= job.kill_at and not job.killed:
                job.kill()
            job.returncode = job.process.poll()
            if job.returncode is not None:
                ended.append(job)
        for job in ended:
            self.jobs.remove(job)
            if not job.ready and not job.killed:
                self._failures += 1
                self._next_spare = now + 1.0
        return ended

    def keep_spares(self) -> None:
        """Start a spare when one is missing and due; gives up after repeated early deaths."""
        if self._failures >= _SPARE_RETRIES or time.monotonic() < self._next_spare:
            return
        waiting = sum(job.session is None and not job.killed for job in self.jobs)
        if waiting < self._spares:
            self._next_spare = time.monotonic() + 1.0
            try:
                self.launch()
            except LaunchError as error:
                self._failures += 1
                log.error("%s", error)

    @property
    def hurried(self) -> bool:
        """Whether a job is about to end, so that the loop should look often."""
        return any(job.kill_at is not None for job in self.jobs)

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Kill and reap every job."""
        for job in self.jobs:
            job.kill()
        deadline = time.monotonic() + timeout_s
        while self.jobs and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.002)
        for job in self.jobs:
            log.error("job %d did not end after SIGKILL", job.pid)


def log_tail(*files: Path, limit: int = _TAIL_BYTES) -> str:
    """The end of what a job printed, from the given files in order; empty when nothing."""
    texts = []
    for file in files:
        try:
            with file.open("rb") as stream:
                stream.seek(max(0, file.stat().st_size - limit))
                texts.append(stream.read().decode("utf-8", "replace").strip())
        except OSError:
            continue
    return "\n".join(text for text in texts if text)
