"""Offline: a captured dataset, and a training of it that runs in a process of its own."""

from .capture import OfflineHost, capture_dataset
from .job import TrainingError, TrainingJob, TrainingStatus, train_async

__all__ = [
    "OfflineHost",
    "TrainingError",
    "TrainingJob",
    "TrainingStatus",
    "capture_dataset",
    "train_async",
]
