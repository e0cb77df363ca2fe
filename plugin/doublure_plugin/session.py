"""The session: what a host holds. Every method is for the render thread and none of them blocks."""

from __future__ import annotations

import atexit
import math
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from doublure_bridge import (
    MODEL_FAMILIES,
    BridgeError,
    ModelSpec,
    OpenSession,
    Progress,
    SessionOpened,
    WeightsApplied,
    WeightsRejected,
    encode,
    model_spec_from_dict,
    parse_address,
)
from numpy.typing import NDArray

from .capture import FrameReader, check_colour, check_rows, plan_gather
from .digest import Source
from .errors import CaptureError, PluginError, SessionError
from .options import Options, SourceCommand, StopCommand, Timing
from .ring import Ring
from .sender import Sender
from .stats import Notice, SessionStats, Timings
from .weights import Weights

__all__ = ["Session"]

_MAX_ROWS: Final = 262_144
# Leaving must take less than a second, whatever the trainer does.
_CLOSE_WAIT_S: Final = 0.25
_CLOSE_JOIN_S: Final = 0.9

_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class Session:
    """A conversation with a trainer about one source, run beside the host's render loop.

    The constructor starts a thread and returns at once; nothing waits for the trainer, which may
    be slow, absent or dead while the host draws. One thread, the render thread, calls the methods;
    the properties may be read from any.

    Args:
        source: What is drawn; see `Source`.
        parameter: Range of t as it is given to `capture`, (low, high).
        trainer: None starts a trainer of our own; ``tcp://127.0.0.1:5570`` attaches to one.
        host: The engine's name, for people.
        model: A model family, or ``auto`` to let the trainer race them.
        config: Training options; the trainer refuses unknown ones by name.
        directory: Where a trainer of our own keeps jobs, to be resumed by a later session about
            the same source; None keeps nothing.
        python: Interpreter for a trainer of our own; else DOUBLURE_PYTHON, else this one.
        rows_per_frame: Pixels sampled from a whole frame, and the most rows of one capture.
        ring_slots: Captured frames that may wait for the sender thread.
        seed: Of the sampling positions.
        timing: Bounds of the conversation, for tests.
    Raises:
        SessionError: An argument is out of range, or `directory` cannot be written.
        AddressError: The trainer's address cannot be used.
    """

    def __init__(
        self,
        source: Source,
        parameter: tuple[float, float],
        *,
        trainer: str | None = None,
        host: str = "python",
        model: str = "auto",
        config: Mapping[str, Any] | None = None,
        directory: str | Path | None = None,
        python: str | None = None,
        rows_per_frame: int = 4096,
        ring_slots: int = 8,
        seed: int = 0,
        timing: Timing | None = None,
    ) -> None:
        self._sender: Sender | None = None
        self._closed = False
        low, high = _check_range(parameter)
        _check_count("rows_per_frame", rows_per_frame, _MAX_ROWS)
        _check_count("ring_slots", ring_slots, 1024)
        if model != "auto" and model not in MODEL_FAMILIES:
            known = ", ".join(["auto", *MODEL_FAMILIES])
            raise SessionError("Session.model", expected=f"one of {known}", got=repr(model))
        if not isinstance(source, Source):
            raise SessionError("Session.source", expected="a Source", got=type(source).__name__)
        if not isinstance(host, str):
            raise SessionError("Session.host", expected="text", got=type(host).__name__)
        options = Options(
            endpoint=None if trainer is None else _check_trainer(trainer),
            host=host.encode("utf-8", "replace")[:120].decode("utf-8", "ignore"),
            model=model,
            config=_check_config(config),
            low=low,
            high=high,
            python=python,
            directory=_check_directory(directory, trainer),
            timing=timing or Timing(),
        )
        self._low = low
        self._scale = 2.0 / (high - low)
        self._rows_per_frame = rows_per_frame
        self._ring_slots = ring_slots
        self._seed = seed
        self._timings = Timings()
        self._captures = 0
        self._dropped = 0
        self._reloads = 0
        self._host_rejected = 0
        self._apply_us = 0
        self._handed: Weights | None = None
        self._current: Weights | None = None
        self._previous: Weights | None = None
        self._source = source
        reader = self._prepare(source)
        self._sender = Sender(options, source, self._ring, reader)
        self._sender.start()
        _open_sessions.add(self)

    def _prepare(self, source: Source) -> FrameReader:
        """A ring and a reader for this source; all memory that capturing will need."""
        gathered = min(self._rows_per_frame, source.width * source.height)
        self._ring = Ring(self._ring_slots, self._rows_per_frame, gathered)
        self._padded: NDArray[np.intp] = np.zeros(gathered, np.intp)
        reader = FrameReader(
            source.width, source.height, gathered, self._rows_per_frame, seed=self._seed
        )
        for slot in self._ring.slots:
            reader.refill(slot)
        return reader

    # -- capturing --------------------------------------------------------------------------------

    def capture(
        self,
        pixels: NDArray[np.floating[Any]],
        t: float,
        *,
        origin: str = "top-left",
        color: str = "linear",
    ) -> bool:
        """Sample one drawn frame for the trainer. Never blocks; the array is free on return.

        Args:
            pixels: The whole frame, linear and opaque, float16 or float32 [H, W, 3|4].
            t: The parameter it was drawn with, in the declared range.
            origin: Where row 0 of `pixels` is: ``top-left`` or ``bottom-left``.
            color: Encoding of the values; only ``linear``.
        Returns:
            Whether the frame was taken; False when it was dropped and counted.
        Raises:
            CaptureError: The call is wrong: type, dtype, size, range, origin or colour. What is
                wrong with the values is found later and told in `messages`.
        """
        began = time.perf_counter_ns()
        flipped = check_colour(origin, color)
        u = self._normalise(t)
        source = self._source
        memory, layout, upside_down, pitch = plan_gather(pixels, source.width, source.height)
        self._captures += 1
        sender = self._sender
        ring = self._ring
        slot = ring.claim() if sender is not None and sender.feeder.open else None
        if slot is None:
            self._dropped += 1
            self._timings.add(time.perf_counter_ns() - began)
            return False
        index = slot.index
        if pitch != source.width:
            # Rows are padded: skip the padding, in preallocated memory.
            np.floor_divide(index, source.width, out=self._padded)
            np.multiply(self._padded, pitch - source.width, out=self._padded)
            np.add(self._padded, index, out=self._padded)
            index = self._padded
        # "clip", because "raise" makes numpy buffer the output.
        memory.take(index, 0, slot.pixels[layout], "clip")
        slot.layout = layout
        slot.flipped = flipped != upside_down
        slot.count = len(index)
        slot.t = u
        slot.sequence = self._captures
        slot.captured_ns = began
        ring.publish()
        self._timings.add(time.perf_counter_ns() - began)
        return True

    def capture_rows(self, rows: NDArray[np.float32], t: float | None = None) -> bool:
        """Hand over pixels that the host sampled itself, on its GPU. Never blocks.

        Args:
            rows: float32 [n, 6], n <= rows_per_frame: x, y, t in [-1, 1] (pixel centres, x right,
                y down), then linear r, g, b, unclamped. Copied; free on return.
            t: The parameter the frame was drawn with, in the declared range, as `capture` takes it;
                None reads it, normalised, from the first row.
        Returns:
            Whether they were taken; False when they were dropped and counted.
        Raises:
            CaptureError: The call is wrong: type, dtype, shape or range.
        """
        began = time.perf_counter_ns()
        u = None if t is None else self._normalise(t)
        data = check_rows(rows, self._rows_per_frame)
        self._captures += 1
        sender = self._sender
        ring = self._ring
        slot = ring.claim() if sender is not None and sender.feeder.open else None
        if slot is None:
            self._dropped += 1
            self._timings.add(time.perf_counter_ns() - began)
            return False
        # One memcpy that keeps the interpreter lock: numpy's own copy would offer it to the
        # sender thread in the middle of the frame.
        slot.bytes[: len(data)] = data
        slot.layout = None
        slot.count = rows.shape[0]
        slot.t = float(rows[0, 2]) if u is None else u
        slot.sequence = self._captures
        slot.captured_ns = began
        ring.publish()
        self._timings.add(time.perf_counter_ns() - began)
        return True

    @property
    def wants_frames(self) -> bool:
        """Whether a capture now would be taken; a host may skip its readback when not."""
        sender = self._sender
        return sender is not None and sender.feeder.open and len(self._ring) < self._ring.size

    def _normalise(self, t: float) -> float:
        try:
            u = float((t - self._low) * self._scale - 1.0)
        except (TypeError, ValueError):
            raise CaptureError(
                "capture t", expected="a number", got=type(t).__name__
            ) from None  # fmt: skip
        if -1.0 <= u <= 1.0:
            return u
        # Half an ulp of float32 beyond an end is rounding in the host's clock, not a mistake.
        if -1.0 - 1e-6 <= u <= 1.0 + 1e-6:
            return 1.0 if u > 0 else -1.0
        high = self._low + 2.0 / self._scale
        raise CaptureError(
            "capture t", expected=f"a parameter in [{self._low:g}, {high:g}]", got=f"{t}",
            next_step="declare the whole range as Session(parameter=(low, high))",
        )  # fmt: skip

    # -- reloading --------------------------------------------------------------------------------

    def poll(self) -> Weights | None:
        """The newest validated weights, once each; None when there is nothing new.

        Reads one reference. Call it at a frame boundary, upload what it returns, then `applied`.
        """
        sender = self._sender
        if sender is None:
            return None
        ready = sender.intake.ready
        if ready is None or ready is self._handed or ready.source != self._source.digest:
            return None
        self._handed = sender.intake.in_use = ready
        return ready

    def applied(self, weights: Weights) -> None:
        """The host draws with these weights now. Tells the trainer; counts a reload."""
        if weights is self._current:
            return
        self._previous, self._current = self._current, weights
        self._reloads += 1
        self._apply_us = int((time.monotonic() - weights.arrived) * 1e6)
        self._use(weights)
        self._tell(weights, None)

    def reject(self, weights: Weights, reason: str) -> None:
        """The host's own test of these weights failed: the last good ones stay in use.

        When the host draws with them already, call `rollback` for what to draw with instead.
        """
        self._host_rejected += 1
        self._use(self._previous if weights is self._current else self._current)
        self._tell(weights, reason)

    def rollback(self) -> Weights | None:
        """Take the current weights back; returns the ones before them, to upload again.

        None when there are none: the host draws its source. One step of history is kept.
        """
        self._current, self._previous = self._previous, None
        self._use(self._current)
        return self._current

    @property
    def current(self) -> Weights | None:
        """The weights the host said it draws with."""
        return self._current

    def _use(self, weights: Weights | None) -> None:
        """What weights have to beat after a re-open."""
        if self._sender is not None:
            self._sender.intake.in_use = weights

    def _tell(self, weights: Weights, refusal: str | None) -> None:
        sender = self._sender
        opened = self.opened
        if sender is None or opened is None or weights.source != self._source.digest:
            return
        if refusal is None:
            sender.outbox.append(
                WeightsApplied(
                    session=opened.session,
                    version=weights.version,
                    frame=self._captures,
                    delay_us=self._apply_us,
                )
            )
        else:
            sender.outbox.append(
                WeightsRejected(
                    session=opened.session, version=weights.version, reason=refusal[:500]
                )
            )

    # -- changing and ending ----------------------------------------------------------------------

    def source_changed(self, source: Source, reason: str = "") -> None:
        """The host draws something else from here on: training ends and starts anew.

        Nothing mixes: frames captured so far and weights learned so far are dropped. Until new
        weights come, draw the source itself. A source with the same digest changes nothing.
        """
        if not isinstance(source, Source):
            raise SessionError("source_changed", expected="a Source", got=type(source).__name__)
        sender = self._sender
        if sender is None or source.digest == self._source.digest:
            return
        sender.feeder.open = False
        self._source = source
        self._handed = self._current = self._previous = None
        self._use(None)
        reader = self._prepare(source)
        sender.commands.append(SourceCommand(source, self._ring, reader, reason or source.name))
        sender.wake()

    def stop(self, reason: str = "stop", *, wait: bool = False) -> None:
        """Cancel training and free all it holds. Weights already applied stay usable.

        Args:
            reason: Why, for people and logs.
            wait: Wait until it is done, 3 s at most; otherwise return at once.
        """
        sender = self._sender
        if sender is None:
            return
        self._request_stop(sender, reason, sender.timing.stop)
        if wait:
            sender.join(sender.timing.stop + 1.0)

    def close(self) -> None:
        """Stop and let go of everything, in less than a second. Idempotent."""
        if self._closed or self._sender is None:
            return
        self._closed = True
        self._request_stop(self._sender, "close", _CLOSE_WAIT_S)
        self._sender.join(_CLOSE_JOIN_S)
        _open_sessions.discard(self)

    @staticmethod
    def _request_stop(sender: Sender, reason: str, wait_s: float) -> None:
        if sender.alive:
            sender.commands.append(StopCommand(reason, time.monotonic(), wait_s))
            sender.wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        sender = getattr(self, "_sender", None)
        if sender is not None and not self._closed and sender.alive:
            # Nobody is left to read what it learns. This asks, and waits for nothing.
            self._request_stop(sender, "not closed", _CLOSE_WAIT_S)
            warnings.warn(
                f"doublure.Session for {self._source!r} was not closed", ResourceWarning,
                source=self, stacklevel=2,
            )  # fmt: skip

    # -- looking ----------------------------------------------------------------------------------

    @property
    def source(self) -> Source:
        """What is being learned."""
        return self._source

    @property
    def state(self) -> str:
        """Where the session stands; in all of them the host draws on.

        ``connecting``, ``opening``, ``streaming``; ``lost`` while the trainer is silent or being
        replaced; ``refused`` while the host's frames are; ``stopping``, ``stopped``; ``failed``,
        which is final and has an `error`.
        """
        return "stopped" if self._sender is None else self._sender.state

    @property
    def error(self) -> PluginError | None:
        """What is wrong at present, or what ended the session."""
        return None if self._sender is None else self._sender.error

    @property
    def messages(self) -> Sequence[Notice]:
        """What happened, for people; the last 256, oldest first."""
        return () if self._sender is None else tuple(self._sender.notices)

    @property
    def opened(self) -> SessionOpened | None:
        """The trainer's answer, while a session is open."""
        return None if self._sender is None else self._sender.opened

    @property
    def model_specs(self) -> tuple[ModelSpec, ...]:
        """All models that may come, to prepare buffers and shaders for; empty before it is open."""
        opened = self.opened
        return () if opened is None else tuple(map(model_spec_from_dict, opened.models))

    @property
    def held_out(self) -> tuple[tuple[float, float], ...]:
        """Held-out slices in normalised t: validated on, never trained on."""
        return _slices(None if self.opened is None else self.opened.held_out)

    @property
    def test(self) -> tuple[tuple[float, float], ...]:
        """Test slices in normalised t: only reported on."""
        return _slices(None if self.opened is None else self.opened.test)

    @property
    def progress(self) -> Progress | None:
        """Where training stands, as last heard."""
        return None if self._sender is None else self._sender.progress

    @property
    def trainer_pid(self) -> int | None:
        """Process id of the trainer's server on its machine."""
        return None if self._sender is None else self._sender.trainer_pid

    @property
    def job_pid(self) -> int | None:
        """Process id of the job on the trainer's machine, as of the session's opening."""
        opened = self.opened
        return None if opened is None else opened.job_pid

    @property
    def stats(self) -> SessionStats:
        """Counters and measurements so far. Sorts up to 4096 values: not for every frame."""
        sender = self._sender
        median, p99, histogram = self._timings.summary()
        if sender is None:
            return SessionStats()
        return SessionStats(
            frames=self._captures,
            dropped=self._dropped,
            refused=sender.feeder.refused,
            discarded=sender.feeder.discarded,
            sent=sender.feeder.sent,
            rows=sender.feeder.rows,
            reloads=self._reloads,
            rejected=sender.intake.rejected + self._host_rejected,
            held_back=sender.intake.held_back,
            spawns=0 if sender.supervisor is None else sender.supervisor.started,
            losses=sender.losses,
            capture_us_median=median,
            capture_us_p99=p99,
            capture_us_histogram=histogram,
            apply_us=self._apply_us,
            stop_ms=sender.stop_ms,
            waiting=len(self._ring),
        )

    def __repr__(self) -> str:
        return f"Session({self._source!r}, state={self.state!r})"


def _check_range(parameter: Any) -> tuple[float, float]:
    try:
        low, high = (float(v) for v in parameter)
    except (TypeError, ValueError):
        low = high = 0.0
    # The width has to be a number to divide by, too.
    width = high - low
    if not (width > 0.0 and math.isfinite(width) and math.isfinite(2.0 / width)):
        raise SessionError(
            "Session.parameter", expected="(low, high) with low < high", got=repr(parameter)[:60]
        )
    return low, high


def _check_trainer(trainer: str) -> str:
    address = parse_address(trainer)
    if address.port == 0:
        raise SessionError(
            "Session.trainer", expected="the port on which a trainer listens", got=repr(trainer)
        )
    return address.endpoint


def _check_config(config: Any) -> dict[str, Any]:
    """Whether a message can carry it; which options there are is the trainer's to say."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise SessionError("Session.config", expected="a mapping", got=type(config).__name__)
    try:
        encode(
            OpenSession(
                digest=bytes(32),
                source="",
                width=1,
                height=1,
                parameter_low=0.0,
                parameter_high=1.0,
                config=dict(config),
            )
        )
    except (BridgeError, ValueError, TypeError, OverflowError) as error:
        raise SessionError(
            "Session.config", expected="text keys, and plain finite values",
            got=f"{config!r}"[:200], next_step=str(error)[:300],
        ) from None  # fmt: skip
    return dict(config)


def _check_count(name: str, value: Any, limit: int) -> None:
    if type(value) is not int or not 1 <= value <= limit:
        raise SessionError(
            f"Session.{name}", expected=f"an integer in 1..{limit}", got=repr(value)[:60]
        )


def _check_directory(directory: str | Path | None, trainer: str | None) -> Path | None:
    if directory is None:
        return None
    if trainer is not None:
        raise SessionError(
            "Session.directory", expected="None with trainer='tcp://…'", got=str(directory),
            next_step="give the directory to the trainer: `doublure trainer --directory PATH`",
        )  # fmt: skip
    path = Path(directory).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".doublure-writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise SessionError(
            "Session.directory", expected="a directory that can be written", got=str(error),
            next_step="choose another one",
        ) from None  # fmt: skip
    return path


def _slices(pairs: list[Any] | None) -> tuple[tuple[float, float], ...]:
    return tuple((float(low), float(high)) for low, high in pairs or ())


@atexit.register
def _close_all() -> None:
    """Leave nothing behind at exit: all sessions together get what one gets."""
    sessions = [session for session in _open_sessions if session._sender is not None]
    for session in sessions:
        assert session._sender is not None
        session._request_stop(session._sender, "exit", _CLOSE_WAIT_S)
    deadline = time.monotonic() + _CLOSE_JOIN_S
    for session in sessions:
        assert session._sender is not None
        session._sender.join(max(0.0, deadline - time.monotonic()))
        session._closed = True
