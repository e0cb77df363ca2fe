"""Sockets: a ROUTER for the server, DEALERs for hosts and jobs. One socket, one thread.

Linger and high-water marks are set at creation, nothing here ever blocks beyond the given timeout,
and oversized parts are refused by the socket itself, before they are read into memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import zmq

from .codec import encode
from .errors import AddressError
from .messages import MAX_FRAME_BYTES, Message

__all__ = ["Dealer", "Liveness", "Received", "Router"]


class Received(NamedTuple):
    """One multipart message as it came: undecoded, so that a router may forward it untouched."""

    peer: bytes
    """The sender's routing id; empty on a DEALER."""
    parts: list[Any]


class _Socket:
    """Shared by both ends: options, non-blocking receive, idempotent close."""

    def __init__(
        self, context: zmq.Context[Any], kind: int, *, queue: int, max_part: int, keepalive: bool
    ) -> None:
        self._socket: zmq.Socket[Any] = context.socket(kind)
        self._socket.linger = 0
        self._socket.sndhwm = queue
        self._socket.rcvhwm = queue
        self._socket.maxmsgsize = max_part
        if keepalive:
            # Half-open TCP connections are found by ZMTP's own heartbeat, in the I/O thread.
            self._socket.heartbeat_ivl = 1000
            self._socket.heartbeat_timeout = 3000

    @property
    def raw(self) -> zmq.Socket[Any]:
        """The socket, for a `zmq.Poller`."""
        return self._socket

    def _recv(self) -> list[Any] | None:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return [frame.buffer for frame in frames]

    def close(self) -> None:
        """Close without waiting; what is queued is dropped. Safe to call twice."""
        self._socket.close(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Dealer(_Socket):
    """The host's or a job's end of a connection to a server.

    Args:
        endpoint: ``tcp://127.0.0.1:5570`` or ``ipc://…``; connecting never blocks.
        queue: High-water mark in messages, each way.
        keepalive: Drop the connection when the peer's process has not answered for 3 s. Off
            between a server and its jobs: there a stopped process is to keep its connection.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        *,
        queue: int = 64,
        max_part: int = MAX_FRAME_BYTES,
        keepalive: bool = True,
    ) -> None:
        super().__init__(context, zmq.DEALER, queue=queue, max_part=max_part, keepalive=keepalive)
        # Queue only to a live connection: what cannot be sent now is dropped by us, and counted,
        # instead of being delivered stale after a reconnect.
        self._socket.immediate = 1
        self._socket.reconnect_ivl = 50
        self._socket.reconnect_ivl_max = 1000
        try:
            self._socket.connect(endpoint)
        except BaseException:
            self.close()
            raise

    def send(self, message: Message) -> bool:
        """Send without blocking; False when the queue is full or nobody is connected.

        Raises:
            CodecError: The message is not well-formed; nothing was sent.
        """
        return self.send_parts(encode(message))

    def send_parts(self, parts: Sequence[Any]) -> bool:
        """Send ready parts without blocking; False when they cannot go now."""
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def recv(self) -> Received | None:
        """The next message, or None; never blocks."""
        parts = self._recv()
        return None if parts is None else Received(b"", parts)


class Router(_Socket):
    """The server's end: one port for all hosts, or one local socket for all jobs.

    Args:
        endpoint: Where to listen; a port of ``*`` or 0 lets the system pick one.
        keepalive: As for `Dealer`.

    Raises:
        AddressError: The port is in use, or may not be bound.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        *,
        queue: int = 256,
        max_part: int = MAX_FRAME_BYTES,
        keepalive: bool = True,
    ) -> None:
        super().__init__(context, zmq.ROUTER, queue=queue, max_part=max_part, keepalive=keepalive)
        # Without it a message to a peer that has left would vanish silently.
        self._socket.router_mandatory = 1
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            in_use = error.errno == zmq.EADDRINUSE
            raise AddressError(
                f"cannot listen on {endpoint}",
                expected="a free port",
                got="a port in use" if in_use else str(error),
                next_step="stop the program that holds it, or bind another port (port 0 picks one)",
            ) from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def send(self, peer: bytes, message: Message) -> bool:
        """Send to one peer without blocking; False when it has left or its queue is full."""
        return self.send_parts(peer, encode(message))

    def send_parts(self, peer: bytes, parts: Sequence[Any]) -> bool:
        """Send ready parts to one peer without blocking; False when they cannot go now."""
        try:
            self._socket.send_multipart([peer, *parts], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def recv(self) -> Received | None:
        """The next message with its sender, or None; never blocks."""
        parts = self._recv()
        return None if parts is None else Received(bytes(parts[0]), parts[1:])


class Liveness:
    """When to send a heartbeat, and when to give a peer up.

    Any message counts as a sign of life. Time is the monotonic clock, in seconds.
    """

    def __init__(self, *, interval_s: float = 0.5, timeout_s: float = 2.0) -> None:
        self.interval_s = interval_s
        self.timeout_s = timeout_s
        self.sequence = 0
        now = time.monotonic()
        self.last_seen = now
        self._next = now

    def seen(self) -> None:
        """Something arrived from the peer."""
        self.last_seen = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the peer was last heard."""
        return time.monotonic() - self.last_seen

    @property
    def lost(self) -> bool:
        """Whether the peer has been silent for longer than the timeout."""
        return self.silent_s > self.timeout_s

    def due(self) -> bool:
        """Whether a heartbeat should go out now; advances the schedule and the sequence."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self.interval_s
        self.sequence += 1
        return True
