"""`doublure fit` as it is typed."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from doublure_kernels.errors import ImageError, ResumeError, SettingError
from doublure_kernels.fit import load_scene
from doublure_kernels.fit_command import fit
from PIL import Image
from typer.testing import CliRunner

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(fit)

QUICK = ["--triangles", "5", "--iters", "20", "--size", "16", "--no-plot"]


def look(path: str | Path) -> Image.Image:
    """A picture whose file is closed again."""
    with Image.open(path) as image:
        return image.copy()


@pytest.fixture
def photo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    Image.fromarray(noise).save("photo.png")
    return Path("photo.png")


def run(*words: str, status: int = 0) -> str:
    """The command's output, blanks folded and colours taken out."""
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "TERM": "dumb"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.output).split())


def test_from_a_photo_to_its_files(photo: Path) -> None:
    said = run(str(photo), *QUICK)
    assert "completed after 20 iterations" in said
    assert "results are in photo-fit" in said
    out = Path("photo-fit")
    names = {path.name for path in out.iterdir()}
    assert names >= {
        "target.png", "fit.png", "export.png", "scene.json", "scene.svg", "loss.csv",
        "animation.gif", "report.json", "frames",
    }  # fmt: skip
    assert load_scene(out / "scene.json").triangles.shape == (5, 10)
    assert look(out / "export.png").size == (30, 20)


def test_every_option_reaches_the_fit(photo: Path) -> None:
    run(
        str(photo), "--out", "o", "--triangles", "4", "--iters", "6", "--size", "12",
        "--export-size", "33", "--seed", "9", "--start", "random", "--sigma-start", "0.05",
        "--sigma-end", "0.04", "--position-rate", "0.003", "--colour-rate", "0.01",
        "--alpha-rate", "0.02", "--beta1", "0.8", "--beta2", "0.98", "--epsilon", "1e-7",
        "--patience", "5", "--divergence", "9", "--background", "grey", "--matte", "black",
        "--kernel", "compact", "--support", "bbox6", "--coarse", "0", "--frames-every", "2",
        "--animation", "apng", "--fps", "5", "--no-plot", "--no-svg", "--device", "cpu",
        "--threads", "1", "--checkpoint-every", "1", "--quiet",
    )  # fmt: skip
    report = json.loads(Path("o/report.json").read_text())
    assert report["settings"] == {
        "triangles": 4, "iterations": 6, "size": 12, "seed": 9, "start": "random",
        "sigma_start": 0.05, "sigma_end": 0.04, "position_rate": 0.003, "colour_rate": 0.01,
        "alpha_rate": 0.02, "beta1": 0.8, "beta2": 0.98, "epsilon": 1e-7, "patience": 5,
        "divergence": 9.0, "background": "grey", "kernel": "compact", "support": "bbox6",
        "coarse": 0.0,
    }  # fmt: skip
    assert report["outputs"] == {
        "export_size": 33, "frames_every": 2, "animation": "apng", "fps": 5.0, "plot": False,
        "svg": False,
    }  # fmt: skip
    assert report["export_size"] == [33, 22]


def test_what_the_command_does_by_itself_is_what_the_classes_do_by_themselves(photo: Path) -> None:
    from doublure_kernels.fit import FitSettings, Outputs

    run(str(photo), "--iters", "1", "-q")
    report = json.loads(Path("photo-fit/report.json").read_text())
    assert FitSettings.from_dict(report["settings"]) == FitSettings(iterations=1)
    assert Outputs(**report["outputs"]) == Outputs()


def test_quiet_says_nothing(photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from doublure_kernels import cpu

    log = logging.getLogger("doublure_kernels.cpu")
    told = []
    monkeypatch.setattr(cpu, "prepare", lambda: told.append(log.isEnabledFor(logging.WARNING)))
    assert run(str(photo), *QUICK, "--quiet") == ""
    assert run(str(photo), "--out", "other", *QUICK) != ""
    assert told == [False, True]


def test_wrong_words(photo: Path) -> None:
    assert "--triangles" in run(str(photo), "--triangels", "3", status=2)
    assert "expected a picture file" in run(status=2)
    assert "expected the earlier fit's directory" in run("--resume", status=2)
    with pytest.raises(SettingError, match="start: expected one of detail, random"):
        run(str(photo), "--start", "detials")
    with pytest.raises(SettingError, match="animation: expected gif, apng or none"):
        run(str(photo), "--animation", "webm")
    with pytest.raises(ImageError, match="got no file of that name"):
        run("other.png")
    assert not Path("photo-fit").exists()


def test_resume_takes_the_settings_along_and_refuses_others(photo: Path) -> None:
    run(str(photo), *QUICK)
    before = Path("photo-fit/scene.json").read_bytes()
    with pytest.raises(SettingError, match="go on with it by --resume"):
        run(str(photo), *QUICK)
    said = run("--resume", "--out", "photo-fit", "--export-size", "60")
    assert "completed after 20 iterations" in said
    assert look("photo-fit/export.png").size == (60, 40)
    assert Path("photo-fit/scene.json").read_bytes() == before
    run(str(photo), "--resume", "--iters", "20")
    with pytest.raises(ResumeError, match="iterations: expected 20, got 30"):
        run(str(photo), "--resume", "--iters", "30")
    with pytest.raises(ResumeError, match="expected the directory of an earlier fit, got none"):
        run("--resume", "--out", "nowhere")


def test_divergence_is_told_and_is_a_failure(photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from doublure_kernels.cpu import CpuBackend

    real = CpuBackend.fused_mse
    calls = []

    def poisoned(self, scene, raster, targets):
        losses, gradients = real(self, scene, raster, targets)
        calls.append(1)
        return (losses * np.inf if len(calls) > 5 else losses), gradients

    monkeypatch.setattr(CpuBackend, "fused_mse", poisoned)
    said = run(str(photo), *QUICK, status=1)
    assert "diverged after 6 iterations" in said
    assert "Try lower rates: --position-rate" in said
    assert load_scene("photo-fit/scene.json").triangles.shape == (5, 10)


MAIN = "import typer; from doublure_kernels.fit_command import fit; typer.run(fit)"


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_a_signal_writes_what_there_is(number: int, status: int, photo: Path) -> None:
    words = [
        str(photo), "--iters", "1000000", "--patience", "0", "--triangles", "4", "--size", "16",
        "--frames-every", "0", "--no-plot",
    ]  # fmt: skip
    child = subprocess.Popen(
        [sys.executable, "-c", MAIN, *words], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child.stdout:
        try:
            line = child.stdout.readline()  # the first comes after two seconds of fitting
            assert line.startswith("iteration ")
            os.kill(child.pid, number)
            rest = child.stdout.read()
            assert child.wait(30) == status
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    assert "interrupted after" in rest
    assert "go on with: doublure fit --resume --out photo-fit" in rest
    report = json.loads(Path("photo-fit/report.json").read_text())
    assert report["stopped"] == "interrupted"
    assert report["iterations"] > 10
    assert load_scene("photo-fit/scene.json").triangles.shape == (4, 10)
    assert look("photo-fit/fit.png").size == (16, 11)


def test_importing_the_command_is_light() -> None:
    code = (
        "import sys; import doublure_kernels.fit_command\n"
        "print([m for m in ('torch', 'numba', 'matplotlib', 'PIL') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
