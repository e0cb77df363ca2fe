"""The differentiable rasterizer of soft triangles.

Importing this imports neither torch nor Numba, and opens nothing: the functions on torch tensors
bring torch with them at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .annealing import anneal_sigma
from .backend import Backend
from .devices import adapter, last_device, open_device, shutdown
from .errors import (
    DeviceError,
    DtypeError,
    ImageError,
    NonFiniteError,
    RasterError,
    ResumeError,
    SettingError,
    ShapeError,
    SigmaWarning,
)
from .policy import Explanation, explain, prefers_gpu
from .scene import Gradients, Raster, Scene

if TYPE_CHECKING:
    from .api import clamp_params, fused_loss, fused_mse, psnr, random_params, rasterize

__all__ = [
    "Backend",
    "DeviceError",
    "DtypeError",
    "Explanation",
    "Gradients",
    "ImageError",
    "NonFiniteError",
    "Raster",
    "RasterError",
    "ResumeError",
    "Scene",
    "SettingError",
    "ShapeError",
    "SigmaWarning",
    "adapter",
    "anneal_sigma",
    "clamp_params",
    "explain",
    "fused_loss",
    "fused_mse",
    "last_device",
    "open_device",
    "prefers_gpu",
    "psnr",
    "random_params",
    "rasterize",
    "shutdown",
]

_TORCH = {"clamp_params", "fused_loss", "fused_mse", "psnr", "random_params", "rasterize"}

if not TYPE_CHECKING:  # or type checkers would believe in any name

    def __getattr__(name: str) -> Any:
        if name not in _TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(".api", __name__), name)
        globals()[name] = value  # the next look does not come here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
