"""What every host does alike: frames, captures, reloads, and a boundary that never raises.

A host draws the source until the first weights arrive and the stand-in from then on, while the
source goes on being drawn out of sight for capture. `Host.frame` is the whole render loop's body.
It runs on one thread, the render thread, and waits for nothing: a device that is still busy, or
rows that are not back yet, are left for a later frame and counted.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from doublure_bridge.models import ModelSpec

from ..errors import NondeterministicSourceError, PluginError
from ..scenes import Scene

__all__ = ["Array", "Host", "HostError", "HostStats", "SessionLike", "Timing", "WeightsLike"]

Array: TypeAlias = npt.NDArray[Any]
_Result = TypeVar("_Result")
_log = logging.getLogger("doublure.host")

_REMEMBERED = 2048
"""How many frames' hook times are kept for the median."""


class HostError(PluginError):
    """A host that cannot open, or cannot draw what it is asked to."""


class WeightsLike(Protocol):
    """Weights as a session hands them over, validated."""

    @property
    def version(self) -> int: ...
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def tensors(self) -> Mapping[str, Array]: ...
    @property
    def probes(self) -> tuple[Array, Array]:
        """Points float32 [N, 3] and the colours [N, 3] that the trainer computed there."""


class SessionLike(Protocol):
    """What a host needs of a session. Nothing here may block."""

    @property
    def opened(self) -> object:
        """True in a boolean context once the trainer takes rows."""

    @property
    def model_specs(self) -> tuple[ModelSpec, ...]:
        """The models that may be published, once `opened`."""

    @property
    def wants_frames(self) -> bool:
        """Whether rows would be taken now; the source is not drawn for nothing."""

    def capture_rows(self, rows: Array) -> bool:
        """Take a copy of rows x, y, t, r, g, b, float32 [N, 6]; false if they were dropped."""

    def capture(self, pixels: Array, t: float) -> bool: ...
    def poll(self) -> WeightsLike | None: ...
    def reject(self, weights: Any, reason: str) -> None: ...
    def applied(self, weights: Any) -> None: ...


@dataclass(slots=True)
class HostStats:
    """Counters of one host, since it opened.

    Attributes:
        frames: Frames drawn.
        busy: Frames not drawn because the device had not finished earlier ones.
        captures: Captures begun; `rows` counts the rows handed to the session.
        capture_skipped: Captures left out because no staging buffer was free.
        dropped_rows: Rows that the session did not take.
        refused_rows: Rows of captures with a non-finite or a non-opaque sample, never handed over.
        nonfinite: Samples that were not finite; `nonopaque` counts those with alpha other than 1.
        reloads: Weights that came to be drawn; `rejected` counts those that failed the self-test.
        shader_compiles: Shader modules compiled. A reload adds none.
        errors: Exceptions caught at the boundary to the session.
        version: Version of the weights being drawn; 0 while the source is.
    """

    frames: int = 0
    busy: int = 0
    captures: int = 0
    capture_skipped: int = 0
    rows: int = 0
    dropped_rows: int = 0
    refused_rows: int = 0
    nonfinite: int = 0
    nonopaque: int = 0
    reloads: int = 0
    rejected: int = 0
    shader_compiles: int = 0
    errors: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians of what one frame costs the device, in milliseconds; None where there is none.

    Attributes:
        source_frame_ms: The source, drawn once.
        standin_frame_ms: The stand-in, drawn once.
        method: How they were taken: `timestamps` of the device, or synchronised `wall clock`.
        spread_ms: Distance between the quartiles, source and stand-in.
    """

    source_frame_ms: float
    standin_frame_ms: float | None
    method: str
    spread_ms: tuple[float, float | None] = (0.0, None)

    @property
    def worth_it(self) -> bool | None:
        if self.standin_frame_ms is None:
            return None
        return self.standin_frame_ms < self.source_frame_ms

    @property
    def verdict(self) -> str:
        """One sentence for the user."""
        if self.standin_frame_ms is None:
            return f"the source takes {self.source_frame_ms:.2f} ms a frame; no stand-in yet"
        ratio = self.source_frame_ms / max(self.standin_frame_ms, 1e-6)
        figures = f"{self.standin_frame_ms:.2f} ms against {self.source_frame_ms:.2f} ms a frame"
        if self.worth_it:
            return f"the stand-in is {ratio:.1f} times cheaper: {figures}"
        return f"not worth it: the stand-in is no cheaper than the source: {figures}"


@dataclass(slots=True)
class _HookTimes:
    """The last times of one hook in microseconds: a fixed ring, nothing allocated per frame."""

    values: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(_REMEMBERED))
    count: int = 0

    def add(self, seconds: float) -> None:
        self.values[self.count % _REMEMBERED] = seconds * 1e6
        self.count += 1

    def seen(self) -> npt.NDArray[np.float64]:
        return self.values[: min(self.count, _REMEMBERED)].copy()


class Host(ABC):
    """One engine drawing one scene. Use as a context manager; `close()` may be called twice.

    Args:
        scene: What to draw.
        size: (width, height) in pixels.
        rows_per_capture: Pixels sampled a capture.
        capture_fps: Captures a second at most; 0 captures every drawn frame.
        fps: Frames a second that `wait` paces to; 0 leaves only a short yield.
        seed: Of the pixel sampling.
    """

    name: str
    device: str
    """The hardware or software that draws, in words."""

    def __init__(
        self,
        scene: Scene,
        *,
        size: tuple[int, int] = (512, 512),
        rows_per_capture: int = 4096,
        capture_fps: float = 0.0,
        fps: float = 60.0,
        seed: int = 0,
    ) -> None:
        width, height = size
        if not (1 <= width <= 16384 and 1 <= height <= 16384):
            raise HostError("size", expected="width and height in 1..16384", got=size)
        if not 1 <= rows_per_capture <= 1 << 20:
            raise HostError("rows_per_capture", expected="1..1048576", got=rows_per_capture)
        if capture_fps < 0 or fps < 0:
            raise HostError("fps", expected="zero or more", got=(fps, capture_fps))
        self.scene = scene
        self.size = (int(width), int(height))
        self.rows_per_capture = int(rows_per_capture)
        self.capture_fps = float(capture_fps)
        self.fps = float(fps)
        self.seed = int(seed)
        self.reason = ""
        """Why this host was chosen; set by `open_host`."""
        self.stats = HostStats()
        self._session: SessionLike | None = None
        self._unprepared: list[ModelSpec] = []
        self._specs_read = False
        self._logged: set[str] = set()
        self._next_capture = 0.0
        self._next_frame = 0.0
        self._collect_times = _HookTimes()
        self._frame_times = _HookTimes()
        self._closed = False

    # -- life ---------------------------------------------------------------------------------

    def attach(self, session: SessionLike | None) -> None:
        """Stream to `session` from the next frame on; borrowed, never closed. None detaches."""
        self._session = session
        self._specs_read = False
        self._unprepared.clear()

    @abstractmethod
    def prepare(self, spec: ModelSpec) -> None:
        """Compile and allocate what drawing `spec` needs, unless that is done; may take a while.

        Raises:
            HostError: The device cannot draw this specification.
        """

    def close(self) -> None:
        """Release everything in reverse order. Waits for work in flight."""
        if not self._closed:
            self._closed = True
            self._session = None
            self._release()

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the render loop ----------------------------------------------------------------------

    def frame(self, t: float, *, capture_t: float | None = None) -> bool:
        """Draw one frame at raw `t`: collect rows, swap weights in, draw, capture.

        Never waits and never raises for the session's sake.

        Args:
            t: Parameter of the frame shown, in the scene's range.
            capture_t: Parameter at which the source is captured while the stand-in is shown (the
                source is out of sight then, and may sweep its range); `t` unless told.
        Returns:
            False if the device was still busy and nothing was drawn: try again later.
        """
        if self._closed:
            raise HostError("host", expected="an open host", got="a closed one")
        began = time.perf_counter()
        self._collect()
        self._collect_times.add(time.perf_counter() - began)
        if not self._busy():
            self._adopt()
        # Asked again: what `_adopt` compiled or tests may occupy the device now.
        if self._busy():
            self.stats.busy += 1
            return False
        capture = self._wanted() and self._capture_due()
        if capture_t is None or self.showing == "source":
            capture_t = t
        self._draw(t, capture_t, capture)
        self.stats.frames += 1
        self._frame_times.add(time.perf_counter() - began)
        return True

    def wait(self) -> None:
        """Sleep until the next frame is due at `fps`, and at least long enough to yield the CPU."""
        now = time.perf_counter()
        if self.fps <= 0.0:
            time.sleep(0.0005)
            return
        self._next_frame = max(self._next_frame + 1.0 / self.fps, now)
        time.sleep(max(self._next_frame - now, 0.0005))

    @property
    @abstractmethod
    def showing(self) -> Literal["source", "standin"]:
        """What `frame` draws on the screen."""

    @abstractmethod
    def show_source(self) -> None:
        """Go back to showing the source; the weights on the device are forgotten."""

    # -- reports and tests: these wait ----------------------------------------------------------

    @abstractmethod
    def read_source(self, t: float) -> Array:
        """Draw the source at raw `t` and wait for it: float32 [height, width, 3]."""

    def read_target(self, t: float) -> Array:
        """Draw the source at raw `t` and wait for all of its target: [height, width, 4]."""
        colour = self.read_source(t)
        return np.concatenate([colour, np.ones_like(colour[..., :1])], axis=2)

    @abstractmethod
    def read_standin(self, t: float) -> Array:
        """Draw the stand-in that is being shown at raw `t` and wait: float32 [height, width, 3].

        Raises:
            HostError: No weights have been swapped in.
        """

    @abstractmethod
    def read_shown(self) -> Array:
        """Wait for the last frame and read what it showed: float32 [height, width, 3]."""

    @abstractmethod
    def measure(self, *, repeats: int = 15, t: float | None = None) -> Timing:
        """Time source and stand-in on the device, outside the live loop."""

    @abstractmethod
    def source_description(self) -> dict[str, str]:
        """The source's shader texts and fixed state by name, for its digest."""

    def check_determinism(self) -> None:
        """Draw one parameter twice with another in between and compare.

        Raises:
            NondeterministicSourceError: They differ: the source depends on more than its parameter.
        """
        low, high = self.scene.parameter
        t, other = low + 0.37 * (high - low), low + 0.81 * (high - low)
        first = self.read_source(t)
        self.read_source(other)
        second = self.read_source(t)
        # Slack for shaders that sum in an order of their own (atomics): 1e-3 of 1 + colour is the
        # rounding of a float16 target, which no noise or feedback worth the name stays under.
        with np.errstate(invalid="ignore"):
            difference = np.abs(first - second) / (1.0 + np.abs(first))
        # Pixels that are not finite both times are the capture's business, not this probe's.
        difference = np.where(np.isfinite(difference), difference, np.float32(np.inf))
        difference[~np.isfinite(first) & ~np.isfinite(second)] = 0.0
        largest = float(difference.max())
        if largest > 1e-3:
            row, column = np.unravel_index(int(difference.max(axis=2).argmax()), first.shape[:2])
            raise NondeterministicSourceError(
                f"source {self.scene.name}",
                expected=f"the same image whenever {self.scene.parameter_name} is {t:g}",
                got=f"a relative difference of up to {largest:.3g}, at pixel ({column}, {row})",
                next_step="switch off noise by frame number, accumulation and feedback,"
                " or make what drives them the parameter",
            )

    def collect_us(self) -> Array:
        """Microseconds that collecting rows and handing them over took, of the last frames."""
        return self._collect_times.seen()

    def frame_us(self) -> Array:
        """Microseconds that `frame` held the render thread, of the last frames drawn."""
        return self._frame_times.seen()

    # -- for subclasses -------------------------------------------------------------------------

    @abstractmethod
    def _busy(self) -> bool: ...
    @abstractmethod
    def _collect(self) -> None:
        """Hand over rows that have arrived; wait for none."""

    @abstractmethod
    def _draw(self, t: float, capture_t: float, capture: bool) -> None: ...
    @abstractmethod
    def _swap(self) -> None:
        """At the frame boundary: flip to weights that are uploaded and have passed."""

    @abstractmethod
    def _upload(self, weights: WeightsLike) -> None: ...
    @abstractmethod
    def _release(self) -> None: ...

    def _hand_over(self, rows: Array, *, nonfinite: int = 0, nonopaque: int = 0) -> None:
        """Give one capture's rows to the session; `rows` may be the device's mapped memory."""
        session = self._session
        if session is None:
            return
        if nonfinite or nonopaque:
            self.stats.nonfinite += nonfinite
            self.stats.nonopaque += nonopaque
            self.stats.refused_rows += len(rows)
            kind = f"{nonfinite} non-finite" if nonfinite else f"{nonopaque} non-opaque"
            self._log_once(
                "non-finite rows" if nonfinite else "non-opaque rows",
                f"{self.scene.name} drew {kind} of {len(rows)} samples; such captures are not sent",
            )
            return
        taken = self._guard("capture_rows", lambda: session.capture_rows(rows))
        if taken:
            self.stats.rows += len(rows)
        else:
            self.stats.dropped_rows += len(rows)

    def _adopt(self) -> None:
        """Prepare announced models, one a frame; take new weights; flip what has passed."""
        session = self._session
        if session is not None:
            if not self._specs_read and self._guard("opened", lambda: bool(session.opened)):
                self._specs_read = True
                specs = self._guard("model_specs", lambda: session.model_specs)
                self._unprepared = list(specs or ())
            if self._unprepared:
                spec = self._unprepared.pop(0)
                self._guard("prepare", lambda: self.prepare(spec))
            weights = self._guard("poll", lambda: session.poll())
            if weights is not None:
                self._guard("upload", lambda: self._upload(weights), weights=weights)
        self._guard("swap", self._swap)

    def _applied(self, weights: WeightsLike) -> None:
        self.stats.reloads += 1
        self.stats.version = weights.version
        if (session := self._session) is not None:
            self._guard("applied", lambda: session.applied(weights))

    def _rejected(self, weights: WeightsLike, reason: str) -> None:
        self.stats.rejected += 1
        self._log_once(f"rejected {reason}", f"weights {weights.version} rejected: {reason}")
        if (session := self._session) is not None:
            self._guard("reject", lambda: session.reject(weights, reason))

    def _guard(
        self, what: str, call: Callable[[], _Result], *, weights: WeightsLike | None = None
    ) -> _Result | None:
        """Run one hook. Whatever it raises is counted and logged once; the engine goes on."""
        try:
            return call()
        except Exception as error:
            self.stats.errors += 1
            self._log_once(f"{what}: {type(error).__name__}", f"{what} failed: {error}")
            if weights is not None:
                self._rejected(weights, f"{type(error).__name__}: {error}")
            return None

    def _log_once(self, key: str, text: str) -> None:
        if key not in self._logged:
            self._logged.add(key)
            _log.warning("%s host: %s", self.name, text)

    def _wanted(self) -> bool:
        session = self._session
        return session is not None and bool(
            self._guard("wants_frames", lambda: session.wants_frames)
        )

    def _capture_due(self) -> bool:
        if self.capture_fps <= 0.0:
            return True
        now = time.perf_counter()
        if now < self._next_capture:
            return False
        period = 1.0 / self.capture_fps
        self._next_capture = max(self._next_capture + period, now + 0.5 * period)
        return True

    def prepare_all(self, specs: Sequence[ModelSpec]) -> None:
        """`prepare` each; call it before the loop where the models are known."""
        for spec in specs:
            self.prepare(spec)
