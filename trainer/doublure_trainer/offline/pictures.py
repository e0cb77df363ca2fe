"""Pictures for the report: scattered rows as mosaics, and whole frames of the stand-in."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from .measure import FrameScore, Predictor

__all__ = ["ERROR_GAIN", "display", "frame_sheet", "mosaic", "sweep_strip", "white_point"]

ERROR_GAIN = 10
"""Displayed differences are this much brighter than they are."""

_SIDE = 224  # pixels of a picture's longer side
_MOST_SAMPLES = 8192  # of a frame; more are not seen at this size
_GAP = 4
_BAR = 22
_BACK, _INK = (24, 24, 27), (228, 228, 231)

Picture = NDArray[np.uint8]


def display(colour: NDArray[np.floating[Any]], white: float) -> Picture:
    """Linear RGB, [..., 3], to 8-bit sRGB, the same for source and stand-in.

    Reinhard's curve with a white point (Reinhard et al. 2002, "Photographic tone reproduction",
    eq. 4): at white = 1 it is the identity, so low dynamic range stays as it is.
    """
    c = np.maximum(np.asarray(colour, dtype=np.float64), 0.0)
    c = np.clip(c * (1 + c / (white * white)) / (1 + c), 0.0, 1.0)
    srgb = np.where(c <= 0.0031308, 12.92 * c, 1.055 * np.power(c, 1 / 2.4) - 0.055)
    shown: Picture = (srgb * 255 + 0.5).astype(np.uint8)
    return shown


def white_point(colours: NDArray[np.floating[Any]]) -> float:
    """The colour shown as white: the brightest there is, at least 1."""
    return max(1.0, float(colours.max()))


def mosaic(points: NDArray[np.floating[Any]], size: tuple[int, int]) -> NDArray[np.int64]:
    """The number of the nearest of scattered points, for each pixel of a picture.

    Args:
        points: x, y in [-1, 1], [n, 2].
        size: Width and height.
    Returns:
        int64 [height, width].
    """
    width, height = size
    scale = np.array([width / 2, height / 2], dtype=np.float32)
    where = (np.asarray(points, dtype=np.float32) + 1) * scale
    x = np.arange(width, dtype=np.float32) + 0.5
    nearest = np.empty((height, width), dtype=np.int64)
    # |p - q|^2 without |p|^2, which is the same for all candidates.
    norms = np.square(where).sum(axis=1)
    for row in range(height):
        pixels = np.stack([x, np.full_like(x, row + 0.5)], axis=1)
        # Points far above and below a row cannot be the nearest; look at a band that has some.
        band = _band(where[:, 1], row + 0.5, height)
        distance = norms[band] - 2 * (pixels @ where[band].T)
        nearest[row] = band[np.argmin(distance, axis=1)]
    return nearest


def _band(y: NDArray[np.float32], row: float, height: int) -> NDArray[np.int64]:
    reach = 6.0 * height / max(1.0, len(y) ** 0.5)
    while True:
        band = np.flatnonzero(np.abs(y - row) <= reach)
        if len(band) >= min(len(y), 64) or reach > height:
            return band if len(band) else np.arange(len(y))
        reach *= 2


def frame_sheet(
    frames: Sequence[FrameScore],
    predict: Predictor,
    *,
    resolution: tuple[int, int],
    white: float,
) -> bytes:
    """A PNG with a line for each frame: source, stand-in and error at the same rows, and a render.

    Each row's colour fills the pixels nearest to it, since a dataset holds scattered pixels only;
    the last picture is the stand-in everywhere.
    """
    width, height = _picture_size(resolution)
    columns = 4
    sheet = Image.new(
        "RGB",
        (columns * width + (columns - 1) * _GAP, len(frames) * (height + _BAR)),
        _BACK,
    )
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(13)
    for i, item in enumerate(frames):
        rows = item.frame.rows[:_MOST_SAMPLES]
        nearest = mosaic(rows[:, :2], (width, height))
        source = display(rows[:, 3:], white)
        standin = display(predict(rows[:, :3]), white)
        error = np.abs(source.astype(np.int16) - standin.astype(np.int16)) * ERROR_GAIN
        shown = [
            source[nearest],
            standin[nearest],
            np.minimum(error, 255).astype(np.uint8)[nearest],
            display(predict.image(width, height, item.frame.t), white),
        ]
        titles = (
            f"source at {item.frame.parameter:.4g}, {len(rows)} pixels",
            f"stand-in, {item.scores.psnr_db:.1f} dB",
            f"error x {ERROR_GAIN}",
            "stand-in, every pixel",
        )
        top = i * (height + _BAR)
        for column, (title, pixels) in enumerate(zip(titles, shown, strict=True)):
            left = column * (width + _GAP)
            draw.text((left + 6, top + 3), title, fill=_INK, font=font)
            sheet.paste(Image.fromarray(pixels), (left, top + _BAR))
    return _png(sheet)


def sweep_strip(
    predict: Predictor,
    parameter: tuple[float, float],
    *,
    resolution: tuple[int, int],
    white: float,
    count: int = 6,
) -> bytes:
    """A PNG of the stand-in over the whole range of the parameter, evenly spaced."""
    width, height = _picture_size(resolution, 150)
    sheet = Image.new("RGB", (count * width + (count - 1) * _GAP, height + _BAR), _BACK)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(13)
    for i, t in enumerate(np.linspace(-1.0, 1.0, count)):
        left = i * (width + _GAP)
        value = parameter[0] + (float(t) + 1) / 2 * (parameter[1] - parameter[0])
        draw.text((left + 6, 3), f"{value:.4g}", fill=_INK, font=font)
        picture = display(predict.image(width, height, float(t)), white)
        sheet.paste(Image.fromarray(picture), (left, _BAR))
    return _png(sheet)


def _picture_size(resolution: tuple[int, int], side: int = _SIDE) -> tuple[int, int]:
    width, height = resolution
    scale = side / max(width, height)
    return max(8, round(width * scale)), max(8, round(height * scale))


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
