"""The rasterizer as torch operators: `torch.ops.doublure.*`, on canonical inputs.

`rasterize`, its `rasterize_backward`, and `fused_mse` know fake tensors, autograd, vmap and
autocast, so compile and functional transforms see through them. The two operators named `_second`
are the derivatives of gradients, taken from the reference. `api` is what people call.

Canonical: params [B, T, 10], sigma [B, T], background [B, 3] of one dtype, float32 or float64;
counts [B] int64; all on one torch device. Images are [B, H, W, C]. Tensors that are not where the
backend works are copied there, and the results back.

Sigma and counts on a CUDA device that are drawn there are not looked at unless `check` asks for it,
since that would mean to wait: triangles of a bad sigma are then not there, and counts are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.library import custom_op

from . import devices, policy, second_order
from .backend import Backend
from .errors import DeviceError, DtypeError, NonFiniteError, RasterError, SettingError, ShapeError
from .scene import PARAMS, Gradients, Raster, Scene

__all__ = ["fused_mse", "fused_mse_now", "rasterize", "rasterize_backward", "rasterize_now"]

_COLUMNS = ("x0", "y0", "x1", "y1", "x2", "y2", "r", "g", "b", "a")


def rasterize_now(
    params: Tensor,
    sigma: Tensor,
    background: Tensor,
    counts: Tensor,
    height: int,
    width: int,
    kernel: str,
    support: str,
    alpha: bool,
    device: str,
    check: bool,
) -> Tensor:
    """Draw: [B, H, W, 3], or 4 channels with `alpha`. See `Raster` and `api.rasterize`."""
    _check_shapes(params, sigma, background, counts)
    raster = _raster(height, width, kernel, support, alpha)
    backend = _backend(params, raster, device)
    scene = _scene(backend, params, sigma, background, counts, check)
    return _tensor(_run(backend, backend.forward, scene, raster), params)


@custom_op("doublure::rasterize", mutates_args=())
def rasterize(
    params: Tensor,
    sigma: Tensor,
    background: Tensor,
    counts: Tensor,
    height: int,
    width: int,
    kernel: str,
    support: str,
    alpha: bool,
    device: str,
    check: bool,
) -> Tensor:
    """`rasterize_now` as an operator."""
    return rasterize_now(
        params, sigma, background, counts, height, width, kernel, support, alpha, device, check
    )


@custom_op("doublure::rasterize_backward", mutates_args=())
def rasterize_backward(
    grad_images: Tensor,
    params: Tensor,
    sigma: Tensor,
    background: Tensor,
    counts: Tensor,
    height: int,
    width: int,
    kernel: str,
    support: str,
    alpha: bool,
    device: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to params, sigma and background, from those to the images."""
    _check_shapes(params, sigma, background, counts)
    raster = _raster(height, width, kernel, support, alpha)
    _check_images("grad_images", grad_images, params, raster)
    backend = _backend(params, raster, device)
    scene = _scene(backend, params, sigma, background, counts, False)
    given = _placed(backend, grad_images)
    return _tensors(_run(backend, backend.backward, scene, raster, given), params)


@custom_op("doublure::rasterize_second", mutates_args=())
def rasterize_second(
    v_params: Tensor,
    v_sigma: Tensor,
    v_background: Tensor,
    grad_images: Tensor,
    params: Tensor,
    sigma: Tensor,
    background: Tensor,
    counts: Tensor,
    height: int,
    width: int,
    kernel: str,
    support: str,
    alpha: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Derivatives of <v, `rasterize_backward`>, to grad_images, params, sigma and background."""
    _check_shapes(params, sigma, background, counts)
    raster = _raster(height, width, kernel, support, alpha)
    grads: tuple[Tensor, Tensor, Tensor, Tensor] = second_order.rasterize_second(
        (v_params, v_sigma, v_background),
        grad_images,
        (params, sigma, background),
        counts,
        raster,
    )
    return grads


def fused_mse_now(
    params: Tensor,
    sigma: Tensor,
    background: Tensor,
    counts: Tensor,
    targets: Tensor,
    kernel: str,
    support: str,
    device: str,
    check: bool,
    sound: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each item's mean squared error against targets [B, H, W, 3], and the sum's gradients.

    `fused_mse` is this as an operator, which costs a small scene as much again. `sound` spares a
    look at sigma and counts that were numbers, and were looked at as such.

    Returns:
        Losses [B], and the gradients of their sum to params, sigma and background.
    """
    _check_shapes(params, sigma, background, counts)
    raster = _target_raster(targets, kernel, support)
    _check_images("targets", targets, params, raster)
    backend = _backend(params, raster, device)
    scene = _scene(backend, params, sigma, background, counts, check, sound)
    if check:
        _check_finite("targets", _host(targets))
    losses, gradients = _run(backend, backend.fused_mse, scene, raster, _placed(backend, targets))
    return (_tensor(losses, params), *_tensors(gradients, params))


@custom_op("doublure::fused_mse", mutates_args=())
def fused_mse(
    params: Tensor,
    sigma: Tensor,
    background: Tensor,
    counts: Tensor,
    targets: Tensor,
    kernel: str,
    support: str,
    device: str,
    check: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fused_mse_now` as an operator."""
    return fused_mse_now(params, sigma, background, counts, targets, kernel, support, device, check)


@custom_op("doublure::fused_mse_second", mutates_args=())
def fused_mse_second(
    v_params: Tensor,
    v_sigma: Tensor,
    v_background: Tensor,
    params: Tensor,
    sigma: Tensor,
    background: Tensor,
    counts: Tensor,
    targets: Tensor,
    kernel: str,
    support: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives of <v, the gradients of `fused_mse`>, to params, sigma and background."""
    _check_shapes(params, sigma, background, counts)
    raster = _target_raster(targets, kernel, support)
    grads: tuple[Tensor, Tensor, Tensor] = second_order.fused_mse_second(
        (v_params, v_sigma, v_background),
        (params, sigma, background),
        counts,
        targets,
        raster,
    )
    return grads


# What they give without drawing: shapes for fake and meta tensors.


@rasterize.register_fake
def _(*args: Any) -> Tensor:
    _check_shapes(*args[:4])
    params, height, width, alpha = args[0], args[4], args[5], args[8]
    images: Tensor = params.new_empty((params.shape[0], height, width, 4 if alpha else 3))
    return images


@rasterize_backward.register_fake
def _(*args: Any) -> Any:
    return _empty_like(*args[1:4])


@rasterize_second.register_fake
def _(*args: Any) -> Any:
    return _empty_like(*args[3:7])


@fused_mse.register_fake
def _(*args: Any) -> Any:
    _check_shapes(*args[:4])
    return (args[0].new_empty(args[0].shape[:1]), *_empty_like(*args[:3]))


@fused_mse_second.register_fake
def _(*args: Any) -> Any:
    return _empty_like(*args[3:6])


def _empty_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    # Results are contiguous whatever the strides of the inputs were.
    return tuple(t.new_empty(t.shape) for t in tensors)


# Autograd.


def _rasterize_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:10]


def _rasterize_grad(ctx: Any, grad_images: Tensor) -> tuple[Tensor | None, ...]:
    grads = rasterize_backward(grad_images.contiguous(), *ctx.saved_tensors, *ctx.settings)
    return (*_wanted(grads, ctx.needs_input_grad[:3]), *[None] * 8)


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:10]


def _backward_grad(ctx: Any, *v: Tensor) -> tuple[Tensor | None, ...]:
    grads = rasterize_second(*v, *ctx.saved_tensors, *ctx.settings)
    return (*_wanted(grads, ctx.needs_input_grad[:4]), *[None] * 7)


def _fused_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # The gradients are saved as outputs of this node: differentiating them comes back to it.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], *output[1:])
    ctx.settings = inputs[5:7]


def _fused_grad(ctx: Any, v_losses: Tensor | None, *v: Tensor | None) -> tuple[Tensor | None, ...]:
    if ctx.needs_input_grad[4]:
        raise RasterError(
            "doublure::fused_mse: expected targets without requires_grad, got targets with it; "
            "call doublure_kernels.fused_mse, or compare what rasterize draws"
        )
    saved = ctx.saved_tensors
    inputs, grads = saved[:3], saved[5:]
    totals: list[Tensor | None] = [None, None, None]
    if v_losses is not None:
        totals = [g * v_losses.reshape(-1, *[1] * (g.dim() - 1)) for g in grads]
    if any(x is not None for x in v):
        full = [torch.zeros_like(i) if x is None else x for i, x in zip(inputs, v, strict=True)]
        second = fused_mse_second(*full, *saved[:5], *ctx.settings)
        totals = [b if a is None else a + b for a, b in zip(totals, second, strict=True)]
    return (*_wanted(totals, ctx.needs_input_grad[:3]), *[None] * 6)


def _wanted(grads: Any, needed: tuple[bool, ...]) -> list[Tensor | None]:
    return [g if need else None for g, need in zip(grads, needed, strict=True)]


def _no_third(ctx: Any, *grads: Any) -> None:  # noqa: ARG001
    raise RasterError(
        "doublure: expected derivatives of first or second order, got a third; "
        "differentiate doublure_kernels.reference.render instead"
    )


rasterize.register_autograd(_rasterize_grad, setup_context=_rasterize_setup)
rasterize_backward.register_autograd(_backward_grad, setup_context=_backward_setup)
fused_mse.register_autograd(_fused_grad, setup_context=_fused_setup)
rasterize_second.register_autograd(_no_third)
fused_mse_second.register_autograd(_no_third)


# vmap: the mapped axis joins the batch. Every tensor has the batch first, in and out.


def _fold(op: Any) -> None:
    def mapped(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        folded = []
        for arg, dim in zip(args, in_dims, strict=True):
            if isinstance(arg, Tensor):
                whole = arg.expand(size, *arg.shape) if dim is None else arg.movedim(dim, 0)
                arg = whole.reshape(size * whole.shape[1], *whole.shape[2:])
            folded.append(arg)
        out = op(*folded)
        return _unfold(out, size)

    op.register_vmap(mapped)


def _unfold(out: Any, size: int) -> tuple[Any, Any]:
    if isinstance(out, Tensor):
        return out.reshape(size, out.shape[0] // size, *out.shape[1:]), 0
    return tuple(_unfold(o, size)[0] for o in out), (0,) * len(out)


for _op in (rasterize, rasterize_backward, rasterize_second, fused_mse, fused_mse_second):
    _fold(_op)
    for _type in ("cpu", "cuda"):
        _op.register_autocast(_type, torch.float32)


# Checks and conversions.


def _check_shapes(params: Tensor, sigma: Tensor, background: Tensor, counts: Tensor) -> None:
    if params.dim() != 3 or params.shape[-1] != PARAMS:
        raise ShapeError(f"params: expected shape (B, T, {PARAMS}), got {tuple(params.shape)}")
    batch, triangles = params.shape[:2]
    for name, tensor, shape in (
        ("sigma", sigma, (batch, triangles)),
        ("background", background, (batch, 3)),
        ("counts", counts, (batch,)),
    ):
        if tuple(tensor.shape) != shape:
            raise ShapeError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
        if tensor.device != params.device:
            raise DeviceError(
                f"{name}: expected a tensor on {params.device}, where params are, got one on "
                f"{tensor.device}; move one of them"
            )
    if params.dtype not in (torch.float32, torch.float64):
        raise DtypeError(f"params: expected float32 or float64, got {params.dtype}; convert them")
    for name, tensor in (("sigma", sigma), ("background", background)):
        if tensor.dtype != params.dtype:
            raise DtypeError(
                f"{name}: expected {params.dtype}, as params are, got {tensor.dtype}; convert one"
            )
    if counts.dtype != torch.int64:
        raise DtypeError(f"counts: expected {torch.int64}, got {counts.dtype}; convert them")


def _check_images(name: str, images: Tensor, params: Tensor, raster: Raster) -> None:
    shape = (params.shape[0], raster.height, raster.width, raster.channels)
    if tuple(images.shape) != shape:
        raise ShapeError(f"{name}: expected shape {shape}, got {tuple(images.shape)}")
    if images.dtype != params.dtype:
        raise DtypeError(
            f"{name}: expected {params.dtype}, as params are, got {images.dtype}; convert one"
        )
    if images.device != params.device:
        raise DeviceError(
            f"{name}: expected a tensor on {params.device}, where params are, got one on "
            f"{images.device}; move one of them"
        )


def _raster(height: int, width: int, kernel: str, support: str, alpha: bool) -> Raster:
    if height <= 0 or width <= 0:
        raise SettingError(f"height and width must be positive, got {height} and {width}")
    if kernel not in ("sigmoid", "compact"):
        raise SettingError(f'kernel: expected "sigmoid" or "compact", got {kernel!r}')
    if support not in ("exact", "bbox6"):
        raise SettingError(f'support: expected "exact" or "bbox6", got {support!r}')
    return Raster(height, width, kernel, support, alpha)  # type: ignore[arg-type]


def _target_raster(targets: Tensor, kernel: str, support: str) -> Raster:
    if targets.dim() != 4:
        raise ShapeError(
            f"targets: expected shape (B, H, W, 3), got {tuple(targets.shape)}; stack images "
            "along a first axis"
        )
    return _raster(targets.shape[1], targets.shape[2], kernel, support, False)


def _host(tensor: Tensor) -> NDArray[Any]:
    # Contiguous even where it was broadcast: Numba compiles once more for every other layout.
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.cpu().resolve_neg().contiguous()
    return tensor.numpy()


def _draws_there(backend: Backend, tensor: Tensor) -> bool:
    """Whether it takes torch tensors on a CUDA device, and this one as it is if it is on one."""
    if backend.name == "cuda":
        return True
    shares = getattr(backend, "shares", None)
    return shares is not None and tensor.is_cuda and bool(shares(tensor.device.index))


def _placed(backend: Backend, tensor: Tensor) -> Any:
    """Where the backend works: on a CUDA device, or as NumPy."""
    if not _draws_there(backend, tensor):
        return _host(tensor)
    tensor = tensor.detach().resolve_neg()
    if not tensor.is_cuda:
        tensor = tensor.to(backend.device)  # type: ignore[attr-defined]
    return tensor.contiguous()


def _scene(
    backend: Backend,
    params: Tensor,
    sigma: Tensor,
    background: Tensor,
    counts: Tensor,
    check: bool,
    sound: bool = False,
) -> Scene:
    """Where the backend works, and sound: what only a look at the numbers can tell is seen here."""
    tensors = (params, sigma, background, counts)
    if _draws_there(backend, params):
        if check or not (sound or params.is_cuda):
            _check_scene(
                Scene(*(_host(tensor) for tensor in tensors)), params.shape[1], check, sound
            )
        return Scene(*(_placed(backend, tensor) for tensor in tensors))
    scene = Scene(*(_host(tensor) for tensor in tensors))
    _check_scene(scene, params.shape[1], check, sound)
    return scene


def _check_scene(scene: Scene, triangles: int, check: bool, sound: bool) -> None:
    if not sound:
        _check_numbers(scene, triangles)
    if check:
        _check_triangles(scene)
        _check_finite("background", scene.background)


def _check_numbers(scene: Scene, triangles: int) -> None:
    bad = ~(np.isfinite(scene.sigma) & (scene.sigma > 0))
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise SettingError(
            f"sigma must be positive: expected finite values over 0, got {scene.sigma[at]} for "
            f"triangle {at[1]} of item {at[0]}"
        )
    bad = (scene.counts < 0) | (scene.counts > triangles)
    if bad.any():
        item = int(np.argmax(bad))
        raise SettingError(
            f"counts: expected 0 to {triangles} triangles an item, got {scene.counts[item]} for "
            f"item {item}"
        )


def _check_triangles(scene: Scene) -> None:
    bad = ~np.isfinite(scene.params)
    bad &= (np.arange(bad.shape[1]) < scene.counts[:, None])[..., None]
    if bad.any():
        item, triangle, column = (int(i) for i in np.argwhere(bad)[0])
        raise NonFiniteError(
            f"params: expected finite numbers, got {_COLUMNS[column]} = "
            f"{scene.params[item, triangle, column]} in triangle {triangle} of item {item}; look "
            "for a diverging step before it, or pass check=False to leave such triangles out"
        )


def _check_finite(name: str, array: NDArray[Any]) -> None:
    bad = ~np.isfinite(array)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise NonFiniteError(f"{name}: expected finite numbers, got {array[at]} at {list(at)}")


def _backend(params: Tensor, raster: Raster, device: str) -> Backend:
    batch, triangles = params.shape[:2]
    return policy.choose(
        device,
        batch=batch,
        triangles=triangles,
        pixels=raster.height * raster.width,
        double=params.dtype == torch.float64,
        where="cuda" if params.is_cuda else "cpu",
    )


def _run(backend: Backend, method: Callable[..., Any], *args: Any) -> Any:
    if backend.name == "reference":  # which differentiates by torch's autograd
        result = second_order.undisturbed(lambda: method(*args))
    else:
        result = method(*args)
    devices.note_device(backend)
    return result


def _tensor(array: Any, like: Tensor) -> Tensor:
    if isinstance(array, Tensor):
        return array.to(like.device, like.dtype)
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device, like.dtype)


def _tensors(gradients: Gradients, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _tensor(gradients.params, like),
        _tensor(gradients.sigma, like),
        _tensor(gradients.background, like),
    )
