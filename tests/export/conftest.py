from __future__ import annotations

from collections.abc import Iterator

import pytest

from .runners import GL


@pytest.fixture(scope="session")
def gl() -> Iterator[GL]:
    context = GL()
    yield context
    context.close()
