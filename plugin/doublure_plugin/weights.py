"""Received weights: validated on the sender thread before anything may draw with them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from doublure_bridge import (
    BridgeError,
    ModelSpec,
    model_spec_from_dict,
    tensors_digest,
    unpack_tensors,
)
from doublure_bridge import Weights as WeightsMessage
from numpy.typing import NDArray

from .errors import WeightsError
from .evaluate import Evaluator

__all__ = ["HOLD_BACK_S", "PROBE_TOLERANCE", "Intake", "Weights", "validate_weights"]

HOLD_BACK_S: Final = 20.0
"""How long after a re-open weights that score below those in use are held back, s.

A trainer that starts over, or from an older checkpoint, publishes its first weights early, far
below what a longer training had reached. Its held-out rows are others than before, though, so the
two scores are only roughly comparable, and a floor that stayed could block a good model for ever.
"""

PROBE_TOLERANCE = 5e-4
"""Accepted |difference| at a golden probe, times 1 + |colour|.

Both sides evaluate in float32, and colour = expm1(o) turns an error e in o into e (1 + |colour|).
Between this evaluator and torch on a CPU it measured 8e-7 at most on trained grid models; other
summation orders through wide sine layers, and a GPU's sine, may cost a hundred times that. A wrong
layout, a swapped axis or a shift by half a texel costs 1e-2 and more.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Validated weights, ready to upload. Compared by identity; the arrays are read-only.

    Attributes:
        version: Rises with each publication of a source.
        step: Training step they were taken at.
        spec: The model they belong to.
        tensors: Every tensor of `spec` by name, in its order.
        scores: Held-out scores: psnr_db, relmse, peak_ratio.
        seconds: Time spent training when they were taken, s.
        digest: SHA-256 of the safetensors file they came in, 32 bytes.
        source: Digest of the source they were learned from, 32 bytes.
        probes: Golden probes: points x, y, t and the colours they give, float32 [n, 3] each, for a
            host's test of its own device.
        arrived: `time.monotonic()` when they came in from the trainer.
        evaluator: Evaluates them in NumPy: float32 points [n, 3] to linear RGB [n, 3].
    """

    version: int
    step: int
    spec: ModelSpec
    tensors: Mapping[str, NDArray[np.floating[Any]]]
    scores: Mapping[str, Any]
    seconds: float
    digest: bytes
    source: bytes
    probes: tuple[NDArray[np.float32], NDArray[np.float32]]
    arrived: float = field(default_factory=time.monotonic)
    evaluator: Evaluator | None = field(default=None, repr=False)


class Intake:
    """What has come in for the session that is open.

    Sender thread, except that the host's thread reads `ready` and writes `in_use`.
    """

    def __init__(self) -> None:
        self.ready: Weights | None = None
        """Newest validated weights. One reference, assigned last: the host sees all or nothing."""
        self.in_use: Weights | None = None
        """What the host was handed last, or went back to; None while it draws its source."""
        self.rejected = 0
        self.held_back = 0
        self._version = 0
        self._digest = b""
        self._returned = False
        self._hold_until = -math.inf
        self._held: Weights | None = None

    def reopen(self, *, resumed: bool, now: float) -> None:
        """A session was opened, the first or a later one; what is ready stays so.

        Args:
            resumed: Whether the job goes on counting versions; one that starts over counts from 1.
            now: `time.monotonic()`.
        """
        if not resumed:
            self._version, self._digest = 0, b""
        self._returned = resumed
        self._hold_until = now + HOLD_BACK_S
        self._held = None

    def forget(self) -> None:
        """Another source: nothing that came so far may be drawn with."""
        self._version, self._digest = 0, b""
        self._returned = False
        self._hold_until = -math.inf
        self._held = None
        self.ready = None

    def release(self, now: float) -> Weights | None:
        """Make ready what is held back once its time is over; returns it then."""
        if self._held is None or now < self._hold_until:
            return None
        self.ready, self._held = self._held, None
        return self.ready

    def has(self, message: WeightsMessage) -> bool:
        """Whether these are the very weights validated last."""
        return message.version == self._version and message.digest == self._digest

    def again(self, message: WeightsMessage) -> str | None:
        """Whether a resumed job repeats a version the host is past, in words; else None.

        It goes on from its last checkpoint, which may be older than what it had published.
        """
        if not self._returned or message.version > self._version:
            return None
        newer = "" if message.version == self._version else f"version {self._version} is "
        return (
            f"weights {message.version} came again after the trainer's return; "
            f"{newer}already in use"
        )

    def take(
        self, message: WeightsMessage, *, session: bytes, source: bytes, arrived: float
    ) -> str | None:
        """Validate and make ready, or hold back; the reason when they are refused or held back.

        `rejected` counts the refused, `held_back` the held back.
        """
        if self.has(message):
            # Sent again over a new connection.
            return None
        try:
            weights = validate_weights(
                message, session=session, newest=self._version, source=source, arrived=arrived
            )
        except Exception as error:
            # Whatever goes wrong in judging weights is a verdict on the weights.
            self.rejected += 1
            return str(error)
        self._version, self._digest = weights.version, weights.digest
        self._returned = False
        worse = self._worse(weights)
        if worse is not None:
            self._held = weights
            self.held_back += 1
            return worse
        # From here on the trainer's own gate compares, on equal rows.
        self._hold_until, self._held = -math.inf, None
        self.ready = weights
        return None

    def _worse(self, weights: Weights) -> str | None:
        """Why these weights are to wait, shortly after a re-open; None when they need not."""
        used = self.in_use
        if weights.arrived >= self._hold_until or used is None or used.source != weights.source:
            return None
        ours, theirs = _psnr(weights), _psnr(used)
        # False for scores that are missing: those cannot be compared.
        if not ours < theirs:
            return None
        return (
            f"worse than the weights in use: {ours:.1f} dB against {theirs:.1f} dB; "
            f"held back for up to {HOLD_BACK_S:g} s after a restart"
        )


def _psnr(weights: Weights) -> float:
    value = weights.scores.get("psnr_db")
    return float(value) if isinstance(value, int | float) else math.nan


def validate_weights(
    message: WeightsMessage, *, session: bytes, newest: int, source: bytes, arrived: float
) -> Weights:
    """Check everything about received weights, cheapest first.

    Args:
        message: As decoded.
        session: The session that is open.
        newest: Version last validated; 0 for none.
        source: Digest of the source being learned.
        arrived: `time.monotonic()` of arrival.
    Raises:
        WeightsError: The first thing that is wrong: session, version, digest, model, tensors,
            non-finite values, probes.
    """
    name = f"weights {message.version}"
    if message.session != session:
        raise WeightsError(f"{name} session", expected="the open session", got="another one")
    if message.version <= newest:
        raise WeightsError(f"{name} version", expected=f"newer than {newest}", got=message.version)
    digest = tensors_digest(message.tensors)
    if digest != message.digest:
        raise WeightsError(
            f"{name} digest", expected=message.digest.hex()[:16], got=digest.hex()[:16],
            next_step="the tensors were damaged on the way",
        )  # fmt: skip
    try:
        spec = model_spec_from_dict(message.model)
        tensors = unpack_tensors(message.tensors, spec)
    except BridgeError as error:
        raise WeightsError(
            f"{name} {error.what}", expected=error.expected, got=error.got,
            next_step=error.next_step,
        ) from None  # fmt: skip
    for key, tensor in tensors.items():
        finite = np.isfinite(tensor)
        if not finite.all():
            place = tuple(int(i) for i in np.argwhere(~finite)[0])
            raise WeightsError(
                f"{name} tensor {key}", expected="finite values", got=f"{tensor[place]} at {place}"
            )
    evaluator = Evaluator(spec, tensors)
    _check_probes(name, evaluator, message.probe_points, message.probe_colors)
    return Weights(
        version=message.version,
        step=message.step,
        spec=spec,
        tensors=tensors,
        scores=message.scores,
        seconds=message.seconds,
        digest=digest,
        source=source,
        probes=(message.probe_points, message.probe_colors),
        arrived=arrived,
        evaluator=evaluator,
    )


def _check_probes(
    name: str,
    evaluator: Evaluator,
    points: NDArray[np.float32],
    colours: NDArray[np.float32],
) -> None:
    if len(points) == 0 or len(points) != len(colours):
        raise WeightsError(
            f"{name} probes", expected="as many colours as points, and at least one",
            got=f"{len(points)} points, {len(colours)} colours",
        )  # fmt: skip
    if not (np.isfinite(points).all() and np.isfinite(colours).all()):
        raise WeightsError(f"{name} probes", expected="finite values", got="others")
    # Weights that overflow are refused below; they need not warn first.
    with np.errstate(all="ignore"):
        drawn = evaluator(points)
    excess = np.abs(drawn - colours) / (1.0 + np.abs(colours))
    # `not <=` so that a NaN from the evaluator fails too.
    bad = ~(excess <= PROBE_TOLERANCE)
    if bad.any():
        probe, channel = np.unravel_index(
            int(np.argmax(np.where(np.isnan(excess), np.inf, excess))), excess.shape
        )
        raise WeightsError(
            f"{name} probes",
            expected=f"{colours[probe, channel]:.6g} in {'rgb'[int(channel)]} at "
            f"(x, y, t) = ({', '.join(f'{v:.4f}' for v in points[probe])})",
            got=f"{drawn[probe, channel]:.6g}; {int(bad.any(axis=1).sum())} of {len(bad)} differ",
            next_step="the trainer and this plugin read the model differently; update both",
        )
