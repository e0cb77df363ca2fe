"""The server's and job's parts by themselves: no sockets, no processes."""

from __future__ import annotations

import json
import os
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from doublure_bridge import CodecError, Frame
from doublure_trainer import directories
from doublure_trainer.cli import jobs_table, plain_line
from doublure_trainer.directories import (
    prepare_directory,
    process_start,
    sweep_stale,
    sweep_temporaries,
)
from doublure_trainer.errors import DirectoryError, RefusedError
from doublure_trainer.frames import rows_from_frame
from doublure_trainer.job import Options
from doublure_trainer.jobs import Assignment, Launch, log_tail
from doublure_trainer.logs import ScalarLog
from doublure_trainer.parent import read_line, watch_parent
from doublure_trainer.sessions import Meter
from rich.console import Console

# --- frames -----------------------------------------------------------------------------------


def frame(width: int = 8, height: int = 4, *, channels: int = 3, **changes: object) -> Frame:
    """A frame whose pixels say where they are: r = column, g = row of the array."""
    pixels = np.zeros((height, width, channels), np.float32)
    pixels[..., 0] = np.arange(width)
    pixels[..., 1] = np.arange(height)[:, None]
    fields = {
        "session": bytes(16), "sequence": 0, "t": 0.25, "color": "linear", "origin": "top-left",
        "pixels": pixels, "checksum": zlib.crc32(pixels.tobytes()),
    }  # fmt: skip
    return Frame(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("origin", ["top-left", "bottom-left"])
def test_sampled_pixels_know_where_they_are(origin: str, channels: int) -> None:
    rows = rows_from_frame(
        frame(origin=origin, channels=channels), np.random.default_rng(0), width=8, height=4,
        count=500,
    )  # fmt: skip
    assert rows.dtype == np.float32
    assert rows.shape == (32, 6)
    np.testing.assert_allclose(rows[:, 0], (2 * rows[:, 3] + 1) / 8 - 1)
    down = (2 * rows[:, 4] + 1) / 4 - 1
    np.testing.assert_allclose(rows[:, 1], down if origin == "top-left" else -down)
    assert (rows[:, 2] == 0.25).all()
    assert (rows[:, 5] == 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checksum": 1}, "the frame is torn"),
        ({"color": "srgb"}, "Frame.color: expected linear, got 'srgb'"),
        ({"origin": "centre"}, "Frame.origin: expected top-left or bottom-left"),
        ({"width": 9}, "expected 8 x 4 as in OpenSession, got 9 x 4"),
    ],
)
def test_frames_that_cannot_be_trusted_are_refused(
    changes: dict[str, object], message: str
) -> None:
    width = changes.pop("width", 8)
    bad = frame(width, **changes)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match=message):
        rows_from_frame(bad, np.random.default_rng(0), width=8, height=4)


def test_half_floats_are_sampled_too() -> None:
    pixels = np.full((4, 8, 3), 2.5, np.float16)
    it = frame(pixels=pixels, checksum=zlib.crc32(pixels.tobytes()))
    rows = rows_from_frame(it, np.random.default_rng(0), width=8, height=4, count=5)
    assert rows.shape == (5, 6)
    assert (rows[:, 3:] == 2.5).all()


# --- directories ------------------------------------------------------------------------------


def test_stale_directories_are_swept_and_others_left_alone(tmp_path: Path) -> None:
    start = process_start(os.getpid())
    owners = {
        "doublure-dead": json.dumps({"pid": 2**22 + 7, "start": "1"}),
        "doublure-reused": json.dumps({"pid": os.getpid(), "start": "1"}),
        "doublure-alive": json.dumps({"pid": os.getpid(), "start": start}),
        "doublure-junk": "{",
        "doublure-list": "[1]",
        "other-dead": json.dumps({"pid": 2**22 + 7, "start": "1"}),
    }
    for name, owner in owners.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner.json").write_text(owner)
    (tmp_path / "doublure-nobody").mkdir()
    removed = {path.name for path in sweep_stale(tmp_path)}
    assert removed == {"doublure-dead", "doublure-reused"}
    assert {p.name for p in tmp_path.iterdir()} == {*owners, "doublure-nobody"} - removed


def test_a_runtime_directory_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = directories.make_runtime_directory()
    assert path.stat().st_mode & 0o777 == 0o700
    assert sweep_stale(tmp_path) == []
    assert path.is_dir()


def test_half_written_files_are_swept(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("a.tmp", "deep/.checkpoint-last", "deep/whole", "tmp"):
        (tmp_path / name).write_text("x")
    assert sweep_temporaries(tmp_path) == 2
    assert (tmp_path / "deep/whole").exists()
    assert (tmp_path / "tmp").exists()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    assert prepare_directory(tmp_path / "new" / "one").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryError, match="expected one that can be written, got") as info:
        prepare_directory(tmp_path / "file")
    assert "--directory" in info.value.next_step


# --- small parts ------------------------------------------------------------------------------


def test_the_parents_end_is_noticed_through_the_pipe() -> None:
    out, into = os.pipe()
    called: list[float] = []
    watch_parent(lambda: called.append(time.monotonic()), fd=out)
    os.write(into, b"ignored")
    time.sleep(0.05)
    assert not called
    os.close(into)
    deadline = time.monotonic() + 5
    while not called and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(called) == 1
    os.close(out)


def test_another_parent_is_noticed_though_the_pipe_stays_open() -> None:
    out, into = os.pipe()
    called: list[bool] = []
    watch_parent(lambda: called.append(True), parent=os.getppid() + 1, fd=out)
    deadline = time.monotonic() + 5
    while not called and time.monotonic() < deadline:
        time.sleep(0.005)
    assert called == [True]
    os.close(out)
    os.close(into)


def test_a_line_is_read_without_what_follows() -> None:
    out, into = os.pipe()
    os.write(into, b'{"a": 1}\nrest')
    assert read_line(out) == b'{"a": 1}'
    assert os.read(out, 10) == b"rest"
    os.close(into)
    assert read_line(out) == b""
    os.close(out)


def test_assignments_survive_the_wire_and_messages_are_not_mistaken_for_one() -> None:
    assignment = Assignment(
        session="00" * 16, resume="11" * 16, directory="/x", load=True, persistent=False, credit=4
    )
    assert Assignment.decode(assignment.encode([b"open"])) == (assignment, [b"open"])
    assert Assignment.decode([b"\x92\x01\x10"]) is None


def test_a_launch_is_one_line(tmp_path: Path) -> None:
    line = Launch("1-1", "ipc:///x", b"\n" * 32, tmp_path).line()
    assert line.count(b"\n") == 1
    assert bytes.fromhex(json.loads(line)["secret"]) == b"\n" * 32


def test_the_end_of_a_log_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("early\n" * 5000 + "the end\n")
    tail = log_tail(tmp_path / "missing", tmp_path / "a")
    assert tail.endswith("the end")
    assert len(tail) <= 8000


def test_a_meter_counts_and_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("doublure_trainer.sessions.time.monotonic", lambda: now[0])
    meter = Meter()
    for _ in range(20):
        meter.add(1000)
        now[0] += 0.1
    assert (meter.frames, meter.bytes) == (20, 20_000)
    frames, nbytes = meter.rates()
    assert frames == pytest.approx(10, rel=0.2)
    assert nbytes == pytest.approx(10_000, rel=0.2)
    now[0] += 5
    meter.rates()
    now[0] += 5
    assert meter.rates() == (0, 0)


@pytest.mark.parametrize(
    ("config", "named"),
    [({"nice": -3}, "config.nice"),
        ({"seed": "x"}, "config.seed"), ({"device": "tpu"}, "config.device"),
     ({"tensorboard": 1}, "config.tensorboard")],
)  # fmt: skip
def test_bad_job_options_are_refused_by_name(config: dict[str, object], named: str) -> None:
    with pytest.raises(RefusedError, match=named) as info:
        Options(config, persistent=False, device="auto")
    assert info.value.code == "config"


def test_job_options_are_taken_out_of_the_trainers_config() -> None:
    options = Options({"nice": 0, "lr": 1}, persistent=True, device="cpu")
    assert (options.nice, options.tensorboard, options.device) == (0, True, "cpu")
    assert options.rest == {"lr": 1}


def test_curves_can_be_read_by_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    log = ScalarLog(tmp_path)
    for step in range(3):
        log.add(step, {"loss": 1.0 / (step + 1), "held_out/psnr_db": 20.0 + step})
    log.close(timeout_s=10)
    log.close()
    (file,) = tmp_path.glob("events.out.tfevents.*")
    values = {
        (event.step, value.tag): value.tensor.float_val[0]
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert len(values) == 6
    assert values[(2, "held_out/psnr_db")] == 22.0
    assert values[(1, "loss")] == 0.5


# --- the display ------------------------------------------------------------------------------

FIGURES = {
    "name": "plasma/0badcafe", "host": "wgpu", "state": "open", "training": "racing",
    "job_pid": 7, "step": 12345, "samples_per_s": 250000.0, "held_out": {"psnr_db": 38.256},
    "family": "grid", "version": 9, "frames": 3, "frames_per_s": 12.5, "bytes_per_s": 1.0,
    "dropped": 2, "rows": 99,
}  # fmt: skip


def test_a_plain_line_says_it_all() -> None:
    assert plain_line(FIGURES) == (
        "plasma/0badcafe racing step 12345 250000 samples/s held-out 38.26 dB version 9 "
        "frames 12.5/s dropped 2"
    )
    assert "held-out - dB" in plain_line({**FIGURES, "held_out": {}})
    assert " stopping " in plain_line({**FIGURES, "state": "stopping"})


def test_the_table_has_a_row_a_job() -> None:
    console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(jobs_table([FIGURES, {**FIGURES, "name": "fbm/1"}]))
    text = console.export_text()
    console.file.close()
    for word in ("plasma/0badcafe", "fbm/1", "12,345", "250,000", "38.26", "grid", "racing"):
        assert word in text
