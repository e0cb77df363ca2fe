"""The session against a trainer that speaks the protocol: flow, reloads, refusals, changes."""

import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import doublure_bridge as bridge
import msgpack
import numpy as np
import pytest
from doublure_plugin import (
    CaptureError,
    Session,
    SessionError,
    Source,
    Timing,
    Weights,
)

from .fake_trainer import SPEC, FakeTrainer, tensors, wait_for

WIDTH, HEIGHT = 32, 16
SOURCE = Source("test", {"scene": "code"}, {"k": 1}, WIDTH, HEIGHT)
OTHER = Source("other", {"scene": "code"}, {"k": 2}, 8, 8)


@pytest.fixture
def trainer() -> Iterator[FakeTrainer]:
    with FakeTrainer() as trainer:
        yield trainer


def open_session(trainer: FakeTrainer | None, **options: Any) -> Session:
    """A session that streams."""
    assert trainer is not None
    options = {"rows_per_frame": 64} | options
    session = Session(SOURCE, (0.0, 10.0), trainer=trainer.endpoint, **options)
    wait_for(lambda: session.state == "streaming", "streaming")
    return session


def frame(value: float = 0.5) -> np.ndarray[Any, Any]:
    pixels = np.full((HEIGHT, WIDTH, 4), value, np.float32)
    pixels[..., 3] = 1
    return pixels


def capture_sent(session: Session, pixels: Any, t: float) -> None:
    """Capture one frame and wait until the sender has dealt with it."""
    wait_for(lambda: session.wants_frames, "room in the ring")
    before = session.stats
    assert session.capture(pixels, t)
    wait_for(
        lambda: session.stats.sent + session.stats.refused > before.sent + before.refused, "sent"
    )


def next_weights(session: Session) -> Weights:
    got: list[Weights] = []

    def polled() -> bool:
        weights = session.poll()
        if weights is not None:
            got.append(weights)
        return bool(got)

    wait_for(polled, "weights")
    return got[0]


def test_what_the_trainer_is_told(trainer: FakeTrainer) -> None:
    with open_session(trainer, host="engine 4", model="grid", config={"seed": 3}) as session:
        hello, asked = trainer.of(bridge.Hello)[0], trainer.of(bridge.OpenSession)[0]
        assert (hello.host, hello.token, hello.protocol) == ("engine 4", b"", 1)
        assert hello.software.startswith("doublure ")
        assert (asked.digest, asked.source) == (SOURCE.digest, "test")
        assert (asked.width, asked.height) == (WIDTH, HEIGHT)
        assert (asked.parameter_low, asked.parameter_high) == (0.0, 10.0)
        assert (asked.model, asked.config, asked.resume) == ("grid", {"seed": 3}, b"")
        assert session.held_out == ((-0.5, -0.25),)
        assert session.test == ((0.25, 0.5),)
        assert session.model_specs == (bridge.CompactSpec(hidden=8, layers=2),)
        assert session.job_pid == 4242


def test_frames_arrive_as_rows_in_order(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        for i in range(20):
            capture_sent(session, frame(i), i / 2)
        wait_for(lambda: trainer.frames == 20, "all frames")
        got = trainer.of(bridge.Rows)
        assert [m.t for m in got] == pytest.approx([i / 10 - 1 for i in range(20)])
        assert [m.sequence for m in got] == sorted({m.sequence for m in got})
        for i, message in enumerate(got):
            assert message.rows.shape == (64, 6)
            assert (message.rows[:, 3:] == i).all()
        assert session.stats.rows == 20 * 64


def test_rows_sampled_by_the_host_arrive_unchanged(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        rows = np.random.default_rng(5).uniform(-1, 1, (40, 6)).astype(np.float32)
        rows[:, 2] = -0.5
        assert session.capture_rows(rows, 2.5)
        wait_for(lambda: trainer.frames == 1, "the frame")
        assert (trainer.of(bridge.Rows)[0].rows == rows).all()


def test_sampled_rows_may_name_their_own_parameter(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        rows = np.zeros((40, 6), np.float32)
        rows[:, 2] = 0.25
        assert session.capture_rows(rows)
        wait_for(lambda: trainer.frames == 1, "the frame")
        assert trainer.of(bridge.Rows)[0].t == 0.25
        rows[:, 2] = np.nan
        assert session.capture_rows(rows)
        wait_for(lambda: session.stats.refused == 1, "the refusal")
        assert "row 0: expected x, y, t in [-1, 1], got t = nan" in session.messages[-1].text


def test_without_credit_the_ring_fills_and_drops(trainer: FakeTrainer) -> None:
    trainer.credit, trainer.grant = 2, False
    with open_session(trainer, ring_slots=4) as session:
        capture_sent(session, frame(), 1.0)
        capture_sent(session, frame(), 1.0)
        taken = [session.capture(frame(), 2.0) for _ in range(10)]
        assert taken == [True] * 4 + [False] * 6
        stats = session.stats
        assert (stats.sent, stats.waiting, stats.dropped) == (2, 4, 6)
        assert not session.wants_frames
        trainer.send(bridge.Credit(session=trainer.session, frames=3))
        wait_for(lambda: session.stats.sent == 5, "granted frames sent")
        assert session.stats.waiting == 1


def test_lost_credit_is_found_again(trainer: FakeTrainer) -> None:
    trainer.credit = 0
    with open_session(trainer, timing=Timing(starved=0.1)) as session:
        assert session.capture(frame(), 1.0)
        wait_for(lambda: trainer.frames == 1, "a frame that asks for credit")


def test_nothing_is_captured_before_there_is_a_session() -> None:
    with (
        FakeTrainer(silent=True) as trainer,
        Session(SOURCE, (0, 1), trainer=trainer.endpoint) as session,
    ):
        assert not session.wants_frames
        assert session.capture(frame(), 0.5) is False
        assert session.poll() is None
        assert session.stats.dropped == 1
        assert session.state == "connecting"


def test_capture_allocates_nothing_that_stays(trainer: FakeTrainer) -> None:
    trainer.credit, trainer.grant, trainer.keep = 0, False, False
    with open_session(trainer, ring_slots=256, timing=Timing(starved=60)) as session:
        pixels = frame()
        rows = np.zeros((64, 6), np.float32)
        for _ in range(20):
            session.capture(pixels, 5.0)
            session.capture_rows(rows, 5.0)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            for _ in range(100):
                assert session.capture(pixels, 5.0)
                assert session.capture_rows(rows, 5.0)
            after, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # Integers in the slots' headers and what the sender's own thread holds meanwhile; the rows
        # of one frame alone are 1.5 kB, those of all 200 are 300 kB.
        assert after - before < 40_000
        assert peak - before < 60_000


@pytest.mark.parametrize(
    ("t", "text"),
    [
        (10.1, r"capture t: expected a parameter in \[0, 10\], got 10.1"),
        (-0.001, "got -0.001"),
        (float("nan"), "got nan"),
        (float("inf"), "got inf"),
        ("now", "capture t: expected a number, got str"),
        (1j, "capture t: expected a number, got complex"),
        (np.zeros(2), "capture t: expected a number, got ndarray"),
        (b"1", "got bytes"),
    ],
)
def test_parameters_out_of_range_are_refused(trainer: FakeTrainer, t: Any, text: str) -> None:
    with open_session(trainer) as session:
        with pytest.raises(CaptureError, match=text):
            session.capture(frame(), t)
        with pytest.raises(CaptureError, match=text):
            session.capture_rows(np.zeros((1, 6), np.float32), t)
        assert session.stats.frames == 0


def test_the_ends_of_the_range_allow_for_rounding(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        for t in (0.0, 10.0, 10.000001, -0.000001):
            capture_sent(session, frame(), t)
        wait_for(lambda: trainer.frames == 4, "frames")
        assert [m.t for m in trainer.of(bridge.Rows)] == [-1.0, 1.0, 1.0, -1.0]


def test_bad_content_is_refused_by_the_sender(trainer: FakeTrainer) -> None:
    with open_session(trainer, rows_per_frame=WIDTH * HEIGHT) as session:
        bad = frame()
        bad[4, 7, 2] = np.nan
        capture_sent(session, bad, 5.0)
        text = session.messages[-1].text
        assert "refused frame 1 at t = 5: pixel (7, 4): expected finite linear colour" in text
        assert session.state == "streaming"
        capture_sent(session, frame(), 5.0)
        stats = session.stats
        assert (stats.refused, stats.sent) == (1, 1)
        wait_for(lambda: trainer.frames == 1, "only the good frame")


def test_refusals_in_a_row_are_a_state_and_end_with_a_good_frame(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        clear = frame()
        clear[..., 3] = 0
        for _ in range(8):
            capture_sent(session, clear, 5.0)
        wait_for(lambda: session.state == "refused", "refused")
        assert "expected alpha 1 (opaque), got alpha 0" in str(session.error)
        assert [m.level for m in session.messages].count("error") == 1
        capture_sent(session, frame(), 5.0)
        wait_for(lambda: session.state == "streaming", "streaming again")
        assert session.error is None


def test_a_source_that_depends_on_more_than_t_is_told_once(trainer: FakeTrainer) -> None:
    with open_session(trainer, rows_per_frame=WIDTH * HEIGHT) as session:
        for i in range(4):
            capture_sent(session, frame(i), i / 2)
        for _ in range(2):
            time.sleep(0.3)
            capture_sent(session, frame(1), 0.5)
        assert not [m for m in session.messages if m.level == "warning"]
        for _ in range(2):
            pixels = frame(1)
            pixels[3, 30, :3] = 1.5
            time.sleep(0.3)
            capture_sent(session, pixels, 0.5)
        (warning,) = [m for m in session.messages if m.level == "warning"]
        assert "frame 7: pixel (30, 3): expected the colour that the same parameter gave" in (
            warning.text
        )
        assert "a difference of 0.5; 1 of 512 pixels in common differ" in warning.text
        assert session.state == "streaming"


def test_weights_are_handed_out_once(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        trainer.publish(1)
        weights = next_weights(session)
        assert weights.version == 1
        assert session.poll() is None
        assert session.current is None
        session.applied(weights)
        session.applied(weights)
        assert session.current is weights
        wait_for(lambda: trainer.of(bridge.WeightsApplied), "the word")
        assert [m.version for m in trainer.of(bridge.WeightsApplied)] == [1]
        assert session.stats.reloads == 1
        trainer.publish(2)
        assert next_weights(session).version == 2


def test_only_the_newest_of_several_is_handed_out(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        for version in range(1, 9):
            trainer.publish(version)
        wait_for(
            lambda: (
                session._sender is not None
                and session._sender.intake.ready is not None
                and session._sender.intake.ready.version == 8
            ),
            "version 8",
        )
        assert next_weights(session).version == 8
        assert session.poll() is None


def test_bad_weights_never_reach_the_host(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        trainer.publish(1)
        good = next_weights(session)
        session.applied(good)
        trainer.publish(2, digest=b"0" * 32)
        wait_for(lambda: trainer.of(bridge.WeightsRejected), "the refusal")
        rejected = trainer.of(bridge.WeightsRejected)[0]
        assert rejected.version == 2
        assert rejected.reason.startswith("weights 2 digest: expected")
        assert session.poll() is None
        assert session.current is good
        assert session.stats.rejected == 1
        assert "kept the last good ones" in session.messages[-1].text
        trainer.publish(2)
        assert next_weights(session).version == 2


def test_old_versions_are_refused_and_repeats_ignored(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        trainer.publish(5)
        assert next_weights(session).version == 5
        trainer.publish(4)
        wait_for(lambda: trainer.of(bridge.WeightsRejected), "the refusal")
        trainer.publish(5)
        assert session.poll() is None
        trainer.publish(6)
        assert next_weights(session).version == 6
        assert [m.version for m in trainer.of(bridge.WeightsRejected)] == [4]


def test_host_can_refuse_and_roll_back(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        kept = []
        for version in (1, 2):
            trainer.publish(version)
            kept.append(next_weights(session))
            session.applied(kept[-1])
        session.reject(kept[1], "self-test: 12 of 64 probes differ")
        assert session.rollback() is kept[0]
        assert session.current is kept[0]
        assert session.rollback() is None
        wait_for(lambda: trainer.of(bridge.WeightsRejected), "the refusal")
        message = trainer.of(bridge.WeightsRejected)[0]
        assert (message.version, message.reason) == (2, "self-test: 12 of 64 probes differ")


def test_progress_is_the_latest(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        assert session.progress is None
        for step in (1, 2):
            trainer.send(
                bridge.Progress(
                    session=trainer.session, state="training", step=step, seconds=1.0, samples=1,
                    samples_per_s=1.0, loss=0.1, family="grid", version=0, held_out={}, test={},
                    rows=1, coverage=1.0,
                )
            )  # fmt: skip
        wait_for(lambda: session.progress is not None and session.progress.step == 2, "progress")


def test_a_changed_source_mixes_with_nothing(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        trainer.publish(1)
        wait_for(lambda: session._sender is not None and session._sender.intake.ready, "weights")
        first = trainer.session
        session.source_changed(OTHER, "another uniform")
        # The weights of the old source arrived, and must not be handed out any more.
        assert session.poll() is None
        with pytest.raises(CaptureError, match="source_changed"):
            session.capture(frame(), 1.0)
        wait_for(lambda: trainer.session != first and session.wants_frames, "a new session")
        changed = trainer.of(bridge.SourceChanged)[0]
        assert (changed.session, changed.digest) == (first, OTHER.digest)
        assert [m.digest for m in trainer.of(bridge.OpenSession)] == [SOURCE.digest, OTHER.digest]
        assert session.capture(np.ones((8, 8, 4), np.float32), 1.0)
        wait_for(lambda: trainer.frames == 1, "a frame of the new source")
        assert trainer.of(bridge.Rows)[0].session == trainer.session
        trainer.publish(1)
        weights = next_weights(session)
        assert weights.source == OTHER.digest
        assert any("another uniform" in m.text for m in session.messages)


def test_a_source_with_the_same_digest_changes_nothing(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        session.source_changed(Source("renamed", {"scene": "code"}, {"k": 1}, WIDTH, HEIGHT))
        capture_sent(session, frame(), 1.0)
        assert not trainer.of(bridge.SourceChanged)


def test_a_source_may_change_while_the_session_opens() -> None:
    with (
        FakeTrainer(hold_open=True) as trainer,
        Session(SOURCE, (0, 10), trainer=trainer.endpoint) as session,
    ):
        wait_for(lambda: trainer.of(bridge.OpenSession), "the question")
        session.source_changed(OTHER, "early")
        wait_for(lambda: len(session.messages) > 0, "the change noticed")
        trainer.hold_open = False
        peer = trainer.peers[-1]
        opened = trainer._open(peer, trainer.of(bridge.OpenSession)[0])
        trainer._outgoing.append((peer, opened))
        wait_for(lambda: session.state == "streaming", "the second session")
        assert [m.session for m in trainer.of(bridge.SourceChanged)] == [opened.session]
        assert trainer.of(bridge.OpenSession)[-1].digest == OTHER.digest


def test_a_restarted_trainer_is_taken_back_with_the_resume_token() -> None:
    first = FakeTrainer()
    with open_session(first, timing=Timing(lost=0.4)) as session:
        token = session.opened and session.opened.resume
        first.publish(7)
        assert next_weights(session).version == 7
        first.close()
        wait_for(lambda: session.state == "lost", "lost")
        assert session.capture(frame(), 1.0) is False
        with FakeTrainer(first.endpoint, resume_tokens={token}, step=300) as second:
            wait_for(lambda: session.state == "streaming", "streaming again")
            assert second.of(bridge.OpenSession)[0].resume == token
            capture_sent(session, frame(), 1.0)
            # A resumed job goes on counting: what is older than the host's is still refused.
            second.publish(6)
            wait_for(lambda: second.of(bridge.WeightsRejected), "refusal")
            second.publish(7)
            wait_for(lambda: "weights 7 came" in session.messages[-1].text, "the word")
            # That is to be expected, and no reason to warn.
            assert [(m.level, m.text) for m in session.messages][-2:] == [
                ("info", "weights 6 came again after the trainer's return; "
                 "version 7 is already in use"),
                ("info", "weights 7 came again after the trainer's return; already in use"),
            ]  # fmt: skip
            assert session.stats.rejected == 0
            second.publish(8)
            assert next_weights(session).version == 8
            # Weights that are in use are not refused for coming twice.
            assert [m.version for m in second.of(bridge.WeightsRejected)] == [6]
    assert session.stats.losses == 1


def test_a_trainer_that_forgot_everything_may_count_from_one() -> None:
    first = FakeTrainer()
    with open_session(first, timing=Timing(lost=0.4)) as session:
        first.publish(7)
        session.applied(next_weights(session))
        first.close()
        with FakeTrainer(first.endpoint) as second:
            wait_for(lambda: second.sessions and session.state == "streaming", "streaming again")
            second.publish(1, scores={"psnr_db": 37.5})
            assert next_weights(session).version == 1
            assert session.stats.held_back == 0
            # It beat what was in use; from here on the trainer's own gate decides.
            second.publish(2, scores={"psnr_db": 37.0})
            assert next_weights(session).version == 2


@pytest.mark.parametrize("resumed", [False, True])
def test_worse_weights_wait_after_a_trainer_has_returned(resumed: bool) -> None:
    first = FakeTrainer()
    with open_session(first, timing=Timing(lost=0.4)) as session:
        token = session.opened and session.opened.resume
        first.publish(1, scores={"psnr_db": 35.2})
        good = next_weights(session)
        session.applied(good)
        first.close()
        tokens = {token} if resumed else set()
        with FakeTrainer(first.endpoint, resume_tokens=tokens, step=300) as second:
            wait_for(lambda: second.sessions and session.state == "streaming", "streaming again")
            second.publish(2, scores={"psnr_db": 24.1})
            wait_for(lambda: second.of(bridge.WeightsRejected), "the word")
            told = second.of(bridge.WeightsRejected)[0]
            assert told.version == 2
            assert told.reason == (
                "worse than the weights in use: 24.1 dB against 35.2 dB; "
                "held back for up to 20 s after a restart"
            )
            assert session.poll() is None
            assert session.current is good
            assert (session.messages[-1].level, session.stats.held_back) == ("info", 1)
            assert session.stats.rejected == 0
            second.publish(3, scores={"psnr_db": 35.3})
            assert next_weights(session).version == 3


def test_the_newest_held_back_is_released_in_the_end() -> None:
    first = FakeTrainer()
    with open_session(first, timing=Timing(lost=0.4)) as session:
        first.publish(7)
        session.applied(next_weights(session))
        first.close()
        with FakeTrainer(first.endpoint) as second:
            wait_for(lambda: second.sessions and session.state == "streaming", "streaming again")
            sender = session._sender
            assert sender is not None
            for version in (1, 2):
                second.publish(version)
                wait_for(lambda n=version: session.stats.held_back == n, "held back")
            assert session.poll() is None
            sender.intake._hold_until = time.monotonic()
            assert next_weights(session).version == 2
            wait_for(lambda: "no longer held back" in session.messages[-1].text, "the word")


def test_nothing_is_held_back_for_weights_the_host_took_back() -> None:
    first = FakeTrainer()
    with open_session(first, timing=Timing(lost=0.4)) as session:
        first.publish(7)
        weights = next_weights(session)
        session.applied(weights)
        session.reject(weights, "self-test")
        assert session.rollback() is None
        first.close()
        with FakeTrainer(first.endpoint) as second:
            wait_for(lambda: second.sessions and session.state == "streaming", "streaming again")
            second.publish(1)
            assert next_weights(session).version == 1


def test_nothing_is_held_back_for_another_source(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        trainer.publish(7)
        session.applied(next_weights(session))
        first = trainer.session
        session.source_changed(OTHER, "another uniform")
        wait_for(lambda: trainer.session != first and session.wants_frames, "a new session")
        trainer.publish(1)
        assert next_weights(session).version == 1
        assert session.stats.held_back == 0


def test_worse_weights_of_a_running_session_are_the_trainers_to_judge(
    trainer: FakeTrainer,
) -> None:
    with open_session(trainer) as session:
        for version, score in ((1, 35.2), (2, 24.1)):
            trainer.publish(version, scores={"psnr_db": score})
            assert next_weights(session).version == version


def test_a_silent_trainer_is_lost_and_regained(trainer: FakeTrainer) -> None:
    with open_session(trainer, timing=Timing(lost=0.4)) as session:
        trainer.silent = True
        wait_for(lambda: session.state == "lost", "lost")
        assert not session.wants_frames
        assert "drawing goes on" in session.messages[-1].text
        trainer.silent = False
        wait_for(lambda: session.state == "streaming", "regained")
        capture_sent(session, frame(), 1.0)


def error(code: str, **fields: Any) -> bridge.Error:
    return bridge.Error(session=b"", code=code, **({"what": "it"} | fields))


@pytest.mark.parametrize(
    ("on", "code", "what"),
    [
        (bridge.Hello, "version", "protocol version"),
        (bridge.Hello, "token", "token"),
        (bridge.OpenSession, "config", "config.sedd: did you mean seed?"),
        (bridge.OpenSession, "open_refused", "too many"),
    ],
)
def test_fatal_errors_end_in_failed_with_the_trainers_words(
    on: type[bridge.Message], code: str, what: str
) -> None:
    refusal = error(code, what=what, expected="this", got="that", next_step="do that")
    with (
        FakeTrainer(errors={on: refusal}) as trainer,
        Session(SOURCE, (0, 10), trainer=trainer.endpoint) as session,
    ):
        wait_for(lambda: session.state == "failed", "failed")
        assert str(session.error) == f"{what}: expected this, got that; do that"
        assert session.capture(frame(), 1.0) is False
        assert session.poll() is None
        session.stop(wait=True)
        assert session.state == "failed"


def test_a_newer_trainer_is_told_apart_with_both_versions() -> None:
    with (
        FakeTrainer(welcome={"protocol": 9}) as trainer,
        Session(SOURCE, (0, 10), trainer=trainer.endpoint) as session,
    ):
        wait_for(lambda: session.state == "failed", "failed")
        text = str(session.error)
        assert "expected 1..1 (this side), got 9..9 (the other side)" in text
        assert "run `pip install -U doublure` on this side" in text


def test_a_job_that_fails_shows_its_traceback(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        trainer.send(error("job_died", what="job 12 was killed by signal 9", fatal=False))
        wait_for(lambda: "signal 9" in session.messages[-1].text, "the notice")
        assert session.state == "streaming"
        trainer.send(error("job_failed", what="the job failed", detail="Traceback: boom"))
        wait_for(lambda: session.state == "failed", "failed")
        assert session.messages[-1].detail == "Traceback: boom"


def test_a_busy_trainer_is_asked_again() -> None:
    with (
        FakeTrainer(errors={bridge.OpenSession: error("busy", what="full")}) as trainer,
        Session(SOURCE, (0, 10), trainer=trainer.endpoint) as session,
    ):
        wait_for(lambda: session.error is not None, "busy")
        trainer.errors.clear()
        wait_for(lambda: session.state == "streaming", "streaming")
        assert session.error is None


def test_a_session_ended_by_the_trainer_is_resumed(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        trainer.send(bridge.Stopped(session=trainer.session, reason="drained", step=3))
        wait_for(lambda: len(trainer.sessions) == 2, "asked again")
        wait_for(lambda: session.state == "streaming", "streaming again")


def test_a_session_taken_over_does_not_fight(trainer: FakeTrainer) -> None:
    with open_session(trainer) as session:
        trainer.send(bridge.Stopped(session=trainer.session, reason="taken over", step=3))
        wait_for(lambda: session.state == "failed", "failed")
        assert "give each host its own directory" in str(session.error)


def test_a_defect_in_the_sender_is_survived_once(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_session(trainer) as session:
        sender = session._sender
        assert sender is not None
        for expected in ("streaming", "failed"):
            with monkeypatch.context() as patch:
                patch.setattr(sender.feeder, "feed", lambda *_: 1 / 0)
                wait_for(lambda: sender.state != "streaming", "the crash noticed")
            wait_for(lambda want=expected: session.state == want, expected)
        assert "ZeroDivisionError" in str(session.error)
        assert "ZeroDivisionError" in session.messages[-1].detail
        assert session.capture(frame(), 1.0) is False


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"parameter": (1, 1)}, r"Session.parameter: expected \(low, high\) with low < high"),
        ({"parameter": (0, float("inf"))}, "Session.parameter"),
        ({"parameter": 3}, "Session.parameter"),
        ({"parameter": (-1e308, 1e308)}, "Session.parameter"),
        ({"parameter": (0, 1e-320)}, "Session.parameter"),
        ({"host": None}, "Session.host: expected text, got NoneType"),
        ({"config": "fast"}, "Session.config: expected a mapping, got str"),
        ({"config": {"a": object()}}, "Session.config: expected text keys, and plain"),
        ({"config": {1: 2}}, "Session.config: expected text keys"),
        ({"config": {"a": float("nan")}}, "Session.config: expected text keys"),
        ({"config": {"a": 1 << 70}}, "Session.config: expected text keys"),
        ({"config": {"\ud800": 1}}, "Session.config: expected text keys"),
        ({"rows_per_frame": 0}, r"Session.rows_per_frame: expected an integer in 1..262144, got 0"),
        ({"ring_slots": 2.0}, "Session.ring_slots: expected an integer"),
        ({"model": "gird"}, "Session.model: expected one of auto, grid, compact, got 'gird'"),
        ({"source": "fbm"}, "Session.source: expected a Source, got str"),
        ({"directory": "/tmp", "trainer": "tcp://127.0.0.1:1"}, "Session.directory: expected None"),
        ({"directory": "/proc/no/such"}, "Session.directory: expected a directory that can be"),
        ({"trainer": "tcp://10.0.0.1:5570"}, "trainer address: expected a loopback address"),
        ({"trainer": "127.0.0.1"}, "trainer address: expected tcp://HOST:PORT"),
        ({"trainer": 5570}, "trainer address: expected tcp://HOST:PORT"),
        ({"trainer": "tcp://127.0.0.1:0"}, "Session.trainer: expected the port"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    options: dict[str, Any], text: str
) -> None:
    given: dict[str, Any] = {"source": SOURCE, "parameter": (0, 1)} | options
    expected = bridge.AddressError if text.startswith("trainer address") else SessionError
    with pytest.raises(expected, match=text):
        Session(given.pop("source"), given.pop("parameter"), **given)


def test_junk_from_the_trainer_is_ignored_and_told_once_a_kind(trainer: FakeTrainer) -> None:
    random = np.random.default_rng(11)
    with open_session(trainer) as session:
        good = bridge.encode(bridge.Credit(session=trainer.session, frames=1))
        for _ in range(2):
            trainer.send([msgpack.packb([1, 99, "from the future"])])
            trainer.send([b"\xc1" * 100])
        for _ in range(300):
            parts = [bytes(p) for p in good]
            header = bytearray(parts[0])
            # Byte 1 is the version: a foreign one is an error of its own.
            header[2 + random.integers(len(header) - 2)] = random.integers(256)
            trainer.send([bytes(header), *[b""] * int(random.integers(3))])
        trainer.send([])
        trainer.publish(1)
        assert next_weights(session).version == 1
        assert session.state == "streaming"
        texts = [m.text for m in session.messages]
        assert sum("message tag: expected one of" in t and "got 99" in t for t in texts) == 1
        assert len(texts) <= 66


def test_a_foreign_version_in_the_middle_is_an_error_with_both_versions(
    trainer: FakeTrainer,
) -> None:
    with open_session(trainer) as session:
        trainer.send([msgpack.packb([7, 7, trainer.session, 1])])
        wait_for(lambda: session.state == "failed", "failed")
        assert "expected 1..1 (this side), got 7..7" in str(session.error)


def test_polling_never_sees_half_a_publication(trainer: FakeTrainer) -> None:
    """Reloads race polls: versions only rise, and every set is whole."""
    trainer.keep = False
    with open_session(trainer) as session:
        seen = []
        for version in range(1, 201):
            trainer.publish(version)
            if (got := session.poll()) is not None:
                seen.append(got)
        wait_for(
            lambda: (
                (got := session.poll()) is not None and not seen.append(got) and got.version == 200
            ),
            "the last version",
        )
        assert [w.version for w in seen] == sorted({w.version for w in seen})
        for got in seen:
            assert got.digest == bridge.tensors_digest(
                bridge.pack_tensors(SPEC, tensors(got.version))
            )
            assert all((got.tensors[k] == v).all() for k, v in tensors(got.version).items())


def test_many_reloads_leave_memory_flat(trainer: FakeTrainer) -> None:
    trainer.keep = False
    with open_session(trainer) as session:
        sizes = []
        tracemalloc.start()
        try:
            for version in range(1, 601):
                trainer.publish(version)
                session.applied(next_weights(session))
                if version % 200 == 0:
                    time.sleep(0.02)
                    sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        # Two sets of weights are kept (3 kB each); 200 would be 600 kB.
        assert sizes[-1] - sizes[0] < 150_000
        assert session.stats.reloads == 600


def test_a_long_name_of_the_host_is_cut_where_a_letter_ends(trainer: FakeTrainer) -> None:
    with open_session(trainer, host="\u00e9" * 200):
        wait_for(lambda: trainer.of(bridge.Hello), "Hello")
        assert trainer.of(bridge.Hello)[0].host == "\u00e9" * 60
