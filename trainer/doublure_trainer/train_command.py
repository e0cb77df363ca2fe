"""`doublure train`: offline training in a terminal, or as a child with its output in a log.

Imports torch only once it trains, since `doublure` loads every sub-command.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

if TYPE_CHECKING:
    from .config import TrainConfig
    from .offline import OfflineProgress

__all__ = ["main", "train"]

_DESCRIPTION = "Learn a stand-in from a captured dataset; writes weights and a report."


def train(
    dataset: Annotated[
        Path, typer.Option(help="Directory with dataset.json, train.f32 and validation.f32.")
    ],
    out: Annotated[
        Path, typer.Option(help="Model directory: a new one, or with --resume the one to go on in.")
    ],
    steps: Annotated[int, typer.Option(help="Optimiser steps in all.")] = 12_000,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where a stopped or killed training was.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    family: Annotated[
        str | None, typer.Option(help="race (tries every family), grid or compact.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Sizes of the models: small, medium or large.")
    ] = None,
    budget_macs: Annotated[
        int | None, typer.Option(help="At most so many multiply-accumulates a pixel.")
    ] = None,
    budget_bytes: Annotated[int | None, typer.Option(help="At most so many bytes.")] = None,
    config: Annotated[
        str | None, typer.Option(help="Settings as JSON, or a file that holds some.")
    ] = None,
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 5.0,
) -> None:
    """Learn a stand-in from a captured dataset; writes weights and a report."""
    with _stop_signals() as stop:
        try:
            from .offline import StoppedError, train_offline
        except ImportError as error:
            sys.exit(f"doublure train: {error}; run `pip install 'doublure[trainer]'`")
        settings = _settings(
            config,
            threads=threads,
            family=family,
            preset=preset,
            budget_macs=budget_macs,
            budget_bytes=budget_bytes,
        )
        display = _Display(Console())
        try:
            with display:
                path = train_offline(
                    dataset,
                    out,
                    steps=steps,
                    resume=resume,
                    config=settings,
                    device=device,
                    seed=seed,
                    checkpoint_s=checkpoint_every,
                    on_progress=display.show,
                    on_line=display.line,
                    should_stop=lambda: bool(stop),
                )
        except StoppedError as error:
            print(f"doublure train: {error}", file=sys.stderr)
            raise typer.Exit(128 + stop[0]) from None
    print(f"{path / 'weights.safetensors'}", flush=True)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM is noted, so that a step ends first; the second one ends us."""
    got: list[int] = []
    # Only the main thread may set handlers; elsewhere the caller's stay.
    names = (
        (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is threading.main_thread()
        else ()
    )

    def note(number: int, _: FrameType | None) -> None:
        got.append(number)
        for name, handler in before.items():
            signal.signal(name, handler)

    before: dict[signal.Signals, Any] = {name: signal.signal(name, note) for name in names}
    try:
        yield got
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _settings(
    config: str | None,
    *,
    threads: int | None,
    family: str | None,
    preset: str | None,
    budget_macs: int | None,
    budget_bytes: int | None,
) -> TrainConfig:
    """Settings from --config, then the options that name one.

    Raises:
        TrainerError: A setting or a combination that does not exist, or a budget nothing fits.
    """
    from .config import ConfigError, TrainConfig
    from .models.presets import PRESETS, within_budget
    from .models.presets import preset as find_preset

    data = _read_config(config) if config is not None else {}
    options = {"threads": threads, "family": family}
    data |= {key: value for key, value in options.items() if value is not None}
    if preset is not None and (budget_macs is not None or budget_bytes is not None):
        raise ConfigError(
            "--preset with --budget-macs or --budget-bytes",
            expected="one way to choose the models' sizes",
        )
    if preset is not None:
        data |= {name: find_preset(name, preset) for name in PRESETS}
    elif budget_macs is not None or budget_bytes is not None:
        fitting = within_budget(budget_macs, budget_bytes)
        data |= fitting
        wanted = data.get("family", "race")
        if wanted == "race" and len(fitting) == 1:
            data["family"] = next(iter(fitting))
        elif wanted != "race" and wanted not in fitting:
            raise ConfigError(
                f"--family {wanted}",
                expected="a family that fits the budget",
                got=f"only {', '.join(fitting)} does",
            )
    return TrainConfig.from_dict(data)


def _read_config(text: str) -> dict[str, Any]:
    from .config import ConfigError

    source = "--config"
    if not text.lstrip().startswith("{"):
        source = f"--config {text}"
        try:
            text = Path(text).read_text()
        except OSError as error:
            raise ConfigError(
                source, expected="JSON, or a file that holds some", got=error.strerror or str(error)
            ) from error
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(source, expected="JSON", got=str(error)) from error
    if not isinstance(data, dict):
        raise ConfigError(source, expected="a map of settings", got=type(data).__name__)
    return data


class _Display:
    """A bar on a terminal; elsewhere the log's lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> _Display:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=12),  # so that the longest line fits eighty columns
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[figures]}"),
                console=self._console,
            )
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, now: OfflineProgress) -> None:
        """Move the bar."""
        if self._bar is None:
            return
        figures = []
        if now.held_out_psnr_db is not None:
            figures.append(f"held-out {now.held_out_psnr_db:.2f} dB")
        if now.eta_s is not None and now.state == "training":
            figures.append(f"{_clock(now.eta_s)} to go")
        if now.steps_per_s:
            figures.append(f"{now.steps_per_s:.0f} steps/s")
        text = " · ".join(figures)
        if self._task is None:
            self._task = self._bar.add_task(now.state, total=now.steps, figures=text)
        self._bar.update(self._task, completed=now.step, description=now.state, figures=text)

    def line(self, text: str) -> None:
        """One line of the log; on a terminal the bar says what those of the steps say."""
        if self._bar is None:
            print(text, flush=True)
        elif not text.startswith("step "):
            self._console.print(text, highlight=False)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def main(name: str = "python -m doublure_trainer train", words: list[str] | None = None) -> None:
    """Run the command by itself; errors are one line unless --debug is given."""
    words = list(sys.argv[1:] if words is None else words)
    debug = "--debug" in words or os.environ.get("DOUBLURE_DEBUG") == "1"
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    run: Callable[..., None] = train
    app.command(help=_DESCRIPTION)(run)
    try:
        app([word for word in words if word != "--debug"], prog_name=name)
    except Exception as error:
        if debug:
            raise
        sys.exit(f"{name}: {error}\nRun again with --debug for the traceback.")
