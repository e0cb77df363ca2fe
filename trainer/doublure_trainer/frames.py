"""Whole frames to rows: sampled on arrival, so that a frame costs no more memory than its rows."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from doublure_bridge import CodecError, Frame
from numpy.typing import NDArray

__all__ = ["rows_from_frame"]


def rows_from_frame(
    frame: Frame,
    rng: np.random.Generator,
    *,
    width: int,
    height: int,
    count: int = 4096,
) -> NDArray[np.float32]:
    """Random pixels of a frame as rows.

    Args:
        frame: As received.
        width: Width that the session declared, pixels.
        height: Height that the session declared, pixels.
        count: Rows wanted; fewer pixels give fewer rows.
    Returns:
        float32 [n, 6]: x, y, t in [-1, 1] (pixel centres, x right, y down), linear r, g, b.
    Raises:
        CodecError: Torn, of another size or encoding than declared; the message says which.
    """
    rows, columns = frame.pixels.shape[:2]
    if (columns, rows) != (width, height):
        raise CodecError(
            "Frame.pixels", expected=f"{width} x {height} as in OpenSession",
            got=f"{columns} x {rows}", next_step="a resized source is another source: open it anew",
        )  # fmt: skip
    if frame.color != "linear":
        raise CodecError("Frame.color", expected="linear", got=repr(frame.color))
    if frame.origin not in ("top-left", "bottom-left"):
        raise CodecError("Frame.origin", expected="top-left or bottom-left", got=repr(frame.origin))
    pixels: Any = frame.pixels  # contiguous, as decoded: a buffer, whatever NumPy's types say
    checksum = zlib.crc32(pixels)
    if checksum != frame.checksum:
        raise CodecError(
            "Frame.checksum", expected=f"{frame.checksum:#010x}", got=f"{checksum:#010x}",
            next_step="the frame is torn: copy it out before the next one is drawn",
        )  # fmt: skip
    total = rows * columns
    picked = rng.integers(0, total, min(count, total))
    row, column = np.divmod(picked, columns)
    out = np.empty((len(picked), 6), dtype=np.float32)
    out[:, 0] = (2 * column + 1) / columns - 1
    out[:, 1] = (2 * row + 1) / rows - 1
    if frame.origin == "bottom-left":
        out[:, 1] *= -1
    out[:, 2] = frame.t
    out[:, 3:] = frame.pixels.reshape(total, -1)[picked, :3]
    return out
