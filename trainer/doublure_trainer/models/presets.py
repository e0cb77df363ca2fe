"""Sizes to choose among: three presets a family, and what fits a budget."""

from __future__ import annotations

from difflib import get_close_matches

from doublure_bridge.models import CompactSpec, GridSpec, ModelSpec

from ..errors import TrainerError

__all__ = ["PRESETS", "BudgetError", "preset", "within_budget"]


class BudgetError(TrainerError):
    """A preset that does not exist, or a budget that nothing fits."""


def _grid(xy: int, x: int, t: int, volume: int, hidden: int) -> GridSpec:
    return GridSpec(
        xy=(xy, xy), xt=(t, x), yt=(t, x), volume=(volume, volume, volume), hidden=hidden
    )


PRESETS: dict[str, dict[str, ModelSpec]] = {
    "grid": {
        "small": _grid(128, 64, 64, 24, 12),
        "medium": _grid(256, 256, 128, 48, 16),
        "large": _grid(512, 512, 256, 64, 24),
    },
    "compact": {
        "small": CompactSpec(hidden=16, layers=2),
        "medium": CompactSpec(hidden=32, layers=3),
        "large": CompactSpec(hidden=64, layers=3),
    },
}
"""Family -> preset -> sizes. `medium` is what a live session uses unless it is told otherwise."""

# Textures first, then the network's width: halving every texture costs more quality than four
# units do, and a byte is cheaper than a multiply-accumulate in every pixel.
_GRID_TEXTURES = (
    (16, 16, 8, 8),
    (32, 32, 16, 12),
    (64, 64, 32, 16),
    (128, 64, 64, 24),
    (128, 128, 128, 32),
    (256, 256, 128, 48),
    (512, 512, 256, 64),
)
_GRID_HIDDEN = (8, 12, 16, 20, 24, 32)
_COMPACT = ((8, 2), (16, 2), (16, 3), (24, 3), (32, 3), (48, 3), (64, 3), (64, 4))


def preset(family: str, name: str) -> ModelSpec:
    """Sizes of a family's preset.

    Raises:
        BudgetError: No such family or preset; the nearest known one is named.
    """
    for what, value, known in (
        ("family", family, list(PRESETS)),
        ("preset", name, list(next(iter(PRESETS.values())))),
    ):
        if value not in known:
            near = get_close_matches(value, known, n=1)
            raise BudgetError(
                what,
                expected=f"one of {', '.join(known)}",
                got=repr(value),
                next_step=f"did you mean {near[0]}?" if near else "",
            )
    return PRESETS[family][name]


def within_budget(macs: int | None = None, nbytes: int | None = None) -> dict[str, ModelSpec]:
    """The largest model of each family that costs no more.

    Args:
        macs: Multiply-accumulates a pixel; None for any number.
        nbytes: Bytes of all tensors; None for any number.
    Returns:
        Family -> sizes; a family of which nothing fits is not in it.
    Raises:
        BudgetError: Nothing fits, or a budget is not positive.
    """
    for what, value in (("budget in MACs", macs), ("budget in bytes", nbytes)):
        if value is not None and (type(value) is not int or value < 1):
            raise BudgetError(what, expected="a positive whole number", got=repr(value))

    def fits(spec: ModelSpec) -> bool:
        return (macs is None or spec.macs <= macs) and (nbytes is None or spec.nbytes <= nbytes)

    grids = [_grid(*sizes, hidden) for sizes in _GRID_TEXTURES for hidden in _GRID_HIDDEN]
    compacts = [CompactSpec(hidden=hidden, layers=layers) for hidden, layers in _COMPACT]
    families: dict[str, list[ModelSpec]] = {"grid": [*grids], "compact": [*compacts]}
    found = {
        family: fitting[-1]
        for family, specs in families.items()
        if (fitting := [spec for spec in specs if fits(spec)])
    }
    if not found:
        least = min((s for specs in families.values() for s in specs), key=lambda s: s.nbytes)
        cheap = min((s for specs in families.values() for s in specs), key=lambda s: s.macs)
        raise BudgetError(
            "budget",
            expected=f"at least {cheap.macs} MACs a pixel and {least.nbytes} bytes",
            got=f"{macs if macs is not None else 'any'} MACs, "
            f"{nbytes if nbytes is not None else 'any number of'} bytes",
        )
    return found
