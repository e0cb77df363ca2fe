"""One model while it learns: steps, averages, and the way back after a bad one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from doublure_bridge.models import ModelSpec
from numpy.typing import NDArray
from torch import Tensor

from .adam import Adam
from .config import TrainConfig
from .errors import TrainerError
from .models import build
from .models.grid import Grid
from .models.registry import round_tensors

__all__ = ["DivergedError", "Learner", "LearnerState"]

_CHECK_EVERY = 64  # steps between looks at all parameters; the loss is looked at every step
_MAX_ROLLBACKS = 12
_SMOOTH_EVERY = 4
_VOLUME_SHARE = 0.25
# Soft, busy scenes live on the volume's detail: with a pull of 0.01 on everything they lost 1.5 to
# 3 dB, while hard moving edges gained 3.
_LARGEST_PULL = 1 / 16  # beyond it the explicit step on a fourth difference is unstable
_TRIAL_STEPS = 150
_TRIAL_GAIN_DB = 1.25
# Where the fine volume is needed (plasma, fbm) it gained 1.5 to 2.1 dB within the trial. Elsewhere
# (three seeds of each) it gained 0 to 0.9 dB, and on hard moving edges then lost 2 to 3 dB in the
# ten seconds after.
_TRIAL_AGAIN = 3  # times the steps of the last trial


class DivergedError(TrainerError):
    """Training that stays non-finite however small its steps."""


@dataclass(frozen=True, slots=True)
class LearnerState:
    """Everything that `Learner` needs to go on as if nothing had happened; copies.

    Attributes:
        stage: Stage of the model's growth that the tensors are at.
        adam_steps: Steps that the moments have seen.
        values, averages, first, second: One tensor a parameter, in the model's order.
    """

    stage: int
    adam_steps: int
    values: list[Tensor]
    averages: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]


@dataclass(slots=True)
class _Trial:
    """The finest volume, on trial: first the coarser model goes on, then the finer one does."""

    start: int
    base: LearnerState
    coarse: LearnerState | None = None
    coarse_db: float | None = None


class Learner:
    """A model, its optimiser and the running average of its weights.

    What leaves (`tensors`) is always the average, rounded as the specification stores it.

    Args:
        spec: What to learn.
        seed: For the initial weights.
    """

    def __init__(
        self, spec: ModelSpec, config: TrainConfig, *, device: torch.device, seed: int
    ) -> None:
        self.spec = spec
        self.family = spec.family
        self.steps = 0
        self.rollbacks = 0
        self.rate = 1.0
        """Factor on every learning rate; halved by each rollback."""
        self._config = config
        self._device = device
        self.module = build(spec, generator=torch.Generator().manual_seed(seed)).to(device)
        self._stages = len(self.module.stages()) if isinstance(self.module, Grid) else 1
        self._growth = config.growth[: self._stages - 1]
        self._stage = 0
        if isinstance(self.module, Grid):
            # Fewer growth steps than stages: start at a finer one, and end at the finest.
            self._stage = self._stages - 1 - len(self._growth)
            self.module.set_stage(self._stage)
        self._first_stage = self._stage
        self._parameters: list[Tensor] = list(self.module.parameters())
        self._average = [p.detach().clone() for p in self._parameters]
        self._optimizer = Adam(self._parameters, self._rates())
        self._good = self.state()
        self._trial: _Trial | None = None
        self._trial_at = self._growth[-1] if self._growth else 0

    def step(self, rows: NDArray[np.float32]) -> float:
        """One step on rows x, y, t and log-space RGB, [n, 6]. Returns the loss.

        A non-finite loss or parameter rolls back to the last state marked good and returns NaN.

        Raises:
            DivergedError: It keeps happening.
        """
        self._grow()
        data = torch.from_numpy(rows).to(self._device)
        target = data[:, 3:]
        soft = target.abs().clamp_(max=1.0).add_(self._config.relative)
        error = (self.module(data[:, :3]) - target) / soft
        loss = error.square().mean()
        value = float(loss.detach())
        self._optimizer.forget_gradients()
        if not np.isfinite(value):
            self._roll_back()
            return float("nan")
        loss.backward()
        decay = self._config.floor + (1.0 - self._config.floor) / (
            1.0 + self.steps / self._config.half_life
        )
        self._optimizer.step(decay * self.rate)
        if self._config.smoothing and isinstance(self.module, Grid):
            self._smooth(self.module, self._config.smoothing * decay * self.rate)
        self.steps += 1
        # Early weights move fast, so the average forgets them fast: warm-up as in TensorFlow's
        # ExponentialMovingAverage, min(decay, (1 + n) / (10 + n)).
        keep = min(self._config.ema, (1 + self.steps) / (10 + self.steps))
        with torch.no_grad():
            torch._foreach_lerp_(self._average, self._parameters, 1.0 - keep)
        if self.steps % _CHECK_EVERY == 0 and not self.finite():
            self._roll_back()
            return float("nan")
        return value

    @property
    def wants_score(self) -> bool:
        """Whether the growth on trial now waits for a held-out score (`trial_score`)."""
        trial = self._trial
        return trial is not None and self.steps >= trial.start + _TRIAL_STEPS

    def trial_score(self, merit: float | None) -> None:
        """Judge the growth on trial: go back for its other half, or keep the better of both.

        Args:
            merit: Held-out `Scores.merit` of the weights as they are, in dB; None where there is
                no held-out data, then the finer model stays.
        """
        trial = self._trial
        if trial is None or not isinstance(self.module, Grid):
            return
        if trial.coarse is None:
            trial.coarse, trial.coarse_db = self.state(), merit
            self.restore(trial.base)
            self.steps = trial.start
            self._resize_to(self.module, self._stages - 1)
            return
        coarse_db = trial.coarse_db
        self._trial = None
        if merit is not None and coarse_db is not None and not merit > coarse_db + _TRIAL_GAIN_DB:
            self.restore(trial.coarse)
        self._trial_at = self.steps * _TRIAL_AGAIN

    def finite(self) -> bool:
        """Whether every averaged weight is a number."""
        return all(bool(torch.isfinite(a.sum())) for a in self._average)

    def tensors(self) -> dict[str, NDArray[np.generic]]:
        """The averaged weights as they would be stored: the specification's dtypes, copies."""
        return round_tensors(self.module.layout(self._average), self.spec)

    def mark_good(self) -> None:
        """Remember this state as the one to roll back to."""
        self._good = self.state()

    @property
    def good(self) -> LearnerState:
        """The state last marked good; at first the initial one."""
        return self._good

    def state(self) -> LearnerState:
        """A copy of everything that changes with a step, counters aside."""
        return LearnerState(
            self._stage,
            self._optimizer.steps,
            [p.detach().clone() for p in self._parameters],
            [a.clone() for a in self._average],
            [m.clone() for m in self._optimizer.first],
            [m.clone() for m in self._optimizer.second],
        )

    def restore(self, state: LearnerState) -> None:
        """Go back to a state. Takes copies."""
        if isinstance(self.module, Grid) and state.stage != self._stage:
            self.module.set_stage(state.stage)
        self._stage = state.stage
        self._parameters = list(self.module.parameters())
        with torch.no_grad():
            for p, value in zip(self._parameters, state.values, strict=True):
                p.copy_(value)
        self._average = [a.detach().clone().to(self._device) for a in state.averages]
        self._optimizer = Adam(
            self._parameters,
            self._rates(),
            steps=state.adam_steps,
            first=state.first,
            second=state.second,
        )

    def dump(
        self, state: LearnerState | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """What a checkpoint holds, as arrays and plain data.

        Args:
            state: One to dump alone, with the counters; by default everything: the present state,
                the good one and a trial's, so that a resumed run is the uninterrupted one.
        """
        states: dict[str, LearnerState] = {"": state or self.state()}
        trial = self._trial
        if state is None:
            states["good."] = self._good
            if trial is not None:
                states["base."] = trial.base
                if trial.coarse is not None:
                    states["coarse."] = trial.coarse
        arrays: dict[str, NDArray[Any]] = {}
        sizes: dict[str, dict[str, int]] = {}
        for prefix, one in states.items():
            sizes[prefix] = {}
            for item in fields(one):
                value = getattr(one, item.name)
                if not isinstance(value, list):
                    sizes[prefix][item.name] = value
                    continue
                for i, tensor in enumerate(value):
                    arrays[f"{self.family}.{prefix}{item.name}.{i}"] = tensor.cpu().numpy()
        meta: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        meta |= {"states": sizes, "trial": None}
        if trial is not None and state is None:
            # As text, since JSON has no word for a score that is not finite.
            meta["trial"] = [trial.start, repr(trial.coarse_db)]
        return arrays, meta

    def take(self, arrays: dict[str, NDArray[Any]], meta: dict[str, Any]) -> None:
        """The inverse of `dump`.

        Raises:
            ValueError, KeyError: The arrays are not this model's.
        """
        states: dict[str, LearnerState] = {}
        for prefix, sizes in meta["states"].items():
            lists: dict[str, Any] = {
                item.name: [
                    torch.from_numpy(np.array(arrays[f"{self.family}.{prefix}{item.name}.{i}"]))
                    for i in range(len(self._parameters))
                ]
                for item in fields(LearnerState)
                if item.name not in sizes
            }
            states[prefix] = LearnerState(**sizes, **lists)
        self.restore(states[""])
        for name in _PLAIN:
            setattr(self, name, meta[name])
        self._good = states.get("good.") or self.state()
        self._trial = None
        if meta["trial"] is not None:
            start, coarse_db = meta["trial"]
            known = None if coarse_db == "None" else float(coarse_db)
            self._trial = _Trial(start, states["base."], states.get("coarse."), known)

    def _smooth(self, grid: Grid, strength: float) -> None:
        """Pull texels along t, and planes along x and y, towards their neighbours' straight line.

        A gradient step on the squared second difference, apart from Adam (as AdamW decays
        weights apart), so that it acts at full strength where data says little: in the gaps of
        t, and between the pixels of a hard edge, which otherwise comes out ragged.
        """
        along_all, along_t = (2, 3), (2,)
        for texels, axes in (
            (grid.xy, along_all),
            (grid.xt, along_all),
            (grid.yt, along_all),
            (grid.volume, along_t),
        ):
            every = _SMOOTH_EVERY if texels.dim() == 5 else 1  # the volume is the dear one
            if self.steps % every:
                continue
            share = _VOLUME_SHARE if texels.dim() == 5 else 1.0
            pull = min(strength * every * share, _LARGEST_PULL)
            for axis in axes:
                inner = texels.shape[axis] - 2
                if inner < 1:
                    continue
                before, at, after = (texels.detach().narrow(axis, i, inner) for i in range(3))
                bend = (before + after).sub_(at, alpha=2.0).mul_(pull)
                before.sub_(bend)
                after.sub_(bend)
                at.add_(bend, alpha=2.0)

    def _rates(self) -> list[float]:
        """Learning rate of each parameter, in their order."""
        rates = {
            "texels": self._config.texel_rate,
            "network": self._config.network_rate,
            "compact": self._config.compact_rate,
        }
        found = {id(p): rates[name] for name, ps in self.module.groups().items() for p in ps}
        return [found[id(p)] for p in self._parameters]

    def _grow(self) -> None:
        """Move to the next resolution when its step has come.

        The last growth is on trial: a fine volume is what soft, busy images need, but on hard
        edges that move it learns single pixels by heart (2 to 3 dB less, held out). So both ways
        are tried for as many steps, and the held-out score decides (`trial_score`). The trial
        comes again, ever more rarely: what is right may show late, and either way it is undone.
        """
        if not isinstance(self.module, Grid) or self._trial is not None:
            return
        last = self._stages - 1
        due = self._first_stage + sum(self.steps >= at for at in self._growth)
        if self._stage < min(due, last - 1):
            self._resize_to(self.module, min(due, last - 1))
        if due == last and self.steps >= self._trial_at:
            self._trial = _Trial(self.steps, self.state())
            self._resize_to(self.module, last - 1)

    def _resize_to(self, grid: Grid, stage: int) -> None:
        """Resample the volume to a stage; its moments and average go along."""
        if stage == self._stage:
            return
        now = self.state()

        def at_stage(values: list[Tensor]) -> list[Tensor]:
            return [grid.resized(i, stage, v) for i, v in enumerate(values)]

        self.restore(
            LearnerState(
                stage,
                now.adam_steps,
                at_stage(now.values),
                at_stage(now.averages),
                at_stage(now.first),
                at_stage(now.second),
            )
        )

    def _roll_back(self) -> None:
        self.rollbacks += 1
        if self.rollbacks > _MAX_ROLLBACKS:
            raise DivergedError(
                f"training of the {self.family} model",
                expected="a finite loss",
                got=f"{self.rollbacks} rollbacks",
                next_step="lower texel_rate and network_rate, and check the source for outliers",
            )
        self.rate *= 0.5
        self._trial = None
        self.restore(self._good)


_PLAIN = ("steps", "rollbacks", "rate", "_trial_at")
# Attributes that a checkpoint holds as they are; whatever else changes with training and is plain
# data is one more name here. Fields of `LearnerState` are held without being named.
