"""Pictures from files to linear light and back.

Whatever Pillow opens becomes linear RGB: orientation and colour profile applied, transparency laid
over a matte, and the reduction to the fit's size done in linear light, where averages of light are
right. All of it in bands of rows, so that a large photograph needs little memory.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps

from ..errors import ImageError, ShapeError

__all__ = ["Photo", "linear_to_srgb", "read_photo", "reduce_linear", "srgb_to_linear", "to_bytes"]

Array = NDArray[Any]

_BAND = 1 << 21  # pixels decoded to float at a time
_MAX_SIDE = 1 << 16


def srgb_to_linear(values: Array) -> Array:
    """The sRGB curve of IEC 61966-2-1, 0..1 to 0..1, in the values' own float type."""
    values = np.asarray(values)
    low = values / 12.92
    high = ((np.maximum(values, 0.04045) + 0.055) / 1.055) ** 2.4
    return np.where(values <= 0.04045, low, high).astype(values.dtype)


def linear_to_srgb(values: Array) -> Array:
    """The inverse of `srgb_to_linear`."""
    values = np.asarray(values)
    low = values * 12.92
    high = 1.055 * np.maximum(values, 0.0031308) ** (1 / 2.4) - 0.055
    return np.where(values <= 0.0031308, low, high).astype(values.dtype)


def to_bytes(linear: Array) -> Array:
    """sRGB bytes of linear light, rounded; what lies outside 0..1 is cut."""
    encoded = linear_to_srgb(np.clip(np.asarray(linear, np.float64), 0.0, 1.0))
    return np.rint(encoded * 255.0).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class Photo:
    """A picture made ready.

    Attributes:
        pixels: Linear RGB, [H, W, 3] float32, C-contiguous.
        original_size: Width and height before the reduction, after orientation, pixels.
    """

    pixels: Array
    original_size: tuple[int, int]


def read_photo(path: str | Path, size: int, *, matte: tuple[int, int, int] = (255,) * 3) -> Photo:
    """Read a picture of any format and mode that Pillow reads.

    Args:
        size: The longest side is reduced to this, pixels; smaller pictures stay as they are.
        matte: sRGB bytes behind what is transparent.
    Raises:
        ImageError: There is no such file, it cannot be decoded, or it is too large to be safe.
    """
    try:
        with warnings.catch_warnings():
            # Pillow warns from 89 million pixels on and refuses from 179; photographs of 100
            # exist, and bands keep our own memory small.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path) as file:
                if max(file.size) > _MAX_SIDE:
                    raise ImageError(
                        f"{path}: expected sides of at most {_MAX_SIDE:,} pixels, got "
                        f"{file.width:,} x {file.height:,}; scale it down first"
                    )
                file.load()
                image = _oriented(file)
                return Photo(_reduced(image, size, matte, path), image.size)
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(
            f"{path}: expected at most {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels, got more "
            f"({error}); scale it down first"
        ) from error
    except FileNotFoundError as error:
        raise ImageError(f"{path}: expected a picture, got no file of that name") from error
    except Exception as error:  # Pillow's decoders raise whatever they trip over
        if isinstance(error, OSError) and error.strerror is not None:
            reason = error.strerror
        else:
            reason = str(error) or type(error).__name__
        raise ImageError(
            f"{path}: expected a whole picture that Pillow can read, got: {reason}; try opening it "
            "in an image viewer, and save it anew as PNG or JPEG"
        ) from error


def reduce_linear(pixels: Array, height: int, width: int) -> Array:
    """Average linear pixels [H, W, 3] over the area of each smaller pixel.

    Returns:
        [height, width, 3], float32.
    Raises:
        ShapeError: Not [H, W, 3], or the size is not between 1 and the picture's own.
    """
    pixels = np.asarray(pixels)
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ShapeError(f"pixels: expected [H, W, 3], got {list(pixels.shape)}")
    if not (1 <= height <= pixels.shape[0] and 1 <= width <= pixels.shape[1]):
        raise ShapeError(
            f"size: expected 1 x 1 to {pixels.shape[1]} x {pixels.shape[0]}, got {width} x {height}"
        )
    return _Reduction(pixels.shape[0], pixels.shape[1], height, width).add(0, pixels).result()


class _Reduction:
    """Area averages of a picture that comes in bands of rows."""

    def __init__(self, rows: int, columns: int, height: int, width: int) -> None:
        self._down = _area_weights(rows, height)
        self._across = _area_weights(columns, width)
        self._sum = np.zeros((height, columns * 3))
        self._columns = columns

    def add(self, first: int, band: Array) -> _Reduction:
        weights = self._down[:, first : first + len(band)]
        touched = np.flatnonzero(weights.any(axis=1))
        rows = slice(touched[0], touched[-1] + 1)
        self._sum[rows] += weights[rows] @ band.reshape(len(band), -1)
        return self

    def result(self) -> Array:
        tall = self._sum.reshape(len(self._sum), self._columns, 3)
        small = np.einsum("wx,hxc->hwc", self._across, tall, optimize=True)
        return np.ascontiguousarray(small, np.float32)


def _area_weights(many: int, few: int) -> Array:
    """[few, many]: the share of each fine pixel in each coarse one; rows sum to 1."""
    edges = np.arange(few + 1) * (many / few)
    fine = np.arange(many)
    overlap = np.minimum(edges[1:, None], fine + 1) - np.maximum(edges[:-1, None], fine)
    weights: Array = np.maximum(overlap, 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def _oriented(image: Image.Image) -> Image.Image:
    """Upright, and in sRGB where a profile says that it is in something else."""
    ImageOps.exif_transpose(image, in_place=True)  # the other way copies those upright already
    profile = image.info.get("icc_profile")
    if profile and image.mode in ("RGB", "RGBA", "CMYK"):
        alpha = image.getchannel("A") if image.mode == "RGBA" else None
        flat = image.convert("RGB") if image.mode == "RGBA" else image
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            target = ImageCms.createProfile("sRGB")
            converted = ImageCms.profileToProfile(flat, source, target, outputMode="RGB")
        except (ImageCms.PyCMSError, OSError):
            return image  # a profile that cannot be used is no reason to refuse the picture
        if converted is not None:
            image = converted
            if alpha is not None:
                image.putalpha(alpha)
    return image


def _reduced(image: Image.Image, size: int, matte: tuple[int, int, int], path: str | Path) -> Array:
    columns, rows = image.size
    if not (rows and columns):
        raise ImageError(f"{path}: expected pixels, got a picture of {columns} x {rows}")
    scale = min(1.0, size / max(rows, columns))
    height, width = max(1, round(rows * scale)), max(1, round(columns * scale))
    reduction = _Reduction(rows, columns, height, width)
    behind = _TABLE[np.array(matte)]
    step = max(1, _BAND // columns)
    for first in range(0, rows, step):
        band = image.crop((0, first, columns, min(rows, first + step)))
        reduction.add(first, _linear(band, behind, path))
    return reduction.result()


def _linear(image: Image.Image, behind: Array, path: str | Path) -> Array:
    """Linear RGB of a whole image, [H, W, 3], whatever its mode."""
    mode = image.mode
    if mode == "F":
        return _grey(_inside(np.asarray(image), 1.0, "floating light", path))
    if mode == "I" or mode.startswith("I;"):
        # 16 bits of grey; Pillow opens some as 32.
        values = _inside(np.asarray(image).astype(np.float64), 65535.0, "grey", path)
        return _grey(srgb_to_linear(values / 65535.0))
    if mode in ("La", "RGBa"):
        image = image.convert({"La": "LA", "RGBa": "RGBA"}[mode])
    if image.has_transparency_data:
        pixels = np.asarray(image.convert("RGBA"))
        opaque = pixels[..., 3:].astype(np.float32) / np.float32(255)
        over: Array = _TABLE[pixels[..., :3]] * opaque + behind * (1 - opaque)
        return over
    lit: Array = _TABLE[np.asarray(image.convert("RGB"))]
    return lit


def _inside(values: Array, most: float, what: str, path: str | Path) -> Array:
    low, high = float(np.min(values)), float(np.max(values))
    if not (low >= 0 and high <= most):  # so written that NaN is refused too
        raise ImageError(
            f"{path}: expected {what} from 0 to {most:g}, got {low:g} to {high:g}; "
            "convert it to 8 or 16 bits"
        )
    return values


def _grey(values: Array) -> Array:
    return np.repeat(values[..., None], 3, axis=2)


_TABLE: Array = srgb_to_linear(np.arange(256) / 255.0).astype(np.float32)
