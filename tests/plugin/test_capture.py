"""Sampling: positions, origins, layouts, unbiasedness, and every refusal's text."""

from typing import Any

import numpy as np
import pytest
from doublure_plugin import CaptureError
from doublure_plugin.capture import FrameReader, check_colour, check_rows, plan_gather
from doublure_plugin.ring import Ring, Slot
from numpy.typing import NDArray

WIDTH, HEIGHT = 24, 10


def gradient(kind: Any = np.float32, channels: int = 4) -> NDArray[Any]:
    """A frame whose colour says where its pixel is: r = column, g = line from the top."""
    pixels = np.ones((HEIGHT, WIDTH, channels), kind)
    pixels[..., 0] = np.arange(WIDTH)
    pixels[..., 1] = np.arange(HEIGHT)[:, None]
    pixels[..., 2] = 0.5
    return pixels


def read(
    pixels: NDArray[Any], *, origin: str = "top-left", rows: int = 64, t: float = 0.25
) -> NDArray[np.float32]:
    """What the sender would send for a whole frame."""
    slot = Ring(1, rows, min(rows, WIDTH * HEIGHT)).slots[0]
    reader = FrameReader(WIDTH, HEIGHT, len(slot.index), rows)
    reader.refill(slot)
    fill(slot, pixels, origin, t)
    return reader.read(slot, 0.0, 10.0).copy()


def fill(slot: Slot, pixels: NDArray[Any], origin: str, t: float) -> None:
    memory, layout, upside_down, pitch = plan_gather(pixels, WIDTH, HEIGHT)
    index = slot.index + slot.index // WIDTH * (pitch - WIDTH)
    memory.take(index, 0, slot.pixels[layout], "clip")
    slot.layout, slot.count, slot.t = layout, len(index), t
    slot.flipped = check_colour(origin, "linear") != upside_down


def expected(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """The positions that the colours of `gradient` stand for."""
    return np.stack(
        [(2 * rows[:, 3] + 1) / WIDTH - 1, (2 * rows[:, 4] + 1) / HEIGHT - 1], axis=1
    ).astype(np.float32)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("channels", [3, 4])
def test_rows_hold_pixel_centres_and_their_colours(kind: Any, channels: int) -> None:
    rows = read(gradient(kind, channels))
    assert rows.dtype == np.float32
    assert rows.shape == (64, 6)
    assert rows[:, :2] == pytest.approx(expected(rows), abs=1e-6)
    assert (rows[:, 2] == np.float32(0.25)).all()
    assert (rows[:, 5] == 0.5).all()


def test_the_corner_pixel_is_half_a_texel_inside() -> None:
    rows = read(gradient(), rows=WIDTH * HEIGHT)
    corner = rows[(rows[:, 3] == 0) & (rows[:, 4] == 0)][0]
    assert corner[:2] == pytest.approx([1 / WIDTH - 1, 1 / HEIGHT - 1])


@pytest.mark.parametrize("channels", [3, 4])
def test_bottom_left_frames_are_turned_over(channels: int) -> None:
    upside_down = np.ascontiguousarray(gradient(channels=channels)[::-1])
    rows = read(upside_down, origin="bottom-left")
    assert rows[:, :2] == pytest.approx(expected(rows), abs=1e-6)


def test_a_flipped_view_is_the_image_it_shows() -> None:
    stored = np.ascontiguousarray(gradient()[::-1])
    rows = read(stored[::-1])
    assert rows[:, :2] == pytest.approx(expected(rows), abs=1e-6)
    rows = read(gradient()[::-1], origin="bottom-left")
    assert rows[:, :2] == pytest.approx(expected(rows), abs=1e-6)


def test_padded_rows_are_skipped() -> None:
    padded = np.full((HEIGHT, WIDTH + 8, 4), np.nan, np.float32)
    padded[:, :WIDTH] = gradient()
    for view, origin in ((padded[:, :WIDTH], "top-left"), (padded[::-1, :WIDTH], "bottom-left")):
        rows = read(view, origin=origin)
        assert rows[:, :2] == pytest.approx(expected(rows), abs=1e-6)


def test_small_frames_give_every_pixel_once() -> None:
    rows = read(gradient(), rows=4096)
    assert len(rows) == WIDTH * HEIGHT
    assert len(np.unique(rows[:, :2], axis=0)) == WIDTH * HEIGHT


def test_every_pixel_is_as_likely_as_any_other() -> None:
    """Also where the strata do not divide the frame evenly: 240 pixels in 28."""
    ring = Ring(1, 28, 28)
    slot = ring.slots[0]
    reader = FrameReader(WIDTH, HEIGHT, 28, 28, seed=7)
    counts = np.zeros(WIDTH * HEIGHT)
    frames = 6000
    for _ in range(frames):
        reader.refill(slot)
        assert (np.diff(slot.index) >= 0).all()
        np.add.at(counts, slot.index, 1)
    mean = frames * 28 / (WIDTH * HEIGHT)
    # Of 240 binomial counts with this mean, none strays more than 5 standard deviations.
    print("seed 7, counts", counts.min(), counts.max(), "mean", mean)
    assert (np.abs(counts - mean) < 5 * mean**0.5).all()


def test_a_value_that_is_not_finite_is_placed() -> None:
    pixels = gradient()
    pixels[3, 17, 1] = np.nan
    with pytest.raises(CaptureError, match=r"pixel \(17, 3\): expected finite.*nan in g"):
        read(pixels, rows=4096)
    pixels[3, 17, 1] = -np.inf
    with pytest.raises(CaptureError, match=r"frame 0 at t = 6.25: pixel \(17, 3\).*-inf in g"):
        read(pixels, rows=4096)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.01, np.nan])
def test_transparency_is_placed(alpha: float) -> None:
    pixels = gradient()
    pixels[9, 0, 3] = alpha
    text = r"pixel \(0, 9\): expected alpha 1 \(opaque\), got alpha.*three channels"
    with pytest.raises(CaptureError, match=text):
        read(pixels, rows=4096)


def test_alpha_off_by_a_rounding_is_opaque() -> None:
    pixels = gradient(np.float16)
    pixels[..., 3] = 0.9995
    assert len(read(pixels)) == 64


def test_hdr_and_negative_values_pass_unclamped() -> None:
    pixels = gradient()
    pixels[..., 2] = 40000.0
    pixels[..., 1] = -0.25
    rows = read(pixels)
    assert (rows[:, 5] == 40000.0).all()
    assert (rows[:, 4] == -0.25).all()


@pytest.mark.parametrize(
    ("pixels", "text"),
    [
        (
            np.zeros((HEIGHT, WIDTH, 3), np.uint8),
            "capture pixels: expected float16|float32 [10, 24, 3|4], got uint8 [10, 24, 3]; "
            "pass linear float pixels",
        ),
        (np.zeros((HEIGHT, WIDTH, 4), np.float64), "got float64 [10, 24, 4]"),
        (np.zeros((HEIGHT, WIDTH, 4), ">f4"), "got >f4 [10, 24, 4]"),
        (np.zeros((HEIGHT, WIDTH), np.float32), "got float32 [10, 24]"),
        (np.zeros((HEIGHT, WIDTH, 2), np.float32), "got float32 [10, 24, 2]"),
        (np.zeros((HEIGHT, 25, 4), np.float32), "call session.source_changed"),
        ([[1.0]], "expected a NumPy array, got list"),
        (np.zeros((HEIGHT, WIDTH, 4), np.float32)[:, :, :3], "pass the whole RGBA array"),
        (np.zeros((HEIGHT, WIDTH * 2, 4), np.float32)[:, ::2], "side by side in memory"),
        (np.zeros((WIDTH, HEIGHT, 4), np.float32).transpose(1, 0, 2), "side by side in memory"),
        (np.broadcast_to(np.float32(1), (HEIGHT, WIDTH, 4)), "side by side in memory"),
    ],
)
def test_wrong_pixels_are_refused_by_name(pixels: Any, text: str) -> None:
    with pytest.raises(CaptureError) as caught:
        plan_gather(pixels, WIDTH, HEIGHT)
    assert text in str(caught.value)


def test_unknown_origin_and_colour_are_named() -> None:
    with pytest.raises(CaptureError, match="origin: expected 'top-left' or 'bottom-left', got 'up"):
        check_colour("upside", "linear")
    with pytest.raises(CaptureError, match="color: expected 'linear', got 'srgb'"):
        check_colour("top-left", "srgb")


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (np.zeros((4, 6), np.float64), "expected float32 [n, 6]"),
        (np.zeros((4, 5), np.float32), "got float32 [4, 5]"),
        (np.zeros((0, 6), np.float32), "expected 1..8 rows, got 0"),
        (np.zeros((9, 6), np.float32), "expected 1..8 rows, got 9; raise rows_per_frame"),
        (np.zeros((6, 4), np.float32).T, "numpy.ascontiguousarray"),
        ("rows", "expected a NumPy array, got str"),
    ],
)
def test_wrong_rows_are_refused_by_name(rows: Any, text: str) -> None:
    with pytest.raises(CaptureError) as caught:
        check_rows(rows, 8)
    assert text in str(caught.value)


def read_rows(rows: NDArray[np.float32], t: float) -> NDArray[np.float32]:
    slot = Ring(1, 16, 16).slots[0]
    slot.bytes[: rows.nbytes] = check_rows(rows, 16)
    slot.count, slot.t = len(rows), t
    return FrameReader(WIDTH, HEIGHT, 16, 16).read(slot, -1.0, 1.0)


def test_sampled_rows_pass_as_they_are() -> None:
    rows = np.random.default_rng(3).uniform(-1, 1, (16, 6)).astype(np.float32)
    rows[:, 2] = 0.5
    assert (read_rows(rows, 0.5) == rows).all()


def test_sampled_rows_with_wrong_positions_are_refused() -> None:
    rows = np.zeros((4, 6), np.float32)
    rows[2, 0] = 1.5
    with pytest.raises(CaptureError, match=r"row 2: expected x, y, t in \[-1, 1\], got x = 1.5"):
        read_rows(rows, 0.0)
    rows[2, 0] = np.nan
    with pytest.raises(CaptureError, match=r"row 2.*got x = nan"):
        read_rows(rows, 0.0)
    rows[2, 0] = 0
    rows[3, 2] = 0.01
    with pytest.raises(
        CaptureError, match=r"row 3: expected t = 0, as the frame says, got t = 0\.01"
    ):
        read_rows(rows, 0.0)
