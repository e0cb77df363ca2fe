"""The backends that are held to the reference: one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from doublure_kernels import cpu
from doublure_kernels.backend import Backend
from doublure_kernels.cpu import CpuBackend
from doublure_kernels.errors import DeviceError
from doublure_kernels.scene import Scene

from . import scenes


@dataclass(frozen=True)
class Subject:
    """A backend in one dtype, and how far it may be from the truth.

    Attributes:
        image: Absolute, for colours up to 1.
        gradient: Relative.
        deep: Of a single triangle among ten thousand faint ones, relative to its own.
    """

    open: Callable[[], Backend]
    dtype: Any
    image: float
    gradient: float
    deep: float = 1e-4

    def cast(self, scene: Scene) -> Scene:
        return scenes.cast(scene, self.dtype)


def open_cuda() -> Backend:
    from doublure_kernels.gpu.cuda.backend import CudaBackend, OnHost

    return OnHost(CudaBackend())


def open_vulkan() -> Backend:
    from doublure_kernels.gpu.vulkan.backend import VulkanBackend

    return VulkanBackend()


def vulkan_is_there() -> bool:
    """A device that can run the kernels; lavapipe is one."""
    try:
        open_vulkan().close()
    except (ImportError, OSError, DeviceError):
        return False
    return True


SUBJECTS = {
    "cpu-float32": Subject(lambda: CpuBackend(2), np.float32, 1e-6, 1e-5),
    "cpu-float64": Subject(lambda: CpuBackend(2), np.float64, 1e-10, 1e-8),
}
if vulkan_is_there():
    SUBJECTS["vulkan-float32"] = Subject(open_vulkan, np.float32, 1e-6, 1e-5, 2e-4)
if torch.cuda.is_available():
    SUBJECTS["cuda-float32"] = Subject(open_cuda, np.float32, 1e-6, 1e-5, 3e-4)


@pytest.fixture(autouse=True)
def every_helper_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenes in tests are too small to be worth a second thread, which is tested all the same."""
    monkeypatch.setattr(cpu, "_WORTH_US", 1e-6)


@pytest.fixture(scope="session", params=sorted(SUBJECTS))
def subject(request: pytest.FixtureRequest) -> Subject:
    return SUBJECTS[request.param]


@pytest.fixture(scope="session")
def backend(subject: Subject) -> Iterator[Backend]:
    """The subject's backend, opened once."""
    opened = subject.open()
    yield opened
    opened.close()
