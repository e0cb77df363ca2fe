"""How a fit is made: the settings that decide its result, and nothing about files or screens."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, get_args

from ..errors import SettingError
from ..scene import Kernel, Support

__all__ = ["FitSettings", "Start", "parse_colour"]

Start = Literal["detail", "random"]

_COLOUR = re.compile(r"#?([0-9a-f]{3}|[0-9a-f]{6})", re.IGNORECASE)
_NAMED = {"black": "#000000", "white": "#ffffff", "grey": "#808080", "gray": "#808080"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """What decides the result of a fit: same settings, same picture, same bits on one device.

    Attributes:
        triangles: How many, 1 or more.
        iterations: Steps of gradient descent, 1 or more.
        size: The picture is reduced so that its longest side is at most this, pixels.
        seed: Of the first triangles.
        start: The first triangles. `detail`: large ones at the back, small ones in front, those
            mostly where the picture has detail. `random`: of one size, anywhere.
        sigma_start: Edge softness at the first iteration, in image widths and heights.
        sigma_end: At the last one. None: 0.0015, or a quarter of a pixel of the longest side where
            that is more, since with sharper edges most triangles feel no gradient.
        position_rate: Adam's rate for vertices, image widths a step.
        colour_rate: For linear colours.
        alpha_rate: For opacities.
        beta1: Adam's memory of gradients, 0 to below 1.
        beta2: Adam's memory of their squares, 0 to below 1. Shorter than the usual 0.999, since
            gradients change their size with sigma; benchmarks/fit.py compares.
        epsilon: Adam's, greater than 0.
        patience: Stop as converged after so many iterations without a new best; 0 never stops.
        divergence: Stop as diverged where the loss is above this many times that of the first
            iteration or of the plain background, whichever is more.
        background: `mean` of the picture, or a colour, `#rrggbb`, `black`, `white` or `grey`.
        kernel: Coverage at an edge, see `Raster.kernel`.
        support: See `Raster.support`.
        coarse: Fit the picture at half its size, a quarter, … while sigma is more than so many
            pixels of that: soft edges hide the detail that is missing, and it costs a quarter.
            0 always fits the whole.
    Raises:
        SettingError: A value out of its range, or of the wrong type.
    """

    triangles: int = 150
    iterations: int = 800
    size: int = 192
    seed: int = 0
    start: Start = "detail"
    sigma_start: float = 0.02
    sigma_end: float | None = None
    position_rate: float = 0.004
    colour_rate: float = 0.02
    alpha_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.97
    epsilon: float = 1e-8
    patience: int = 250
    divergence: float = 4.0
    background: str = "mean"
    kernel: Kernel = "sigmoid"
    support: Support = "exact"
    coarse: float = 0.5

    def __post_init__(self) -> None:
        for name, least, most in _WHOLE:
            value = getattr(self, name)
            if not _is(value, Integral):
                raise SettingError(f"{name}: expected a whole number, got {value!r}")
            value = int(value)  # NumPy's, too; JSON knows none of them
            object.__setattr__(self, name, value)
            if not least <= value <= most:
                raise SettingError(f"{name}: expected {least:,} to {most:,}, got {value:,}")
        for name, low, high, open_ends in _REAL:
            value = getattr(self, name)
            if name == "sigma_end" and value is None:
                continue
            if not _is(value, Real):
                raise SettingError(f"{name}: expected a number, got {value!r}")
            inside = low < value < high if open_ends else low <= value <= high
            if not inside:
                between = "over" if open_ends else "from"
                upto = "below" if open_ends else "to"
                raise SettingError(f"{name}: expected {between} {low} {upto} {high}, got {value}")
            object.__setattr__(self, name, float(value))
        if self.beta1 >= 1 or self.beta2 >= 1:
            raise SettingError(
                f"beta1, beta2: expected less than 1, got {self.beta1} and {self.beta2}"
            )
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise SettingError(f"{name}: {_expected(value, known)}")
        if self.sigma_end is not None and self.sigma_end > self.sigma_start:
            raise SettingError(
                f"sigma_end: expected at most sigma_start, {self.sigma_start}, got "
                f"{self.sigma_end}; edges go from soft to sharp"
            )
        if self.background != "mean":
            parse_colour(self.background, "background", also=("mean",))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FitSettings:
        """Settings from names and values, as `to_dict` gives them.

        Raises:
            SettingError: A name that is none (the text has the nearest), or a wrong value.
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise SettingError(f"settings: {_expected(name, known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Names and plain values, for JSON."""
        return asdict(self)

    def last_sigma(self, height: int, width: int) -> float:
        """Sigma of the last iteration on a picture of that many pixels."""
        if self.sigma_end is not None:
            return self.sigma_end
        return min(self.sigma_start, max(0.0015, 0.25 / max(1, height, width)))


_WHOLE = (
    ("triangles", 1, 1_000_000),
    ("iterations", 1, 10_000_000),
    ("size", 1, 16_384),
    ("seed", 0, 2**63 - 1),
    ("patience", 0, 10_000_000),
)
_REAL = (  # name, least, most, and whether the ends are left out
    ("sigma_start", 0.0, 10.0, True),
    ("sigma_end", 0.0, 10.0, True),
    ("position_rate", 0.0, 1.0, False),
    ("colour_rate", 0.0, 1.0, False),
    ("alpha_rate", 0.0, 1.0, False),
    ("beta1", 0.0, 1.0, False),
    ("beta2", 0.0, 1.0, False),
    ("epsilon", 0.0, 1.0, True),
    ("divergence", 1.0, math.inf, True),
    ("coarse", 0.0, 1000.0, False),
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "start": get_args(Start),
    "kernel": get_args(Kernel),
    "support": get_args(Support),
}


def parse_colour(text: str, what: str, *, also: tuple[str, ...] = ()) -> tuple[int, int, int]:
    """sRGB bytes of `#rrggbb`, `#rgb`, `black`, `white` or `grey`.

    Args:
        what: The setting's name, for the error.
        also: Further words that the setting takes, for the error.
    Raises:
        SettingError: It is no such colour.
    """
    found = _COLOUR.fullmatch(_NAMED.get(str(text).lower(), str(text)))
    if found is None:
        words = ", ".join((*also, *_NAMED))
        raise SettingError(f"{what}: expected {words} or #rrggbb, got {text!r}")
    digits = found.group(1)
    if len(digits) == 3:
        digits = "".join(2 * digit for digit in digits)
    red, green, blue = bytes.fromhex(digits)
    return red, green, blue


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _expected(got: Any, known: tuple[str, ...] | list[str]) -> str:
    near = difflib.get_close_matches(str(got), known, n=1, cutoff=0.0)
    return f"expected one of {', '.join(known)}; got {got!r}; did you mean {near[0]}?"
