"""A trainer of our own: its private directory, its environment, its process, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from .errors import SpawnError

__all__ = [
    "LocalTrainer",
    "describe_exit",
    "find_python",
    "make_runtime_directory",
    "process_start",
    "scrubbed_environment",
    "sweep_stale_directories",
]

_PREFIX = "doublure-"
_OWNER = "owner.json"
# What an engine sets for its own embedded Python, and what would redirect ours.
_SCRUBBED = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "PYTHONEXECUTABLE",
    "PYTHONPLATLIBDIR",
    "PYTHONOPTIMIZE",
    "PYTHONWARNINGS",
    "__PYVENV_LAUNCHER__",
)


def find_python(chosen: str | os.PathLike[str] | None = None) -> str:
    """The interpreter that runs the trainer.

    In order: `chosen`, the environment's DOUBLURE_PYTHON, this process's own interpreter. Inside an
    engine `sys.executable` may be the engine itself, so only something called python counts.

    Raises:
        SpawnError: None of them is there.
    """
    named = chosen or os.environ.get("DOUBLURE_PYTHON")
    if named:
        found = shutil.which(str(named))
        if found is None:
            raise SpawnError(
                "trainer interpreter", expected="a Python that has doublure[trainer]",
                got=f"no program at {named}",
                next_step="correct python= or DOUBLURE_PYTHON",
            )  # fmt: skip
        return found
    own = Path(sys.executable or "")
    candidates = [
        own if own.name.lower().startswith("python") else None,
        Path(sys.prefix) / "bin" / "python3",
        Path(sys.prefix) / "python.exe",
    ]
    for candidate in candidates:
        if candidate is not None and candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate)
    found = shutil.which("python3")
    if found is None:
        raise SpawnError(
            "trainer interpreter", expected="a Python that has doublure[trainer]", got="none",
            next_step="set DOUBLURE_PYTHON to one, or attach with trainer='tcp://127.0.0.1:5570'",
        )  # fmt: skip
    return found


def scrubbed_environment() -> dict[str, str]:
    """This process's environment without what an engine sets for its own Python."""
    return {k: v for k, v in os.environ.items() if k not in _SCRUBBED}


def process_start(pid: int) -> str | None:
    """When a process started, as an opaque text; None when it is not there or cannot be told.

    A pid alone is not enough: they are used again.
    """
    try:
        # Fields after the command, which is in parentheses and may itself hold some; the 22nd of
        # the whole line is the start time in clock ticks since boot. See proc(5).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A zombie holds its pid but owns nothing any more.
    return None if fields[0] in "ZX" else fields[19]


def make_runtime_directory() -> Path:
    """A fresh private directory (mode 0700) that names this process as its owner."""
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    owner = {"pid": os.getpid(), "start": process_start(os.getpid())}
    part = path / f"{_OWNER}.part"
    part.write_text(json.dumps(owner))
    part.replace(path / _OWNER)
    return path


def sweep_stale_directories(root: Path | None = None) -> list[Path]:
    """Remove runtime directories whose owners are dead; returns them.

    Only directories of this user that say who owned them are touched.
    """
    removed: list[Path] = []
    for path in (root or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*"):
        try:
            info = path.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
                continue
            owner = json.loads((path / _OWNER).read_text())
            pid, start = int(owner["pid"]), owner["start"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if _alive(pid, start):
            continue
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path)
    return removed


def _alive(pid: int, start: str | None) -> bool:
    if start:
        return process_start(pid) == start
    # No start was recorded: a system without /proc, where a pid in use has to do.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


class LocalTrainer:
    """One run of a spawned trainer server. Sender thread only; nothing here waits unless it says.

    Args:
        python: Interpreter, from `find_python`.
        runtime: The private directory; the caller makes and removes it.
        token: The secret that the server will ask hosts for, 32 bytes.
        persistent: Where jobs are kept for later sessions, or None.
    Raises:
        SpawnError: The interpreter cannot be started.
    """

    def __init__(self, python: str, runtime: Path, token: bytes, persistent: Path | None) -> None:
        self.python = python
        self.runtime = runtime
        self._line = b""
        command = [
            python, "-m", "doublure_trainer.server", "--spawned",
            "--runtime-dir", str(runtime), "--parent", str(os.getpid()),
        ]  # fmt: skip
        if persistent is not None:
            command += ["--directory", str(persistent)]
        try:
            with (runtime / "server.log").open("ab") as log:
                self._process: subprocess.Popen[bytes] = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=runtime,
                    env=scrubbed_environment(),
                    # Ctrl-C in the host's terminal goes to the host, which stops us in order.
                    start_new_session=True,
                )
        except OSError as error:
            raise SpawnError(
                "trainer process", expected=f"{python} to start", got=str(error),
                next_step="set DOUBLURE_PYTHON to a Python that has doublure[trainer]",
            ) from None  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._stdout: IO[bytes] = self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        # A pipe holds at least 4 KiB, so this line never blocks; a server that died at once is
        # found by `exit_status`.
        with contextlib.suppress(OSError):
            self._stdin.write(json.dumps({"token": token.hex()}).encode() + b"\n")
            self._stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; then its exit status, negative for a signal. Reaps it."""
        return self._process.poll()

    @property
    def ready_fd(self) -> int | None:
        """What to wait on for `read_ready`; None once that is done."""
        return None if self._stdout.closed else self._stdout.fileno()

    def read_ready(self) -> dict[str, Any] | None:
        """The server's first line, or None as long as it is not complete.

        Raises:
            SpawnError: The line is an error, or not what a doublure trainer says.
        """
        if self._stdout.closed:
            return None
        chunk: bytes | None = self._stdout.read(4096)
        if chunk is None:
            return None
        self._line += chunk
        if b"\n" not in self._line and chunk and len(self._line) < 65536:
            return None
        self._stdout.close()
        if not self._line.strip():
            # Ended without a word: the exit status and the log say why.
            return None
        try:
            said = json.loads(self._line.split(b"\n", 1)[0])
        except ValueError:
            said = None
        if isinstance(said, dict) and isinstance(said.get("error"), str):
            raise SpawnError("trainer process", expected="it to start", got=said["error"])
        if not (isinstance(said, dict) and said.get("ready") is True and "endpoint" in said):
            raise SpawnError(
                "trainer process", expected="a line that says it is ready",
                got=repr(self._line[:120]), next_step=f"{self.python} has another doublure_trainer",
            )  # fmt: skip
        return said

    def log_tail(self, limit: int = 4000) -> str:
        """The end of the server's log."""
        try:
            with (self.runtime / "server.log").open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - limit))
                return log.read().decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def explain_exit(self) -> SpawnError:
        """Why it ended before it was ready, with the command that helps."""
        tail = self.log_tail()
        last = tail.rsplit("\n", 1)[-1] if tail else "nothing in its log"
        status = self.exit_status
        missing = "No module named" in last or "ModuleNotFoundError" in tail
        return SpawnError(
            "trainer process", expected="it to start",
            got=f"{describe_exit(status)}: {last[:300]}",
            next_step=f"run `{self.python} -m pip install 'doublure[trainer]'`, or set "
            "DOUBLURE_PYTHON to a Python that has it"
            if missing
            else f"see `{self.python} -m doublure_plugin doctor`",
        )  # fmt: skip

    def kill(self) -> None:
        """End it without a word; its jobs end with it. Then `close`."""
        self._process.kill()

    def close(self, *, grace_s: float = 0.5) -> int:
        """End it: end of input, at most `grace_s` of waiting, then SIGKILL. Returns its status.

        Idempotent. Also ends one that is stopped by SIGSTOP, and reaps it.
        """
        with contextlib.suppress(OSError):
            self._stdin.close()
        self._stdout.close()
        deadline = time.monotonic() + grace_s
        while (status := self._process.poll()) is None:
            if time.monotonic() >= deadline:
                self._process.kill()
                # A driver call may delay even SIGKILL; then the system reaps it, not we.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return self._process.wait(1.0)
                return -signal.SIGKILL
            time.sleep(0.01)
        return status


def describe_exit(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "still running"
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"killed by {name}"
    return f"exit status {status}"
