"""A fit in a directory of its own: pictures, scene, table and plot, and a way to go on.

A directory belongs to one fit. Anything else in it is refused, a lock keeps a second process out,
and files are replaced whole, so that neither a mistake nor a crash costs an earlier result.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import numpy as np

from ..backend import Backend
from ..errors import ResumeError, SettingError
from .checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from .files import TEMPORARY, write_text
from .fitter import Fit, psnr_db
from .pictures import read_photo
from .report import Animation, save_animation, save_losses, save_picture, save_plot
from .scene_file import save_scene
from .settings import FitSettings, parse_colour
from .svg import save_svg

__all__ = ["FitProgress", "FitResult", "Outputs", "fit_into", "stored_fit"]

CHECKPOINT = "checkpoint.npz"
_LOCK = ".lock"
_FRAMES = "frames"
_CHUNK_S = 0.05  # how long a stop may have to wait
_MAX_EXPORT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What is written beside the scene; may be changed when a fit is resumed.

    Attributes:
        export_size: Longest side of `export.png`, pixels; None is that of the photograph, at most
            2048.
        frames_every: Iterations from one picture of `frames/` to the next; None makes about 40 of
            them, 0 none.
        animation: Of the frames.
        fps: Of the animation.
        plot: Whether to draw `loss.png`, which needs matplotlib.
        svg: Whether to write `scene.svg`.
    Raises:
        SettingError: A value out of its range.
    """

    export_size: int | None = None
    frames_every: int | None = None
    animation: Animation = "gif"
    fps: float = 15.0
    plot: bool = True
    svg: bool = True

    def __post_init__(self) -> None:
        if self.export_size is not None and not 1 <= self.export_size <= 16_384:
            raise SettingError(f"export_size: expected 1 to 16,384 pixels, got {self.export_size}")
        if self.frames_every is not None and self.frames_every < 0:
            raise SettingError(f"frames_every: expected 0 or more, got {self.frames_every}")
        if self.animation not in get_args(Animation):
            raise SettingError(f"animation: expected gif, apng or none, got {self.animation!r}")
        if not 0.1 <= self.fps <= 50:
            raise SettingError(f"fps: expected 0.1 to 50, got {self.fps}")


@dataclass(frozen=True, slots=True)
class FitProgress:
    """Where a fit is: `loss` of the last iteration, `best_loss` of the scene that is kept.

    Both at the size of that iteration, `size` pixels along the longest side.
    """

    iteration: int
    iterations: int
    size: int
    sigma: float
    loss: float
    best_loss: float
    seconds: float

    @property
    def best_psnr_db(self) -> float:
        """Of the scene that is kept."""
        return psnr_db(self.best_loss)

    @property
    def line(self) -> str:
        """One line for a log."""
        return (
            f"iteration {self.iteration}/{self.iterations}  loss {self.loss:.6f}  "
            f"best {self.best_psnr_db:.2f} dB at {self.size} px  "
            f"sigma {self.sigma:.4f}  {self.seconds:.1f} s"
        )


@dataclass(frozen=True, slots=True)
class FitResult:
    """How a fit ended.

    Attributes:
        directory: Where its files are.
        stopped: `completed`, `converged`, `diverged` or `interrupted`.
        iterations: How many there were.
        best_iteration: Which of them had the scene that is kept, from 0; -1 if there were none.
        best_loss: Of that scene at the full size of the fit, mean squared error in linear light.
        seconds: Of the iterations in this process.
    """

    directory: Path
    stopped: str
    iterations: int
    best_iteration: int
    best_loss: float
    seconds: float

    @property
    def psnr_db(self) -> float:
        """Of the scene that is kept, in linear light."""
        return psnr_db(self.best_loss)


def stored_fit(out: str | Path) -> Checkpoint:
    """What a directory can go on from.

    Raises:
        ResumeError: Nothing, or something damaged.
    """
    return load_checkpoint(Path(out) / CHECKPOINT)


def fit_into(
    out: str | Path,
    photo: str | Path | None = None,
    settings: FitSettings | None = None,
    *,
    outputs: Outputs | None = None,
    matte: str | None = None,
    resume: bool = False,
    device: str | Backend = "auto",
    threads: int | None = None,
    checkpoint_s: float = 5.0,
    on_progress: Callable[[FitProgress], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> FitResult:
    """Fit a photograph and write what comes of it.

    Args:
        out: A directory that is new or empty; with `resume`, that of an earlier fit.
        photo: Picture file; with `resume` it may be left out.
        settings: `FitSettings()` if None; with `resume` those of the earlier fit.
        outputs: `Outputs()` if None; with `resume` those of the earlier fit.
        matte: Colour behind what is transparent; if None, that of `settings.background`, or white.
        resume: Go on where the fit in `out` was left; a finished one is only written out again.
        device: See `Fit`.
        threads: See `Fit`.
        checkpoint_s: Seconds between checkpoints.
        on_progress: Called about twenty times a second.
        should_stop: Asked as often; when True, what there is is written.
    Raises:
        SettingError: `out` holds something else, or a wrong setting.
        ImageError: The picture cannot be read.
        ResumeError: Nothing to go on from, or it is another picture's or has other settings.
        OSError: Something cannot be written.
    """
    out = Path(out).expanduser()
    if checkpoint_s < 0:
        raise SettingError(f"checkpoint_s: expected 0 or more, got {checkpoint_s}")
    if resume:
        if not out.is_dir():
            raise ResumeError(
                f"{out}: expected the directory of an earlier fit, got none; start without --resume"
            )
        with _locked(out):
            start = _continued(stored_fit(out), out, photo, settings, outputs, matte)
            _sweep(out)
            return _run(out, start, device, threads, checkpoint_s, on_progress, should_stop)
    if photo is None:
        raise SettingError("photo: expected a picture file, got none; only --resume does without")
    settings = FitSettings() if settings is None else settings
    outputs = Outputs() if outputs is None else outputs
    _refuse_used(out)
    picture = read_photo(photo, settings.size, matte=_matte(matte, settings))
    # Opened and compiled before the directory is made, so that a refusal leaves nothing behind.
    with Fit(picture.pixels, settings, device=device, threads=threads) as fit:
        state = fit.state
    about = {
        "photo": str(photo),
        "photo_size": list(picture.original_size),
        "matte": matte,
        "outputs": asdict(outputs),
    }
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        _refuse_used(out)
        start = Checkpoint(settings, state, picture.pixels, about)
        save_checkpoint(out / CHECKPOINT, start)
        return _run(out, start, device, threads, checkpoint_s, on_progress, should_stop)


def _run(
    out: Path,
    start: Checkpoint,
    device: str | Backend,
    threads: int | None,
    checkpoint_s: float,
    on_progress: Callable[[FitProgress], None] | None,
    should_stop: Callable[[], bool],
) -> FitResult:
    settings, outputs = start.settings, Outputs(**start.about["outputs"])
    every = _frames_every(outputs, settings)
    if every:
        (out / _FRAMES).mkdir(exist_ok=True)
    with Fit(start.target, settings, device=device, threads=threads, state=start.state) as fit:
        began = saved = time.perf_counter()
        seconds, chunk, interrupted = 0.0, 1, False
        while fit.stopped is None:
            if should_stop():
                interrupted = True
                break
            at = fit.iteration
            if every and at % every == 0:
                save_picture(out / _FRAMES / f"{at:07d}.png", fit.render(scene=fit.current))
            # Up to the next frame, so that its picture does not depend on the clock.
            count = min(chunk, every - at % every) if every else chunk
            before = time.perf_counter()
            losses = fit.step(count)
            now = time.perf_counter()
            seconds += now - before
            if count == chunk:  # steer towards as many as fit into the time
                each = max((now - before) / max(1, len(losses)), 1e-6)
                chunk = int(min(max(1, _CHUNK_S / each), 2 * chunk, 10_000))
            if now - saved >= checkpoint_s and fit.stopped is None:
                _save(out, start, fit)
                saved = time.perf_counter()
            if on_progress is not None:
                on_progress(_progress(fit, float(losses[-1]), now - began))
        _save(out, start, fit)
        result = FitResult(
            out,
            "interrupted" if interrupted else str(fit.stopped),
            fit.iteration,
            fit.state.best_iteration,
            fit.score(),
            seconds,
        )
        _write_outputs(out, start, outputs, fit, result)
    return result


def _write_outputs(
    out: Path, start: Checkpoint, outputs: Outputs, fit: Fit, result: FitResult
) -> None:
    scene, state, about = fit.scene, fit.state, start.about
    digest = hashlib.sha256(fit.target.tobytes()).hexdigest()
    figures = {
        "loss": result.best_loss,
        "psnr_db": _finite(result.psnr_db),
        "iteration": state.best_iteration,
        "target_sha256": digest,
    }
    save_scene(out / "scene.json", scene, **figures)
    width, height = _export_size(about["photo_size"], outputs)
    if outputs.svg:
        save_svg(out / "scene.svg", scene, height, width)
    save_picture(out / "target.png", fit.target)
    save_picture(out / "fit.png", fit.render())
    save_picture(out / "export.png", fit.render(height, width))
    steps = range(len(state.losses))
    sigmas = [fit.sigma_at(i) for i in steps]
    sizes = [max(fit.size_at(i)) for i in steps]
    save_losses(out / "loss.csv", state.losses, sigmas, sizes)
    if outputs.plot and state.losses:
        title = f"{Path(about['photo']).name}: {fit.settings.triangles} triangles"
        best = state.best_iteration
        save_plot(out / "loss.png", state.losses, sigmas, sizes, best=best, title=title)
    if _frames_every(outputs, fit.settings):
        if fit.stopped is not None:  # an interrupted one may go on, and ends elsewhere
            save_picture(out / _FRAMES / f"{len(state.losses):07d}.png", fit.render())
        frames = sorted((out / _FRAMES).glob("*.png"))
        if outputs.animation != "none" and frames:
            suffix = "gif" if outputs.animation == "gif" else "png"
            save_animation(out / f"animation.{suffix}", frames, outputs.animation, fps=outputs.fps)
    report = {
        "stopped": result.stopped,
        "iterations": result.iterations,
        "best_iteration": result.best_iteration,
        "loss": figures["loss"],
        "psnr_db": figures["psnr_db"],
        "seconds": round(result.seconds, 3),
        "photo": about["photo"],
        "fit_size": [scene.width, scene.height],
        "export_size": [width, height],
        "target_sha256": digest,
        "settings": fit.settings.to_dict(),
        "outputs": asdict(outputs),
        "device": fit.device,
        "versions": {
            "doublure": version("doublure"),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }
    write_text(out / "report.json", json.dumps(report, indent=2, allow_nan=False) + "\n")


def _save(out: Path, start: Checkpoint, fit: Fit) -> None:
    save_checkpoint(out / CHECKPOINT, Checkpoint(fit.settings, fit.state, fit.target, start.about))


def _progress(fit: Fit, loss: float, seconds: float) -> FitProgress:
    last = max(0, fit.iteration - 1)
    return FitProgress(
        fit.iteration,
        fit.settings.iterations,
        max(fit.size_at(last)),
        fit.sigma_at(last),
        loss,
        fit.best_loss,
        seconds,
    )


def _continued(
    stored: Checkpoint,
    out: Path,
    photo: str | Path | None,
    settings: FitSettings | None,
    outputs: Outputs | None,
    matte: str | None,
) -> Checkpoint:
    """The stored fit, with the outputs wanted now; refused where it is another one."""
    about = dict(stored.about)
    try:
        Outputs(**about["outputs"])
        columns, rows = about["photo_size"]
        if not (isinstance(about["photo"], str) and int(columns) > 0 and int(rows) > 0):
            raise ValueError("a wrong photo")
    except (KeyError, TypeError, ValueError) as error:
        raise ResumeError(f"{out / CHECKPOINT}: expected a fit of a file, got: {error}") from error
    if settings is not None and settings != stored.settings:
        theirs, ours = stored.settings.to_dict(), settings.to_dict()
        differ = [name for name in ours if ours[name] != theirs[name]]
        told = "; ".join(f"{n}: expected {theirs[n]!r}, got {ours[n]!r}" for n in differ)
        raise ResumeError(
            f"{out}: its fit was begun with other settings: {told}; leave these out, or fit into "
            "another directory"
        )
    if photo is not None:
        used = about.get("matte") if matte is None else matte
        pixels = read_photo(photo, stored.settings.size, matte=_matte(used, stored.settings)).pixels
        if not np.array_equal(pixels, stored.target):
            raise ResumeError(
                f"{photo}: expected the picture that the fit in {out} was begun with "
                f"({about['photo']}), got another; fit it into another directory"
            )
    if outputs is not None:
        if (
            _frames_every(outputs, stored.settings)
            != _frames_every(Outputs(**about["outputs"]), stored.settings)
            and stored.state.losses
        ):
            raise ResumeError(
                f"{out}: frames_every: expected {about['outputs']['frames_every']} as when the fit "
                f"was begun, got {outputs.frames_every}; leave it out"
            )
        about["outputs"] = asdict(outputs)
    return Checkpoint(stored.settings, stored.state, stored.target, about)


def _matte(matte: str | None, settings: FitSettings) -> tuple[int, int, int]:
    if matte is not None:
        return parse_colour(matte, "matte")
    if settings.background != "mean":
        return parse_colour(settings.background, "background")
    return (255, 255, 255)


def _frames_every(outputs: Outputs, settings: FitSettings) -> int:
    if outputs.frames_every is not None:
        return outputs.frames_every
    return max(1, settings.iterations // 40)


def _export_size(photo_size: list[int], outputs: Outputs) -> tuple[int, int]:
    """Width and height, in the proportions of the photograph."""
    columns, rows = photo_size
    longest = outputs.export_size or min(max(columns, rows), _MAX_EXPORT)
    scale = longest / max(columns, rows)
    return max(1, round(columns * scale)), max(1, round(rows * scale))


def _refuse_used(out: Path) -> None:
    """A directory with anything in it is refused, but for what a killed start may leave.

    Raises:
        SettingError: It holds something, or is no directory.
    """
    try:
        names = sorted(entry.name for entry in out.iterdir())
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise SettingError(
            f"{out}: expected a directory, got a file; choose another with --out"
        ) from error
    names = [name for name in names if name != _LOCK and not name.endswith(TEMPORARY)]
    if CHECKPOINT in names:
        raise SettingError(
            f"{out}: expected a new or empty directory, got one with a fit in it; go on with it "
            "by --resume, or choose another with --out"
        )
    if names:
        raise SettingError(
            f"{out}: expected a new or empty directory, got one with {names[0]} in it; choose "
            "another with --out"
        )


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One process a directory; the system drops the lock when the process ends, however it does."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        fcntl = None  # type: ignore[assignment]
    with (out / _LOCK).open("a") if fcntl is not None else nullcontext() as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ResumeError(
                    f"{out}: expected a directory of our own, got one that another fit is at work "
                    "in; wait for it, or choose another with --out"
                ) from error
        yield


def _sweep(out: Path) -> None:
    """Remove what a killed process had half written; the lock is held."""
    for directory in (out, out / _FRAMES):
        for path in directory.glob(f".*{TEMPORARY}"):
            path.unlink(missing_ok=True)


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
