"""Gradient descent on one scene: what an optimiser is, and the one that works on the host.

An optimiser makes many iterations for one call, so that a GPU can make them in one submission:
nothing but the losses has to come back, and it stops by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..annealing import anneal_sigma
from ..backend import Backend
from ..scene import PARAMS, Raster, Scene
from .pictures import reduce_linear
from .settings import FitSettings

__all__ = ["FitState", "HostOptimiser", "Optimiser", "OptimiserFactory", "Problem", "Stop"]

Array = NDArray[Any]
Stop = Literal["completed", "converged", "diverged"]

LOW = np.array([-0.25] * 6 + [0.0] * 3 + [1e-3], np.float32)
HIGH = np.array([1.25] * 6 + [1.0] * 3 + [0.999], np.float32)
"""The range of each parameter, kept after every step."""

LEAST_LIMIT = 0.01  # a flat picture is fitted to nothing at once; noise is not divergence


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be fitted.

    Attributes:
        target: Linear RGB, [H, W, 3] float32, C-contiguous.
        background: Linear RGB, [3] float32.
        settings: How.
    """

    target: Array
    background: Array
    settings: FitSettings

    def halvings_at(self, iteration: int) -> int:
        """How often the target is halved at an iteration: fewer times as sigma falls, then not."""
        size, sigma = min(self.target.shape[:2]), self.sigma_at(iteration)
        halvings = 0
        if self.settings.coarse > 0:
            while size >> (halvings + 1) and (
                sigma * (size >> (halvings + 1)) > self.settings.coarse
            ):
                halvings += 1
        return halvings

    def reduced(self, halvings: int) -> Array:
        """The target at such an iteration, [H >> halvings, W >> halvings, 3]."""
        if halvings == 0:
            return self.target
        height, width = self.target.shape[:2]
        return reduce_linear(self.target, height >> halvings, width >> halvings)

    def raster(self, halvings: int = 0) -> Raster:
        """How it is drawn."""
        height, width = self.target.shape[:2]
        return Raster(
            height >> halvings,
            width >> halvings,
            kernel=self.settings.kernel,
            support=self.settings.support,
        )

    def better(self, loss: float, iteration: int, state: FitState) -> bool:
        """Whether this loss makes its scene the one that is kept.

        The least one does; but losses against a reduced target are lower, so that the first at a
        finer one always does.
        """
        if state.best_iteration < 0 or loss < state.best_loss:
            return True
        return self.halvings_at(iteration) < self.halvings_at(state.best_iteration)

    def sigma_at(self, iteration: int) -> float:
        """Edge softness at an iteration, counted from 0: a geometric fall."""
        height, width = self.target.shape[:2]
        settings = self.settings
        return anneal_sigma(
            iteration,
            settings.iterations,
            settings.sigma_start,
            settings.last_sigma(height, width),
        )

    def limit(self, first_loss: float) -> float:
        """A loss above this has diverged."""
        return max(self.settings.divergence * max(first_loss, self.blank), LEAST_LIMIT)

    @property
    def blank(self) -> float:
        """The loss of the plain background."""
        return float(np.mean((self.target.astype(np.float64) - self.background) ** 2))


@dataclass(slots=True)
class FitState:
    """All that a fit goes on from; the next iteration is number `len(losses)`.

    Attributes:
        triangles: [T, 10] float32, not yet scored.
        first: Adam's mean of gradients, [T, 10] float32.
        second: Adam's mean of their squares, [T, 10] float32.
        best: The triangles that had the least loss, [T, 10] float32.
        best_iteration: When they had it, counted from 0; -1 before the first iteration.
        losses: Of the iterations so far, mean squared error in linear light against the target
            as reduced at that iteration (`FitSettings.coarse`).
        stopped: Why it is over; None while it is not.
    """

    triangles: Array
    first: Array
    second: Array
    best: Array
    best_iteration: int = -1
    losses: list[float] = field(default_factory=list)
    stopped: Stop | None = None

    @classmethod
    def begin(cls, triangles: Array) -> FitState:
        """Before the first iteration; the triangles are cut to their range."""
        values = np.clip(np.asarray(triangles, np.float32), LOW, HIGH)
        return cls(values, np.zeros_like(values), np.zeros_like(values), values.copy())

    @property
    def best_loss(self) -> float:
        """Infinity before the first iteration."""
        return math.inf if self.best_iteration < 0 else self.losses[self.best_iteration]

    def copy(self) -> FitState:
        """One that shares nothing with this one."""
        return FitState(
            self.triangles.copy(),
            self.first.copy(),
            self.second.copy(),
            self.best.copy(),
            self.best_iteration,
            list(self.losses),
            self.stopped,
        )


class Optimiser(Protocol):
    """One running fit. It keeps the best scene, not the last, and stops by itself."""

    def run(self, count: int) -> None:
        """Make up to `count` iterations; fewer where a stop comes, none after it."""

    def read(self) -> FitState:
        """Where it is; may be what it works on, so copy what is to last."""

    def close(self) -> None:
        """Free what it holds, but not the backend; a second call does nothing."""


class OptimiserFactory(Protocol):
    """What makes one, from where a fit is; it may keep and change that state."""

    def __call__(self, backend: Backend, problem: Problem, state: FitState) -> Optimiser: ...


class HostOptimiser:
    """Any backend that takes NumPy arrays: one fused pass and one compiled update an iteration."""

    def __init__(self, backend: Backend, problem: Problem, state: FitState) -> None:
        from .loops import adam_project  # compiled here, not when the package is imported

        self._update = adam_project
        self._backend = backend
        self._problem = problem
        self._state = state
        self._halvings = -1
        self._targets = problem.target[None]
        self._raster = problem.raster()
        settings = problem.settings
        self._rates = np.array(
            [settings.position_rate] * 6 + [settings.colour_rate] * 3 + [settings.alpha_rate],
            np.float32,
        )
        count = len(state.triangles)
        # The scene looks at these arrays, which change in place: nothing is built an iteration.
        self._sigma = np.zeros((), np.float32)
        self._scene = Scene(
            state.triangles[None],
            np.broadcast_to(self._sigma, (1, count)),
            problem.background[None],
            np.array([count], np.int64),
        )
        self._limit = problem.limit(state.losses[0]) if state.losses else math.inf

    def run(self, count: int) -> None:
        """See `Optimiser.run`."""
        state, settings = self._state, self._problem.settings
        for _ in range(count):
            if state.stopped is not None:
                return
            iteration = len(state.losses)
            self._sigma[()] = self._problem.sigma_at(iteration)
            halvings = self._problem.halvings_at(iteration)
            if halvings != self._halvings:
                self._halvings = halvings
                self._targets = self._problem.reduced(halvings)[None]
                self._raster = self._problem.raster(halvings)
            found, gradients = self._backend.fused_mse(self._scene, self._raster, self._targets)
            loss = float(found[0])
            if iteration == 0:
                self._limit = self._problem.limit(loss)
            if not loss <= self._limit:  # so written that NaN is refused too
                state.losses.append(loss)
                state.stopped = "diverged"
                return
            better = self._problem.better(loss, iteration, state)
            state.losses.append(loss)
            if better:
                np.copyto(state.best, state.triangles)
                state.best_iteration = iteration
            elif settings.patience and iteration - state.best_iteration >= settings.patience:
                state.stopped = "converged"
                return
            finite = self._update(
                state.triangles,
                np.ascontiguousarray(gradients.params[0], np.float32),
                state.first,
                state.second,
                self._rates,
                LOW,
                HIGH,
                settings.beta1,
                settings.beta2,
                settings.epsilon,
                iteration + 1,
            )
            if not finite:
                state.stopped = "diverged"
            elif iteration + 1 >= settings.iterations:
                state.stopped = "completed"

    def read(self) -> FitState:
        """See `Optimiser.read`."""
        return self._state

    def close(self) -> None:
        """See `Optimiser.close`; there is nothing to free."""


def check_state(state: FitState, settings: FitSettings) -> str | None:
    """What is wrong with a state that came from outside; None where nothing is."""
    shape = (settings.triangles, PARAMS)
    for name in ("triangles", "first", "second", "best"):
        array = getattr(state, name)
        if array.shape != shape or array.dtype != np.float32:
            return f"{name}: expected {list(shape)} float32, got {list(array.shape)} {array.dtype}"
        if not np.isfinite(array).all():
            return f"{name}: expected finite numbers, got others"
    if len(state.losses) > settings.iterations:
        return f"losses: expected at most {settings.iterations}, got {len(state.losses)}"
    if not -1 <= state.best_iteration < max(1, len(state.losses)):
        return f"best_iteration: expected one of {len(state.losses)}, got {state.best_iteration}"
    if state.best_iteration < 0 and len(state.losses) > 1:
        return "best_iteration: expected one after the first iteration, got none"
    return None
