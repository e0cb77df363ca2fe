"""Gradients of every backend equal the reference's, away from where they jump."""

import numpy as np
import pytest
from doublure_kernels.backend import Backend
from doublure_kernels.reference import ReferenceBackend
from doublure_kernels.scene import Gradients, Raster

from . import scenes
from .conftest import Subject
from .parity import CASES, Case, relative_errors, truth


def check(
    found: Gradients, expected: Gradients, subject: Subject, single: float | None = None
) -> None:
    for name in ("params", "sigma", "background"):
        assert getattr(found, name).dtype == subject.dtype
        assert getattr(found, name).shape == getattr(expected, name).shape
    errors = relative_errors(found, expected)
    # One triangle alone may be ten times farther off: what it adds up cancels. All are within 2e-5,
    # but for ten thousand faint ones: 9e-5, and 2e-4 on GPUs, which recover the light above each.
    single = 10 * subject.gradient if single is None else single
    wrong = {
        name: error
        for name, error in errors.items()
        if error > (single if name.endswith("one") else subject.gradient)
    }
    assert not wrong, wrong


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_images(backend: Backend, subject: Subject, case: Case) -> None:
    expected = truth(case)
    scene, given = subject.cast(expected.scene), expected.grad_images.astype(subject.dtype)
    grads = backend.backward(scene, case.raster, given)
    check(grads, expected.grads, subject)
    there = np.arange(scene.params.shape[1]) < scene.counts[:, None]
    there &= np.isfinite(scene.params).all(-1)
    assert not grads.params[~there].any()
    assert not grads.sigma[~there].any()


@pytest.mark.parametrize("case", [case for case in CASES if not case.raster.alpha], ids=str)
def test_gradients_of_losses(backend: Backend, subject: Subject, case: Case) -> None:
    expected = truth(case)
    scene, targets = subject.cast(expected.scene), expected.targets.astype(subject.dtype)
    fused = backend.fused_mse(scene, case.raster, targets)[1]
    # Against its own gradients of the same loss, which the test above holds to the truth: here
    # pixels at a jump pull too, and either side of the jump is right.
    apart = backend.backward(scene, case.raster, expected.fused.astype(subject.dtype))
    check(fused, apart, subject)


@pytest.mark.parametrize("alpha", [0.0004, 1.0])
def test_ten_thousand_triangles_on_few_pixels(
    backend: Backend, subject: Subject, alpha: float
) -> None:
    scene = scenes.make("half_planes", batch=2, triangles=10_000, sigma=1.0)
    scene.params[..., 9] = alpha
    raster = Raster(3, 2)
    given = np.random.default_rng(2).normal(size=(2, 3, 2, 3)).astype(np.float32)
    expected = ReferenceBackend().backward(scenes.double(scene), raster, given)
    found = backend.backward(subject.cast(scene), raster, given.astype(subject.dtype))
    check(found, expected, subject, subject.deep)
