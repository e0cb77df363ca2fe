"""One dataset and one finished training for all tests that only look."""

from __future__ import annotations

from pathlib import Path

import pytest
from doublure_trainer.offline import train_offline

from .data import small, write_dataset

STEPS = 240


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("offline") / "spot")


@pytest.fixture(scope="session")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory after `STEPS` uninterrupted steps."""
    out = tmp_path_factory.mktemp("offline") / "model"
    assert train_offline(dataset, out, steps=STEPS, config=small()) == out
    return out
