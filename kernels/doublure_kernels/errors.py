"""What the rasterizer refuses, as one tree of exceptions.

Each is also the builtin that a caller would expect (`ValueError`, `TypeError`, `RuntimeError`), and
its text says what was expected, what came, and what to do.
"""

from __future__ import annotations

__all__ = [
    "DeviceError",
    "DtypeError",
    "ImageError",
    "NonFiniteError",
    "RasterError",
    "ResumeError",
    "SettingError",
    "ShapeError",
    "SigmaWarning",
]


class RasterError(Exception):
    """Anything that this package refuses to do."""


class ShapeError(RasterError, ValueError):
    """An array of the wrong number of axes or the wrong sizes."""


class DtypeError(RasterError, TypeError):
    """An array of a type that cannot be computed with here."""


class SettingError(RasterError, ValueError):
    """A size, sigma, kernel, support or option out of its range."""


class NonFiniteError(RasterError, ValueError):
    """NaN or infinity where `check=True` asked to be told."""


class DeviceError(RasterError, RuntimeError):
    """A device that is not known, not there, or not usable for these tensors."""


class ImageError(RasterError, ValueError):
    """A picture that cannot be read, or not be fitted."""


class ResumeError(RasterError, ValueError):
    """A saved fit that is damaged, or belongs to another picture or other settings."""


class SigmaWarning(UserWarning):
    """Sigma is under a quarter of a pixel: most triangles get no gradient there."""
