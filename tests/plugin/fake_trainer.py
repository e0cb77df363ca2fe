"""A trainer that speaks the protocol and learns nothing, for tests and benchmarks.

In a thread of the test (`FakeTrainer`), or as a process of its own that can be stopped and killed:
``python tests/plugin/fake_trainer.py`` prints its endpoint and serves until its input ends.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import doublure_bridge as bridge
import numpy as np
import zmq
from doublure_plugin.evaluate import Evaluator
from numpy.typing import NDArray

SPEC = bridge.CompactSpec(hidden=8, layers=2)
POINTS = np.array([[-0.5, 0.25, 0.0], [0.75, -0.75, 1.0], [0.0, 0.0, -1.0]], np.float32)


def tensors(seed: int = 0, spec: bridge.ModelSpec = SPEC) -> dict[str, NDArray[Any]]:
    """Random tensors of a model, small enough that colours stay near 1."""
    random = np.random.default_rng(seed)
    return {
        name: (random.standard_normal(want.shape) * 0.3).astype(want.dtype)
        for name, want in spec.tensors().items()
    }


def weights(session: bytes, version: int, /, **changes: Any) -> bridge.Weights:
    """A Weights message that passes validation, unless `changes` spoil it."""
    model = changes.pop("spec", SPEC)
    values: Mapping[str, NDArray[Any]] = changes.pop("values", None) or tensors(version, model)
    packed = changes.pop("tensors", None) or bridge.pack_tensors(model, values)
    finite = all(np.isfinite(v).all() for v in values.values())
    colours = Evaluator(model, values)(POINTS) if finite else np.zeros((3, 3), np.float32)
    fields: dict[str, Any] = {
        "session": session,
        "version": version,
        "step": version * 100,
        "digest": bridge.tensors_digest(packed),
        "model": bridge.spec_to_dict(model),
        "scores": {"psnr_db": 30.0 + version},
        "tensors": packed,
        "probe_points": POINTS,
        "probe_colors": colours,
        "seconds": version * 0.5,
    }
    return bridge.Weights(**(fields | changes))


class FakeTrainer:
    """One ROUTER in one thread. Attributes may be set at any time to misbehave.

    Attributes:
        silent: Receive but never answer.
        hold_open: Do not answer OpenSession.
        hold_stopped: Do not answer Stop.
        errors: Message class to the Error to answer it with.
        welcome: Changes to the fields of Welcome.
        received: Every message that came, decoded, in order.
    """

    def __init__(self, endpoint: str = "tcp://127.0.0.1:0", **attributes: Any) -> None:
        self.silent = False
        self.hold_open = False
        self.hold_stopped = False
        self.credit = 16
        self.grant = True
        self.step = 0
        self.resume_tokens: set[bytes] = set()
        self.errors: dict[type[bridge.Message], bridge.Error] = {}
        self.token = b""
        self.welcome: dict[str, Any] = {}
        self.received: list[bridge.Message] = []
        self.keep = True
        self.frames = 0
        self.sessions: dict[bytes, bytes] = {}
        self.peers: list[bytes] = []
        for name, value in attributes.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        self._outgoing: list[tuple[bytes, bridge.Message | list[bytes]]] = []
        self._stuck_since = 0.0
        self._leave = threading.Event()
        self._context = zmq.Context()
        self._router = bridge.Router(self._context, endpoint)
        self.endpoint = self._router.endpoint
        self._thread = threading.Thread(target=self._serve, name="fake-trainer", daemon=True)
        self._thread.start()

    def __enter__(self) -> FakeTrainer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._leave.set()
        self._thread.join(5)
        assert not self._thread.is_alive()
        self._context.term()

    def of(self, kind: type[Any]) -> list[Any]:
        """Messages of one kind that came so far."""
        return [m for m in list(self.received) if isinstance(m, kind)]

    @property
    def session(self) -> bytes:
        """The session opened last."""
        return next(reversed(self.sessions))

    def send(self, message: bridge.Message | list[bytes]) -> None:
        """Send a message, or raw parts, to the host of the session opened last. Any thread."""
        self._outgoing.append((self.sessions[self.session], message))

    def publish(self, version: int, **changes: Any) -> bridge.Weights:
        message = weights(self.session, version, **changes)
        self.send(message)
        return message

    def _serve(self) -> None:
        while not self._leave.is_set():
            self._router.raw.poll(2)
            while self._outgoing:
                host, out = self._outgoing[0]
                parts = bridge.encode(out) if isinstance(out, bridge.Message) else out
                if not self._router.send_parts(host, parts):
                    # A full queue empties; a host that has left never takes it.
                    self._stuck_since = self._stuck_since or time.monotonic()
                    if time.monotonic() - self._stuck_since < 1.0:
                        break
                self._stuck_since = 0.0
                self._outgoing.pop(0)
            while (received := self._router.recv()) is not None:
                message = bridge.decode(received.parts)
                if isinstance(message, bridge.Rows):
                    # The parts go away with their message.
                    self.frames += 1
                if self.keep:
                    self.received.append(message)
                if not self.silent:
                    for answer in self._answers(received.peer, message):
                        self._router.send(received.peer, answer)
        self._router.close()

    def _answers(self, peer: bytes, message: bridge.Message) -> list[bridge.Message]:
        if (error := self.errors.get(type(message))) is not None:
            return [error]
        match message:
            case bridge.Hello():
                self.peers.append(peer)
                if self.token and message.token != self.token:
                    return [bridge.Error(session=b"", code="token", what="token")]
                fields: dict[str, Any] = {
                    "protocol": bridge.PROTOCOL_VERSION,
                    "software": "fake",
                    "server": b"s" * 16,
                    "pid": os.getpid(),
                    "heartbeat_ms": 500,
                }
                return [bridge.Welcome(**(fields | self.welcome))]
            case bridge.OpenSession():
                return [] if self.hold_open else [self._open(peer, message)]
            case bridge.Heartbeat():
                if message.session and message.session not in self.sessions:
                    return [
                        bridge.Error(
                            session=message.session, code="unknown_session", what="session",
                            fatal=False,
                        )
                    ]  # fmt: skip
                if message.session:
                    self.sessions[message.session] = peer
                return [] if message.reply else [_reply(message)]
            case bridge.Rows():
                host = self.sessions.get(message.session)
                if host is not None and self.grant:
                    self._router.send(host, bridge.Credit(session=message.session, frames=1))
                return []
            case bridge.Stop() | bridge.SourceChanged():
                if self.hold_stopped:
                    return []
                return [bridge.Stopped(session=message.session, reason="stop", step=7)]
            case _:
                return []

    def _open(self, peer: bytes, message: bridge.OpenSession) -> bridge.SessionOpened:
        name = secrets.token_bytes(16)
        self.sessions[name] = peer
        known = message.resume in self.resume_tokens
        resume = message.resume if known else secrets.token_bytes(16)
        self.resume_tokens.add(resume)
        return bridge.SessionOpened(
            session=name,
            resume=resume,
            credit=self.credit,
            step=self.step if known else 0,
            models=[bridge.spec_to_dict(SPEC)],
            held_out=[[-0.5, -0.25]],
            test=[[0.25, 0.5]],
            job_pid=4242,
        )


def _reply(message: bridge.Heartbeat) -> bridge.Heartbeat:
    return bridge.Heartbeat(session=message.session, sequence=message.sequence, reply=True)


def wait_for(condition: Any, what: str, *, within_s: float = 10.0) -> None:
    """Poll until it holds; fail with `what` when it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.002)


def spawned() -> None:
    """Behave as the server that a session starts: token in, ready line out, gone at end of input.

    The resume token is kept in the runtime directory, as the real server's jobs are.
    """
    runtime = Path(sys.argv[sys.argv.index("--runtime-dir") + 1])
    (runtime / "environment.json").write_text(json.dumps(dict(os.environ)))
    token = bytes.fromhex(json.loads(sys.stdin.readline())["token"])
    stored = runtime / "tokens"
    known = {bytes.fromhex(t) for t in stored.read_text().split()} if stored.exists() else set()
    with FakeTrainer(keep=False, token=token, resume_tokens=known, step=50) as trainer:
        print(json.dumps({"ready": True, "endpoint": trainer.endpoint, "pid": os.getpid()}))
        sys.stdout.flush()
        os.close(1)
        while select.select([0], [], [], 0.01) == ([], [], []):
            stored.write_text(" ".join(t.hex() for t in trainer.resume_tokens))
    os._exit(0)


if __name__ == "__main__":
    with FakeTrainer(keep=False) as trainer:
        print(trainer.endpoint, flush=True)
        sys.stdin.read()
