"""The real job, torch and all, behind a real server: training, Stop, death, resume.

One module, few servers: importing torch takes seconds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from doublure_bridge import (
    Error,
    Progress,
    Rows,
    Weights,
    model_spec_from_dict,
    tensors_digest,
    unpack_tensors,
)
from doublure_plugin.evaluate import Evaluator
from doublure_trainer.checkpoint import read_state

from tests.trainer_server.client import Client
from tests.trainer_server.processes import REAL, ServerProcess, alive, wait_for

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(job=REAL) as it:
        yield it


def wave(x: np.ndarray, t: float) -> np.ndarray:
    """A smooth picture that changes with t."""
    phase = x @ np.array([[2.0, 1.0, 0.5], [0.5, 2.0, 1.0]], np.float32) + t
    return (0.5 + 0.4 * np.sin(phase)).astype(np.float32)


def feed(client: Client, frames: int) -> None:
    """Frames spread over the whole range of t, on credit."""
    rng = np.random.default_rng(client.sequence)
    for _ in range(frames):
        while client.credit <= 0:
            client.receive()
            client.pump()
        t = float((client.sequence * 0.6180339887) % 1.0 * 2 - 1)
        rows = np.empty((1024, 6), np.float32)
        rows[:, :2] = rng.uniform(-1, 1, (1024, 2))
        rows[:, 2] = t
        rows[:, 3:] = wave(rows[:, :2], t)
        message = Rows(session=client.session, sequence=client.sequence, t=t, rows=rows)
        if client.frames.send(message):
            client.sequence += 1
            client.credit -= 1


def train(client: Client, *, resume: bytes = b"", **config: object) -> int:
    """Open, feed, and wait until steps are counted; the job's pid."""
    pid = client.open(resume=resume, **config).job_pid
    feed(client, 160)
    client.expect(Progress, where=lambda p: p.step > 0 and p.state != "waiting")
    return pid


def test_a_real_job_learns_publishes_and_stops(server: ServerProcess) -> None:
    client = server.client()
    pid = train(client)
    assert client.opened is not None
    assert client.opened.models
    for spec in client.opened.models:
        model_spec_from_dict(spec)
    assert client.opened.held_out
    assert client.opened.test
    weights = client.wait_weights()
    assert weights.digest == tensors_digest(weights.tensors)
    spec = model_spec_from_dict(weights.model)
    assert spec.family in {model_spec_from_dict(m).family for m in client.opened.models}
    colours = Evaluator(spec, unpack_tensors(weights.tensors, spec))(weights.probe_points)
    np.testing.assert_allclose(colours, weights.probe_colors, rtol=1e-3, atol=1e-3)
    progress = client.expect(Progress, where=lambda p: p.version >= 1 and bool(p.held_out))
    assert progress.held_out["psnr_db"] > 10
    # Training starts before the last rows are in.
    progress = client.expect(Progress, where=lambda p: p.rows == 160 * 1024)
    assert 0 < progress.coverage <= 1
    assert client.stop().reason == "stop"
    assert not alive(pid)
    assert not list((server.runtime / "jobs").iterdir())
    server.forget(client)


def test_a_real_job_that_is_paused_is_stopped_all_the_same(server: ServerProcess) -> None:
    client = server.client()
    pid = train(client)
    os.kill(pid, signal.SIGSTOP)
    client.stop()
    assert not alive(pid)
    server.forget(client)


def test_an_unknown_option_names_the_nearest(server: ServerProcess) -> None:
    client = server.client()
    client.greet()
    client.send(client.request(thread=2))
    error = client.error("config")
    assert error.fatal
    assert "thread" in error.what
    assert "threads" in error.next_step + error.expected
    server.forget(client)


def test_a_killed_real_job_goes_on_from_its_checkpoint(server: ServerProcess) -> None:
    client = server.client()
    pid = train(client)
    assert client.opened is not None
    directory = server.runtime / "jobs" / client.opened.resume.hex()
    client.wait_weights()
    wait_for(lambda: any(checkpoints(directory)), "a checkpoint", timeout_s=30.0)
    time.sleep(0.1)
    client.receive()
    saved = read_state(directory / "last.safetensors").meta["step"]
    assert saved > 0
    os.kill(pid, signal.SIGKILL)
    error = client.error("job_died")
    assert not error.fatal
    assert "SIGKILL" in error.what
    client.seen.clear()
    after = client.expect(Progress)
    assert after.step >= saved
    assert after.state == "waiting"
    before = after.step
    feed(client, 160)
    client.expect(Progress, where=lambda p: p.step > before)
    client.stop()
    server.forget(client)


def checkpoints(directory: Path) -> list[Path]:
    names = {"job.log", "lock", "published.json", "tensorboard"}
    return [p for p in directory.iterdir() if p.name not in names and ".tmp" not in p.name]


def test_a_persistent_real_job_resumes_in_another_server(tmp_path: Path) -> None:
    with ServerProcess(job=REAL, directory=tmp_path) as it:
        client = it.client()
        pid = train(client)
        assert client.opened is not None
        resume = client.opened.resume
        published = client.wait_weights()
        while any(isinstance(m, Weights) for m in client.receive()):
            pass
        stopped = client.stop()
        assert not alive(pid)
        assert checkpoints(tmp_path / "jobs" / resume.hex())
    with ServerProcess(job=REAL, directory=tmp_path) as it:
        client = it.client()
        opened = client.open(resume=resume)
        assert opened.step >= stopped.step > 0
        again = client.wait_weights()
        assert again.version >= published.version
        client.receive()
        assert not [m for m in client.seen if isinstance(m, Error)]
        client.stop()


@pytest.mark.parametrize("state", ["training", "stopped by SIGSTOP"])
def test_a_killed_server_takes_real_jobs_along(state: str) -> None:
    with ServerProcess(job=REAL, spares=0) as it:
        client = it.client()
        pid = train(client)
        if state == "stopped by SIGSTOP":
            os.kill(pid, signal.SIGSTOP)
        os.kill(it.pid, signal.SIGKILL)
        took = wait_for(lambda: not alive(pid), "job gone", timeout_s=5.0)
        print(f"job gone {took * 1000:.0f} ms after its server")
