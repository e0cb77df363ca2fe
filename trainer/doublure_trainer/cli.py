"""`doublure trainer`: the server in a terminal, with what its jobs are doing."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.table import Table

from .hub import Hub
from .server import serve, setup_logging

__all__ = ["jobs_table", "plain_line", "trainer"]

DEFAULT_BIND = "tcp://127.0.0.1:5570"
_REFRESH_HZ = 4
_PLAIN_EVERY_S = 5.0

log = logging.getLogger("doublure.trainer")


def trainer(
    bind: Annotated[str, typer.Option(help="Where to listen; this machine only.")] = DEFAULT_BIND,
    directory: Annotated[
        Path | None,
        typer.Option(help="Keep checkpoints and TensorBoard logs here; else nothing is kept."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    verbose: Annotated[bool, typer.Option("--verbose", help="Say more.")] = False,
) -> None:
    """Serve training jobs to hosts that attach; Ctrl-C stops every job and leaves."""
    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter("expected auto, cpu or cuda", param_hint="--device")
    console = Console()
    display = _Display(console)
    if console.is_terminal:
        handler = RichHandler(
            console=console, show_path=False, show_level=verbose, log_time_format="%H:%M:%S"
        )
        setup_logging(verbose=verbose, handler=handler)
    else:
        setup_logging(verbose=verbose)
    try:
        serve(bind=bind, directory=directory, device=device, on_ready=display.start)
    finally:
        display.stop()


class _Display:
    """Jobs as a live table on a terminal, as a line every few seconds elsewhere.

    Draws in threads of its own: the server's loop only ever hands out copies of its figures.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._over = threading.Event()

    def start(self, hub: Hub) -> None:
        self._console.print(
            f"doublure trainer: listening on {hub.endpoint}; Ctrl-C stops", highlight=False
        )
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=lambda: _jobs_or_wait(hub.snapshot()),
                console=self._console,
                refresh_per_second=_REFRESH_HZ,
                transient=True,
            )
            self._live.start()
        else:
            threading.Thread(
                target=self._print_lines, args=(hub,), name="display", daemon=True
            ).start()

    def stop(self) -> None:
        self._over.set()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print_lines(self, hub: Hub) -> None:
        while not self._over.wait(_PLAIN_EVERY_S):
            for figures in hub.snapshot():
                print(plain_line(figures), flush=True)


def _jobs_or_wait(jobs: list[dict[str, Any]]) -> Table | str:
    return jobs_table(jobs) if jobs else "waiting for a host"


def jobs_table(jobs: list[dict[str, Any]]) -> Table:
    """The sessions' figures (`Hub.snapshot`) as a table, one a row."""
    table = Table(box=None, pad_edge=False)
    for name in ("session", "host", "state", "family"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "samples/s", "held-out dB", "version", "frames/s", "dropped"):
        table.add_column(name, justify="right", no_wrap=True)
    for job in jobs:
        table.add_row(
            job["name"],
            job["host"],
            _state(job),
            job["family"],
            f"{job['step']:,}",
            f"{job['samples_per_s']:,.0f}",
            _decibels(job),
            str(job["version"]),
            f"{job['frames_per_s']:.1f}",
            str(job["dropped"]),
        )
    return table


def plain_line(job: dict[str, Any]) -> str:
    """One session's figures in one line, for logs and pipes."""
    return (
        f"{job['name']} {_state(job)} step {job['step']} {job['samples_per_s']:.0f} samples/s "
        f"held-out {_decibels(job)} dB version {job['version']} "
        f"frames {job['frames_per_s']:.1f}/s dropped {job['dropped']}"
    )


def _state(job: dict[str, Any]) -> str:
    """What the job does, while its session is open; else how the session stands."""
    return str(job["training"] or job["state"]) if job["state"] == "open" else str(job["state"])


def _decibels(job: dict[str, Any]) -> str:
    value = job["held_out"].get("psnr_db")
    return "-" if value is None else f"{value:.2f}"
