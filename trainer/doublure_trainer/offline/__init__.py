"""Offline training: a captured dataset in, a model directory with a report out."""

from .errors import OfflineError, StoppedError
from .train import OfflineProgress, train_offline

__all__ = ["OfflineError", "OfflineProgress", "StoppedError", "train_offline"]
