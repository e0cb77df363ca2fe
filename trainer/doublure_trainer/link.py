"""A job's line to its server: one thread that owns the socket, answers, and feeds the trainer.

Training never waits for this thread, and this thread never waits for training: what goes out is
handed over in slots and queues, what comes in goes straight to `Trainee.add_rows`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
import zmq
from doublure_bridge import (
    PROTOCOL_OLDEST,
    PROTOCOL_VERSION,
    CodecError,
    Credit,
    Dealer,
    Error,
    Frame,
    Heartbeat,
    Hello,
    Liveness,
    Message,
    OpenSession,
    Progress,
    Rows,
    Stop,
    WeightsApplied,
    WeightsRejected,
    decode,
)
from numpy.typing import NDArray

from .errors import error_message
from .frames import rows_from_frame
from .jobs import Assignment

__all__ = ["Link", "RowSink", "Task"]

log = logging.getLogger("doublure.job")

_POLL_MS = 100
_TURN = 16
_EXIT_AFTER_STOP_S = 0.15
"""Below the server's grace of 0.2 s, so that an orderly end is the usual one."""


class RowSink(Protocol):
    """Where rows go; any thread may call it."""

    def add_rows(self, rows: NDArray[np.float32]) -> int:
        """Take rows [n, 6]; returns how many were kept."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a job has been given to do."""

    assignment: Assignment
    request: OpenSession

    @property
    def session(self) -> bytes:
        return bytes.fromhex(self.assignment.session)


class Link(threading.Thread):
    """The communication thread. Started once torch is imported: its Hello says "warm".

    Args:
        endpoint: The server's socket for jobs.
        secret: Proves to the server that this is the job it started.
    """

    def __init__(self, endpoint: str, secret: bytes) -> None:
        super().__init__(name="link", daemon=True)
        self._endpoint = endpoint
        self._secret = secret
        self._task: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._assigned: Task | None = None
        self._out: deque[Message] = deque()
        self._progress: Progress | None = None
        self._last_progress: Progress | None = None
        self._weights: Callable[[], Message] | None = None
        self._wake_out, self._wake_in = os.pipe()
        for end in (self._wake_out, self._wake_in):
            os.set_blocking(end, False)
        self.sink: RowSink | None = None
        self.stop = threading.Event()
        self.stop_reason = ""
        self.arrived = threading.Event()
        """Set whenever rows have come in."""
        self.failure = ""
        """Traceback of an error in this thread; the training thread reports it."""
        self.frames_refused = 0
        self._rng = np.random.default_rng()
        self._last_refusal = 0.0

    # --- called by the training thread -------------------------------------------------------

    def wait_task(self) -> Task | None:
        """Wait for an assignment; None when told to stop before there was one."""
        return self._task.get()

    def post(self, message: Message) -> None:
        """Send, in order, never dropped."""
        self._out.append(message)
        self._wake()

    def post_progress(self, progress: Progress) -> None:
        """Send, unless a newer one comes first."""
        self._progress = self._last_progress = progress
        self._wake()

    def post_weights(self, make: Callable[[], Message]) -> None:
        """Have the link build and send a publication, unless a newer one comes first."""
        self._weights = make
        self._wake()

    @property
    def pending(self) -> bool:
        """Whether something is still to be handed to the socket."""
        return bool(self._out)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_in, b"!")

    # --- the thread ----------------------------------------------------------------------------

    def run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        self._dealer = Dealer(context, self._endpoint, keepalive=False)
        self._out.appendleft(
            Hello(
                protocol=PROTOCOL_VERSION,
                oldest=PROTOCOL_OLDEST,
                software=f"doublure {version('doublure')}",
                host="job",
                pid=os.getpid(),
                token=self._secret,
            )
        )
        poller = zmq.Poller()
        poller.register(self._dealer.raw, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        beat = Liveness(interval_s=0.5)
        while True:
            # A message that could not go yet is tried again soon; there is no event for that.
            poller.poll(5 if self._out or self._progress or self._weights else _POLL_MS)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_out, 256)
            try:
                self._receive()
                self._send(beat)
            except Exception:
                self.failure = self.failure or traceback.format_exc()
                self.arrived.set()

    def _send(self, beat: Liveness) -> None:
        while self._out and self._dealer.send(self._out[0]):
            self._out.popleft()
        if self._out:
            return
        if (make := self._weights) is not None:
            message = make()
            if not self._dealer.send(message):
                # Keep the finished message, unless a newer candidate has come meanwhile.
                if self._weights is make:
                    self._weights = lambda: message
                return
            if self._weights is make:
                self._weights = None
        if (progress := self._progress) is not None and self._dealer.send(progress):
            self._progress = None
        if beat.due():
            session = self._assigned.session if self._assigned else b""
            self._dealer.send(Heartbeat(session=session, sequence=beat.sequence, reply=False))

    def _receive(self) -> None:
        taken = 0
        for _ in range(_TURN):
            received = self._dealer.recv()
            if received is None:
                break
            if self._assigned is None and (found := Assignment.decode(received.parts)):
                assignment, rest = found
                request = decode(rest)
                assert isinstance(request, OpenSession)
                self._assigned = Task(assignment, request)
                self._task.put(self._assigned)
                continue
            try:
                message = decode(received.parts)
            except CodecError as error:
                # The server forwards frames unread, so here is where a bad one is found out.
                taken += 1
                self._refuse(error)
                continue
            if isinstance(message, Rows | Frame):
                taken += 1
                self._take(message)
            elif isinstance(message, Stop):
                self._stop(message)
            elif isinstance(message, WeightsRejected):
                log.warning("the host refused version %d: %s", message.version, message.reason)
            elif isinstance(message, WeightsApplied):
                log.info("version %d is drawn after %d us", message.version, message.delay_us)
        if taken and self._assigned is not None:
            self._out.append(Credit(session=self._assigned.session, frames=taken))
            self.arrived.set()

    def _take(self, message: Rows | Frame) -> None:
        task, sink = self._assigned, self.sink
        if task is None or sink is None:
            return
        try:
            if isinstance(message, Frame):
                rows = rows_from_frame(
                    message, self._rng, width=task.request.width, height=task.request.height
                )
            else:
                rows = message.rows
            sink.add_rows(rows)
        except CodecError as error:
            self._refuse(error)

    def _refuse(self, error: CodecError) -> None:
        """Count a bad frame, and tell the host of one a second."""
        self.frames_refused += 1
        now = time.monotonic()
        if self._assigned is not None and now - self._last_refusal >= 1.0:
            self._last_refusal = now
            log.warning("frame refused (%d so far): %s", self.frames_refused, error)
            self._out.append(self._error("limit", error))

    def _error(self, code: str, cause: CodecError) -> Error:
        assert self._assigned is not None
        return error_message(code, "", session=self._assigned.session, cause=cause, fatal=False)

    def _stop(self, message: Stop) -> None:
        """Told to stop: the last figures go out, then the process ends, one way or the other."""
        if self.stop.is_set():
            return
        self.stop_reason = message.reason
        if (last := self._last_progress) is not None:
            self._dealer.send(last)
        self.stop.set()
        self.arrived.set()
        self._task.put(None)
        keeps = self._assigned is not None and self._assigned.assignment.persistent
        threading.Timer(_EXIT_AFTER_STOP_S if keeps else 0.005, os._exit, (0,)).start()
