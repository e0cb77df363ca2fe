"""A host without a plugin: the protocol by hand, for tests of the server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import zmq
from doublure_bridge import (
    PROTOCOL_OLDEST,
    PROTOCOL_VERSION,
    Credit,
    Dealer,
    Error,
    Heartbeat,
    Hello,
    Message,
    OpenSession,
    Rows,
    SessionOpened,
    Stop,
    Stopped,
    Weights,
    Welcome,
    decode,
)

M = TypeVar("M", bound=Message)

DIGEST = bytes(range(32))


def hello(**changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "protocol": PROTOCOL_VERSION, "oldest": PROTOCOL_OLDEST, "software": "test 0",
        "host": "test", "pid": os.getpid(), "token": b"",
    }  # fmt: skip
    return Hello(**{**fields, **changes})


def some_rows(count: int = 64, t: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = rng.uniform(-1, 1, (count, 6)).astype(np.float32)
    rows[:, 2] = t
    rows[:, 3:] = np.abs(rows[:, 3:])
    return rows


class Client:
    """One host: a control and a frames connection. `pump` runs between looks at the socket."""

    def __init__(
        self,
        endpoint: str,
        *,
        token: bytes = b"",
        pump: Callable[[], None] = lambda: time.sleep(0.002),
        timeout_s: float = 20.0,
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.control = Dealer(self._context, endpoint)
        self.frames = Dealer(self._context, endpoint)
        self.token = token
        self.pump = pump
        self.timeout_s = timeout_s
        self.seen: list[Message] = []
        self.opened: SessionOpened | None = None
        self.credit = 0
        self.sequence = 0
        self._beat = time.monotonic()

    @property
    def session(self) -> bytes:
        assert self.opened is not None
        return self.opened.session

    def send(self, message: Message) -> None:
        self._until(lambda: self.control.send(message), f"sending {type(message).__name__}")

    def receive(self) -> list[Message]:
        """Everything that has arrived; keeps heartbeats going."""
        new: list[Message] = []
        while (got := self.control.recv()) is not None:
            message = decode(got.parts)
            if isinstance(message, Credit):
                self.credit += message.frames
            new.append(message)
        self.seen += new
        if self.opened is not None and time.monotonic() - self._beat > 0.3:
            self._beat = time.monotonic()
            self.control.send(Heartbeat(session=self.session, sequence=1, reply=False))
        return new

    def expect(self, kind: type[M], *, where: Callable[[M], bool] = lambda _: True) -> M:
        """Wait for a message of this kind; earlier ones count too, each once."""
        found: list[M] = []

        def look() -> bool:
            self.receive()
            for i, message in enumerate(self.seen):
                if isinstance(message, kind) and where(message):
                    found.append(message)
                    del self.seen[i]
                    return True
            return False

        self._until(look, f"waiting for {kind.__name__}")
        return found[0]

    def _until(self, condition: Callable[[], bool], doing: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{doing}: only {self._told()}"
            self.pump()

    def _told(self) -> list[str]:
        """What has come instead, short enough to read."""
        return [
            f"{m.code}: {m.what}" if isinstance(m, Error) else type(m).__name__ for m in self.seen
        ]

    def greet(self) -> Welcome:
        self.send(hello(token=self.token))
        return self.expect(Welcome)

    def open(self, *, resume: bytes = b"", greet: bool = True, **config: Any) -> SessionOpened:
        if greet:
            self.greet()
        self.send(self.request(resume=resume, **config))
        self.opened = self.expect(SessionOpened)
        self.credit = self.opened.credit
        return self.opened

    def request(self, *, resume: bytes = b"", **config: Any) -> OpenSession:
        return OpenSession(
            digest=DIGEST, source="plasma", width=64, height=48, parameter_low=0.0,
            parameter_high=10.0, config=config, resume=resume,
        )  # fmt: skip

    def rows(self, count: int = 64, *, t: float = 0.0) -> None:
        """Send rows, on credit."""
        self._until(lambda: (self.receive(), self.credit > 0)[1], "waiting for credit")
        message = Rows(session=self.session, sequence=self.sequence, t=t, rows=some_rows(count, t))
        self._until(lambda: self.frames.send(message), "sending rows")
        self.sequence += 1
        self.credit -= 1

    def wait_weights(self) -> Weights:
        return self.expect(Weights)

    def stop(self, reason: str = "test") -> Stopped:
        self.send(Stop(session=self.session, reason=reason))
        return self.expect(Stopped)

    def error(self, code: str) -> Error:
        return self.expect(Error, where=lambda e: e.code == code)

    def close(self) -> None:
        self.control.close()
        self.frames.close()
        self._context.term()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
