"""A fit in its directory: what is written, going on, refusing to mix, and being killed."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from doublure_kernels.errors import ImageError, ResumeError, SettingError
from doublure_kernels.fit import Fit, FitSettings, Outputs, fit_into, load_scene
from doublure_kernels.fit.pictures import to_bytes
from doublure_kernels.fit.runs import CHECKPOINT, stored_fit
from PIL import Image

SETTINGS = FitSettings(triangles=6, iterations=30, size=24, seed=2)
OUTPUTS = Outputs(export_size=60, frames_every=10, plot=False)


def look(path: str | Path) -> Image.Image:
    """A picture whose file is closed again."""
    with Image.open(path) as image:
        return image.copy()


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    y, x = np.mgrid[0:36, 0:48]
    pixels = np.stack([x * 5, y * 7, 120 + 0 * x], axis=2).astype(np.uint8)
    pixels[8:20, 10:30] = (250, 240, 30)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def contents(directory: Path) -> dict[str, bytes]:
    """All files but the one that tells the time."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in ("report.json", ".lock")
    }


def test_everything_is_written_and_can_be_read(photo: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    seen = []
    result = fit_into(
        out, photo, SETTINGS, outputs=Outputs(export_size=60, frames_every=10),
        on_progress=seen.append,
    )  # fmt: skip
    assert result.stopped == "completed"
    assert result.iterations == 30
    sizes = {name: look(out / f"{name}.png").size for name in ("target", "fit", "export", "loss")}
    assert sizes["target"] == sizes["fit"] == (24, 18)
    assert sizes["export"] == (60, 45)
    frames = sorted(path.name for path in (out / "frames").iterdir())
    assert frames == ["0000000.png", "0000010.png", "0000020.png", "0000030.png"]
    with Image.open(out / "animation.gif") as animation:
        assert animation.n_frames == 4
        assert animation.size == (24, 18)
    assert seen[-1].iteration == 30
    assert seen[-1].best_loss == pytest.approx(result.best_loss, rel=1e-4)
    assert "iteration 30/30" in seen[-1].line

    scene = load_scene(out / "scene.json")
    with Fit(np.zeros((18, 24, 3)), SETTINGS) as fit:
        drawn = to_bytes(fit.render(scene=scene))
    np.testing.assert_array_equal(drawn, np.asarray(look(out / "fit.png")))
    np.testing.assert_array_equal(drawn, np.asarray(look(out / "frames" / "0000030.png")))

    with (out / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["loss"]) for row in rows]
    assert [int(row["iteration"]) for row in rows] == list(range(30))
    assert rows[-1]["size"] == "24"
    assert float(rows[-1]["best_loss"]) == pytest.approx(min(losses))
    assert float(rows[3]["psnr_db"]) == pytest.approx(-10 * np.log10(losses[3]), abs=1e-4)

    report = json.loads((out / "report.json").read_text())
    assert report["stopped"] == "completed"
    assert report["loss"] == pytest.approx(result.best_loss)
    assert report["fit_size"] == [24, 18]
    assert FitSettings.from_dict(report["settings"]) == SETTINGS
    assert not list(out.rglob("*.tmp"))


def test_the_same_fit_is_the_same_files(photo: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        fit_into(tmp_path / name, photo, SETTINGS, outputs=OUTPUTS)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_interrupted_and_resumed_it_is_the_same_files(
    after: int, photo: Path, tmp_path: Path
) -> None:
    fit_into(tmp_path / "whole", photo, SETTINGS, outputs=OUTPUTS)
    asked = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > after

    out = tmp_path / "parts"
    result = fit_into(out, photo, SETTINGS, outputs=OUTPUTS, should_stop=stop)
    assert result.stopped == "interrupted"
    assert result.iterations < 30
    assert (out / "fit.png").exists()
    assert load_scene(out / "scene.json").triangles.shape == (6, 10)
    assert json.loads((out / "report.json").read_text())["stopped"] == "interrupted"
    result = fit_into(out, resume=True)
    assert result.stopped == "completed"
    assert contents(out) == contents(tmp_path / "whole")


def test_a_finished_fit_is_drawn_again_at_another_size(photo: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fit_into(out, photo, SETTINGS, outputs=OUTPUTS)
    before = contents(out)
    larger = Outputs(export_size=100, frames_every=10, plot=False, animation="apng")
    result = fit_into(out, photo, resume=True, outputs=larger)
    assert result.iterations == 30
    assert look(out / "export.png").size == (100, 75)
    with Image.open(out / "animation.png") as animation:
        assert animation.n_frames == 4
        assert animation.format == "PNG"
    after = contents(out)
    same = ("scene.json", "fit.png", "loss.csv", "target.png", "frames/0000010.png")
    assert all(before[name] == after[name] for name in same)


def test_outputs_can_be_left_out(photo: Path, tmp_path: Path) -> None:
    few = Outputs(frames_every=0, animation="none", plot=False, svg=False)
    fit_into(tmp_path / "out", photo, SETTINGS, outputs=few)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        ".lock", "checkpoint.npz", "export.png", "fit.png", "loss.csv", "report.json",
        "scene.json", "target.png",
    }  # fmt: skip
    assert look(tmp_path / "out" / "export.png").size == (48, 36)


def test_two_fits_never_mix(photo: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fit_into(out, photo, SETTINGS, outputs=OUTPUTS)
    before = contents(out)
    with pytest.raises(SettingError, match=r"got one with a fit in it; go on with it by --resume"):
        fit_into(out, photo, SETTINGS)
    other = FitSettings(triangles=6, iterations=31, size=24, seed=3)
    with pytest.raises(ResumeError) as caught:
        fit_into(out, photo, other, resume=True)
    assert "iterations: expected 30, got 31; seed: expected 2, got 3" in str(caught.value)
    Image.new("RGB", (48, 36), "red").save(tmp_path / "red.png")
    with pytest.raises(ResumeError, match=r"red.png: expected the picture that the fit in"):
        fit_into(out, tmp_path / "red.png", resume=True)
    with pytest.raises(ResumeError, match=r"frames_every: expected 10 as when the fit was begun"):
        fit_into(out, resume=True, outputs=Outputs(frames_every=7))
    assert contents(out) == before


def test_a_directory_of_something_else_is_left_alone(photo: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years")
    with pytest.raises(SettingError, match=r"got one with thesis.txt in it; choose another"):
        fit_into(out, photo, SETTINGS)
    with pytest.raises(ResumeError, match="got no such file; start without --resume"):
        fit_into(out, resume=True)
    assert (out / "thesis.txt").read_text() == "years"
    with pytest.raises(SettingError, match="expected a directory, got a file"):
        fit_into(photo, photo, SETTINGS)
    with pytest.raises(ResumeError, match="expected the directory of an earlier fit, got none"):
        fit_into(tmp_path / "none", resume=True)


def test_a_refusal_leaves_no_directory_behind(photo: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_text("no picture")
    with pytest.raises(ImageError, match=r"bad\.png"):
        fit_into(tmp_path / "out", tmp_path / "bad.png", SETTINGS)
    with pytest.raises(SettingError, match="threads"):
        fit_into(tmp_path / "out", photo, SETTINGS, threads=0)
    with pytest.raises(SettingError, match="photo: expected a picture file"):
        fit_into(tmp_path / "out")
    with pytest.raises(SettingError, match="checkpoint_s: expected 0 or more"):
        fit_into(tmp_path / "out", photo, checkpoint_s=-1)
    assert not (tmp_path / "out").exists()


def test_a_second_process_is_kept_out(photo: Path, tmp_path: Path) -> None:
    out, refused = tmp_path / "out", []

    def meanwhile(_: object) -> None:
        if not refused:
            with pytest.raises(ResumeError, match="another fit is at work in"):
                fit_into(out, resume=True)
            refused.append(True)

    fit_into(out, photo, SETTINGS, outputs=OUTPUTS, on_progress=meanwhile)
    assert refused


def test_what_diverged_keeps_its_best_and_stays_over(
    photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from doublure_kernels.cpu import CpuBackend

    real, calls = CpuBackend.fused_mse, []

    def poisoned(self, scene, raster, targets):
        losses, gradients = real(self, scene, raster, targets)
        calls.append(1)
        return (losses * np.nan if len(calls) == 21 else losses), gradients

    monkeypatch.setattr(CpuBackend, "fused_mse", poisoned)
    out = tmp_path / "out"
    result = fit_into(out, photo, SETTINGS, outputs=Outputs(frames_every=10))
    assert result.stopped == "diverged"
    assert result.iterations == 21
    assert np.isfinite(result.best_loss)
    assert 0 < result.best_iteration < 20
    assert "nan" in (out / "loss.csv").read_text().splitlines()[-1]
    assert np.isfinite(load_scene(out / "scene.json").triangles).all()
    again = fit_into(out, resume=True)
    assert (again.stopped, again.iterations) == ("diverged", 21)


def test_transparency_goes_over_the_matte_or_the_background(tmp_path: Path) -> None:
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    few = Outputs(frames_every=0, plot=False)
    cases = [({}, None, 255), ({"background": "black"}, None, 0), ({}, "#808080", 128)]
    for i, (extra, matte, value) in enumerate(cases):
        settings = FitSettings(triangles=1, iterations=2, **extra)
        fit_into(tmp_path / f"{i}", tmp_path / "clear.png", settings, outputs=few, matte=matte)
        assert look(tmp_path / f"{i}" / "target.png").getpixel((3, 3)) == (value,) * 3


CHILD = """
import sys
from doublure_kernels.fit import FitSettings, Outputs, fit_into
settings = FitSettings(triangles=6, iterations=100_000, size=24, patience=0)
fit_into(sys.argv[1], sys.argv[2], settings, outputs=Outputs(frames_every=0, plot=False),
         checkpoint_s=0.0)
"""


@pytest.mark.process
def test_killed_at_any_moment_the_checkpoint_can_be_read(photo: Path, tmp_path: Path) -> None:
    """With a checkpoint after every few iterations, the kill mostly falls into a write."""
    out = tmp_path / "out"
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(out), str(photo)])
        try:
            deadline = time.monotonic() + 60
            while not (out / CHECKPOINT).exists() or not stored_fit(out).state.losses:
                assert time.monotonic() < deadline
                assert child.poll() is None
                time.sleep(0.02)
            time.sleep(0.1)
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
        stored = stored_fit(out)
        assert 0 < len(stored.state.losses) < 100_000
        asked = []

        def stop(asked: list = asked) -> bool:
            asked.append(1)
            return len(asked) > 2

        result = fit_into(out, resume=True, should_stop=stop)
        assert result.stopped == "interrupted"
        assert result.iterations > len(stored.state.losses)
        assert not list(out.glob(".*.tmp"))
        for path in out.iterdir():
            if path.is_file():
                path.unlink()
