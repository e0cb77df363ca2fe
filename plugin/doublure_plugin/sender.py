"""The sender thread: the only one that touches sockets, processes and messages.

It is a state machine that never waits longer than its poller, so that Stop is noticed at once in
every state. The render thread talks to it through the ring and two deques, and reads plain
attributes that only this thread writes; nothing here ever calls into the host.

    starting -> booting -> greeting -> opening -> live -> (ended)
        ^__________________________________________|      a spawned trainer died
                              ^____________________|      an attached one forgot the session
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import traceback
from collections import deque
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import doublure_bridge as bridge
import zmq
from doublure_bridge import PROTOCOL_OLDEST, PROTOCOL_VERSION, BridgeError

from .capture import FrameReader
from .digest import Source
from .errors import PluginError, TrainerError
from .feeder import Feeder
from .link import Link
from .options import Options, SourceCommand, StopCommand
from .resume import read_resume, write_resume
from .ring import Ring
from .stats import Notice
from .supervisor import Supervisor
from .weights import Intake

__all__ = ["Sender"]

# Phases of the conversation; see the module.
STARTING, BOOTING, GREETING, OPENING, LIVE, ENDED = (
    "starting", "booting", "greeting", "opening", "live", "ended",
)  # fmt: skip

_IDLE_POLL_MS: Final = 50
_OPEN_POLL_MS: Final = 20
# While frames arrive the ring is looked at this often: a wake-up by the render thread would be a
# system call there, and every system call gives the interpreter lock away.
_BUSY_POLL_MS: Final = 4


class Sender:
    """See the module. The attributes below are written by this thread and read by the session."""

    def __init__(self, options: Options, source: Source, ring: Ring, reader: FrameReader) -> None:
        self.options = options
        self.timing = options.timing
        self._thread = threading.Thread(target=self._run, name="doublure-sender", daemon=True)
        # From the render thread.
        self.commands: deque[StopCommand | SourceCommand] = deque()
        self.outbox: deque[bridge.Message] = deque(maxlen=64)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        # To the render thread.
        self.intake = Intake()
        self.state = "connecting"
        self.error: PluginError | None = None
        self.notices: deque[Notice] = deque(maxlen=256)
        self.feeder = Feeder(options, ring, reader, self._notice)
        self.opened: bridge.SessionOpened | None = None
        self.progress: bridge.Progress | None = None
        self.trainer_pid: int | None = None
        self.losses = 0
        self.stop_ms: float | None = None
        self.supervisor = Supervisor(options) if options.endpoint is None else None
        # Own.
        self._source = source
        self._phase = STARTING if self.supervisor else GREETING
        self._endpoint = options.endpoint
        self._resume = b""
        self._was_live = False
        self._lost = False
        self._since = time.monotonic()
        self._not_before = 0.0
        self._asked = False
        self._said: set[str] = set()
        self._stop: StopCommand | None = None
        self._stop_since = 0.0
        self._stop_sent = False
        self._draining = False
        self._superseded = False
        self._crashes = 0
        self._released = False
        self._link = Link(self.timing.lost)

    # -- called by the session --------------------------------------------------------------------

    def wake(self) -> None:
        """Have commands looked at now. Any thread; never blocks. Not for every frame."""
        with contextlib.suppress(OSError):
            self._wake_in.send(b"\0")

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        """Until stopped or failed. No exception leaves: the host must not notice more than a state.

        One crash is survived by starting the conversation anew; a second one is the end.
        """
        try:
            while self._phase != ENDED:
                try:
                    self._tick()
                except PluginError as error:
                    self._fail(error)
                except Exception as error:
                    self._crash(error)
        finally:
            self._release()

    def _crash(self, error: Exception) -> None:
        self._crashes += 1
        trouble = TrainerError(
            "sender thread", expected="to go on", got=f"{type(error).__name__}: {error}",
            next_step="this is a defect in doublure: please report the details",
        )  # fmt: skip
        detail = traceback.format_exc()
        if self._crashes > 1 or self._stop is not None:
            self._fail(trouble, detail)
            return
        self._notice("error", f"{trouble}; starting the conversation anew", detail)
        self._lose()
        self._disconnect()
        if self.supervisor is not None:
            self.supervisor.end()
            self._enter(STARTING, pause=1.0)
        else:
            self._enter(GREETING, pause=1.0)

    def _tick(self) -> None:
        self._obey()
        if self._phase == ENDED:
            return
        if self.supervisor is not None:
            self._supervise(self.supervisor)
        self._wait()
        self._receive()
        if self._phase in (GREETING, OPENING, LIVE):
            self._converse()
        if self.feeder.open and self._link.frames is not None and self.opened is not None:
            self.feeder.feed(self._link.frames, self.opened.session)
        else:
            self.feeder.drop()
        self._show()

    def _wait(self) -> None:
        """Sleep until a socket, the host or the clock has something; 50 ms at most."""
        poller = zmq.Poller()
        poller.register(self._wake_out, zmq.POLLIN)
        self._link.register(poller)
        if self._phase == BOOTING and self.supervisor is not None:
            fd = self.supervisor.ready_fd
            if fd is not None:
                poller.register(fd, zmq.POLLIN)
        now = time.monotonic()
        # A connection that comes up wakes nobody; a new attempt is watched closely for a while.
        asking = self._phase in (GREETING, OPENING) and not self._asked and now - self._since < 1.0
        patient = _OPEN_POLL_MS if self.feeder.open else _IDLE_POLL_MS
        poller.poll(_BUSY_POLL_MS if self.feeder.busy or asking else patient)
        with contextlib.suppress(OSError):
            while self._wake_out.recv(256):
                pass

    # -- the host's wishes ------------------------------------------------------------------------

    def _obey(self) -> None:
        while self.commands:
            command = self.commands.popleft()
            if isinstance(command, StopCommand):
                if self._stop is None:
                    self._stop_since = command.since
                if self._stop is None or command.wait_s < self._stop.wait_s:
                    self._stop = command
                self.feeder.open = False
            else:
                self._change_source(command)
        if self._stop is not None:
            self._pursue_stop(self._stop)

    def _change_source(self, command: SourceCommand) -> None:
        self._source = command.source
        self.feeder.replace(command.ring, command.reader)
        self.intake.forget()
        self.progress = None
        self._resume = self._stored_resume()
        self._notice("info", f"the source has changed ({command.reason}): training starts anew")
        if self._phase == OPENING and self._asked:
            # The answer on its way is about the old source; it is ended when it has a name.
            self._superseded = True
        elif self._phase == LIVE and not self._draining:
            self._end_old_session()

    def _end_old_session(self) -> None:
        """The old job ends before a new one is asked for; the same connection serves both."""
        assert self.opened is not None
        self._link.send(
            bridge.SourceChanged(
                session=self.opened.session,
                digest=self._source.digest,
                reason=f"now {self._source.name}",
            )
        )
        self._draining = True
        self._since = time.monotonic()

    def _pursue_stop(self, command: StopCommand) -> None:
        """Say Stop as soon as it can be said, and leave when answered, late or alone."""
        self.state = "stopping"
        late = time.monotonic() - command.since > command.wait_s
        if self._phase == LIVE and not self._lost and not late:
            if not self._stop_sent and self.opened is not None:
                message = bridge.Stop(session=self.opened.session, reason=command.reason[:250])
                self._stop_sent = self._link.send(message)
            return
        if self._phase == OPENING and self._asked and not late and not self._link.lost:
            # A job may be on its way; it gets its Stop as soon as it has a name.
            return
        if self._phase == LIVE and late:
            self._notice("warning", "the trainer did not confirm Stop in time; left it anyway")
        self._finish()

    def _finish(self) -> None:
        self._phase = ENDED
        self.feeder.shut()
        self._release()
        if self.state != "failed":
            self.state = "stopped"
            self._notice("info", "stopped")

    # -- the trainer's process --------------------------------------------------------------------

    def _supervise(self, supervisor: Supervisor) -> None:
        """Start our trainer, notice within one tick that it is gone, and start another."""
        if (death := supervisor.watch()) is not None:
            self._notice("warning", death.text, death.log)
            self._lose()
            self._disconnect()
            self._enter(STARTING, pause=death.pause_s)
        if self._phase == STARTING and time.monotonic() >= self._not_before:
            supervisor.start()
            self._enter(BOOTING)
        elif self._phase == BOOTING and (endpoint := supervisor.poll_ready()) is not None:
            self._endpoint = endpoint
            self._notice("info", f"trainer {supervisor.pid} listens at {endpoint}")
            self._enter(GREETING)
        self.trainer_pid = supervisor.pid

    # -- the conversation -------------------------------------------------------------------------

    def _enter(self, phase: str, *, pause: float = 0.0) -> None:
        self._phase = phase
        self._since = time.monotonic()
        self._not_before = self._since + pause
        self._asked = False

    def _disconnect(self) -> None:
        self.feeder.shut()
        self._link.disconnect()

    def _reconnect(self, *, pause: float = 0.0) -> None:
        self._disconnect()
        self._enter(GREETING, pause=pause)

    def _lose(self) -> None:
        """The trainer is gone or silent: what waits for it is thrown away, and counted."""
        if self._phase == LIVE and not self._lost:
            self.losses += 1
        self._lost = True
        self.feeder.shut()

    def _converse(self) -> None:
        now = time.monotonic()
        if not self._link.connected:
            if now < self._not_before:
                return
            assert self._endpoint is not None
            self._link.connect(self._endpoint)
        if self._phase == GREETING:
            self._greet(now)
        elif self._phase == OPENING:
            self._await_opening(now)
        else:
            self._keep_alive()
        while self.outbox and self._phase == LIVE and not self._lost:
            if not self._link.send(self.outbox[0]):
                break
            self.outbox.popleft()

    def _greet(self, now: float) -> None:
        if not self._asked:
            hello = bridge.Hello(
                protocol=PROTOCOL_VERSION,
                oldest=PROTOCOL_OLDEST,
                software=f"doublure {_own_version()}",
                host=self.options.host,
                pid=os.getpid(),
                token=self.supervisor.token if self.supervisor is not None else b"",
            )
            if self._link.send(hello):
                self._asked = True
                self._since = now
        waited = now - self._since
        if not self._asked and waited > 1.0 and self.options.endpoint is not None:
            self._warn_once(
                TrainerError(
                    "trainer",
                    expected=f"one that listens at {self._endpoint}",
                    got="none so far",
                    next_step="start `doublure trainer`; drawing goes on without it",
                )
            )
        if waited > self.timing.greet:
            if self._asked:
                self._warn_once(
                    TrainerError(
                        "trainer",
                        expected=f"Welcome from {self._endpoint}",
                        got=f"a connection, but no answer in {self.timing.greet:.0f} s",
                        next_step="check that a doublure trainer, not another program or a "
                        "forwarded port without one, is at the other end",
                    )
                )
            self._reconnect()

    def _await_opening(self, now: float) -> None:
        if not self._asked:
            ask = bridge.OpenSession(
                digest=self._source.digest,
                source=self._source.name,
                width=self._source.width,
                height=self._source.height,
                parameter_low=self.options.low,
                parameter_high=self.options.high,
                model=self.options.model,
                config=dict(self.options.config),
                resume=self._resume,
            )
            self._asked = self._link.send(ask)
            self._superseded = False
        self._link.beat(b"")
        if self._link.lost:
            self._notice("warning", "the trainer went silent while it opened the session")
            self._lose()
            self._reconnect()
        elif now - self._since > self.timing.open:
            raise TrainerError(
                "open session", expected=f"an answer within {self.timing.open:.0f} s", got="none",
                next_step="see the trainer's log",
            )  # fmt: skip

    def _keep_alive(self) -> None:
        assert self.opened is not None
        self._link.beat(self.opened.session)
        if self._draining and time.monotonic() - self._since > self.timing.stop:
            self._notice("warning", "the trainer did not confirm the end of the old source in time")
            self._draining = False
            self.opened = None
            self._reconnect()
        elif self._link.lost and not self._lost:
            self._lose()
            self._notice(
                "warning",
                f"the trainer has been silent for {self._link.silent_s:.1f} s: lost; "
                "drawing goes on, and it is taken back when it answers",
            )

    def _receive(self) -> None:
        """Handle what has come. Of several Weights only the newest is looked at."""
        newest: bridge.Weights | None = None
        for _ in range(64):
            received = self._link.receive()
            if received is None:
                break
            try:
                message = bridge.decode(received.parts)
            except bridge.VersionError as error:
                raise TrainerError(
                    error.what, expected=error.expected, got=error.got, next_step=error.next_step
                ) from None
            except BridgeError as error:
                self._warn_once(error, "ignored a message from the trainer")
                continue
            forgotten = isinstance(message, bridge.Error) and message.code == "unknown_session"
            if self._lost and self._phase == LIVE and not forgotten:
                self._regain()
            if isinstance(message, bridge.Weights):
                if newest is None or message.version > newest.version:
                    newest = message
            else:
                self._handle(message)
        if newest is not None:
            self._take_weights(newest)
        if self._phase == LIVE and not self._lost and not self._draining:
            released = self.intake.release(time.monotonic())
            if released is not None:
                self._notice("info", f"weights {released.version} are no longer held back")

    def _regain(self) -> None:
        assert self.opened is not None
        self._lost = False
        # Frames that were on their way are lost with their credit; the trainer meters for itself.
        if self._stop is None and not self._draining:
            self.feeder.begin(self.opened.credit)
        self._notice("info", "the trainer answers again")

    def _handle(self, message: bridge.Message) -> None:
        match message:
            case bridge.Heartbeat():
                if not message.reply:
                    session = b"" if self.opened is None else self.opened.session
                    self._link.send(
                        bridge.Heartbeat(session=session, sequence=message.sequence, reply=True)
                    )
            case bridge.Welcome():
                self._welcomed(message)
            case bridge.SessionOpened():
                self._session_opened(message)
            case bridge.Error():
                self._handle_error(message)
            case bridge.Credit() | bridge.Progress() | bridge.Stopped():
                if self.opened is not None and message.session == self.opened.session:
                    self._handle_session(message)
            case _:
                wrong = type(message).__name__
                self._warn_once(
                    TrainerError("message", expected="one for hosts", got=wrong), "ignored"
                )

    def _welcomed(self, message: bridge.Welcome) -> None:
        if self._phase != GREETING:
            return
        if not PROTOCOL_OLDEST <= message.protocol <= PROTOCOL_VERSION:
            error = bridge.version_mismatch(message.protocol, message.protocol)
            raise TrainerError(
                error.what, expected=error.expected, got=error.got, next_step=error.next_step
            )
        self.trainer_pid = message.pid
        self._link.expect_life(message.heartbeat_ms / 1000)
        if not self._resume:
            self._resume = self._stored_resume()
        self._enter(OPENING)

    def _session_opened(self, message: bridge.SessionOpened) -> None:
        if self._phase != OPENING:
            return
        try:
            for model in message.models:
                bridge.model_spec_from_dict(model)
        except BridgeError as error:
            raise TrainerError(
                error.what, expected=error.expected, got=error.got, next_step=error.next_step
            ) from None
        if self._superseded:
            self.opened = message
            self._enter(LIVE)
            self._end_old_session()
            return
        resumed = message.resume == self._resume and message.step > 0
        self.intake.reopen(resumed=resumed, now=time.monotonic())
        self._resume = message.resume
        self.opened = message
        self._enter(LIVE)
        self._lost = False
        self._was_live = True
        self.error = None
        self._said.clear()
        # Words about an earlier session mean nothing to this one.
        self.outbox.clear()
        if self._stop is None:
            self.feeder.begin(message.credit)
        self._store_resume()
        how = f"resumed at step {message.step}" if resumed else "new"
        self._notice("info", f"session with trainer {self.trainer_pid} ({how})")

    def _handle_session(self, message: bridge.Credit | bridge.Progress | bridge.Stopped) -> None:
        match message:
            case bridge.Credit():
                self.feeder.grant(message.frames)
            case bridge.Progress():
                if not self._draining:
                    self.progress = message
            case bridge.Stopped():
                if self._stop is not None:
                    self.stop_ms = (time.monotonic() - self._stop_since) * 1000
                    self._finish()
                elif self._draining:
                    self._draining = False
                    self.opened = None
                    self._enter(OPENING)
                elif message.reason == "taken over":
                    # Coming back would take it over in turn, and so on for ever.
                    raise TrainerError(
                        "session", expected="to be the only one of its directory",
                        got="another host resumed it", next_step="give each host its own directory",
                    )  # fmt: skip
                else:
                    self._notice("warning", f"the trainer ended the session: {message.reason}")
                    self._lose()
                    self.opened = None
                    self._reconnect(pause=1.0)

    def _handle_error(self, message: bridge.Error) -> None:
        if message.code == "unknown_session":
            ours = self.opened is not None and message.session in (b"", self.opened.session)
            if self._phase == LIVE and ours:
                self._notice("warning", "the trainer has been started anew: opening again")
                self._lose()
                self.opened = None
                self._draining = False
                self._enter(GREETING)
            return
        error = TrainerError(
            message.what, expected=message.expected, got=message.got, next_step=message.next_step
        )
        if self._stop is not None and message.fatal:
            # It ended on its own, or never began, while it was being stopped.
            self._finish()
        elif message.code == "busy" and self._phase in (GREETING, OPENING):
            self._warn_once(error)
            self._reconnect(pause=2.0)
        elif message.fatal:
            self._fail(error, message.detail)
        else:
            self._notice("warning", f"{message.code}: {error}", message.detail)

    def _take_weights(self, message: bridge.Weights) -> None:
        if self.opened is None or self._draining or message.session != self.opened.session:
            return
        again = self.intake.again(message)
        if again is not None:
            self._notice("info", again)
            if not self.intake.has(message):
                self._refuse_weights(message, again)
            return
        held_back = self.intake.held_back
        reason = self.intake.take(
            message,
            session=self.opened.session,
            source=self._source.digest,
            arrived=self._link.last_heard,
        )
        if reason is None:
            return
        if self.intake.held_back > held_back:
            self._notice("info", f"weights {message.version} are {reason}")
        else:
            self._notice("warning", f"refused {reason}; kept the last good ones")
        self._refuse_weights(message, reason)

    def _refuse_weights(self, message: bridge.Weights, reason: str) -> None:
        self.outbox.append(
            bridge.WeightsRejected(
                session=message.session, version=message.version, reason=reason[:500]
            )
        )

    # -- telling ----------------------------------------------------------------------------------

    def _show(self) -> None:
        """Bring the public state up to date."""
        if self._stop is not None or self._phase == ENDED:
            return
        if self._phase == LIVE and not self._lost:
            self.error = self.feeder.refusal
            refused = self.error is not None
            self.state = "opening" if self._draining else "refused" if refused else "streaming"
        elif self._lost and self._was_live:
            self.state = "lost"
        else:
            self.state = "opening" if self._phase == OPENING else "connecting"

    def _notice(self, level: str, text: str, detail: str = "") -> None:
        self.notices.append(Notice(time.time(), level, text, detail))

    def _warn_once(self, error: BridgeError, prefix: str = "") -> None:
        text = f"{prefix}: {error}" if prefix else str(error)
        if isinstance(error, PluginError) and not prefix:
            self.error = error
        if text not in self._said and len(self._said) < 64:
            self._said.add(text)
            self._notice("warning", text)

    def _fail(self, error: PluginError, detail: str = "") -> None:
        """The end of this session's training, not of the host's drawing."""
        if not detail and self.supervisor is not None:
            detail = self.supervisor.log_tail()
        self.error = error
        self._notice("error", str(error), detail)
        self.state = "failed"
        self._phase = ENDED
        self.feeder.shut()
        self._release()

    def _release(self) -> None:
        """Give back everything in reverse order of taking it. Idempotent."""
        if self._released:
            return
        self._released = True
        self.feeder.shut()
        self._link.close()
        if self.supervisor is not None:
            self.supervisor.close()
        self._wake_in.close()
        self._wake_out.close()

    def _stored_resume(self) -> bytes:
        try:
            return read_resume(self.options.directory, self._source.digest)
        except (OSError, ValueError) as error:
            self._notice("warning", f"session.json cannot be read ({error}): training starts anew")
            return b""

    def _store_resume(self) -> None:
        try:
            write_resume(self.options.directory, self._source.digest, self._resume)
        except OSError as error:
            self._notice("warning", f"session.json cannot be written ({error}): not resumable")


def _own_version() -> str:
    try:
        return version("doublure")
    except PackageNotFoundError:
        # Vendored into an engine's add-on folder without metadata.
        return "0"
