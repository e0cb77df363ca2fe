"""Training of a grid where it lives on a CUDA device: rows, drawing and steps in one CUDA graph.

A step of this size is hundreds of small kernels; launched one by one they cost a millisecond of
the host's time, whatever the batch. Here the training rows are mirrored on the device, and drawing,
forward, backward, Adam, smoothing and averages are captured once and replayed, so that a step costs
the host one launch and nothing waits for the device but a look at the loss every few dozen steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .adam import Adam
from .config import TrainConfig
from .models.grid import Grid
from .replay import WEIGHT_STEPS, Replay
from .smoothing import LARGEST_PULL, SMOOTH_EVERY, VOLUME_SHARE, axes, bend

__all__ = ["DeviceStep", "Mirror"]

_WARM_UP = 3  # steps before the capture: lazy initialisation may not be captured


class Mirror:
    """The replay's training rows on a device, kept current by `refresh`.

    Used by the training thread alone; the replay may be added to by others meanwhile.
    """

    def __init__(self, replay: Replay, device: torch.device) -> None:
        self._replay = replay
        capacity, slots = replay.watch()
        self.capacity = capacity
        self.rows = torch.zeros((slots, 6), device=device)
        self.errors = torch.ones(slots, device=device)
        self.unknown = torch.ones((), device=device)
        """Root of the error that rows are taken to have before they were learned from."""
        self.table = torch.zeros(slots // capacity * WEIGHT_STEPS, dtype=torch.int64, device=device)
        self.filled = torch.zeros((), dtype=torch.int64, device=device)
        self.sizes = torch.zeros(slots // capacity, dtype=torch.int64, device=device)
        self.empty = True

    def refresh(self) -> None:
        """Bring over what was added since the last time."""
        changes = self._replay.changes()
        if changes is None:
            return
        device = self.rows.device
        slots = torch.from_numpy(changes.slots).to(device)
        self.rows[slots] = torch.from_numpy(changes.rows).to(device)
        self.errors[slots] = self.unknown
        table = torch.from_numpy(changes.table).to(device)
        self.table[: len(table)] = table
        self.filled.fill_(len(table))
        self.sizes.copy_(torch.from_numpy(changes.sizes))
        self.empty = not len(table)

    def draw(
        self, batch: int, generator: torch.Generator, config: TrainConfig
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, weights and slots as `Replay.draw` picks them; can be captured."""
        device = self.rows.device
        random = torch.rand((2, batch), device=device, generator=generator, dtype=torch.float64)
        place = ((torch.arange(batch, device=device) + random[0]) * self.filled / batch).long()
        bucket = self.table[torch.minimum(place, self.filled - 1)]
        size = self.sizes[bucket]
        inside = torch.minimum((random[1] * size).long(), size - 1)
        tries = config.tries
        side = (inside[:, None] + torch.arange(tries, device=device)) % size[:, None]
        candidates = (bucket[:, None] * self.capacity + side).flatten()
        density = self.errors[candidates]
        share = config.error_share
        density = (1.0 - share) + share * density / density.mean().clamp(min=1e-20)
        passed = density.double().cumsum(0)
        due = (torch.arange(batch, device=device) + random[0, :1]) * (passed[-1] / batch)
        chosen = torch.searchsorted(passed, due, right=True).clamp(max=len(candidates) - 1)
        slots = candidates[chosen]
        weights = density[chosen] ** -config.error_power
        return self.rows[slots], weights / weights.mean(), slots

    def learned(self, slots: Tensor, errors: Tensor) -> None:
        """Note the errors of rows that were drawn; those that are not finite say nothing."""
        roots = errors.sqrt()
        finite = torch.isfinite(roots)
        self.errors[slots] = torch.where(finite, roots, self.unknown)
        mean = torch.where(finite, roots, 0.0).sum() / finite.sum().clamp(min=1)
        self.unknown.copy_(torch.where(finite.any(), mean, self.unknown))


class DeviceStep:
    """The captured step of one grid learner; borrows its tensors and writes into them.

    It does what `Learner.step` does, with every number that changes between steps on the device.

    Args:
        averages: In the order of `grid.parameters()`.
        optimizer: Of these parameters. Its `steps` are left to the caller.
        step: Steps of the learner so far.
        rate: Factor on every learning rate.
    """

    def __init__(
        self,
        grid: Grid,
        mirror: Mirror,
        config: TrainConfig,
        averages: Sequence[Tensor],
        optimizer: Adam,
        *,
        batch: int,
        step: int,
        rate: float,
        smoothing: float,
        seed: int,
    ) -> None:
        self._grid, self._mirror, self._config = grid, mirror, config
        self._values: list[Tensor] = list(grid.parameters())
        self._averages = list(averages)
        self._optimizer = optimizer
        device = mirror.rows.device
        self.batch = batch
        self._rate, self._smoothing = rate, smoothing
        self._step = torch.tensor(float(step), device=device, dtype=torch.float64)
        self.loss = torch.zeros((), device=device)
        self._generator = torch.Generator(device=device)
        self._generator.manual_seed((seed << 20) + step)
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self._runs = step

    def run(self) -> None:
        """One step. Does not wait for the device; `loss` is this step's when it has come to it."""
        if not self._graphs:
            self._capture()
        self._runs += 1
        self._graphs[self._runs % SMOOTH_EVERY == 0].replay()

    def _capture(self) -> None:
        adam = self._optimizer
        held = [self._step, *self._values, *self._averages, *adam.first, *adam.second]
        held += [*adam.counts, self._mirror.errors, self._mirror.unknown]
        steps = adam.steps
        kept = [t.detach().clone() for t in held]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self.body()
        torch.cuda.current_stream().wait_stream(stream)
        graphs = {}
        for smooth in (False, True):
            graph = graphs[smooth] = torch.cuda.CUDAGraph()
            graph.register_generator_state(self._generator)
            with torch.cuda.graph(graph):
                self.body(smooth=smooth)
        with torch.no_grad():
            for tensor, value in zip(held, kept, strict=True):
                tensor.copy_(value)
        adam.steps = steps
        self._graphs = graphs

    def body(self, *, smooth: bool = True) -> None:
        """What is captured: one step, on whatever device the tensors are."""
        config, mirror, step = self._config, self._mirror, self._step
        rows, weights, slots = mirror.draw(self.batch, self._generator, config)
        target = rows[:, 3:]
        soft = target.abs().clamp(max=1.0) + config.relative
        own = ((self._grid(rows[:, :3]) - target) / soft).square().sum(1)
        loss = (own * weights).mean() / 3.0
        gradients = torch.autograd.grad(loss, self._values)
        with torch.no_grad():
            self.loss.copy_(loss)
            mirror.learned(slots, own)
            for value, gradient in zip(self._values, gradients, strict=True):
                value.grad = gradient
            decay = config.floor + (1.0 - config.floor) / (1.0 + step / config.half_life)
            scale = (decay * self._rate).float()
            self._optimizer.step(scale)
            if smooth and self._smoothing:
                self._bend(scale * (self._smoothing * SMOOTH_EVERY))
            keep = torch.clamp((2.0 + step) / (11.0 + step), max=config.ema).float()
            pairs = zip(self._values, self._averages, strict=True)
            ways = [value - average for value, average in pairs]
            torch._foreach_mul_(ways, 1.0 - keep)
            torch._foreach_add_(self._averages, ways)
            self._step += 1

    def _bend(self, pull: Tensor) -> None:
        for texels in self._values[:4]:
            share = VOLUME_SHARE if texels.dim() == 5 else 1.0
            limited = torch.clamp(pull * share, max=LARGEST_PULL)
            for axis in axes(texels):
                bend(texels.detach(), axis, limited)
