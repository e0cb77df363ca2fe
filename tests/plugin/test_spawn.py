"""A trainer of our own: how it is found, started, watched, and gone."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from doublure_plugin import Session, Source, SpawnError, Timing
from doublure_plugin.spawn import (
    describe_exit,
    find_python,
    make_runtime_directory,
    process_start,
    scrubbed_environment,
    sweep_stale_directories,
)

from .fake_trainer import wait_for

ROOT = Path(__file__).parents[2]
SOURCE = Source("test", {"scene": "code"}, {}, 8, 8)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory of our own, so that what is left behind shows."""
    root = tmp_path / "temporary"
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    return root


def interpreter(tmp_path: Path, code: str) -> str:
    """A program to be started as if it were Python with a trainer in it."""
    path = tmp_path / "python-fake"
    path.write_text(f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}\n")
    path.chmod(0o755)
    return str(path)


SPAWNED = "from tests.plugin.fake_trainer import spawned; spawned()"


def alive(pid: int) -> bool:
    return process_start(pid) is not None


def test_the_interpreter_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOUBLURE_PYTHON", raising=False)
    assert find_python() == sys.executable
    assert find_python("/bin/sh") == "/bin/sh"
    monkeypatch.setenv("DOUBLURE_PYTHON", "/bin/sh")
    assert find_python() == "/bin/sh"
    assert find_python(sys.executable) == sys.executable
    with pytest.raises(SpawnError, match="no program at /no/python; correct python= or DOUBLURE_"):
        find_python("/no/python")


def test_an_engine_is_not_taken_for_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOUBLURE_PYTHON", raising=False)
    monkeypatch.setattr(sys, "executable", "/opt/engine/engine")
    assert Path(find_python()).name.startswith("python")


def test_the_environment_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/engine/modules")
    monkeypatch.setenv("PYTHONHOME", "/engine/python")
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    environment = scrubbed_environment()
    assert "PYTHONPATH" not in environment
    assert "PYTHONHOME" not in environment
    assert environment["PYTHONNOUSERSITE"] == "1"


def test_a_runtime_directory_is_private_and_names_its_owner(temporary: Path) -> None:
    path = make_runtime_directory()
    assert path.parent == temporary
    assert path.stat().st_mode & 0o777 == 0o700
    owner = json.loads((path / "owner.json").read_text())
    assert owner == {"pid": os.getpid(), "start": process_start(os.getpid())}


def test_only_directories_of_the_dead_are_swept(temporary: Path) -> None:
    ours = make_runtime_directory()
    dead, reused, strange, other = (temporary / f"doublure-{n}" for n in "abcd")
    for path in (dead, reused, strange, other):
        path.mkdir()
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    (dead / "owner.json").write_text(json.dumps({"pid": process.pid, "start": "1"}))
    (reused / "owner.json").write_text(json.dumps({"pid": os.getpid(), "start": "1"}))
    (strange / "owner.json").write_text("[]")
    assert sorted(sweep_stale_directories()) == [dead, reused]
    assert sorted(temporary.iterdir()) == sorted([ours, strange, other])


def test_exits_are_put_into_words() -> None:
    assert describe_exit(3) == "exit status 3"
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(None) == "still running"


@pytest.mark.process
def test_a_spawned_trainer_is_used_and_leaves_nothing(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/engine/modules")
    with Session(SOURCE, (0, 1), python=interpreter(tmp_path, SPAWNED)) as session:
        wait_for(lambda: session.state == "streaming", "streaming")
        pid = session.trainer_pid
        assert pid is not None
        assert alive(pid)
        (runtime,) = temporary.iterdir()
        environment = json.loads((runtime / "environment.json").read_text())
        assert "PYTHONPATH" not in environment
        assert os.getsid(pid) == pid
        assert session.capture(np.ones((8, 8, 3), np.float32), 0.5)
        wait_for(lambda: session.stats.sent == 1, "a frame sent")
    assert not alive(pid)
    assert not list(temporary.iterdir())
    assert session.stats.spawns == 1


@pytest.mark.process
def test_a_killed_trainer_is_started_again_and_resumes(tmp_path: Path, temporary: Path) -> None:
    with Session(SOURCE, (0, 1), python=interpreter(tmp_path, SPAWNED)) as session:
        wait_for(lambda: session.state == "streaming", "streaming")
        first = session.trainer_pid
        assert first is not None
        (runtime,) = temporary.iterdir()
        tokens = runtime / "tokens"
        wait_for(lambda: tokens.exists() and tokens.read_text(), "the token stored")
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: session.state == "lost", "lost")
        assert session.capture(np.ones((8, 8, 3), np.float32), 0.5) is False
        wait_for(lambda: session.state == "streaming", "streaming again")
        assert session.trainer_pid != first
        assert session.opened is not None
        assert session.opened.step == 50
        texts = " ".join(m.text for m in session.messages)
        assert f"the trainer (process {first}) has ended: killed by SIGKILL; starting" in texts
        assert "resumed at step 50" in texts
    assert not list(temporary.iterdir())


@pytest.mark.process
def test_a_paused_trainer_is_lost_and_regained(tmp_path: Path) -> None:
    timing = Timing(lost=0.4)
    with Session(SOURCE, (0, 1), python=interpreter(tmp_path, SPAWNED), timing=timing) as session:
        wait_for(lambda: session.state == "streaming", "streaming")
        pid = session.trainer_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_for(lambda: session.state == "lost", "lost")
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: session.state == "streaming", "streaming again")
        assert session.stats.spawns == 1


@pytest.mark.process
def test_a_paused_trainer_does_not_delay_leaving(tmp_path: Path, temporary: Path) -> None:
    session = Session(SOURCE, (0, 1), python=interpreter(tmp_path, SPAWNED))
    wait_for(lambda: session.state == "streaming", "streaming")
    pid = session.trainer_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    session.close()
    assert time.monotonic() - began < 2.5
    wait_for(lambda: not alive(pid), "the trainer gone")
    wait_for(lambda: not list(temporary.iterdir()), "its directory gone")


FAULTS: dict[str, tuple[str, str]] = {
    "no trainer": (
        "sys.exit(f'{sys.executable}: No module named doublure_trainer.server')",
        "-m pip install 'doublure[trainer]'`, or set DOUBLURE_PYTHON",
    ),
    "no torch": ("import torch_that_is_not_there", "-m pip install 'doublure[trainer]'`"),
    "a bug": ("1 / 0", "exit status 1: ZeroDivisionError: division by zero; see `"),
    "says why": (
        """print('{"error": "directory /x: expected one that can be written"}'); sys.exit(1)""",
        "trainer process: expected it to start, got directory /x: expected one that can be",
    ),
    "says nonsense": ("print('hello'); sys.stdin.read()", "expected a line that says it is ready"),
    "says nothing": ("sys.stdin.readline(); sys.stdin.read()", "ready within 0 s, got no word"),
}


@pytest.mark.process
@pytest.mark.parametrize("fault", FAULTS)
def test_a_trainer_that_cannot_start_is_explained(
    tmp_path: Path, temporary: Path, fault: str
) -> None:
    code, text = FAULTS[fault]
    timing = Timing(ready=0.4 if fault == "says nothing" else 30.0)
    with Session(SOURCE, (0, 1), python=interpreter(tmp_path, code), timing=timing) as session:
        wait_for(lambda: session.state == "failed", "failed")
        assert text in str(session.error)
        assert session.capture(np.ones((8, 8, 3), np.float32), 0.5) is False
        wait_for(lambda: not list(temporary.iterdir()), "its directory gone")


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with Session(SOURCE, (0, 1), python="/no/python") as session:
        wait_for(lambda: session.state == "failed", "failed")
        assert "no program at /no/python" in str(session.error)


@pytest.mark.process
def test_a_trainer_that_keeps_dying_is_given_up(tmp_path: Path, temporary: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    timing = Timing(respawn=0.01)
    with Session(SOURCE, (0, 1), python=interpreter(tmp_path, code), timing=timing) as session:
        wait_for(lambda: session.state == "failed", "failed")
        assert "expected it to run, got 5 deaths within a minute" in str(session.error)
        assert session.stats.spawns == 5
        wait_for(lambda: not list(temporary.iterdir()), "its directory gone")


HOST = """
import sys, time
import numpy as np
import doublure_plugin as doublure
sys.path.insert(0, {root!r})
source = doublure.Source("test", {{"a": "b"}}, {{}}, 8, 8)
session = doublure.Session(source, (0, 1), {options})
while session.state != {state!r}:
    time.sleep(0.005)
print(session.trainer_pid, flush=True)
{then}
"""


def host(temporary: Path, options: str, state: str, then: str) -> "subprocess.Popen[str]":
    code = HOST.format(root=str(ROOT), options=options, state=state, then=then)
    environment = os.environ | {"TMPDIR": str(temporary)}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    )  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("then", ["", "raise SystemExit(3)", "time.sleep(60)"])
def test_the_end_of_the_host_is_the_end_of_its_trainer(
    tmp_path: Path, temporary: Path, then: str
) -> None:
    """Falling off the end, leaving early, and being killed: the session is open each time."""
    python = interpreter(tmp_path, SPAWNED)
    process = host(temporary, f"python={python!r}", "streaming", then)
    assert process.stdout is not None
    trainer = int(process.stdout.readline())
    killed = "sleep" in then
    if killed:
        process.kill()
    assert process.wait(10) == (-9 if killed else 3 if then else 0)
    process.stdout.close()
    wait_for(lambda: not alive(trainer), "the trainer gone")
    if killed:
        # The real server removes it; a later host does in any case.
        sweep_stale_directories()
    assert not list(temporary.iterdir())


@pytest.mark.process
def test_leaving_does_not_wait_for_an_unreachable_trainer(temporary: Path) -> None:
    options = "trainer='tcp://127.0.0.1:9'"
    then = "print(time.monotonic(), flush=True)"
    process = host(temporary, options, "connecting", then)
    assert process.stdout is not None
    assert process.stdout.readline() == "None\n"
    left = float(process.stdout.readline())
    assert process.wait(10) == 0
    process.stdout.close()
    assert time.monotonic() - left < 2.0


def test_fields_of_the_process_table_survive_odd_names() -> None:
    assert process_start(os.getpid()) is not None
    assert process_start(2**22 + 1) is None
