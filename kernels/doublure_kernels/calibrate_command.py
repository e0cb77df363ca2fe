"""`doublure calibrate`: what `device="auto"` goes by on this machine."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from .calibrate import Calibration, Cell

__all__ = ["calibrate"]


def calibrate(
    seconds: Annotated[float, typer.Option(min=0.1, help="To spend on timed calls.")] = 4.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Keep nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time the rasterizer on every device here, so that device="auto" knows which is quickest."""
    try:
        import numba  # noqa: F401
        import torch  # noqa: F401

        from . import calibrate as work
        from . import policy
    except ImportError as error:
        sys.exit(f"doublure calibrate: {error}; run `pip install 'doublure[kernels]'`")

    console = Console(quiet=as_json)
    status = console.status("opening devices") if console.is_terminal else nullcontext()
    with status as shown:

        def note(backend: str, where: str) -> None:
            if shown is not None:
                shown.update(f"timing {backend}, tensors on {where}")

        made = work.calibrate(seconds=seconds, note=note)
    if not made.measured:
        sys.exit(f"doublure calibrate: nothing could be timed in {seconds} s; give more --seconds")
    path = None
    if not dry_run:
        path = work.save(made)
        policy.forget_calibration()
    if as_json:
        print(json.dumps({**made.to_dict(), "file": path and str(path)}, indent=2))
        return
    console.print(_table(made))
    _say_more(console, made)
    if path is None:
        console.print("nothing was kept (--dry-run)", highlight=False)
    else:
        console.print(f"kept in {path}", highlight=False, soft_wrap=True, markup=False)


def _table(made: Calibration) -> Table:
    table = Table(title="milliseconds a call, forward and backward")
    for name in ("scenes", "size", "triangles", "sigma", "corners"):
        table.add_column(name, justify="right")
    for one in made.measured:
        table.add_column(f"{one.backend},\non {one.where}", justify="right")
    times = [dict(one.cells) for one in made.measured]
    # The device that ran out of time has fewer cells.
    cells: list[Cell] = max((list(known) for known in times), key=len, default=[])
    for cell in cells:
        row = (cell.batch, cell.size, cell.triangles, cell.sigma, "wide" if cell.wide else "near")
        shown = [f"{known[cell]:.3f}" if cell in known else "-" for known in times]
        table.add_row(*map(str, row), *shown)
    return table


def _say_more(console: Console, made: Calibration) -> None:
    from . import devices

    for one in made.measured:
        name = one.device.get("adapter") or made.machine["cpu"]
        console.print(
            f"{one.backend}, tensors on {one.where}: {name}; the model is off by "
            f"{100 * one.error:.0f} % on average",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
    for reason in devices.gpu_refusals().values():
        console.print(f"left out: {reason}", highlight=False, soft_wrap=True, markup=False)
    console.print(f"took {made.seconds:.1f} s", highlight=False)
