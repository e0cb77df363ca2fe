"""The report: whole, by itself, and drawn from what was measured."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
from doublure_trainer.offline.pictures import display, mosaic
from PIL import Image

PICTURES = ("quality.png", "frames.png", "test-frames.png", "held-out-frames.png", "sweep.png")


def test_the_html_report_needs_nothing_else(trained: Path) -> None:
    text = (trained / "report.html").read_text()
    assert "spot: a learned stand-in" in text
    assert text.count('src="data:image/png;base64,') == len(PICTURES)
    assert not re.search(r"""(src|href)=["'](?!data:)""", text)
    assert "http" not in text.replace("http-equiv", "")


def test_the_markdown_report_shows_pictures_that_are_there(trained: Path) -> None:
    text = (trained / "report.md").read_text()
    assert re.findall(r"\]\((.+?)\)", text) == list(PICTURES)
    for name in PICTURES:
        picture = Image.open(io.BytesIO((trained / name).read_bytes()))
        assert min(picture.size) > 100
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 50


def test_the_report_is_data_too(trained: Path) -> None:
    report = json.loads((trained / "report.json").read_text())
    splits = [frame["split"] for frame in report["frames"]]
    assert {s: splits.count(s) for s in set(splits)} == {"train": 16, "held_out": 5, "test": 2}
    assert report["costs"].keys() == {"macs", "fetches", "bytes", "parameters"}
    for name in ("held_out", "test"):
        assert {"psnr_db", "relmse", "peak_ratio", "merit"} <= report["scores"][name].keys()
    text = (trained / "report.md").read_text()
    for name in ("held_out", "test"):
        assert f"{report['scores'][name]['psnr_db']:.2f} dB" in text


def test_a_mosaic_shows_the_nearest_of_the_points() -> None:
    rng = np.random.default_rng(2)
    for count in (1, 3, 40, 700):
        points = rng.uniform(-1, 1, (count, 2)).astype(np.float32)
        found = mosaic(points, (24, 16))
        where = (points + 1) * np.array([12, 8])
        y, x = np.mgrid[:16, :24] + 0.5
        distance = np.hypot(x[..., None] - where[:, 0], y[..., None] - where[:, 1])
        mine = np.take_along_axis(distance, found[..., None], axis=2)[..., 0]
        np.testing.assert_allclose(mine, distance.min(axis=2), atol=1e-3)


def test_display_is_the_identity_below_one_and_black_below_zero() -> None:
    assert display(np.array([[-1.0, 0.0, 1.0]]), 1.0).tolist() == [[0, 0, 255]]
    assert display(np.array([[8.0, 8.0, 8.0]]), 8.0).tolist() == [[255, 255, 255]]
