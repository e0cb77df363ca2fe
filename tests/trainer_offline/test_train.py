"""Offline training: from a dataset to weights, however often it is interrupted."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doublure_bridge.errors import BridgeError
from doublure_bridge.model_file import read_model
from doublure_bridge.scores import score
from doublure_trainer.checkpoint import read_state
from doublure_trainer.loop import LiveTrainer
from doublure_trainer.models.reference import evaluate
from doublure_trainer.offline import OfflineError, OfflineProgress, StoppedError, train_offline
from doublure_trainer.slices import TRAIN

from .conftest import STEPS
from .data import small, source, write_dataset

WEIGHTS = ("weights.safetensors", "weights.json")


def same_weights(first: Path, second: Path) -> bool:
    return all((first / n).read_bytes() == (second / n).read_bytes() for n in WEIGHTS)


def rows_of(dataset: Path, split: str) -> np.ndarray:
    return np.fromfile(dataset / f"{split}.f32", "<f4").reshape(-1, 6)


def frames_of(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[rows[:, 2] == t] for t in np.unique(rows[:, 2])]


def test_a_dataset_becomes_a_model_that_says_what_it_is(dataset: Path, trained: Path) -> None:
    model = read_model(trained)
    assert (model.name, model.steps, model.seed) == ("spot", STEPS, 0)
    assert (model.parameter, model.resolution) == ((2.0, 6.0), (64, 48))
    assert model.source_digest == "ab" * 32
    assert set(model.versions) == {"doublure", "numpy", "python", "torch"}
    assert model.probes is not None
    points, colours = model.probes
    assert len(points) >= 32
    np.testing.assert_array_equal(colours, evaluate(model.spec, model.tensors, points))
    seen = rows_of(dataset, "validation")
    mine = evaluate(model.spec, model.tensors, seen[:, :3])
    assert score(mine, source(*seen[:, :3].T)).psnr_db > 30.0


def test_the_scores_are_those_of_exactly_these_weights(dataset: Path, trained: Path) -> None:
    model = read_model(trained)
    validation = frames_of(rows_of(dataset, "validation"))
    groups = {
        "test": [f for i, f in enumerate(validation) if i % 3 == 1],
        "held_out": [f for i, f in enumerate(validation) if i % 3 != 1],
    }
    for name, frames in groups.items():
        rows = np.concatenate(frames)
        slices = np.repeat(np.arange(len(frames)), [len(f) for f in frames])
        drawn = evaluate(model.spec, model.tensors, rows[:, :3])
        again = score(drawn, rows[:, 3:], slices=slices)
        figures = model.scores[name]
        assert figures is not None
        assert figures["rows"] == len(rows)
        assert figures["psnr_db"] == pytest.approx(again.psnr_db, abs=0.01)
        assert figures["peak_ratio"] == pytest.approx(again.peak_ratio, rel=1e-3)


def test_the_best_that_passed_is_what_is_written(trained: Path) -> None:
    report = json.loads((trained / "report.json").read_text())
    passed = [e for e in report["history"] if e["verdict"] == "passed"]
    best = max(passed, key=lambda e: e["merit"])
    assert best["kept"]
    assert report["best_step"] == best["step"]
    assert report["scores"]["held_out"]["psnr_db"] == pytest.approx(best["psnr_db"], abs=1e-3)
    assert [e["step"] for e in report["history"]] == list(range(10, STEPS + 1, 10))


def test_exactly_so_many_steps_are_done(trained: Path) -> None:
    meta = read_state(trained / "checkpoints" / "last.safetensors").meta
    assert meta["step"] == STEPS
    progress = json.loads((trained / "progress.json").read_text())
    assert {"step", "steps", "loss", "held_out_psnr_db", "eta_s", "state"} <= progress.keys()
    assert (progress["step"], progress["steps"], progress["state"]) == (STEPS, STEPS, "done")
    log = (trained / "training.log").read_text()
    assert "training on 3200 rows of 16 frames for 240 steps on cpu, seed 0" in log
    assert "report.html" in log


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(
    dataset: Path, trained: Path, tmp_path: Path
) -> None:
    train_offline(dataset, tmp_path / "same", steps=STEPS, config=small())
    train_offline(dataset, tmp_path / "other", steps=STEPS, config=small(), seed=1)
    assert same_weights(trained, tmp_path / "same")
    assert not same_weights(trained, tmp_path / "other")


def test_all_training_rows_train_and_no_validation_row_does(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    drawn: list[np.ndarray] = []
    close = LiveTrainer.close

    def closing(one: LiveTrainer) -> None:
        rng = np.random.default_rng(0)
        kept.append((one._replay.counters, one._replay.snapshot(TRAIN, 1 << 20, rng)))
        drawn.append(one._replay.sample(20_000, rng))
        close(one)

    monkeypatch.setattr(LiveTrainer, "close", closing)
    train_offline(dataset, tmp_path / "m", steps=40, config=small())
    counters, rows = kept[0]
    assert (counters.train, counters.held_out, counters.test) == (3200, 1000, 400)
    train = rows_of(dataset, "train")
    order, mine = (np.lexsort(r[:, :3].T) for r in (train, rows))
    np.testing.assert_array_equal(train[order][:, :3], rows[mine][:, :3])
    assert set(drawn[0][:, 2]) == set(train[:, 2])


def test_test_frames_have_no_say(trained: Path, tmp_path: Path) -> None:
    """Other colours in every test frame: other figures, the same weights."""
    other = write_dataset(tmp_path / "spot")
    rows = rows_of(other, "validation")
    for i, t in enumerate(np.unique(rows[:, 2])):
        if i % 3 == 1:
            rows[rows[:, 2] == t, 3:] = 0.5
    _replace_rows(other, "validation", rows)
    train_offline(other, tmp_path / "m", steps=STEPS, config=small())
    ours, theirs = read_model(tmp_path / "m"), read_model(trained)
    for name in theirs.tensors:
        assert ours.tensors[name].tobytes() == theirs.tensors[name].tobytes()
    assert ours.scores["held_out"] == theirs.scores["held_out"]
    assert ours.scores["test"] != theirs.scores["test"]


@pytest.mark.parametrize("seed", range(3))
def test_stopped_and_resumed_it_ends_the_same(
    dataset: Path, trained: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    stops = sorted(rng.sample(range(STEPS - 40), 4))
    print("stops at or after", stops)
    out = tmp_path / "m"
    for stop in stops:
        seen: list[OfflineProgress] = []
        with pytest.raises(StoppedError, match=f"of {STEPS}; go on with --resume"):
            train_offline(
                dataset,
                out,
                steps=STEPS,
                resume=True,
                config=small(),
                on_progress=seen.append,
                should_stop=lambda stop=stop, seen=seen: bool(seen) and seen[-1].step >= stop,
            )
        assert seen[-1].state == "stopped"
        assert json.loads((out / "progress.json").read_text())["state"] == "stopped"
    lines: list[str] = []
    train_offline(dataset, out, steps=STEPS, resume=True, config=small(), on_line=lines.append)
    assert lines[0].startswith("resumed at step ")
    assert same_weights(trained, out)
    ours, theirs = (json.loads((d / "report.json").read_text()) for d in (out, trained))
    assert ours["history"] == theirs["history"]


def test_resuming_a_finished_one_writes_the_same_again(
    dataset: Path, trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "m"
    train_offline(dataset, out, steps=STEPS, config=small())
    for name in WEIGHTS:
        (out / name).unlink()
    train_offline(dataset, out, steps=STEPS, resume=True, config=small())
    assert same_weights(trained, out)


def test_two_validation_frames_make_one_of_each_kind(tmp_path: Path) -> None:
    few = write_dataset(tmp_path / "few", train=10, validation=2, pixels=90, size=(9, 400))
    train_offline(few, tmp_path / "m", steps=120, config=small(family="grid"))
    report = json.loads((tmp_path / "m" / "report.json").read_text())
    unseen = [f["split"] for f in report["frames"] if f["split"] != "train"]
    assert unseen == ["held_out", "test"]
    assert report["scores"]["test"]["rows"] == 90


# --- what is refused -----------------------------------------------------------------------------


def test_a_directory_with_something_in_it_is_refused(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.json").write_text("{}")
    for resume in (False, True):
        with pytest.raises(OfflineError, match="Use a new model directory so a failed job cannot"):
            train_offline(dataset, tmp_path, steps=10, resume=resume, config=small())
    assert [p.name for p in tmp_path.iterdir()] == ["weights.json"]


def test_what_a_parent_has_begun_counts_as_empty(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "training.log").write_text("started\n")
    (tmp_path / "progress.json").write_text("{}")
    train_offline(dataset, tmp_path, steps=40, config=small())
    assert (tmp_path / "training.log").read_text().startswith("started\n")


def test_a_finished_model_is_not_replaced(dataset: Path, trained: Path) -> None:
    before = (trained / "weights.safetensors").read_bytes()
    with pytest.raises(OfflineError, match="working weights, or go on with --resume"):
        train_offline(dataset, trained, steps=STEPS, config=small())
    assert (trained / "weights.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"steps": STEPS + 1}, f"steps: expected {STEPS}, got {STEPS + 1}"),
        ({"seed": 3}, "seed: expected 0, got 3"),
        ({"config": small(batch=128)}, "config.batch: expected 256, got 128"),
    ],
)
def test_other_settings_do_not_resume(
    dataset: Path, trained: Path, changes: dict[str, Any], text: str
) -> None:
    settings = {"steps": STEPS, "config": small(), **changes}
    with pytest.raises(OfflineError, match=text):
        train_offline(dataset, trained, resume=True, **settings)


def test_another_dataset_does_not_resume(trained: Path, tmp_path: Path) -> None:
    other = write_dataset(tmp_path / "spot", seed=6)
    with pytest.raises(OfflineError, match="dataset: expected"):
        train_offline(other, trained, steps=STEPS, resume=True, config=small())


def test_two_jobs_do_not_share_a_directory(dataset: Path, tmp_path: Path) -> None:
    def again(_: OfflineProgress) -> None:
        train_offline(dataset, tmp_path, steps=20, resume=True, config=small())

    with pytest.raises(OfflineError, match="one whose job still runs"):
        train_offline(dataset, tmp_path, steps=20, config=small(), on_progress=again)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"steps": 0}, "steps: expected a whole number in 1..200000, got 0"),
        ({"steps": 200_001}, "steps: expected a whole number"),
        ({"seed": -1}, "seed: expected a whole number"),
        ({"device": "tpu"}, "device: expected auto, cpu or cuda, got 'tpu'"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_made(
    dataset: Path, tmp_path: Path, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(OfflineError, match=text):
        train_offline(dataset, tmp_path / "m", config=small(), **settings)
    assert not (tmp_path / "m").exists()


def _replace_rows(dataset: Path, split: str, rows: np.ndarray) -> None:
    data = rows.astype("<f4").tobytes()
    (dataset / f"{split}.f32").write_bytes(data)
    manifest = json.loads((dataset / "dataset.json").read_text())
    manifest["splits"][split]["sha256"] = hashlib.sha256(data).hexdigest()
    (dataset / "dataset.json").write_text(json.dumps(manifest))


def test_a_damaged_or_missing_dataset_makes_no_directory(tmp_path: Path) -> None:
    bad = write_dataset(tmp_path / "bad")
    data = bytearray((bad / "train.f32").read_bytes())
    data[100] ^= 1
    (bad / "train.f32").write_bytes(data)
    for path, text in ((bad, "sha256"), (tmp_path / "none", "none")):
        with pytest.raises(BridgeError, match=text):
            train_offline(path, tmp_path / "m", steps=10, config=small())
    assert not (tmp_path / "m").exists()


def test_rows_out_of_order_are_refused(tmp_path: Path) -> None:
    bad = write_dataset(tmp_path / "bad")
    rows = rows_of(bad, "train")
    _replace_rows(bad, "train", np.random.default_rng(0).permutation(rows))
    with pytest.raises(BridgeError, match="train"):
        train_offline(bad, tmp_path / "m", steps=10, config=small())


def test_weights_no_better_than_a_flat_colour_are_not_written(
    dataset: Path, tmp_path: Path
) -> None:
    with pytest.raises(OfflineError, match=r"no better than one flat colour.*more steps"):
        train_offline(dataset, tmp_path / "m", steps=1, config=small())
    assert not (tmp_path / "m" / "weights.json").exists()
    assert json.loads((tmp_path / "m" / "progress.json").read_text())["state"] == "failed"


def test_a_full_disk_leaves_the_checkpoint_before(
    dataset: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "m"
    fsync = os.fsync
    count = 0

    def filling(fd: int) -> None:
        nonlocal count
        count += 1
        if count > 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr("doublure_trainer.checkpoint.os.fsync", filling)
        with pytest.raises(OfflineError, match=r"No space left.*free some space and go on with"):
            train_offline(dataset, out, steps=STEPS, config=small(), checkpoint_s=0.0)
    step = read_state(out / "checkpoints" / "last.safetensors").meta["step"]
    assert 0 < step < STEPS
    train_offline(dataset, out, steps=STEPS, resume=True, config=small())
    assert same_weights(trained, out)
