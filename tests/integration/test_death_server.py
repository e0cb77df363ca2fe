"""Death of each process, with real processes: named, survived, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from doublure_bridge import Progress, SessionOpened

from tests.trainer_server.client import Client
from tests.trainer_server.processes import ServerProcess, alive, environment, wait_for

pytestmark = pytest.mark.process


def train(client: Client, **config: Any) -> int:
    pid = client.open(**config).job_pid
    for i in range(4):
        client.rows(t=i / 4)
    client.expect(Progress, where=lambda p: p.state == "training")
    return pid


def test_a_killed_job_resumes_from_its_checkpoint() -> None:
    with ServerProcess() as it:
        client = it.client()
        pid = train(client)
        published = client.wait_weights()  # the stand-in saves with each publication
        os.kill(pid, signal.SIGKILL)
        error = client.error("job_died")
        assert not error.fatal
        assert f"(pid {pid}) has died: signal SIGKILL" in error.what
        client.seen.clear()
        again = client.expect(Progress)
        assert again.step >= published.step
        assert again.state == "waiting"  # the replay is empty again
        client.rows()
        newer = client.wait_weights()
        assert newer.version > published.version
        assert newer.step > published.step
        client.stop()


def test_versions_never_repeat_across_a_death() -> None:
    with ServerProcess() as it:
        client = it.client()
        pid = train(client, publish_every=5)
        seen = []
        for _ in range(3):
            seen.append(client.wait_weights())
            client.seen = [m for m in client.seen if not isinstance(m, Progress)]
        os.kill(pid, signal.SIGKILL)
        client.error("job_died")
        client.expect(Progress, where=lambda p: p.state == "waiting")
        client.rows()
        last = client.expect(Progress, where=lambda p: p.state == "training")
        weights = client.wait_weights()
        by_version: dict[int, bytes] = {}
        for w in [*seen, weights]:
            assert by_version.setdefault(w.version, w.digest) == w.digest
        assert last.version >= seen[-1].version
        client.stop()


def test_an_exception_in_the_job_reaches_the_host_with_its_traceback() -> None:
    with ServerProcess() as it:
        client = it.client()
        client.open(fail_at=20)
        client.rows()
        error = client.error("job_failed")
        assert error.fatal
        assert error.what == "FloatingPointError: the stand-in was told to fail"
        assert "Traceback (most recent call last)" in error.detail
        assert "standin.py" in error.detail
        wait_for(lambda: not list((it.runtime / "jobs").iterdir()), "job directory removed")


def test_a_crash_in_native_code_is_named_and_its_log_attached() -> None:
    with ServerProcess() as it:
        client = it.client()
        client.open(die_at=20)
        for _ in range(4):
            client.rows()
            error = client.error("job_died")
            assert "signal SIGABRT" in error.what
            assert "about to abort" in error.detail
            if error.fatal:
                break
            client.seen.clear()
            client.expect(Progress, where=lambda p: p.state == "waiting")
        assert error.fatal  # it would go on for ever
        wait_for(lambda: not list((it.runtime / "jobs").iterdir()), "job directory removed")


def test_a_refused_config_names_the_key() -> None:
    with ServerProcess() as it:
        client = it.client()
        client.greet()
        client.send(client.request(publish_evry=3))
        error = client.error("config")
        assert error.fatal
        assert error.what == "config.publish_evry"
        assert error.next_step == "did you mean publish_every?"
        # The connection is good for another try.
        client.open(greet=False)
        client.stop()


@pytest.mark.parametrize("state", ["training", "in a long step", "stopped by SIGSTOP"])
def test_a_killed_server_takes_its_jobs_along(state: str) -> None:
    with ServerProcess() as it:
        client = it.client()
        if state == "in a long step":
            pid = client.open(busy_s=60.0).job_pid
            client.rows()
        else:
            pid = train(client)
        if state == "stopped by SIGSTOP":
            os.kill(pid, signal.SIGSTOP)
        jobs = it.jobs()
        assert pid in jobs
        os.kill(it.pid, signal.SIGKILL)
        wait_for(lambda: not any(map(alive, jobs)), "jobs gone", timeout_s=5.0)
        it.process.wait()
        # All of it lies in the runtime directory, which the host removes.
        left = {path.name for path in it.runtime.iterdir()}
        assert left <= {"server.log", "jobs", "logs", "jobs.sock"}


def test_a_respawned_server_resumes_the_job() -> None:
    with ServerProcess() as it:
        client = it.client()
        train(client)
        published = client.wait_weights()
        opened = client.opened
        assert opened is not None
        os.kill(it.pid, signal.SIGKILL)
        it.process.wait()
        with ServerProcess(runtime=it.runtime) as other:
            again = other.client()
            resumed = again.open(resume=opened.resume)
            assert resumed.resume == opened.resume
            assert resumed.step >= published.step
            # Its last publication comes again, under the version it had.
            back = again.wait_weights()
            assert back.version >= published.version
            assert back.step == resumed.step
            again.stop()


HOST = """
import os, sys, time
from pathlib import Path
from tests.trainer_server.processes import ServerProcess
server = ServerProcess(runtime=Path(sys.argv[1]))
client = server.client()
job = client.open(**{"busy_s": float(sys.argv[2])}).job_pid
client.rows()
print(server.pid, job, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("busy_s", [0.005, 600.0])
def test_a_killed_host_takes_everything_along(tmp_path: Path, busy_s: float) -> None:
    runtime = tmp_path / "doublure-x"
    runtime.mkdir(mode=0o700)
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(runtime), str(busy_s)],
        stdout=subprocess.PIPE, env=environment(), text=True,
    )  # fmt: skip
    assert host.stdout is not None
    server, job = map(int, host.stdout.readline().split())
    family = [server, *(p.pid for p in psutil.Process(server).children(recursive=True))]
    assert job in family
    host.kill()
    host.wait()
    host.stdout.close()
    wait_for(lambda: not any(map(alive, family)), "server and jobs gone", timeout_s=5.0)
    assert not runtime.exists()


@pytest.mark.parametrize("token", [b"", json.dumps({"token": "00" * 32}).encode() + b"\n"])
def test_a_host_that_is_killed_while_its_server_starts_leaves_nothing(
    tmp_path: Path, token: bytes
) -> None:
    """The host dies before its token was read, and before it can read that the server is ready."""
    runtime = tmp_path / "doublure-x"
    runtime.mkdir(mode=0o700)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    server = subprocess.Popen(
        [sys.executable, "-m", "doublure_trainer.server", "--spawned", "--runtime-dir",
         str(runtime), "--parent", str(gone.pid)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stderr is not None
    server.stdout.close()
    server.stdin.write(token)
    server.stdin.close()
    said = server.stderr.read().decode()
    server.stderr.close()
    server.wait(10)
    assert "Traceback" not in said
    assert not runtime.exists()


def test_a_stopped_job_goes_with_a_killed_host(tmp_path: Path) -> None:
    runtime = tmp_path / "doublure-x"
    runtime.mkdir(mode=0o700)
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(runtime), "0.005"],
        stdout=subprocess.PIPE, env=environment(), text=True,
    )  # fmt: skip
    assert host.stdout is not None
    server, job = map(int, host.stdout.readline().split())
    os.kill(job, signal.SIGSTOP)
    host.kill()
    host.wait()
    host.stdout.close()
    wait_for(lambda: not alive(server) and not alive(job), "all gone", timeout_s=5.0)
    assert not runtime.exists()


def test_a_spawned_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    process = subprocess.run(
        [sys.executable, "-m", "doublure_trainer.server", "--spawned", "--runtime-dir",
         str(tmp_path), "--parent", str(os.getpid()), "--directory", str(blocked / "below")],
        input=json.dumps({"token": "00" * 32}) + "\n", capture_output=True, text=True,
        env=environment(), timeout=20,
    )  # fmt: skip
    assert process.returncode == 1
    said = json.loads(process.stdout)
    assert "expected one that can be written" in said["error"]


def test_a_killed_foreground_trainer_is_swept_up_by_the_next(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "doublure_trainer.server", "--bind", "tcp://127.0.0.1:0",
        "--job", "tests.trainer_server.standin",
    ]  # fmt: skip
    env = {**environment(), "TMPDIR": str(tmp_path)}

    def start() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, env=env, text=True)
        assert process.stderr is not None
        for line in process.stderr:
            if "listening on " in line:
                return process, line.split("listening on ")[1].split()[0]
        raise AssertionError("it never listened")

    first, endpoint = start()
    with Client(endpoint) as client:
        pid = train(client)
        first.kill()
        first.communicate()
        wait_for(lambda: not alive(pid), "job gone", timeout_s=5.0)
    (left,) = tmp_path.iterdir()
    second, _ = start()
    assert not left.exists()
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=10)
    assert second.returncode == 0
    assert not list(tmp_path.iterdir())


def test_a_resume_token_from_elsewhere_starts_anew() -> None:
    with ServerProcess() as it:
        client = it.client()
        opened: SessionOpened = client.open(resume=b"\5" * 16)
        assert opened.resume == b"\5" * 16
        assert opened.step == 0
        client.stop()
