"""Sampling and checking of captured pixels.

The render thread only gathers raw pixels into the ring (`plan_gather`); positions, colours and
refusals are worked out from them on the sender thread (`FrameReader`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from .errors import CaptureError
from .ring import Slot

__all__ = ["FrameReader", "check_colour", "check_rows", "plan_gather"]

_ORIGINS = {"top-left": False, "bottom-left": True}
_WANT = "float16|float32 [{h}, {w}, 3|4]"
_SHAPE_LATER = "when the size has changed, call session.source_changed with the new source"
# Alpha of opaque draws comes back as 1 give or take a blend's rounding; 1e-3 is half a step of
# the coarsest format accepted (float16 near 1) and far from any visible transparency.
_ALPHA_TOLERANCE = 1e-3
# Rows carry t in float32 and may have computed it in a shader; a neighbouring frame of a
# thousand-frame sweep would be off by 2e-3.
_T_TOLERANCE = 2e-4
# Positions are pixel centres, computed in float32 on some GPU.
_EDGE = 1.0 + 1e-5


def check_colour(origin: str, color: str) -> bool:
    """Whether row 0 is the bottom one.

    Raises:
        CaptureError: Unknown origin or colour.
    """
    if color != "linear":
        raise CaptureError(
            "capture color", expected="'linear'", got=repr(color),
            next_step="decode it to linear light first; nothing is guessed",
        )  # fmt: skip
    try:
        return _ORIGINS[origin]
    except (KeyError, TypeError):
        known = " or ".join(map(repr, _ORIGINS))
        raise CaptureError("capture origin", expected=known, got=repr(origin)) from None


def plan_gather(
    pixels: Any, width: int, height: int
) -> tuple[NDArray[Any], tuple[str, int], bool, int]:
    """How to take pixels out of a whole frame without copying it.

    Args:
        pixels: Linear float16 or float32 [height, width, 3|4]: contiguous, upside down (a view
            with [::-1]), or with padded rows.
    Returns:
        The memory as [n, channels] in its own order; the slot's layout; whether memory order is
        upside down with respect to the array; pixels from one row of memory to the next.
    Raises:
        CaptureError: Another type, dtype, size or memory layout.
    """
    if not isinstance(pixels, np.ndarray):
        raise CaptureError(
            "capture pixels", expected="a NumPy array", got=type(pixels).__name__,
            next_step="read the frame back first, for example with numpy.frombuffer",
        )  # fmt: skip
    shape = pixels.shape
    dtype = pixels.dtype
    kind = dtype.char
    if kind not in "ef" or not dtype.isnative or len(shape) != 3 or shape[2] not in (3, 4):
        raise CaptureError(
            "capture pixels", expected=_WANT.format(h=height, w=width),
            got=f"{dtype} {list(shape)}", next_step="pass linear float pixels",
        )  # fmt: skip
    if shape[0] != height or shape[1] != width:
        raise CaptureError(
            "capture pixels", expected=_WANT.format(h=height, w=width),
            got=f"{dtype} {list(shape)}", next_step=_SHAPE_LATER,
        )  # fmt: skip
    channels = shape[2]
    layout = (kind, channels)
    if pixels.flags.c_contiguous:
        return pixels.reshape(-1, channels), layout, False, width
    upside_down = pixels.strides[0] < 0
    if upside_down:
        pixels = pixels[::-1]
    size = dtype.itemsize * channels
    row, column, value = pixels.strides
    if value != dtype.itemsize or column != size or row % size or row < width * size:
        raise CaptureError(
            "capture pixels", expected="pixels side by side in memory",
            got=f"strides {pixels.strides} for {dtype} {list(shape)}",
            next_step="pass the whole RGBA array, or numpy.ascontiguousarray(pixels)",
        )  # fmt: skip
    pitch = row // size
    count = (height - 1) * pitch + width
    return as_strided(pixels, (count, channels), (size, value)), layout, upside_down, pitch


def check_rows(rows: Any, capacity: int) -> memoryview:
    """Sampled rows as bytes to copy.

    Raises:
        CaptureError: Not a C-contiguous float32 [n, 6] with 1 <= n <= `capacity`.
    """
    if not isinstance(rows, np.ndarray):
        raise CaptureError("capture rows", expected="a NumPy array", got=type(rows).__name__)
    shape = rows.shape
    if rows.dtype.char != "f" or not rows.dtype.isnative or len(shape) != 2 or shape[1] != 6:
        raise CaptureError(
            "capture rows", expected="float32 [n, 6]: x, y, t in [-1, 1], then linear r, g, b",
            got=f"{rows.dtype} {list(shape)}", next_step="pass linear float rows",
        )  # fmt: skip
    if not 1 <= shape[0] <= capacity:
        raise CaptureError(
            "capture rows", expected=f"1..{capacity} rows", got=shape[0],
            next_step="raise rows_per_frame, or sample fewer pixels",
        )  # fmt: skip
    if not rows.flags.c_contiguous:
        raise CaptureError(
            "capture rows", expected="a C-contiguous array", got=f"strides {rows.strides}",
            next_step="pass numpy.ascontiguousarray(rows)",
        )  # fmt: skip
    return rows.data.cast("B")


class FrameReader:
    """The sender thread's side: index tables in, checked rows out. Not for two threads.

    Args:
        width: Pixels of the source.
        height: Pixels of the source.
        gathered: Pixels to take from a whole frame.
        rows: Capacity of a slot in rows.
        seed: Of the sampling positions.
    """

    def __init__(self, width: int, height: int, gathered: int, rows: int, *, seed: int = 0) -> None:
        self.width = width
        self.height = height
        self._random = np.random.default_rng(seed)
        self._strata = np.arange(gathered, dtype=np.float64)
        self._scratch = np.empty(gathered, np.float64)
        self._rows = np.empty((rows, 6), np.float32)
        # Pixel centres: column i of N lies at (2i + 1)/N - 1.
        self._x = ((2.0 * np.arange(width) + 1.0) / width - 1.0).astype(np.float32)
        self._y = ((2.0 * np.arange(height) + 1.0) / height - 1.0).astype(np.float32)

    def refill(self, slot: Slot) -> None:
        """Fresh sampling positions: one pixel drawn uniformly in each of n equal strata.

        Every pixel is as likely as any other, frame by frame and over frames; the order of memory
        keeps the gather on the render thread friendly to its caches.
        """
        pixels = self.width * self.height
        self._random.random(out=self._scratch)
        self._scratch += self._strata
        self._scratch *= pixels / len(self._strata)
        # Rounding may carry the last stratum to the end exactly.
        np.minimum(self._scratch, pixels - 1, out=self._scratch)
        slot.index[:] = self._scratch

    def read(self, slot: Slot, low: float, high: float) -> NDArray[np.float32]:
        """The slot's rows, checked; valid until the next call or the slot's release.

        Args:
            slot: A published slot.
            low: Raw parameter at t = -1, for the texts.
            high: Raw parameter at t = 1.
        Raises:
            CaptureError: A value that is not finite, or not opaque, with the pixel's place.
        """
        place = f"frame {slot.sequence} at t = {low + (slot.t + 1) * 0.5 * (high - low):.6g}"
        if slot.layout is None:
            rows = slot.rows[: slot.count]
            self._check_positions(rows, slot.t, place)
        else:
            rows = self._assemble(slot, place)
        finite = np.isfinite(rows[:, 3:])
        if not finite.all():
            row, channel = np.argwhere(~finite)[0]
            bad = rows[row, 3 + channel]
            raise CaptureError(
                f"{place}: pixel {self._pixel(rows[row])}", expected="finite linear colour",
                got=f"{bad} in {'rgb'[channel]}", next_step="look for a division or a square root",
            )  # fmt: skip
        return rows

    def _assemble(self, slot: Slot, place: str) -> NDArray[np.float32]:
        assert slot.layout is not None
        pixels = slot.pixels[slot.layout][: slot.count]
        line, column = np.divmod(slot.index[: slot.count], self.width)
        if slot.flipped:
            line = self.height - 1 - line
        rows = self._rows[: slot.count]
        # "clip" because "raise" would make numpy buffer the output.
        np.take(self._x, column, out=rows[:, 0], mode="clip")
        np.take(self._y, line, out=rows[:, 1], mode="clip")
        rows[:, 2] = slot.t
        rows[:, 3:] = pixels[:, :3]
        if pixels.shape[1] == 4:
            alpha = pixels[:, 3]
            # Written so that a NaN counts as wrong.
            wrong = ~(np.abs(alpha.astype(np.float32) - 1.0) <= _ALPHA_TOLERANCE)
            if wrong.any():
                row = int(np.argmax(wrong))
                raise CaptureError(
                    f"{place}: pixel {self._pixel(rows[row])}", expected="alpha 1 (opaque)",
                    got=f"alpha {alpha[row]:.6g}",
                    next_step="draw over an opaque background, or pass three channels",
                )  # fmt: skip
        return rows

    def _check_positions(self, rows: NDArray[np.float32], t: float, place: str) -> None:
        inside = np.abs(rows[:, :3]) <= _EDGE
        if not inside.all():
            row, axis = np.argwhere(~inside)[0]
            raise CaptureError(
                f"{place}: row {row}", expected="x, y, t in [-1, 1]",
                got=f"{'xyt'[axis]} = {rows[row, axis]:.6g}",
                next_step="normalise: column i of N is at (2i + 1)/N - 1",
            )  # fmt: skip
        off = np.abs(rows[:, 2] - np.float32(t)) > _T_TOLERANCE
        if off.any():
            row = int(np.argmax(off))
            raise CaptureError(
                f"{place}: row {row}", expected=f"t = {t:.6g}, as the frame says",
                got=f"t = {rows[row, 2]:.6g}", next_step="hand rows over with their own frame's t",
            )  # fmt: skip

    def _pixel(self, row: NDArray[np.float32]) -> str:
        """Column and line of a row's pixel, from the top left, for people."""
        column = round((float(row[0]) + 1) * self.width / 2 - 0.5)
        line = round((float(row[1]) + 1) * self.height / 2 - 0.5)
        return f"({column}, {line})"
