"""`scene.json`: a fitted scene as text that people and other programs can read (docs/fitting.md).

Version 1. Numbers are written as the shortest decimals that read back to the same float32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backend import Backend
from ..errors import ImageError, RasterError, SettingError, ShapeError
from ..scene import PARAMS, Kernel, Raster, Scene, Support
from .files import write_text

__all__ = ["FORMAT", "VERSION", "FittedScene", "load_scene", "save_scene"]

Array = NDArray[Any]

FORMAT = "doublure triangles"
VERSION = 1

_MAX_SIDE = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class FittedScene:
    """Triangles that make a picture, at any size.

    Attributes:
        triangles: [T, 10] float32, back to front: x0 y0 x1 y1 x2 y2 r g b a.
        background: Linear RGB, [3] float32.
        sigma: Edge softness, in image widths and heights.
        height: Pixels of the picture that it was fitted to; says its proportions.
        width: Likewise.
        kernel: See `Raster.kernel`.
        support: See `Raster.support`.
    """

    triangles: Array
    background: Array
    sigma: float
    height: int
    width: int
    kernel: Kernel = "sigmoid"
    support: Support = "exact"

    def render(
        self, height: int | None = None, width: int | None = None, *, backend: Backend
    ) -> Array:
        """Draw it.

        Args:
            height: Pixels; that of the fit if None.
            width: Likewise.
            backend: One that takes NumPy arrays.
        Returns:
            Linear RGB, [height, width, 3] float32.
        Raises:
            SettingError: A size that is not from 1 to 65,536.
        """
        height = self.height if height is None else height
        width = self.width if width is None else width
        for name, value in (("height", height), ("width", width)):
            if not 1 <= value <= _MAX_SIDE:
                raise SettingError(f"{name}: expected 1 to {_MAX_SIDE:,} pixels, got {value}")
        count = len(self.triangles)
        scene = Scene(
            np.ascontiguousarray(self.triangles, np.float32)[None],
            np.full((1, count), self.sigma, np.float32),
            np.ascontiguousarray(self.background, np.float32)[None],
            np.array([count], np.int64),
        )
        raster = Raster(height, width, kernel=self.kernel, support=self.support)
        images: Array = np.asarray(backend.forward(scene, raster))
        image: Array = images[0]
        return image


def save_scene(path: str | Path, scene: FittedScene, **about: Any) -> None:
    """Write a scene, whole or not at all.

    Args:
        about: Further keys for people, such as `loss`; readers ignore them.
    Raises:
        SettingError: A key of `about` that the format uses itself.
        OSError: The file cannot be written.
    """
    taken = sorted(set(about) & _KEYS)
    if taken:
        raise SettingError(f"scene.json: expected keys other than its own, got {', '.join(taken)}")
    head = {
        "format": FORMAT,
        "version": VERSION,
        "width": scene.width,
        "height": scene.height,
        "kernel": scene.kernel,
        "support": scene.support,
        "sigma": _plain(np.float32(scene.sigma)),
        "background": [_plain(value) for value in scene.background],
        **about,
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(head[key], allow_nan=False)}," for key in head]
    rows = [json.dumps([_plain(v) for v in row], allow_nan=False) for row in scene.triangles]
    body = ",\n".join(f"    {row}" for row in rows)
    triangles = f"[\n{body}\n  ]" if rows else "[]"
    write_text(Path(path), "\n".join(["{", *lines, f'  "triangles": {triangles}', "}", ""]))


def load_scene(path: str | Path) -> FittedScene:
    """Read what `save_scene` wrote; nothing in the file is trusted.

    Raises:
        ImageError: It is not there, not whole, or not such a scene; the text names the place.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ImageError(f"{path}: expected a scene, got: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ImageError(f"{path}: expected JSON, got something damaged: {error}") from error
    try:
        return _read(data)
    except RasterError as error:
        raise ImageError(f"{path}: {error}") from None


_KEYS = {
    "format", "version", "width", "height", "kernel", "support", "sigma", "background", "triangles"
}  # fmt: skip


def _read(data: Any) -> FittedScene:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise SettingError(f'format: expected "{FORMAT}", got {got!r}; is it another file?')
    if data.get("version") != VERSION or isinstance(data["version"], bool):
        raise SettingError(
            f"version: expected {VERSION}, got {data.get('version')!r}; read it with the release "
            "of doublure that wrote it"
        )
    missing = sorted(_KEYS - data.keys())
    if missing:
        raise SettingError(f"{missing[0]}: expected this key, got a scene without it")
    size = {}
    for key in ("width", "height"):
        value = data[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_SIDE:
            raise SettingError(f"{key}: expected 1 to {_MAX_SIDE:,} pixels, got {_short(value)}")
        size[key] = value
    for key, known in (("kernel", ("sigmoid", "compact")), ("support", ("exact", "bbox6"))):
        if data[key] not in known:
            raise SettingError(f"{key}: expected {' or '.join(known)}, got {_short(data[key])}")
    sigma = _number(data["sigma"], "sigma")
    if not np.float32(sigma) > 0:
        raise SettingError(f"sigma: expected more than 0, got {sigma}")
    if not isinstance(data["triangles"], list):
        raise ShapeError(f"triangles: expected a list, got {_short(data['triangles'])}")
    rows = [_row(row, PARAMS, f"triangles[{i}]") for i, row in enumerate(data["triangles"])]
    return FittedScene(
        np.array(rows, np.float32).reshape(len(rows), PARAMS),
        np.array(_row(data["background"], 3, "background"), np.float32),
        sigma,
        size["height"],
        size["width"],
        data["kernel"],
        data["support"],
    )


def _row(row: Any, length: int, where: str) -> list[float]:
    if not isinstance(row, list) or len(row) != length:
        got = f"{len(row)}" if isinstance(row, list) else _short(row)
        raise ShapeError(f"{where}: expected {length} numbers, got {got}")
    return [_number(value, f"{where}[{i}]") for i, value in enumerate(row)]


def _number(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise SettingError(f"{where}: expected a number, got {_short(value)}")
    if not abs(value) <= 1e30:  # so written that NaN is refused too
        raise SettingError(f"{where}: expected a finite number, got {_short(value)}")
    return float(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain(value: Any) -> float:
    """The double whose decimals are the shortest that give this float32 again."""
    return float(str(np.float32(value)))
