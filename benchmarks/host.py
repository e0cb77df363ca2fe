"""What the embedded host costs: a frame of source and stand-in, the render thread, a reload.

    python benchmarks/host.py [--quick] [--json FILE] [--host wgpu|numpy] [--size PX] [--scene NAME]

One row a scene:

    source_ms, standin_ms   one frame on the device, drawn alone and waited for (median, spread
                            between the quartiles); grid and compact model with random weights
    frame_us                what `frame` holds the render thread: encode, submit, hand over
    collect_us              of that, looking for rows and handing 4096 of them to a session that
                            copies them
    reload_us               what `frame` takes longer when it swaps weights in
    stall_us                the longest single frame of the loop

A software device draws on the CPU that everything else uses: compare within a run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from doublure_bridge.models import CompactSpec, GridSpec, ModelSpec
from doublure_plugin.evaluate import Evaluator
from doublure_plugin.hosts import Host, open_host
from doublure_plugin.scenes import SCENES, choose_scenes

GRID = GridSpec(xy=(256, 256), xt=(32, 64), yt=(32, 64), volume=(32, 48, 48))
COMPACT = CompactSpec()
ROWS = 4096


class Copying:
    """A session that copies rows into one buffer and publishes what it is given."""

    opened = True
    wants_frames = True
    model_specs = (GRID, COMPACT)

    def __init__(self) -> None:
        self.kept = np.zeros((ROWS, 6), np.float32)
        self.captures = 0
        self.next: Any = None
        self.applied_versions: list[int] = []

    def capture_rows(self, rows: Any) -> bool:
        self.kept[:] = rows
        self.captures += 1
        return True

    def capture(self, pixels: Any, t: float) -> bool:
        raise NotImplementedError(f"rows are wanted, not {pixels.shape} at {t}")

    def poll(self) -> Any:
        weights, self.next = self.next, None
        return weights

    def reject(self, weights: Any, reason: str) -> None:
        raise SystemExit(f"weights {weights.version} were rejected: {reason}")

    def applied(self, weights: Any) -> None:
        self.applied_versions.append(weights.version)


def random_weights(spec: ModelSpec, version: int) -> Any:
    rng = np.random.default_rng(version)
    tensors = {n: rng.normal(0, 0.3, t.shape).astype(t.dtype) for n, t in spec.tensors().items()}
    points = rng.uniform(-1, 1, (64, 3)).astype(np.float32)
    probes = (points, Evaluator(spec, tensors)(points))
    return SimpleNamespace(version=version, spec=spec, tensors=tensors, probes=probes)


def draw(host: Host, t: float) -> float:
    """One frame, once the device is free; microseconds that it held the thread."""
    while True:
        began = time.perf_counter()
        if host.frame(t):
            return (time.perf_counter() - began) * 1e6
        time.sleep(0.0005)


def spread(values: Any) -> dict[str, float]:
    low, median, high = np.percentile(values, (25, 50, 75))
    return {"median": round(float(median), 2), "spread": round(float(high - low), 2)}


def measure_scene(name: str, args: argparse.Namespace) -> dict[str, Any]:
    frames, reloads, repeats = (40, 12, 5) if args.quick else (200, 60, 25)
    scene = SCENES[name]
    low, high = scene.parameter
    size = (args.size, args.size)
    with open_host(scene, name=args.host, size=size, rows_per_capture=ROWS) as host:
        host.prepare_all((GRID, COMPACT))
        session = Copying()
        host.attach(session)
        row: dict[str, Any] = {
            "scene": name, "host": host.name, "device": host.device, "size": args.size,
            "frames": frames, "rows_per_frame": ROWS,
        }  # fmt: skip
        timing = host.measure(repeats=repeats)
        row["source_ms"] = {
            "median": round(timing.source_frame_ms, 3), "spread": round(timing.spread_ms[0], 3)
        }  # fmt: skip
        row["method"] = timing.method
        for spec in (COMPACT, GRID):  # the grid model stays on for the loop
            version = len(session.applied_versions) + 1
            session.next = random_weights(spec, version)
            while version not in session.applied_versions:
                draw(host, low)
            timing = host.measure(repeats=repeats)
            assert timing.standin_frame_ms is not None
            assert timing.spread_ms[1] is not None
            row[f"standin_{spec.family}_ms"] = {
                "median": round(timing.standin_frame_ms, 3),
                "spread": round(timing.spread_ms[1], 3),
            }
        row["verdict"] = timing.verdict
        compiles, collected = host.stats.shader_compiles, len(host.collect_us())
        plain = [draw(host, low + (high - low) * i / frames) for i in range(frames)]
        row["frame_us"] = spread(plain)
        row["stall_us"] = round(max(plain), 1)
        # Only the polls that found rows: the others cost next to nothing.
        collects = np.sort(host.collect_us()[collected:])[-frames:]
        row["collect_us"] = spread(collects)
        pool = [random_weights(GRID, 100 + i) for i in range(4)]
        swaps = []
        for i in range(reloads):
            weights = pool[i % 4]
            weights.version = 1000 + i
            session.next = weights
            swaps.append(draw(host, low))
            assert session.applied_versions[-1] == 1000 + i, "a reload was not drawn at once"
        row["reload_us"] = spread(np.array(swaps) - row["frame_us"]["median"])
        row["reload_compiles"] = host.stats.shader_compiles - compiles
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description="Frame, render-thread and reload costs of a host")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="fewer frames")
    parser.add_argument("--host", default="auto", choices=("auto", "wgpu", "numpy"))
    parser.add_argument("--scene", choices=list(SCENES), action="append")
    parser.add_argument("--size", type=int, default=512)
    args = parser.parse_args()
    hardware = {
        "machine": platform.machine(), "cores": os.cpu_count(), "system": platform.platform(),
        "python": platform.python_version(), "numpy": np.__version__,
    }  # fmt: skip
    print(", ".join(f"{k} {v}" for k, v in hardware.items()))
    rows = []
    for name in args.scene or choose_scenes("all"):
        row = measure_scene(name, args)
        rows.append({**row, "hardware": hardware})
        if len(rows) == 1:
            print(f"{row['host']}: {row['device']}, {row['method']}; median (spread)")
            print(
                f"{'scene':8}{'source ms':>16}{'grid ms':>16}{'compact ms':>16}{'frame us':>16}"
                f"{'collect us':>16}{'reload us':>18}{'stall us':>10}"
            )
        cells = (
            "source_ms", "standin_grid_ms", "standin_compact_ms", "frame_us", "collect_us"
        )  # fmt: skip
        text = "".join(
            f"{row[c]['median']:>9.1f} ({row[c]['spread']:.1f})".rjust(16) for c in cells
        )
        reload = f"{row['reload_us']['median']:.0f} ({row['reload_us']['spread']:.0f})"
        print(f"{name:8}{text}{reload:>18}{row['stall_us']:>10.0f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
