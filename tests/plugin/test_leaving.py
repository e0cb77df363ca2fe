"""Stop and close: from every state, bounded, and leaving no thread and no socket behind."""

import contextlib
import gc
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import doublure_bridge as bridge
import numpy as np
import pytest
from doublure_plugin import Session, Source, Timing

from .fake_trainer import FakeTrainer, wait_for

SOURCE = Source("test", {"scene": "code"}, {}, 8, 8)
PIXELS = np.ones((8, 8, 3), np.float32)

# Leaving is promised within a second; a loaded machine may schedule us late on top.
PROMISED_S = 1.0
SLACK_S = 1.5


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def mute() -> Iterator[str]:
    """Something that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def absent() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    yield f"tcp://127.0.0.1:{port}"


@contextlib.contextmanager
def fake(**attributes: Any) -> Iterator[str]:
    with FakeTrainer(**attributes) as trainer:
        yield trainer.endpoint


ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "absent": (absent, "connecting"),
    "mute": (mute, "connecting"),
    "silent": (lambda: fake(silent=True), "connecting"),
    "opening": (lambda: fake(hold_open=True), "opening"),
    "streaming": (fake, "streaming"),
    "without credit": (lambda: fake(credit=0), "streaming"),
    "never confirms": (lambda: fake(hold_stopped=True), "streaming"),
    "refuses": (lambda: fake(errors={bridge.Hello: _refusal()}), "failed"),
}


def _refusal() -> bridge.Error:
    return bridge.Error(session=b"", code="version", what="version")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("leave", ["close", "stop"])
def test_leaving_is_bounded_from_every_state(end: str, leave: str) -> None:
    peer, state = ENDS[end]
    with peer() as endpoint:
        session = Session(SOURCE, (0, 1), trainer=endpoint, timing=Timing(stop=0.3))
        wait_for(lambda: session.state == state, state)
        for _ in range(20):
            session.capture(PIXELS, 0.5)
        began = time.monotonic()
        if leave == "close":
            session.close()
        else:
            session.stop(wait=True)
        took = time.monotonic() - began
        assert session.state == ("failed" if state == "failed" else "stopped")
        assert took < PROMISED_S + SLACK_S
        session.close()
        assert session.capture(PIXELS, 0.5) is False
        assert session.poll() is None


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        (absent, r"expected one that listens at .*, got none so far; start `doublure trainer`"),
        (mute, r"expected one that listens at .*, got none so far"),
        (
            lambda: fake(silent=True),
            r"expected Welcome from .*, got a connection, but .*forwarded port",
        ),
    ],
)
def test_who_does_not_answer_is_told_with_what_to_do_while_the_host_draws(
    peer: Callable[[], Any], said: str
) -> None:
    with (
        peer() as endpoint,
        Session(SOURCE, (0, 1), trainer=endpoint, timing=Timing(greet=2.0)) as session,
    ):
        wait_for(lambda: session.error is not None, "the word")
        assert re.search(said, str(session.error))
        assert session.state == "connecting"
        assert session.capture(PIXELS, 0.5) is False
        assert [m.level for m in session.messages] == ["warning"]


def test_a_stop_reaches_the_trainer_and_is_timed() -> None:
    with FakeTrainer() as trainer:
        session = Session(SOURCE, (0, 1), trainer=trainer.endpoint)
        wait_for(lambda: session.state == "streaming", "streaming")
        session.stop("the artist is done", wait=True)
        assert [m.reason for m in trainer.of(bridge.Stop)] == ["the artist is done"]
        assert session.stats.stop_ms is not None
        session.close()


def test_a_session_that_opens_while_stopping_is_stopped_too() -> None:
    with FakeTrainer(hold_open=True) as trainer:
        session = Session(SOURCE, (0, 1), trainer=trainer.endpoint)
        wait_for(lambda: trainer.of(bridge.OpenSession), "the question")
        session.stop("early")
        wait_for(lambda: session.state == "stopping", "stopping")
        peer = trainer.peers[-1]
        opened = trainer._open(peer, trainer.of(bridge.OpenSession)[0])
        trainer._outgoing.append((peer, opened))
        wait_for(lambda: session.state == "stopped", "stopped")
        assert [m.session for m in trainer.of(bridge.Stop)] == [opened.session]
        session.close()


def test_stop_returns_at_once_and_may_be_repeated() -> None:
    with FakeTrainer(hold_stopped=True) as trainer:
        session = Session(SOURCE, (0, 1), trainer=trainer.endpoint, timing=Timing(stop=0.3))
        wait_for(lambda: session.state == "streaming", "streaming")
        for _ in range(5):
            session.stop()
        assert session.state in ("streaming", "stopping")
        wait_for(lambda: session.state == "stopped", "stopped")
        assert len(trainer.of(bridge.Stop)) == 1
        session.close()
        session.close()


def test_applied_weights_stay_usable_after_stop() -> None:
    with FakeTrainer() as trainer, Session(SOURCE, (0, 1), trainer=trainer.endpoint) as session:
        wait_for(lambda: session.state == "streaming", "streaming")
        trainer.publish(1)
        wait_for(lambda: session._sender is not None and session._sender.intake.ready, "weights")
        weights = session.poll()
        assert weights is not None
        session.applied(weights)
        session.stop(wait=True)
        assert session.current is weights
        assert weights.evaluator is not None
        assert weights.evaluator(np.zeros((1, 3), np.float32)).shape == (1, 3)


@pytest.mark.process
def test_a_hundred_trainers_come_and_go() -> None:
    """One session outlives 100 trainers on one port, and resumes each time."""
    with absent() as endpoint:
        session = Session(SOURCE, (0, 1), trainer=endpoint, timing=Timing(lost=0.15, greet=0.5))
        threads = descriptors = 0
        for cycle in range(100):
            with FakeTrainer(endpoint, keep=False) as trainer:
                wait_for(lambda t=trainer: t.sessions and session.wants_frames, f"cycle {cycle}")
                session.capture(PIXELS, 0.5)
            wait_for(lambda: not session.wants_frames, f"the loss of cycle {cycle}")
            if cycle == 10:
                threads, descriptors = threading.active_count(), open_descriptors()
        assert threading.active_count() <= threads
        # libzmq opens a descriptor or two for a connection attempt under way.
        assert open_descriptors() <= descriptors + 4
        session.close()
        assert session.state == "stopped"


def test_sessions_leave_no_thread_and_no_descriptor() -> None:
    with FakeTrainer(keep=False) as trainer, absent() as nobody:
        gc.collect()
        threads = descriptors = 0
        for i in range(24):
            endpoint = nobody if i % 4 == 3 else trainer.endpoint
            with Session(SOURCE, (0, 1), trainer=endpoint) as session:
                if endpoint is not nobody:
                    wait_for(lambda s=session: s.state == "streaming", "streaming")
            if i == 3:
                threads, descriptors = threading.active_count(), open_descriptors()
        wait_for(lambda: threading.active_count() <= threads, "threads gone")
        wait_for(lambda: open_descriptors() <= descriptors + 1, "descriptors gone")


def test_an_unclosed_session_warns_and_its_training_stops() -> None:
    with FakeTrainer() as trainer:
        sessions = [Session(SOURCE, (0, 1), trainer=trainer.endpoint)]
        wait_for(lambda: sessions[0].state == "streaming", "streaming")
        sender = sessions[0]._sender
        assert sender is not None
        with pytest.warns(ResourceWarning, match=r"doublure.Session for .* was not closed"):
            sessions.clear()
        assert sender.join(5)
        wait_for(lambda: trainer.of(bridge.Stop), "Stop")
