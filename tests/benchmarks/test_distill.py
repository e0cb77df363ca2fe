"""The distillation benchmark: honest yardsticks, unseen test slices, cells that survive a stop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import _distill_report as report
import distill
import numpy as np
import pytest
import torch
import yardsticks
from doublure_plugin.scenes import SCENES
from doublure_trainer.config import TrainConfig
from doublure_trainer.slices import HELD_OUT, TRAIN, SlicePlan

ROW_KEYS = [
    "scene", "family", "preset", "seed", "threads", "cpu_s", "psnr_db", "relmse", "peak_ratio",
    "macs", "fetches", "bytes",
]  # fmt: skip


def row(**changes: Any) -> dict[str, Any]:
    values = ["plasma", "grid", "medium", 0, 1, 2.0, 40.0, 0.01, 1.0, 608, 4, 1_043_000]
    return dict(zip(ROW_KEYS, values, strict=True)) | changes


def cell(**changes: Any) -> dict[str, Any]:
    one = row(**changes)
    key = {name: one[name] for name in ("scene", "family", "preset", "seed")}
    return {"key": key, "hardware": {"cpu": "any", "torch": "2"}, "rows": [one]}


def slow_features(grid: yardsticks.HashGrid, point: torch.Tensor) -> torch.Tensor:
    """The encoding of one point as the paper writes it: corner by corner, level by level."""
    unit, features = (point + 1) / 2, []
    for level in range(grid.sizes.levels):
        ratio = (grid.sizes.finest / grid.sizes.coarsest) ** (level / (grid.sizes.levels - 1))
        side = round(grid.sizes.coarsest * ratio)
        cells = torch.tensor([side, side, min(side, grid.sizes.finest_t)])
        low = torch.minimum((unit * cells).long(), cells - 1)
        part = unit * cells - low
        total = torch.zeros(2)
        for corner in range(8):
            bits = [corner >> axis & 1 for axis in range(3)]
            x, y, t = (int(low[axis]) + bits[axis] for axis in range(3))
            share = math.prod(
                float(part[axis]) if bits[axis] else 1 - float(part[axis]) for axis in range(3)
            )
            if math.prod((cells + 1).tolist()) <= grid.sizes.entries:
                index = x + (side + 1) * (y + (side + 1) * t)
            else:
                index = (x ^ (y * 2654435761) ^ (t * 805459861)) % grid.sizes.entries
            total = total + share * grid.table[index + int(grid._offsets[level])]
        features.append(total)
    return torch.cat(features)


def test_hash_grid_is_the_papers_with_its_gradient() -> None:
    grid = yardsticks.yardstick("hashgrid", "small", seed=3)
    assert isinstance(grid, yardsticks.HashGrid)
    points = torch.rand(12, 3, generator=torch.Generator().manual_seed(1)) * 2 - 1
    points[0], points[1] = -1.0, 1.0  # the far corner belongs to the last cell
    fast = grid(points)
    fast.square().sum().backward()
    gradient, grid.table.grad = grid.table.grad, None
    slow = grid.network(torch.stack([slow_features(grid, point) for point in points]))
    slow.square().sum().backward()
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, grid.table.grad, rtol=1e-4, atol=1e-6)
    assert grid.fetches == 8 * 6
    assert grid.macs == (12 * 16 + 16 * 16 + 16 * 3) + 8 * 6 * 2
    assert grid.nbytes == 2 * grid.table.numel() + 4 * (12 * 16 + 16 * 16 + 16 * 3 + 16 + 16 + 3)


def test_plain_network_counts_its_waves() -> None:
    mlp = yardsticks.yardstick("mlp", "small", seed=0)
    assert mlp.macs == 3 * 8 + (19 * 16 + 16 * 16 + 16 * 3)
    assert mlp.fetches == 0
    assert mlp.nbytes == 4 * (3 * 8 + 19 * 16 + 16 * 16 + 16 * 3 + 16 + 16 + 3)


@pytest.mark.parametrize("family", sorted(yardsticks.YARDSTICKS))
def test_yardsticks_learn_a_slope_and_only_from_training_slices(family: str) -> None:
    plan = SlicePlan()
    rng = np.random.default_rng(5)
    rows = rng.uniform(-1, 1, (40_000, 6)).astype(np.float32)
    rows[:, 3:] = 0.5 + 0.4 * rows[:, :1]
    rows[plan.kind_of(rows[:, 2]) != TRAIN, 3:] = 50.0  # would be seen if it trained
    module = yardsticks.yardstick(family, "small", seed=0)
    trainer = yardsticks.YardstickTrainer(module, TrainConfig(batch=512), plan, seed=0)
    trainer.add_rows(rows)
    assert trainer.ready
    for _ in range(120):
        trainer.step()
    unseen = rows[plan.kind_of(rows[:, 2]) != TRAIN]
    error = trainer.predict(unseen[:, :3]) - (0.5 + 0.4 * unseen[:, :1])
    assert np.sqrt(np.mean(error**2)) < 0.08


def test_the_dataset_trains_with_all_its_frames_and_never_touches_a_test_slice() -> None:
    plan = SlicePlan()
    frames = distill.dataset(SCENES["plasma"], plan, 0)
    kinds = [int(plan.kind_of(rows[:1, 2])[0]) for rows in frames]
    assert kinds == [TRAIN] * 48 + [HELD_OUT] * 12
    assert all(rows.shape == (2048, 6) and len(set(rows[:, 2])) == 1 for rows in frames)
    spacing = np.diff([rows[0, 2] for rows in frames[:48]])
    assert (spacing > 0.02).all()
    assert (spacing < 0.07).all()


def test_a_cell_has_the_rows_that_are_promised_and_is_not_measured_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "cells.jsonl", tmp_path / "rows.json"
    command = [
        "distill.py", "--quick", "--seconds", "0.6", "--scene", "plasma", "--family", "mlp",
        "--cells", str(path), "--json", str(out), "--table",
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", command)
    distill.main()
    assert "1 cells to measure" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    assert [list(r) for r in rows] == [ROW_KEYS]
    assert rows[0]["cpu_s"] == 0.6
    assert rows[0]["psnr_db"] > 5

    with path.open("a") as file:
        file.write('{"key": {"sce')  # killed while it wrote
    distill.main()
    said = capsys.readouterr().out
    assert "0 cells to measure" in said
    assert "left out a line that is not whole" in said
    assert json.loads(out.read_text())["rows"] == rows

    distill.append_cell(path, cell(seed=7))
    assert [c["key"]["seed"] for c in distill.read_cells(path)] == [0, 7]


def test_tables_give_medians_spread_and_what_was_not_published() -> None:
    cells = [cell(seed=s, psnr_db=v) for s, v in enumerate((40.0, 42.0, 47.0))]
    cells += [cell(scene="noise", seed=s, psnr_db=None, relmse=None) for s in range(3)]
    cells += [cell(family="mlp", psnr_db=20.0)]
    cells += [cell(seed=2, psnr_db=43.0)]  # measured again: the later one counts
    text = "\n".join(report.tables(report.figures(cells)))
    assert "| plasma | 42.0 (40.0..43.0) | 20.0 |" in text
    assert "| noise | - |  |" in text  # not published; and mlp was not measured there
    assert "| grid | medium | 608 | 4 | 1,043.0 | 42.0 |" in text


def test_the_page_gets_its_tables_between_the_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "DOCS", tmp_path)
    page = tmp_path / "quality.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    found = report.figures([cell(), cell(family="hashgrid", fetches=64)])
    report.write_docs(found)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "(images/quality.png)" in text
    assert "| hashgrid | medium |" in text
    assert (tmp_path / "images" / "quality.png").stat().st_size > 5000
    page.write_text("no markers")
    with pytest.raises(SystemExit, match=r"expected the lines .*quality: begin"):
        report.write_docs(found)
