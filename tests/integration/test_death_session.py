"""A plugin's session with a trainer that it spawned: real job, real deaths, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import doublure_plugin as doublure
import numpy as np
import psutil
import pytest

from tests.trainer_server.processes import alive, environment, wait_for

pytestmark = pytest.mark.process

WIDTH, HEIGHT = 64, 48


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of our own: what is left there was left by us."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    monkeypatch.setattr(tempfile, "tempdir", None)


class Engine:
    """A render loop that never stops for anyone."""

    def __init__(self, session: doublure.Session) -> None:
        self.session = session
        self.frames = 0
        self.slowest = 0.0
        y, x = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float32)
        self._x, self._y = x / WIDTH, y / HEIGHT
        self.versions: list[int] = []

    def draw(self) -> None:
        t = (self.frames * 0.6180339887) % 1.0 * 10
        self.frames += 1
        phase = 4 * self._x + t / 5
        pixels = np.stack([np.sin(phase), np.cos(3 * self._y + t / 5), self._x], -1) * 0.4 + 0.5
        start = time.perf_counter()
        self.session.capture(pixels.astype(np.float32), t)
        weights = self.session.poll()
        self.slowest = max(self.slowest, time.perf_counter() - start)
        if weights is not None:
            self.versions.append(weights.version)
            self.session.applied(weights)
        time.sleep(0.01)

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            said = [notice.text for notice in self.session.messages]
            assert time.monotonic() < deadline, f"still waiting: {what}; {said}"
            assert self.session.state != "failed", said
            self.draw()


def open_session(**changes: object) -> doublure.Session:
    source = doublure.Source("wave", {"fragment": "test"}, width=WIDTH, height=HEIGHT)
    return doublure.Session(source, parameter=(0.0, 10.0), **changes)  # type: ignore[arg-type]


def test_killed_job_then_killed_trainer_and_the_host_draws_on(temporary: Path) -> None:
    with open_session() as session:
        engine = Engine(session)
        engine.until(lambda: bool(engine.versions), "the first weights")
        job, server = session.job_pid, session.trainer_pid
        assert job is not None
        assert server is not None

        os.kill(job, signal.SIGKILL)
        said = f"(pid {job}) has died: signal SIGKILL"
        engine.until(lambda: any(said in m.text for m in session.messages), "the job's death")
        count = len(engine.versions)
        engine.until(lambda: len(engine.versions) > count, "weights of the successor")
        assert session.trainer_pid == server

        step = session.progress.step if session.progress else 0
        os.kill(server, signal.SIGKILL)
        engine.until(lambda: session.state != "streaming", "the loss to be noticed")
        engine.until(lambda: session.state == "streaming", "another trainer")
        assert session.trainer_pid != server
        count = len(engine.versions)
        engine.until(lambda: len(engine.versions) > count, "weights of the next trainer")
        assert session.progress is not None
        assert session.progress.step > 0
        print(f"step {step} before, {session.progress.step} after")
        family = psutil.Process(session.trainer_pid).children(recursive=True)
        server = session.trainer_pid

        session.stop(wait=True)
        assert session.state == "stopped"
        assert session.stats.stop_ms is not None
        print(f"Stop took {session.stats.stop_ms:.0f} ms; slowest frame {engine.slowest * 1e3} ms")
    assert server is not None
    assert not alive(server)
    wait_for(lambda: not any(alive(p.pid) for p in family), "jobs gone", timeout_s=5.0)
    assert not list(temporary.glob("doublure-*"))
    assert engine.versions == sorted(set(engine.versions))


def test_a_persistent_session_goes_on_in_another_run(temporary: Path) -> None:
    kept = temporary / "kept"
    with open_session(directory=kept) as session:
        engine = Engine(session)
        engine.until(lambda: bool(engine.versions), "the first weights")
        session.stop(wait=True)
        first = session.progress
    assert first is not None
    with open_session(directory=kept) as session:
        engine = Engine(session)
        # Before a single frame has been taken in: the last weights of the first run.
        engine.until(lambda: bool(engine.versions), "the weights of the last run")
        assert session.opened is not None
        assert session.opened.step >= first.step > 0
    assert {p.name for p in temporary.iterdir()} == {"kept"}


HOST = """
from tests.integration.test_death_session import Engine, open_session
session = open_session()
engine = Engine(session)
engine.until(lambda: session.job_pid is not None and engine.frames > 50, "a job")
print(session.trainer_pid, session.job_pid, flush=True)
while True:
    engine.draw()
"""


def test_a_killed_host_takes_trainer_and_job_along(temporary: Path) -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", HOST], stdout=subprocess.PIPE, env=environment(), text=True
    )
    assert host.stdout is not None
    server, job = map(int, host.stdout.readline().split())
    family = [server, job, *(p.pid for p in psutil.Process(server).children(recursive=True))]
    assert len(list(temporary.glob("doublure-*"))) == 1
    host.kill()
    host.wait()
    host.stdout.close()
    wait_for(lambda: not any(map(alive, family)), "trainer and job gone", timeout_s=5.0)
    wait_for(lambda: not list(temporary.glob("doublure-*")), "directory gone", timeout_s=2.0)


def test_an_interpreter_without_torch_is_told_what_to_install(tmp_path: Path) -> None:
    """The server needs no torch, so it is the job that finds out."""
    hole = tmp_path / "hole" / "torch"
    hole.mkdir(parents=True)
    text = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    (hole / "__init__.py").write_text(text)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{hole.parent}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    with open_session(python=str(python)) as session:
        wait_for(lambda: session.state == "failed", "the session to fail", 60)
        assert "No module named 'torch'" in str(session.error)
        assert "-m pip install 'doublure[trainer]'`" in str(session.error)
