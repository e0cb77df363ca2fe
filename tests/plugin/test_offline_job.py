"""A training in a process of its own: what is refused, how it is followed, and that it ends."""

import concurrent.futures
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from doublure_plugin import SpawnError, TrainerError, TrainingError, TrainingJob, train_async
from doublure_plugin.spawn import process_start

from .fake_trainer import wait_for

ROOT = Path(__file__).parents[2]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    directory = tmp_path / "dataset"
    directory.mkdir()
    (directory / "dataset.json").write_text("{}")
    return directory


# What a trainer is started with comes first, and `pids` notes who is there.
CHILD = """
import json, os, signal, subprocess, sys, time
words = sys.argv[1:]
out = words[words.index("--out") + 1]
steps = int(words[words.index("--steps") + 1])
def path(name):
    return os.path.join(out, name)
def note(pid):
    with open(path("pids"), "a") as file:
        file.write(f"{pid}\\n")
def progress(**figures):
    with open(path("part"), "w") as file:
        json.dump(figures, file)
    os.replace(path("part"), path("progress.json"))
def weights():
    with open(path("weights.json"), "w") as file:
        file.write("{}")
note(os.getpid())
"""


def interpreter(tmp_path: Path, code: str) -> str:
    """A program that is Python, but whose trainer is `code`."""
    child, path = tmp_path / "child.py", tmp_path / "python-fake"
    child.write_text(CHILD + code)
    path.write_text(
        f'#!/bin/sh\ncase "$1" in\n-m) exec {sys.executable} {child} "$@";;\n'
        f'*) exec {sys.executable} "$@";;\nesac\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def pids(job: TrainingJob, count: int) -> list[int]:
    """Processes that the training has noted, once there are so many."""
    path = job.model_directory / "pids"
    wait_for(lambda: path.exists() and path.read_text().count("\n") >= count, "processes noted")
    return [int(line) for line in path.read_text().split()]


def alive(pid: int) -> bool:
    return process_start(pid) is not None


def failure(job: TrainingJob) -> TrainingError:
    error = job.result.exception(20)
    assert isinstance(error, TrainingError)
    return error


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    wait_for(
        lambda: not [t for t in threading.enumerate() if t.name == "doublure-training"],
        "the watching thread gone",
    )


# -- refusals -------------------------------------------------------------------------------------


def test_no_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"dataset .*/no: expected a directory with dataset.js"):
        train_async(tmp_path / "no", tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("steps", [0, 200_001, -1, 1.5, True, "12"])
def test_steps_out_of_range_are_refused(dataset: Path, tmp_path: Path, steps: int) -> None:
    with pytest.raises(TrainerError, match=r"steps: expected a whole number in 1..200000, got"):
        train_async(dataset, tmp_path / "m", steps)
    assert not (tmp_path / "m").exists()


def test_working_weights_are_not_replaced(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "weights.json").write_text("mine")
    text = "Use a new model directory so a failed job cannot replace working weights"
    with pytest.raises(TrainerError, match=text):
        train_async(dataset, tmp_path / "m")
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["weights.json"]


def test_a_directory_that_cannot_be_made_is_named(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainerError, match=r"model directory .*/file/m: .* got Not a directory"):
        train_async(dataset, tmp_path / "file" / "m")


def test_an_interpreter_that_is_not_there_is_named(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(SpawnError, match="no program at /no/python"):
        train_async(dataset, tmp_path / "m", python="/no/python")
    assert not (tmp_path / "m").exists()


# -- a training that works ------------------------------------------------------------------------

TRAINS = """
print(json.dumps(words), os.getcwd(), sys.stdin.read() == "")
print("PYTHONPATH" in os.environ, os.environ["OPENBLAS_NUM_THREADS"])
progress(step=5, steps=steps, loss=0.25, held_out_psnr_db=31.5, eta_s=7.0, state="training")
while not os.path.exists(path("go")):
    time.sleep(0.01)
os.remove(path("go"))
progress(step=steps, steps=steps, loss=0.1, held_out_psnr_db=40.0, eta_s=0.0, state="reporting")
while not os.path.exists(path("go")):
    time.sleep(0.01)
weights()
"""


@pytest.mark.process
def test_a_training_is_followed_to_its_weights(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/engine/modules")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    python = interpreter(tmp_path, TRAINS)
    with train_async("dataset", "m", 40, python=python, options=("--threads", "1")) as job:
        assert job.model_directory == tmp_path / "m"
        wait_for(lambda: job.poll().step == 5, "progress")
        now = job.poll()
        assert (now.state, now.steps, now.loss, now.held_out_psnr_db, now.eta_s, now.error) == (
            "training", 40, 0.25, 31.5, 7.0, None,
        )  # fmt: skip
        assert not job.result.done()
        assert not job.result.cancel()
        (pid,) = pids(job, 1)
        assert os.getsid(pid) != os.getsid(0)
        (tmp_path / "m" / "go").touch()
        wait_for(lambda: job.poll().state == "reporting", "the report")
        (tmp_path / "m" / "go").touch()
        assert job.result.result(20) == tmp_path / "m"
        assert (job.poll().state, job.poll().step, job.poll().eta_s) == ("done", 40, 0.0)
        wait_for(lambda: not alive(pid), "the process gone")
    job.close()
    assert job.poll().state == "done"
    assert job.log.read_text().splitlines() == [
        json.dumps(
            ["-m", "doublure_trainer", "train", "--dataset", str(dataset), "--out",
             str(tmp_path / "m"), "--steps", "40", "--threads", "1"]
        ) + f" {tmp_path / 'm'} True",
        "False 1",
    ]  # fmt: skip


@pytest.mark.process
def test_a_resumed_training_does_not_show_old_figures(dataset: Path, tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    (model / "progress.json").write_text('{"step": 900, "steps": 1000}')
    (model / "training.log").write_text("before\n")
    python = interpreter(tmp_path, "print('--resume' in words)\nweights()")
    seen: list[int] = []
    with train_async(dataset, model, 1000, python=python, resume=True) as job:
        while not job.result.done():
            seen.append(job.poll().step)
            time.sleep(0.005)
        job.result.result(20)
    assert set(seen) == {0}
    assert job.log.read_text() == "before\nTrue\n"


@pytest.mark.process
@pytest.mark.parametrize(
    "written", ["", "{", "[]", '{"step": "x"}', '{"steps": 3}', '{"step": 1e999}', "null"]
)
def test_odd_progress_is_ignored(dataset: Path, tmp_path: Path, written: str) -> None:
    code = f"""
open(path("progress.json"), "w").write({written!r})
time.sleep(0.3)
weights()
"""
    with train_async(dataset, tmp_path / "m", 9, python=interpreter(tmp_path, code)) as job:
        job.result.result(20)
        assert (job.poll().state, job.poll().step, job.poll().steps) == ("done", 9, 9)


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_crash_tells_its_status_and_the_end_of_its_log(dataset: Path, tmp_path: Path) -> None:
    code = """
progress(step=3, steps=steps, loss=None, held_out_psnr_db=None, eta_s=None)
sys.stdout.write("x" * 9000 + "\\u00e4" * 999 + "\\n")
time.sleep(0.3)
print("the reason", file=sys.stderr)
sys.exit(3)
"""
    with train_async(dataset, tmp_path / "m", python=interpreter(tmp_path, code)) as job:
        error = failure(job)
        assert error.exit_status == 3
        assert not error.stopped
        assert len(error.log_tail) == 3000
        assert error.log_tail == "x" * 1989 + "ä" * 999 + "\nthe reason\n"
        assert str(error).startswith("training failed (exit status 3): got xxx")
        assert str(error).endswith("the reason\n")
        now = job.poll()
        assert (now.state, now.step, now.steps, now.error) == ("failed", 3, 12_000, error)
        with pytest.raises(TrainingError, match="exit status 3"):
            job.result.result(0)


@pytest.mark.process
def test_a_trainer_that_is_not_installed_is_a_failure(dataset: Path, tmp_path: Path) -> None:
    path = tmp_path / "bare"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    path.chmod(0o755)
    with train_async(dataset, tmp_path / "m", python=path) as job:
        assert "No module named doublure_trainer" in str(failure(job))


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", -11, "(killed by SIGSEGV): got an empty log"),
        ("pass", 0, "(exit status 0) without weights.json in "),
    ],
)
def test_other_ends_without_weights_are_failures(
    dataset: Path, tmp_path: Path, code: str, status: int, text: str
) -> None:
    with train_async(dataset, tmp_path / "m", python=interpreter(tmp_path, code)) as job:
        error = failure(job)
        assert error.exit_status == status
        assert text in str(error)


# -- its end --------------------------------------------------------------------------------------

HANGS = "time.sleep(600)"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote(0)\ntime.sleep(600)"
# Grandchildren: one in the same group, one deaf in a session of its own, and an orphan of that.
FAMILY = """
more = "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True, stdout=subprocess.DEVNULL).pid, flush=True)"
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
note(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
one = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
one.stdout.readline()
note(one.pid)
note(int(subprocess.run([sys.executable, "-c", more], stdout=subprocess.PIPE).stdout))
"""  # noqa: E501


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "count", "ended_by"),
    [
        (HANGS, 1, signal.SIGTERM),
        (DEAF, 2, signal.SIGKILL),
        (FAMILY + HANGS, 4, signal.SIGTERM),
    ],
    ids=["hangs", "deaf", "family"],
)
def test_close_ends_all_of_it(
    dataset: Path, tmp_path: Path, code: str, count: int, ended_by: signal.Signals
) -> None:
    job = train_async(dataset, tmp_path / "m", python=interpreter(tmp_path, code))
    noted = [pid for pid in pids(job, count) if pid]
    assert all(alive(pid) for pid in noted)
    job.close()
    assert [pid for pid in noted if alive(pid)] == []
    error = failure(job)
    assert error.stopped
    assert error.exit_status == -ended_by
    assert str(error).startswith("training was stopped by close()")
    assert job.poll().state == "stopped"
    job.close()
    job.stop()


@pytest.mark.process
def test_a_training_may_end_in_order(dataset: Path, tmp_path: Path) -> None:
    code = """
def leave(*_):
    note(1)
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
note(0)
time.sleep(600)
"""
    job = train_async(dataset, tmp_path / "m", python=interpreter(tmp_path, code))
    pids(job, 2)
    job.stop()
    assert failure(job).exit_status == 143
    assert pids(job, 3)[2] == 1
    job.close()


@pytest.mark.process
def test_jobs_closed_at_once_leave_nothing(dataset: Path, tmp_path: Path) -> None:
    python = interpreter(tmp_path, DEAF)
    open_files = sorted(os.listdir("/proc/self/fd"))
    for i in range(4):
        job = train_async(dataset, tmp_path / f"m{i}", python=python)
        keeper = job._keeper.pid
        job.close()
        assert failure(job).stopped
        assert not alive(keeper)
    assert sorted(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.process
def test_a_paused_training_is_ended(dataset: Path, tmp_path: Path) -> None:
    job = train_async(dataset, tmp_path / "m", python=interpreter(tmp_path, HANGS))
    (pid,) = pids(job, 1)
    os.kill(pid, signal.SIGSTOP)
    job.close()
    assert not alive(pid)


@pytest.mark.process
def test_what_a_finished_training_leaves_running_is_ended(dataset: Path, tmp_path: Path) -> None:
    python = interpreter(tmp_path, FAMILY + "weights()")
    with train_async(dataset, tmp_path / "m", python=python) as job:
        assert job.result.result(20) == tmp_path / "m"
        noted = pids(job, 4)
        assert [pid for pid in noted if alive(pid)] == []


@pytest.mark.process
def test_the_training_ends_with_its_keeper(dataset: Path, tmp_path: Path) -> None:
    job = train_async(dataset, tmp_path / "m", python=interpreter(tmp_path, HANGS))
    (pid,) = pids(job, 1)
    os.kill(os.getsid(pid), signal.SIGKILL)
    assert "its keeper was killed by SIGKILL" in str(failure(job))
    wait_for(lambda: not alive(pid), "the training gone")
    job.close()


@pytest.mark.process
def test_a_callback_may_close_the_job(dataset: Path, tmp_path: Path) -> None:
    job = train_async(dataset, tmp_path / "m", python=interpreter(tmp_path, "weights()"))
    closed = threading.Event()

    def close(_: "concurrent.futures.Future[Path]") -> None:
        job.close()
        closed.set()

    job.result.add_done_callback(close)
    assert closed.wait(20)
    job.close()


HOST = """
import sys, time
from doublure_plugin import train_async
job = train_async({dataset!r}, {model!r}, python={python!r})
sys.stdin.readline()
{then}
"""


@pytest.mark.process
@pytest.mark.parametrize("then", ["", "raise SystemExit(3)", "time.sleep(600)"])
def test_the_end_of_the_host_is_the_end_of_its_training(
    dataset: Path, tmp_path: Path, then: str
) -> None:
    """Falling off the end, leaving early, and being killed: the job is open each time."""
    python = interpreter(tmp_path, FAMILY + HANGS)
    code = HOST.format(dataset=str(dataset), model=str(tmp_path / "m"), python=python, then=then)
    host = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert host.stdin is not None
    noted = tmp_path / "m" / "pids"
    wait_for(lambda: noted.exists() and noted.read_text().count("\n") == 4, "all of them there")
    killed = "sleep" in then
    if killed:
        host.kill()
        _, said = host.communicate()
    else:
        _, said = host.communicate("\n", 20)
    assert host.returncode == (-9 if killed else 3 if then else 0)
    assert said == ""
    everyone = [int(line) for line in noted.read_text().split()]
    wait_for(lambda: not [pid for pid in everyone if alive(pid)], "all of them gone")
