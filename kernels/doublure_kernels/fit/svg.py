"""A fitted scene as SVG: the same triangles in the same order, for editors and browsers.

An approximation. Edges are hard where ours are soft, and opacities are blended in sRGB where ours
are blended in linear light: browsers and the common libraries do so whatever `color-interpolation`
says (docs/fitting.md), so nothing is gained by writing it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .files import write_text
from .pictures import to_bytes
from .scene_file import FittedScene

__all__ = ["save_svg", "to_svg"]


def to_svg(scene: FittedScene, height: int | None = None, width: int | None = None) -> str:
    """SVG 1.1 text: the background, then one polygon a triangle, back to front.

    Args:
        height: Of the viewport, pixels; that of the fit if None.
        width: Likewise.
    """
    height = scene.height if height is None else height
    width = scene.width if width is None else width
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">',
        f'<rect width="{width}" height="{height}" fill="{_colour(scene.background)}"/>',
    ]
    scale = np.array([width, height] * 3, np.float64)
    for row in scene.triangles:
        x = [_digits(value) for value in row[:6] * scale]
        points = f"{x[0]},{x[1]} {x[2]},{x[3]} {x[4]},{x[5]}"
        opacity = _digits(min(max(float(row[9]), 0.0), 1.0), 4)
        lines.append(
            f'<polygon points="{points}" fill="{_colour(row[6:9])}" fill-opacity="{opacity}"/>'
        )
    return "\n".join([*lines, "</svg>", ""])


def save_svg(
    path: str | Path, scene: FittedScene, height: int | None = None, width: int | None = None
) -> None:
    """Write `to_svg` whole or not at all."""
    write_text(Path(path), to_svg(scene, height, width))


def _colour(linear: Any) -> str:
    red, green, blue = to_bytes(linear)
    return f"#{red:02x}{green:02x}{blue:02x}"


def _digits(value: float, places: int = 3) -> str:
    text = f"{float(value):.{places}f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
