from __future__ import annotations

import pytest
from doublure_plugin.hosts import HostError


@pytest.fixture(scope="session")
def adapter() -> str:
    """Name of the wgpu adapter; skips, saying why, where there is none."""
    from doublure_plugin.hosts.gpu import Gpu

    try:
        gpu = Gpu()
    except HostError as error:
        pytest.skip(f"no wgpu adapter: {error}")
    gpu.close()
    return gpu.description
