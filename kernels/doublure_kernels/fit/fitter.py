"""A picture rebuilt from soft triangles, a step at a time."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import devices, policy
from ..backend import Backend
from ..errors import DeviceError, ImageError, ResumeError, SettingError, ShapeError, SigmaWarning
from .optimiser import (
    FitState,
    HostOptimiser,
    Optimiser,
    OptimiserFactory,
    Problem,
    Stop,
    check_state,
)
from .pictures import srgb_to_linear
from .scene_file import FittedScene
from .settings import FitSettings, parse_colour
from .start import first_triangles

__all__ = ["Fit", "psnr_db"]

Array = NDArray[Any]


def psnr_db(loss: float) -> float:
    """Peak signal-to-noise ratio of a mean squared error, for a peak of 1; infinity for 0."""
    if math.isnan(loss):
        return loss
    return -10.0 * math.log10(loss) if loss > 0 else math.inf


class Fit:
    """One fit in memory. Owns its backend if it opened one; close it, or use it in `with`.

    Not for several threads at once.

    Args:
        target: Linear RGB, [H, W, 3], floating; fitted at that size (`read_photo` reduces files).
        settings: `FitSettings()` if None.
        device: One of `doublure_kernels.devices.DEVICES`, or an open backend, which is borrowed.
        threads: Of the CPU; None takes all that the process may use.
        state: Go on from here; exactly as if it had not been interrupted. It is copied.
        optimiser: What makes the iterations; None takes the device's own where it has one, which
            brings nothing but the losses back, else one on the host.
    Raises:
        ShapeError: `target` is not [H, W, 3].
        ImageError: It is empty or not finite.
        SettingError: `threads` with a device that has none.
        DeviceError: No such device, it is not there, it takes no NumPy arrays, or the fit is too
            large for it.
        ResumeError: `state` belongs to other settings.
    """

    def __init__(
        self,
        target: Array,
        settings: FitSettings | None = None,
        *,
        device: str | Backend = "auto",
        threads: int | None = None,
        state: FitState | None = None,
        optimiser: OptimiserFactory | None = None,
    ) -> None:
        settings = FitSettings() if settings is None else settings
        target = _checked(target)
        self._settings = settings
        self._problem = Problem(target, _background(target, settings), settings)
        self._warn_of_sigma()
        if state is None:
            state = FitState.begin(first_triangles(target, settings))
        else:
            state = state.copy()
            trouble = check_state(state, settings)
            if trouble is not None:
                raise ResumeError(f"state: {trouble}; was it saved with other settings?")
        self._backend, self._owned = _open(device, threads, settings.triangles, target)
        self._optimiser = (optimiser or _optimiser)(self._backend, self._problem, state)

    def __enter__(self) -> Fit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what was opened; a second call does nothing."""
        self._optimiser.close()
        if self._owned:
            self._backend.close()

    @property
    def settings(self) -> FitSettings:
        return self._settings

    @property
    def target(self) -> Array:
        """What is fitted, linear RGB, [H, W, 3] float32; not to be written to."""
        return self._problem.target

    def sigma_at(self, iteration: int) -> float:
        """Edge softness at an iteration, counted from 0."""
        return self._problem.sigma_at(iteration)

    def size_at(self, iteration: int) -> tuple[int, int]:
        """Height and width of what an iteration is compared with, pixels."""
        raster = self._problem.raster(self._problem.halvings_at(iteration))
        return raster.height, raster.width

    @property
    def device(self) -> str:
        """The name of the backend that it runs on."""
        return self._backend.name

    def step(self, count: int = 1) -> Array:
        """Make up to `count` iterations; fewer where a stop comes, none after it.

        Returns:
            Their losses, each before its update: mean squared errors in linear light, against the
            target as it is reduced at the time (`FitSettings.coarse`); float64.
        Raises:
            SettingError: `count` is negative.
        """
        if count < 0:
            raise SettingError(f"step: expected a count of 0 or more, got {count}")
        before = self.iteration
        self._optimiser.run(count)
        return np.array(self._optimiser.read().losses[before:], np.float64)

    @property
    def iteration(self) -> int:
        """How many there were."""
        return len(self._optimiser.read().losses)

    @property
    def stopped(self) -> Stop | None:
        """Why it is over: `completed`, `converged` or `diverged`; None while it is not."""
        return self._optimiser.read().stopped

    @property
    def state(self) -> FitState:
        """A copy of all that it would go on from; give it to another `Fit`, or keep it."""
        return self._optimiser.read().copy()

    @property
    def best_loss(self) -> float:
        """What `scene` was kept for; infinity before the first iteration. See also `score`."""
        return self._optimiser.read().best_loss

    def score(self) -> float:
        """Draw `scene` and compare: its mean squared error at the full size, in linear light."""
        return float(np.mean((self.render().astype(np.float64) - self.target) ** 2))

    @property
    def scene(self) -> FittedScene:
        """The best so far, with the sigma that it was best at."""
        state = self._optimiser.read()
        return self._scene(state.best.copy(), max(0, state.best_iteration))

    @property
    def current(self) -> FittedScene:
        """The one that the next iteration will score; may be worse than `scene`."""
        state = self._optimiser.read()
        last = min(len(state.losses), self._settings.iterations - 1)
        return self._scene(state.triangles.copy(), last)

    def render(
        self,
        height: int | None = None,
        width: int | None = None,
        *,
        scene: FittedScene | None = None,
    ) -> Array:
        """Draw `scene`, the best if None, at any size; the size of the fit if None.

        Returns:
            Linear RGB, [height, width, 3] float32.
        """
        scene = self.scene if scene is None else scene
        return scene.render(height, width, backend=self._backend)

    def _scene(self, triangles: Array, iteration: int) -> FittedScene:
        height, width = self.target.shape[:2]
        return FittedScene(
            triangles,
            self._problem.background,
            self._problem.sigma_at(iteration),
            height,
            width,
            self._settings.kernel,
            self._settings.support,
        )

    def _warn_of_sigma(self) -> None:
        height, width = self.target.shape[:2]
        end, quarter = self._settings.last_sigma(height, width), 0.25 / max(height, width)
        if self._settings.sigma_end is not None and end < quarter:
            warnings.warn(
                f"sigma_end: expected at least a quarter of a pixel, {quarter:.4g} at {width} x "
                f"{height}, got {end:g}; most triangles will feel no gradient there",
                SigmaWarning,
                stacklevel=3,
            )


def _checked(target: Array) -> Array:
    array = np.asarray(target)
    if array.ndim != 3 or array.shape[2] != 3:
        raise ShapeError(f"target: expected linear RGB, [H, W, 3], got {list(array.shape)}")
    if array.size == 0:
        raise ImageError(f"target: expected pixels, got {list(array.shape)}")
    if array.dtype.kind != "f":
        raise ImageError(
            f"target: expected linear light as floating numbers, got {array.dtype}; divide "
            "bytes by 255 and pass them through srgb_to_linear"
        )
    if not np.isfinite(array).all():
        raise ImageError("target: expected finite light, got NaN or infinity in it")
    return np.array(array, np.float32, order="C")


def _background(target: Array, settings: FitSettings) -> Array:
    if settings.background == "mean":
        mean: Array = target.mean(axis=(0, 1), dtype=np.float64).astype(np.float32)
        return mean
    colour = parse_colour(settings.background, "background")
    return srgb_to_linear(np.array(colour, np.float64) / 255).astype(np.float32)


def _open(
    device: str | Backend, threads: int | None, triangles: int, target: Array
) -> tuple[Backend, bool]:
    """A backend, and whether it is ours to close."""
    if not isinstance(device, str):
        return device, False
    devices.check_device(device)
    if device == "reference":
        raise DeviceError(
            'device "reference": expected a backend that takes NumPy arrays, got one for tensors; '
            'use device="cpu" or "auto"'
        )
    if threads is not None:
        if device not in ("auto", "cpu"):
            raise SettingError(
                f'threads: expected none with device "{device}", got {threads}; they are the '
                'CPU\'s, use device="cpu"'
            )
        from ..cpu import CpuBackend

        return CpuBackend(threads), True
    if device == "auto":  # a fit that stays on a GPU pays for its copies once
        backend = devices.best_gpu() or devices.default("cpu")
    else:
        pixels = target.shape[0] * target.shape[1]
        backend = policy.choose(device, batch=1, triangles=triangles, pixels=pixels)
    if backend.name == "cuda":
        from ..gpu.cuda.backend import CudaBackend, OnHost

        if isinstance(backend, CudaBackend):
            return OnHost(backend), False
    return backend, False


def _optimiser(backend: Backend, problem: Problem, state: FitState) -> Optimiser:
    engine = getattr(backend, "fit_engine", None)
    if engine is None:
        return HostOptimiser(backend, problem, state)
    from ..gpu.fit import DeviceOptimiser

    return DeviceOptimiser(engine(), problem, state)
