"""Stop, from every state, with real processes: bounded, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from doublure_bridge import Error, Progress, SessionOpened, Stop, Stopped

from tests.trainer_server.client import Client
from tests.trainer_server.processes import (
    ROOT,
    STANDIN,
    ServerProcess,
    alive,
    environment,
    wait_for,
)

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as it:
        yield it


def train(client: Client, **config: Any) -> int:
    """Open a session and bring it to training; the job's pid."""
    pid = client.open(**config).job_pid
    for i in range(4):
        client.rows(t=i / 4)
    client.expect(Progress, where=lambda p: p.state == "training")
    return pid


@pytest.mark.parametrize(
    ("state", "config"),
    [
        ("waiting", {}),
        ("training", {}),
        ("publishing", {"publish_every": 5}),
        ("in a long step", {"busy_s": 30.0}),
        ("writing a checkpoint", {"publish_every": 5, "save_s": 30.0}),
        ("stopped by SIGSTOP", {}),
    ],
)
def test_stop_from(server: ServerProcess, state: str, config: dict[str, Any]) -> None:
    client = server.client()
    stuck = state in ("in a long step", "writing a checkpoint")
    if state == "waiting" or stuck:
        pid = client.open(**config).job_pid
        client.expect(Progress)
    else:
        pid = train(client, **config)
    if stuck:
        client.rows()
        time.sleep(0.1)
    if state == "stopped by SIGSTOP":
        os.kill(pid, signal.SIGSTOP)
    directory = server.runtime / "jobs" / client.opened.resume.hex()  # type: ignore[union-attr]
    assert directory.is_dir()
    assert client.stop().reason == "stop"
    # Stopped is only said when waitpid has returned: the process is gone by now, not soon.
    assert not alive(pid)
    assert not directory.exists()
    server.forget(client)


def test_stop_while_opening(server: ServerProcess) -> None:
    client = server.client()
    client.greet()
    client.send(client.request(build_s=30.0))
    log = "opened by test"
    wait_for(lambda: log in server.log_text(), log)
    time.sleep(0.3)  # past the assignment: the job sits in its constructor
    resume = sorted((server.runtime / "jobs").iterdir())
    assert len(resume) == 1
    before = server.jobs()
    # The host has no name for the session yet; its leaving is what ends it.
    server.forget(client)
    again = server.client()
    again.greet()
    again.send(again.request(resume=bytes.fromhex(resume[0].name)))
    opened = again.expect(SessionOpened)
    again.opened = opened
    assert opened.job_pid not in before or opened.step == 0
    again.stop()
    server.forget(again)


def test_frames_in_every_queue_do_not_delay_stop(server: ServerProcess) -> None:
    client = server.client()
    pid = client.open().job_pid
    os.kill(pid, signal.SIGSTOP)
    for _ in range(16):
        client.rows(4096)
    started = time.monotonic()
    client.stop()
    assert not alive(pid)
    # Loose, because machines that run tests are busy; benchmarks/stop.py measures.
    assert time.monotonic() - started < 5.0
    server.forget(client)


def test_a_persistent_job_saves_when_it_is_stopped(tmp_path: Path) -> None:
    with ServerProcess(directory=tmp_path) as it:
        client = it.client()
        train(client, publish_every=1 << 30)
        resume = client.opened.resume  # type: ignore[union-attr]
        stopped = client.stop()
        it.forget(client)
        directory = tmp_path / "jobs" / resume.hex()
        assert (directory / "standin.json").is_file()
        assert not list(directory.rglob("*.tmp"))
        again = it.client()
        assert again.open(resume=resume).step >= stopped.step > 0
        again.stop()


def test_a_paused_job_is_reported_and_recovers(server: ServerProcess) -> None:
    client = server.client()
    pid = train(client)
    os.kill(pid, signal.SIGSTOP)
    try:
        error = client.error("job_silent")
        assert not error.fatal
        assert f"pid {pid}" in error.what
    finally:
        os.kill(pid, signal.SIGCONT)
    client.seen.clear()
    client.expect(Progress)
    wait_for(lambda: f"job {pid} is heard again" in server.log_text(), "recovery in the log")
    client.receive()
    assert not [m for m in client.seen if isinstance(m, Error)]
    client.rows()
    client.stop()
    server.forget(client)


def test_two_hosts_at_once_have_a_job_each(server: ServerProcess) -> None:
    one, two = server.client(), server.client()
    first, second = train(one), train(two)
    assert first != second
    one.stop()
    assert alive(second)
    two.seen.clear()
    two.expect(Progress)
    two.stop()
    server.forget(one)
    server.forget(two)


def test_ten_sessions_leave_the_server_as_it_was() -> None:
    with ServerProcess() as it:
        me = psutil.Process(it.pid)
        figures = []
        for _ in range(11):
            client = it.client()
            train(client)
            client.wait_weights()
            client.stop()
            it.forget(client)
            time.sleep(0.05)  # for libzmq to notice that the host has closed
            figures.append((me.memory_info().rss, me.num_fds(), me.num_threads()))
        first, last = figures[1], figures[-1]
        print(figures)
        assert last[1] <= first[1] + 1
        assert last[2] <= first[2]
        assert last[0] - first[0] < 4 << 20
        assert not list((it.runtime / "jobs").iterdir())


def test_sigterm_drains(tmp_path: Path) -> None:
    with ServerProcess(directory=tmp_path) as it:
        clients = [it.client(), it.client()]
        pids = [train(client) for client in clients]
        os.kill(it.pid, signal.SIGTERM)
        clients[0].pump = lambda: (clients[1].receive(), None)[1]
        for client in clients:
            assert client.expect(Stopped).reason == "drained"
        assert it.process.wait(5) == 0
        assert not any(alive(pid) for pid in pids)
        # The runtime directory is the host's, which is alive, to remove.
        assert it.runtime.is_dir()
        assert not (it.runtime / "jobs").exists()


def test_ctrl_c_ends_the_foreground_trainer_cleanly(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "doublure_trainer.server", "--bind", "tcp://127.0.0.1:0",
         "--job", STANDIN],
        stderr=subprocess.PIPE, env={**environment(), "TMPDIR": str(tmp_path)}, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        endpoint = line.split("listening on ")[1].split()[0]
        with Client(endpoint) as client:
            pid = train(client)
            assert len(list(tmp_path.glob("doublure-*"))) == 1
            # As a terminal does it: to the whole foreground group.
            os.killpg(process.pid, signal.SIGINT)
            assert client.expect(Stopped).reason == "drained"
        _, rest = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in rest
    assert "no job is left" in rest
    assert not alive(pid)
    assert not list(tmp_path.iterdir())


def test_the_port_is_free_again_at_once() -> None:
    with ServerProcess() as it:
        client = it.client()
        train(client)
        endpoint = it.endpoint
        client.send(Stop(session=client.session, reason="x"))
    command = [
        sys.executable, "-m", "doublure_trainer.server", "--bind", endpoint, "--job", STANDIN,
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(), text=True)
    assert process.stderr is not None
    try:
        assert f"listening on {endpoint}" in process.stderr.readline()
        other = subprocess.run(
            command, capture_output=True, env=environment(), text=True, timeout=20, cwd=ROOT
        )
        assert other.returncode == 1
        (line,) = [x for x in other.stderr.splitlines() if "doublure trainer:" in x]
        assert "a port in use" in line
        assert "Traceback" not in other.stderr
    finally:
        process.terminate()
        process.communicate(timeout=10)
    assert process.returncode == 0
