"""Checkpoints: whole or absent, never pickled, and training goes on from them."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from doublure_bridge.models import GridSpec
from doublure_trainer import checkpoint
from doublure_trainer.checkpoint import (
    SCHEMA,
    CheckpointError,
    Checkpoints,
    State,
    read_state,
    write_state,
)
from doublure_trainer.loop import LiveTrainer
from doublure_trainer.slices import SlicePlan

from .streams import PLAN, small, stream


def state(step: int) -> State:
    return State({"a": np.full((64, 64), step, np.float32)}, {"step": step})


def step_of(found: State | None) -> int:
    assert found is not None
    assert (found.tensors["a"] == found.meta["step"]).all()
    return int(found.meta["step"])


def test_last_previous_and_best(tmp_path: Path) -> None:
    files = Checkpoints(tmp_path / "new" / "folder")
    assert files.load() is None
    files.save(state(1), best=state(1))
    files.save(state(2))
    files.save(state(3))
    assert step_of(files.load()) == 3
    assert step_of(read_state(files.previous)) == 2
    assert step_of(read_state(files.best)) == 1
    assert {p.name for p in files.directory.iterdir()} == {
        "last.safetensors",
        "previous.safetensors",
        "best.safetensors",
    }


@pytest.mark.parametrize("where", [0.0, 0.3, 0.99])
def test_one_flipped_bit_is_noticed_and_the_previous_one_is_used(
    tmp_path: Path, where: float
) -> None:
    files = Checkpoints(tmp_path)
    files.save(state(1))
    files.save(state(2))
    data = bytearray(files.last.read_bytes())
    data[int(where * len(data))] ^= 0x10
    files.last.write_bytes(data)
    assert step_of(files.load()) == 1


@pytest.mark.parametrize("length", [0, 7, 500, 10_000])
def test_a_cut_file_is_noticed(tmp_path: Path, length: int) -> None:
    files = Checkpoints(tmp_path)
    files.save(state(1))
    files.save(state(2))
    files.last.write_bytes(files.last.read_bytes()[:length])
    assert step_of(files.load()) == 1


def test_when_all_are_damaged_the_error_names_the_newest(tmp_path: Path) -> None:
    files = Checkpoints(tmp_path)
    files.save(state(1))
    files.save(state(2))
    for path in (files.last, files.previous):
        path.write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"last\.safetensors: expected a whole safetensors"):
        files.load()


def test_another_schema_is_refused_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SCHEMA", SCHEMA + 1)
    write_state(state(1), tmp_path / "last.safetensors")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=f"schema: expected {SCHEMA}, got {SCHEMA + 1}"):
        Checkpoints(tmp_path).load()


def test_a_safetensors_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    import safetensors.numpy

    safetensors.numpy.save_file({"a": np.zeros(3)}, tmp_path / "last.safetensors")
    with pytest.raises(CheckpointError, match="got another safetensors file"):
        Checkpoints(tmp_path).load()


def test_leftovers_are_swept(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint-last").write_bytes(b"half")
    (tmp_path / "mine.txt").write_text("kept")
    Checkpoints(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Checkpoints(tmp_path)
    files.save(state(1))

    def full(_state: State, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_state", full)
    with pytest.raises(OSError, match="No space"):
        files.save(state(2))
    assert step_of(files.load()) == 1
    assert not list(tmp_path.glob(".checkpoint-*"))


def test_numbers_that_json_cannot_hold_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    files = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        files.save(State({}, {"loss": float("nan")}))
    assert not list(tmp_path.iterdir())


WRITER = """
import sys
from pathlib import Path
import numpy as np
from doublure_trainer.checkpoint import Checkpoints, State
files = Checkpoints(Path(sys.argv[1]))
step = int(sys.argv[2])
while True:
    step += 1
    tensors = {"a": np.full((64, 64), step, np.float32), "b": np.full(200_000, step)}
    files.save(State(tensors, {"step": step}), best=State(tensors, {"step": step}))
    print(step, flush=True)
"""


@pytest.mark.process
def test_a_kill_at_any_instant_leaves_a_checkpoint_no_older_than_the_last_save(
    tmp_path: Path,
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    step = 0
    for _ in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(step)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        said = int(writer.stdout.readline())
        time.sleep(rng.uniform(0.0, 0.05))
        writer.send_signal(signal.SIGKILL)
        rest = [int(line) for line in writer.stdout.read().split("\n") if line.strip()]
        writer.stdout.close()
        writer.wait()
        said = max([said, *rest])
        found = Checkpoints(tmp_path).load()
        assert step_of(found) >= said
        assert not list(tmp_path.glob(".checkpoint-*"))
        step = step_of(found)


def live(directory: Path | None, **changes: object) -> LiveTrainer:
    one = LiveTrainer(small(**changes), PLAN, directory=directory, same_rows=True)
    for rows in stream():
        one.add_rows(rows)
    return one


def test_a_trainer_goes_on_exactly_where_it_was(tmp_path: Path) -> None:
    whole = live(tmp_path, growth=(), tries=1)
    whole.train_steps(120)
    candidate = whole.maybe_candidate()
    assert candidate is not None
    whole.published(candidate)
    assert whole.save() == tmp_path / "last.safetensors"

    part = LiveTrainer(small(growth=(), tries=1), PLAN, directory=tmp_path, seed=99, same_rows=True)
    assert part.resume()
    assert not part.ready
    for rows in stream():
        part.add_rows(rows)
    assert part.ready
    assert part.progress().step == whole.progress().step
    assert part.progress().race == whole.progress().race
    # The replay is not kept, so both are given the same one.
    part._replay = whole._replay
    for one in (whole, part):
        one.train_steps(20)
    family = part._leader
    ours, theirs = (one._learners[family].tensors() for one in (whole, part))
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)

    again = part.last_published()
    assert again is not None
    assert (again.step, again.scores) == (candidate.step, candidate.scores)
    assert all((again.tensors[n] == candidate.tensors[n]).all() for n in candidate.tensors)
    np.testing.assert_array_equal(again.points, candidate.points)
    np.testing.assert_array_equal(again.colours, candidate.colours)


@pytest.mark.parametrize("at", [15, 60, 130, 200, 330])
def test_a_trainer_that_is_given_its_rows_again_ends_the_same(tmp_path: Path, at: int) -> None:
    """Through race, growth and its trial; a checkpoint in each, and candidates in between."""

    def run(one: LiveTrainer, steps: range) -> None:
        for step in steps:
            one.train_steps(1)
            if step % 10 == 9 and (candidate := one.maybe_candidate()) is not None:
                one.published(candidate)

    whole = live(tmp_path, race_rungs=(20, 40))
    run(whole, range(at))
    whole.save()
    part = live(tmp_path, race_rungs=(20, 40))
    assert part.resume()
    run(whole, range(at, 420))
    run(part, range(at, 420))
    assert whole._leader == part._leader
    ours, theirs = (one._learners[part._leader].dump()[0] for one in (whole, part))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def test_a_resumed_trainer_does_not_publish_worse_than_what_is_out(tmp_path: Path) -> None:
    whole = live(tmp_path, min_gain_db=10.0)
    whole.train_steps(200)
    candidate = whole.maybe_candidate()
    assert candidate is not None
    whole.published(candidate)
    whole.save()
    part = live(tmp_path, min_gain_db=10.0)
    assert part.resume()
    part.train_steps(1)
    assert part.maybe_candidate() is None
    assert part.progress().verdict == "PSNR gains too little"


def test_the_best_one_is_kept_beside_the_last(tmp_path: Path) -> None:
    one = live(tmp_path)
    one.train_steps(100)
    assert one.maybe_candidate() is not None
    one.save()
    best = read_state(tmp_path / "best.safetensors")
    one.train_steps(20)
    one.save()
    assert read_state(tmp_path / "best.safetensors").meta["step"] == best.meta["step"]
    assert read_state(tmp_path / "last.safetensors").meta["step"] == 120


def test_without_a_directory_nothing_is_saved() -> None:
    one = live(None)
    assert one.save() is None
    assert not one.resume()


def test_an_empty_directory_is_no_checkpoint(tmp_path: Path) -> None:
    assert not live(tmp_path).resume()


@pytest.mark.parametrize(
    ("plan", "changes", "text"),
    [
        (SlicePlan(64), {}, "32 slices, not 64"),
        (PLAN, {"family": "compact"}, "models"),
        (
            PLAN,
            {"grid": GridSpec(xy=(8, 8), xt=(8, 8), yt=(8, 8), volume=(8, 8, 8))},
            "models of other sizes",
        ),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    tmp_path: Path, plan: SlicePlan, changes: dict[str, object], text: str
) -> None:
    live(tmp_path).save()
    other = LiveTrainer(small(**changes), plan, directory=tmp_path)
    with pytest.raises(CheckpointError, match=text):
        other.resume()


def test_no_module_of_the_trainer_core_pickles() -> None:
    folder = Path(checkpoint.__file__).parent
    for path in folder.rglob("*.py"):
        text = path.read_text()
        for word in ("import pickle", "torch.save(", "torch.load(", "allow_pickle=True"):
            assert word not in text, f"{path.name}: {word}"
