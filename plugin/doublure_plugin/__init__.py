"""The part of doublure that lives inside a host engine. Never imports torch.

import doublure_plugin as doublure

with doublure.Session(source, parameter=(0.0, 10.0)) as session:
    while host.running:
        pixels = host.draw(t)
        session.capture(pixels, t)
        if (weights := session.poll()) is not None:
            standin.upload(weights)
            session.applied(weights)
"""

from .digest import Source, source_digest
from .errors import (
    CaptureError,
    NondeterministicSourceError,
    PluginError,
    SessionError,
    SourceError,
    SpawnError,
    TrainerError,
    WeightsError,
)
from .evaluate import Evaluator
from .offline import (
    OfflineHost,
    TrainingError,
    TrainingJob,
    TrainingStatus,
    capture_dataset,
    train_async,
)
from .options import Timing
from .probe import probe_determinism
from .session import Session
from .stats import Notice, SessionStats
from .weights import PROBE_TOLERANCE, Weights

__all__ = [
    "PROBE_TOLERANCE",
    "CaptureError",
    "Evaluator",
    "NondeterministicSourceError",
    "Notice",
    "OfflineHost",
    "PluginError",
    "Session",
    "SessionError",
    "SessionStats",
    "Source",
    "SourceError",
    "SpawnError",
    "Timing",
    "TrainerError",
    "TrainingError",
    "TrainingJob",
    "TrainingStatus",
    "Weights",
    "WeightsError",
    "capture_dataset",
    "probe_determinism",
    "source_digest",
    "train_async",
]
