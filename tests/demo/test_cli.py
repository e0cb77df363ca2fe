"""`doublure demo` as a user runs it: a real trainer, a real host, and what they leave behind."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doublure_bridge import read_model
from doublure_plugin.demo.cli import _results
from rich.console import Console

INTERFACE = {
    "scene", "host", "device", "seconds", "first_learned_pixels_s", "held_out_psnr_db",
    "held_out_relmse", "reloads", "frames", "dropped", "capture_us_median", "capture_us_p99",
    "source_frame_ms", "standin_frame_ms", "stop_ms",
}  # fmt: skip
"""Keys of a run that other programs read."""


def doublure(*arguments: str, timeout: float = 90, **environment: str):
    """Run the command without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "doublure_bridge", *arguments],
        capture_output=True, text=True, timeout=timeout, env=os.environ | environment,
    )  # fmt: skip


def test_the_command_lists_what_each_package_brings() -> None:
    result = doublure("--help")
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("demo", "doctor", "trainer"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("demo", "--scene", "plasam"), "expected one of plasma, fbm, sdf, edges, sun or all"),
        (("demo", "--host", "unreal"), "expected one of auto, wgpu, numpy"),
        (("demo", "--out", "/proc/nowhere"), "expected a directory that can be written"),
        (("demo", "--trainer", "tcp://gpu:5570"), "expected a loopback address"),
        (("demo", "--model", "gird"), "expected one of auto, grid, compact"),
    ],
)
def test_wrong_words_give_one_line_and_no_traceback(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "doublure_bridge", *arguments],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env=os.environ | {"COLUMNS": "300", "TERM": "dumb"},
    )  # fmt: skip
    assert result.returncode != 0
    assert said in " ".join((result.stdout + result.stderr).split())
    assert "Traceback" not in result.stdout + result.stderr
    assert "Traceback" in doublure(*arguments, "--debug").stderr or arguments[1] != "--trainer"


def test_a_missing_package_is_the_answer_whatever_the_options(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['PIL'] = None; sys.argv = ['doublure', 'demo', '--seconds', '3'];"
        "from doublure_bridge.__main__ import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert result.returncode == 1
    assert "run `pip install 'doublure[demo]'`" in result.stderr


def test_the_table_of_all_scenes_is_whole_at_eighty_columns() -> None:
    run = dict.fromkeys(INTERFACE, 1234.5678) | {
        "scene": "plasma", "held_out_psnr_db": 38.3456, "held_out_relmse": 0.00123456,
        "capture_us_median": None, "reloads": 123,
    }  # fmt: skip
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(_results([run]))
    said = console.file.getvalue()
    assert "\u2026" not in said
    assert all(text in said for text in ("stand-in ms", "capture µs", "0.00123", "38.3", "plasma"))


def test_ctrl_c_while_packages_are_imported_is_no_traceback() -> None:
    code = (
        "import signal, sys, os; sys.argv = ['doublure', 'demo'];"
        "from doublure_bridge import __main__ as command;"
        "command.entry_points = lambda **_: signal.raise_signal(signal.SIGINT);"
        "command.main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 130
    assert result.stderr == ""


@pytest.mark.process
def test_a_trainer_that_cannot_start_ends_the_run_with_one_message(tmp_path: Path) -> None:
    result = doublure(
        "demo", "--seconds", "2", "--size", "64", "--host", "numpy", "--out", str(tmp_path),
        DOUBLURE_PYTHON=str(tmp_path / "python"),
    )  # fmt: skip
    assert result.returncode == 1
    said = result.stdout + result.stderr
    assert said.count(f"got no program at {tmp_path / 'python'}") == 1
    assert "Traceback" not in said


@pytest.mark.process
def test_a_run_without_any_adapter_learns_in_numpy_and_says_so(tmp_path: Path) -> None:
    result = doublure(
        "demo", "--scene", "plasma", "--seconds", "2", "--size", "96", "--out", str(tmp_path),
        VK_DRIVER_FILES="/nonexistent", VK_ICD_FILENAMES="/nonexistent",
        __EGL_VENDOR_LIBRARY_FILENAMES="/nonexistent", LIBGL_DRIVERS_PATH="/nonexistent",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    (said,) = [line for line in result.stdout.splitlines() if "drawing with NumPy" in line]
    assert "No suitable graphics adapter" in said
    check_run(tmp_path, host="numpy")


@pytest.mark.process
@pytest.mark.gpu
def test_a_run_on_the_embedded_host_learns_and_leaves_its_pictures(tmp_path: Path) -> None:
    result = doublure(
        "demo", "--scene", "plasma", "--seconds", "3", "--size", "128", "--host", "wgpu",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "dB on test slices" in result.stdout
    run = check_run(tmp_path, host="wgpu")
    assert run["dropped"] < run["captures"]


@pytest.mark.process
@pytest.mark.gpu
@pytest.mark.skipif(sys.platform != "linux", reason="displays are found otherwise elsewhere")
def test_without_a_display_a_window_is_declined_in_one_line_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    result = doublure(
        "demo", "--window", "--scene", "plasma", "--seconds", "2", "--size", "96", "--host", "wgpu",
        "--out", str(tmp_path), DISPLAY="", WAYLAND_DISPLAY="",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    said = [line for line in result.stdout.splitlines() if "without a window" in line]
    assert len(said) == 1
    assert "apt-get install xvfb" in said[0]
    check_run(tmp_path, host="wgpu")


def check_run(out: Path, *, host: str) -> dict:
    names = {path.name for path in out.iterdir()}
    assert names - {"plasma-animation.webp", "plasma-animation.gif"} == {
        "plasma-held-out.png", "plasma-quality.png", "plasma-model", "summary.json",
    }  # fmt: skip
    model = read_model(out / "plasma-model")
    assert model.name == "plasma"
    assert model.scores["test"] is not None
    (run,) = json.loads((out / "summary.json").read_text())["runs"]
    assert run.keys() >= INTERFACE
    assert (run["scene"], run["host"]) == ("plasma", host)
    assert run["reloads"] >= 1
    # A flat colour scores about 13 dB on plasma; two seconds are enough for far more.
    assert run["held_out_psnr_db"] > 20
    assert run["first_learned_pixels_s"] > 0
    assert run["stop_ms"] > 0
    return run
