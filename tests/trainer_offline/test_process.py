"""`doublure train` as a process: killed, stopped, resumed, and what it says on the way."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import STEPS
from .data import SMALL
from .test_train import same_weights

pytestmark = pytest.mark.process


def command(dataset: Path, out: Path, *more: str, steps: int = STEPS) -> list[str]:
    return [
        *(sys.executable, "-m", "doublure_trainer", "train"),
        *("--dataset", str(dataset), "--out", str(out), "--steps", str(steps)),
        *("--device", "cpu", "--config", json.dumps(SMALL), *more),
    ]


def started(*args: str, log: Path | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    if log is None:
        return subprocess.Popen(
            args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
    with log.open("a") as output:
        return subprocess.Popen(
            args, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment
        )


def finished(*args: str) -> str:
    process = started(*args)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def killed_and_resumed(
    dataset: Path, out: Path, whole: Path, *, steps: int, kills: int, seed: int
) -> None:
    """Kill -9 at random instants, resume each time, and compare with the uninterrupted one."""
    rng = random.Random(seed)
    print("seed", seed)
    words = command(dataset, out, "--resume", "--checkpoint-every", "0.05", steps=steps)
    for _ in range(kills):
        process = started(*words)
        # Most of the time is the start and the training; the report is met now and then.
        deadline = time.monotonic() + 60
        while not (out / "checkpoints" / "last.safetensors").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        before = (out / "checkpoints" / "last.safetensors").stat().st_mtime_ns
        while process.poll() is None:
            if (out / "checkpoints" / "last.safetensors").stat().st_mtime_ns != before:
                break
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.5))
        process.kill()
        output, _ = process.communicate(timeout=10)
        assert "Error" not in output, output
    print(finished(*words))
    assert same_weights(whole, out)


def test_killed_at_any_instant_and_resumed_it_ends_the_same(
    dataset: Path, trained: Path, tmp_path: Path
) -> None:
    killed_and_resumed(dataset, tmp_path / "m", trained, steps=STEPS, kills=3, seed=11)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_many_times_it_ends_the_same(dataset: Path, tmp_path: Path, seed: int) -> None:
    whole, out = tmp_path / "whole", tmp_path / "m"
    finished(*command(dataset, whole, steps=1500))
    killed_and_resumed(dataset, out, whole, steps=1500, kills=8, seed=seed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_a_checkpoint_and_a_word(
    dataset: Path, trained: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "m"
    process = started(*command(dataset, out))
    deadline = time.monotonic() + 60
    while not (out / "progress.json").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number, output
    assert f"of {STEPS}; go on with --resume" in output
    assert "Traceback" not in output
    assert json.loads((out / "progress.json").read_text())["state"] == "stopped"
    assert "resumed at step" in finished(*command(dataset, out, "--resume"))
    assert same_weights(trained, out)


def test_a_parent_may_keep_the_log(dataset: Path, tmp_path: Path) -> None:
    """As a training job starts it: output to training.log, made before the child runs."""
    out = tmp_path / "m"
    out.mkdir()
    log = out / "training.log"
    process = started(*command(dataset, out, steps=40), log=log)
    assert process.wait(timeout=60) == 0, log.read_text()
    lines = log.read_text().splitlines()
    assert lines[0] == "training on 3200 rows of 16 frames for 40 steps on cpu, seed 0"
    assert len(lines) == len(set(lines))
    assert lines[-1] == str(out / "weights.safetensors")


def test_an_error_is_one_line(dataset: Path, trained: Path) -> None:
    process = started(*command(dataset, trained))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Use a new model directory" in output
    assert "Traceback" not in output
