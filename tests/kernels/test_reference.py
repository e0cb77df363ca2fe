"""The reference: against scalar arithmetic by hand, differences, and its own promises."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from doublure_kernels.reference import ReferenceBackend, render
from doublure_kernels.scene import Raster, Scene
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from . import scenes

Point = tuple[float, float]


# --- a second opinion, from scalars ---------------------------------------------------------------


def distance_by_hand(p: Point, corners: list[Point]) -> float:
    """Signed distance to a triangle's boundary, positive inside."""
    nearest, turns = math.inf, []
    for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1], strict=True):
        along = (bx - ax) ** 2 + (by - ay) ** 2
        t = 0.0
        if along > 0:
            t = max(0.0, min(1.0, ((p[0] - ax) * (bx - ax) + (p[1] - ay) * (by - ay)) / along))
        nearest = min(nearest, math.dist(p, (ax + t * (bx - ax), ay + t * (by - ay))))
        turns.append((bx - ax) * (p[1] - ay) - (by - ay) * (p[0] - ax))
    (x0, y0), (x1, y1), (x2, y2) = corners
    area = (x1 - x0) * (y2 - y0) - (y1 - y0) * (x2 - x0)
    inside = area != 0 and (min(turns) >= 0 or max(turns) <= 0)
    return nearest if inside else -nearest


def pixel_by_hand(scene: Scene, raster: Raster, item: int, x: int, y: int) -> list[float]:
    p = ((x + 0.5) / raster.width, (y + 0.5) / raster.height)
    colour = [float(c) for c in scene.background[item]]
    opacity = 0.0
    for index in range(int(scene.counts[item])):
        row = [float(v) for v in scene.params[item, index]]
        sigma = float(scene.sigma[item, index])
        if not all(math.isfinite(v) for v in [*row, sigma]):
            continue
        corners = [(row[0], row[1]), (row[2], row[3]), (row[4], row[5])]
        z = distance_by_hand(p, corners) / sigma
        if raster.kernel == "compact":
            u = max(0.0, min(1.0, 0.5 + z / 6))
            cover = u * u * (3 - 2 * u)
        else:
            cover = 1 / (1 + math.exp(-z)) if z > -700 else 0.0
        weight = max(0.0, min(1.0, row[9])) * cover
        if raster.support == "bbox6":
            for axis in range(2):
                values = [corner[axis] for corner in corners]
                if not min(values) - 6 * sigma <= p[axis] <= max(values) + 6 * sigma:
                    weight = 0.0
        if weight <= 1e-6:
            continue
        colour = [c * (1 - weight) + row[6 + i] * weight for i, c in enumerate(colour)]
        opacity = weight + opacity * (1 - weight)
    return [*colour, opacity] if raster.alpha else colour


@pytest.mark.parametrize("support", ["exact", "bbox6"])
@pytest.mark.parametrize("kernel", ["sigmoid", "compact"])
@pytest.mark.parametrize("kind", sorted(scenes.KINDS))
def test_pixels_equal_what_scalars_give(kind: str, kernel: Any, support: Any) -> None:
    scene = scenes.double(scenes.make(kind, sigma=0.03))
    raster = Raster(5, 7, kernel, support, alpha=True)
    images = ReferenceBackend().forward(scene, raster)
    finite = np.where(np.isfinite(scene.params), scene.params, 0)
    scale = max(1.0, float(np.abs(finite[..., 6:9]).max()))
    # Between vertices 1e6 image widths apart, the scalars' closest point is off by about 1e-10.
    tolerance = (1e-6 if kind == "huge" else 1e-12) * scale
    for item in range(len(images)):
        for x, y in [(0, 0), (3, 2), (6, 4), (2, 1), (5, 3), (1, 4)]:
            expected = pixel_by_hand(scene, raster, item, x, y)
            assert images[item, y, x] == pytest.approx(expected, abs=tolerance, rel=0)


def test_one_pixel_of_two_triangles() -> None:
    """With every number written out."""
    # The pixel's centre (.5, .5) is .1 right of the first one's edge x = .4, and .2 below the
    # second one's edge y = .3, whose two other edges are farther.
    params = [
        [0.4, -3.0, 0.4, 4.0, -9.0, 0.5, 1.0, 0.5, 0.0, 0.8],
        [-3.0, 0.3, 4.0, 0.3, 0.5, 9.0, 0.0, 2.0, -1.0, 0.5],
    ]
    image = render(
        torch.tensor([params], dtype=torch.float64),
        torch.tensor([[0.1, 0.2]], dtype=torch.float64),
        torch.tensor([[0.25, 0.5, 0.75]], dtype=torch.float64),
        torch.tensor([2]),
        Raster(1, 1, alpha=True),
    )
    outside = 0.8 / (1 + math.e)
    inside = 0.5 / (1 + 1 / math.e)
    first = [
        1.0 * outside + 0.25 * (1 - outside),
        0.5 * outside + 0.5 * (1 - outside),
        0.0 * outside + 0.75 * (1 - outside),
        outside,
    ]
    second = [
        inside * c + (1 - inside) * below
        for c, below in zip([0.0, 2.0, -1.0, 1.0], first, strict=True)
    ]
    assert image.flatten().tolist() == pytest.approx(second, abs=1e-14)


# --- derivatives ----------------------------------------------------------------------------------


def leaves(scene: Scene) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    arrays = (scene.params, scene.sigma, scene.background)
    params, sigma, background = (
        torch.tensor(np.array(array, np.float64), requires_grad=True) for array in arrays
    )
    return params, sigma, background, torch.tensor(np.array(scene.counts))


@pytest.mark.parametrize("support", ["exact", "bbox6"])
@pytest.mark.parametrize("kernel", ["sigmoid", "compact"])
@pytest.mark.parametrize("kind", ["small", "opaque", "full_canvas", "hdr", "mixed_sigma"])
def test_gradients_are_the_limits_of_differences(kind: str, kernel: Any, support: Any) -> None:
    scene = scenes.double(scenes.make(kind, batch=1, triangles=4, sigma=0.05))
    raster, backend, step = Raster(6, 5, kernel, support, alpha=True), ReferenceBackend(), 1e-6
    smooth = scenes.smooth_pixels(scene, raster, margin=10 * step)
    assert smooth.mean() > 0.5
    weights = np.random.default_rng(5).normal(size=(1, 6, 5, 4)) * smooth[..., None]
    found = backend.backward(scene, raster, weights)

    # Every number a step up in one item of a batch, and a step down in another.
    arrays = [scene.params, scene.sigma, scene.background]
    ends = np.cumsum([array.size for array in arrays])
    flat = np.concatenate([array.ravel() for array in arrays])
    moved = flat + step * np.concatenate([np.eye(len(flat)), -np.eye(len(flat))])
    parts = np.split(moved, ends[:-1], 1)
    many = [part.reshape(-1, *a.shape[1:]) for part, a in zip(parts, arrays, strict=True)]
    images = backend.forward(Scene(*many, np.repeat(scene.counts, len(moved))), raster)
    up, down = (images * weights).sum((1, 2, 3)).reshape(2, -1)
    expected = np.split((up - down) / (2 * step), ends[:-1])
    # One-sided at the limits of opacity, where the gradient is zero.
    alpha = scene.params[0, :, 9]
    expected[0].reshape(-1, 10)[:, 9] *= (alpha > 0) & (alpha < 1)
    rounding = 2e-8 * max(1.0, np.abs(scene.params[..., 6:9]).max())
    for name, slopes in zip(("params", "sigma", "background"), expected, strict=True):
        np.testing.assert_allclose(getattr(found, name).ravel(), slopes, rtol=1e-6, atol=rounding)
    assert found.params.any(-1).sum() >= 2


@pytest.mark.parametrize("kernel", ["sigmoid", "compact"])
@pytest.mark.parametrize("kind", ["small", "opaque", "full_canvas"])
def test_autograd_differentiates_twice(kind: str, kernel: Any) -> None:
    params, sigma, background, counts = leaves(
        scenes.make(kind, batch=1, triangles=2, sigma=0.15, ragged=False)
    )
    if kind == "opaque":  # differences would step over the limit of opacity
        params = params.detach()
        params[..., 9] = 1.5
        params.requires_grad_()

    def draw(*inputs: Tensor) -> Tensor:
        return render(*inputs, counts, Raster(2, 3, kernel, alpha=True))

    assert gradcheck(draw, (params, sigma, background))
    assert gradgradcheck(draw, (params, sigma, background), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("support", ["exact", "bbox6"])
@pytest.mark.parametrize("kernel", ["sigmoid", "compact"])
@pytest.mark.parametrize("kind", sorted(scenes.KINDS))
def test_derivatives_are_finite(kind: str, kernel: Any, support: Any, dtype: torch.dtype) -> None:
    scene = scenes.make(kind, sigma=0.0015 if kind != "huge" else 1e-30)
    raster = Raster(5, 8, kernel, support, alpha=True)
    params, sigma, background, counts = (tensor.detach() for tensor in leaves(scene))
    inputs = [tensor.to(dtype).requires_grad_() for tensor in (params, sigma, background)]
    images = render(*inputs, counts, raster)
    assert images.isfinite().all()
    # Not all ones: the alpha channel's gradient would be the sum of what cancels.
    given = torch.linspace(-1, 1, images.numel(), dtype=dtype).reshape(images.shape)
    first = torch.autograd.grad(images, inputs, given, create_graph=True)
    assert all(g.isfinite().all() for g in first)
    if params.shape[1] > 100 or kind in ("huge", "slivers", "degenerate", "non_finite"):
        return  # second derivatives grow with 1/length: they may be too large for their dtype
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)  # type: ignore[arg-type]
    assert all(g.isfinite().all() for g in second)


# --- what the spec says of special cases ----------------------------------------------------------


def one(
    *row: float, sigma: float = 0.01, background: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    params = torch.tensor([[row]], dtype=torch.float64, requires_grad=True)
    return (
        params,
        torch.full((1, 1), sigma, dtype=torch.float64, requires_grad=True),
        torch.full((1, 3), background, dtype=torch.float64, requires_grad=True),
        torch.tensor([1]),
    )


def test_equal_vertices_are_a_disc_without_an_inside() -> None:
    inputs = one(0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1, 1, 1, 1, sigma=0.1)
    image = render(*inputs, Raster(3, 3))[0, ..., 0]
    assert image[1, 1] == 0.5
    assert image[0, 1].item() == pytest.approx(1 / (1 + math.exp((1 / 3) / 0.1)), abs=1e-14)
    assert image[0, 1] == image[1, 0] == image[1, 2] == image[2, 1]


def test_collinear_vertices_have_no_inside() -> None:
    inputs = one(0.0, 0.5, 0.5, 0.5, 1.0, 0.5, 1, 1, 1, 1)
    assert render(*inputs, Raster(1, 1)).max() == 0.5


def test_either_winding_is_the_same() -> None:
    row = (0.1, 0.2, 0.8, 0.3, 0.4, 0.9)
    turned = (*row[:2], *row[4:], *row[2:4])
    there = render(*one(*row, 1, 1, 1, 0.7), Raster(8, 8))
    back = render(*one(*turned, 1, 1, 1, 0.7), Raster(8, 8))
    torch.testing.assert_close(there, back, rtol=0, atol=1e-14)


def test_next_to_no_weight_is_none_and_has_no_gradient() -> None:
    # .1 outside x = .4 at the only pixel: e^(-.1 / sigma) is on either side of 1e-6.
    row = (0.4, -3, 0.4, 4, -9, 0.5, 1, 1, 1, 1)
    for sigma, there in ((0.1 / 13.9, False), (0.1 / 13.7, True)):
        inputs = one(*row, sigma=sigma)
        image = render(*inputs, Raster(1, 1))
        assert bool(image.max() > 0) is there
        grads = torch.autograd.grad(image.sum(), inputs[:2])
        assert bool(grads[0].any()) is there
        assert bool(grads[1].any()) is there


@pytest.mark.parametrize(("alpha", "moves"), [(-1, 0), (0, 0), (0.5, 1), (1, 0), (2, 0)])
def test_only_an_opacity_between_its_limits_has_a_gradient(alpha: float, moves: int) -> None:
    inputs = one(-1, -1, 3, -1, -1, 3, 1, 1, 1, alpha)
    image = render(*inputs, Raster(1, 1))
    assert image[0, 0, 0, 0] == min(max(alpha, 0), 1)
    (grad,) = torch.autograd.grad(image[..., 0].sum(), inputs[0])
    assert grad[0, 0, 9] == moves


def test_a_pixel_on_the_boundary_pulls_no_vertex() -> None:
    inputs = one(0.5, -1, 0.5, 2, 2, 0.5, 1, 1, 1, 0.8)
    image = render(*inputs, Raster(1, 1))
    assert image[0, 0, 0, 0].item() == pytest.approx(0.4, abs=1e-15)
    (grad,) = torch.autograd.grad(image.sum(), inputs[0])
    assert not grad[..., :6].any()
    assert grad[0, 0, 9] == pytest.approx(1.5)


@pytest.mark.parametrize("column", range(10))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_triangle_that_is_not_finite_is_not_there(bad: float, column: int) -> None:
    params, sigma, background, counts = leaves(scenes.make("small", batch=1, ragged=False))
    spoilt = params.detach().clone()
    spoilt[0, 1, column] = bad
    spoilt.requires_grad_()
    without = params.detach()[:, [0, *range(2, params.shape[1])]]
    image = render(spoilt, sigma, background, counts, Raster(6, 6))
    expected = render(without, sigma[:, 1:], background, counts - 1, Raster(6, 6))
    torch.testing.assert_close(image, expected, rtol=0, atol=1e-15)
    grads = torch.autograd.grad(image.square().sum(), (spoilt, sigma, background))
    assert not grads[0][0, 1].any()
    assert not grads[1][0, 1].any()
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[0][0, 0].any()


def test_a_sigma_that_is_not_finite_takes_its_triangle_along() -> None:
    inputs = one(-1, -1, 3, -1, -1, 3, 1, 1, 1, 1, sigma=math.nan, background=0.25)
    image = render(*inputs, Raster(2, 2))
    assert (image == 0.25).all()
    assert not any(g.any() for g in torch.autograd.grad(image.sum(), inputs[:2]))


def test_an_opaque_triangle_hides_what_is_behind_to_the_last_bit() -> None:
    params, sigma, background, counts = leaves(scenes.make("small", batch=1, ragged=False))
    cover = torch.tensor([[-9.0, -9, 20, -9, -9, 20, 0.1, 0.2, 0.3, 1]], dtype=torch.float64)
    params = torch.cat([params.detach(), cover[None]], 1).requires_grad_()
    sigma = torch.cat([sigma, sigma[:, :1]], 1)
    image = render(params, sigma, background, counts + 1, Raster(4, 4))
    assert (image == torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)).all()
    grads = torch.autograd.grad(image.square().sum(), (params, background))
    assert not grads[0][0, :-1].any()
    assert not grads[1].any()
    expected = 2 * 16 * torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    torch.testing.assert_close(grads[0][0, -1, 6:9], expected)


@pytest.mark.parametrize(("batch", "triangles"), [(0, 0), (0, 3), (2, 0)])
def test_nothing_to_draw_is_the_background(batch: int, triangles: int) -> None:
    scene = Scene(
        np.zeros((batch, triangles, 10)),
        np.ones((batch, triangles)),
        np.full((batch, 3), 0.5),
        np.zeros(batch, np.int64),
    )
    backend = ReferenceBackend()
    images = backend.forward(scene, Raster(2, 3, alpha=True))
    assert images.shape == (batch, 2, 3, 4)
    assert (images == [0.5, 0.5, 0.5, 0.0]).all()
    losses, grads = backend.fused_mse(scene, Raster(2, 3), np.zeros((batch, 2, 3, 3)))
    assert (losses == 0.25).all()
    assert grads.params.shape == (batch, triangles, 10)
    np.testing.assert_allclose(grads.background, np.full((batch, 3), 1 / 3))


def test_bbox6_cuts_where_the_padded_box_ends() -> None:
    row, sigma = (0.5, 0.5, 0.6, 0.5, 0.5, 0.6, 1, 1, 1, 1), 0.02
    cut = render(*one(*row, sigma=sigma), Raster(50, 50, support="bbox6"))[0, ..., 0]
    whole = render(*one(*row, sigma=sigma), Raster(50, 50))[0, ..., 0]
    centres = (torch.arange(50) + 0.5) / 50
    kept = (centres >= 0.5 - 6 * sigma) & (centres <= 0.6 + 6 * sigma)
    box = kept[:, None] & kept
    assert torch.equal(cut, torch.where(box, whole, 0.0))
    assert (whole[~box] > 0).any()


def test_rows_can_be_drawn_a_few_at_a_time() -> None:
    inputs = leaves(scenes.make("small"))
    for alpha in (False, True):
        raster = Raster(7, 5, alpha=alpha)
        whole = render(*inputs, raster)
        for chunk in (1, 3, 7, 100):
            torch.testing.assert_close(
                render(*inputs, raster, chunk=chunk), whole, rtol=0, atol=1e-15
            )


def test_the_backend_divides_work_without_changing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, raster = scenes.double(scenes.make("small", batch=5)), Raster(7, 5)
    targets = np.random.default_rng(1).random((5, 7, 5, 3))
    backend = ReferenceBackend()
    image, (losses, grads) = (
        backend.forward(scene, raster),
        backend.fused_mse(scene, raster, targets),
    )
    for pairs in (1, 200, 1000):
        monkeypatch.setattr("doublure_kernels.reference._PAIRS", pairs)
        np.testing.assert_allclose(backend.forward(scene, raster), image, rtol=0, atol=1e-14)
        again, grads_again = backend.fused_mse(scene, raster, targets)
        np.testing.assert_allclose(again, losses, rtol=1e-13)
        for name in ("params", "sigma", "background"):
            np.testing.assert_allclose(
                getattr(grads_again, name), getattr(grads, name), rtol=1e-11, atol=1e-13
            )


def test_fused_is_drawing_and_comparing() -> None:
    scene, raster = scenes.double(scenes.make("small")), Raster(9, 4)
    targets = np.random.default_rng(1).random((len(scene.params), 9, 4, 3))
    backend = ReferenceBackend()
    errors = backend.forward(scene, raster) - targets
    losses, grads = backend.fused_mse(scene, raster, targets)
    np.testing.assert_allclose(losses, (errors**2).mean((1, 2, 3)), rtol=1e-13)
    expected = backend.backward(scene, raster, 2 * errors / (9 * 4 * 3))
    for name in ("params", "sigma", "background"):
        np.testing.assert_allclose(
            getattr(grads, name), getattr(expected, name), rtol=1e-11, atol=1e-14
        )


def test_results_have_the_dtype_of_the_scene() -> None:
    scene, raster = scenes.make("small"), Raster(4, 4)
    backend = ReferenceBackend()
    images = backend.forward(scene, raster)
    with torch.inference_mode():
        losses, grads = backend.fused_mse(scene, raster, images + 1)
    assert losses == pytest.approx(np.ones(len(images)), rel=1e-6)
    arrays = (images, losses, grads.params, grads.sigma, grads.background)
    assert {array.dtype.name for array in arrays} == {"float32"}
