"""What capturing costs on the render thread, against a plain copy of the same rows.

    python benchmarks/capture.py [--quick] [--json FILE]

A loop stands for a host's: every 4 ms it captures a frame (timed), then copies as many rows with
`numpy.copyto` (timed: the yardstick of the same moment), then sleeps. Frames come from four
buffers in turn, as they would from a readback ring, and the yardstick's rows as well, so neither
is measured on warm caches alone. The trainer is a process that speaks the protocol and learns
nothing:

    streaming   it takes every frame
    stopped     it has been SIGSTOPped: first unnoticed, then lost
    dead        it has been killed
    absent      nobody ever listened

`taken` counts captures that went into the ring; others were dropped after the checks. The figures
of a shared machine vary; the ratio within a run says more than the microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from doublure_plugin import Session, Source

ROWS = 4096
PAUSE_S = 0.004
ROOT = Path(__file__).parents[1]


def hardware() -> dict[str, Any]:
    """What it ran on."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {"cpu": name, "cores": os.cpu_count(), "python": platform.python_version(),
            "numpy": np.__version__, "system": platform.platform(terse=True)}  # fmt: skip


@contextmanager
def trainer_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A trainer that takes every frame, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/plugin/fake_trainer.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def unused_endpoint() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


class Case:
    """One kind of capture at one size."""

    def __init__(self, kind: str, dtype: str, width: int, height: int) -> None:
        self.kind, self.dtype, self.width, self.height = kind, dtype, width, height
        random = np.random.default_rng(0)
        self.rows = [random.uniform(-1, 1, (ROWS, 6)).astype(np.float32) for _ in range(4)]
        for rows in self.rows:
            rows[:, 2] = 0.0
        self.frames = []
        if kind == "capture":
            for _ in range(4):
                frame = random.random((height, width, 4), dtype=np.float32).astype(dtype)
                frame[..., 3] = 1
                self.frames.append(frame)

    def call(self, session: Session, i: int) -> Callable[[], bool]:
        if self.kind == "capture":
            frame = self.frames[i % 4]
            return lambda: session.capture(frame, 0.5)
        rows = self.rows[i % 4]
        return lambda: session.capture_rows(rows, 0.5)


def measure(session: Session, case: Case, calls: int) -> dict[str, Any]:
    """Times of `calls` captures and of as many copies, in turn."""
    clock = time.perf_counter_ns
    taken = 0
    captures, copies = [], []
    slots = [np.empty((ROWS, 6), np.float32) for _ in range(8)]
    for i in range(calls):
        call = case.call(session, i)
        began = clock()
        ok = call()
        captures.append(clock() - began)
        source, slot = case.rows[(i + 2) % 4], slots[i % 8]
        began = clock()
        np.copyto(slot, source)
        copies.append(clock() - began)
        taken += ok
        time.sleep(PAUSE_S)
    capture, copy = np.array(captures) / 1e3, np.array(copies) / 1e3
    return {
        "case": case.kind,
        "dtype": case.dtype,
        "size": f"{case.width}x{case.height}",
        "rows": ROWS,
        "calls": calls,
        "taken": taken,
        "median_us": round(float(np.median(capture)), 2),
        "p99_us": round(float(np.percentile(capture, 99)), 2),
        "max_us": round(float(capture.max()), 2),
        "copy_median_us": round(float(np.median(copy)), 2),
        "copy_p99_us": round(float(np.percentile(copy, 99)), 2),
        "ratio": round(float(np.median(capture) / np.median(copy)), 2),
    }


def wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"benchmark: not within 10 s: {what}")
        time.sleep(0.01)


def run_case(case: Case, calls: int) -> Iterator[dict[str, Any]]:
    source = Source("benchmark", {"none": ""}, {}, case.width, case.height)
    with (
        trainer_process() as (process, endpoint),
        Session(source, (0, 1), trainer=endpoint, rows_per_frame=ROWS) as session,
    ):
        wait(lambda: session.state == "streaming", "streaming")
        measure(session, case, 20)
        yield {"trainer": "streaming", **measure(session, case, calls)}
        process.send_signal(signal.SIGSTOP)
        yield {"trainer": "stopped, unnoticed", **measure(session, case, calls // 4)}
        wait(lambda: session.state == "lost", "lost")
        yield {"trainer": "stopped, lost", **measure(session, case, calls // 2)}
        process.kill()
        process.wait()
        yield {"trainer": "dead", **measure(session, case, calls // 2)}
    with Session(source, (0, 1), trainer=unused_endpoint(), rows_per_frame=ROWS) as session:
        yield {"trainer": "absent", **measure(session, case, calls // 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of capturing on the render thread.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    calls = 120 if arguments.quick else 1200
    machine = hardware()
    print(f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}")
    print(f"{'case':13}{'dtype':9}{'size':11}{'trainer':20}{'taken':>10}"
          f"{'median':>9}{'p99':>9}{'copy':>8}{'ratio':>7}")  # fmt: skip
    rows = []
    for width, height in ((512, 512), (1920, 1080)):
        for kind, dtype in (
            ("capture_rows", "float32"),
            ("capture", "float32"),
            ("capture", "float16"),
        ):
            for row in run_case(Case(kind, dtype, width, height), calls):
                rows.append({**row, "hardware": machine})
                print(f"{row['case']:13}{row['dtype']:9}{row['size']:11}{row['trainer']:20}"
                      f"{row['taken']:>5}/{row['calls']:<4}{row['median_us']:>8.1f}"
                      f"{row['p99_us']:>9.1f}{row['copy_median_us']:>8.1f}{row['ratio']:>7.1f}",
                      flush=True)  # fmt: skip
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
