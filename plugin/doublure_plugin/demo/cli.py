"""The `doublure demo` command."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..hosts import HOSTS
from ..scenes import SCENES, choose_scenes
from .run import DEFAULT_ROWS, DemoOptions, Status, Watch, run_scene, write_summary

__all__ = ["demo"]

_LINE_EVERY_S = 0.125
_PLAIN_EVERY_S = 2.0


def demo(
    scene: Annotated[
        str, typer.Option(help=f"{', '.join(SCENES)}, all (the first five) or every.")
    ] = "plasma",
    seconds: Annotated[float, typer.Option(help="Training time a scene, s.", min=1)] = 30.0,
    host: Annotated[str, typer.Option(help=f"{', '.join(HOSTS)}.")] = "auto",
    out: Annotated[Path, typer.Option(help="Directory for pictures and summary.json.")] = Path(
        "doublure-demo"
    ),
    size: Annotated[int, typer.Option(help="Width and height, pixels.", min=16, max=8192)] = 512,
    rows: Annotated[
        int, typer.Option(help="Pixels sampled a capture.", min=64, max=1 << 18)
    ] = DEFAULT_ROWS,
    model: Annotated[str, typer.Option(help="grid, compact, or auto to race them.")] = "auto",
    trainer: Annotated[
        str | None, typer.Option(help="Address of a running trainer; starts one if not given.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of sampling and training.")] = 0,
    window: Annotated[
        bool,
        typer.Option(
            "--window",
            help="Show it: Esc or closing stops the scene, space compares with the source.",
        ),
    ] = False,
) -> None:
    """Draw an expensive shader, learn its stand-in live, and swap it in while it runs."""
    began = time.perf_counter() - _process_age()
    # Mesa's EGL, which wgpu asks for adapters too, complains on stderr where this is not set.
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    try:
        names = choose_scenes(scene)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if host not in HOSTS:
        raise typer.BadParameter(f"expected one of {', '.join(HOSTS)}, got {host!r}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(13, "not writable")
    except OSError as error:
        raise typer.BadParameter(
            f"--out: expected a directory that can be written, got {out} ({error.strerror}); "
            "choose another with --out DIR"
        ) from None
    options = DemoOptions(
        seconds=seconds, host=host, out=out, size=(size, size), model=model, trainer=trainer,
        seed=seed, rows=rows, window=window,
    )  # fmt: skip
    console = Console()
    runs: list[dict[str, Any]] = []
    interrupted = False
    try:
        for name in names:
            with _watching(console) as watch:
                runs.append(run_scene(name, options, watch, began=began))
            _say_result(console, runs[-1])
            began = time.perf_counter()
    except KeyboardInterrupt:
        # The context managers have stopped training and closed the host in order by now.
        interrupted = True
        console.print("[yellow]interrupted: training was stopped and nothing is left running[/]")
    finally:
        if runs or interrupted:
            write_summary(out, runs, {"interrupted": interrupted, "hardware": _hardware()})
    if len(runs) > 1:
        console.print(_results(runs))
    if runs:
        console.print(f"pictures and summary.json are in {out}")
    if interrupted:
        raise typer.Exit(130)
    if any(run["held_out_psnr_db"] is None and not run["stopped_early"] for run in runs):
        raise typer.Exit(1)


@contextmanager
def _watching(console: Console) -> Iterator[Watch]:
    """A live line on a terminal, a plain line every two seconds elsewhere."""
    shown_at = -1e9
    if not console.is_terminal:

        def plain(status: Status) -> None:
            nonlocal shown_at
            _say_notices(console, status)
            now = time.perf_counter()
            if now - shown_at >= _PLAIN_EVERY_S:
                shown_at = now
                print(status.line, flush=True)

        yield plain
        return
    # Refreshed by us: a refreshing thread would take the interpreter lock from the render loop.
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def watch(status: Status) -> None:
            nonlocal shown_at
            _say_notices(console, status)
            now = time.perf_counter()
            if now - shown_at >= _LINE_EVERY_S:
                shown_at = now
                live.update(Text(status.line, no_wrap=True, overflow="ellipsis"), refresh=True)

        yield watch


def _say_notices(console: Console, status: Status) -> None:
    for text in status.notices:
        console.print(Text(f"{status.scene}: {text}", style="yellow"), soft_wrap=True)
    status.notices.clear()


def _say_result(console: Console, run: dict[str, Any]) -> None:
    if run["held_out_psnr_db"] is None:
        console.print(f"{run['scene']}: no weights passed the gate in {run['seconds']:.1f} s")
        return
    stop = "" if run["stop_ms"] is None else f", stopped in {run['stop_ms']:.0f} ms"
    console.print(
        f"{run['scene']}: {run['held_out_psnr_db']:.1f} dB on test slices after "
        f"{run['seconds']:.0f} s of training; first learned pixels after "
        f"{run['first_learned_pixels_s']:.1f} s; {run['reloads']} reloads{stop}; {run['verdict']}",
        highlight=False,
        soft_wrap=True,
    )


def _results(runs: list[dict[str, Any]]) -> Table:
    # Without padding of its own it fits into eighty columns, the width of a pipe.
    title = "on test slices, which training and gate never saw"
    table = Table(title=title, box=box.SIMPLE, padding=0)
    columns = {
        "scene": "scene", "dB": "held_out_psnr_db", "relMSE": "held_out_relmse",
        "first s": "first_learned_pixels_s", "reloads": "reloads",
        "source ms": "source_frame_ms", "stand-in ms": "standin_frame_ms",
        "capture µs": "capture_us_median", "stop ms": "stop_ms",
    }  # fmt: skip
    for title in columns:
        table.add_column(title, justify="left" if title == "scene" else "right", no_wrap=True)
    for run in runs:
        table.add_row(*(_cell(run[key]) for key in columns.values()))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.3g}"


def _hardware() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "doublure": version("doublure"),
    }


def _process_age() -> float:
    """Seconds since this process was started, so that start-up counts; 0 where unknown.

    DOUBLURE_STARTED, seconds since boot, says it where the process installed something first.
    """
    if sys.platform != "linux":
        return 0.0
    try:
        after_name = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        started = float(os.environ.get("DOUBLURE_STARTED", started))
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError):
        return 0.0
