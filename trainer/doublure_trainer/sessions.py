"""What the server knows of a session: its host, its job, its credit, and how much has flowed."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from doublure_bridge import Message, OpenSession, Progress

from .jobs import Job

__all__ = ["Meter", "Session", "State"]


class State(StrEnum):
    """Where a session stands, as the server sees it."""

    OPENING = "opening"
    OPEN = "open"
    REOPENING = "reopening"
    """The job died; its successor is on the way."""
    STOPPING = "stopping"
    FAILED = "failed"
    """The host has been told a fatal error; the job is being ended."""


class Meter:
    """Frames and bytes of one direction, with a rate over the last second or so."""

    def __init__(self) -> None:
        self.frames = 0
        self.bytes = 0
        self.dropped = 0
        self._window_start = time.monotonic()
        self._window_frames = 0
        self._window_bytes = 0
        self._rates = (0.0, 0.0)

    def add(self, nbytes: int) -> None:
        """Count one message of so many bytes."""
        self.rates()
        self.frames += 1
        self.bytes += nbytes
        self._window_frames += 1
        self._window_bytes += nbytes

    def rates(self) -> tuple[float, float]:
        """Messages and bytes a second, over the last whole window of at least a second."""
        elapsed = time.monotonic() - self._window_start
        if elapsed >= 1.0:
            self._rates = (self._window_frames / elapsed, self._window_bytes / elapsed)
            self._window_start += elapsed
            self._window_frames = self._window_bytes = 0
        return self._rates


@dataclass(slots=True, eq=False)
class Session:
    """One plugin <-> trainer conversation about one source.

    Attributes:
        id: Secret name; whoever has it may send to the session.
        resume: Token that finds the job directory again.
        peer: Routing id of the host's control connection; changes when it reconnects.
        credit: Frames that the host may still send.
        grants: Credit sent to the host since it was last heard: lost if its connection breaks.
        sent_bytes: Sizes of frames that the job has not yet taken in.
        weights: The last publication as it came, until the host has answered it.
    """

    id: bytes
    resume: bytes
    peer: bytes
    host: str
    request: OpenSession
    directory: Path
    job: Job | None
    credit: int
    state: State = State.OPENING
    reason: str = ""
    detail: str = ""
    last_seen: float = field(default_factory=time.monotonic)
    opened_at: float = field(default_factory=time.monotonic)
    progress: Progress | None = None
    weights: list[Any] | None = None
    grants: int = 0
    version: int = 0
    applied: int = 0
    rejected: int = 0
    sent_bytes: deque[int] = field(default_factory=deque)
    pending_bytes: int = 0
    frames: Meter = field(default_factory=Meter)
    published: Meter = field(default_factory=Meter)
    deaths: deque[float] = field(default_factory=deque)
    outbox: deque[Message] = field(default_factory=lambda: deque(maxlen=64))
    credit_warned: bool = False
    silence_reported: bool = False

    @property
    def name(self) -> str:
        """For logs: the source and the first digits of the resume token, never the secret id."""
        return f"{self.request.source or 'source'}/{self.resume.hex()[:8]}"

    @property
    def ending(self) -> bool:
        return self.state in (State.STOPPING, State.FAILED)

    @property
    def step(self) -> int:
        """Training step last heard of."""
        return self.progress.step if self.progress else 0

    def taken_in(self, frames: int) -> None:
        """The job has taken frames in: they no longer wait in memory."""
        for _ in range(min(frames, len(self.sent_bytes))):
            self.pending_bytes -= self.sent_bytes.popleft()

    def snapshot(self) -> dict[str, Any]:
        """Figures for people and displays; a copy, safe to hand to another thread."""
        progress = self.progress
        rate, byte_rate = self.frames.rates()
        return {
            "name": self.name,
            "host": self.host,
            "state": self.state.value,
            "job_pid": self.job.pid if self.job else 0,
            "training": progress.state if progress else "",
            "step": self.step,
            "samples_per_s": progress.samples_per_s if progress else 0.0,
            "held_out": dict(progress.held_out) if progress else {},
            "family": progress.family if progress else "",
            "version": self.version,
            "frames": self.frames.frames,
            "frames_per_s": rate,
            "bytes_per_s": byte_rate,
            "dropped": self.frames.dropped,
            "rows": progress.rows if progress else 0,
        }
