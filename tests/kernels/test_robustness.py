"""Backends keep their promises whatever is drawn, from wherever, however often."""

import multiprocessing
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from doublure_kernels.backend import Backend
from doublure_kernels.cpu import CpuBackend
from doublure_kernels.scene import Raster, Scene

from . import scenes
from .conftest import Subject

RASTER = Raster(33, 21)


def arrays(scene: Scene) -> list[np.ndarray]:
    return [scene.params, scene.sigma, scene.background, scene.counts]


def everything(backend: Backend, scene: Scene, raster: Raster) -> list[np.ndarray]:
    """All that a backend says of a scene."""
    images = backend.forward(scene, raster)
    given = np.cos(np.arange(images.size, dtype=images.dtype)).reshape(images.shape)
    back = backend.backward(scene, raster, given)
    losses, fused = backend.fused_mse(scene, raster, given)
    grads = [getattr(g, n) for g in (back, fused) for n in ("params", "sigma", "background")]
    return [images, losses, *grads]


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True))


def wild(rng: np.random.Generator, batch: int, triangles: int) -> Scene:
    """Finite, and else anything: of any size, vertices in one point, in line, on centres."""
    params = rng.normal(0.5, 0.5, (batch, triangles, 10))
    v = params[..., :6].reshape(batch, triangles, 3, 2)
    kind = rng.integers(0, 8, (batch, triangles))
    v[kind == 0, 1:] = v[kind == 0, :1]
    v[kind == 1, 1] = v[kind == 1, 0]
    v[kind == 2, 2] = (v[kind == 2, 0] + v[kind == 2, 1]) / 2
    v[kind == 3] = np.round(v[kind == 3] * 8) / 8 + 1 / 16  # the centres of 8 x 8 pixels
    far = kind == 4
    v[far] *= 10.0 ** rng.uniform(0, 37, (far.sum(), 1, 1))
    near = kind == 5
    v[near, 1:] = v[near, :1] + 10.0 ** rng.uniform(-45, -2, (near.sum(), 1, 1))
    params[..., 6:9] *= 10.0 ** rng.uniform(-3, 3, (batch, triangles, 1))
    params[..., 9] = np.where(rng.random((batch, triangles)) < 0.2, 1.0, params[..., 9])
    sigma = 10.0 ** rng.uniform(-5, 1, (batch, triangles))
    counts = rng.integers(0, triangles + 1, batch)
    return Scene(params, sigma, rng.normal(size=(batch, 3)), counts)


@pytest.mark.parametrize("seed", range(10))
def test_finite_scenes_have_finite_results(backend: Backend, subject: Subject, seed: int) -> None:
    """Ten thousand scenes each; all seeds together, a hundred thousand for each dtype."""
    rng = np.random.default_rng(seed)
    scene = subject.cast(wild(rng, 10_000, 3))
    kernel: Any = ("sigmoid", "compact")[seed % 2]
    support: Any = ("exact", "bbox6")[seed // 2 % 2]
    raster = Raster(8, 8, kernel, support)
    images = backend.forward(scene, raster)
    assert np.isfinite(images).all()
    targets = rng.normal(size=images.shape).astype(subject.dtype)
    losses, grads = backend.fused_mse(scene, raster, targets)
    assert np.isfinite(losses).all()
    for name in ("params", "sigma", "background"):
        bad = np.argwhere(~np.isfinite(getattr(grads, name)))
        assert not len(bad), (name, bad[0], scene.params[bad[0][0]], scene.sigma[bad[0][0]])
    # A convex mix of colours never leaves their range.
    colours = np.concatenate([scene.params[..., 6:9], scene.background[:, None]], 1)
    slack = 1e-5 * np.abs(colours).max((1, 2))[:, None, None, None]
    assert (images <= colours.max(1)[:, None, None] + slack).all()
    assert (images >= colours.min(1)[:, None, None] - slack).all()


@pytest.mark.parametrize("kind", sorted(scenes.KINDS))
def test_inputs_stay_as_they_are(backend: Backend, subject: Subject, kind: str) -> None:
    scene = subject.cast(scenes.make(kind))
    before = [array.copy() for array in arrays(scene)]
    for array in arrays(scene):
        array.flags.writeable = False
    given = np.ones((3, 33, 21, 3), subject.dtype)
    given.flags.writeable = False
    backend.forward(scene, RASTER)
    backend.backward(scene, RASTER, given)
    backend.fused_mse(scene, RASTER, given)
    assert same(arrays(scene), before)
    assert (given == 1).all()


@pytest.mark.parametrize("kind", sorted(scenes.KINDS))
def test_the_same_bits_each_time(backend: Backend, subject: Subject, kind: str) -> None:
    scene = subject.cast(scenes.make(kind))
    expected = everything(backend, scene, RASTER)
    for _ in range(3):
        assert same(everything(backend, scene, RASTER), expected)


@pytest.mark.parametrize("kind", ["small", "opaque", "stacked", "mixed_sigma"])
def test_the_same_bits_wherever_in_the_batch(backend: Backend, subject: Subject, kind: str) -> None:
    scene = subject.cast(scenes.make(kind, batch=7))
    images = backend.forward(scene, RASTER)
    targets = np.zeros_like(images)
    losses, grads = backend.fused_mse(scene, RASTER, targets)
    for item in range(7):
        alone = Scene(*(array[item : item + 1] for array in arrays(scene)))
        loss, grad = backend.fused_mse(alone, RASTER, targets[:1])
        assert np.array_equal(backend.forward(alone, RASTER)[0], images[item])
        assert loss[0] == losses[item]
        for name in ("params", "sigma", "background"):
            assert np.array_equal(getattr(grad, name)[0], getattr(grads, name)[item])


@pytest.mark.parametrize("batch", [1, 3, 9])
@pytest.mark.parametrize("kind", ["small", "stacked"])
def test_the_same_bits_with_any_number_of_threads(kind: str, batch: int) -> None:
    scene = scenes.make(kind, batch=batch, triangles=40)
    results = []
    for threads in (1, 2, 3, 4):
        with CpuBackend(threads) as backend:
            results.append(everything(backend, scene, Raster(70, 67)))
    for other in results[1:]:
        assert same(other, results[0])


def test_several_python_threads_at_once(backend: Backend, subject: Subject) -> None:
    jobs = [subject.cast(scenes.make(kind)) for kind in ("small", "opaque", "huge", "stacked")]
    expected = [everything(backend, scene, RASTER) for scene in jobs]
    failures: list[BaseException] = []

    def draw(index: int) -> None:
        try:
            for _ in range(10):
                assert same(everything(backend, jobs[index], RASTER), expected[index])
        except BaseException as failure:  # raised here, it would only be printed
            failures.append(failure)

    threads = [threading.Thread(target=draw, args=(i % 4,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


_FORK = """
import multiprocessing, sys
import numpy as np
from doublure_kernels.cpu import CpuBackend
from doublure_kernels.scene import Raster, Scene

rng = np.random.default_rng(1)
scene = Scene(
    rng.random((5, 9, 10), np.float32), np.full((5, 9), 0.01, np.float32),
    np.zeros((5, 3), np.float32), np.full(5, 9),
)
raster, backend = Raster(40, 50), CpuBackend(3)
expected = backend.forward(scene, raster).tobytes()

def child():
    sys.exit(0 if backend.forward(scene, raster).tobytes() == expected else 3)

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(60)
assert process.exitcode == 0, process.exitcode
assert backend.forward(scene, raster).tobytes() == expected
"""


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork"
)
def test_a_forked_child_draws_the_same() -> None:
    """In a process without torch, whose own threads do not survive a fork."""
    ran = subprocess.run(
        [sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr


_LARGE = """
import resource
import numpy as np
from doublure_kernels.cpu import CpuBackend, prepare
from doublure_kernels.scene import Raster, Scene

prepare()
rng, amount, size = np.random.default_rng(1), 10_000, 2048
params = rng.random((1, amount, 10), np.float32)
centres = rng.random((1, amount, 1, 2), np.float32)
params[..., :6] = (centres + rng.uniform(-0.05, 0.05, (1, amount, 3, 2))).reshape(1, amount, 6)
scene = Scene(
    params, np.full((1, amount), 0.001, np.float32), np.zeros((1, 3), np.float32),
    np.full(1, amount),
)
targets = np.zeros((1, size, size, 3), np.float32)
targets[:] = 0.5  # so that its pages count before
backend = CpuBackend(2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
losses, grads = backend.fused_mse(scene, Raster(size, size), targets)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert 0 < losses[0] < 1, losses
assert (np.abs(grads.params).max(-1) > 0).mean() > 0.2
print(grown)
"""


def test_large_images_of_many_triangles_need_little_memory() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _LARGE], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 1 << 20  # KiB
