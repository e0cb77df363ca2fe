"""What people call with torch tensors: drawing, comparing, and what goes with it.

Every function checks what it is given and brings it to the form of `ops`. The functions and
defaults of diffrast's torch layer are here with the same meaning, so code written for it runs.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from . import devices, ops, policy
from .errors import DeviceError, DtypeError, SettingError, ShapeError, SigmaWarning
from .scene import PARAMS, Kernel, Raster, Scene, Support

__all__ = ["clamp_params", "fused_loss", "fused_mse", "psnr", "random_params", "rasterize"]

Sigma = float | Sequence[float] | Tensor
Background = Sequence[float] | Tensor
Counts = Sequence[int] | Tensor

_BLACK = (0.0, 0.0, 0.0)
_LARGEST = 1 << 20  # pixels a side; past that a mistake is likelier than a wish
_SINGLE = (torch.float16, torch.bfloat16, torch.float32)  # what is computed in float32
_warned = False


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What `ops` takes, the dtype that results are wanted in, and whether dtypes may mix."""

    params: Tensor
    sigma: Tensor
    background: Tensor
    counts: Tensor
    dtype: torch.dtype
    mixed: bool

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.params, self.sigma, self.background, self.counts


def rasterize(
    params: Tensor,
    height: int,
    width: int,
    sigma: Sigma = 0.0015,
    background: Background = _BLACK,
    channels_first: bool = True,
    device: str = "auto",
    *,
    counts: Counts | None = None,
    kernel: Kernel = "sigmoid",
    support: Support = "exact",
    alpha: bool = False,
    check: bool = False,
) -> Tensor:
    """Render a batch of soft triangle scenes, differentiably.

    Args:
        params: Triangles back to front, [B, T, 10]: x0 y0 x1 y1 x2 y2 in normalised coordinates (0
            to 1, x right, y down), linear r g b, opacity. float16 and bfloat16 are computed in
            float32, and so is all but float64 under autocast.
        height: Pixels.
        width: Pixels.
        sigma: Edge softness in normalised units, over 0: a number, or a tensor [], [T], [B, 1] or
            [B, T]. Anneal it downward in training (`anneal_sigma`): a sharp start leaves triangles
            without a gradient to follow.
        background: Linear RGB behind everything: three numbers, or a tensor [3] or [B, 3].
        channels_first: [B, C, H, W] instead of [B, H, W, C].
        device: `auto`, `cpu`, `gpu`, `vulkan`, `cuda` or `reference`: where it is drawn, whatever
            device the tensors are on.
        counts: How many of its T triangles each item has, [B]; None means all.
        kernel: Coverage of a signed distance, `sigmoid` or `compact` (nothing beyond 3 sigma).
        support: `exact` draws whatever weighs over 1e-6; `bbox6` cuts at the bounding box padded by
            6 sigma.
        alpha: Return the drawn opacity as a fourth channel.
        check: Look for NaN and infinity first. Else a triangle with one is not there.
    Returns:
        Linear RGB(A), on the device of `params` and in its dtype (float32 under autocast).
        Gradients reach params, and sigma and background where they are tensors.
    Raises:
        ShapeError: `params` is not [B, T, 10], or another tensor does not fit it.
        DtypeError: Not floating point, or not the dtype of `params`.
        SettingError: A size, sigma, count, kernel or support out of its range.
        DeviceError: `device` is not known or not there, or tensors are on different ones.
        NonFiniteError: With `check`, naming the first bad triangle.
    """
    _check_params(params)
    height, width = _size(height), _size(width)
    if height <= 0 or width <= 0:
        raise SettingError(f"height and width must be positive, got {height} and {width}")
    devices.check_device(device)
    inputs = _inputs(params, sigma, background, counts)
    _warn_if_sharp(sigma, inputs, height, width)
    # Without a gradient to find, an operator's bookkeeping would take longer than a small scene.
    plain = not torch.is_grad_enabled() or not any(t.requires_grad for t in inputs.tensors[:3])
    draw = ops.rasterize_now if plain and _ordinary(*inputs.tensors) else ops.rasterize
    images: Tensor = draw(*inputs.tensors, height, width, kernel, support, alpha, device, check)
    images = images.to(inputs.dtype)
    return images.permute(0, 3, 1, 2).contiguous() if channels_first else images


def fused_mse(
    params: Tensor,
    targets: Tensor,
    sigma: Sigma = 0.0015,
    background: Background = _BLACK,
    device: str = "auto",
    *,
    counts: Counts | None = None,
    kernel: Kernel = "sigmoid",
    support: Support = "exact",
    check: bool = False,
) -> Tensor:
    """Mean squared error between the rendered scenes and `targets`, in one pass.

    What `F.mse_loss(rasterize(params, H, W, sigma), targets)` gives, forward and backward, with
    one render a step instead of two and no image stored. Where `targets` want a gradient, the
    images are drawn and compared. An empty batch gives 0.

    Args:
        params: [B, T, 10], as for `rasterize`.
        targets: Linear RGB, [B, 3, H, W], as `rasterize` returns it; dtype and device of `params`.
        sigma: As for `rasterize`; so are the others.
        background: Linear RGB.
        device: Where it is drawn.
        counts: Triangles of each item.
        kernel: `sigmoid` or `compact`.
        support: `exact` or `bbox6`.
        check: Look for NaN and infinity first, in `targets` too.
    Returns:
        A scalar, the mean over the batch.
    Raises:
        ShapeError: `params` is not [B, T, 10], or `targets` not [B, 3, H, W] of the same batch.
        DtypeError, SettingError, DeviceError, NonFiniteError: As for `rasterize`.
    """
    _check_params(params)
    _check_tensor("targets", targets)
    if targets.dim() != 4 or targets.shape[1] != 3:
        raise ShapeError(
            f"expected targets of shape (B, 3, H, W), got {tuple(targets.shape)}; images with the "
            "channels last need permute(0, 3, 1, 2)"
        )
    devices.check_device(device)
    inputs = _inputs(params, sigma, background, counts)
    last = _targets(targets.permute(0, 2, 3, 1), params, inputs)
    height, width = last.shape[1], last.shape[2]
    _warn_if_sharp(sigma, inputs, height, width)
    if targets.requires_grad and torch.is_grad_enabled():
        images = ops.rasterize(
            *inputs.tensors, height, width, kernel, support, False, device, check
        )
        losses: Tensor = (images - last).square().mean((1, 2, 3))
    else:
        losses = ops.fused_mse(*inputs.tensors, last, kernel, support, device, check)[0]
    loss: Tensor = losses.sum() / max(params.shape[0], 1)
    return loss.to(inputs.dtype)


def fused_loss(
    params: Tensor,
    targets: Tensor,
    sigma: Sigma = 0.0015,
    background: Background = _BLACK,
    device: str = "auto",
    *,
    counts: Counts | None = None,
    kernel: Kernel = "sigmoid",
    support: Support = "exact",
    check: bool = False,
) -> tuple[Tensor, Tensor]:
    """Each item's mean squared error and the parameters' gradients in one call, without autograd.

    For fitting triangles directly. To train a network use `rasterize` or `fused_mse`: this returns
    gradients instead of routing them, and nothing it returns has a graph.

    Args:
        params: [B, T, 10], as for `rasterize`.
        targets: Linear RGB, [B, H, W, 3]; dtype and device of `params`.
        sigma: As for `rasterize`; so are the others.
        background: Linear RGB.
        device: Where it is drawn.
        counts: Triangles of each item.
        kernel: `sigmoid` or `compact`.
        support: `exact` or `bbox6`.
        check: Look for NaN and infinity first, in `targets` too.
    Returns:
        Losses [B], float32 or float64 as computed, and the gradients of their sum, [B, T, 10], in
        the dtype of `params`. `fused_mse` is their mean, so its gradients are these divided by B.
    Raises:
        ShapeError: `params` is not [B, T, 10], or `targets` not [B, H, W, 3] of the same batch.
        DtypeError, SettingError, DeviceError, NonFiniteError: As for `rasterize`.
    """
    short = _short_way(params, targets, sigma, background, device, counts, kernel, support, check)
    if short is not None:
        return short
    _check_params(params)
    _check_tensor("targets", targets)
    if targets.dim() != 4 or targets.shape[3] != 3:
        raise ShapeError(
            f"expected targets of shape (B, H, W, 3), got {tuple(targets.shape)}; images with the "
            "channels first need permute(0, 2, 3, 1)"
        )
    devices.check_device(device)
    with torch.no_grad():
        inputs = _inputs(params, sigma, background, counts)
        last = _targets(targets, params, inputs)
        if _ordinary(params, targets):
            sound = isinstance(sigma, float | int) and counts is None
            losses, grads, _, _ = ops.fused_mse_now(
                *inputs.tensors, last, kernel, support, device, check, sound
            )
        else:
            losses, grads, _, _ = ops.fused_mse(
                *inputs.tensors, last, kernel, support, device, check
            )
        return losses, grads.to(inputs.dtype)


def random_params(
    batch: int,
    triangles: int,
    *,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Starting parameters: small triangles of any colour all over the image, [B, T, 10], float32.

    Corners lie within ±.15 of a random centre and opacities in .3 to .7. Larger triangles overlap
    so much that their first gradients mostly cancel.

    Args:
        batch: Scenes.
        triangles: In each.
        device: The tensor's.
        generator: On that device; None takes torch's own.
    """
    if batch < 0 or triangles < 0:
        raise SettingError(
            f"random_params: expected batch and triangles of 0 or more, got {batch} and {triangles}"
        )

    def rand(*shape: int) -> Tensor:
        return torch.rand(batch, triangles, *shape, device=device, generator=generator)

    corners = rand(1, 2) + (rand(3, 2) - 0.5) * 0.3
    return torch.cat([corners.flatten(2), rand(3), rand(1) * 0.4 + 0.3], dim=-1)


def clamp_params(params: Tensor) -> Tensor:
    """Parameters brought back into range: corners to [-.25, 1.25], colours [0, 1], opacity
    [.001, .999].

    Opacity stays inside because at 0 and 1 it has no gradient, and could never come back.

    Args:
        params: [..., 10].
    """
    if params.dim() == 0 or params.shape[-1] != PARAMS:
        raise ShapeError(
            f"clamp_params: expected params of shape (..., {PARAMS}), got {tuple(params.shape)}"
        )
    corners = params[..., :6].clamp(-0.25, 1.25)
    colours = params[..., 6:9].clamp(0.0, 1.0)
    return torch.cat([corners, colours, params[..., 9:].clamp(1e-3, 0.999)], dim=-1)


def psnr(a: Tensor, b: Tensor, max_value: float = 1.0) -> Tensor:
    """Peak signal-to-noise ratio in dB over all of two images of one shape; inf where equal."""
    if a.shape != b.shape:
        raise ShapeError(
            f"psnr: expected two images of one shape, got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    mse = (a - b).square().mean()
    equal = mse == 0  # apart, so that equal images have no NaN gradient
    ratio = 10.0 * torch.log10(max_value**2 / torch.where(equal, 1.0, mse))
    return torch.where(equal, math.inf, ratio)


def _ordinary(*tensors: Tensor) -> bool:
    """Whether these are numbers in memory, and nobody traces or maps what is done to them."""
    if torch.compiler.is_compiling():
        return False
    try:
        return all(
            type(t) in (Tensor, Parameter) and not t.is_meta and t.data_ptr() >= 0 for t in tensors
        )
    except RuntimeError:  # torch's transforms wrap tensors in ones without memory of their own
        return False


def _short_way(
    params: Tensor,
    targets: Tensor,
    sigma: Sigma,
    background: Background,
    device: str,
    counts: Counts | None,
    kernel: Kernel,
    support: Support,
    check: bool,
) -> tuple[Tensor, Tensor] | None:
    """`fused_loss` of plain float32 tensors on a CUDA device or drawn on the processor; None where
    anything is out of the ordinary, for the long way to do, or to complain of.

    A call takes a few hundredths of a millisecond on a GPU, half a millisecond on the processor,
    and the long way's checks a tenth.
    """
    if (
        type(params) not in (Tensor, Parameter)
        or type(targets) is not Tensor
        or counts is not None
        or check
        or device not in (("auto", "cuda", "gpu") if params.is_cuda else ("auto", "cpu"))
        or type(sigma) is not float
        or not 7.1e-46 < sigma < 3.4e38
        or type(background) is not tuple
        or len(background) != 3
        or not all(type(value) is float for value in background)
        or params.dtype != torch.float32
        or targets.dtype != torch.float32
        or kernel not in ("sigmoid", "compact")
        or support not in ("exact", "bbox6")
        or torch.compiler.is_compiling()
        or _autocast(params.device.type)
    ):
        return None
    shape = targets.shape
    if (
        params.dim() != 3
        or len(shape) != 4
        or params.shape[2] != PARAMS
        or shape[3] != 3
        or shape[0] != params.shape[0]
        or targets.device != params.device
        or not params.is_contiguous()
        or not targets.is_contiguous()
        or targets.is_neg()
        or params.is_neg()
        or 0 in shape
        or not _ordinary(params, targets)
    ):
        return None
    if params.device.type == "cpu":
        return _short_way_host(params, targets, sigma, background, device, kernel, support)
    backend = devices.default("cuda") if device == "cuda" else devices.gpu("cuda")
    if backend is None:
        return None
    devices.note_device(backend)
    found: tuple[Tensor, Tensor] = backend.fused_loss(  # type: ignore[attr-defined]
        params, targets, sigma, background, kernel, support
    )
    return found


def _short_way_host(
    params: Tensor,
    targets: Tensor,
    sigma: float,
    background: tuple[float, float, float],
    device: str,
    kernel: Kernel,
    support: Support,
) -> tuple[Tensor, Tensor] | None:
    (batch, height, width), triangles = targets.shape[:3], params.shape[1]
    backend = policy.choose(device, batch=batch, triangles=triangles, pixels=height * width)
    if backend.name != "cpu":
        return None
    scene = Scene(params.detach().numpy(), *_host_numbers(batch, triangles, sigma, background))
    raster = Raster(height, width, kernel, support)
    losses, gradients = backend.fused_mse(scene, raster, targets.numpy())
    devices.note_device(backend)
    return torch.from_numpy(losses), torch.from_numpy(gradients.params)


@lru_cache(maxsize=64)
def _host_numbers(
    batch: int, triangles: int, sigma: float, background: tuple[float, float, float]
) -> tuple[Any, Any, Any]:
    """Sigma, background and counts of full scenes in NumPy, made once."""
    return (
        np.full((batch, triangles), sigma, np.float32),
        np.tile(np.array(background, np.float32), (batch, 1)),
        np.full(batch, triangles, np.int64),
    )


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise DtypeError(
            f"{name}: expected a torch tensor, got {type(value).__name__}; "
            "torch.as_tensor makes one"
        )


def _check_params(params: Tensor) -> None:
    _check_tensor("params", params)
    if params.dim() != 3 or params.shape[-1] != PARAMS:
        raise ShapeError(f"expected params of shape (B, T, {PARAMS}), got {tuple(params.shape)}")
    if params.layout != torch.strided:
        raise DtypeError(
            f"params: expected a dense tensor, got layout {params.layout}; .to_dense() makes one"
        )
    if params.dtype not in (*_SINGLE, torch.float64):
        raise DtypeError(
            f"params: expected float16, bfloat16, float32 or float64, got {params.dtype}; "
            "convert them, .float() for example"
        )


def _size(value: int) -> int:
    if torch.compiler.is_compiling():
        return value
    try:
        size = operator.index(value)
    except TypeError:
        raise SettingError(
            f"height and width must be positive whole numbers, got {value!r}"
        ) from None
    if size > _LARGEST:
        raise SettingError(f"height and width: expected at most {_LARGEST:,}, got {size:,}")
    return size


def _inputs(params: Tensor, sigma: Sigma, background: Background, counts: Counts | None) -> _Inputs:
    if params.is_cuda and not torch.compiler.is_compiling():
        sigma, background, counts = _kept_numbers(params, sigma, background, counts)
    mixed = _autocast(params.device.type) and params.dtype in _SINGLE
    compute = torch.float64 if params.dtype == torch.float64 else torch.float32
    batch, triangles = params.shape[:2]
    return _Inputs(
        params.to(compute),
        _sigma(sigma, params, mixed).to(compute).expand(batch, triangles),
        _background(background, params, mixed).to(compute).expand(batch, 3),
        _counts(counts, params),
        compute if mixed else params.dtype,
        mixed,
    )


_kept: dict[tuple[object, ...], Tensor] = {}


def _kept_numbers(
    params: Tensor, sigma: Sigma, background: Background, counts: Counts | None
) -> tuple[Sigma, Background, Counts | None]:
    """Numbers as tensors on a CUDA device, made once: to copy them there would mean to wait."""
    batch, triangles = params.shape[:2]
    if isinstance(sigma, float | int):
        _check_sigma(sigma, params)
        sigma = _on_device((sigma,), (batch, triangles), _exact(params), params)
    if type(background) is tuple and len(background) == 3:
        background = _on_device(background, (batch, 3), _exact(params), params)
    if counts is None:
        counts = _on_device((triangles,), (batch,), torch.int64, params)
    return sigma, background, counts


def _on_device(
    values: tuple[object, ...], shape: tuple[int, ...], dtype: torch.dtype, params: Tensor
) -> Tensor:
    key = (values, shape, dtype, params.device)
    found = _kept.get(key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():  # autograd may save it
            found = torch.tensor(values, dtype=dtype).expand(shape).contiguous().to(params.device)
        if torch.cuda.is_current_stream_capturing():
            return found  # it is the graph's
        torch.cuda.current_stream(params.device).synchronize()  # any stream may use it next
        if len(_kept) >= 256:
            _kept.clear()
        _kept[key] = found
    return found


def _autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _sigma(sigma: Sigma, params: Tensor, mixed: bool) -> Tensor:
    if isinstance(sigma, float | int):
        _check_sigma(sigma, params)
        return torch.full((), sigma, dtype=_exact(params), device=params.device)
    if isinstance(sigma, Tensor):
        _check_like("sigma", sigma, params, mixed)
    else:
        sigma = _numbers("sigma", sigma, params)
    batch, triangles = params.shape[:2]
    if tuple(sigma.shape) not in ((), (triangles,), (batch, 1), (batch, triangles)):
        raise ShapeError(
            f"sigma: expected a number or shape ({triangles},), ({batch}, 1) or "
            f"({batch}, {triangles}) for {batch} items of {triangles} triangles, "
            f"got {tuple(sigma.shape)}"
        )
    return sigma


def _check_sigma(sigma: float, params: Tensor) -> None:
    least, most = (0.0, math.inf) if params.dtype == torch.float64 else (7.1e-46, 3.4e38)
    if not (sigma > least and sigma < most):
        raise SettingError(
            f"sigma must be positive: expected a finite number, got {sigma} "
            f"to hold in {_exact(params)}"
        )


def _background(background: Background, params: Tensor, mixed: bool) -> Tensor:
    if isinstance(background, Tensor):
        _check_like("background", background, params, mixed)
    else:
        background = _numbers("background", background, params)
    batch = params.shape[0]
    if tuple(background.shape) not in ((3,), (batch, 3)):
        raise ShapeError(
            f"background: expected three numbers or shape (3,) or ({batch}, 3), "
            f"got {tuple(background.shape)}"
        )
    return background


def _numbers(name: str, values: Sequence[float], params: Tensor) -> Tensor:
    try:
        return torch.as_tensor(values, dtype=_exact(params), device=params.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SettingError(f"{name}: expected numbers, got {values!r}: {error}") from None


def _exact(params: Tensor) -> torch.dtype:
    # Plain numbers do not lose digits to half precision parameters.
    return torch.float64 if params.dtype == torch.float64 else torch.float32


def _counts(counts: Counts | None, params: Tensor) -> Tensor:
    batch, triangles = params.shape[:2]
    if counts is None:
        return torch.full((), triangles, dtype=torch.int64, device=params.device).expand(batch)
    if not isinstance(counts, Tensor):
        counts = torch.as_tensor(counts, device=params.device)
        if counts.numel() == 0:
            counts = counts.long()
    if counts.dtype.is_floating_point or counts.dtype.is_complex or counts.dtype == torch.bool:
        raise DtypeError(f"counts: expected whole numbers, got {counts.dtype}; convert them")
    if tuple(counts.shape) != (batch,):
        raise ShapeError(f"counts: expected shape ({batch},), got {tuple(counts.shape)}")
    _check_device(counts, "counts", params)
    return counts.long()


def _targets(targets: Tensor, params: Tensor, inputs: _Inputs) -> Tensor:
    """Targets [B, H, W, 3] as they are compared."""
    if targets.shape[0] != params.shape[0]:
        raise ShapeError(
            f"targets: expected a batch of {params.shape[0]}, as params are, got {targets.shape[0]}"
        )
    if targets.shape[1] <= 0 or targets.shape[2] <= 0:
        raise ShapeError(
            "targets: height and width must be positive, got "
            f"{targets.shape[1]} and {targets.shape[2]}"
        )
    _check_like("targets", targets, params, inputs.mixed)
    return targets.to(inputs.params.dtype).contiguous()


def _check_like(name: str, tensor: Tensor, params: Tensor, mixed: bool) -> None:
    _check_device(tensor, name, params)
    if tensor.dtype != params.dtype and not (mixed and tensor.dtype in _SINGLE):
        raise DtypeError(
            f"{name}: expected {params.dtype}, as params are, got {tensor.dtype}; convert one of "
            "them, or call under torch.autocast to compute in float32"
        )


def _check_device(tensor: Tensor, name: str, params: Tensor) -> None:
    if tensor.device != params.device:
        raise DeviceError(
            f"{name}: expected a tensor on {params.device}, where params are, got one on "
            f"{tensor.device}; move one of them"
        )


def _warn_if_sharp(sigma: Sigma, inputs: _Inputs, height: int, width: int) -> None:
    """Once a process, and only where looking at sigma costs nothing."""
    global _warned
    if torch.compiler.is_compiling() or _warned or not torch.is_grad_enabled():
        return
    if not any(t.requires_grad for t in inputs.tensors[:3]):
        return
    if isinstance(sigma, float | int):
        least = float(sigma)
    elif inputs.sigma.device.type == "cpu" and inputs.sigma.numel():
        try:
            least = float(inputs.sigma.detach().min())
        except RuntimeError:  # mapped by vmap: there is no one number to look at
            return
    else:
        return
    quarter = 0.25 / max(height, width)
    if least >= quarter:
        return
    _warned = True
    warnings.warn(
        f"sigma is {least:.3g}, under a quarter of a pixel ({quarter:.3g} at {height} x {width}): "
        "most triangles get no gradient there; start softer and lower it with anneal_sigma",
        SigmaWarning,
        stacklevel=3,
    )
