"""The compiled loops are ready before the first test, so that bits do not depend on the clock."""

from __future__ import annotations

import pytest
from doublure_trainer import fused


@pytest.fixture(scope="session", autouse=True)
def compiled_loops() -> None:
    assert fused.prepare()
