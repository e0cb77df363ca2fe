"""Offline: a captured dataset, and a training of it that runs in a process of its own."""

from .capture import OfflineHost, capture_dataset

__all__ = ["OfflineHost", "capture_dataset"]
