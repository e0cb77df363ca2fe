"""The server towards hosts: handshake, sessions, credit, bad input. No processes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from doublure_bridge import (
    MESSAGES,
    PROTOCOL_VERSION,
    AddressError,
    Credit,
    Error,
    Frame,
    Heartbeat,
    Progress,
    Rows,
    SessionOpened,
    Stop,
    Stopped,
    Weights,
    WeightsApplied,
    WeightsRejected,
    Welcome,
    encode,
)
from doublure_trainer.hub import Hub
from doublure_trainer.settings import HubSettings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .client import Client, hello, some_rows
from .conftest import Stage

Make = Callable[..., Stage]


def test_welcome_says_who_the_server_is(stage: Make) -> None:
    welcome = stage().client().greet()
    assert welcome.protocol == PROTOCOL_VERSION
    assert welcome.software.startswith("doublure ")
    assert welcome.heartbeat_ms == 500


@pytest.mark.parametrize("token", [b"", b"\1" * 32])
def test_a_wrong_token_is_refused(stage: Make, token: bytes) -> None:
    client = stage(token=b"\0" * 32).client()
    client.send(hello(token=token))
    error = client.error("token")
    assert error.fatal
    assert "spawned" in error.expected
    client.send(client.request())
    assert client.error("token").expected == "Hello first"


def test_the_right_token_is_taken(stage: Make) -> None:
    stage(token=b"\7" * 32).client(token=b"\7" * 32).greet()


@pytest.mark.parametrize(("oldest", "newest", "side"), [(7, 9, "this side"), (0, 0, "the other")])
def test_a_version_without_overlap_names_both_and_what_to_run(
    stage: Make, oldest: int, newest: int, side: str
) -> None:
    client = stage().client()
    client.send(hello(oldest=oldest, protocol=newest))
    error = client.error("version")
    assert error.fatal
    assert error.expected.startswith(f"1..{PROTOCOL_VERSION}")
    assert error.got.startswith(f"{oldest}..{newest}")
    assert error.next_step.startswith("run `pip install -U doublure`")
    assert side in error.next_step


def test_a_newer_host_that_understands_us_is_welcome(stage: Make) -> None:
    client = stage().client()
    client.send(hello(protocol=PROTOCOL_VERSION + 5))
    assert client.expect(Welcome).protocol == PROTOCOL_VERSION


def test_a_message_of_another_version_is_refused(stage: Make) -> None:
    client = stage().client()
    client.greet()
    header = msgpack.packb([99, Stop.tag, bytes(16), "x"])
    client.control.send_parts([header])
    assert client.error("version").got.startswith("99..99")


def test_a_session_is_opened_and_stopped(stage: Make) -> None:
    it = stage()
    client = it.client()
    opened = client.open()
    assert len(opened.session) == 16
    assert opened.credit == 16
    directory = it.hub.settings.runtime / "jobs" / opened.resume.hex()
    assert directory.is_dir()
    assert directory.stat().st_mode & 0o777 == 0o700
    stopped = client.stop()
    assert stopped.reason == "stop"
    assert not directory.exists()
    assert not it.hub.sessions
    # A host whose Stopped was lost asks again, and is told again.
    assert client.stop() == stopped


def test_a_persistent_directory_keeps_what_is_whole(stage: Make, tmp_path: Any) -> None:
    it = stage(directory=tmp_path)
    client = it.client()
    directory = tmp_path / "jobs" / client.open().resume.hex()
    (directory / "checkpoint.safetensors").write_bytes(b"whole")
    (directory / "checkpoint.safetensors.tmp").write_bytes(b"ha")
    client.stop()
    assert [p.name for p in directory.iterdir()] == ["checkpoint.safetensors"]


def test_a_second_session_on_one_connection_is_refused(stage: Make) -> None:
    client = stage().client()
    client.open()
    client.send(client.request())
    assert "has a session already" in client.error("busy").what


def test_more_sessions_than_allowed_are_refused(stage: Make) -> None:
    it = stage(max_sessions=1)
    it.client().open()
    other = it.client()
    other.greet()
    other.send(other.request())
    assert "1 sessions already" in other.error("busy").what


def test_sessions_do_not_see_each_other(stage: Make) -> None:
    it = stage()
    one, two = it.client(), it.client()
    one.open()
    two.open()
    assert one.session != two.session
    assert it.job_of(one) is not it.job_of(two)
    one.rows(5, t=0.5)
    it.until(lambda: it.job_of(one).of(Rows))
    it.turns(5)
    assert it.job_of(two).of(Rows) == []
    two.stop()
    one.rows(5)
    it.until(lambda: len(it.job_of(one).of(Rows)) == 2)


def test_resuming_a_live_session_takes_it_over(stage: Make) -> None:
    it = stage()
    old = it.client()
    opened = old.open()
    new = it.client()
    again = new.open(resume=opened.resume)
    assert again.resume == opened.resume
    assert again.session != opened.session
    assert old.expect(Stopped).reason == "taken over"
    assert len(it.hub.sessions) == 1


def test_heartbeats_are_answered_with_their_number(stage: Make) -> None:
    client = stage().client()
    client.send(Heartbeat(session=b"", sequence=41, reply=False))
    assert client.expect(Heartbeat) == Heartbeat(session=b"", sequence=41, reply=True)


def test_an_unknown_session_is_named_and_not_fatal(stage: Make) -> None:
    client = stage().client()
    client.greet()
    client.send(Heartbeat(session=b"?" * 16, sequence=1, reply=False))
    error = client.error("unknown_session")
    assert error.session == b"?" * 16
    assert not error.fatal
    assert "OpenSession" in error.next_step


def test_a_heartbeat_that_crosses_stopped_is_no_error(stage: Make) -> None:
    it = stage()
    client = it.client()
    client.open()
    session = client.session
    client.stop()
    client.send(Heartbeat(session=session, sequence=9, reply=False))
    client.send(Heartbeat(session=b"", sequence=10, reply=False))
    client.expect(Heartbeat, where=lambda h: h.sequence == 10)
    assert not [m for m in client.seen if isinstance(m, Error)]


def test_frames_arrive_as_they_were_sent(stage: Make) -> None:
    it = stage()
    client = it.client()
    client.open()
    client.rows(17, t=0.25)
    it.until(lambda: it.job_of(client).of(Rows))
    (rows,) = it.job_of(client).of(Rows)
    assert isinstance(rows, Rows)
    np.testing.assert_array_equal(rows.rows, some_rows(17, 0.25))
    pixels = np.ones((48, 64, 3), np.float16)
    frame = Frame(
        session=client.session, sequence=1, t=0.0, color="linear", origin="top-left",
        pixels=pixels, checksum=1,
    )  # fmt: skip
    assert client.frames.send(frame)
    it.until(lambda: it.job_of(client).of(Frame))
    meter = it.hub.sessions[client.session].frames
    assert meter.frames == 2
    assert meter.bytes == 17 * 24 + pixels.nbytes


def test_frames_beyond_credit_are_dropped_counted_and_told_once(stage: Make) -> None:
    it = stage(credit=4)
    client = it.client()
    client.open()
    for i in range(40):
        rows = Rows(session=client.session, sequence=i, t=0.0, rows=some_rows(4))
        assert client.frames.send(rows)
    session = it.hub.sessions[client.session]
    it.until(lambda: session.frames.dropped == 36)
    it.until(lambda: len(it.job_of(client).of(Rows)) == 4)
    it.turns(10)
    client.receive()
    errors = [m for m in client.seen if isinstance(m, Error)]
    assert [e.code for e in errors] == ["credit"]
    assert not errors[0].fatal
    # Granted anew, frames flow again.
    it.job_of(client).send(Credit(session=client.session, frames=1))
    assert client.expect(Credit).frames == 1
    client.rows(4)
    it.until(lambda: len(it.job_of(client).of(Rows)) == 5)


def test_frames_in_memory_are_bounded(stage: Make) -> None:
    it = stage(pending_bytes=1000)
    client = it.client()
    client.open()
    for _ in range(3):
        client.rows(40)  # 960 bytes each: the second does not fit while the first waits
    session = it.hub.sessions[client.session]
    it.until(lambda: session.frames.dropped == 2)
    assert session.pending_bytes == 960
    it.until(lambda: client.credit == 15)  # what was dropped for room costs nothing
    it.job_of(client).send(Credit(session=client.session, frames=1))
    it.until(lambda: session.pending_bytes == 0)


def test_frames_for_nobody_are_counted(stage: Make) -> None:
    it = stage()
    client = it.client()
    assert client.greet()
    rows = Rows(session=b"x" * 16, sequence=0, t=0.0, rows=some_rows(4))
    assert client.frames.send(rows)
    it.until(lambda: it.hub.orphans.frames == 1)


def test_messages_from_the_job_reach_the_host_unchanged(stage: Make) -> None:
    it = stage()
    client = it.client()
    client.open()
    job = it.job_of(client)
    progress = Progress(
        session=client.session, state="training", step=7, seconds=1.0, samples=9,
        samples_per_s=2.0, loss=0.5, family="grid", version=1, held_out={"psnr_db": 30.0},
        test={}, rows=3, coverage=0.5,
    )  # fmt: skip
    job.send(progress)
    assert client.expect(Progress) == progress
    weights = Weights(
        session=client.session, version=1, step=7, digest=bytes(32), model={}, scores={},
        tensors=b"abc", probe_points=np.zeros((1, 3), np.float32),
        probe_colors=np.zeros((1, 3), np.float32),
    )  # fmt: skip
    job.send(weights)
    assert client.expect(Weights).tensors == b"abc"
    client.send(WeightsApplied(session=client.session, version=1, frame=5, delay_us=9))
    client.send(WeightsRejected(session=client.session, version=2, reason="probes"))
    it.until(lambda: job.of(WeightsApplied) and job.of(WeightsRejected))
    figures = it.hub.snapshot()[0]
    assert (figures["step"], figures["version"], figures["training"]) == (7, 1, "training")
    assert client.stop().step == 7


def test_a_host_that_falls_silent_is_given_up(stage: Make) -> None:
    it = stage(host_silence_s=0.2)
    client = it.client()
    client.open()
    job = it.job_of(client)
    for _ in range(200):
        it.turn()
        if not it.hub.sessions:
            break
    assert not it.hub.sessions
    assert [m.reason for m in job.of(Stop)] == ["host lost"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("token", [b"", b"\1" * 32])
def test_a_host_that_was_held_for_long_goes_on_from_its_checkpoint(
    stage: Make, token: bytes
) -> None:
    """With a trainer of its own; elsewhere nobody may come back, and nothing is kept for long."""
    it = stage(host_silence_s=0.2, token=token)
    client = it.client(token=token)
    opened = client.open()
    directory = it.hub.settings.runtime / "jobs" / opened.resume.hex()
    (directory / "checkpoint").write_bytes(b"some steps")
    for _ in range(200):
        it.turn()
        if not it.hub.sessions:
            break
    assert directory.is_dir() == bool(token)
    again = it.client(token=token)
    again.open(resume=opened.resume)
    assert (directory / "checkpoint").exists() == bool(token)
    again.stop()
    assert not directory.exists()


def test_a_host_that_waits_for_its_session_is_not_given_up(stage: Make) -> None:
    it = stage(host_silence_s=0.1)
    it.playing = False
    client = it.client()
    client.greet()
    client.send(client.request())
    it.turns(60)
    (session,) = it.hub.sessions.values()
    assert time.monotonic() - session.last_seen > 0.1
    it.playing = True
    client.opened = client.expect(SessionOpened)
    assert client.stop().reason == "stop"


def test_a_host_that_never_hears_of_its_session_is_given_up(stage: Make) -> None:
    it = stage(open_s=0.1)
    it.playing = False
    client = it.client()
    client.greet()
    client.send(client.request())
    it.until(lambda: it.hub.sessions)
    it.until(lambda: not it.hub.sessions)
    assert client.expect(Stopped).reason == "host lost"


def test_a_reconnected_host_is_known_by_its_session(stage: Make) -> None:
    it = stage()
    client = it.client()
    client.open()
    job = it.job_of(client)
    weights = Weights(
        session=client.session, version=3, step=7, digest=bytes(32), model={}, scores={},
        tensors=b"abc", probe_points=np.zeros((1, 3), np.float32),
        probe_colors=np.zeros((1, 3), np.float32),
    )  # fmt: skip
    again = it.client()
    again.opened = client.opened
    client.control.close()
    it.turns(5)
    job.send(weights)  # lost: nobody listens
    job.send(Credit(session=client.session, frames=2))
    it.clients.remove(client)
    it.turns(5)
    again.send(Heartbeat(session=client.session, sequence=1, reply=False))
    assert again.expect(Weights).version == 3
    assert again.expect(Credit).frames == 2
    assert again.stop().reason == "stop"
    client.close()


def test_draining_tells_every_host_and_takes_no_more(stage: Make) -> None:
    it = stage()
    clients = [it.client(), it.client()]
    for client in clients:
        client.open()
    it.hub.drain()
    for client in clients:
        assert client.expect(Stopped).reason == "drained"
    assert it.hub.drained
    late = it.client()
    late.greet()
    late.send(late.request())
    assert "shutting down" in late.error("busy").what


def test_a_port_in_use_is_one_clear_line(stage: Make, tmp_path: Any) -> None:
    it = stage()
    with pytest.raises(
        AddressError, match=r"a port in use.*stop the program that holds it"
    ) as info:
        Hub(HubSettings(runtime=tmp_path, bind=it.hub.endpoint))
    assert "\n" not in str(info.value)
    it.client().greet()


def test_addresses_beyond_this_machine_are_refused(tmp_path: Any) -> None:
    with pytest.raises(AddressError, match="ssh -L"):
        Hub(HubSettings(runtime=tmp_path, bind="tcp://0.0.0.0:5570"))


# --- junk -------------------------------------------------------------------------------------

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
headers = st.one_of(
    st.binary(max_size=64),
    st.lists(plain, max_size=6).map(msgpack.packb),
    st.tuples(
        st.sampled_from([0, 1, 2]), st.sampled_from([0, *MESSAGES, 99]), st.lists(plain, max_size=9)
    ).map(lambda h: msgpack.packb([h[0], h[1], *h[2]])),
)
messages = st.lists(st.binary(max_size=64), max_size=3)


def test_junk_of_every_kind_is_answered_or_counted_and_nothing_breaks(stage: Make) -> None:
    it = stage()
    victim = it.client()
    victim.open()
    junk = Client(it.hub.endpoint, pump=it.turn)
    session = victim.session

    @settings(
        max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    @given(head=headers, rest=messages, name=st.booleans())
    def throw(head: bytes, rest: list[bytes], name: bool) -> None:
        if name:  # with a real session's id in it, as only its own host could
            head = head.replace(msgpack.packb(None), msgpack.packb(session), 1)
        while not junk.control.send_parts([head, *rest]):
            it.turn()
        it.turn()

    throw()
    for message in _every_message_cut_short(victim):
        assert junk.control.send_parts(message)
        it.turns(2)
    assert it.hub.malformed > 100
    victim.credit = 1
    victim.rows(3)
    it.until(lambda: any(len(m.rows) == 3 for m in it.job_of(victim).of(Rows)))  # type: ignore[attr-defined]
    junk.close()
    assert victim.stop().reason == "stop"


def _every_message_cut_short(client: Client) -> list[list[Any]]:
    out = []
    for message in [hello(), client.request(), Stop(session=client.session, reason="x")]:
        header = msgpack.unpackb(encode(message)[0])
        out += [[msgpack.packb(header[:n])] for n in range(len(header))]
    return out


def test_unknown_tags_are_ignored_and_logged_once(
    stage: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    monkeypatch.setattr(logging.getLogger("doublure"), "propagate", True)
    it = stage()
    client = it.client()
    client.open()
    for _ in range(3):
        assert client.control.send_parts([msgpack.packb([PROTOCOL_VERSION, 200, "new"])])
    it.turns(10)
    assert sum("unknown tag 200" in r.message for r in caplog.records) == 1
    assert it.hub.malformed == 0
    assert client.stop().reason == "stop"


def test_a_host_may_not_play_the_trainer(stage: Make) -> None:
    it = stage()
    client = it.client()
    opened = client.open()
    client.send(dataclasses.replace(opened))
    assert client.error("limit").expected == "a message that hosts send"
    assert SessionOpened.tag in MESSAGES
