"""`raster.py` on several devices: cell by cell, a row for each device and place of the tensors."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import doublure_kernels as kernels
import torch
from _raster_cells import SEED_GPU_MS, SEED_MS, Cell, call, cells, count_pairs, scene
from _raster_floors import floors_ms, host_bandwidth, host_peak
from _raster_gpu import TORCH, Eager, floors, kernel_ms, places, times
from _streams import hardware
from doublure_kernels import devices
from torch import Tensor

__all__ = ["compare"]

_HEAD = (
    "op         B  size     T  sigma scene  backend  from         ms   spread pipelined    kernel"
    "     bytes     flops  x floor  as eager    error"
)


def compare(args: argparse.Namespace) -> None:
    """Several devices, cell by cell; one that is not there is named and left out.

    With `auto` among them, a star marks what `device="auto"` draws on.
    """
    print(_hardware())
    wanted = args.device.split(",")
    auto = "auto" in wanted
    wanted = [name for name in wanted if name != "auto"]
    for name in [name for name in wanted if name not in TORCH]:
        try:
            print(f"{name}: {devices.default(name).adapter or 'the processor'}")
        except kernels.DeviceError as error:
            print(f"{name} is left out: {error}")
            wanted.remove(name)
    gpu = torch.cuda.is_available()
    known = {"processor": (host_bandwidth(), host_peak())}
    if gpu:
        known["GPU"] = floors()
    for name, (bandwidth, peak) in known.items():
        print(
            f"floors of the {name} from {bandwidth / 1e9:.1f} GB/s copied and "
            f"{peak / 1e9:.0f} GFLOP/s multiplied"
        )
    print(_HEAD)
    ways = {"eager": Eager(), "compiled": Eager(True, args.compile_seconds)}
    rows: list[dict[str, Any]] = []
    for cell in cells(args):
        params, targets = scene(cell)
        pairs = count_pairs(params, cell)
        found = []
        for device, where in [(name, place) for name in wanted for place in places(name)]:
            limits = known["processor" if device == "cpu" or not gpu else "GPU"]
            row = _row(cell, device, where, pairs, floors_ms(cell, *pairs, *limits))
            try:
                if device in TORCH:
                    _time_torch(row, ways[device], cell, params.to(where), targets.to(where))
                else:
                    _time_backend(row, cell, params, targets, args)
            except (kernels.RasterError, RuntimeError, MemoryError) as error:
                row["failed"] = f"{type(error).__name__}: {error}"
            found.append(row)
        if auto:
            _mark_choice(found, cell, params, targets)
        eager = next((row["ms_median"] for row in found if row["backend"] == "eager"), None)
        for row in found:
            row["eager_ms"] = eager
            print(_line(row), flush=True)
        rows += found
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    if auto:
        _say_choices(rows)


def _mark_choice(rows: list[dict[str, Any]], cell: Cell, params: Tensor, targets: Tensor) -> None:
    """Which of a cell's backends `device="auto"` draws on, for tensors in each place."""
    for where in {row["where"] for row in rows if row["backend"] not in TORCH}:
        call(cell, params.to(where), targets.to(where), "auto")()
        chosen = kernels.last_device()
        for row in rows:
            row["auto"] |= (row["backend"], row["where"]) == (chosen, where)


def _say_choices(rows: list[dict[str, Any]]) -> None:
    """How far the choices of `device="auto"` were from the quickest backend of the same run."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    names = ("op", "B", "H", "T", "sigma", "scene", "where")
    for row in rows:
        if row["backend"] not in TORCH and row["ms_median"]:
            cells.setdefault(tuple(row[name] for name in names), []).append(row)
    losses = [
        (row["ms_median"] / min(one["ms_median"] for one in group) - 1, key, row["backend"])
        for key, group in cells.items()
        for row in group
        if row["auto"]
    ]
    good = sum(loss <= 0.1 for loss, _, _ in losses)
    print(f"auto: within 10 % of the quickest in {good} of {len(losses)}")
    for loss, key, backend in sorted(losses, reverse=True)[: len(losses) - good]:
        print(f"  {backend} is {100 * loss:.0f} % slower for {' '.join(map(str, key))}")


def _row(
    cell: Cell, device: str, where: str, pairs: tuple[int, int], floor: tuple[float, float]
) -> dict[str, Any]:
    return {
        "backend": device, "op": cell.op, "B": cell.batch, "H": cell.size, "W": cell.size,
        "T": cell.triangles, "sigma": cell.sigma, "scene": cell.scene, "where": where,
        "ms_median": None, "ms_spread": None, "ms_min": None, "ms_pipelined": None,
        "kernel_ms": None, "eager_ms": None, "eager_share": 1.0, "pairs": sum(pairs),
        "floor_ms": max(floor), "floor_bytes_ms": floor[0], "floor_flops_ms": floor[1],
        "check_error": None, "auto": False, "hardware": _hardware(),
    }  # fmt: skip


def _time_torch(
    row: dict[str, Any], way: Eager, cell: Cell, params: Tensor, targets: Tensor
) -> None:
    if way.left_s <= 0:
        row["failed"] = "not measured: its seconds for compiling were spent"
        return
    row["ms_median"], row["eager_share"] = way.measure(cell, params, targets)
    if params.device.type == "cuda":
        torch.cuda.empty_cache()


def _time_backend(
    row: dict[str, Any], cell: Cell, params: Tensor, targets: Tensor, args: argparse.Namespace
) -> None:
    device, where = row["backend"], row["where"]
    with torch.no_grad():
        run = call(cell, params.to(where), targets.to(where), device)
        seconds = min(args.seconds, 0.5)
        found, row["ms_pipelined"] = times(run, where, args.repeats, seconds)
        row["ms_median"], row["ms_min"] = statistics.median(found), min(found)
        row["ms_spread"] = max(found) - min(found)
        row["kernel_ms"] = kernel_ms(run, device, where)
        if kernels.last_device() != device:
            row["failed"] = f"it was drawn on {kernels.last_device()}"
        if args.check and device != "cpu":
            row["check_error"] = _difference(run(), call(cell, params, targets, "cpu")())


def _difference(found: Any, truth: Any) -> float:
    """The largest of the tensors' errors, as a share of each one's norm; infinite if not finite."""
    if isinstance(found, Tensor):
        found, truth = (found,), (truth,)
    worst = 0.0
    for a, b in zip(found, truth, strict=True):
        a, b = a.detach().cpu().double(), b.detach().cpu().double()
        error = float((a - b).norm() / b.norm().clamp_min(1e-30))
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def _line(row: dict[str, Any]) -> str:
    def number(value: float | None, digits: int = 9, places: int = 3) -> str:
        return f"{'-':>{digits}}" if value is None else f"{value:{digits}.{places}f}"

    ms, kernel, eager = row["ms_median"], row["kernel_ms"], row["eager_ms"]
    work = kernel or ms
    error = "-" if row["check_error"] is None else f"{row['check_error']:.1e}"
    columns = (
        f"{row['op']:8} {row['B']:3} {row['H']:5} {row['T']:5} {row['sigma']:6} {row['scene']:6} ",
        f"{row['backend'] + '*' * row['auto']:9}{row['where']:5}",
        number(ms, 10),
        number(row["ms_spread"]),
        number(row["ms_pipelined"], 10),
        number(kernel, 10),
        number(row["floor_bytes_ms"], 10),
        number(row["floor_flops_ms"], 10),
        number(work and work / row["floor_ms"], 9, 1),
        number(ms and eager and eager / ms, 9, 1),
        f"{error:>9}",
    )
    line = "".join(columns)
    size = (row["H"], row["T"])
    seeds = (row["op"], row["B"], row["sigma"], row["scene"]) == ("fused", 16, 0.004, "small")
    known = (SEED_MS if row["backend"] == "cpu" else SEED_GPU_MS).get(size)
    if seeds and known and ms and row["backend"] not in TORCH:
        line += f"   {known / ms:.1f}x as fast as {known} ms"
    return line + (f"   {row['failed']}" if row.get("failed") else "")


def _hardware() -> dict[str, Any]:
    found: dict[str, Any] = hardware(torch.get_num_threads())
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found
