"""What a demo run leaves behind: pictures, a plot, an animation and summary.json."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, features

__all__ = ["QualityTrace", "display", "save_animation", "save_comparison", "save_json", "save_plot"]

Picture = NDArray[np.float32]
"""Linear RGB, [H, W, 3]."""

ERROR_GAIN = 10
"""Displayed differences are this much brighter than they are."""


def display(picture: Picture, white: float) -> NDArray[np.uint8]:
    """Linear RGB to 8-bit sRGB, the same for source and stand-in.

    The curve is Reinhard's with a white point (Reinhard et al. 2002, "Photographic tone
    reproduction", eq. 4): at white = 1 it is the identity, so low dynamic range stays as it is.

    Args:
        picture: Linear RGB, [H, W, 3].
        white: Smallest value shown as white, at least 1.
    Returns:
        sRGB, [H, W, 3].
    """
    c = np.maximum(picture, 0)
    c = np.clip(c * (1 + c / (white * white)) / (1 + c), 0, 1)
    srgb = np.where(c <= 0.0031308, 12.92 * c, 1.055 * np.power(c, 1 / 2.4) - 0.055)
    out: NDArray[np.uint8] = (srgb * 255 + 0.5).astype(np.uint8)
    return out


def save_comparison(
    path: Path,
    rows: Sequence[tuple[str, Picture, Picture]],
    *,
    white: float,
) -> None:
    """A PNG with a row of source | stand-in | error for each (caption, source, stand-in)."""
    height, width = rows[0][1].shape[:2]
    bar = 22
    sheet = Image.new("RGB", (3 * width + 8, len(rows) * (height + bar)), (24, 24, 27))
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(13)
    for i, (caption, source, standin) in enumerate(rows):
        top = i * (height + bar)
        shown = [display(source, white), display(standin, white)]
        difference = np.abs(shown[0].astype(np.int16) - shown[1].astype(np.int16)) * ERROR_GAIN
        shown.append(np.minimum(difference, 255).astype(np.uint8))
        titles = ("source", f"stand-in, {caption}", f"error x {ERROR_GAIN}")
        for column, (title, pixels) in enumerate(zip(titles, shown, strict=True)):
            left = column * (width + 4)
            draw.text((left + 6, top + 3), title, fill=(228, 228, 231), font=font)
            sheet.paste(Image.fromarray(pixels), (left, top + bar))
    _atomic(path, lambda temporary: sheet.save(temporary, "PNG"))


def save_animation(
    path: Path, frames: Sequence[tuple[Picture, Picture]], *, white: float, fps: float
) -> Path:
    """Source and stand-in side by side, as WebP, or as GIF where Pillow has no WebP.

    Returns:
        The path written: `path` with the suffix of its format.
    """
    pictures = [
        Image.fromarray(np.concatenate([display(a, white), display(b, white)], axis=1))
        for a, b in frames
    ]
    webp = features.check("webp")
    path = path.with_suffix(".webp" if webp else ".gif")
    options: dict[str, Any] = {"quality": 88, "method": 2} if webp else {}
    _atomic(
        path,
        lambda temporary: pictures[0].save(
            temporary,
            "WEBP" if webp else "GIF",
            save_all=True,
            append_images=pictures[1:],
            duration=round(1000 / fps),
            loop=0,
            **options,
        ),
    )
    return path


@dataclass(slots=True)
class QualityTrace:
    """Held-out scores over time, as the trainer reported them; seconds since the run began."""

    seconds: list[float] = field(default_factory=list)
    psnr_db: list[float] = field(default_factory=list)
    reload_seconds: list[float] = field(default_factory=list)
    reload_psnr_db: list[float] = field(default_factory=list)
    reload_family: list[str] = field(default_factory=list)


def save_plot(path: Path, trace: QualityTrace, *, title: str, measured_db: float | None) -> None:
    """Quality over time: one dot a hot reload, and the full-frame figure at the end."""
    # The object interface: pyplot would keep global state, and choose a GUI back end.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.step(trace.seconds, trace.psnr_db, where="post", color="#3b82f6", lw=1.5)
    for family, colour in (("grid", "#1d4ed8"), ("compact", "#ea580c")):
        points = [
            (s, d)
            for s, d, f in zip(
                trace.reload_seconds, trace.reload_psnr_db, trace.reload_family, strict=True
            )
            if f == family
        ]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, "o", ms=4, color=colour, label=f"hot reload ({family})")
    if measured_db is not None:
        axes.axhline(measured_db, color="#16a34a", ls="--", lw=1, label="test slices, full frames")
    axes.set(title=title, xlabel="seconds since start", ylabel="tonemapped PSNR, dB")
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")
    _atomic(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))


def save_json(path: Path, data: Any) -> None:
    """Write JSON whole or not at all."""
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    _atomic(path, lambda temporary: temporary.write_text(text))


def _atomic(path: Path, write: Any) -> None:
    """Write beside the target and rename: a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    except OSError as error:
        # A full disk is met while writing, where the system names no file.
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
