"""Every message of the protocol, one frozen dataclass each.

Rules that keep old and new peers talking: a field is only ever added at the end, with a default; no
field is reordered, retyped or removed; a tag is never reused. `tests/bridge/golden/` holds the
bytes of every message for every protocol version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from .kinds import Array, Blob, Flag, Kind, Payload, Plain, Real, Text, UInt

__all__ = [
    "MESSAGES",
    "PROTOCOL_OLDEST",
    "PROTOCOL_VERSION",
    "Credit",
    "Delivery",
    "Direction",
    "Error",
    "Frame",
    "Heartbeat",
    "Hello",
    "Message",
    "OpenSession",
    "Progress",
    "Rows",
    "SessionOpened",
    "SourceChanged",
    "Stop",
    "Stopped",
    "Weights",
    "WeightsApplied",
    "WeightsRejected",
    "Welcome",
]

PROTOCOL_VERSION = 1
"""The version this side speaks."""

PROTOCOL_OLDEST = 1
"""The oldest version this side still understands."""

MAX_ROWS_BYTES = 8 << 20
MAX_FRAME_BYTES = 256 << 20
MAX_WEIGHTS_BYTES = 72 << 20


class Direction(Enum):
    """Who sends a message."""

    TO_TRAINER = "host → trainer"
    TO_HOST = "trainer → host"
    BOTH = "both ways"


class Delivery(Enum):
    """What happens when the other side is slow."""

    RELIABLE = "reliable"
    """Queued; order kept; never dropped while the connection lives."""
    LATEST = "latest"
    """May be dropped in favour of a newer one of its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages; `MESSAGES` maps tags to classes."""

    tag: ClassVar[int]
    direction: ClassVar[Direction]
    delivery: ClassVar[Delivery]
    kinds: ClassVar[dict[str, Kind]]
    required: ClassVar[int]


MESSAGES: dict[int, type[Message]] = {}

_M = TypeVar("_M", bound=type[Message])


def _message(tag: int, direction: Direction, delivery: Delivery) -> Callable[[_M], _M]:
    """Register a message class: its tag, its policy, and the kind of every field in wire order."""

    def register(cls: _M) -> _M:
        hints = get_type_hints(cls, include_extras=True)
        cls.tag, cls.direction, cls.delivery = tag, direction, delivery
        cls.kinds = {f.name: hints[f.name].__metadata__[0] for f in fields(cls)}
        defaults = [f.default is MISSING and f.default_factory is MISSING for f in fields(cls)]
        cls.required = sum(defaults)
        assert defaults == sorted(defaults, reverse=True), f"{cls.__name__}: defaults come last"
        assert tag not in MESSAGES, f"tag {tag} is taken"
        MESSAGES[tag] = cls
        return cls

    return register


_SESSION = "The session, as `SessionOpened` named it."
Digest = Annotated[bytes, Blob("SHA-256 of the source's shaders and fixed state.", lengths=(32,))]
Session = Annotated[bytes, Blob(_SESSION, lengths=(16,))]


@_message(1, Direction.TO_TRAINER, Delivery.RELIABLE)
@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """First message of a connection: who the host is and which protocol it speaks."""

    protocol: Annotated[int, UInt("Newest protocol version the host speaks.", limit=65535)]
    oldest: Annotated[int, UInt("Oldest protocol version the host understands.", limit=65535)]
    software: Annotated[str, Text("Name and version, for people: `doublure 0.1.0`.", limit=128)]
    host: Annotated[str, Text("The engine, for people: `wgpu`, `blender 4.2`.", limit=128)]
    pid: Annotated[int, UInt("Process id of the host on its own machine.")]
    token: Annotated[bytes, Blob("Secret of a locally spawned trainer, or empty.", lengths=(0, 32))]
    capabilities: Annotated[list[str], Plain("Optional features the host has.", shape=list)] = (
        field(default_factory=list)
    )


@_message(2, Direction.TO_HOST, Delivery.RELIABLE)
@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """Answer to `Hello`: the trainer is a doublure trainer and takes this host."""

    protocol: Annotated[int, UInt("Version both sides use from here on.", limit=65535)]
    software: Annotated[str, Text("Name and version, for people.", limit=128)]
    server: Annotated[bytes, Blob("This run of the server; changes at a restart.", lengths=(16,))]
    pid: Annotated[int, UInt("Process id of the server on its own machine.")]
    heartbeat_ms: Annotated[int, UInt("How often either side sends a heartbeat.", limit=60_000)]
    capabilities: Annotated[list[str], Plain("Optional features the trainer has.", shape=list)] = (
        field(default_factory=list)
    )


@_message(3, Direction.TO_TRAINER, Delivery.RELIABLE)
@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession(Message):
    """Ask for a training job for one source."""

    digest: Digest
    source: Annotated[str, Text("The source's name, for people and directory listings.", limit=128)]
    width: Annotated[int, UInt("Width of the source, pixels.", limit=65536)]
    height: Annotated[int, UInt("Height of the source, pixels.", limit=65536)]
    parameter_low: Annotated[float, Real("Value of the parameter that t = -1 stands for.")]
    parameter_high: Annotated[float, Real("Value of the parameter that t = 1 stands for.")]
    model: Annotated[str, Text("Model family wanted, or `auto` to race them.", limit=32)] = "auto"
    config: Annotated[dict[str, Any], Plain("Training options; unknown keys are refused.")] = field(
        default_factory=dict
    )
    resume: Annotated[
        bytes, Blob("Resume token of an earlier session, or empty.", lengths=(0, 16))
    ] = b""


@_message(4, Direction.TO_HOST, Delivery.RELIABLE)
@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened(Message):
    """The job exists; rows may flow."""

    session: Annotated[
        bytes, Blob("The session's secret name: whoever has it may send to it.", lengths=(16,))
    ]
    resume: Annotated[bytes, Blob("Token that resumes this session after a break.", lengths=(16,))]
    credit: Annotated[int, UInt("Frames the host may send before it needs `Credit`.", limit=4096)]
    step: Annotated[int, UInt("Training step the job starts from; 0 unless resumed.")]
    models: Annotated[
        list[Any],
        Plain("Specifications of all models that may be published, to prepare for.", shape=list),
    ]
    held_out: Annotated[
        list[Any], Plain("Held-out slices as [low, high] in normalised t.", shape=list)
    ]
    test: Annotated[list[Any], Plain("Test slices as [low, high] in normalised t.", shape=list)]
    job_pid: Annotated[int, UInt("Process id of the job on the trainer's machine.")]


@_message(5, Direction.TO_TRAINER, Delivery.LATEST)
@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Message):
    """Sampled pixels of one captured frame. Sent on the frames channel; costs one credit."""

    session: Session
    sequence: Annotated[int, UInt("Number of the capture, rising by one; gaps were dropped.")]
    t: Annotated[float, Real("Normalised parameter of the frame, in [-1, 1].")]
    rows: Annotated[
        NDArray[np.float32],
        Array(
            "x, y, t in [-1, 1], then linear r, g, b, unclamped.",
            dtypes=("<f4",),
            shape=(None, 6),
            limit=MAX_ROWS_BYTES,
        ),
    ]
    age_us: Annotated[int, UInt("From capture to sending, µs on the host's clock.")] = 0


@_message(6, Direction.TO_TRAINER, Delivery.LATEST)
@dataclass(frozen=True, slots=True, kw_only=True)
class Frame(Message):
    """A whole captured image. Sent on the frames channel; costs one credit."""

    session: Session
    sequence: Annotated[int, UInt("Number of the capture, rising by one; gaps were dropped.")]
    t: Annotated[float, Real("Normalised parameter of the frame, in [-1, 1].")]
    color: Annotated[str, Text("Encoding of the values; only `linear`.", limit=16)]
    origin: Annotated[str, Text("Where row 0 is: `top-left` or `bottom-left`.", limit=16)]
    pixels: Annotated[
        NDArray[np.floating[Any]],
        Array(
            "Linear colour, unclamped; alpha, if there, is 1.",
            dtypes=("<f2", "<f4"),
            shape=(None, None, (3, 4)),
            limit=MAX_FRAME_BYTES,
        ),
    ]
    checksum: Annotated[int, UInt("CRC-32 (zlib) of the pixels' bytes.", limit=2**32 - 1)]
    age_us: Annotated[int, UInt("From capture to sending, µs on the host's clock.")] = 0


@_message(7, Direction.TO_HOST, Delivery.RELIABLE)
@dataclass(frozen=True, slots=True, kw_only=True)
class Credit(Message):
    """The job has taken frames in; the host may send as many more."""

    session: Session
    frames: Annotated[int, UInt("Frames granted on top of what is left.", limit=4096)]


@_message(8, Direction.TO_HOST, Delivery.LATEST)
@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Message):
    """Where training stands."""

    session: Session
    state: Annotated[str, Text("`waiting`, `racing` or `training`.", limit=32)]
    step: Annotated[int, UInt("Optimiser steps taken.")]
    seconds: Annotated[float, Real("Time spent training, s; waiting does not count.")]
    samples: Annotated[int, UInt("Rows trained on, repeats counted.")]
    samples_per_s: Annotated[float, Real("Rows trained on per second of training.")]
    loss: Annotated[float, Real("Running mean of the training loss.")]
    family: Annotated[str, Text("Family of the leading model.", limit=32)]
    version: Annotated[int, UInt("Version last published; 0 for none.")]
    held_out: Annotated[
        dict[str, Any], Plain("Published weights on held-out slices: psnr_db, relmse, peak_ratio.")
    ]
    test: Annotated[dict[str, Any], Plain("The same on test slices, which nothing is selected on.")]
    rows: Annotated[int, UInt("Rows received from the host.")]
    coverage: Annotated[float, Real("Share of the training slices that hold data, 0..1.")]
    detail: Annotated[dict[str, Any], Plain("Further figures, for people and plots.")] = field(
        default_factory=dict
    )


@_message(9, Direction.TO_HOST, Delivery.LATEST)
@dataclass(frozen=True, slots=True, kw_only=True)
class Weights(Message):
    """A candidate that passed the held-out gate."""

    session: Session
    version: Annotated[int, UInt("Rises by one with each publication of a source.")]
    step: Annotated[int, UInt("Training step the weights were taken at.")]
    digest: Annotated[bytes, Blob("SHA-256 of `tensors`.", lengths=(32,))]
    model: Annotated[dict[str, Any], Plain("The model's specification.")]
    scores: Annotated[dict[str, Any], Plain("Held-out scores: psnr_db, relmse, peak_ratio.")]
    tensors: Annotated[
        bytes,
        Payload("A safetensors file with the specification's tensors.", limit=MAX_WEIGHTS_BYTES),
    ]
    probe_points: Annotated[
        NDArray[np.float32],
        Array(
            "Golden probes: x, y, t in [-1, 1].", dtypes=("<f4",), shape=(None, 3), limit=1 << 16
        ),
    ]
    probe_colors: Annotated[
        NDArray[np.float32],
        Array(
            "What the weights give there: linear r, g, b.",
            dtypes=("<f4",),
            shape=(None, 3),
            limit=1 << 16,
        ),
    ]
    seconds: Annotated[float, Real("Time spent training when the weights were taken, s.")] = 0.0


@_message(10, Direction.TO_TRAINER, Delivery.RELIABLE)
@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsApplied(Message):
    """The host draws with these weights now."""

    session: Session
    version: Annotated[int, UInt("Version applied.")]
    frame: Annotated[int, UInt("Captures so far, when they were applied.")]
    delay_us: Annotated[int, UInt("From arrival in the host to application, µs.")]


@_message(11, Direction.TO_TRAINER, Delivery.RELIABLE)
@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRejected(Message):
    """The host refuses these weights and keeps the last good ones."""

    session: Session
    version: Annotated[int, UInt("Version refused.")]
    reason: Annotated[str, Text("What was wrong: digest, shape, non-finite, probes, …", limit=2048)]


@_message(12, Direction.TO_TRAINER, Delivery.RELIABLE)
@dataclass(frozen=True, slots=True, kw_only=True)
class SourceChanged(Message):
    """The source is another one now: this session ends; the host opens a new one."""

    session: Session
    digest: Annotated[bytes, Blob("Digest of the new source.", lengths=(32,))]
    reason: Annotated[str, Text("What changed, for people.", limit=1024)]


@_message(13, Direction.TO_TRAINER, Delivery.RELIABLE)
@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Message):
    """The scene's Stop: end the job now and free all it holds."""

    session: Session
    reason: Annotated[str, Text("Why, for people and logs.", limit=1024)]


@_message(14, Direction.TO_HOST, Delivery.RELIABLE)
@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(Message):
    """The job's process is gone. Nothing more follows for this session."""

    session: Session
    reason: Annotated[str, Text("Why it ended: `stop`, `source changed`, `drained`, …", limit=1024)]
    step: Annotated[int, UInt("Training step it had reached.")]


@_message(15, Direction.BOTH, Delivery.RELIABLE)
@dataclass(frozen=True, slots=True, kw_only=True)
class Error(Message):
    """Something was refused or failed."""

    session: Annotated[bytes, Blob("The session it concerns, or empty.", lengths=(0, 16))]
    code: Annotated[str, Text("Stable name for programs; listed in `docs/protocol.md`.", limit=64)]
    what: Annotated[str, Text("What failed.", limit=2048)]
    expected: Annotated[str, Text("What would have been right.", limit=2048)] = ""
    got: Annotated[str, Text("What was there instead.", limit=2048)] = ""
    next_step: Annotated[str, Text("What to do about it.", limit=2048)] = ""
    detail: Annotated[str, Text("Traceback or log tail.", limit=16384)] = ""
    fatal: Annotated[bool, Flag("Whether the session (or connection) has ended.")] = True


@_message(16, Direction.BOTH, Delivery.LATEST)
@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Message):
    """Proof of life. One with `reply` false is answered at once, with `reply` true."""

    session: Annotated[
        bytes, Blob("The sender's session, or empty before there is one.", lengths=(0, 16))
    ]
    sequence: Annotated[int, UInt("Rises by one; the reply repeats it.")]
    reply: Annotated[bool, Flag("Whether this answers a heartbeat.")]
