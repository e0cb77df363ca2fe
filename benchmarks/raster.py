"""What drawing, comparing and differentiating soft triangles costs, cell by cell.

Each cell is timed through the public functions, on torch tensors, beside eager torch computing the
same function in the same run, and beside two floors of this machine: moving the bytes that must be
moved, and computing what the (pixel, triangle) pairs need.

    python benchmarks/raster.py --cells seed --json raster.json

Eager torch evaluates every triangle at every pixel, a strip of rows at a time; where an image would
take minutes it is timed on some of its rows and items, and multiplied (`eager_share` says of how
much it was timed; its cost is proportional to rows and items).

On a GPU, backends and torch's eager and compiled ways are rows beside each other, with the time of
the kernels alone, with tensors on the GPU and on the host:

    python benchmarks/raster.py --cells gpu --check --json raster-gpu.json

(`--device cuda,vulkan,eager,compiled,cpu,auto`; what is not there is named and left out. With
`auto` a star marks what that draws on; run `doublure calibrate` before.)
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doublure_kernels as kernels
import torch
from _raster_cells import SEED_MS, Cell, call, cells, count_pairs, scene
from _raster_compare import compare
from _raster_floors import floors_ms, host_bandwidth, host_peak
from _raster_gpu import Eager
from _streams import hardware

_HEAD = (
    "op         B  size     T  sigma scene         ms   spread      eager   ratio   Mpairs    floor"
)


def main() -> None:
    args = _arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device != "cpu":
        compare(args)
        return
    rows = []
    print(f"{hardware(torch.get_num_threads())}; backend {args.device}")
    bandwidth, peak = host_bandwidth(), host_peak()
    print(f"floors from {bandwidth / 1e9:.1f} GB/s copied and {peak / 1e9:.0f} GFLOP/s multiplied")
    print(_HEAD)
    for cell in cells(args):
        row = measure(cell, args, bandwidth, peak)
        rows.append(row)
        ratio = f"{row['eager_ms'] / row['ms_median']:.0f}x" if row["eager_ms"] else "-"
        line = (
            f"{cell.op:8} {cell.batch:3} {cell.size:5} {cell.triangles:5} {cell.sigma:6} "
            f"{cell.scene:6} {row['ms_median']:9.3f} {row['ms_spread']:8.3f} "
            f"{row['eager_ms'] or math.nan:10.1f} {ratio:>7} {row['pairs'] / 1e6:8.2f} "
            f"{row['floor_ms']:8.3f}"
        )
        known = SEED_MS.get((cell.size, cell.triangles))
        if known and (cell.op, cell.batch, cell.sigma, cell.scene) == ("fused", 16, 0.004, "small"):
            line += f"   {known / row['ms_median']:.1f}x as fast as {known} ms"
        print(line, flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


def measure(cell: Cell, args: argparse.Namespace, bandwidth: float, peak: float) -> dict[str, Any]:
    params, targets = scene(cell)
    with torch.no_grad():
        run = call(cell, params, targets, args.device)
        run()
        times = _times(run, args)
    soft, solid = count_pairs(params, cell)
    floor = floors_ms(cell, soft, solid, bandwidth, peak)
    eager, timed = (None, 0.0) if args.no_eager else Eager().measure(cell, params, targets)
    return {
        "backend": kernels.last_device(), "op": cell.op, "B": cell.batch, "H": cell.size,
        "W": cell.size, "T": cell.triangles, "sigma": cell.sigma, "scene": cell.scene,
        "ms_median": statistics.median(times), "ms_spread": max(times) - min(times),
        "ms_min": min(times), "eager_ms": eager, "eager_share": timed, "pairs": soft + solid,
        "floor_ms": max(floor), "floor_bytes_ms": floor[0], "floor_flops_ms": floor[1],
        "where": "cpu", "kernel_ms": None, "hardware": hardware(torch.get_num_threads()),
    }  # fmt: skip


def _times(run: Callable[[], Any], args: argparse.Namespace) -> list[float]:
    """Milliseconds a call: as many as fit the time, 3 at least, in groups where they are short."""
    start = time.perf_counter()
    run()
    once = time.perf_counter() - start
    group = max(1, round(0.004 / once))
    repeats = max(3, min(args.repeats, round(args.seconds / (once * group))))
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(group):
            run()
        found.append((time.perf_counter() - start) / group * 1e3)
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cells", choices=["seed", "few", "gpu", "all"], default="few",
        help="seed: nine of a published table; few, gpu: minutes; all: the whole grid, hours",
    )  # fmt: skip
    parser.add_argument("--op", default="fused", help="fused, forward, or both with a comma")
    parser.add_argument(
        "--device", help="one, or several with commas; with --cells gpu all, else cpu"
    )
    parser.add_argument("--check", action="store_true", help="compare results with the CPU's")
    parser.add_argument(
        "--compile-seconds", type=float, default=45.0, help="of torch.compile, in all"
    )
    parser.add_argument("--threads", type=int, help="torch's, for eager")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--seconds", type=float, default=1.0, help="at most, a cell")
    parser.add_argument("--no-eager", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.device is None:
        args.device = "cuda,vulkan,eager,compiled,cpu,auto" if args.cells == "gpu" else "cpu"
    if args.check and args.device == "cpu":
        parser.error("--check compares other devices with the CPU: give one in --device")
    return args


if __name__ == "__main__":
    main()
