"""Pictures rebuilt from soft triangles by gradient descent; see docs/fitting.md.

    with Fit(read_photo("photo.jpg", 192).pixels, FitSettings(triangles=150)) as fit:
        fit.step(800)
        save_scene("scene.json", fit.scene)

Works without torch.
"""

from .fitter import Fit, psnr_db
from .optimiser import FitState, HostOptimiser, Optimiser, OptimiserFactory, Problem
from .pictures import Photo, linear_to_srgb, read_photo, reduce_linear, srgb_to_linear
from .runs import FitProgress, FitResult, Outputs, fit_into
from .scene_file import FittedScene, load_scene, save_scene
from .settings import FitSettings
from .svg import save_svg, to_svg

__all__ = [
    "Fit",
    "FitProgress",
    "FitResult",
    "FitSettings",
    "FitState",
    "FittedScene",
    "HostOptimiser",
    "Optimiser",
    "OptimiserFactory",
    "Outputs",
    "Photo",
    "Problem",
    "fit_into",
    "linear_to_srgb",
    "load_scene",
    "psnr_db",
    "read_photo",
    "reduce_linear",
    "save_scene",
    "save_svg",
    "srgb_to_linear",
    "to_svg",
]
