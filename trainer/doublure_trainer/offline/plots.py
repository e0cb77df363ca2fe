"""Plots for the report: the held-out scores over steps, and every frame's score over t."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from doublure_bridge.scores import Scores
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..slices import HELD_OUT, TEST, TRAIN
from .measure import FrameScore

__all__ = ["plot_frames", "plot_training"]

# The object interface throughout: pyplot would keep global state and choose a GUI back end.
_COLOURS = {"grid": "#1d4ed8", "compact": "#ea580c"}
_HELD_OUT, _TEST, _TRAIN = "#3b82f6", "#16a34a", "#a1a1aa"
_DPI = 130


def plot_training(
    history: Sequence[Mapping[str, Any]], *, test: Scores | None, best_step: int
) -> bytes:
    """A PNG of the three held-out scores over steps; the test scores as lines at the end."""
    figure = Figure(figsize=(7.6, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 1, sharex=True, height_ratios=(2.2, 1, 1))
    panels = (
        ("psnr_db", "tonemapped PSNR, dB", "linear", test and test.psnr_db),
        ("relmse", "relative MSE", "log", test and test.relmse),
        ("peak_ratio", "peak ratio", "linear", test and test.peak_ratio),
    )
    scored = [entry for entry in history if entry.get("psnr_db") is not None]
    for panel, (key, label, scale, final) in zip(axes, panels, strict=True):
        known = [entry for entry in scored if entry.get(key) is not None]
        panel.plot(
            [e["step"] for e in known], [e[key] for e in known], color=_HELD_OUT, lw=1.2, alpha=0.7
        )
        for family in dict.fromkeys(entry["family"] for entry in known):
            for kept, marker in ((True, "o"), (False, "x")):
                chosen = [e for e in known if e["family"] == family and e["kept"] == kept]
                if chosen:
                    panel.plot(
                        [e["step"] for e in chosen],
                        [e[key] for e in chosen],
                        marker,
                        ms=4,
                        color=_COLOURS.get(family, "#7c3aed"),
                        label=f"{family}, {'kept' if kept else 'not kept'}",
                    )
        if final is not None:
            panel.axhline(final, color=_TEST, ls="--", lw=1, label="test, at the end")
        panel.axvline(best_step, color="#71717a", ls=":", lw=1)
        panel.set(ylabel=label, yscale=scale)
        panel.grid(alpha=0.25)
    axes[2].axhline(1.0, color="#71717a", lw=0.8)
    axes[0].set_title("Held-out frames during training")
    axes[0].legend(loc="lower right", fontsize=8)
    axes[2].set_xlabel("steps (dotted: the step of the weights)")
    return _png(figure)


def plot_frames(frames: Sequence[FrameScore]) -> bytes:
    """A PNG of every frame's PSNR over the source's parameter."""
    figure = Figure(figsize=(7.6, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    groups = (
        (TRAIN, "training frames", _TRAIN, "."),
        (HELD_OUT, "held-out frames", _HELD_OUT, "o"),
        (TEST, "test frames", _TEST, "D"),
    )
    for kind, label, colour, marker in groups:
        chosen = [item for item in frames if item.frame.kind == kind]
        if chosen:
            axes.plot(
                [item.frame.parameter for item in chosen],
                [item.scores.psnr_db for item in chosen],
                marker,
                ms=5,
                ls="-" if kind == TRAIN else "none",
                lw=0.8,
                color=colour,
                label=f"{label} ({len(chosen)})",
            )
    axes.set(
        title="Every frame, with the final weights",
        xlabel="the source's parameter",
        ylabel="tonemapped PSNR, dB",
    )
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()
