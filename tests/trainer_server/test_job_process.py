"""The job's own part of the protocol, with a real process around a stand-in trainer."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from doublure_bridge import (
    PROTOCOL_VERSION,
    Credit,
    Error,
    Frame,
    Progress,
    Rows,
    WeightsRejected,
    model_spec_from_dict,
    tensors_digest,
    unpack_tensors,
)

from .client import Client
from .processes import ServerProcess, wait_for

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as it:
        yield it


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    client = server.client()
    yield client
    if client.opened is not None and not any(m for m in client.seen if m.tag == 14):
        client.stop()
    server.forget(client)


def frame(client: Client, **changes: Any) -> Frame:
    pixels = np.full((48, 64, 3), 0.5, np.float16)
    fields = {
        "session": client.session, "sequence": 1, "t": 0.0, "color": "linear",
        "origin": "top-left", "pixels": pixels, "checksum": zlib.crc32(pixels.tobytes()),
    }  # fmt: skip
    return Frame(**{**fields, **changes})


def test_opening_says_what_to_prepare_for(client: Client) -> None:
    opened = client.open()
    assert [model_spec_from_dict(m).family for m in opened.models] == ["compact"]
    assert opened.held_out == [[-0.5, -0.4]]
    assert opened.test == [[0.2, 0.3]]
    assert opened.step == 0


def test_publications_carry_all_that_a_host_checks(client: Client) -> None:
    client.open()
    client.rows()
    first, second = client.wait_weights(), client.wait_weights()
    assert (first.version, second.version) == (1, 2)
    assert first.digest == tensors_digest(first.tensors)
    assert first.scores["psnr_db"] == pytest.approx(20 + first.step / 100)
    tensors = unpack_tensors(first.tensors, model_spec_from_dict(first.model))
    np.testing.assert_allclose(np.expm1(tensors["mlp.1.bias"]), first.probe_colors[0], rtol=1e-5)
    client.send(WeightsRejected(session=client.session, version=2, reason="for a test"))
    assert client.wait_weights().version == 3  # refused weights do not stop training


def test_progress_has_held_out_and_test_scores(client: Client) -> None:
    client.open()
    client.expect(Progress, where=lambda p: p.state == "waiting")
    client.rows()
    progress = client.expect(Progress, where=lambda p: p.version >= 1 and bool(p.test))
    assert progress.state == "training"
    assert progress.held_out["psnr_db"] > 20
    assert progress.test["psnr_db"] == 19.0
    assert progress.rows == 64


def test_every_frame_gives_its_credit_back(client: Client) -> None:
    client.open()
    for _ in range(40):
        client.rows(8)
    for _ in range(5):
        while client.credit == 0:
            client.expect(Credit)
        assert client.frames.send(frame(client))
        client.credit -= 1
    for _ in range(2000):
        client.receive()
        if client.credit == 16:
            break
        client.pump()
    assert client.credit == 16
    progress = client.expect(Progress, where=lambda p: p.rows == 40 * 8 + 5 * 48 * 64)
    assert progress.detail["frames_refused"] == 0


def test_frames_that_cannot_be_read_are_refused_and_cost_nothing(client: Client) -> None:
    client.open()
    client.frames.send(frame(client, checksum=1))
    error = client.error("limit")
    assert not error.fatal
    assert error.what == "Frame.checksum"
    assert error.session == client.session
    # Only found out by the job: the server forwards frames unread.
    header = msgpack.packb([PROTOCOL_VERSION, Rows.tag, client.session, 0, 0.0, "nonsense", 0])
    client.frames.send_parts([header, b"1234"])
    client.frames.send(frame(client, pixels=np.zeros((2, 2, 3), np.float16)))
    progress = client.expect(Progress, where=lambda p: p.detail["frames_refused"] == 3)
    assert progress.rows == 0
    for _ in range(500):
        client.receive()
        if client.credit == 19:  # this client did not count what it sent here
            break
        client.pump()
    assert client.credit == 19
    client.rows()
    client.wait_weights()


@pytest.mark.parametrize(
    ("config", "what"),
    [({"nice": 99}, "config.nice"), ({"publish_evrey": 1}, "config.publish_evrey")],
)
def test_bad_options_are_refused_by_name(
    server: ServerProcess, config: dict[str, Any], what: str
) -> None:
    client = server.client()
    client.greet()
    client.send(client.request(**config))
    assert client.error("config").what == what
    server.forget(client)


def test_a_persistent_job_leaves_log_curves_and_checkpoint(tmp_path: Path) -> None:
    with ServerProcess(directory=tmp_path) as it:
        client = it.client()
        opened = client.open(nice=0)
        client.rows()
        client.wait_weights()
        directory = tmp_path / "jobs" / opened.resume.hex()
        wait_for(
            lambda: any(f.stat().st_size > 200 for f in directory.glob("tensorboard/events*")),
            "curves",
        )
        client.stop()
        assert {p.name for p in directory.iterdir()} == {
            "job.log", "lock", "published.json", "standin.json", "tensorboard",
        }  # fmt: skip
        assert "session for plasma" in (directory / "job.log").read_text()
        assert not list((it.runtime / "logs").glob(f"*-{opened.job_pid}.log"))


def test_a_full_disk_is_told_once_and_does_not_stop_training(client: Client) -> None:
    client.open(save_fails=True)
    client.rows()
    first = client.wait_weights()
    error = client.error("disk")
    assert not error.fatal
    assert "No space left on device" in error.got
    client.expect(Progress, where=lambda p: p.step > first.step + 300)
    client.receive()
    assert not [m for m in client.seen if isinstance(m, Error)]


def test_two_servers_do_not_share_a_job_directory(tmp_path: Path) -> None:
    with ServerProcess(directory=tmp_path) as one, ServerProcess(directory=tmp_path) as two:
        first = one.client()
        opened = first.open()
        second = two.client()
        second.greet()
        second.send(second.request(resume=opened.resume))
        error = second.error("disk")
        assert "another process holds its lock" in error.got
        first.rows()
        first.wait_weights()
        first.stop()


def test_an_unwritable_job_directory_is_a_clear_error(tmp_path: Path) -> None:
    with ServerProcess(directory=tmp_path) as it:
        (tmp_path / "jobs").write_text("in the way")
        client = it.client()
        client.greet()
        client.send(client.request())
        error = client.error("disk")
        assert error.fatal
        assert str(tmp_path) in error.what
