"""`doublure fit`: a photograph rebuilt from soft triangles, in a terminal or a script.

Imports the fitter only once it fits, since `doublure` loads every sub-command.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

if TYPE_CHECKING:
    from .fit.runs import FitProgress, FitResult

__all__ = ["fit"]

_PLAIN_EVERY_S = 2.0
_ADVICE = {
    "converged": "no better scene in {patience} iterations",
    "diverged": "the loss ran away; the best scene before that is kept. Try lower rates: "
    "--position-rate, --colour-rate, --alpha-rate",
}


def fit(
    context: typer.Context,
    photo: Annotated[
        Path | None,
        typer.Argument(help="Any picture that Pillow reads; not needed with --resume."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="New or empty directory for the results.  [default: PHOTO-fit]"),
    ] = None,
    triangles: Annotated[int, typer.Option(help="How many.")] = 150,
    iters: Annotated[int, typer.Option(help="Iterations of gradient descent.")] = 800,
    size: Annotated[int, typer.Option(help="Longest side while fitting, pixels.")] = 192,
    export_size: Annotated[
        int | None,
        typer.Option(help="Longest side of export.png.  [default: the photo's, at most 2048]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first triangles.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on in --out where a fit was stopped or killed.")
    ] = False,
    start: Annotated[str, typer.Option(help="First triangles: detail or random.")] = "detail",
    sigma_start: Annotated[
        float, typer.Option(help="Edge softness at first, in image widths.")
    ] = 0.02,
    sigma_end: Annotated[
        float | None,
        typer.Option(help="At last.  [default: 0.0015, at least a quarter of a pixel]"),
    ] = None,
    position_rate: Annotated[float, typer.Option(help="Adam's rate for vertices.")] = 0.004,
    colour_rate: Annotated[float, typer.Option(help="For colours.")] = 0.02,
    alpha_rate: Annotated[float, typer.Option(help="For opacities.")] = 0.01,
    beta1: Annotated[float, typer.Option(help="Adam's, of gradients.")] = 0.9,
    beta2: Annotated[float, typer.Option(help="Adam's, of their squares.")] = 0.97,
    epsilon: Annotated[float, typer.Option(help="Adam's.")] = 1e-8,
    patience: Annotated[
        int, typer.Option(help="Stop after so many iterations without a better scene; 0 never.")
    ] = 250,
    divergence: Annotated[
        float, typer.Option(help="Stop when the loss is so many times the first one.")
    ] = 4.0,
    background: Annotated[
        str, typer.Option(help="Behind the triangles: mean, black, white, grey or #rrggbb.")
    ] = "mean",
    matte: Annotated[
        str | None,
        typer.Option(help="Behind a transparent picture.  [default: --background, or white]"),
    ] = None,
    kernel: Annotated[str, typer.Option(help="Coverage of an edge: sigmoid or compact.")] = (
        "sigmoid"
    ),
    support: Annotated[str, typer.Option(help="Reach of an edge: exact or bbox6.")] = "exact",
    coarse: Annotated[
        float,
        typer.Option(help="Halve the picture while sigma is more than so many pixels; 0 never."),
    ] = 0.5,
    frames_every: Annotated[
        int | None,
        typer.Option(help="Iterations between pictures of frames/, 0 for none.  [default: 40 all]"),
    ] = None,
    animation: Annotated[str, typer.Option(help="Of the frames: gif, apng or none.")] = "gif",
    fps: Annotated[float, typer.Option(help="Frames a second of the animation.")] = 15.0,
    plot: Annotated[bool, typer.Option(help="Draw loss.png.")] = True,
    svg: Annotated[bool, typer.Option(help="Write scene.svg.")] = True,
    device: Annotated[str, typer.Option(help="auto, cpu, gpu or vulkan.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.  [default: all]")] = None,
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 5.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")] = False,
) -> None:
    """Rebuild a photograph from soft triangles; writes pictures, scene.json and SVG."""
    try:
        from .cpu import prepare
        from .fit import runs
        from .fit.settings import FitSettings
    except ImportError as error:
        sys.exit(f"doublure fit: {error}; run `pip install 'doublure[kernels]'`")

    if photo is None and not resume:
        raise typer.BadParameter("PHOTO: expected a picture file; only --resume does without")
    if out is None:
        if photo is None:
            raise typer.BadParameter("--resume: expected the earlier fit's directory in --out")
        out = Path(f"{photo.stem}-fit")
    given: dict[str, Any] = {
        "triangles": triangles, "iterations": iters, "size": size, "seed": seed, "start": start,
        "sigma_start": sigma_start, "sigma_end": sigma_end,
        "position_rate": position_rate, "colour_rate": colour_rate, "alpha_rate": alpha_rate,
        "beta1": beta1, "beta2": beta2, "epsilon": epsilon,
        "patience": patience, "divergence": divergence, "background": background,
        "kernel": kernel, "support": support, "coarse": coarse,
    }  # fmt: skip
    shown: dict[str, Any] = {
        "export_size": export_size, "frames_every": frames_every, "animation": animation,
        "fps": fps, "plot": plot, "svg": svg,
    }  # fmt: skip
    if resume and (out / runs.CHECKPOINT).exists():
        # What is not on the command line is as it was, not as it would be for a new fit.
        stored = runs.stored_fit(out)
        given = stored.settings.to_dict() | _typed(context, given)
        shown = dict(stored.about.get("outputs", {})) | _typed(context, shown)
    settings, outputs = FitSettings.from_dict(given), runs.Outputs(**shown)
    console = Console(quiet=quiet)
    if device in ("auto", "cpu"):
        with _hushed(quiet):
            prepare()  # before Ctrl-C means "write what there is"
    with _stop_signals() as stop, _Display(console, quiet) as display:
        result = runs.fit_into(
            out,
            photo,
            settings,
            outputs=outputs,
            matte=matte,
            resume=resume,
            device=device,
            threads=threads,
            checkpoint_s=checkpoint_every,
            on_progress=display.show,
            should_stop=lambda: bool(stop),
        )
    _say_result(console, result, patience=settings.patience)
    if result.stopped == "interrupted":
        raise typer.Exit(128 + stop[0])
    if result.stopped == "diverged":
        raise typer.Exit(1)


def _typed(context: typer.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values that were given on the command line."""
    names = {"iterations": "iters"}
    return {
        name: value
        for name, value in values.items()
        if _source(context, names.get(name, name)) != "DEFAULT"
    }


def _source(context: typer.Context, name: str) -> str:
    # By its name: click's enumeration is typer's own copy in some releases.
    return getattr(context.get_parameter_source(name), "name", "DEFAULT")


def _say_result(console: Console, result: FitResult, *, patience: int) -> None:
    each = 1000 * result.seconds / max(1, result.iterations)
    kept = "nothing was scored yet"
    if result.best_iteration >= 0:
        kept = (
            f"{result.psnr_db:.2f} dB (loss {result.best_loss:.6f}) at iteration "
            f"{result.best_iteration}"
        )
    console.print(
        f"{result.stopped} after {result.iterations} iterations, {result.seconds:.1f} s "
        f"({each:.1f} ms each): {kept}",
        highlight=False,
        soft_wrap=True,
    )
    advice = _ADVICE.get(result.stopped, "").format(patience=patience)
    if result.stopped == "interrupted":
        advice = f"go on with: doublure fit --resume --out {result.directory}"
    if advice:
        console.print(advice, style="yellow", highlight=False, soft_wrap=True, markup=False)
    console.print(f"results are in {result.directory}", highlight=False, soft_wrap=True)


@contextmanager
def _hushed(quiet: bool) -> Iterator[None]:
    """Without the notice that something is being compiled, when quiet."""
    logger = logging.getLogger("doublure_kernels")
    before = logger.level
    if quiet:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM is noted, so that what there is is written; a second one ends."""
    got: list[int] = []
    # Only the main thread may set handlers; elsewhere the caller's stay.
    main = threading.current_thread() is threading.main_thread()
    names = (signal.SIGINT, signal.SIGTERM) if main else ()

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


class _Display:
    """A bar on a terminal; elsewhere a plain line every two seconds; nothing when quiet."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._said = time.perf_counter()

    def __enter__(self) -> _Display:
        if self._console.is_terminal and not self._quiet:
            self._bar = Progress(
                TextColumn("fitting"),
                BarColumn(bar_width=16),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[figures]}"),
                console=self._console,
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, now: FitProgress) -> None:
        """Move the bar, or say a line."""
        if self._quiet:
            return
        if self._bar is None:
            if time.perf_counter() - self._said >= _PLAIN_EVERY_S:
                self._said = time.perf_counter()
                print(now.line, flush=True)
            return
        quality = f"{now.best_psnr_db:.2f} dB at {now.size} px"
        figures = f"{quality} · sigma {now.sigma:.4f} · {now.seconds:.0f} s"
        if self._task is None:
            self._task = self._bar.add_task("fit", total=now.iterations, figures=figures)
        self._bar.update(self._task, completed=now.iteration, figures=figures)
