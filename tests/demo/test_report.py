"""What a demo run writes: pictures that show what they say, whole or not at all."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from doublure_plugin.demo import report
from doublure_plugin.demo.report import (
    QualityTrace,
    display,
    save_animation,
    save_comparison,
    save_json,
    save_plot,
)
from PIL import Image


def flat(value: float, size: int = 32) -> np.ndarray:
    return np.full((size, size, 3), value, np.float32)


def test_display_leaves_low_dynamic_range_alone_and_shows_the_white_point_as_white() -> None:
    # sRGB of linear 0.5 is 0.7353569 -> 188 of 255.
    assert display(flat(0.5), 1.0)[0, 0].tolist() == [188, 188, 188]
    assert display(flat(1.0), 1.0)[0, 0].tolist() == [255, 255, 255]
    assert display(flat(80.0), 80.0)[0, 0].tolist() == [255, 255, 255]
    assert display(flat(-1.0), 1.0)[0, 0].tolist() == [0, 0, 0]


def test_a_comparison_shows_source_standin_and_error_in_that_order(tmp_path: Path) -> None:
    source, standin = flat(0.5), flat(0.5)
    standin[:, 16:] = 0.6
    path = tmp_path / "x.png"
    save_comparison(path, [("t = 1", source, standin)], white=1.0)
    with Image.open(path) as opened:
        picture = np.asarray(opened)
    assert picture.shape == (32 + 22, 3 * 32 + 8, 3)
    row = picture[22 + 16]
    assert row[8].tolist() == row[36 + 8].tolist() == [188] * 3
    assert row[36 + 24].tolist() == [int(display(flat(0.6), 1.0)[0, 0, 0])] * 3
    assert row[72 + 8].tolist() == [0] * 3
    assert row[72 + 24].tolist() == [min(255, 10 * (int(row[36 + 24, 0]) - 188))] * 3
    assert [p.name for p in tmp_path.iterdir()] == ["x.png"]


def test_the_animation_has_every_frame_side_by_side(tmp_path: Path) -> None:
    frames = [(flat(i / 8), flat(1 - i / 8)) for i in range(5)]
    path = save_animation(tmp_path / "a", frames, white=1.0, fps=10)
    with Image.open(path) as picture:
        assert (picture.size, getattr(picture, "n_frames", 1)) == ((64, 32), 5)
    assert [p for p in tmp_path.iterdir() if p != path] == []


def test_the_plot_draws_with_and_without_data(tmp_path: Path) -> None:
    full = QualityTrace([1.0, 2.0], [20.0, 30.0], [1.0], [20.0], ["grid"])
    save_plot(tmp_path / "full.png", full, title="plasma", measured_db=30.0)
    save_plot(tmp_path / "empty.png", QualityTrace(), title="plasma", measured_db=None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.png", "full.png"]
    for path in tmp_path.iterdir():
        with Image.open(path) as picture:
            assert picture.size == (840, 432)


def test_json_is_whole_or_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    save_json(path, {"runs": [1]})
    with pytest.raises(ValueError, match="JSON compliant"):
        save_json(path, {"runs": float("nan")})
    assert json.loads(path.read_text()) == {"runs": [1]}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    def write(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left on device: '.*picture.png'"):
        report._atomic(tmp_path / "picture.png", write)
    assert not list(tmp_path.iterdir())
