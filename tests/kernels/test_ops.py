"""The torch operators: registrations, derivatives, transforms, compile, and several threads."""

import threading
from typing import Any

import doublure_kernels as dk
import pytest
import torch
from doublure_kernels import ops, second_order
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

pytestmark = pytest.mark.usefixtures("sharp_is_fine")

HOSTS = ("cpu", "reference")
OPS = torch.ops.doublure


@pytest.fixture
def sharp_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning about sigma, which test_api tests."""
    monkeypatch.setattr("doublure_kernels.api._warned", True)


def scene(
    batch: int, triangles: int, dtype: torch.dtype = torch.float64, *, grad: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Canonical inputs, soft enough to differentiate by differences."""
    generator = torch.Generator().manual_seed(7)
    params = dk.random_params(batch, triangles, generator=generator).to(dtype)
    sigma = (torch.rand(batch, triangles, generator=generator) * 0.05 + 0.05).to(dtype)
    background = torch.rand(batch, 3, generator=generator).to(dtype)
    for tensor in (params, sigma, background):
        tensor.requires_grad_(grad)
    return params, sigma, background, torch.full((batch,), triangles)


def rand(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 3) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


SETTINGS = (5, 6, "sigmoid", "exact", True)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("device", HOSTS)
def test_opcheck_passes(device: str, grad: bool) -> None:
    inputs = scene(2, 3, grad=grad)
    images = rand(2, 5, 6, 4).requires_grad_(grad)
    targets = rand(2, 5, 6, 3)
    opcheck(OPS.rasterize, (*inputs, *SETTINGS, device, False))
    opcheck(OPS.rasterize_backward, (images, *inputs, *SETTINGS, device))
    opcheck(OPS.fused_mse, (*inputs, targets, "sigmoid", "exact", device, False))


def test_opcheck_passes_for_second_derivatives() -> None:
    inputs = scene(2, 3)
    v = [rand(*tensor.shape) for tensor in inputs[:3]]
    opcheck(OPS.rasterize_second, (*v, rand(2, 5, 6, 4), *inputs, *SETTINGS))
    opcheck(OPS.fused_mse_second, (*v, *inputs, rand(2, 5, 6, 3), "sigmoid", "exact"))


@pytest.mark.parametrize("kernel", ["sigmoid", "compact"])
@pytest.mark.parametrize("device", HOSTS)
def test_gradients_agree_with_differences(device: str, kernel: Any) -> None:
    *leaves, _ = scene(2, 3, grad=True)
    targets = rand(2, 3, 5, 6)

    def draw(params: Tensor, sigma: Tensor, background: Tensor) -> Tensor:
        return dk.rasterize(
            params, 5, 6, sigma, background, device=device, kernel=kernel, alpha=True
        )

    def compare(params: Tensor, sigma: Tensor, background: Tensor) -> Tensor:
        return dk.fused_mse(params, targets, sigma, background, device, kernel=kernel)

    fast = device == "reference"  # slow, and differentiated by autograd anyway
    assert gradcheck(draw, leaves, fast_mode=fast)
    assert gradcheck(compare, leaves, fast_mode=fast)


@pytest.mark.parametrize("device", HOSTS)
def test_second_derivatives_agree_with_differences(device: str) -> None:
    *leaves, _ = scene(1, 2, grad=True)
    targets = rand(1, 3, 4, 5)

    def draw(params: Tensor, sigma: Tensor, background: Tensor) -> Tensor:
        return dk.rasterize(params, 4, 5, sigma, background, device=device, alpha=True)

    def compare(params: Tensor, sigma: Tensor, background: Tensor) -> Tensor:
        return dk.fused_mse(params, targets, sigma, background, device)

    assert gradgradcheck(draw, leaves, fast_mode=True)
    assert gradgradcheck(compare, leaves, fast_mode=True)


def test_second_derivatives_of_both_ways_agree_and_count_absent_triangles_out() -> None:
    params, sigma, background, _ = scene(2, 3, grad=True)
    targets = rand(2, 3, 4, 5)
    leaves = (params, sigma, background)

    def penalty(loss: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    fused = penalty(dk.fused_mse(params, targets, sigma, background, "cpu", counts=[3, 1]))
    images = dk.rasterize(params, 4, 5, sigma, background, device="cpu", counts=[3, 1])
    plain = penalty((images - targets).square().mean())
    for a, b in zip(fused, plain, strict=True):
        torch.testing.assert_close(a, b)
    assert fused[0].abs().sum() > 0
    assert not fused[0][1, 1:].any()
    assert not fused[1][1, 1:].any()


def test_second_derivatives_of_nothing_are_zero() -> None:
    params = torch.zeros(2, 0, 10, dtype=torch.float64, requires_grad=True)
    background = torch.rand(3, dtype=torch.float64, requires_grad=True)
    images = dk.rasterize(params, 4, 5, 0.1, background, device="cpu")
    first = torch.autograd.grad(images.square().sum(), (params, background), create_graph=True)
    assert first[0].shape == (2, 0, 10)
    (second,) = torch.autograd.grad(first[1].sum(), background)
    torch.testing.assert_close(second, torch.full((3,), 2.0 * 2 * 4 * 5, dtype=torch.float64))


def test_too_large_a_second_derivative_is_refused() -> None:
    side = 1024
    params = dk.random_params(1, 5).requires_grad_()
    loss = dk.rasterize(params, side, side, 0.01, device="cpu").square().mean()
    (first,) = torch.autograd.grad(loss, params, create_graph=True)
    with pytest.raises(dk.SettingError) as caught:
        first.sum().backward()
    assert 5 * side * side > second_order.SECOND_ORDER_PAIRS
    assert str(caught.value) == (
        f"second order: expected at most {second_order.SECOND_ORDER_PAIRS} pairs of a pixel and a "
        "triangle, got 1 x 5 x 1024 x 1024 = 5242880; take fewer items at a time, or smaller images"
    )


def test_a_third_derivative_is_refused() -> None:
    params, *_ = scene(1, 2, grad=True)
    for draw in (
        lambda: dk.rasterize(params, 4, 5, 0.1, device="cpu").square().sum(),
        lambda: dk.fused_mse(params, torch.ones(1, 3, 4, 5).double(), 0.1, device="cpu"),
    ):
        (first,) = torch.autograd.grad(draw(), params, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), params, create_graph=True)
        with pytest.raises(dk.RasterError, match="first or second order, got a third"):
            second.sum().backward()


def test_the_operator_refuses_targets_that_want_a_gradient() -> None:
    inputs = scene(1, 2, grad=True)
    targets = rand(1, 4, 5, 3).requires_grad_()
    losses, *_ = ops.fused_mse(*inputs, targets, "sigmoid", "exact", "cpu", False)
    with pytest.raises(dk.RasterError, match="expected targets without requires_grad"):
        losses.sum().backward()


def test_only_wanted_gradients_are_returned() -> None:
    params, sigma, background, _ = scene(2, 3)
    sigma.requires_grad_()
    dk.rasterize(params, 5, 6, sigma, background, device="cpu").sum().backward()
    assert params.grad is None
    assert background.grad is None
    assert sigma.grad is not None
    assert sigma.grad.abs().sum() > 0


# Transforms.


@pytest.mark.parametrize("device", HOSTS)
def test_vmap_is_a_loop(device: str) -> None:
    params, sigma, background, _ = scene(6, 3)
    params, sigma = params.reshape(3, 2, 3, 10), sigma.reshape(3, 2, 3)
    background = background[:2]
    counts = torch.tensor([[3, 1], [0, 2], [3, 3]])

    def draw(params: Tensor, sigma: Tensor, counts: Tensor) -> Tensor:
        return dk.rasterize(params, 5, 6, sigma, background, device=device, counts=counts)

    each = [draw(*one) for one in zip(params, sigma, counts, strict=True)]
    assert torch.equal(torch.vmap(draw)(params, sigma, counts), torch.stack(each))
    moved = torch.vmap(draw, in_dims=(2, None, None), out_dims=1)(
        params.movedim(0, 2), sigma[0], counts[0]
    )
    each = [draw(one, sigma[0], counts[0]) for one in params]
    assert torch.equal(moved, torch.stack(each, 1))


def test_vmap_of_the_loss_differentiates() -> None:
    params, sigma, *_ = scene(4, 3)
    params = params.reshape(2, 2, 3, 10).requires_grad_()
    sigma = sigma[:2, 0].clone().requires_grad_()
    targets = rand(2, 3, 5, 6)

    def loss(params: Tensor, sigma: Tensor) -> Tensor:
        return dk.fused_mse(params, targets, sigma, device="cpu")

    mapped = torch.vmap(loss)(params, sigma)
    each = torch.stack([loss(*one) for one in zip(params, sigma, strict=True)])
    torch.testing.assert_close(mapped, each)
    got = torch.autograd.grad(mapped.sum(), (params, sigma))
    wanted = torch.autograd.grad(each.sum(), (params, sigma))
    torch.testing.assert_close(got, wanted)


def test_jacobians_and_hessians_vectorise() -> None:
    params, *_ = scene(1, 2)
    targets = rand(1, 3, 3, 4)
    functional = torch.autograd.functional
    for transform, function in (
        (functional.jacobian, lambda p: dk.rasterize(p, 3, 4, 0.1, device="cpu")),
        (functional.hessian, lambda p: dk.fused_mse(p, targets, 0.1, device="cpu")),
    ):
        plain = transform(function, params)
        torch.testing.assert_close(transform(function, params, vectorize=True), plain)
        assert plain.abs().sum() > 0


def test_mapping_nothing_gives_nothing() -> None:
    params, *_ = scene(2, 3)

    def draw(params: Tensor) -> Tensor:
        return dk.rasterize(params, 5, 6, 0.1, device="cpu")

    assert torch.vmap(draw)(params[None, :, :0]).shape == (1, 2, 3, 5, 6)
    assert torch.vmap(draw)(params[None, :0]).shape == (1, 0, 3, 5, 6)


# torch 2.11's compiler uses what torch itself calls deprecated.
_own_warnings = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@_own_warnings
@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_breaks_no_graph(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    params, sigma, background, _ = scene(2, 3, torch.float32, grad=True)
    leaves = (params, sigma, background)
    targets = rand(2, 3, 5, 6, dtype=torch.float32)

    def step(params: Tensor, sigma: Tensor, background: Tensor) -> Tensor:
        safe = dk.clamp_params(params)
        images = dk.rasterize(safe, 5, 6, sigma, background, device="cpu", counts=[3, 2])
        rgba = dk.rasterize(safe, 5, 6, 0.05, (0.1, 0.2, 0.3), False, "cpu", alpha=True)
        loss = dk.fused_mse(params, targets, sigma, background, kernel="compact")
        return loss + dk.psnr(images, targets) + rgba.mean()

    # No C compiler is needed for this backend.
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    wanted, got = step(*leaves), compiled(*leaves)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(got, leaves), torch.autograd.grad(wanted, leaves)
    )


@_own_warnings
def test_compile_takes_the_call_without_graph() -> None:
    torch._dynamo.reset()
    params, *_ = scene(2, 3, torch.float32)
    targets = rand(2, 5, 6, 3, dtype=torch.float32)

    def step(params: Tensor) -> tuple[Tensor, Tensor]:
        return dk.fused_loss(params, targets, 0.05, device="cpu")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(params), step(params))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_under_autocast_all_is_float32(dtype: torch.dtype) -> None:
    params, sigma, background, counts = scene(2, 3, torch.float32)
    params, background = params.to(dtype), background.to(torch.bfloat16)
    targets = rand(2, 3, 5, 6, dtype=torch.float16)
    single = (params.float(), sigma, background.float())
    with torch.autocast("cpu", torch.bfloat16):
        images = dk.rasterize(params, 5, 6, sigma, background, device="cpu")
        loss = dk.fused_mse(params, targets, sigma, background, "cpu")
        lower = ops.rasterize(
            params, sigma, background, counts, 5, 6, "sigmoid", "exact", False, "cpu", False
        )
    assert images.dtype == loss.dtype == lower.dtype == torch.float32
    assert torch.equal(images, dk.rasterize(single[0], 5, 6, *single[1:], device="cpu"))
    assert torch.equal(loss, dk.fused_mse(single[0], targets.float(), *single[1:], "cpu"))
    assert torch.equal(lower.permute(0, 3, 1, 2), images)


def test_under_autocast_gradients_come_back_in_the_leaf_s_dtype() -> None:
    params = scene(2, 3, torch.float16)[0].detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        dk.rasterize(params, 5, 6, 0.1, device="reference").sum().backward()
    assert params.grad is not None
    assert params.grad.dtype == torch.float16


@pytest.mark.parametrize("device", HOSTS)
def test_inference_mode_is_no_hindrance(device: str) -> None:
    params, *_ = scene(2, 3)
    targets = rand(2, 3, 5, 6)
    wanted = dk.fused_mse(params, targets, 0.1, device=device)
    with torch.inference_mode():
        assert torch.equal(dk.fused_mse(params, targets, 0.1, device=device), wanted)


def test_meta_tensors_give_shapes() -> None:
    params = torch.zeros(2, 3, 10, device="meta")
    images = dk.rasterize(params, 5, 6, 0.1, alpha=True)
    assert images.shape == (2, 4, 5, 6)
    assert images.device.type == "meta"


def test_several_threads_draw_at_once() -> None:
    inputs = [scene(2, 3 + i, torch.float32) for i in range(4)]

    def step(i: int) -> tuple[Tensor, Tensor]:
        params = inputs[i][0].clone().requires_grad_()
        images = dk.rasterize(params, 33 + i, 40, 0.02, device="cpu")
        images.square().mean().backward()
        assert params.grad is not None
        return images.detach(), params.grad

    wanted = [step(i) for i in range(4)]
    wrong: list[int] = []
    done: list[int] = []
    gate = threading.Barrier(4)

    def work(i: int) -> None:
        gate.wait()
        for _ in range(10):
            images, grad = step(i)
            if not (torch.equal(images, wanted[i][0]) and torch.equal(grad, wanted[i][1])):
                wrong.append(i)
        done.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1, 2, 3]
    assert not wrong


# What the operators themselves refuse.


@pytest.mark.parametrize(
    ("which", "change", "error", "text"),
    [
        (
            0,
            lambda t: t[..., :9],
            dk.ShapeError,
            "params: expected shape (B, T, 10), got (2, 3, 9)",
        ),
        (0, lambda t: t.half(), dk.DtypeError, "params: expected float32 or float64, got torch"),
        (1, lambda t: t[:, :1], dk.ShapeError, "sigma: expected shape (2, 3), got (2, 1)"),
        (1, lambda t: t.float(), dk.DtypeError, "sigma: expected torch.float64, as params are"),
        (1, lambda t: t.to("meta"), dk.DeviceError, "sigma: expected a tensor on cpu"),
        (2, lambda t: t[0], dk.ShapeError, "background: expected shape (2, 3), got (3,)"),
        (3, lambda t: t.int(), dk.DtypeError, "counts: expected torch.int64, got torch.int32"),
        (3, lambda t: t[:1], dk.ShapeError, "counts: expected shape (2,), got (1,)"),
    ],
)
def test_inputs_that_are_not_canonical_are_refused(
    which: int, change: Any, error: type[Exception], text: str
) -> None:
    inputs: list[Tensor] = list(scene(2, 3))
    inputs[which] = change(inputs[which])
    with pytest.raises(error) as caught:
        ops.rasterize(*inputs, *SETTINGS, "cpu", False)
    assert text in str(caught.value)


def test_gradients_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(dk.ShapeError, match=r"grad_images: expected shape \(2, 5, 6, 4\)"):
        ops.rasterize_backward(rand(2, 5, 6, 3), *scene(2, 3), *SETTINGS, "cpu")
    with pytest.raises(dk.DtypeError, match=r"grad_images: expected torch.float64"):
        ops.rasterize_backward(rand(2, 5, 6, 4).float(), *scene(2, 3), *SETTINGS, "cpu")
