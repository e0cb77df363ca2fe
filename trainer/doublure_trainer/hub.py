"""The trainer server's heart: one loop between hosts and jobs, in one thread that is never busy.

The half that faces the hosts; `desk` is the half that faces the jobs. Hosts talk to one ROUTER,
jobs to another. Frames pass undecoded. Nothing here trains, imports
torch, waits, or reads more of a message than it needs; whatever arrives is answered or counted.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import zmq
from doublure_bridge import (
    PROTOCOL_OLDEST,
    PROTOCOL_VERSION,
    CodecError,
    Error,
    Frame,
    Heartbeat,
    Hello,
    Message,
    OpenSession,
    Router,
    Rows,
    SourceChanged,
    Stop,
    UnknownTagError,
    VersionError,
    WeightsApplied,
    WeightsRejected,
    Welcome,
    decode,
    encode,
    parse_address,
    peek,
    version_mismatch,
)
from doublure_bridge.messages import MAX_FRAME_BYTES, MAX_ROWS_BYTES

from .desk import Desk
from .errors import LaunchError, error_message
from .jobs import JobPool, Launcher, launcher
from .sessions import Meter, Session, State
from .settings import HubSettings

__all__ = ["Hub"]

log = logging.getLogger("doublure.trainer")

_TURN = 256
"""Messages taken from one socket before the other gets its turn."""
_TICK_MS = 100
_HURRY_MS = 4
_GOODBYE_S = 0.15
_REMEMBERED = 64
_MAX_PEERS = 1024
_ASKED_FOR = ("stop", "source changed")
_LOCAL_SOCKET = "jobs.sock"
# sockaddr_un.sun_path is 108 bytes on Linux, 104 on macOS
_SOCKET_PATH_LIMIT = 100


class _Peer:
    """A host's control connection that has said Hello."""

    __slots__ = ("host", "last_seen", "session")

    def __init__(self, host: str) -> None:
        self.host = host
        self.session: Session | None = None
        self.last_seen = time.monotonic()


class Hub:
    """Routes, authenticates, meters and reports. One thread calls everything but `drain`.

    Args:
        settings: See `HubSettings`.
        start: Starts job processes; the real ones when left out.

    Raises:
        AddressError: The address is not loopback, or its port is in use.
    """

    def __init__(self, settings: HubSettings, *, start: Launcher | None = None) -> None:
        self.settings = settings
        self._run_id = secrets.token_bytes(16)
        self._software = f"doublure {version('doublure')}"
        self._root = settings.directory or settings.runtime
        self._context: zmq.Context[Any] = zmq.Context()
        self._routers: list[Router] = []
        self._pool: JobPool | None = None
        self._wake_out = self._wake_in = -1
        try:
            self._hosts = self._open(parse_address(settings.bind).endpoint)
            self._locals = self._open(self._local_endpoint(), keepalive=False)
        except BaseException:
            self.close()
            raise
        self.endpoint: str = self._hosts.endpoint
        logs = settings.runtime / "logs"
        logs.mkdir(mode=0o700, exist_ok=True)
        self._pool = self.pool = JobPool(
            self._locals.endpoint,
            logs,
            start=start or launcher(settings.job),
            spares=settings.spares,
        )
        self._desk = Desk(settings, self._hosts, self._locals, self.pool)
        self.sessions: dict[bytes, Session] = self._desk.sessions
        self._poller = zmq.Poller()
        self._poller.register(self._hosts.raw, zmq.POLLIN)
        self._poller.register(self._locals.raw, zmq.POLLIN)
        # Wakes the loop from a signal handler or another thread.
        self._wake_out, self._wake_in = os.pipe()
        for end in (self._wake_out, self._wake_in):
            os.set_blocking(end, False)
        self._poller.register(self._wake_out, zmq.POLLIN)
        self._peers: dict[bytes, _Peer] = {}
        self._waiting: deque[tuple[bytes, OpenSession]] = deque()
        self._unknown_tags: set[int] = set()
        self._last_complaint = 0.0
        self._draining = ""
        self.abandoned = False
        self.malformed = 0
        self.orphans = Meter()
        """Frames that named no session."""
        self._from_host: dict[type[Message], Callable[[bytes, Any], None]] = {
            Hello: self._on_hello,
            OpenSession: self._on_open,
            Heartbeat: self._on_heartbeat,
            Stop: self._on_stop,
            SourceChanged: self._on_source_changed,
            WeightsApplied: self._on_applied,
            WeightsRejected: self._on_rejected,
            Error: self._on_host_error,
        }

    def _open(self, endpoint: str, *, keepalive: bool = True) -> Router:
        router = Router(self._context, endpoint, keepalive=keepalive)
        self._routers.append(router)
        return router

    def _local_endpoint(self) -> str:
        path = str(self.settings.runtime / _LOCAL_SOCKET)
        if zmq.has("ipc") and len(path.encode()) < _SOCKET_PATH_LIMIT:
            return f"ipc://{path}"
        # Anyone on this machine may connect there; the job's secret still keeps strangers out.
        return "tcp://127.0.0.1:*"

    # --- the loop ---------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until drained or abandoned."""
        while not (self.drained or self.abandoned):
            self.step()
        # A DEALER that is set to queue only to live connections drops what its program has not
        # read yet when the connection ends, so the hosts get a moment to read their Stopped.
        goodbye = time.monotonic() + _GOODBYE_S
        while self._desk.ended and not self.abandoned and time.monotonic() < goodbye:
            self.step()

    def step(self, timeout_ms: int = _TICK_MS) -> None:
        """One turn: wait at most so long, then route what is there and look after jobs."""
        hurry = self.pool.hurried or self._draining
        ready = dict(self._poller.poll(min(timeout_ms, _HURRY_MS) if hurry else timeout_ms))
        if self._wake_out in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_out, 64)
        self._take(self._hosts, self._take_from_host)
        self._take(self._locals, self._desk.take)
        self._desk.look_after(spares=not self._draining)
        self._look_after_hosts()

    def drain(self, reason: str = "drained") -> None:
        """Stop every job, tell every host, then `drained`. Any thread, and signal handlers."""
        self._draining = self._draining or reason
        self._wake()

    def abandon(self) -> None:
        """Have `run` return at once: nobody is left to be told. Any thread."""
        self.abandoned = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_in, b"!")

    @property
    def drained(self) -> bool:
        return bool(self._draining) and not self.sessions

    def close(self, *, flush_ms: int = 300) -> None:
        """Kill what is left, free the port. Waits at most `flush_ms` for last messages.

        Idempotent.
        """
        if self._pool is not None:
            self._pool.close()
        for router in self._routers:
            router.raw.close(linger=flush_ms)
        self._context.term()
        if self._wake_in >= 0:
            os.close(self._wake_in)
            os.close(self._wake_out)
            self._wake_out = self._wake_in = -1

    def snapshot(self) -> list[dict[str, Any]]:
        """One set of figures a session; may be called from another thread."""
        return [session.snapshot() for session in list(self.sessions.values())]

    def _take(self, router: Router, handle: Any) -> None:
        for _ in range(_TURN):
            received = router.recv()
            if received is None:
                return
            try:
                handle(received.peer, received.parts)
            except Exception:
                # Our own bug, met by one message: it must not end every host's session.
                self.malformed += 1
                log.exception("a message was dropped")

    # --- hosts ------------------------------------------------------------------------------

    def _take_from_host(self, peer: bytes, parts: list[Any]) -> None:
        try:
            envelope = peek(parts)
            if envelope.tag in (Rows.tag, Frame.tag):
                self._on_frame(envelope.version, envelope.tag, envelope.first, parts)
                return
            message = decode(parts)
            handler = self._from_host.get(type(message))
            if handler is None:
                raise CodecError(
                    type(message).__name__, expected="a message that hosts send", got="this one"
                )
        except VersionError as error:
            self._say(peer, error_message("version", "", cause=error))
        except UnknownTagError as error:
            if len(self._unknown_tags) < _REMEMBERED and int(error.got) not in self._unknown_tags:
                self._unknown_tags.add(int(error.got))
                log.warning("ignoring messages with unknown tag %s (a newer host?)", error.got)
        except CodecError as error:
            self.malformed += 1
            if time.monotonic() - self._last_complaint > 1.0:
                self._last_complaint = time.monotonic()
                log.warning("malformed message (%d so far): %s", self.malformed, error)
            self._say(peer, error_message("limit", "", cause=error, fatal=False))
        else:
            if (known := self._peers.get(peer)) is not None:
                known.last_seen = time.monotonic()
            handler(peer, message)

    def _on_frame(self, protocol: int, tag: int, name: Any, parts: list[Any]) -> None:
        """Forward Rows or a Frame, undecoded, if its session, size and credit allow it."""
        if not PROTOCOL_OLDEST <= protocol <= PROTOCOL_VERSION:
            raise version_mismatch(protocol, protocol)
        kind, limit = ("Rows", MAX_ROWS_BYTES) if tag == Rows.tag else ("Frame", MAX_FRAME_BYTES)
        if not isinstance(name, bytes) or len(name) != 16:
            raise CodecError(f"{kind}.session", expected="16 bytes", got=type(name).__name__)
        if len(parts) != 2:
            raise CodecError(kind, expected="a header and one array", got=f"{len(parts)} parts")
        nbytes = memoryview(parts[1]).nbytes
        if nbytes > limit:
            raise CodecError(kind, expected=f"at most {limit} bytes", got=nbytes)
        session = self.sessions.get(name)
        if session is None:
            # Frames on their way while a session ends are normal; nobody waits for an answer.
            self.orphans.add(nbytes)
            return
        session.last_seen = time.monotonic()
        meter = session.frames
        if session.credit <= 0:
            meter.dropped += 1
            if not session.credit_warned:
                session.credit_warned = True
                log.warning("%s: frames beyond credit are dropped", session.name)
                self._desk.tell(
                    session,
                    error_message(
                        "credit",
                        "frames beyond credit are dropped",
                        session=session.id,
                        expected=f"at most {self.settings.credit} frames on the way",
                        next_step="count one credit a frame, and wait for Credit at zero",
                        fatal=False,
                    ),
                )
            return
        session.credit -= 1
        job = session.job
        deliverable = session.state is State.OPEN and job is not None and job.peer is not None
        full = session.pending_bytes + nbytes > self.settings.pending_bytes
        if not deliverable or (full and session.sent_bytes):
            meter.dropped += 1
            if deliverable:
                self._desk.grant(session, 1)
            # Without a job the credit stays spent, so that the host rests until there is one.
            return
        assert job is not None
        assert job.peer is not None
        if self._locals.send_parts(job.peer, parts):
            meter.add(nbytes)
            session.sent_bytes.append(nbytes)
            session.pending_bytes += nbytes
        else:
            meter.dropped += 1
            self._desk.grant(session, 1)

    def _on_hello(self, peer: bytes, hello: Hello) -> None:
        newest = min(hello.protocol, PROTOCOL_VERSION)
        if newest < max(hello.oldest, PROTOCOL_OLDEST):
            cause = version_mismatch(hello.oldest, hello.protocol)
            log.warning("refused %s (%s): %s", hello.host, hello.software, cause)
            self._say(peer, error_message("version", "", cause=cause))
            return
        token = self.settings.token
        if token and not hmac.compare_digest(hello.token, token):
            log.warning("refused %s (pid %d): wrong token", hello.host, hello.pid)
            self._say(
                peer,
                error_message(
                    "token",
                    "Hello.token",
                    expected="the secret this trainer was spawned with",
                    got="another" if hello.token else "none",
                    next_step="attach to a trainer of your own: run `doublure trainer`",
                ),
            )
            return
        if peer not in self._peers:
            if len(self._peers) >= _MAX_PEERS:
                self._say(peer, error_message("busy", "too many connections", got=str(_MAX_PEERS)))
                return
            self._peers[peer] = _Peer(hello.host)
            log.info("%s (%s, pid %d) has connected", hello.host, hello.software, hello.pid)
        self._say(
            peer,
            Welcome(
                protocol=newest,
                software=self._software,
                server=self._run_id,
                pid=os.getpid(),
                heartbeat_ms=self.settings.heartbeat_ms,
                capabilities=["rows", "frame", "resume"],
            ),
        )

    def _on_open(self, peer: bytes, request: OpenSession) -> None:
        known = self._peers.get(peer)
        busy = ""
        if known is None:
            self._say(
                peer,
                error_message(
                    "token", "OpenSession", expected="Hello first", got="OpenSession first"
                ),
            )
            return
        if self._draining:
            busy = "this trainer is shutting down"
        elif known.session is not None and not known.session.ending:
            busy = "this connection has a session already; stop it first"
        elif len(self.sessions) >= self.settings.max_sessions:
            busy = f"this trainer serves {self.settings.max_sessions} sessions already"
        if busy:
            self._say(peer, error_message("busy", busy, next_step="try again later"))
            return
        resume = request.resume or secrets.token_bytes(16)
        for other in self.sessions.values():
            if other.resume == resume:
                # The same source, resumed while its old session still ends (or its host died
                # without a word): one directory, one job, so the old one has to go first.
                self._desk.end(other, "taken over")
                self._waiting.append((peer, request))
                return
        directory = self._root / "jobs" / resume.hex()
        had = directory.is_dir()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._say(
                peer,
                error_message(
                    "disk",
                    f"job directory {directory}",
                    expected="one that can be written",
                    got=error.strerror or str(error),
                ),
            )
            return
        session = Session(
            id=secrets.token_bytes(16),
            resume=resume,
            peer=peer,
            host=known.host,
            request=request,
            directory=directory,
            job=None,
            credit=self.settings.credit,
        )
        try:
            session.job = self.pool.take(session)
        except LaunchError as error:
            self._desk.remove_directory(session)
            self._say(peer, error_message("open_refused", "", cause=error))
            return
        known.session = session
        self.sessions[session.id] = session
        log.info(
            "%s: opened by %s, %dx%d, %s", session.name, known.host, request.width,
            request.height, "resuming" if had else "from the start",
        )  # fmt: skip
        if session.job.ready:
            self._desk.assign(session, republish=True)

    def _on_heartbeat(self, peer: bytes, beat: Heartbeat) -> None:
        if beat.session:
            session = self._named(peer, beat.session)
            if session is None:
                return
        if not beat.reply:
            self._say(peer, Heartbeat(session=beat.session, sequence=beat.sequence, reply=True))

    def _named(self, peer: bytes, name: bytes) -> Session | None:
        """The session a host names; tells it when there is none; notes the sign of life."""
        session = self.sessions.get(name)
        if session is None:
            ended = self._desk.ended.get(name)
            if ended is not None and ended.reason in _ASKED_FOR:
                # Said before our Stopped had arrived; the host knows by now.
                return None
            self._say(
                peer,
                error_message(
                    "unknown_session",
                    "this trainer knows no such session",
                    session=name,
                    next_step="say Hello, then OpenSession with the resume token",
                    fatal=False,
                ),
            )
            return None
        session.last_seen = time.monotonic()
        if session.peer != peer:
            self._rebind(session, peer)
        session.grants = 0
        return session

    def _rebind(self, session: Session, peer: bytes) -> None:
        """The host's connection broke and came back under another routing id."""
        log.info("%s: the host has reconnected", session.name)
        old = self._peers.pop(session.peer, None)
        session.peer = peer
        known = self._peers.setdefault(peer, _Peer(old.host if old else session.host))
        known.session = session
        # What was on its way to the host is lost: repeat what it cannot do without.
        if session.grants:
            self._desk.grant(session, session.grants)
        if session.weights is not None:
            self._hosts.send_parts(peer, session.weights)

    def _on_stop(self, peer: bytes, message: Stop) -> None:
        if (ended := self._desk.ended.get(message.session)) is not None:
            self._say(peer, ended)
            return
        session = self._named(peer, message.session)
        if session is not None:
            self._desk.end(session, "stop", detail=message.reason)

    def _on_source_changed(self, peer: bytes, message: SourceChanged) -> None:
        session = self._named(peer, message.session)
        if session is not None:
            self._desk.end(session, "source changed", detail=message.reason)

    def _on_applied(self, peer: bytes, message: WeightsApplied) -> None:
        session = self._named(peer, message.session)
        if session is not None:
            session.applied = max(session.applied, message.version)
            session.weights = None
            log.debug("%s: version %d applied", session.name, message.version)
            self._desk.to_job(session, encode(message))

    def _on_rejected(self, peer: bytes, message: WeightsRejected) -> None:
        session = self._named(peer, message.session)
        if session is not None:
            session.rejected += 1
            session.weights = None
            log.warning(
                "%s: the host refused version %d: %s", session.name, message.version, message.reason
            )
            self._desk.to_job(session, encode(message))

    def _on_host_error(self, peer: bytes, message: Error) -> None:
        log.warning("a host reports %s: %s", message.code, message.what)
        if message.session:
            self._named(peer, message.session)

    def _look_after_hosts(self) -> None:
        now = time.monotonic()
        for _ in range(len(self._waiting)):
            self._on_open(*self._waiting.popleft())
        for session in list(self.sessions.values()):
            while session.outbox and self._hosts.send(session.peer, session.outbox[0]):
                session.outbox.popleft()
            # Before it is told the session's name a host cannot send a sign of life for it.
            opening = session.state is State.OPENING
            patience = self.settings.open_s if opening else self.settings.host_silence_s
            if not session.ending and now - session.last_seen > patience:
                log.warning(
                    "%s: no word from the host for %.0f s, giving it up",
                    session.name,
                    now - session.last_seen,
                )
                self._desk.end(session, "host lost")
        for peer, known in list(self._peers.items()):
            quiet = now - known.last_seen > self.settings.host_silence_s
            if quiet and (known.session is None or known.session.id not in self.sessions):
                del self._peers[peer]
        if self._draining:
            self._waiting.clear()
            for session in self.sessions.values():
                self._desk.end(session, self._draining)

    def _say(self, peer: bytes, message: Message) -> bool:
        """Send to a connection; what it cannot take now is dropped."""
        return self._hosts.send(peer, message)
