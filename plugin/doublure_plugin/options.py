"""What a session was asked for, the bounds it keeps, and what it tells its sender thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .capture import FrameReader
from .digest import Source
from .ring import Ring

__all__ = ["Options", "SourceCommand", "StopCommand", "Timing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Bounds of the conversation, seconds. The defaults are the protocol's.

    Attributes:
        lost: Silence after which the trainer counts as lost.
        ready: For a spawned trainer to say that it listens.
        greet: For Welcome to come before the connection is made anew.
        open: For SessionOpened to come.
        stop: For Stopped to come before the connection is dropped anyway.
        end: For a spawned trainer to leave before it is killed.
        respawn: First pause before a trainer that died is started again; doubles up to 5 s.
        starved: Without credit for this long, one frame is sent to ask for more.
    """

    lost: float = 2.0
    ready: float = 30.0
    greet: float = 5.0
    open: float = 60.0
    stop: float = 2.0
    end: float = 0.5
    respawn: float = 0.2
    starved: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a session was asked for, checked."""

    endpoint: str | None
    host: str
    model: str
    config: Mapping[str, Any]
    low: float
    high: float
    python: str | None
    directory: Path | None
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True, slots=True)
class StopCommand:
    """The host wants the end; `since` is `time.monotonic()` of the call."""

    reason: str
    since: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class SourceCommand:
    """The source is another one from here on, with a ring of its own so that nothing mixes."""

    source: Source
    ring: Ring
    reader: FrameReader
    reason: str
