"""The plugin's session with the real server and job processes, and every way that they end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from doublure_plugin import Session, Source, Timing, Weights
from doublure_plugin.spawn import sweep_stale_directories

from tests.trainer_server.processes import ROOT, alive, environment, wait_for

pytestmark = pytest.mark.process

JOB = "tests.integration.plugin_job"
SOURCE = Source("test", {"scene": "code"}, {"k": 1}, 8, 8)
PIXELS = np.full((8, 8, 4), 1.0, np.float32)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of our own, which every test has to leave empty."""
    root = tmp_path / "t"
    root.mkdir()
    monkeypatch.setenv("TMPDIR", str(root))
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    yield root
    wait_for(lambda: not list(root.iterdir()), "nothing left behind")


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter whose trainer runs the stand-in job."""
    path = tmp_path / "python-standin"
    path.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"os.environ.update({{'PYTHONPATH': {str(ROOT)!r}, 'OMP_NUM_THREADS': '1'}})\n"
        f"os.execv(sys.executable, [sys.executable, *sys.argv[1:], '--job', {JOB!r}])\n"
    )
    path.chmod(0o755)
    return str(path)


def stream(
    session: Session, until: Callable[[], Any], what: str, *, timeout_s: float = 20.0
) -> None:
    """Draw: capture and reload as a host does, until something holds."""
    start = time.monotonic()
    i = 0
    while not until():
        assert time.monotonic() - start < timeout_s, f"still waiting: {what}: {session.messages}"
        session.capture(PIXELS, (i % 100) / 100)
        if (weights := session.poll()) is not None:
            session.applied(weights)
        i += 1
        time.sleep(0.005)


def training(session: Session) -> bool:
    return session.progress is not None and session.progress.state == "training"


def test_a_session_from_start_to_stop(python: str) -> None:
    with Session(SOURCE, (0, 1), python=python) as session:
        stream(session, lambda: session.stats.reloads >= 3, "three reloads")
        weights = session.current
        assert isinstance(weights, Weights)
        assert weights.evaluator is not None
        assert session.progress is not None
        assert session.progress.rows > 0
        assert session.stats.rejected == 0
        server, job = session.trainer_pid, session.job_pid
        assert server is not None
        assert job is not None
        family = [p.pid for p in psutil.Process(server).children(recursive=True)]
        assert job in family
        session.stop(wait=True)
        assert session.state == "stopped"
        assert session.stats.stop_ms is not None
        assert not any(map(alive, [server, *family]))


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3, 0.5, 0.8, 1.2])
def test_stop_at_any_moment_of_the_start(python: str, after_s: float) -> None:
    session = Session(SOURCE, (0, 1), python=python)
    time.sleep(after_s)
    children = psutil.Process().children(recursive=True)
    session.stop(wait=True)
    assert session.state == "stopped"
    wait_for(lambda: not any(alive(c.pid) for c in children), "all processes gone")
    session.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_server_is_replaced_and_the_job_resumes(
    python: str, number: signal.Signals
) -> None:
    with Session(SOURCE, (0, 1), python=python) as session:
        stream(session, lambda: session.stats.reloads >= 2, "reloads")
        server = session.trainer_pid
        assert server is not None
        family = [p.pid for p in psutil.Process(server).children(recursive=True)]
        before = session.current
        os.kill(server, number)
        stream(session, lambda: session.state == "lost", "lost")
        assert session.current is before
        stream(session, lambda: session.state == "streaming", "streaming again")
        wait_for(lambda: not any(map(alive, family)), "the old jobs gone")
        assert session.opened is not None
        assert before is not None
        assert session.opened.step > 0
        assert session.trainer_pid != server
        stream(session, lambda: session.current is not before, "a reload from the new job")
        assert session.current is not None
        assert session.current.step >= before.step


def test_a_killed_job_is_told_and_survived(python: str) -> None:
    with Session(SOURCE, (0, 1), python=python) as session:
        stream(session, lambda: session.stats.reloads >= 1, "a reload")
        assert session.job_pid is not None
        reloads = session.stats.reloads
        os.kill(session.job_pid, signal.SIGKILL)
        stream(session, lambda: any("SIGKILL" in m.text for m in session.messages), "the word")
        stream(session, lambda: session.stats.reloads >= reloads + 2, "reloads again")
        assert session.state == "streaming"
        assert session.stats.rejected == 0


def test_a_job_that_raises_fails_the_session_with_its_traceback(python: str) -> None:
    with Session(SOURCE, (0, 1), python=python, config={"fail_at": 20}) as session:
        stream(session, lambda: session.state == "failed", "failed")
        assert "FloatingPointError" in session.messages[-1].detail
        assert session.capture(PIXELS, 0.5) is False


def test_unknown_options_are_refused_by_name(python: str) -> None:
    with Session(SOURCE, (0, 1), python=python, config={"publish_evry": 20}) as session:
        stream(session, lambda: session.state == "failed", "failed")
        assert "config.publish_evry: expected a known key" in str(session.error)


@pytest.mark.parametrize("pause_s", [1.0, 5.0])
def test_a_paused_server_is_regained(python: str, pause_s: float) -> None:
    """5 s is past the sockets' own heartbeat: the connection breaks, and comes back as another."""
    with Session(SOURCE, (0, 1), python=python, timing=Timing(lost=0.6)) as session:
        stream(session, lambda: training(session), "training")
        server = session.trainer_pid
        assert server is not None
        os.kill(server, signal.SIGSTOP)
        try:
            stream(session, lambda: session.state == "lost", "lost")
            time.sleep(pause_s)
        finally:
            os.kill(server, signal.SIGCONT)
        stream(session, lambda: session.state == "streaming", "streaming again")
        reloads, sent = session.stats.reloads, session.stats.sent
        stream(session, lambda: session.stats.reloads > reloads, "a reload after the pause")
        stream(session, lambda: session.stats.sent > sent + 30, "frames after the pause")
        assert session.stats.spawns == 1


def test_another_source_gets_another_job(python: str) -> None:
    other = Source("other", {"scene": "code"}, {"k": 2}, 8, 8)
    with Session(SOURCE, (0, 1), python=python) as session:
        stream(session, lambda: session.stats.reloads >= 1, "a reload")
        first = session.job_pid
        assert first is not None
        session.source_changed(other, "k")
        assert session.current is None
        stream(session, lambda: session.current is not None, "a reload of the other source")
        assert session.current is not None
        assert session.current.source == other.digest
        assert session.job_pid != first
        assert not alive(first)


def test_a_directory_is_resumed_by_the_next_session(python: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with Session(SOURCE, (0, 1), python=python, directory=kept) as session:
        stream(session, lambda: session.stats.reloads >= 2, "reloads")
        assert session.current is not None
        step = session.current.step
    with Session(SOURCE, (0, 1), python=python, directory=kept) as session:
        stream(session, lambda: session.state == "streaming", "streaming")
        assert session.opened is not None
        assert session.opened.step >= step
    other = Source("other", {"scene": "code"}, {"k": 2}, 8, 8)
    with Session(other, (0, 1), python=python, directory=kept) as session:
        stream(session, lambda: session.state == "streaming", "streaming")
        assert session.opened is not None
        assert session.opened.step == 0


def foreground(port: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "doublure_trainer.server", "--job", JOB, "--spares", "1",
         "--bind", f"tcp://127.0.0.1:{port}"],
        env=environment(), stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_an_attached_trainer_may_be_started_again(end: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    first = foreground(port)
    try:
        with Session(SOURCE, (0, 1), trainer=f"tcp://127.0.0.1:{port}") as session:
            stream(session, lambda: session.stats.reloads >= 1, "a reload")
            first.send_signal(end)
            first.wait(10)
            stream(session, lambda: session.state in ("lost", "connecting"), "lost")
            second = foreground(port)
            try:
                reloads = session.stats.reloads
                stream(session, lambda: session.stats.reloads > reloads, "a reload again")
                assert session.state == "streaming"
            finally:
                session.stop(wait=True)
                second.terminate()
                second.wait(10)
    finally:
        first.kill()
        first.wait()
        # A killed server leaves its directory to whoever comes next.
        sweep_stale_directories()


HOST = """
import sys, time
import numpy as np
import doublure_plugin as doublure
source = doublure.Source("test", {{"scene": "code"}}, {{}}, 8, 8)
session = doublure.Session(source, (0, 1), python={python!r})
pixels = np.ones((8, 8, 4), np.float32)
while session.stats.sent < 20:
    session.capture(pixels, 0.5)
    time.sleep(0.005)
print(session.trainer_pid, flush=True)
sys.stdin.readline()
{then}
"""


@pytest.mark.parametrize(
    ("then", "end", "status"),
    [
        ("", None, 0),
        ("1 / 0", None, 1),
        ("", signal.SIGKILL, -9),
        ("", signal.SIGINT, -2),
    ],
)
def test_a_host_that_leaves_takes_everything_along(
    python: str, then: str, end: signal.Signals | None, status: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOST.format(python=python, then=then)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            server = psutil.Process(int(process.stdout.readline()))
            wait_for(lambda: server.children(recursive=True), "a job")
            family = [server.pid, *(p.pid for p in server.children(recursive=True))]
            if end is None:  # otherwise the host waits on, until the signal
                process.stdin.write("\n")
                process.stdin.flush()
            else:
                process.send_signal(end)
            assert process.wait(10) == status
        finally:
            process.kill()
    wait_for(lambda: not any(map(alive, family)), "server and jobs gone", timeout_s=5)


def test_a_defect_beside_a_real_server_is_survived_with_the_training(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer of the broken conversation goes, but not what it has learned."""
    with Session(SOURCE, (0, 1), python=python) as session:
        stream(session, lambda: session.stats.reloads >= 2, "reloads")
        sender, first = session._sender, session.trainer_pid
        assert sender is not None
        with monkeypatch.context() as patch:
            patch.setattr(sender.feeder, "feed", lambda *_: 1 / 0)
            stream(session, lambda: session.state == "lost", "the crash")
        stream(session, lambda: session.state == "streaming", "streaming again")
        assert session.trainer_pid != first
        assert session.opened is not None
        assert session.opened.step > 0


def test_a_swept_runtime_directory_is_made_again(python: str, temporary: Path) -> None:
    """By a cleaner of temporary folders: training starts anew, and Stop still leaves nothing."""
    with Session(SOURCE, (0, 1), python=python) as session:
        stream(session, lambda: session.stats.reloads >= 1, "a reload")
        (runtime,) = temporary.glob("doublure-*")
        shutil.rmtree(runtime, ignore_errors=True)
        server = session.trainer_pid
        assert server is not None
        os.kill(server, signal.SIGKILL)
        stream(session, lambda: session.state == "lost", "lost")
        stream(session, lambda: session.state == "streaming", "streaming again")
