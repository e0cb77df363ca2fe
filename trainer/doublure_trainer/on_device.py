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

from .config import TrainConfig
from .models.grid import Grid
from .replay import Replay

__all__ = ["DeviceStep", "Mirror"]

_BETAS = (0.9, 0.99)
_WARM_UP = 3  # steps before the capture: lazy initialisation may not be captured
_LARGEST_PULL = 1 / 16
_SMOOTH_EVERY = 4


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
        self.table = torch.zeros(slots // capacity * 8, dtype=torch.int64, device=device)
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


class DeviceStep:
    """The captured step of one grid learner; borrows its tensors and writes into them.

    Args:
        values, averages, first, second: In the order of `grid.parameters()`.
        rates: Learning rate of each.
        step: Steps of the learner so far; `count`: steps that the moments have seen.
        fine_pull: Factor on the smoothing.
    """

    def __init__(
        self,
        grid: Grid,
        mirror: Mirror,
        config: TrainConfig,
        averages: Sequence[Tensor],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        rates: Sequence[float],
        *,
        batch: int,
        step: int,
        count: int,
        rate: float,
        fine_pull: float,
        seed: int,
    ) -> None:
        self._grid, self._mirror, self._config = grid, mirror, config
        self._values: list[Tensor] = list(grid.parameters())
        self._averages, self._first, self._second = list(averages), list(first), list(second)
        device = mirror.rows.device
        self.batch = batch
        self._fine_pull = fine_pull
        self._rates = [torch.tensor(r, device=device) for r in rates]
        self._step = torch.tensor(float(step), device=device, dtype=torch.float64)
        self._count = torch.tensor(float(count), device=device, dtype=torch.float64)
        self._rate = torch.tensor(rate, device=device, dtype=torch.float64)
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
        self._graphs[self._runs % _SMOOTH_EVERY == 0].replay()

    def _capture(self) -> None:
        held = [self._step, self._count, *self._values, *self._averages, *self._first]
        held += [*self._second, self._mirror.errors, self._mirror.unknown]
        kept = [t.detach().clone() for t in held]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._body()
        torch.cuda.current_stream().wait_stream(stream)
        graphs = {}
        for smooth in (False, True) if self._config.smoothing else (False,):
            graph = graphs[smooth] = torch.cuda.CUDAGraph()
            graph.register_generator_state(self._generator)
            with torch.cuda.graph(graph):
                self._body(smooth=smooth)
        with torch.no_grad():
            for tensor, value in zip(held, kept, strict=True):
                tensor.copy_(value)
        self._graphs = graphs if True in graphs else {False: graph, True: graph}

    def _body(self, *, smooth: bool = True) -> None:
        config, mirror = self._config, self._mirror
        rows, weights, slots = mirror.draw(self.batch, self._generator, config)
        target = rows[:, 3:]
        soft = target.abs().clamp(max=1.0) + config.relative
        own = ((self._grid(rows[:, :3]) - target) / soft).square().sum(1)
        loss = (own * weights).mean() / 3.0
        gradients = torch.autograd.grad(loss, self._values)
        with torch.no_grad():
            self.loss.copy_(loss)
            root = own.sqrt()
            mirror.errors[slots] = root
            mirror.unknown.copy_(root.mean())
            self._update(gradients, smooth=smooth)

    def _update(self, gradients: Sequence[Tensor], *, smooth: bool) -> None:
        config, step = self._config, self._step
        decay = config.floor + (1.0 - config.floor) / (1.0 + step / config.half_life)
        decay = decay * self._rate
        keep = torch.clamp((2.0 + step) / (11.0 + step), max=config.ema).float()
        self._count += 1
        b1, b2 = _BETAS
        grown1 = (1.0 - b1**self._count).float()
        grown2 = (1.0 - b2**self._count).sqrt().float()
        torch._foreach_lerp_(self._first, list(gradients), 1.0 - b1)
        torch._foreach_mul_(self._second, b2)
        torch._foreach_addcmul_(self._second, list(gradients), list(gradients), 1.0 - b2)
        roots = torch._foreach_sqrt(self._second)
        torch._foreach_div_(roots, grown2)
        torch._foreach_add_(roots, 1e-8)
        moves = torch._foreach_div(self._first, roots)
        scale = (decay.float() / grown1).neg()
        torch._foreach_mul_(moves, [scale * r for r in self._rates])
        torch._foreach_add_(self._values, moves)
        if smooth:
            pull = (decay * (config.smoothing * self._fine_pull * _SMOOTH_EVERY)).float()
            for texels in self._values[:4]:
                axes = (2,) if texels.dim() == 5 else (2, 3)
                share = 0.25 if texels.dim() == 5 else 1.0
                limited = torch.clamp(pull * share, max=_LARGEST_PULL)
                for axis in axes:
                    _bend(texels.detach(), axis, limited)
        ways = [
            value - average for value, average in zip(self._values, self._averages, strict=True)
        ]
        torch._foreach_mul_(ways, 1.0 - keep)
        torch._foreach_add_(self._averages, ways)
        self._step += 1


def _bend(texels: Tensor, axis: int, pull: Tensor) -> None:
    inner = texels.shape[axis] - 2
    if inner < 1:
        return
    before, at, after = (texels.narrow(axis, i, inner) for i in range(3))
    bend = (before + after - 2.0 * at) * pull
    before.sub_(bend)
    after.sub_(bend)
    at.add_(2.0 * bend)
