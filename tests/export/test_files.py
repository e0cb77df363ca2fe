"""ONNX, plain tensors, golden vectors, and the command."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from doublure_bridge.model_file import ModelFile, write_model
from doublure_plugin.evaluate import Evaluator
from doublure_trainer.export.cli import export
from doublure_trainer.export.errors import ExportError
from doublure_trainer.export.golden import GOLDEN_SPECS, golden_case, golden_text, make_golden
from doublure_trainer.export.package import export_model
from doublure_trainer.models import build, load_tensors
from safetensors.numpy import load_file
from typer import Typer
from typer.testing import CliRunner

from .models import golden_model, trained_model

FAMILIES = sorted(GOLDEN_SPECS)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_golden_vectors_that_ship_are_current(name: str) -> None:
    shipped = files("doublure_trainer.export.golden").joinpath(f"{name}.json").read_text()
    current = golden_text(make_golden(name))
    # The same text but for numbers' last digits, which differ between processors' libraries.
    assert _NUMBER.sub("0", shipped) == _NUMBER.sub("0", current)
    ours, theirs = (np.array(_NUMBER.findall(t), np.float64) for t in (shipped, current))
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_reader_finds_the_golden_colours(name: str) -> None:
    case = golden_case(name)
    points = case.points.astype(np.float32)
    ours = Evaluator(case.spec, case.tensors)(points)
    module = build(case.spec)
    load_tensors(module, case.tensors)
    theirs = module.evaluate(torch.from_numpy(points)).numpy()
    for colours in (ours, theirs):
        np.testing.assert_allclose(colours, case.colours, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "precision"),
    [(n, p) for n in FAMILIES for p in ("fp32", "fp16", "int8") if (n, p) != ("compact", "int8")],
)
def test_onnx_runs_to_the_same_colours(tmp_path: Path, name: str, precision: str) -> None:
    model = golden_model(name)
    made = export_model(model, "onnx", out=tmp_path, precision=precision)
    session = onnxruntime.InferenceSession(
        made.paths[-1].read_bytes(), providers=["CPUExecutionProvider"]
    )
    points = golden_case(name).points.astype(np.float32)
    low, high = model.parameter
    raw = points.copy()
    raw[:, 2] = low + (points[:, 2] + 1.0) * 0.5 * (high - low)
    (colours,) = session.run(None, {"points": raw})
    exact = Evaluator(model.spec, model.tensors)(points)
    error = np.abs(colours - exact) / (1.0 + np.abs(exact))
    assert error.max() < {"fp32": 1e-4, "fp16": 2e-3, "int8": 0.1}[precision]


def test_plain_tensors_are_the_models_own(tmp_path: Path) -> None:
    model = trained_model("plasma", "grid")
    made = export_model(model, "safetensors", out=tmp_path)
    path = next(p for p in made.paths if p.suffix == ".safetensors")
    found = load_file(path)
    assert sorted(found) == sorted(model.tensors)
    assert all((found[name] == model.tensors[name]).all() for name in found)


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    model = golden_model("compact")
    first = export_model(model, "glsl", out=tmp_path)
    with pytest.raises(ExportError, match="--force"):
        export_model(model, "glsl", out=tmp_path)
    assert export_model(model, "glsl", out=tmp_path, force=True).paths == first.paths


def run(*arguments: str) -> tuple[int, str]:
    app = Typer()
    app.command()(export)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def saved(tmp_path: Path) -> ModelFile:
    model = golden_model("grid")
    write_model(tmp_path / "model", model)
    return model


def test_the_command_writes_what_it_says(tmp_path: Path) -> None:
    saved(tmp_path)
    code, text = run(str(tmp_path / "model"), "--to", "wgsl", "--out", str(tmp_path / "out"))
    assert code == 0, text
    assert any((tmp_path / "out").iterdir() if (tmp_path / "out").is_dir() else [tmp_path / "out"])
    assert "grid, fp32" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--to", "wsgl"), "wgsl"),
        (("--to", "glsl", "--precision", "fp8"), "fp16"),
        (("--to", "glsl", "--storage", "texture"), "textures"),
        (("--to", "glsl", "--name", "1st"), "name"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    saved(tmp_path)
    code, text = run(str(tmp_path / "model"), *arguments, "--out", str(tmp_path / "out"))
    assert code == 1
    assert said in text
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    code, text = run(str(tmp_path / "nothing"), "--to", "glsl")
    assert code == 1
    assert "nothing" in text
