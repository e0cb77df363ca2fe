"""The report of an offline training: as data, as Markdown with pictures, and as one HTML file."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from doublure_bridge.model_file import ModelFile
from doublure_bridge.models import spec_to_dict
from doublure_bridge.scores import Scores

from ..models import cost
from ..slices import HELD_OUT, TEST, TRAIN
from .frames import FrameSet
from .measure import FrameScore, Measured, Predictor
from .workplace import write_whole

__all__ = ["Run", "write_report"]

_KINDS = {TRAIN: "train", HELD_OUT: "held_out", TEST: "test"}
_SHOWN = 3  # frames of each kind in pictures


@dataclass(frozen=True, slots=True)
class Run:
    """What a finished training knows about itself.

    Attributes:
        model: The weights as they were written.
        best_step: Step of the weights.
        train_seconds: Seconds spent in steps, before and after being resumed.
        device: Where it trained.
        history: One entry a scored step, as in checkpoints/history.json.
        measured: Final scores.
        frames: The dataset.
    """

    model: ModelFile
    best_step: int
    train_seconds: float
    device: str
    history: Sequence[dict[str, Any]]
    measured: Measured
    frames: FrameSet


@dataclass(frozen=True, slots=True)
class _Section:
    """A heading with text, a table or a picture."""

    title: str
    text: str = ""
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    picture: str = ""


def write_report(directory: Path, run: Run) -> None:
    """Draw and write report.json, report.md, report.html and the PNGs that report.md shows.

    Raises:
        ImportError: matplotlib or pillow is missing.
        OSError: The directory cannot be written.
    """
    pictures = _pictures(run)
    for name, png in pictures.items():
        write_whole(directory / name, png)
    sections = _sections(run, pictures)
    title = f"{run.model.name}: a learned stand-in"
    write_whole(
        directory / "report.json", json.dumps(_plain(run), indent=2, allow_nan=False) + "\n"
    )
    write_whole(directory / "report.md", _markdown(title, sections))
    write_whole(directory / "report.html", _html(title, sections, pictures))


def _pictures(run: Run) -> dict[str, bytes]:
    """PNGs by file name, in the order of the report."""
    # Here, since training needs neither package: without them there are weights, and no report.
    from .pictures import frame_sheet, sweep_strip, white_point
    from .plots import plot_frames, plot_training

    measured, model = run.measured, run.model
    predict = Predictor(model.spec, model.tensors)
    resolution = model.resolution if min(model.resolution) > 0 else (512, 512)
    unseen = [item for item in measured.frames if item.frame.kind != TRAIN]
    white = white_point(np.array([item.frame.rows[:, 3:].max() for item in unseen]))
    found = {
        "quality.png": plot_training(run.history, test=measured.test, best_step=run.best_step),
        "frames.png": plot_frames(measured.frames),
    }
    for kind, name in ((TEST, "test-frames.png"), (HELD_OUT, "held-out-frames.png")):
        if chosen := _worst_to_best(measured.frames, kind):
            found[name] = frame_sheet(chosen, predict, resolution=resolution, white=white)
    found["sweep.png"] = sweep_strip(predict, model.parameter, resolution=resolution, white=white)
    return found


def _worst_to_best(frames: Sequence[FrameScore], kind: int) -> list[FrameScore]:
    """The worst, the median and the best frame of a kind; fewer where there are fewer."""
    order = sorted(
        (item for item in frames if item.frame.kind == kind), key=lambda i: i.scores.psnr_db
    )
    places = sorted({round(i * (len(order) - 1) / (_SHOWN - 1)) for i in range(_SHOWN)})
    return [order[i] for i in places] if order else []


def _plain(run: Run) -> dict[str, Any]:
    """The report as data; figures that are not finite become None."""
    model, costs = run.model, cost(run.model.spec)
    return {
        "schema": 1,
        "name": model.name,
        "model": spec_to_dict(model.spec),
        "costs": {
            "macs": costs.macs,
            "fetches": costs.fetches,
            "bytes": costs.nbytes,
            "parameters": costs.parameters,
        },
        "source_digest": model.source_digest,
        "parameter": list(model.parameter),
        "resolution": list(model.resolution),
        "seed": model.seed,
        "steps": model.steps,
        "best_step": run.best_step,
        "train_seconds": round(run.train_seconds, 3),
        "device": run.device,
        "versions": dict(model.versions),
        "scores": {
            "held_out": _figures(run.measured.held_out),
            "test": _figures(run.measured.test) if run.measured.test else None,
        },
        "frames": [
            {
                "split": _KINDS[item.frame.kind],
                "t": item.frame.t,
                "parameter": item.frame.parameter,
                **_figures(item.scores),
            }
            for item in run.measured.frames
        ],
        "history": list(run.history),
    }


def _figures(scores: Scores) -> dict[str, float | None]:
    figures = {**scores.to_dict(), "merit": scores.merit}
    return {k: v if math.isfinite(v) else None for k, v in figures.items()}


# --- text ----------------------------------------------------------------------------------------


def _sections(run: Run, pictures: dict[str, bytes]) -> list[_Section]:
    model, costs, measured = run.model, cost(run.model.spec), run.measured
    frames = {kind: run.frames.of(kind) for kind in _KINDS}
    rows = sum(len(frame.rows) for frame in frames[TRAIN])
    low, high = model.parameter
    facts = (
        ("source", f"{_short(model.source_digest)}, parameter {low:g} to {high:g}"),
        ("captured", f"{model.resolution[0]} x {model.resolution[1]} pixels"),
        (
            "trained on",
            f"{rows:,} rows of {len(frames[TRAIN])} frames, {model.steps:,} steps, "
            f"{run.train_seconds:.1f} s on {run.device}, seed {model.seed}",
        ),
        ("weights of", f"step {run.best_step:,}"),
        ("made with", ", ".join(f"{k} {v}" for k, v in model.versions.items())),
    )
    spread = _spread(measured.frames)
    sections = [
        _Section(
            "Scores",
            "Test frames were looked at once, after the last step: nothing was chosen by them. "
            "Held-out frames chose the weights. Neither was ever trained on. The spread is from "
            "the worst to the best frame.",
            ("frames", "PSNR, tonemapped", "worst to best", "relative MSE", "peak ratio", "rows"),
            tuple(
                _score_cells(name, scores, spread.get(kind, ""))
                for kind, name, scores in (
                    (TEST, f"test ({len(frames[TEST])})", measured.test),
                    (HELD_OUT, f"held out ({len(frames[HELD_OUT])})", measured.held_out),
                )
                if scores is not None
            ),
        ),
        _Section(
            "Costs of the stand-in",
            "",
            ("family", "MACs a pixel", "filtered fetches a pixel", "bytes", "learned numbers"),
            (
                (
                    model.spec.family,
                    f"{costs.macs:,}",
                    str(costs.fetches),
                    f"{costs.nbytes:,}",
                    f"{costs.parameters:,}",
                ),
            ),
        ),
        _Section("Training", "", ("", ""), facts),
    ]
    texts = {
        "quality.png": (
            "Quality over steps",
            "The three scores of the averaged weights on held-out frames. Candidates with the "
            "highest merit so far are kept; the test frames' scores belong to the last kept.",
        ),
        "frames.png": ("Every frame", "PSNR over the parameter: gaps between frames show here."),
        "test-frames.png": (
            "Test frames: worst, median, best",
            "The dataset holds scattered pixels: each fills its neighbourhood, alike in the first "
            "three pictures. The fourth is the stand-in at every pixel.",
        ),
        "held-out-frames.png": ("Held-out frames: worst, median, best", ""),
        "sweep.png": ("The stand-in over its range", ""),
    }
    for name in pictures:
        title, text = texts[name]
        sections.append(_Section(title, text, picture=name))
    sections.append(_gate_history(run.history))
    return sections


def _short(digest: str) -> str:
    return f"{digest[:16]}…" if digest else "unknown"


def _spread(frames: Sequence[FrameScore]) -> dict[int, str]:
    found: dict[int, str] = {}
    for kind in _KINDS:
        values = [item.scores.psnr_db for item in frames if item.frame.kind == kind]
        if values:
            found[kind] = f"{min(values):.1f} to {max(values):.1f} dB"
    return found


def _score_cells(name: str, scores: Scores, spread: str) -> tuple[str, ...]:
    return (
        name,
        f"{scores.psnr_db:.2f} dB",
        spread,
        f"{scores.relmse:.3g}",
        f"{scores.peak_ratio:.3f}",
        f"{scores.rows:,}",
    )


def _gate_history(history: Sequence[dict[str, Any]]) -> _Section:
    """What the gate said, a line a candidate; runs of the same answer are one line."""
    lines: list[tuple[str, ...]] = []
    previous = None
    for i, entry in enumerate(history):
        outcome = "kept" if entry["kept"] else "passed, not the best"
        if entry["verdict"] != "passed":
            outcome = entry["verdict"] or "nothing to score"
        if previous == outcome and i + 1 < len(history) and outcome != "kept":
            continue
        previous = outcome
        psnr, merit = entry.get("psnr_db"), entry.get("merit")
        lines.append(
            (
                f"{entry['step']:,}",
                entry["family"] + ("" if entry["race"] != "racing" else " (racing)"),
                "" if psnr is None else f"{psnr:.2f}",
                "" if merit is None else f"{merit:.2f}",
                outcome,
            )
        )
    return _Section(
        "The gate",
        "Candidates that are not finite, or no better than one flat colour, are refused; of the "
        "others the one with the highest merit (PSNR less the peak's error in dB) is kept.",
        ("step", "family", "held-out dB", "merit dB", "outcome"),
        tuple(lines),
    )


def _markdown(title: str, sections: Sequence[_Section]) -> str:
    lines = [f"# {title}", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        if section.text:
            lines += [section.text, ""]
        if section.rows:
            lines.append(f"| {' | '.join(section.head)} |")
            lines.append(f"|{'---|' * len(section.head)}")
            lines += [f"| {' | '.join(row)} |".replace("\n", " ") for row in section.rows]
            lines.append("")
        if section.picture:
            lines += [f"![{section.title}]({section.picture})", ""]
    return "\n".join(lines)


_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2rem auto; padding: 0 1rem;
  color: #18181b; background: #fafafa; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; }
p { margin: .3rem 0 .8rem; max-width: 46rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #d4d4d8;
  vertical-align: top; }
th { font-weight: 600; font-size: .85rem; color: #52525b; }
img { max-width: 100%; height: auto; border-radius: 4px; }
details table { font-size: .85rem; } summary { cursor: pointer; }
@media (prefers-color-scheme: dark) {
  body { color: #e4e4e7; background: #18181b; } th { color: #a1a1aa; }
  th, td { border-color: #3f3f46; } }
"""
_LONG = 12  # rows of a table that is folded


def _html(title: str, sections: Sequence[_Section], pictures: dict[str, bytes]) -> str:
    """One file with everything in it: it can be sent, and opens without a network."""
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
    ]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        if section.text:
            parts.append(f"<p>{html.escape(section.text)}</p>")
        if section.rows:
            table = _html_table(section)
            if len(section.rows) > _LONG:
                count = len(section.rows)
                table = f"<details><summary>{count} lines</summary>{table}</details>"
            parts.append(table)
        if section.picture:
            data = base64.b64encode(pictures[section.picture]).decode()
            alt = html.escape(section.title, quote=True)
            parts.append(f'<img alt="{alt}" src="data:image/png;base64,{data}">')
    return "\n".join([*parts, "</body></html>\n"])


def _html_table(section: _Section) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in section.head)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
        for row in section.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
