"""The training's settings: one frozen dataclass, checked on the way in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from doublure_bridge.errors import SpecError
from doublure_bridge.models import CompactSpec, GridSpec, model_spec_from_dict, spec_to_dict

from .errors import TrainerError
from .models import FAMILIES

__all__ = ["ConfigError", "TrainConfig", "default_compact", "default_grid"]


class ConfigError(TrainerError):
    """A setting that does not exist, has the wrong type, or is out of range."""


def default_grid() -> GridSpec:
    """The grid model that suits 512 x 512 sources; sizes measured with benchmarks/train.py."""
    return GridSpec(xy=(256, 256), xt=(128, 256), yt=(128, 256), volume=(48, 48, 48))


def default_compact() -> CompactSpec:
    """The compact model: 8.7 kB, no textures."""
    return CompactSpec(hidden=32, layers=3)


def _setting(default: Any, low: float, high: float) -> Any:
    return field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything that training can be told. The defaults suit one CPU thread beside an engine.

    Attributes:
        family: "race" trains every family and keeps the best; or one family by name.
        grid: Sizes of the grid model.
        compact: Sizes of the compact model.
        batch: Rows a step.
        early_steps: Steps of half as many rows, at first: more of them before the first picture.
        device_batch: Rows a step where a grid is trained on a CUDA device.
        texel_rate: Adam's learning rate for planes and volume.
        network_rate: Adam's learning rate for the grid model's network.
        compact_rate: Adam's learning rate for the compact model.
        half_life: Steps after which a learning rate has halved: rate / (1 + step / half_life).
        floor: The share of a learning rate that is never decayed, so that training stays live.
        relative: Softness of the loss's weight 1 / (min(|log colour|, 1) + relative): smaller
            counts dark pixels more. Above 1 log space is relative already, and a highlight's
            error grows again when it is decoded.
        ema: Decay of the averaged weights, per step; until it is reached, the average spans
            the last tenth of all steps.
        smoothing: Pull of texels towards the straight line through their neighbours, per step.
        growth: Steps at which the grid's volume reaches its next resolution.
        tries: Candidates a row when rows are drawn by their errors; 1 draws evenly.
        error_share: How much of the drawing goes by error, 0..1.
        error_power: How much of that the loss takes back: 1 leaves it what even drawing has.
        threads: CPU threads for torch.
        replay_rows: Capacity of the training replay, 24 bytes a row.
        held_out_rows: Capacity of the held-out and of the test replay, each.
        score_rows: Held-out rows that a candidate is scored on.
        min_coverage: Share of the training slices that need data before training starts.
        publish_coverage: Share of the eighths of t's range that need data before the first
            publication, unless the host has stopped reaching new slices.
        first_candidate_s: Seconds of training before the first candidate.
        candidate_interval_s: Least seconds of training between candidates.
        score_share: Largest share of the time that scoring may take.
        min_gain_db: Least gain in tonemapped PSNR that is worth a reload.
        relmse_tolerance: Relative worsening of the relative MSE that is let through.
        peak_tolerance: Worsening of |log peak ratio| that is let through.
        race_share: Steps of the compact model for each step of the winner so far, in the race.
        race_rungs: Steps at which those still in the race are compared, and dropped if behind.
        fine_below_db: Grids with all texels free enter the race where the winner so far has no
            more merit than this.
        fine_rungs: As `race_rungs`, for them.
        race_margin_db: How far behind it may be and still stay on, before the last rung.
    """

    family: str = "race"
    grid: GridSpec = field(default_factory=default_grid)
    compact: CompactSpec = field(default_factory=default_compact)
    batch: int = _setting(4096, 16, 1 << 17)
    early_steps: int = _setting(2000, 0, 1 << 30)
    device_batch: int = _setting(1 << 15, 16, 1 << 22)
    texel_rate: float = _setting(0.02, 1e-6, 1.0)
    network_rate: float = _setting(0.01, 1e-6, 1.0)
    compact_rate: float = _setting(0.004, 1e-6, 1.0)
    half_life: int = _setting(800, 1, 1 << 30)
    floor: float = _setting(0.02, 0.0, 1.0)
    relative: float = _setting(0.5, 1e-3, 1e3)
    ema: float = _setting(0.999, 0.0, 0.99999)
    smoothing: float = _setting(0.001, 0.0, 0.06)
    growth: tuple[int, ...] = (100, 900)
    tries: int = _setting(8, 1, 64)
    error_share: float = _setting(0.8, 0.0, 1.0)
    error_power: float = _setting(0.5, 0.0, 1.0)
    threads: int = _setting(1, 1, 256)
    replay_rows: int = _setting(1 << 23, 1 << 10, 1 << 28)
    held_out_rows: int = _setting(1 << 16, 1 << 8, 1 << 24)
    score_rows: int = _setting(1 << 14, 1 << 6, 1 << 22)
    min_coverage: float = _setting(0.05, 0.0, 1.0)
    publish_coverage: float = _setting(0.85, 0.0, 1.0)
    first_candidate_s: float = _setting(0.4, 0.0, 1e6)
    candidate_interval_s: float = _setting(0.25, 0.0, 1e6)
    score_share: float = _setting(0.1, 0.001, 0.9)
    min_gain_db: float = _setting(0.05, 0.0, 100.0)
    relmse_tolerance: float = _setting(0.05, 0.0, 10.0)
    peak_tolerance: float = _setting(0.1, 0.0, 10.0)
    race_share: float = _setting(0.25, 0.01, 1.0)
    race_rungs: tuple[int, ...] = (100, 200, 400, 600)
    fine_below_db: float = _setting(30.0, -100.0, 100.0)
    fine_rungs: tuple[int, ...] = (1000, 1500, 2000, 2500)
    race_margin_db: float = _setting(1.5, 0.0, 100.0)

    def __post_init__(self) -> None:
        for item in fields(self):
            _check(item.name, getattr(self, item.name), item.metadata.get("range"))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainConfig:
        """Read settings, for example from a file or a command line; missing ones are defaults.

        Raises:
            ConfigError: Unknown key (the nearest known one is named), wrong type, out of range.
        """
        if not isinstance(data, Mapping):
            raise ConfigError("config", expected="a mapping", got=type(data).__name__)
        known = [item.name for item in fields(cls)]
        values: dict[str, Any] = {}
        for key, value in data.items():
            if key not in known:
                near = get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                raise ConfigError(f"config.{key}", expected="a known setting", next_step=hint)
            values[key] = _read(key, value)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back to an equal configuration."""
        plain = {k: v for k, v in asdict(self).items() if k not in ("grid", "compact")}
        plain |= {k: list(v) for k, v in plain.items() if isinstance(v, tuple)}
        return plain | {"grid": spec_to_dict(self.grid), "compact": spec_to_dict(self.compact)}


_TUPLES = ("growth", "race_rungs", "fine_rungs")
_SPECS: dict[str, type] = {"grid": GridSpec, "compact": CompactSpec}


def _read(key: str, value: Any) -> Any:
    if key in _SPECS and isinstance(value, Mapping):
        try:
            return model_spec_from_dict(value)
        except SpecError as error:
            raise ConfigError(
                f"config.{key}.{error.what}",
                expected=error.expected,
                got=error.got,
                next_step=error.next_step,
            ) from error
    if key in _TUPLES and isinstance(value, list):
        return tuple(value)
    return value


def _check(name: str, value: Any, limits: tuple[float, float] | None) -> None:
    what = f"config.{name}"
    default = TrainConfig.__dataclass_fields__[name].default
    if name == "family":
        allowed = ["race", *FAMILIES]
        if value not in allowed:
            near = get_close_matches(str(value), allowed, n=1)
            raise ConfigError(
                what,
                expected=f"one of {', '.join(allowed)}",
                got=repr(value),
                next_step=f"did you mean {near[0]}?" if near else "",
            )
    elif name in _SPECS:
        if not isinstance(value, _SPECS[name]):
            raise ConfigError(what, expected=f"sizes of the {name} model", got=repr(value))
    elif name in _TUPLES:
        rising = isinstance(value, tuple) and all(type(v) is int and v > 0 for v in value)
        if not rising or list(value) != sorted(set(value)) or (name != "growth" and not value):
            raise ConfigError(what, expected="rising step numbers, as a list", got=repr(value))
    elif limits is not None:
        low, high = limits
        whole = type(default) is int
        right = type(value) is int or (not whole and type(value) is float)
        kind = "a whole number" if whole else "a number"
        if not right or not low <= value <= high:
            raise ConfigError(what, expected=f"{kind} in {low:g}..{high:g}", got=repr(value))
