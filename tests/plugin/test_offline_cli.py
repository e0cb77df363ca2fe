"""The capture command: what it writes, and that every mistake is one clear line."""

import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from doublure_bridge import __main__, open_dataset
from doublure_plugin import NondeterministicSourceError
from doublure_plugin.offline import cli
from doublure_plugin.offline.scene_hosts import SceneHost
from typer.testing import CliRunner

SMALL = ("--frames", "4", "--validation", "2", "--pixels", "100", "--host", "numpy")


def run(*words: str) -> Any:
    app = typer.Typer()
    app.command()(cli.capture)
    return CliRunner().invoke(app, list(words))


def test_a_scene_is_captured(tmp_path: Path) -> None:
    done = run("--scene", "sun", "--out", str(tmp_path / "d"), "--size", "30x20", *SMALL)
    assert done.exit_code == 0, done.output
    first, last = done.output.splitlines()
    assert first.startswith("sun on doublure numpy: NumPy")
    assert last.startswith("600 rows of 4 + 2 frames in ")
    assert last.endswith(f"`doublure train --dataset {tmp_path / 'd'} --out MODEL`")
    manifest = open_dataset(tmp_path / "d").manifest
    assert manifest.resolution == (30, 20)
    assert manifest.parameter_range[0] < manifest.parameter_range[1]


@pytest.mark.parametrize(
    "words",
    [
        ("--scene", "nope"),
        ("--host", "vulcan"),
        ("--size", "64"),
        ("--size", "0x64"),
        ("--size", "64x4097"),
        ("--size", "-1x64"),
        ("--frames", "1"),
        ("--frames", "513"),
        ("--validation", "129"),
        ("--pixels", "65537"),
        ("--seed", "x"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_opened(
    tmp_path: Path, words: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "open_scene", None)
    done = run("--out", str(tmp_path / "d"), *words)
    assert done.exit_code == 2
    assert words[0] in done.output
    assert not list(tmp_path.iterdir())


def test_an_error_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").touch()
    words = ["doublure", "capture", "--out", str(tmp_path), "--size", "8x8", *SMALL]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        __main__.main()
    assert left.value.code == 1
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"doublure: dataset directory {tmp_path}: expected a new or an empty one, got one that is "
        "not empty; Choose a new dataset directory",
        "Run again with --debug for the traceback.",
    ]


def test_a_source_with_noise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(_: SceneHost) -> None:
        raise NondeterministicSourceError("source", got="noise")

    monkeypatch.setattr(SceneHost, "check_determinism", noisy)
    done = run("--out", str(tmp_path / "d"), "--size", "8x8", *SMALL)
    assert isinstance(done.exception, NondeterministicSourceError)
    assert not list(tmp_path.iterdir())


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    render, drawn = SceneHost.render, iter([False, False, True])

    def interrupted(self: SceneHost, t: float) -> Any:
        if next(drawn):
            raise KeyboardInterrupt
        return render(self, t)

    monkeypatch.setattr(SceneHost, "render", interrupted)
    done = run("--out", str(tmp_path / "d"), "--size", "8x8", *SMALL)
    assert done.exit_code == 130
    assert "interrupted: nothing was kept" in done.output
    assert not list(tmp_path.iterdir())
