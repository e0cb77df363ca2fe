"""The two sockets to a trainer, and the signs of life on them. Sender thread only."""

from __future__ import annotations

from typing import Any

import zmq
from doublure_bridge import Dealer, Heartbeat, Liveness, Message, Received

__all__ = ["Link"]

_SHORTEST_BEAT_S = 0.05


class Link:
    """Owns the ZeroMQ context, the control and the frames socket. Nothing here waits.

    Args:
        lost_s: Silence after which the trainer counts as lost, seconds.
    """

    def __init__(self, lost_s: float) -> None:
        self._lost_s = lost_s
        self._context: zmq.Context[Any] | None = None
        self._control: Dealer | None = None
        self.frames: Dealer | None = None
        self._life = Liveness(timeout_s=lost_s)

    @property
    def connected(self) -> bool:
        """Whether there are sockets; they may still be trying to reach somebody."""
        return self._control is not None

    def connect(self, endpoint: str) -> None:
        if self._context is None:
            self._context = zmq.Context()
        self._control = Dealer(self._context, endpoint)
        self.frames = Dealer(self._context, endpoint)

    def disconnect(self) -> None:
        """Close both sockets; what they held is gone. Idempotent."""
        for channel in (self.frames, self._control):
            if channel is not None:
                channel.close()
        self._control = self.frames = None

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self.disconnect()
        if self._context is not None:
            # Returns at once: every socket is closed, and none lingers.
            self._context.term()
            self._context = None

    def register(self, poller: zmq.Poller) -> None:
        """Have a poller woken by what the trainer says."""
        if self._control is not None:
            poller.register(self._control.raw, zmq.POLLIN)

    def send(self, message: Message) -> bool:
        """Send on the control socket; False when it cannot go now."""
        return self._control is not None and self._control.send(message)

    def receive(self) -> Received | None:
        """The next message on the control socket, which counts as a sign of life."""
        received = None if self._control is None else self._control.recv()
        if received is not None:
            self._life.seen()
        return received

    def expect_life(self, interval_s: float) -> None:
        """Start the clock: from now on the trainer is to be heard."""
        # Often enough for one to go missing, whatever the trainer proposes.
        interval_s = min(max(interval_s, _SHORTEST_BEAT_S), self._lost_s / 3)
        self._life = Liveness(interval_s=interval_s, timeout_s=self._lost_s)

    def beat(self, session: bytes) -> None:
        """Send a heartbeat when one is due."""
        if self._life.due():
            self.send(Heartbeat(session=session, sequence=self._life.sequence, reply=False))

    @property
    def lost(self) -> bool:
        """Whether the trainer has been silent for too long."""
        return self._life.lost

    @property
    def silent_s(self) -> float:
        return self._life.silent_s

    @property
    def last_heard(self) -> float:
        """`time.monotonic()` of the last message."""
        return self._life.last_seen
