"""Fitting costs to timed calls, timing them, and the file that keeps them."""

import itertools
import json
import os
import re
import stat
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from doublure_kernels import calibrate, costs, devices, doctor, errors, policy
from doublure_kernels.calibrate import CELLS, Calibration, Cell, Measured
from doublure_kernels.calibrate_command import calibrate as command
from doublure_kernels.costs import TERMS, Model, Work, fit, touching
from typer.testing import CliRunner

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(command)

WORKS = [
    Work(b, t, p, s)
    for b, t, p, s in itertools.product((1, 16), (32, 512), (4096, 65536), (0.02, 0.2))
]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    policy.forget_calibration()
    yield tmp_path
    policy.forget_calibration()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(name: str) -> None:
        raise errors.DeviceError(f"no {name} here")

    devices.shutdown()
    for name in devices.GPUS:
        monkeypatch.setitem(devices._OPENERS, name, lambda name=name: refuse(name))
    yield
    devices.shutdown()


def made(cpu: str = "A processor", **changes: Any) -> Calibration:
    model = Model((1e6, 0.0, 0.0, 0.5, 0.0, 0.0), ((0.0, 1.0, 2.0, 3.0),), (0.25,))
    one = Measured("cpu", "cpu", {}, model, ((CELLS[0], 1.5), (CELLS[1], 2.5)), 0.1)
    here = calibrate.machine() | {"cpu": cpu} | changes
    return Calibration("2026-01-01T00:00:00+00:00", here, (one,), 3.0)


def test_a_sum_of_costs_is_found_again() -> None:
    true = (50_000.0, 2.0, 300.0, 0.03, 5.0, 4000.0)
    times = [sum(c * t for c, t in zip(true, w.terms, strict=True)) * 1e-6 for w in WORKS]
    model = fit(WORKS, times)
    assert model.costs == pytest.approx(true, rel=1e-4)
    other = Work(4, 100, 10_000, 0.1)
    expected = sum(c * t for c, t in zip(true, other.terms, strict=True)) * 1e-6
    assert model.ms(other) == pytest.approx(expected, rel=1e-3)


def test_costs_are_never_negative() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        model = fit(WORKS, rng.uniform(0.1, 100.0, len(WORKS)))
        assert min(model.costs) >= 0
        assert max(model.costs) > 0
        assert all(model.ms(work) > 0 for work in WORKS)


def test_what_no_sum_explains_is_interpolated_and_fades_out() -> None:
    times = [work.terms[3] * 1e-6 * (1.5 if work.batch == 1 else 1.0) for work in WORKS]
    model = fit(WORKS, times)
    bare = Model(model.costs)
    errors_of = [
        max(abs(one.ms(work) / ms - 1) for work, ms in zip(WORKS, times, strict=True))
        for one in (model, bare)
    ]
    assert errors_of[0] < errors_of[1] / 3
    far = Work(1 << 40, 1 << 40, 1 << 40, 1.0)
    assert model.ms(far) == pytest.approx(bare.ms(far), rel=1e-6)


def test_fewer_calls_than_terms_still_give_a_model() -> None:
    model = fit(WORKS[:2], [1.0, 2.0])
    assert model.ms(WORKS[0]) == pytest.approx(1.0, rel=0.2)


def test_calibration_cells_tell_the_terms_apart() -> None:
    works = [Work(c.batch, c.triangles, c.size**2, 0.3 if c.wide else 2.5 * c.sigma) for c in CELLS]
    terms = np.array([work.terms for work in works])
    assert np.linalg.matrix_rank(terms / np.linalg.norm(terms, axis=0)) == len(TERMS)
    assert len(set(CELLS)) == len(CELLS)


def test_the_share_that_touches_is_about_right() -> None:
    rng = np.random.default_rng(1)
    for cell in (Cell(4, 8, 64), Cell(4, 8, 64, wide=True), Cell(4, 8, 64, sigma=0.02)):
        params = calibrate.scene(cell)[0]
        points = rng.uniform(0, 1, (2000, 2))
        corners = params[..., :6].astype(float).reshape(-1, 1, 3, 2)
        ends = np.roll(corners, -1, axis=2) - corners
        to = points[None, :, None] - corners
        along = np.clip((to * ends).sum(-1) / (ends**2).sum(-1), 0, 1)
        near = np.linalg.norm(to - along[..., None] * ends, axis=-1).min(-1)
        side = ends[..., 0] * to[..., 1] - ends[..., 1] * to[..., 0]
        inside = (side >= 0).all(-1) | (side <= 0).all(-1)
        true = float((inside | (near < 13 * cell.sigma)).mean())
        found = touching(params, np.full(params.shape[:2], cell.sigma))
        assert found == pytest.approx(true, rel=0.4)


def test_the_share_that_touches_survives_any_scene() -> None:
    assert touching(np.zeros((2, 0, 10)), np.zeros((2, 0))) == costs.TYPICAL_SHARE
    assert touching(np.full((1, 3, 10), np.nan), np.ones((1, 3))) == 0.0
    assert touching(np.full((1, 3, 10), 5.0), np.full((1, 3), 0.01)) == 0.0
    assert 0 <= touching(np.full((1, 3, 10), 1e30), np.ones((1, 3))) <= 1
    assert touching(np.zeros((1, 3, 10)), np.full((1, 3), 10.0)) == pytest.approx(1, abs=0.3)


def test_a_model_comes_back_from_json_as_it_was() -> None:
    model = fit(WORKS, [1.0 + i for i in range(len(WORKS))])
    again = Model.from_dict(json.loads(json.dumps(model.to_dict())))
    assert [again.ms(work) for work in WORKS] == [model.ms(work) for work in WORKS]


@pytest.mark.parametrize(
    "change",
    [
        {"costs": [1.0]},
        {"costs": [0.0] * 6},
        {"costs": [-1.0, 1.0, 0, 0, 0, 0]},
        {"costs": [float("nan")] * 6},
        {"weights": [1.0, 2.0]},
        {"places": [[1.0]]},
    ],
)
def test_a_model_that_is_none_is_refused(change: dict[str, Any]) -> None:
    stored = {"costs": [1.0] * 6, "places": [[0.0] * 4], "weights": [0.0]}
    Model.from_dict(stored)
    with pytest.raises(ValueError, match="expected"):
        Model.from_dict(stored | change)


def test_what_is_saved_is_loaded_for_this_machine_only(home: Path) -> None:
    assert calibrate.load() is None
    path = calibrate.save(made("Another processor"))
    assert path == home / "doublure" / "calibration.json"
    found, text = calibrate.status()
    assert found is None
    assert "is stale (cpu Another processor is now " in text
    calibrate.save(made(calibrate.machine()["cpu"]))
    found = calibrate.load()
    assert found is not None
    assert found.to_dict() == made(calibrate.machine()["cpu"]).to_dict()
    assert len(json.loads(path.read_text())["machines"]) == 2, "the other machine's is kept"
    assert list(path.parent.iterdir()) == [path], "nothing half written is left"


def test_another_version_of_the_package_makes_it_stale() -> None:
    here = calibrate.machine()
    calibrate.save(made(here["cpu"], package="0.0.0"))
    text = calibrate.status()[1]
    assert f"is stale (package 0.0.0 is now {here['package']}) and ignored" in text


def test_saving_replaces_a_damaged_file(home: Path) -> None:
    path = home / "doublure" / "calibration.json"
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe{")
    assert "is damaged (UnicodeDecodeError" in calibrate.status()[1]
    calibrate.save(made(calibrate.machine()["cpu"]))
    assert calibrate.load() is not None


def test_a_directory_that_cannot_be_made_is_named(home: Path) -> None:
    (home / "doublure").write_text("in the way")
    with pytest.raises(errors.DeviceError, match=r"to be writable, got .*; set XDG_CACHE"):
        calibrate.save(made())


def test_without_a_home_there_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(calibrate.Path, "home", homeless)
    assert calibrate.cache_file() is None
    assert calibrate.status()[0] is None
    with pytest.raises(errors.DeviceError, match="expected a home directory"):
        calibrate.save(made())


def test_a_failed_write_keeps_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = calibrate.save(made(calibrate.machine()["cpu"]))

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(errors.DeviceError, match="no space left"):
        calibrate.save(made("x"))
    assert calibrate.load() is not None
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_ISREG(path.stat().st_mode)


@pytest.mark.usefixtures("no_gpu")
def test_timing_the_cpu_gives_a_model_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "CELLS", tuple(c for c in CELLS if c.size == 64))
    monkeypatch.setattr(calibrate, "_LEAST", 4)
    told = []
    found = calibrate.calibrate(seconds=1.0, note=lambda *pair: told.append(pair))
    assert told == [("cpu", "cpu")]
    (one,) = found.measured
    assert one.device == {}
    assert [cell for cell, _ in one.cells] == list(calibrate.CELLS)
    assert all(ms > 0 for _, ms in one.cells)
    assert found.find("cpu", "cpu") is one
    assert found.find("cuda", "cpu") is None
    assert Calibration.from_dict(json.loads(json.dumps(found.to_dict()))).to_dict() == (
        json.loads(json.dumps(found.to_dict())) | {"measured": found.to_dict()["measured"]}
    )


@pytest.mark.usefixtures("no_gpu")
def test_a_device_that_runs_out_of_time_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibrate, "_time_cell", lambda *_: (WORKS[0], 5000.0, 0.0))
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: next(clock))
    found = calibrate.calibrate(seconds=3.0)
    assert found.measured == ()
    assert "only 3 of 24 calls were timed on cpu" in caplog.text


def run(*words: str, status: int = 0) -> str:
    """The command's output, blanks folded."""
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "160", "TERM": "dumb"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.output).split())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "CELLS", tuple(Cell(1, 8, 2 + i) for i in range(8)))


@pytest.mark.usefixtures("no_gpu", "quick")
def test_the_command_says_what_it_found_and_keeps_it(home: Path) -> None:
    said = run("--seconds", "0.5")
    assert "milliseconds a call, forward and backward" in said
    assert "left out: no cuda here" in said
    assert "left out: no vulkan here" in said
    assert f"kept in {home / 'doublure' / 'calibration.json'}" in said
    assert calibrate.load() is not None


@pytest.mark.usefixtures("no_gpu", "quick")
def test_a_dry_run_keeps_nothing() -> None:
    assert "nothing was kept (--dry-run)" in run("--seconds", "0.5", "--dry-run")
    assert calibrate.load() is None


@pytest.mark.usefixtures("no_gpu", "quick")
def test_json_has_all_that_is_kept(home: Path) -> None:
    said = json.loads(run("--seconds", "0.5", "--json"))
    assert said["file"] == str(home / "doublure" / "calibration.json")
    found = calibrate.load()
    assert found is not None
    assert json.loads(json.dumps(found.to_dict())) == {k: v for k, v in said.items() if k != "file"}


def test_it_knows_a_gpu_again_by_its_uuid_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        name, adapter = "vulkan", "A card"
        device = types.SimpleNamespace(uuid=b"\x01\xff", driver="Mesa 22")

    assert calibrate.identity(Card()) == {"adapter": "A card", "uuid": "01ff", "driver": "Mesa 22"}
    assert calibrate.identity(devices.default("cpu")) == {}
    monkeypatch.setattr(calibrate, "_cuda_identity", lambda: ("GPU-7", "550"))

    class Cuda:
        name, adapter = "cuda", "A card"

    assert calibrate.identity(Cuda()) == {"adapter": "A card", "uuid": "GPU-7", "driver": "550"}


# The doctor.


@pytest.mark.usefixtures("no_gpu")
def test_the_doctor_looks_at_everything() -> None:
    records = list(doctor.checks())
    names = list(dict.fromkeys(record["name"] for record in records))
    assert names == [
        "rasterizer cpu", "rasterizer cuda", "rasterizer vulkan", "rasterizer auto",
        "rasterizer calibration",
    ]  # fmt: skip
    assert all(set(record) == {"name", "status", "text"} for record in records)
    assert {record["status"] for record in records} <= {"ok", "note"}
    text = "\n".join(record["text"] for record in records)
    assert "numba " in text
    assert "not calibrated; `doublure calibrate` does it in seconds" in text
    assert json.loads(json.dumps(records)) == records


@pytest.mark.usefixtures("no_gpu")
def test_the_doctor_survives_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("broken [driver]")

    for module, name in (
        (devices, "open_device"), (devices, "gpu"), (devices, "best_gpu"), (calibrate, "status"),
        (doctor, "_version"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, fail)
    records = list(doctor.checks())
    assert len(records) == 5
    assert all("broken [driver]" in record["text"] for record in records)
    assert {record["status"] for record in records} == {"note"}


@pytest.mark.usefixtures("no_gpu")
def test_the_doctor_says_what_calibration_there_is() -> None:
    calibrate.save(made(calibrate.machine()["cpu"]))
    last = list(doctor.checks())[-1]
    assert last["status"] == "ok"
    assert last["text"].endswith(": cpu on cpu")
