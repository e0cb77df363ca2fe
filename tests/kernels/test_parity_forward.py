"""Images and losses of every backend equal the reference's."""

import numpy as np
import pytest
from doublure_kernels.backend import Backend
from doublure_kernels.reference import ReferenceBackend
from doublure_kernels.scene import Raster, Scene

from . import scenes
from .conftest import Subject
from .parity import CASES, Case, truth


@pytest.mark.parametrize("case", CASES, ids=str)
def test_images(backend: Backend, subject: Subject, case: Case) -> None:
    expected = truth(case)
    images = backend.forward(subject.cast(expected.scene), case.raster)
    assert images.shape == expected.image.shape
    assert images.dtype == subject.dtype
    assert np.isfinite(images).all()
    off = np.abs(images - expected.image).max(-1) / expected.scale
    assert expected.steady.mean() > 0.9
    assert off[expected.steady].max() <= subject.image
    # Elsewhere it may jump: by the threshold, or by what a padded box cuts (1 / (1 + e^6)).
    jump = 0.0025 if case.raster.support == "bbox6" else 1e-6
    assert off.max() <= 3 * jump


@pytest.mark.parametrize("case", [case for case in CASES if not case.raster.alpha], ids=str)
def test_losses(backend: Backend, subject: Subject, case: Case) -> None:
    expected = truth(case)
    scene, targets = subject.cast(expected.scene), expected.targets.astype(subject.dtype)
    losses, _ = backend.fused_mse(scene, case.raster, targets)
    assert losses.shape == (len(expected.losses),)
    assert losses.dtype == subject.dtype
    np.testing.assert_allclose(losses, expected.losses, rtol=10 * subject.image, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.0004, 1.0])
def test_ten_thousand_triangles_on_few_pixels(
    backend: Backend, subject: Subject, alpha: float
) -> None:
    scene = scenes.make("half_planes", batch=2, triangles=10_000, sigma=1.0)
    scene.params[..., 9] = alpha
    raster = Raster(3, 2, alpha=True)
    expected = ReferenceBackend().forward(scenes.double(scene), raster)
    images = backend.forward(subject.cast(scene), raster)
    assert np.abs(images - expected).max() <= 2 * subject.image  # colours are up to 1.5


def test_arrays_of_any_strides(backend: Backend, subject: Subject) -> None:
    """Axes that were broadcast, turned, or taken from something larger."""
    plain = subject.cast(scenes.make("small", batch=4, ragged=False))
    raster = Raster(9, 13)
    wide = np.zeros((4, 24, 20), subject.dtype)
    params = wide[:, ::2, ::2]
    params[:] = plain.params
    for sigma, background in (
        (
            np.broadcast_to(plain.sigma[:, :1], (4, 12)),
            np.broadcast_to(plain.background[0], (4, 3)),
        ),
        (np.broadcast_to(plain.sigma[:1], (4, 12)), plain.background[:, ::-1]),
        (np.broadcast_to(plain.sigma[0, 0], (4, 12)), np.asfortranarray(plain.background)),
        (np.asfortranarray(plain.sigma), np.broadcast_to(plain.background[:, :1], (4, 3))),
    ):
        strange = Scene(params, sigma, background, np.broadcast_to(np.int64(9), (4,)))
        tidy = Scene(
            plain.params,
            np.ascontiguousarray(sigma),
            np.ascontiguousarray(background),
            np.full(4, 9),
        )
        assert np.array_equal(backend.forward(strange, raster), backend.forward(tidy, raster))
        targets = np.random.default_rng(3).random((4, 3, 9, 13)).astype(subject.dtype)
        turned = targets.transpose(0, 2, 3, 1)
        losses, grads = backend.fused_mse(strange, raster, turned)
        same, tidy_grads = backend.fused_mse(tidy, raster, np.ascontiguousarray(turned))
        assert np.array_equal(losses, same)
        assert np.array_equal(grads.params, tidy_grads.params)
        assert np.array_equal(grads.sigma, tidy_grads.sigma)
        assert np.array_equal(grads.background, tidy_grads.background)


@pytest.mark.parametrize(("batch", "triangles"), [(0, 0), (0, 3), (2, 0)])
def test_nothing_to_draw_is_the_background(
    backend: Backend, subject: Subject, batch: int, triangles: int
) -> None:
    dtype = subject.dtype
    scene = Scene(
        np.zeros((batch, triangles, 10), dtype),
        np.ones((batch, triangles), dtype),
        np.full((batch, 3), 0.5, dtype),
        np.zeros(batch, np.int64),
    )
    images = backend.forward(scene, Raster(2, 3, alpha=True))
    assert images.shape == (batch, 2, 3, 4)
    assert (images == [0.5, 0.5, 0.5, 0.0]).all()
    losses, grads = backend.fused_mse(scene, Raster(2, 3), np.zeros((batch, 2, 3, 3), dtype))
    assert losses.tolist() == [0.25] * batch
    assert grads.params.shape == (batch, triangles, 10)
    assert grads.sigma.shape == (batch, triangles)
    np.testing.assert_allclose(grads.background, np.full((batch, 3), 1 / 3), rtol=1e-6)
