"""What the compiled backend keeps between calls, and what it does when threads cannot be had."""

import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from doublure_kernels.cpu import CpuBackend, prepare
from doublure_kernels.scene import Raster, Scene

from . import scenes

RASTER = Raster(70, 67)


def make(batch: int = 1) -> Scene:
    scene = scenes.make("small", batch=batch, triangles=12)
    arrays = (scene.params, scene.sigma, scene.background)
    return Scene(*(np.array(a, np.float32) for a in arrays), counts=scene.counts)


def helpers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "doublure-raster"]


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_no_layout_compiles_the_loops_again() -> None:
    prepare("float32")
    from doublure_kernels import cpu_loops

    compiled = list(cpu_loops.take_part.signatures)
    scene = make(3)
    read_only = [a.copy() for a in (scene.params, scene.sigma, scene.background, scene.counts)]
    for array in read_only:
        array.flags.writeable = False
    raw = bytearray(scene.params.nbytes + 1)
    odd = np.frombuffer(raw, np.float32, scene.params.size, 1).reshape(scene.params.shape)
    odd[:] = scene.params
    wide = np.repeat(scene.sigma, 2, axis=1)[:, ::2]
    alike = np.broadcast_to(scene.sigma[:, :1], scene.sigma.shape)
    given = np.zeros((3, 70, 67, 3), np.float32)
    given.flags.writeable = False
    with CpuBackend(2) as backend:
        expected = backend.forward(scene, RASTER).tobytes()
        assert backend.forward(Scene(*read_only), RASTER).tobytes() == expected
        for params, sigma in ((odd, scene.sigma), (scene.params, wide), (scene.params, alike)):
            other = Scene(params, sigma, scene.background, scene.counts)
            found = backend.forward(other, RASTER).tobytes()
            assert sigma is alike or found == expected
            backend.fused_mse(other, RASTER, given)
    assert list(cpu_loops.take_part.signatures) == compiled


def test_a_call_that_is_over_keeps_no_arrays() -> None:
    with CpuBackend(2) as backend:
        image = backend.forward(make(), RASTER)
        kept = weakref.ref(image)
        del image
        assert eventually(lambda: kept() is None)


def test_threads_that_cannot_be_started_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with CpuBackend(1) as alone:
        expected = alone.forward(make(), RASTER).tobytes()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with CpuBackend(3) as backend:
        assert backend.forward(make(), RASTER).tobytes() == expected


def test_a_call_that_began_before_close_starts_no_threads_after_it() -> None:
    before = helpers()
    backend = CpuBackend(2)
    scene = make()
    expected = backend.forward(scene, RASTER).tobytes()
    crew = backend._crew
    lead = crew.lead

    def closing(work: Callable[[int], None], units: int) -> None:
        backend.close()
        lead(work, units)

    crew.lead = closing  # type: ignore[method-assign]
    assert backend.forward(scene, RASTER).tobytes() == expected
    assert helpers() == before


def test_a_helper_without_memory_leaves_the_work_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, main = make(), threading.current_thread()
    with CpuBackend(2) as backend:
        expected = backend.forward(scene, RASTER).tobytes()
        real, failed = backend._scratch, threading.Event()

        def scarce(dtype: np.dtype) -> object:
            if threading.current_thread() is main:
                backend._crew.bell[0] = backend._crew._calls  # so that the helper comes first
                failed.wait(10)
                return real(dtype)
            failed.set()
            raise MemoryError

        monkeypatch.setattr(backend, "_scratch", scarce)
        assert backend.forward(scene, RASTER).tobytes() == expected
        assert failed.is_set()
        monkeypatch.undo()
        assert all(t.is_alive() for t in backend._crew._threads)
        assert backend.forward(scene, RASTER).tobytes() == expected
