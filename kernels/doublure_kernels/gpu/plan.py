"""What a call on a GPU consists of: buffers, kernels, their settings, and regions that fit.

Both runtimes run the same kernels (`shaders/raster.h`): Vulkan as compute shaders, CUDA as compiled
at run time. One team of lanes, a subgroup or a warp, draws one tile; each lane has four pixels of
a row.

A triangle that may touch a tile has a slot there, in which the tile leaves its share of the
gradients: three vec4. Slots are `slots` a triangle where the worst case fits, one for each tile of
the region. Else `setup` counts them, `scan` adds up, and `regions` splits what does not fit. Sums
over slots are made in their order, so results do not depend on who came first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from ..scene import Raster

__all__ = [
    "BACKWARD",
    "BINDINGS",
    "FORWARD",
    "FUSED",
    "KERNELS",
    "SETTINGS_BYTES",
    "SLOT_BYTES",
    "Dispatch",
    "Region",
    "Settings",
    "constants",
    "draw_steps",
    "fit_steps",
    "measure_steps",
    "regions",
    "sizes",
    "tile_size",
    "whole",
]

BINDINGS: Final = (
    "params",  # float32 [B, T, 10]
    "sigma",  # float32 [B, T]; not read where the settings hold it
    "background",  # float32 [B, 3]; likewise
    "counts",  # int32 [B]; likewise
    "given",  # float32 [B, rows, W, C]: targets, or dL/dimage; rows of the region only
    "images",  # float32 [B, rows, W, C], written when drawing forward
    "bounds",  # uint32 [B, T, 4]: the tiles that a triangle may touch, how many, its first slot
    "partials",  # float32 [slots, 12]
    "tiles",  # float32 [B, tiles, 4]: background r g b, loss
    "grads",  # float32 [B, T, 10]
    "grad_sigma",  # float32 [B, T]
    "grad_background",  # float32 [B, 3]
    "losses",  # float32 [B]
    "totals",  # uint32 [2]: slots in all, low and high half
    "fit",  # float32: what a fit on the device keeps, see `gpu/fit.py`
    "geometry",  # float32 [B, T, 52]: what `setup` worked out
)
"""Storage buffers, in the order of their binding numbers, and of the pointers in CUDA's `Args`."""

KERNELS: Final = ("setup", "scan", "draw", "reduce", "adam")

FORWARD, BACKWARD, FUSED = 0, 1, 2

SLOT_BYTES: Final = 48
GEOMETRY_BYTES: Final = 208
_ALL_SIGMA, _ALL_BACKGROUND, _ALL_COUNTS, _ADD = 1, 2, 4, 8
_FORMAT: Final = "<12I5fI2f"
SETTINGS_BYTES: Final = struct.calcsize(_FORMAT)
_COARSE: Final = 0.25  # of a pixel: coverage is then off by 1e-7 at most
_MOST_GROUPS: Final = 65_535  # along an axis, and of tiles that `bounds` can name
_GRID: Final = 32_768  # workgroups along x, so that any number fits in two dimensions
_LANES: Final = {4: (1, 4), 8: (2, 4), 16: (2, 8), 32: (4, 8), 64: (4, 16), 128: (8, 16)}


def tile_size(lanes: int) -> tuple[int, int]:
    """Width and height in pixels of what a team of 4 to 128 lanes draws."""
    columns, rows = _LANES[lanes]
    return 4 * columns, rows


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one call, but for the region.

    Attributes:
        items: Scenes.
        triangles: In each.
        raster: Size, kernel, support, channels.
        mode: FORWARD, BACKWARD or FUSED.
        sigma: One for all triangles; None reads the buffer.
        background: One for all items; None reads the buffer.
        all_counts: Every item has all of its triangles; else the buffer is read.
    """

    items: int
    triangles: int
    raster: Raster
    mode: int
    sigma: float | None = None
    background: tuple[float, float, float] | None = None
    all_counts: bool = False

    @property
    def fine(self) -> bool:
        """Whether sigma may be so small against a pixel that a float's rounding there shows."""
        side = min(self.raster.height, self.raster.width)
        return self.sigma is None or self.sigma * side < _COARSE

    def pack(
        self,
        region: Region,
        slots: int,
        lanes: int,
        add: bool = False,
        iteration: int = 0,
        step: float = 1.0,
        root: float = 1.0,
    ) -> bytes:
        """As the kernels read them.

        Args:
            region: What is drawn.
            slots: A triangle; 0 where `scan` placed them.
            lanes: Of a team.
            add: Onto the gradients of regions before.
            iteration: Of a fit.
            step: Adam's correction of the first moment, 1 / (1 - beta1^n).
            root: Of the second, 1 / sqrt(1 - beta2^n).
        """
        height = tile_size(lanes)[1]
        flags = (
            _ALL_SIGMA * (self.sigma is not None)
            | _ALL_BACKGROUND * (self.background is not None)
            | _ALL_COUNTS * self.all_counts
            | _ADD * add
        )
        return struct.pack(
            _FORMAT,
            region.items,
            self.triangles,
            self.raster.height,
            self.raster.width,
            region.x,
            region.y,
            region.columns,
            region.rows,
            region.first_row(height),
            region.pixel_rows(height, self.raster.height),
            slots,
            flags,
            self.sigma or 0.0,
            *(self.background or (0.0, 0.0, 0.0)),
            1.0 / (3.0 * self.raster.height * self.raster.width),
            iteration,
            step,
            root,
        )


@dataclass(frozen=True, slots=True)
class Region:
    """Items `item` to `item + items`, and of each a rectangle of tiles."""

    item: int
    items: int
    x: int
    y: int
    columns: int
    rows: int

    @property
    def tiles(self) -> int:
        """Of one item."""
        return self.columns * self.rows

    def first_row(self, tile_height: int) -> int:
        """The image row that buffers of this region begin with."""
        return self.y * tile_height

    def pixel_rows(self, tile_height: int, height: int) -> int:
        """How many rows they have."""
        return min((self.y + self.rows) * tile_height, height) - self.first_row(tile_height)

    def halves(self) -> tuple[Region, Region]:
        """By items while there are several, then by rows, then by columns of tiles.

        Raises:
            ValueError: It is a single tile.
        """
        if self.items > 1:
            n = self.items // 2
            return replace(self, items=n), replace(self, item=self.item + n, items=self.items - n)
        if self.rows > 1:
            n = self.rows // 2
            return replace(self, rows=n), replace(self, y=self.y + n, rows=self.rows - n)
        if self.columns > 1:
            n = self.columns // 2
            return replace(self, columns=n), replace(self, x=self.x + n, columns=self.columns - n)
        raise ValueError("a single tile has no halves")


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One kernel over so many workgroups; what comes after sees what it wrote.

    Attributes:
        kernel: One of `KERNELS`.
        constants: Specialization constants by id; macros of the same names in CUDA.
        settings: Push constants.
        groups: Workgroups along x, y, z.
    """

    kernel: str
    constants: tuple[tuple[int, int], ...]
    settings: bytes
    groups: tuple[int, int, int]


CONSTANT_NAMES: Final = ("LANES", "MODE", "COMPACT", "BBOX6", "CHANNELS", "FINE")
"""Of specialization constants, by id."""


def constants(settings: Settings, lanes: int) -> tuple[tuple[int, int], ...]:
    """What kernels are compiled for."""
    raster = settings.raster
    values = (
        lanes,
        settings.mode,
        raster.kernel == "compact",
        raster.support == "bbox6",
        raster.channels,
        settings.fine,
    )
    return tuple((i, int(value)) for i, value in enumerate(values))


def sizes(settings: Settings, region: Region, slots: int, lanes: int) -> dict[str, int]:
    """Bytes of each buffer that a region needs; what is absent may be of any size.

    Args:
        slots: In all.
    """
    b, t = region.items, settings.triangles
    raster = settings.raster
    rows = region.pixel_rows(tile_size(lanes)[1], raster.height)
    image = b * rows * raster.width * raster.channels * 4
    found = {
        "params": b * t * 40,
        "bounds": b * t * 16,
        "geometry": b * t * GEOMETRY_BYTES,
        "totals": 8,
    }
    if settings.sigma is None:
        found["sigma"] = b * t * 4
    if settings.background is None:
        found["background"] = b * 12
    if not settings.all_counts:
        found["counts"] = b * 4
    if settings.mode == FORWARD:
        return found | {"images": image}
    return found | {
        "given": image,
        "partials": slots * SLOT_BYTES,
        "tiles": b * region.tiles * 16,
        "grads": b * t * 40,
        "grad_sigma": b * t * 4,
        "grad_background": b * 12,
        "losses": b * 4,
    }


def _grid(count: int) -> tuple[int, int, int]:
    return min(count, _GRID), -(-count // _GRID), 1


def measure_steps(settings: Settings, region: Region, lanes: int) -> tuple[Dispatch, ...]:
    """Leave in `totals` how many slots the region needs, and in `bounds` where they are."""
    what, packed = constants(settings, lanes), settings.pack(region, 0, lanes)
    threads = region.items * settings.triangles
    return (
        Dispatch("setup", what, packed, _grid(-(-threads // lanes))),
        Dispatch("scan", what, packed, (1, 1, 1)),
    )


def draw_steps(
    settings: Settings, region: Region, slots: int, lanes: int, add: bool = False
) -> tuple[Dispatch, ...]:
    """Draw a region, and reduce its gradients.

    Args:
        slots: A triangle; 0 where `measure_steps` ran before.
        add: Onto the gradients of regions before.
    """
    what, packed = constants(settings, lanes), settings.pack(region, slots, lanes, add)
    steps = []
    threads = region.items * settings.triangles
    if threads and (slots or settings.mode == FORWARD):
        steps.append(Dispatch("setup", what, packed, _grid(-(-threads // lanes))))
    steps.append(Dispatch("draw", what, packed, (region.columns, region.rows, region.items)))
    if settings.mode != FORWARD:
        steps.append(Dispatch("reduce", what, packed, _grid(threads + region.items)))
    return tuple(steps)


def whole(
    settings: Settings, lanes: int, largest: int, scratch: int
) -> tuple[Region, int, int] | None:
    """The region of all of a call, if it can be drawn in one piece without measuring it.

    Args:
        lanes: Of a team.
        largest: Bytes of a buffer at most.
        scratch: Bytes of `partials` that may be taken without asking how many are needed.
    Returns:
        The region, slots a triangle, slots in all.
    """
    width, height = tile_size(lanes)
    columns, rows = -(-settings.raster.width // width), -(-settings.raster.height // height)
    region = Region(0, settings.items, 0, 0, columns, rows)
    needs = sizes(settings, region, 0, lanes)
    if max(columns, rows, settings.items) > _MOST_GROUPS or max(needs.values()) > largest:
        return None
    if settings.mode == FORWARD or settings.triangles == 0:
        return region, 0, 0
    worst = region.tiles * settings.triangles * settings.items
    if worst * SLOT_BYTES > min(scratch, largest):
        return None
    return region, region.tiles, worst


def regions(
    settings: Settings,
    lanes: int,
    *,
    largest: int,
    scratch: int,
    measure: Callable[[Region], int],
) -> Iterator[tuple[Region, int, int]]:
    """What to draw, one after the other; those of one item are in the order to be added in.

    Args:
        lanes: Of a team.
        largest: Bytes of a buffer at most.
        scratch: Bytes of `partials` that may be taken without asking how many are needed.
        measure: Runs `measure_steps` and returns the total.
    Yields:
        The region; slots a triangle, 0 where they were measured; slots in all.
    """
    width, height = tile_size(lanes)
    raster = settings.raster
    columns, rows = -(-raster.width // width), -(-raster.height // height)
    if settings.items == 0:
        return
    stack = [Region(0, settings.items, 0, 0, columns, rows)]
    while stack:
        region = stack.pop()
        needs = sizes(settings, region, 0, lanes)
        # Image buffers hold whole rows: a row too long for one cannot be split.
        fits = all(size <= largest for size in needs.values())
        fits &= max(region.columns, region.rows, region.items) <= _MOST_GROUPS
        worst = region.tiles * settings.triangles * region.items
        single = region.items == 1 and region.tiles == 1
        if region.columns > _MOST_GROUPS or (
            not fits and not single and not (region.items == 1 and region.rows == 1)
        ):
            stack.extend(reversed(region.halves()))
        elif settings.mode == FORWARD or settings.triangles == 0:
            yield region, 0, 0
        elif worst * SLOT_BYTES <= min(scratch, largest):
            yield region, region.tiles, worst
        else:
            total = measure(region)
            if total * SLOT_BYTES <= largest or single:
                yield region, 0, total
            else:
                stack.extend(reversed(region.halves()))


def fit_steps(
    settings: Settings, lanes: int, slots: int, iteration: int, step: float, root: float
) -> tuple[Dispatch, ...]:
    """One iteration of a fit, of one item in one piece: draw, compare, differentiate, update.

    Args:
        slots: A triangle.
        iteration: Counted from 0.
        step: See `Settings.pack`.
        root: See `Settings.pack`.
    """
    width, height = tile_size(lanes)
    raster = settings.raster
    region = Region(0, 1, 0, 0, -(-raster.width // width), -(-raster.height // height))
    what = constants(settings, lanes)
    packed = settings.pack(region, slots, lanes, False, iteration, step, root)
    threads = settings.triangles
    return (
        Dispatch("setup", what, packed, _grid(-(-threads // lanes))),
        Dispatch("draw", what, packed, (region.columns, region.rows, 1)),
        Dispatch("reduce", what, packed, _grid(threads + 1)),
        Dispatch("adam", what, packed, _grid(-(-10 * threads // lanes))),
    )
