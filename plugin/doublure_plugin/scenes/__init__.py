"""The scenes of the embedded host: expensive shaders with one parameter, each in WGSL and NumPy."""

from __future__ import annotations

from .edges import EDGES
from .fbm import FBM
from .plasma import PLASMA
from .scene import Scene, pixel_centres
from .sdf import SDF
from .sun import SUN

__all__ = ["SCENES", "Scene", "pixel_centres"]

SCENES: dict[str, Scene] = {scene.name: scene for scene in (PLASMA, FBM, SDF, EDGES, SUN)}
"""Every scene by name. A new scene is one module and one entry here."""
