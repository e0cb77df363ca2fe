"""One model while it learns: steps, averages, and the way back after a bad one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from doublure_bridge.models import ModelSpec
from numpy.typing import NDArray
from torch import Tensor

from .adam import BETAS, Adam
from .config import TrainConfig
from .errors import TrainerError
from .fused import FusedGrid, ready
from .models import build
from .models.grid import Grid, Stage
from .models.registry import round_tensors
from .on_device import DeviceStep, Mirror
from .smoothing import LARGEST_PULL, SMOOTH_EVERY, VOLUME_SHARE, axes, bend

__all__ = ["DivergedError", "Learner", "LearnerState"]

_CHECK_EVERY = 64  # steps between looks at all parameters; the loss is looked at every step
_MAX_ROLLBACKS = 12
_TRIAL_STEPS = 150
_TRIAL_GAIN_DB = 0.3
# With 1.25 one run in three of plasma and fbm stayed coarse for good, 5 to 6 dB lower; sdf gained
# 2 dB by the fine volume that it had not been given. Hard moving edges, which a fine volume costs 2
# to 3 dB, are learned almost without one (`planes`).
_TRIAL_AGAIN = 2  # times the steps of the last trial
_FINE_PULL = 0.25  # of the smoothing, where planes must hold the finest detail


class DivergedError(TrainerError):
    """Training that stays non-finite however small its steps."""


@dataclass(frozen=True, slots=True)
class LearnerState:
    """Everything that `Learner` needs to go on as if nothing had happened; copies.

    Attributes:
        stage: Stage of the volume's growth that the tensors are at.
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
    """The finest volume, on trial: first the coarser model goes on, then the finer one does.

    Attributes:
        start: Step at which it began.
        base: The state there.
        coarse, coarse_db: What the coarser model came to.
    """

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
        name: Which entrant of the race it is; for a grid one of `grid`, `planes` and `fine`.
            `planes` hardly uses its volume: where edges move, a volume is quick to learn them
            blurred and slow to unlearn that. `fine` frees every texel of the planes from the
            start, and stops a volume short: detail near the size of a pixel is not found again
            from a blurred image, and with the finest volume it is learned by heart.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: TrainConfig,
        *,
        device: torch.device,
        seed: int,
        name: str | None = None,
    ) -> None:
        self.spec = spec
        self.family = spec.family
        self.name = name or spec.family
        self.steps = 0
        self.rollbacks = 0
        self.rate = 1.0
        """Factor on every learning rate; halved by each rollback."""
        self.errors: NDArray[np.float32] | None = None
        """Loss of each row of the last step before its weight, [n]; for sampling by error."""
        self._config = config
        self._device = device
        self.module = build(spec, generator=torch.Generator().manual_seed(seed)).to(device)
        self._engine: FusedGrid | None = None
        self._fuse = False
        self._device_step: DeviceStep | None = None
        self._loss = float("nan")
        self._seed = seed
        self._last = self._first = self._stage = 0
        self._fine = self.name == "fine"
        self._growth: tuple[int, ...] = ()
        if isinstance(self.module, Grid):
            self._last = len(self.module.volumes()) - 1
            if self.name == "planes":
                self._last = 0
            elif self._fine:
                self._last = max(1, self._last - 1)
            # Fewer growth steps than stages: start at a finer one, and end at the finest.
            growth = () if self._fine else config.growth
            self._growth = growth[: max(0, self._last - 1)]
            self._first = self._stage = self._last - len(self._growth)
            self.module.set_stage(Stage(self._stage, self._fine))
        self._parameters: list[Tensor] = list(self.module.parameters())
        self._average = [p.detach().clone() for p in self._parameters]
        self._base_rates = self._rates()
        self._optimizer = Adam(self._parameters, self._base_rates)
        self._good = self.state()
        self._trial: _Trial | None = None
        self._trial_at = self._growth[-1] if self._growth else 0

    def step(self, rows: NDArray[np.float32], weights: NDArray[np.float32] | None = None) -> float:
        """One step on rows x, y, t and log-space RGB, [n, 6]. Returns the loss.

        A non-finite loss or parameter rolls back to the last state marked good and returns NaN.

        Args:
            weights: Of each row in the loss, [n], of mean 1; 1 unless told.
        Raises:
            DivergedError: It keeps happening.
        """
        self._grow()
        decay = self._config.floor + (1.0 - self._config.floor) / (
            1.0 + self.steps / self._config.half_life
        )
        # Early weights move fast, so the average forgets them fast: warm-up as in TensorFlow's
        # ExponentialMovingAverage, min(decay, (1 + n) / (10 + n)).
        keep = min(self._config.ema, (2 + self.steps) / (11 + self.steps))
        if self._engine is None and self._can_fuse and ready():
            self.restore(self.state())  # from here on in the memory layout that the loops want
        move = self._fused_step if self._engine is not None else self._torch_step
        value = move(rows, weights, decay * self.rate, keep)
        if not np.isfinite(value):
            self._roll_back()
            return float("nan")
        self.steps += 1
        if self.steps % _CHECK_EVERY == 0 and not self.finite():
            self._roll_back()
            return float("nan")
        return value

    def step_on_device(self, mirror: Mirror) -> float:
        """One step of `config.device_batch` rows that the device draws by itself.

        Returns:
            The loss of about the last step, or NaN after a roll-back: it is looked at every
            few dozen steps only, since looking waits for the device.
        Raises:
            DivergedError: As `step` does.
        """
        self._grow()
        if self._device_step is None:
            assert isinstance(self.module, Grid)
            self._device_step = DeviceStep(
                self.module,
                mirror,
                self._config,
                self._average,
                self._optimizer,
                batch=self._config.device_batch,
                step=self.steps,
                rate=self.rate,
                smoothing=self._smoothing,
                seed=self._seed,
            )
            self._loss = float("nan")
        self._device_step.run()
        self._optimizer.steps += 1
        self.steps += 1
        if self.steps % _CHECK_EVERY == 0 or not np.isfinite(self._loss):
            self._loss = float(self._device_step.loss)
            if not np.isfinite(self._loss) or not self.finite():
                self._roll_back()
                return float("nan")
        return self._loss

    def close(self) -> None:
        """End what helps it; idempotent."""
        self._device_step = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

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
            self._resize_to(self.module, self._last)
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
            self.module.set_stage(Stage(state.stage, self._fine))
        self._stage = state.stage
        # Asked once: the loops may become ready, on their thread, between two of these tensors.
        self._fuse = self._can_fuse and ready()
        self._parameters = list(self.module.parameters())
        self._base_rates = self._rates()
        for p, value in zip(self.module.parameters(), state.values, strict=True):
            p.data = self._held(value)
        self._average = [self._held(a) for a in state.averages]
        self._optimizer = Adam(
            self._parameters,
            self._base_rates,
            steps=state.adam_steps,
            first=[self._held(m) for m in state.first],
            second=[self._held(m) for m in state.second],
        )
        self.close()
        if self._fuse and isinstance(self.module, Grid):
            self._engine = FusedGrid(
                self.module,
                self._parameters,
                self._average,
                self._optimizer.first,
                self._optimizer.second,
                threads=self._config.threads,
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
                    arrays[f"{self.name}.{prefix}{item.name}.{i}"] = tensor.cpu().numpy()
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
                    torch.from_numpy(np.array(arrays[f"{self.name}.{prefix}{item.name}.{i}"]))
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

    @property
    def _can_fuse(self) -> bool:
        return isinstance(self.module, Grid) and self._device.type == "cpu"

    def _held(self, value: Tensor) -> Tensor:
        """A copy on our device, in memory as the compiled loops want it where they are used."""
        copy = value.detach().clone().to(self._device)
        if not self._fuse:
            return copy.contiguous()
        if copy.dim() == 4:
            return copy.contiguous(memory_format=torch.channels_last)
        return copy.contiguous(memory_format=torch.channels_last_3d) if copy.dim() == 5 else copy

    def _fused_step(
        self,
        rows: NDArray[np.float32],
        weights: NDArray[np.float32] | None,
        rate: float,
        keep: float,
    ) -> float:
        engine = self._engine
        assert engine is not None
        if weights is None:
            weights = np.ones(len(rows), dtype=np.float32)
        self.errors = np.empty(len(rows), dtype=np.float32)
        value = engine.gradients(
            np.ascontiguousarray(rows), weights, self.errors, self._config.relative
        )
        if not np.isfinite(value):
            engine.forget()
            return value
        self._optimizer.steps += 1
        rates = [r * rate for r in self._base_rates]
        engine.update(rates, BETAS, self._optimizer.steps, keep)
        for texture, axis, pull in self._pulls(rate):
            engine.smooth(texture, axis, pull)
        return value

    def _torch_step(
        self,
        rows: NDArray[np.float32],
        weights: NDArray[np.float32] | None,
        rate: float,
        keep: float,
    ) -> float:
        data = torch.from_numpy(rows).to(self._device)
        target = data[:, 3:]
        soft = target.abs().clamp_(max=1.0).add_(self._config.relative)
        error = ((self.module(data[:, :3]) - target) / soft).square().sum(1)
        weighted = error if weights is None else error * torch.from_numpy(weights).to(self._device)
        loss = weighted.mean() / 3.0
        value = float(loss.detach())
        self.errors = error.detach().cpu().numpy()
        self._optimizer.forget_gradients()
        if not np.isfinite(value):
            return value
        loss.backward()
        self._optimizer.step(rate)
        for texture, axis, pull in self._pulls(rate):
            bend(self._parameters[texture].detach(), axis + 2, pull)
        with torch.no_grad():
            torch._foreach_lerp_(self._average, self._parameters, 1.0 - keep)
        return value

    @property
    def _smoothing(self) -> float:
        return self._config.smoothing * (_FINE_PULL if self._fine else 1.0)

    def _pulls(self, rate: float) -> list[tuple[int, int, float]]:
        """Which textures are now smoothed along which of their own axes, and how strongly."""
        strength = self._smoothing * rate * SMOOTH_EVERY
        if not isinstance(self.module, Grid) or not strength or (self.steps + 1) % SMOOTH_EVERY:
            return []
        found = []
        for i, texels in enumerate(self._parameters[:4]):
            share = VOLUME_SHARE if texels.dim() == 5 else 1.0
            found += [(i, a - 2, min(strength * share, LARGEST_PULL)) for a in axes(texels)]
        return found

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

        The volume's last growth is on trial: a fine volume is what soft, busy images need, but on
        hard edges that move it learns single pixels by heart (2 to 3 dB less, held out). So both
        ways are tried for as many steps, and the held-out score decides (`trial_score`). The trial
        comes again, ever more rarely: what is right may show late, and either way it is undone.
        """
        if not isinstance(self.module, Grid) or self._trial is not None:
            return
        due = self._first + sum(self.steps >= at for at in self._growth)
        if self._stage < min(due, self._last - 1):
            self._resize_to(self.module, min(due, self._last - 1))
        if due == self._last and self._growth and self.steps >= self._trial_at:
            self._trial = _Trial(self.steps, self.state())
            self._resize_to(self.module, self._last - 1)

    def _resize_to(self, grid: Grid, stage: int) -> None:
        """Resample the textures to a stage; their moments and average go along."""
        if stage == self._stage:
            return
        now = self.state()

        def at_stage(values: list[Tensor]) -> list[Tensor]:
            target = Stage(stage, self._fine)
            return [grid.resized(i, target, v) for i, v in enumerate(values)]

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
