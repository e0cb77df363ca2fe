"""What a fit leaves for people: pictures, an animation, a plot and a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .files import write_text, write_whole
from .fitter import psnr_db
from .pictures import to_bytes

__all__ = ["Animation", "save_animation", "save_losses", "save_picture", "save_plot"]

Array = NDArray[Any]
Animation = Literal["gif", "apng", "none"]

_HOLD_MS = 1500  # how long the last frame stays


def save_picture(path: Path, linear: Array) -> None:
    """Write linear RGB, [H, W, 3], as an sRGB PNG."""
    image = Image.fromarray(to_bytes(linear))
    write_whole(path, lambda temporary: image.save(temporary, "PNG"))


def save_animation(path: Path, frames: Sequence[Path], kind: Animation, *, fps: float) -> None:
    """Put picture files of one size together; the last one is held.

    Args:
        kind: `gif` plays everywhere in 256 colours a frame; `apng` keeps all of them.
    """
    pictures = []
    for frame in frames:
        with Image.open(frame) as image:
            pictures.append(image.convert("RGB"))
    each = max(20, round(1000 / fps))  # browsers slow down what is faster than 20 ms
    durations = [each] * (len(pictures) - 1) + [_HOLD_MS]
    if kind == "gif":
        pictures = [
            image.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
            for image in pictures
        ]
    write_whole(
        path,
        lambda temporary: pictures[0].save(
            temporary,
            "GIF" if kind == "gif" else "PNG",
            save_all=True,
            append_images=pictures[1:],
            duration=durations,
            loop=0,
        ),
    )


def save_losses(
    path: Path, losses: Sequence[float], sigmas: Sequence[float], sizes: Sequence[int]
) -> None:
    """Write a CSV table, one row an iteration: iteration, size, sigma, loss, psnr_db, best_loss.

    Args:
        sizes: Longest side of what each loss was measured on; the best is that of one size.
    """
    lines = ["iteration,size,sigma,loss,psnr_db,best_loss"]
    best, before = float("inf"), 0
    for iteration, (loss, sigma, size) in enumerate(zip(losses, sigmas, sizes, strict=True)):
        best = min(best, loss) if size == before else loss
        before = size
        lines.append(f"{iteration},{size},{sigma:.9g},{loss:.9g},{psnr_db(loss):.4f},{best:.9g}")
    write_text(path, "\n".join([*lines, ""]))


def save_plot(
    path: Path,
    losses: Sequence[float],
    sigmas: Sequence[float],
    sizes: Sequence[int],
    *,
    best: int,
    title: str,
) -> None:
    """Draw loss and sigma over the iterations as PNG.

    Args:
        sizes: Longest side of what each loss was measured on; where it changes, so does the loss.
        best: The iteration that was kept; negative for none.
    """
    # The object interface: pyplot would keep global state, and choose a GUI back end.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    values = np.where(np.isfinite(losses), losses, np.nan)
    shown = values > 0
    axes.plot(np.flatnonzero(shown), values[shown], color="#1d4ed8", lw=1.2, label="loss")
    if shown.any():
        axes.set_yscale("log")
    if best >= 0 and values[best] > 0:
        text = f"kept: {losses[best]:.3g}, {psnr_db(losses[best]):.2f} dB"
        axes.plot([best], [values[best]], "o", ms=5, color="#16a34a", label=text)
    for at in range(1, len(sizes)):
        if sizes[at] != sizes[at - 1]:
            axes.axvline(at, color="#52525b", lw=0.8, ls=":", label=f"at {sizes[at]} px from here")
    axes.set(title=title, xlabel="iteration", ylabel="mean squared error, linear light")
    axes.grid(alpha=0.25, which="both")
    soft = axes.twinx()
    soft.plot(range(len(sigmas)), sigmas, color="#ea580c", lw=1, ls="--", label="sigma")
    soft.set(ylabel="sigma, image widths", ylim=(0, None))
    handles = [h for a in (axes, soft) for h in a.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, loc="upper right")
    write_whole(path, lambda temporary: figure.savefig(temporary, format="png", dpi=110))
