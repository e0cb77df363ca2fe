"""The `doublure capture` command."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..hosts import HOSTS
from ..scenes import SCENES
from .capture import capture_dataset
from .scene_hosts import MAX_SIDE, SceneHost, open_scene

__all__ = ["capture"]


def capture(
    out: Annotated[Path, typer.Option(help="Dataset directory: a new or an empty one.")],
    scene: Annotated[str, typer.Option(help=f"{', '.join(SCENES)}.")] = "plasma",
    frames: Annotated[int, typer.Option(help="Training frames.", min=2, max=512)] = 48,
    validation: Annotated[int, typer.Option(help="Validation frames.", min=2, max=128)] = 13,
    pixels: Annotated[int, typer.Option(help="Pixels a frame.", min=1, max=65536)] = 2048,
    seed: Annotated[int, typer.Option(help="Of the pixels.")] = 4090,
    size: Annotated[str, typer.Option(help=f"WxH in pixels, at most {MAX_SIDE}.")] = "512x512",
    host: Annotated[str, typer.Option(help=f"{', '.join(HOSTS)}.")] = "auto",
) -> None:
    """Capture a scene's pixels over its parameter's range, as a dataset to train on offline."""
    # Mesa's EGL, which wgpu asks for adapters too, complains on stderr where this is not set.
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    if scene not in SCENES:
        raise typer.BadParameter(f"--scene: expected one of {', '.join(SCENES)}, got {scene!r}")
    if host not in HOSTS:
        raise typer.BadParameter(f"--host: expected one of {', '.join(HOSTS)}, got {host!r}")
    width, height = _size(size)
    console = Console()
    began = time.perf_counter()
    try:
        with open_scene(scene, name=host, size=(width, height)) as source:
            console.print(f"{scene} on {source.name}", highlight=False, soft_wrap=True)
            source.check_determinism()
            _capture(source, console, out, frames, validation, pixels, seed)
    except KeyboardInterrupt:
        console.print("interrupted: nothing was kept", highlight=False)
        raise typer.Exit(130) from None
    rows = (frames + validation) * pixels
    console.print(
        f"{rows:,} rows of {frames} + {validation} frames in {time.perf_counter() - began:.1f} s; "
        f"train on them with `doublure train --dataset {out} --out MODEL`",
        highlight=False,
        soft_wrap=True,
    )


def _capture(
    source: SceneHost,
    console: Console,
    out: Path,
    frames: int,
    validation: int,
    pixels: int,
    seed: int,
) -> None:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("frames,"), TimeRemainingColumn(), TextColumn("to go"),
    )  # fmt: skip
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("capturing", total=frames + validation)
        capture_dataset(
            source,
            out,
            parameter=source.scene.parameter,
            training_frames=frames,
            validation_frames=validation,
            pixels_per_frame=pixels,
            seed=seed,
            progress=lambda done, _: bar.update(task, completed=done),
        )


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if match:
        width, height = (int(side) for side in match.groups())
        if 1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE:
            return width, height
    raise typer.BadParameter(f"--size: expected WxH, each 1..{MAX_SIDE}, got {text!r}")
