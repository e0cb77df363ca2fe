"""Offline from end to end: a scene captured, the real trainer as a child, weights that fit."""

import time
from pathlib import Path

import pytest
from doublure_bridge import open_dataset, read_model
from doublure_plugin import Evaluator, TrainingError, capture_dataset, train_async
from doublure_plugin.offline.scene_hosts import open_scene

STEPS = 200
OPTIONS = ("--threads", "1", "--family", "grid")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("offline") / "plasma"
    with open_scene("plasma", name="numpy", size=(64, 48)) as host:
        capture_dataset(
            host, directory, parameter=(0.0, 1.0), training_frames=8,
            validation_frames=4, pixels_per_frame=256,
        )  # fmt: skip
    return directory


@pytest.mark.process
def test_a_captured_scene_becomes_weights(dataset: Path, tmp_path: Path) -> None:
    states = set()
    with train_async(dataset, tmp_path / "m", STEPS, options=OPTIONS) as job:
        while not job.result.done():
            states.add(job.poll().state)
            time.sleep(0.01)
        assert job.result.result() == tmp_path / "m"
        now = job.poll()
    assert "starting" in states
    assert (now.state, now.step, now.steps) == ("done", STEPS, STEPS)
    assert now.held_out_psnr_db is not None
    assert f"for {STEPS} steps" in job.log.read_text()
    data, model = open_dataset(dataset), read_model(tmp_path / "m")
    assert model.source_digest == data.manifest.source_digest
    assert model.resolution == data.manifest.resolution == (64, 48)
    colours = Evaluator(model.spec, model.tensors)(data.validation[:, :3])
    error = ((colours - data.validation[:, 3:]) ** 2).mean()
    assert error < 0.5 * data.validation[:, 3:].var()


@pytest.mark.process
def test_what_the_trainer_refuses_is_in_the_error(dataset: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in dataset.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    rows = bytearray((damaged / "train.f32").read_bytes())
    rows[40] ^= 1
    (damaged / "train.f32").write_bytes(rows)
    with train_async(damaged, tmp_path / "m", STEPS) as job:
        error = job.result.exception(60)
        assert isinstance(error, TrainingError)
        assert error.exit_status == 1
        assert "train.f32: expected sha256 " in str(error)
        assert not (tmp_path / "m" / "weights.json").exists()
