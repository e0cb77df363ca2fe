"""Received weights: validated on the sender thread before anything may draw with them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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

__all__ = ["PROBE_TOLERANCE", "Intake", "Weights", "validate_weights"]

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
    """What has come in for the session that is open. Sender thread; `ready` is for the host's."""

    def __init__(self) -> None:
        self.ready: Weights | None = None
        """Newest validated weights. One reference, assigned last: the host sees all or nothing."""
        self.rejected = 0
        self._version = 0
        self._digest = b""

    def restart(self) -> None:
        """A job that starts over counts its versions from one; what is ready stays so."""
        self._version, self._digest = 0, b""

    def forget(self) -> None:
        """Another source: nothing that came so far may be drawn with."""
        self.restart()
        self.ready = None

    def take(
        self, message: WeightsMessage, *, session: bytes, source: bytes, arrived: float
    ) -> str | None:
        """Validate and make ready; the reason when they are refused."""
        if message.version == self._version and message.digest == self._digest:
            # A resumed job publishes again what this host already has.
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
        self.ready = weights
        return None


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
