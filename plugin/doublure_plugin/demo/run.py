"""One scene's run: open a host, attach a session, learn live, stop, measure, write pictures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from doublure_bridge.scores import Scores, score

from ..digest import Source
from ..hosts import Host, HostError, open_host
from ..hosts.window import Window
from ..save import save_model
from ..scenes import SCENES, Scene
from ..session import Session
from .report import Picture, QualityTrace, save_animation, save_comparison, save_json, save_plot

__all__ = ["DEFAULT_ROWS", "DemoOptions", "Status", "run_scene"]

DEFAULT_ROWS = 16_384
"""Pixels sampled a capture: 60 to 70 µs of the render thread; see docs/performance.md."""

_GOLDEN = 0.6180339887498949
_HELD_OUT_FIRST = 4
_SETTLE_S = 20.0
"""Longest wait, on top of the seconds asked for, for a trainer that starts slowly."""
_ANIMATION_FRAMES = 48
_ANIMATION_FPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What `doublure demo` was asked for.

    Attributes:
        seconds: Training time, s.
        host: A name that `open_host` takes.
        out: Directory for pictures and summary.json.
        size: (width, height), pixels.
        model: Model family, or `auto`.
        trainer: Address of a running trainer; None starts one.
        rows: Pixels sampled a capture.
        capture_fps: Captures a second at most.
        fps: Frames drawn a second at most.
        seed: Of sampling and training.
        window: Show the frames on a display, where there is one.
    """

    seconds: float = 30.0
    host: str = "auto"
    out: Path = Path("doublure-demo")
    size: tuple[int, int] = (512, 512)
    model: str = "auto"
    trainer: str | None = None
    rows: int = DEFAULT_ROWS
    capture_fps: float = 30.0
    fps: float = 60.0
    seed: int = 0
    window: bool = False


@dataclass(slots=True)
class Status:
    """What the live line shows; times in seconds unless named otherwise."""

    scene: str
    host: str = ""
    state: str = "starting"
    elapsed: float = 0.0
    training: float = 0.0
    step: int = 0
    samples_per_s: float = 0.0
    family: str = ""
    held_out_db: float | None = None
    reloads: int = 0
    frame_ms: float = 0.0
    showing: str = "source"
    notices: list[str] = field(default_factory=list)
    """New since the last look; the reader takes them out."""

    @property
    def line(self) -> str:
        """All of it in one line; what matters fits eighty columns."""
        head = f"{self.scene} {self.elapsed:.0f} s"
        parts = [head if self.state == "training" else f"{head} {self.state}"]
        if self.step:
            parts.append(f"step {self.step:,}")
            parts.append(f"{self.samples_per_s / 1e6:.1f} Msamples/s")
        if self.held_out_db is not None:
            parts.append(f"held-out {self.held_out_db:.1f} dB")
        parts += [f"{self.reloads} reloads", f"{self.frame_ms:.0f} ms"]
        # What is cut first where the terminal is narrow.
        parts += [self.family] if self.family else []
        parts.append(f"shows {self.showing}")
        return " · ".join(parts)


Watch = Callable[[Status], None]


class _Sweep:
    """The parameter over time: quick passes until there is something to see, then at leisure."""

    def __init__(self, scene: Scene) -> None:
        self._low, self._high = scene.parameter
        self._phase = 0.0
        self._last: float | None = None
        self._captures = 0
        self._frames = 0
        self._met: set[float] = set()

    def shown(
        self, now: float, *, learned: bool, held_out: Sequence[tuple[float, float]] = ()
    ) -> float:
        """Raw t of the frame shown: there and back, at an even pace.

        The gate needs some held-out slices before it lets anything out, and a source drawn six
        times a second would meet them by chance only: at first every third frame steps aside to
        the nearest one that it has not met yet.
        """
        period = 8.0 if learned else 2.5
        if self._last is not None:
            self._phase += (now - self._last) / period
        self._last = now
        u = 1.0 - 4.0 * abs(self._phase % 1.0 - 0.5)
        self._frames += 1
        if not learned and len(self._met) < _HELD_OUT_FIRST and self._frames % 3 == 0:
            centres = [(low + high) / 2 for low, high in held_out]
            unmet = [c for c in centres if c not in self._met]
            if unmet:
                u = min(unmet, key=lambda centre: abs(centre - u))
                self._met.add(u)
        return self._low + (u + 1.0) / 2 * (self._high - self._low)

    def captured(self) -> float:
        """Raw t of the next capture out of sight: the golden ratio's sequence fills the range."""
        self._captures += 1
        return self._low + (self._captures * _GOLDEN % 1.0) * (self._high - self._low)


@dataclass(slots=True)
class _Live:
    """What the loop learned about the run."""

    trace: QualityTrace = field(default_factory=QualityTrace)
    first_learned_pixels_s: float | None = None
    first_learned_training_s: float | None = None
    notices_seen: int = 0
    stopped_early: bool = False
    """Whether the user stopped the scene in its window."""


def run_scene(name: str, options: DemoOptions, watch: Watch, *, began: float) -> dict[str, Any]:
    """Learn one scene live, and write its pictures into `options.out`.

    Args:
        watch: Called about once a frame with the current status; may raise KeyboardInterrupt.
        began: When the user asked for it, on `time.perf_counter`'s clock.
    Returns:
        One entry of summary.json's `runs`.
    Raises:
        HostError, SessionError, SourceError: The run could not start, or training failed.
    """
    scene = SCENES[name]
    status = Status(scene=name)
    watch(status)
    settings: dict[str, Any] = {
        "size": options.size,
        "rows_per_capture": options.rows,
        "capture_fps": options.capture_fps,
        "fps": options.fps,
        "seed": options.seed,
    }
    with open_host(scene, name=options.host, **settings) as host:
        status.host = host.name
        if host.name == "numpy":
            status.notices.append(f"drawing with NumPy: {host.reason}")
        host.check_determinism()
        description = host.source_description()
        shaders = {"wgsl": description.pop("wgsl")}
        source = Source(name, shaders, description, *options.size)
        session = Session(
            source,
            scene.parameter,
            trainer=options.trainer,
            host=host.name,
            model=options.model,
            config={"seed": options.seed},
            rows_per_frame=options.rows,
        )
        with session, _window(host, options, status) as window:
            host.attach(session)
            live = _learn(scene, host, session, window, options, status, watch, began)
            test = session.test
            stats = session.stats
            progress = session.progress
            learned = session.current
            stop_ms = _stop(session, host)
        host.attach(None)
        status.state = "measuring"
        watch(status)
        figures = _measure(scene, host, test, live, options)
    if learned is not None:
        save_model(
            learned,
            options.out / f"{name}-model",
            name=name,
            parameter=scene.parameter,
            resolution=options.size,
            seed=options.seed,
            test={
                key: figures[f"held_out_{key}"]
                for key in ("psnr_db", "relmse", "peak_ratio")
                if figures[f"held_out_{key}"] is not None
            },
        )
    return {
        "scene": name,
        "host": host.name,
        "device": host.device,
        "seconds": round(progress.seconds, 3) if progress else 0.0,
        "first_learned_pixels_s": _rounded(live.first_learned_pixels_s),
        "first_learned_training_s": _rounded(live.first_learned_training_s),
        **figures,
        "gate_psnr_db": _rounded(live.trace.psnr_db[-1] if live.trace.psnr_db else None),
        "family": progress.family if progress else "",
        "steps": progress.step if progress else 0,
        "samples_per_s": round(progress.samples_per_s) if progress else 0,
        "reloads": host.stats.reloads,
        "shader_compiles": host.stats.shader_compiles,
        "frames": host.stats.frames,
        "captures": stats.frames,
        "dropped": stats.dropped,
        "capture_us_median": round(stats.capture_us_median, 2),
        "capture_us_p99": round(stats.capture_us_p99, 2),
        "stop_ms": _rounded(stop_ms),
        "stopped_early": live.stopped_early,
        "trainer_restarts": max(0, stats.spawns - 1),
    }


@contextmanager
def _window(host: Host, options: DemoOptions, status: Status) -> Iterator[Window | None]:
    """A window if one was asked for; where none can be had, a notice that says why."""
    window = None
    if options.window:
        try:
            window = Window(host)
        except HostError as error:
            status.notices.append(f"drawing without a window: {error}")
    try:
        yield window
    finally:
        if window is not None:
            window.close()


def _learn(
    scene: Scene,
    host: Host,
    session: Session,
    window: Window | None,
    options: DemoOptions,
    status: Status,
    watch: Watch,
    began: float,
) -> _Live:
    """The render loop: draw, capture, swap in what was published, until time or user say stop."""
    live = _Live()
    sweep = _Sweep(scene)
    first_frame = time.perf_counter()
    deadline = first_frame + options.seconds + _SETTLE_S
    last = first_frame
    seen_version = 0
    drawn, t, capture_t = True, 0.0, 0.0
    while True:
        now = time.perf_counter()
        if window is not None:
            window.update(status.line)
            if window.stopped:
                live.stopped_early = True
                return live
        learned = host.stats.version > 0
        if drawn:  # a busy device is asked again for the same frame
            t = sweep.shown(now, learned=learned, held_out=session.held_out)
            capture_t = sweep.captured()
        drawn = host.frame(t, capture_t=capture_t)
        if learned and host.showing == "standin" and live.first_learned_pixels_s is None:
            # Reading back waits for the device: these pixels are there, not only ordered.
            host.read_shown()
            live.first_learned_pixels_s = time.perf_counter() - began
        if host.stats.version != seen_version:
            seen_version = host.stats.version
            _note_reload(live, session, began)
        progress = session.progress
        if progress is not None:
            _note_progress(live.trace, status, progress.held_out, now - began)
            status.training, status.step = progress.seconds, progress.step
            status.samples_per_s, status.family = progress.samples_per_s, progress.family
        _note_messages(live, session, status)
        status.state = progress.state if progress and session.opened else session.state
        status.elapsed, status.reloads = now - first_frame, host.stats.reloads
        status.showing = host.showing
        status.frame_ms += 0.1 * ((now - last) * 1e3 - status.frame_ms)
        last = now
        watch(status)
        if session.state in ("failed", "refused") and session.error is not None:
            raise session.error
        if status.training >= options.seconds or now > deadline:
            return live
        host.wait()


def _note_reload(live: _Live, session: Session, began: float) -> None:
    weights = session.current
    if weights is None:
        return
    if live.first_learned_training_s is None:
        live.first_learned_training_s = weights.seconds
    live.trace.reload_seconds.append(time.perf_counter() - began)
    live.trace.reload_psnr_db.append(float(weights.scores.get("psnr_db", 0.0)))
    live.trace.reload_family.append(weights.spec.family)


def _note_progress(
    trace: QualityTrace, status: Status, held_out: dict[str, Any], elapsed: float
) -> None:
    psnr = held_out.get("psnr_db")
    if not isinstance(psnr, float):
        return
    status.held_out_db = psnr
    if not trace.seconds or elapsed - trace.seconds[-1] > 0.2:
        trace.seconds.append(elapsed)
        trace.psnr_db.append(psnr)


def _note_messages(live: _Live, session: Session, status: Status) -> None:
    messages = session.messages
    # What ends the run is said once, as the error that ends it.
    final = str(session.error) if session.state in ("failed", "refused") else "\0"
    for notice in messages[live.notices_seen :]:
        if notice.level != "info" and not notice.text.endswith(final):
            status.notices.append(notice.text)
    live.notices_seen = len(messages)


def _stop(session: Session, host: Host) -> float | None:
    """The scene's Stop; milliseconds until the job's process is gone, None if it was not ours."""
    pid = session.job_pid
    local = session.trainer_pid
    began = time.perf_counter()
    session.stop("demo finished")
    gone: float | None = None
    low, _ = host.scene.parameter
    while time.perf_counter() - began < 3.0:
        if pid is not None and local is not None and not _alive(pid):
            gone = (time.perf_counter() - began) * 1e3
            break
        if session.state in ("stopped", "failed"):
            break
        host.frame(low)  # the host goes on drawing while training is cancelled
        time.sleep(0.001)
    return gone if gone is not None else session.stats.stop_ms


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _measure(
    scene: Scene,
    host: Host,
    test: tuple[tuple[float, float], ...],
    live: _Live,
    options: DemoOptions,
) -> dict[str, Any]:
    """Full frames at the middles of test slices, as the host itself draws them."""
    timing = host.measure()
    figures: dict[str, Any] = {
        "held_out_psnr_db": None,
        "held_out_relmse": None,
        "held_out_peak_ratio": None,
        "source_frame_ms": round(timing.source_frame_ms, 4),
        "standin_frame_ms": _rounded(timing.standin_frame_ms, 4),
        "verdict": timing.verdict,
    }
    name = scene.name
    if host.showing != "standin":
        save_plot(options.out / f"{name}-quality.png", live.trace, title=name, measured_db=None)
        return figures
    pairs: list[tuple[float, Picture, Picture]] = []
    for low, high in test:
        t = scene.denormalise((low + high) / 2)
        pairs.append((t, host.read_source(t), host.read_standin(t)))
    scores: list[Scores] = [
        score(standin.reshape(-1, 3), source.reshape(-1, 3)) for _, source, standin in pairs
    ]
    figures["held_out_psnr_db"] = _rounded(float(np.mean([s.psnr_db for s in scores])))
    figures["held_out_psnr_db_worst"] = _rounded(float(min(s.psnr_db for s in scores)))
    figures["held_out_relmse"] = float(f"{np.mean([s.relmse for s in scores]):.4g}")
    figures["held_out_peak_ratio"] = _rounded(float(np.mean([s.peak_ratio for s in scores])))

    white = max(1.0, max(float(source.max()) for _, source, _ in pairs))
    chosen = sorted({0, len(pairs) // 2, len(pairs) - 1})
    rows = [
        (
            f"{scene.parameter_name} = {pairs[i][0]:.3g}, {scores[i].psnr_db:.1f} dB",
            pairs[i][1],
            pairs[i][2],
        )
        for i in chosen
    ]
    save_comparison(options.out / f"{name}-held-out.png", rows, white=white)
    save_plot(
        options.out / f"{name}-quality.png",
        live.trace,
        title=f"{name}: {scene.title}",
        measured_db=figures["held_out_psnr_db"],
    )
    low, high = scene.parameter
    stride = max(1, max(options.size) // 256)
    frames = []
    for i in range(_ANIMATION_FRAMES):
        t = low + (high - low) * (1 - abs(2 * i / _ANIMATION_FRAMES - 1))
        frames.append(
            (host.read_source(t)[::stride, ::stride], host.read_standin(t)[::stride, ::stride])
        )
    save_animation(options.out / f"{name}-animation", frames, white=white, fps=_ANIMATION_FPS)
    return figures


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def write_summary(out: Path, runs: list[dict[str, Any]], extra: dict[str, Any]) -> None:
    """summary.json: `runs`, one a scene, and what they ran on."""
    save_json(out / "summary.json", {"runs": runs, **extra})
