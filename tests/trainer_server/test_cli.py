"""`doublure trainer` as people start it, and what the server's process imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .client import Client
from .processes import environment

pytestmark = pytest.mark.process


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, env=environment(), timeout=60
    )


def test_the_server_imports_nothing_heavy() -> None:
    code = "import sys, json, doublure_trainer.server as s; print(json.dumps(sorted(sys.modules)))"
    modules = set(json.loads(run("-c", code).stdout))
    assert "doublure_trainer.hub" in modules
    heavy = {"torch", "tensorboard", "safetensors", "typer", "rich", "doublure_plugin"}
    assert not heavy & modules


def test_the_job_module_itself_imports_no_torch() -> None:
    code = "import sys, json, doublure_trainer.job; print('torch' in sys.modules)"
    assert run("-c", code).stdout.strip() == "False"


def test_without_a_terminal_there_are_plain_lines(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "doublure_trainer", "--bind", "tcp://127.0.0.1:0",
         "--directory", str(tmp_path / "kept")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**environment(), "PYTHONUNBUFFERED": "1", "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("doublure trainer: listening on tcp://127.0.0.1:")
        endpoint = line.split("listening on ")[1].split(";")[0]
        with Client(endpoint) as client:
            assert client.greet().pid == process.pid
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "\x1b" not in line + out + err
    assert "Traceback" not in err
    assert "test (test 0, pid" in err
    assert "stopped: no job is left" in err
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("how", ["doublure_trainer", "doublure_trainer.server"])
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--bind", "tcp://0.0.0.0:5570", "ssh -L"),
        ("--bind", "localhost", "expected tcp://HOST:PORT"),
        ("--directory", "{file}/below", "expected one that can be written"),
    ],
)
def test_what_cannot_be_served_is_one_clear_line(
    tmp_path: Path, how: str, option: str, value: str, said: str
) -> None:
    (tmp_path / "file").write_text("")
    value = value.format(file=tmp_path / "file")
    bind = [] if option == "--bind" else ["--bind", "tcp://127.0.0.1:0"]
    result = run("-m", how, option, value, *bind)
    assert result.returncode == 1
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_device_is_refused() -> None:
    result = run("-m", "doublure_trainer", "--device", "tpu")
    assert result.returncode == 2
    assert "expected auto, cpu or cuda" in result.stderr
