"""The scenes of the embedded host: expensive shaders with one parameter, each in WGSL and NumPy."""

from __future__ import annotations

from .cloud import CLOUD
from .dark import DARK
from .edges import EDGES
from .fbm import FBM
from .flash import FLASH
from .kaleidoscope import KALEIDOSCOPE
from .mandelbrot import MANDELBROT
from .moire import MOIRE
from .negative import NEGATIVE
from .noise import NOISE
from .ocean import OCEAN
from .plasma import PLASMA
from .scene import Scene, pixel_centres
from .sdf import SDF
from .step import STEP
from .sun import SUN

__all__ = ["SCENES", "Scene", "choose_scenes", "pixel_centres"]

_MAIN = (PLASMA, FBM, SDF, EDGES, SUN)
_MORE = (CLOUD, OCEAN, MOIRE, STEP, MANDELBROT, KALEIDOSCOPE, DARK, NEGATIVE, FLASH, NOISE)

SCENES: dict[str, Scene] = {scene.name: scene for scene in (*_MAIN, *_MORE)}
"""Every scene by name, the main ones first. A new scene is one module and one entry here."""


def choose_scenes(text: str) -> list[str]:
    """Names of the scenes that a command line asks for.

    Args:
        text: One name or several with commas; `all` is the main scenes, `every` the others too.
    Raises:
        ValueError: Some name is unknown; the text lists the known ones.
    """
    groups = {"all": [n for n, s in SCENES.items() if s.group == "main"], "every": list(SCENES)}
    if text in groups:
        return groups[text]
    names = text.split(",")
    if unknown := [name for name in names if name not in SCENES]:
        main = groups["all"]
        raise ValueError(
            f"expected one of {', '.join(main)} or all, or of "
            f"{', '.join(n for n in SCENES if n not in main)} or every, got {unknown[0]!r}"
        )
    return names
