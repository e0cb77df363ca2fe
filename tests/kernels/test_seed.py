"""Code written for diffrast's torch layer: the same signatures, defaults, shapes and meaning."""

import inspect
from collections.abc import Callable
from typing import Any

import doublure_kernels as dk
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from doublure_kernels import api
from torch import Tensor

BLACK = (0.0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def sharp_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_warned", True)


@pytest.mark.parametrize(
    ("function", "prefix"),
    [
        (
            dk.rasterize,
            {
                "params": ..., "height": ..., "width": ..., "sigma": 0.0015, "background": BLACK,
                "channels_first": True, "device": "auto",
            },
        ),
        (
            dk.fused_mse,
            {"params": ..., "targets": ..., "sigma": 0.0015, "background": BLACK, "device": "auto"},
        ),
        (
            dk.fused_loss,
            {"params": ..., "targets": ..., "sigma": 0.0015, "background": BLACK, "device": "auto"},
        ),
        (dk.clamp_params, {"params": ...}),
        (dk.psnr, {"a": ..., "b": ..., "max_value": 1.0}),
        (dk.prefers_gpu, {"batch": ..., "triangles": ..., "pixels": ..., "discrete": None}),
        (dk.random_params, {"batch": ..., "triangles": ...}),
    ],
)  # fmt: skip
def test_signatures_begin_alike(function: Callable[..., Any], prefix: dict[str, Any]) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == list(prefix)
    for parameter in positional:
        default = prefix[parameter.name]
        assert parameter.default == (inspect.Parameter.empty if default is ... else default)
    for parameter in parameters[len(positional) :]:
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.default is not inspect.Parameter.empty


def test_random_params_are_keyed_by_device_and_generator() -> None:
    signature = inspect.signature(dk.random_params).parameters
    assert signature["device"].default == "cpu"
    assert signature["generator"].default is None


def test_a_network_trains_through_it() -> None:
    model = torch.nn.Linear(8, 3 * 10)
    image = torch.rand(2, 3, 24, 32)
    params = model(torch.rand(2, 8)).reshape(2, 3, 10).sigmoid()
    render = dk.rasterize(params, 24, 32, sigma=0.02)
    assert render.shape == (2, 3, 24, 32)
    assert render.is_contiguous()
    F.mse_loss(render, image).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.abs().sum() > 0


def test_layouts_differ_only_in_order() -> None:
    params = dk.random_params(2, 5)
    planes = dk.rasterize(params, 6, 7, 0.02, (0.1, 0.2, 0.3), True, "cpu")
    last = dk.rasterize(params, 6, 7, 0.02, (0.1, 0.2, 0.3), False, "cpu")
    assert last.shape == (2, 6, 7, 3)
    assert torch.equal(planes, last.permute(0, 3, 1, 2))


def test_dtype_and_device_are_those_of_params() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        params = dk.random_params(1, 2).to(dtype)
        assert dk.rasterize(params, 4, 4).dtype == dtype
        assert dk.fused_mse(params, torch.zeros(1, 3, 4, 4, dtype=dtype)).dtype == dtype
        losses, grads = dk.fused_loss(params, torch.zeros(1, 4, 4, 3, dtype=dtype))
        assert grads.dtype == dtype
        assert losses.shape == (1,)


def test_one_over_the_batch_is_the_chain_rule_of_the_mean() -> None:
    batch = 3
    params = dk.random_params(batch, 4).requires_grad_()
    targets = torch.rand(batch, 3, 8, 8)
    loss = dk.fused_mse(params, targets, 0.05)
    loss.backward()
    losses, grads = dk.fused_loss(params, targets.permute(0, 2, 3, 1), 0.05)
    assert losses.shape == (batch,)
    assert grads.shape == (batch, 4, 10)
    torch.testing.assert_close(loss.detach(), losses.mean())
    torch.testing.assert_close(params.grad, grads / batch)

    params.grad = None
    F.mse_loss(dk.rasterize(params, 8, 8, 0.05), targets).backward()
    torch.testing.assert_close(params.grad, grads / batch)

    each = [
        dk.fused_loss(params[i : i + 1], targets[i : i + 1].movedim(1, -1), 0.05)
        for i in range(batch)
    ]
    torch.testing.assert_close(losses, torch.cat([one[0] for one in each]))
    torch.testing.assert_close(grads, torch.cat([one[1] for one in each]))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p, _: dk.rasterize(p[0], 4, 4), r"expected params of shape \(B, T, 10\), got"),
        (lambda p, _: dk.rasterize(p, 0, 4), "height and width must be positive"),
        (lambda p, _: dk.rasterize(p, 4, 4, 0.0), "sigma must be positive"),
        (lambda p, _: dk.rasterize(p, 4, 4, float("nan")), "sigma must be positive"),
        (lambda p, t: dk.fused_mse(p[0], t), r"expected params of shape \(B, T, 10\), got"),
        (lambda p, t: dk.fused_mse(p, t[0]), r"expected targets of shape \(B, 3, H, W\), got"),
        (lambda p, t: dk.fused_mse(p, t, -1.0), "sigma must be positive"),
        (lambda p, t: dk.fused_loss(p, t[0]), r"expected targets of shape \(B, H, W, 3\), got"),
    ],
)
def test_checks_raise_value_errors_of_the_same_meaning(
    call: Callable[[Tensor, Tensor], object], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        call(dk.random_params(1, 2), torch.zeros(1, 3, 4, 4))


def test_random_params_are_drawn_in_the_same_order() -> None:
    got = dk.random_params(3, 5, generator=torch.Generator().manual_seed(11))
    generator = torch.Generator().manual_seed(11)
    centres = torch.rand(3, 5, 1, 2, generator=generator)
    corners = centres + (torch.rand(3, 5, 3, 2, generator=generator) - 0.5) * 0.3
    colours = torch.rand(3, 5, 3, generator=generator)
    alphas = torch.rand(3, 5, 1, generator=generator) * 0.4 + 0.3
    assert torch.equal(got, torch.cat([corners.reshape(3, 5, 6), colours, alphas], -1))
    assert got.dtype == torch.float32
    assert got[..., 9].min() >= 0.3
    assert got[..., 9].max() <= 0.7


def test_clamp_params_holds_the_same_ranges() -> None:
    wild = torch.linspace(-3, 3, 50).reshape(1, 5, 10)
    tame = dk.clamp_params(wild)
    assert tame[..., :6].min() == -0.25
    assert tame[..., :6].max() == 1.25
    assert tame[..., 6:9].min() == 0
    assert tame[..., 6:9].max() == 1
    torch.testing.assert_close(tame[..., 9].min(), torch.tensor(1e-3))
    torch.testing.assert_close(tame[..., 9].max(), torch.tensor(0.999))
    assert torch.equal(dk.clamp_params(tame), tame)


def test_psnr_is_in_decibels() -> None:
    a = torch.zeros(2, 3, 4, 4)
    torch.testing.assert_close(dk.psnr(a, a + 0.1), torch.tensor(20.0))
    torch.testing.assert_close(dk.psnr(a, a + 0.1, max_value=10.0), torch.tensor(40.0))
    assert dk.psnr(a, a) == float("inf")


def test_last_device_says_where_the_call_ran() -> None:
    dk.fused_loss(dk.random_params(1, 2), torch.zeros(1, 4, 4, 3), device="auto")
    assert dk.last_device() == "cpu"


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(dk.DeviceError, match="got 'tpu'; did you mean \"gpu\""):
        dk.rasterize(dk.random_params(1, 2), 4, 4, device="tpu")
