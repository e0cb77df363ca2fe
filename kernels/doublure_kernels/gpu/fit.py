"""A whole fit on a GPU: many iterations in one submission, nothing but the losses comes back.

The kernels decide as `HostOptimiser` does: what is best, when to stop. Numbers differ from the
host's in their last digits, so a fit ends elsewhere after hundreds of iterations, equally good.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError
from ..fit.optimiser import HIGH, LEAST_LIMIT, LOW, FitState, Problem, Stop
from ..scene import PARAMS
from . import plan

__all__ = ["DeviceOptimiser", "Engine"]

Array = NDArray[Any]

# As in `shaders/raster.h`.
_STATE, _RATE, _LOW, _HIGH, _CONSTANTS, _LOSSES = 8, 16, 26, 36, 46, 64
_BEST, _BEST_AT, _STOPPED, _LIMIT, _DONE = range(5)
_STOPS: dict[int, Stop | None] = {0: None, 1: "completed", 2: "converged", 3: "diverged"}


class Engine(Protocol):
    """Buffers of a fit's own on a device, and what runs over them."""

    @property
    def lanes(self) -> int:
        """Of a team."""

    @property
    def largest(self) -> int:
        """Bytes of a buffer at most."""

    def open(self, sizes: dict[str, int]) -> None:
        """Make the buffers, by name of `plan.BINDINGS`, of so many bytes."""

    def write(self, name: str, values: Array) -> None:
        """Copy to the beginning of a buffer."""

    def read(self, name: str, count: int) -> Array:
        """Its first float32 numbers, once all that was run is done."""

    def run(self, steps: Sequence[plan.Dispatch]) -> None:
        """Run kernels in order, in one submission; need not wait for them."""

    def close(self) -> None:
        """Free the buffers; a second call does nothing."""


class DeviceOptimiser:
    """`Optimiser` on an engine, which it owns.

    Args:
        engine: Where.
        problem: What is fitted.
        state: Where it begins; this object's own from now on.
    Raises:
        DeviceError: The scene is too large to be drawn in one piece.
    """

    def __init__(self, engine: Engine, problem: Problem, state: FitState) -> None:
        self._engine, self._problem, self._state = engine, problem, state
        settings = self._settings(0, 1.0)
        whole = plan.whole(settings, engine.lanes, engine.largest, engine.largest)
        if whole is None:
            height, width = problem.target.shape[:2]
            raise DeviceError(
                f"fit: expected a scene that fits the device in one piece, got "
                f"{len(state.triangles)} triangles at {width} x {height}; use fewer, a smaller "
                'size, or device="cpu"'
            )
        region, _, total = whole
        sizes = plan.sizes(settings, region, total, engine.lanes)
        n, count = problem.settings.iterations, len(state.triangles) * PARAMS
        self._floats = _LOSSES + 2 * n + 3 * count
        engine.open(sizes | {"fit": 4 * self._floats})
        engine.write("params", state.triangles)
        engine.write("fit", self._layout())
        self._halvings = -1

    def run(self, count: int) -> None:
        """See `Optimiser.run`."""
        state, problem = self._state, self._problem
        begin = len(state.losses)
        end = min(begin + count, problem.settings.iterations)
        if state.stopped is not None or begin >= end:
            return
        steps: list[plan.Dispatch] = []
        for iteration in range(begin, end):
            halvings = problem.halvings_at(iteration)
            if halvings != self._halvings:
                self._engine.run(steps)
                steps = []
                self._halvings = halvings
                self._engine.write("given", problem.reduced(halvings))
            steps += self._iteration(iteration)
        self._engine.run(steps)
        self._fetch()

    def read(self) -> FitState:
        """See `Optimiser.read`."""
        return self._state

    def close(self) -> None:
        """See `Optimiser.close`."""
        self._engine.close()

    def _settings(self, halvings: int, sigma: float) -> plan.Settings:
        r, g, b = (float(value) for value in self._problem.background)
        raster = self._problem.raster(halvings)
        triangles = len(self._state.triangles)
        return plan.Settings(1, triangles, raster, plan.FUSED, sigma, (r, g, b), True)

    def _iteration(self, iteration: int) -> tuple[plan.Dispatch, ...]:
        settings = self._settings(self._halvings, self._problem.sigma_at(iteration))
        width, height = plan.tile_size(self._engine.lanes)
        raster, adam = settings.raster, self._problem.settings
        tiles = -(-raster.width // width) * -(-raster.height // height)
        step = 1.0 / (1.0 - adam.beta1 ** (iteration + 1))
        root = 1.0 / math.sqrt(1.0 - adam.beta2 ** (iteration + 1))
        return plan.fit_steps(settings, self._engine.lanes, tiles, iteration, step, root)

    def _layout(self) -> Array:
        state, problem = self._state, self._problem
        settings, n = problem.settings, problem.settings.iterations
        fit = np.zeros(self._floats, np.float32)
        bits = fit.view(np.int32)
        begin = len(state.losses)
        now = _STATE * (begin & 1)
        fit[now + _BEST] = state.best_loss
        bits[now + _BEST_AT] = state.best_iteration
        fit[now + _LIMIT] = problem.limit(state.losses[0]) if state.losses else np.inf
        bits[now + _DONE] = begin
        rates = [settings.position_rate] * 6 + [settings.colour_rate] * 3 + [settings.alpha_rate]
        fit[_RATE : _RATE + PARAMS] = rates
        fit[_LOW : _LOW + PARAMS] = LOW
        fit[_HIGH : _HIGH + PARAMS] = HIGH
        fit[_CONSTANTS : _CONSTANTS + 3] = settings.beta1, settings.beta2, settings.epsilon
        bits[_CONSTANTS + 3 : _CONSTANTS + 5] = settings.patience, n
        fit[_CONSTANTS + 5 : _CONSTANTS + 8] = settings.divergence, problem.blank, LEAST_LIMIT
        fit[_LOSSES : _LOSSES + begin] = state.losses
        fit[_LOSSES + n : _LOSSES + 2 * n] = [problem.halvings_at(i) for i in range(n)]
        arrays = (state.first, state.second, state.best)
        fit[_LOSSES + 2 * n :] = np.concatenate([array.ravel() for array in arrays])
        return fit

    def _fetch(self) -> None:
        """Bring the state up to what the device has done."""
        state, n = self._state, self._problem.settings.iterations
        fit = self._engine.read("fit", self._floats)
        bits = fit.view(np.int32)
        # The state that is further; both are equal once it has stopped.
        now = _STATE if bits[_STATE + _DONE] > bits[_DONE] else 0
        done = int(bits[now + _DONE])
        state.losses[:] = fit[_LOSSES : _LOSSES + done].tolist()
        state.best_iteration = int(bits[now + _BEST_AT])
        state.stopped = _STOPS[max(int(bits[_STOPPED]), int(bits[_STATE + _STOPPED]))]
        shape, count = state.triangles.shape, state.triangles.size
        first = _LOSSES + 2 * n
        for i, array in enumerate((state.first, state.second, state.best)):
            np.copyto(array, fit[first + i * count : first + (i + 1) * count].reshape(shape))
        np.copyto(state.triangles, self._engine.read("params", count).reshape(shape))
