"""Real server and job processes for tests, and a look at what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from .client import Client

ROOT = Path(__file__).resolve().parents[2]
STANDIN = "tests.trainer_server.standin"
REAL = "doublure_trainer.job"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> float:
    """Wait until the condition holds; returns the seconds it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"still waiting: {what}"
        time.sleep(0.005)
    return time.monotonic() - start


def alive(pid: int) -> bool:
    """Whether there is a process with this id that is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class ServerProcess:
    """`python -m doublure_trainer.server --spawned`, started the way a plugin starts it."""

    def __init__(
        self,
        *,
        job: str = STANDIN,
        directory: Path | None = None,
        spares: int = 1,
        runtime: Path | None = None,
    ) -> None:
        self.runtime = runtime or Path(tempfile.mkdtemp(prefix="doublure-"))
        self.token = os.urandom(32)
        command = [
            sys.executable, "-m", "doublure_trainer.server", "--spawned",
            "--runtime-dir", str(self.runtime), "--parent", str(os.getpid()),
            "--job", job, "--spares", str(spares),
        ]  # fmt: skip
        if directory is not None:
            command += ["--directory", str(directory)]
        self.log = (self.runtime / "server.log").open("ab")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
            cwd=self.runtime, env=environment(), start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"token": self.token.hex()}).encode() + b"\n")
        self.process.stdin.flush()
        said = json.loads(self.process.stdout.readline())
        assert self.process.stdout.read() == b""
        assert said.get("ready") is True, said
        self.endpoint: str = said["endpoint"]
        assert said["pid"] == self.pid
        self.clients: list[Client] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    def client(self) -> Client:
        client = Client(self.endpoint, token=self.token, timeout_s=60.0)
        self.clients.append(client)
        return client

    def jobs(self) -> list[int]:
        """Process ids of everything below the server."""
        try:
            children = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [child.pid for child in children]

    def log_text(self) -> str:
        return (self.runtime / "server.log").read_text()

    def forget(self, client: Client) -> None:
        self.clients.remove(client)
        client.close()

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.clients.clear()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(3)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.log.close()
        shutil.rmtree(self.runtime, ignore_errors=True)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
