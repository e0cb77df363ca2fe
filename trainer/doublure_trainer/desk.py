"""Sessions and their jobs: who serves whom, what jobs say, how sessions begin, break and end.

The half of the server that faces the jobs; `hub` is the half that faces the hosts. Same thread.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from typing import Any

from doublure_bridge import (
    Credit,
    Error,
    Heartbeat,
    Hello,
    Message,
    Progress,
    Router,
    SessionOpened,
    Stop,
    Stopped,
    Weights,
    decode,
    encode,
    peek,
)

from .directories import remove_tree, sweep_temporaries
from .errors import LaunchError, error_message
from .jobs import Assignment, Job, JobPool, log_tail
from .sessions import Session, State
from .settings import HubSettings

__all__ = ["Desk"]

log = logging.getLogger("doublure.trainer")

_REMEMBERED = 64


class Desk:
    """Sessions by id, and everything between a session and its job.

    Args:
        hosts: The socket that sessions' hosts are told on.
        locals_: The socket that jobs are told on.
        pool: The job processes.
    """

    def __init__(
        self, settings: HubSettings, hosts: Router, locals_: Router, pool: JobPool
    ) -> None:
        self._settings = settings
        self._hosts = hosts
        self._locals = locals_
        self._pool = pool
        self.sessions: dict[bytes, Session] = {}
        self.ended: OrderedDict[bytes, Stopped] = OrderedDict()
        """What the last sessions were told, for a host that asks again."""

    def tell(self, session: Session, message: Message) -> None:
        """Send to a session's host; what it cannot take now waits, in order."""
        if session.outbox or not self._hosts.send(session.peer, message):
            session.outbox.append(message)

    def grant(self, session: Session, frames: int) -> None:
        """Let the host send so many frames more."""
        session.credit += frames
        session.grants += frames
        self.tell(session, Credit(session=session.id, frames=frames))

    def take(self, peer: bytes, parts: list[Any]) -> None:
        """One message from the jobs' socket."""
        envelope = peek(parts)
        job = self._pool.by_peer(peer)
        if job is None:
            message = decode(parts) if envelope.tag == Hello.tag else None
            if not isinstance(message, Hello) or (job := self._pool.greet(peer, message)) is None:
                log.warning("a stranger on the jobs' socket was ignored")
                return
            if job.session is not None:
                self.assign(job.session, republish=job.session.state is State.OPENING)
            return
        job.last_seen = time.monotonic()
        session: Session | None = job.session
        if session is not None and session.silence_reported:
            session.silence_reported = False
            log.info("%s: job %d is heard again", session.name, job.pid)
        if envelope.tag == Heartbeat.tag:
            beat = decode(parts)
            if isinstance(beat, Heartbeat) and not beat.reply:
                self._locals.send(
                    peer, Heartbeat(session=beat.session, sequence=beat.sequence, reply=True)
                )
            return
        if session is None or session.job is not job or envelope.first != session.id:
            return
        if envelope.tag == Weights.tag:
            self._publish(session, parts)
        elif envelope.tag == Progress.tag:
            message = decode(parts)
            assert isinstance(message, Progress)
            session.progress = message
            if not session.ending:
                self._hosts.send_parts(session.peer, parts)
        elif envelope.tag == Credit.tag:
            message = decode(parts)
            assert isinstance(message, Credit)
            session.taken_in(message.frames)
            if not session.ending:
                self.grant(session, message.frames)
        elif envelope.tag == SessionOpened.tag:
            message = decode(parts)
            assert isinstance(message, SessionOpened)
            self._opened(session, message)
        elif envelope.tag == Error.tag:
            message = decode(parts)
            assert isinstance(message, Error)
            self._job_reports(session, message)

    def assign(self, session: Session, *, republish: bool) -> None:
        """Give a session to its warm job."""
        job = session.job
        assert job is not None
        assert job.peer is not None
        assignment = Assignment(
            session=session.id.hex(),
            resume=session.resume.hex(),
            directory=str(session.directory),
            load=True,
            persistent=self._settings.directory is not None,
            credit=self._settings.credit,
            device=self._settings.device,
            republish=republish,
        )
        if not self._locals.send_parts(job.peer, assignment.encode(encode(session.request))):
            log.error("%s: job %d takes no assignment", session.name, job.pid)
            job.kill()

    def _opened(self, session: Session, message: SessionOpened) -> None:
        job = session.job
        assert job is not None
        if session.state is State.OPENING:
            session.state = State.OPEN
            session.last_seen = time.monotonic()
            log.info("%s: job %d at step %d", session.name, job.pid, message.step)
            self.tell(session, message)
        elif session.state is State.REOPENING:
            session.state = State.OPEN
            log.info("%s: resumed by job %d at step %d", session.name, job.pid, message.step)
            session.sent_bytes.clear()
            session.pending_bytes = 0
            # What the dead job had not taken in, and what was dropped meanwhile, is spent.
            if (missing := self._settings.credit - session.credit) > 0:
                self.grant(session, missing)

    def _publish(self, session: Session, parts: list[Any]) -> None:
        nbytes = sum(memoryview(part).nbytes for part in parts)
        if session.ending:
            return
        header = [bytes(part) for part in parts]
        message = decode(header)
        assert isinstance(message, Weights)
        session.version = message.version
        session.published.add(nbytes)
        session.weights = header
        log.info(
            "%s: version %d, step %d, held-out %s",
            session.name,
            message.version,
            message.step,
            _decibels(message.scores),
        )
        self._hosts.send_parts(session.peer, header)

    def _job_reports(self, session: Session, message: Error) -> None:
        if session.ending:
            return
        log.error("%s: %s: %s", session.name, message.code, message.what)
        self.tell(session, message)
        if message.fatal:
            session.state = State.FAILED
            session.reason = message.code
            self._stop_job(session)

    def to_job(self, session: Session, parts: list[Any]) -> None:
        """Pass a host's message on; dropped while there is no job."""
        if session.job is not None and session.job.peer is not None:
            self._locals.send_parts(session.job.peer, parts)

    def end(self, session: Session, reason: str, *, detail: str = "") -> None:
        """Begin to end a session; it is over when its job has been reaped."""
        if session.ending:
            return
        log.info("%s: %s%s", session.name, reason, f" ({detail})" if detail else "")
        session.state = State.STOPPING
        session.reason = reason
        self._stop_job(session)

    def _stop_job(self, session: Session) -> None:
        job = session.job
        if job is None:
            self._finish(session)
            return
        stop = Stop(session=session.id, reason=session.reason)
        if job.peer is None or job.stopped or not self._locals.send(job.peer, stop):
            # Still importing, held by SIGSTOP, or its queue is full: waiting gains nothing.
            job.kill()
        self._pool.stop_within(job, self._settings.stop_grace_s)

    def look_after(self, *, spares: bool) -> None:
        """Reap, replace, report; `spares` says whether to keep a warm job waiting."""
        for job in self._pool.reap():
            session: Session | None = job.session
            if session is None or session.job is not job:
                if not job.killed:
                    tail = log_tail(job.launch.log)
                    log.error("spare job %d has died: %s\n%s", job.pid, job.ending(), tail)
            elif session.ending:
                self._finish(session)
            else:
                self._job_died(session, job)
            job.launch.log.unlink(missing_ok=True)
        now = time.monotonic()
        for session in self.sessions.values():
            silent = session.job is not None and not session.ending and session.job.ready
            if silent and session.job is not None and not session.silence_reported:
                quiet = now - session.job.last_seen
                if quiet > self._settings.job_silence_s:
                    session.silence_reported = True
                    self._report_silence(session, session.job, quiet)
        if spares:
            self._pool.keep_spares()

    def _report_silence(self, session: Session, job: Job, quiet: float) -> None:
        log.warning("%s: job %d silent for %.1f s", session.name, job.pid, quiet)
        self.tell(
            session,
            error_message(
                "job_silent",
                f"the job (pid {job.pid}) has been silent for {quiet:.1f} s: paused, not dead",
                session=session.id,
                expected="a heartbeat every half second",
                next_step="it goes on by itself; Stop ends it",
                fatal=False,
            ),
        )

    def _job_died(self, session: Session, job: Job) -> None:
        """Without being told to. Start another that resumes, unless that keeps happening."""
        now = time.monotonic()
        deaths = session.deaths
        deaths.append(now)
        while deaths[0] < now - self._settings.deaths_window_s:
            deaths.popleft()
        sweep_temporaries(session.directory)
        # An exception at the start would come again; a signal need not.
        failed = not job.ready and (job.returncode or 0) > 0
        fatal = len(deaths) > self._settings.deaths_allowed or failed
        session.job = None
        code = "job_died" if job.ready or not fatal else "open_refused"
        tail = log_tail(job.launch.log, session.directory / "job.log")
        if not fatal:
            try:
                session.job = self._pool.take(session)
            except LaunchError as error:
                tail += f"\n{error}"
                fatal = True
        what = f"the job (pid {job.pid}) has died: {job.ending()}"
        next_step = "another takes over, from the last checkpoint if there is one"
        if fatal:
            next_step = "see the detail, and open a new session"
        last = tail.rsplit("\n", 1)[-1]
        if not job.ready and last:
            what = f"the job (pid {job.pid}) could not start: {job.ending()}: {last[:300]}"
            if last.startswith(("ModuleNotFoundError", "ImportError")):
                next_step = (
                    f"run `{sys.executable} -m pip install 'doublure[trainer]'`, or set "
                    "DOUBLURE_PYTHON to a Python that has it"
                )
        log.error("%s: %s%s", session.name, what, "" if fatal else "; resuming")
        self.tell(
            session,
            error_message(
                code,
                what,
                session=session.id,
                next_step=next_step,
                detail=tail,
                fatal=fatal,
            ),
        )
        if fatal:
            session.state = State.FAILED
            session.reason = code
            self._finish(session)
            return
        if session.state is State.OPEN:
            session.state = State.REOPENING
        if session.job is not None and session.job.ready:
            self.assign(session, republish=session.state is State.OPENING)

    def _finish(self, session: Session) -> None:
        """The job is gone: remove what it left, tell the host, forget the session."""
        self.remove_directory(session)
        stopped = Stopped(session=session.id, reason=session.reason, step=session.step)
        if session.state is State.STOPPING:
            self.tell(session, stopped)
        del self.sessions[session.id]
        self.ended[session.id] = stopped
        while len(self.ended) > _REMEMBERED:
            self.ended.popitem(last=False)
        log.info("%s: over (%s) at step %d", session.name, session.reason, session.step)

    def remove_directory(self, session: Session) -> None:
        """What a session leaves on disk: all that is whole, if persistent, else nothing.

        A server that a host started keeps it too when the host did not want the end: somebody
        else ended the server, or a debugger held the host for long. The host opens the session
        again, which goes on from there, and removes the folder itself in the end.
        """
        spawned = bool(self._settings.token)
        unwanted = spawned and session.reason in ("drained", "host lost")
        if self._settings.directory is not None or unwanted:
            sweep_temporaries(session.directory)
            if not any(session.directory.iterdir()):
                session.directory.rmdir()
        elif not remove_tree(session.directory):
            log.error("%s: %s could not be removed", session.name, session.directory)


def _decibels(scores: dict[str, Any]) -> str:
    value = scores.get("psnr_db")
    return f"{value:.2f} dB" if isinstance(value, int | float) else "unscored"
