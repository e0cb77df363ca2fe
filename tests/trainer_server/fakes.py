"""Jobs that are not processes: a hub can be driven, and its jobs played, in one thread."""

from __future__ import annotations

import os
from typing import Any

import zmq
from doublure_bridge import (
    PROTOCOL_OLDEST,
    PROTOCOL_VERSION,
    Dealer,
    Hello,
    Message,
    SessionOpened,
    Stop,
    decode,
)
from doublure_trainer.jobs import Assignment, Launch


class FakeJob:
    """A `jobs.Process`, and the job in it, played by the test.

    Args:
        obedient: Whether it ends by itself when told to stop.
    """

    def __init__(self, launch: Launch, *, obedient: bool = True) -> None:
        self.launch = launch
        self.obedient = obedient
        self.pid = os.getpid()
        self.code: int | None = None
        self.killed = False
        self.received: list[Message] = []
        self.assignment: Assignment | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self.dealer = Dealer(self._context, launch.endpoint, keepalive=False)
        self._greeted = False

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.killed = True
        self.end(-9)

    def end(self, code: int = 0) -> None:
        if self.code is None:
            self.code = code
            self.dealer.close()
            self._context.term()

    def play(self) -> None:
        """One turn of a well-behaved job: greet, open, note what comes, obey Stop."""
        if self.code is not None:
            return
        if not self._greeted:
            self._greeted = self.dealer.send(
                Hello(
                    protocol=PROTOCOL_VERSION, oldest=PROTOCOL_OLDEST, software="fake",
                    host="job", pid=self.pid, token=self.launch.secret,
                )
            )  # fmt: skip
        while (got := self.dealer.recv()) is not None:
            if (found := Assignment.decode(got.parts)) is not None:
                self.assignment = found[0]
                self.opened()
                continue
            message = decode(got.parts)
            self.received.append(message)
            if isinstance(message, Stop) and self.obedient:
                self.end(0)
                return

    def opened(self, step: int = 0) -> None:
        assert self.assignment is not None
        self.send(
            SessionOpened(
                session=self.session, resume=bytes.fromhex(self.assignment.resume),
                credit=self.assignment.credit, step=step, models=[], held_out=[], test=[],
                job_pid=self.pid,
            )
        )  # fmt: skip

    @property
    def session(self) -> bytes:
        assert self.assignment is not None
        return bytes.fromhex(self.assignment.session)

    def send(self, message: Message) -> None:
        assert self.dealer.send(message)

    def of(self, kind: type[Message]) -> list[Message]:
        return [m for m in self.received if isinstance(m, kind)]
