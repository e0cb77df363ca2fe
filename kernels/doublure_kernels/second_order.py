"""Derivatives of gradients, by differentiating the reference twice.

Backends know first derivatives only. Second ones are rare and small (gradient penalties, checks,
Hessian-vector products), so they are taken from `reference.render` in float64 through torch's
autograd, which keeps every intermediate of every pair of a pixel and a triangle. Hence the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import SettingError
from .scene import Raster

__all__ = ["SECOND_ORDER_PAIRS", "fused_mse_second", "rasterize_second", "undisturbed"]

SECOND_ORDER_PAIRS = 1 << 22
"""The most B·T·H·W of a call that is differentiated twice; each was measured to take 0.65 KiB."""

_T = TypeVar("_T")

Three = Sequence[Tensor]
"""Of params, sigma and background."""


def rasterize_second(
    v: Three, grad_images: Tensor, inputs: Three, counts: Tensor, raster: Raster
) -> Any:
    """Derivatives of <v, g>, g the gradients that `grad_images` give, to it and to the inputs.

    Raises:
        SettingError: Too large; see `SECOND_ORDER_PAIRS`.
    """

    def gradients(leaves: Three, given: Tensor) -> tuple[Tensor, ...]:
        images = _render(leaves, counts, raster)
        return torch.autograd.grad(
            images, leaves, given, create_graph=True, allow_unused=True, materialize_grads=True
        )

    return _second(gradients, v, inputs, grad_images, raster, to_given=True)


def fused_mse_second(
    v: Three, inputs: Three, counts: Tensor, targets: Tensor, raster: Raster
) -> Any:
    """Derivatives of <v, g>, g the gradients of all items' mean squared errors, to the inputs.

    Raises:
        SettingError: Too large; see `SECOND_ORDER_PAIRS`.
    """

    def gradients(leaves: Three, given: Tensor) -> tuple[Tensor, ...]:
        errors = _render(leaves, counts, raster) - given
        losses = errors.square().mean((1, 2, 3))
        return torch.autograd.grad(
            losses.sum(), leaves, create_graph=True, allow_unused=True, materialize_grads=True
        )

    return _second(gradients, v, inputs, targets, raster, to_given=False)


def undisturbed(work: Callable[[], _T]) -> _T:
    """Run something that uses autograd from inside an operator, where it is off in this thread.

    A thread of its own has none of the caller's modes: autocast, inference mode, transforms.
    """
    with ThreadPoolExecutor(1, "doublure-reference") as pool:
        return pool.submit(work).result()


def _render(leaves: Three, counts: Tensor, raster: Raster) -> Tensor:
    from .reference import render

    params, sigma, background = leaves
    return render(params, sigma, background, counts, raster)


def _second(
    gradients: Callable[[Three, Tensor], tuple[Tensor, ...]],
    v: Three,
    inputs: Three,
    given: Tensor,
    raster: Raster,
    *,
    to_given: bool,
) -> tuple[Tensor, ...]:
    batch, triangles = inputs[0].shape[:2]
    pairs = batch * triangles * raster.height * raster.width
    if pairs > SECOND_ORDER_PAIRS:
        raise SettingError(
            f"second order: expected at most {SECOND_ORDER_PAIRS} pairs of a pixel and a triangle, "
            f"got {batch} x {triangles} x {raster.height} x {raster.width} = {pairs}; take fewer "
            "items at a time, or smaller images"
        )

    def work() -> tuple[Tensor, ...]:
        leaves = [_leaf(tensor) for tensor in inputs]
        data = _leaf(given)
        first = gradients(leaves, data)
        product = torch.stack(
            [(g * x.detach().double()).sum() for g, x in zip(first, v, strict=True)]
        ).sum()
        wanted = [data, *leaves] if to_given else leaves
        if not product.requires_grad:  # no triangle, no item: nothing depends on anything
            return tuple(torch.zeros_like(w) for w in wanted)
        return torch.autograd.grad(product, wanted, allow_unused=True, materialize_grads=True)

    like = inputs[0]
    return tuple(g.to(like.device, like.dtype).contiguous() for g in undisturbed(work))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double().clone().requires_grad_()
