"""The server towards jobs: spares, stopping, dying, silence. No processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest
from doublure_bridge import (
    PROTOCOL_OLDEST,
    PROTOCOL_VERSION,
    Credit,
    Error,
    Heartbeat,
    Hello,
    Rows,
    SessionOpened,
    Stop,
    Stopped,
    WeightsApplied,
)
from doublure_trainer.errors import error_message

from .conftest import Stage

Make = Callable[..., Stage]


def test_a_warm_spare_serves_the_first_session(stage: Make) -> None:
    it = stage()
    it.until(lambda: it.hub.pool.jobs and it.hub.pool.jobs[0].ready)
    client = it.client()
    assert client.open().job_pid == it.jobs[0].pid
    assert len(it.jobs) == 1  # the next spare waits until this session is well under way


def test_without_spares_a_job_is_started_on_demand(stage: Make) -> None:
    it = stage(spares=0)
    it.turns(5)
    assert it.jobs == []
    it.client().open()
    assert len(it.jobs) == 1


def test_a_stranger_on_the_jobs_socket_is_ignored(stage: Make) -> None:
    it = stage(spares=1)
    it.playing = False
    it.until(lambda: it.jobs)
    job = it.jobs[0]
    hello = Hello(
        protocol=PROTOCOL_VERSION, oldest=PROTOCOL_OLDEST, software="x", host="job", pid=1,
        token=b"\1" * 32,
    )  # fmt: skip
    it.until(lambda: job.dealer.send(hello))
    it.turns(5)
    assert not it.hub.pool.jobs[0].ready
    it.playing = True
    it.client().open()


def test_a_job_cannot_speak_for_another_session(stage: Make) -> None:
    it = stage()
    one, two = it.client(), it.client()
    one.open()
    two.open()
    it.job_of(one).send(Credit(session=two.session, frames=9))
    it.turns(10)
    two.receive()
    assert two.credit == 16


def test_jobs_heartbeats_are_answered(stage: Make) -> None:
    it = stage()
    client = it.client()
    client.open()
    job = it.job_of(client)
    job.send(Heartbeat(session=client.session, sequence=5, reply=False))
    it.until(lambda: job.of(Heartbeat))
    assert job.of(Heartbeat) == [Heartbeat(session=client.session, sequence=5, reply=True)]


def test_a_disobedient_job_is_killed_after_the_grace(stage: Make) -> None:
    it = stage(stop_grace_s=0.1)
    it.obedient = False
    client = it.client()
    client.open()
    job = it.job_of(client)
    started = time.monotonic()
    assert client.stop().reason == "stop"
    assert job.killed
    assert time.monotonic() - started >= 0.1
    assert [m.reason for m in job.of(Stop)] == ["stop"]  # type: ignore[attr-defined]


def test_a_job_that_is_still_starting_is_killed_at_once(stage: Make) -> None:
    it = stage(stop_grace_s=60.0)
    it.playing = False
    client = it.client()
    client.greet()
    client.send(client.request())
    it.until(lambda: it.hub.sessions)
    (session,) = it.hub.sessions.values()
    client.send(Stop(session=session.id, reason="changed my mind"))
    assert client.expect(Stopped).session == session.id
    assert it.jobs[0].killed


def test_a_dead_job_is_named_and_its_successor_takes_over(stage: Make) -> None:
    it = stage()
    client = it.client()
    client.open()
    client.rows(3)
    client.rows(3)
    first = it.job_of(client)
    it.until(lambda: len(first.of(Rows)) == 2)
    first.launch.log.write_text("Fatal Python error: Segmentation fault")
    first.end(-11)
    error = client.error("job_died")
    assert not error.fatal
    assert f"(pid {first.pid}) has died: signal SIGSEGV" in error.what
    assert "Segmentation fault" in error.detail
    it.until(lambda: any(j.assignment and j is not first for j in it.jobs))
    second = it.job_of(client)
    assert second.assignment is not None
    assert second.assignment.load
    assert not second.assignment.republish  # this host still has its weights
    assert second.assignment.directory == first.assignment.directory  # type: ignore[union-attr]
    # The two frames that the dead job had not taken in cost nothing in the end.
    it.until(lambda: client.credit == 16)
    client.receive()
    assert not any(isinstance(m, SessionOpened) for m in client.seen)
    client.rows(7)
    it.until(lambda: second.of(Rows))
    client.send(WeightsApplied(session=client.session, version=1, frame=1, delay_us=1))
    it.until(lambda: second.of(WeightsApplied))
    assert client.stop().reason == "stop"


def test_the_death_of_one_job_is_nothing_to_the_others(stage: Make) -> None:
    it = stage()
    clients = [it.client(), it.client()]
    for client in clients:
        client.open()
    job = it.job_of(clients[1])
    it.job_of(clients[0]).end(-9)
    assert "SIGKILL" in clients[0].error("job_died").what
    clients[1].rows(5)
    it.until(lambda: job.of(Rows))
    assert not any(isinstance(m, Error) for m in clients[1].seen)
    assert [client.stop().reason for client in clients] == ["stop", "stop"]


def test_a_job_that_keeps_dying_is_given_up(stage: Make) -> None:
    it = stage(deaths_allowed=2)
    client = it.client()
    opened = client.open()
    for _ in range(2):
        it.job_of(client).end(1)
        assert not client.error("job_died").fatal
        it.until(lambda: any(j.code is None and j.assignment for j in it.jobs))
    it.job_of(client).end(1)
    error = client.error("job_died")
    assert error.fatal
    assert "exit code 1" in error.what
    assert not it.hub.sessions
    assert not (it.hub.settings.runtime / "jobs" / opened.resume.hex()).exists()


def test_a_job_that_cannot_start_refuses_the_session_with_its_log(stage: Make) -> None:
    it = stage(spares=0)
    it.playing = False
    client = it.client()
    client.greet()
    client.send(client.request())
    it.until(lambda: it.jobs)
    it.jobs[0].launch.log.write_text("Traceback\nModuleNotFoundError: No module named 'torch'")
    it.jobs[0].end(1)
    error = client.error("open_refused")
    assert error.fatal
    assert "could not start: exit code 1: ModuleNotFoundError: No module named" in error.what
    assert f"run `{sys.executable} -m pip install 'doublure[trainer]'`" in error.next_step
    assert "Traceback" in error.detail
    assert not it.hub.sessions


def test_a_job_that_is_killed_while_it_starts_is_replaced(stage: Make) -> None:
    """Out of memory while torch was imported, say: unlike an exception it need not come again."""
    it = stage(spares=0, deaths_allowed=2)
    it.playing = False
    client = it.client()
    client.greet()
    client.send(client.request())
    for i in range(2):
        it.until(lambda i=i: len(it.jobs) == i + 1)
        it.jobs[i].end(-9)
        error = client.error("job_died")
        assert not error.fatal
        assert "died: signal SIGKILL" in error.what
    it.until(lambda: len(it.jobs) == 3)
    it.playing = True
    assert client.expect(SessionOpened).job_pid == it.jobs[2].pid
    it.jobs[2].end(-9)
    assert client.error("job_died").fatal


def test_spares_that_cannot_start_are_given_up(stage: Make) -> None:
    it = stage()
    it.playing = False
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and len(it.jobs) < 3:
        for job in it.jobs:
            job.end(1)
        it.turn()
    for job in it.jobs:
        job.end(1)
    it.turn()
    assert not it.hub.pool.jobs
    it.hub.pool._next_spare = 0
    it.turns(5)
    assert len(it.jobs) == 3


def test_a_failed_job_ends_the_session_after_its_traceback(stage: Make) -> None:
    it = stage()
    client = it.client()
    opened = client.open()
    job = it.job_of(client)
    job.send(
        error_message("job_failed", "ValueError: x", session=client.session, detail="Traceback…")
    )
    error = client.error("job_failed")
    assert error.detail == "Traceback…"
    it.until(lambda: not it.hub.sessions)
    assert job.code == 0  # told to stop, not killed
    assert not (it.hub.settings.runtime / "jobs" / opened.resume.hex()).exists()
    # The connection is still good for another session.
    client.open(greet=False)


def test_a_silent_job_is_reported_once_and_recovers(stage: Make) -> None:
    it = stage(job_silence_s=0.15)
    client = it.client()
    client.open()
    job = it.job_of(client)
    it.playing = False
    error = client.error("job_silent")
    assert not error.fatal
    assert "paused, not dead" in error.what
    it.turns(60)
    client.receive()
    assert not any(isinstance(m, Error) for m in client.seen)
    it.playing = True
    job.send(Heartbeat(session=client.session, sequence=1, reply=False))
    session = it.hub.sessions[client.session]
    it.until(lambda: not session.silence_reported)
    client.rows(3)
    it.until(lambda: job.of(Rows))


def test_closing_the_hub_kills_every_job(stage: Make) -> None:
    it = stage()
    it.client().open()
    it.hub.close(flush_ms=0)
    assert all(job.killed for job in it.jobs)


@pytest.mark.parametrize("limit", [2048, 16384])
def test_error_texts_fit_their_limits(limit: int) -> None:
    message = error_message("job_failed", "é" * limit, detail="x" * limit + "the end")
    assert len(message.what.encode()) <= 2048
    assert message.detail.endswith("the end")
    assert len(message.detail.encode()) <= 16384
