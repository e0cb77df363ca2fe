"""Models to compare with that no host can draw: a hash grid and a plain network.

They are trained with the registry's rows, loss, optimiser, decay and averaging, on the same clock
(`YardstickTrainer`), and scored as they would be stored: tables in float16, networks in float32.
Two things favour them: they spend no time on scoring candidates, and no gate holds them back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from doublure_trainer.adam import Adam
from doublure_trainer.config import TrainConfig
from doublure_trainer.models.base import decode
from doublure_trainer.replay import Replay
from doublure_trainer.slices import TRAIN, Plan
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = [
    "YARDSTICKS",
    "FourierMlp",
    "FourierSizes",
    "HashGrid",
    "HashSizes",
    "YardstickTrainer",
    "yardstick",
]

_PRIMES = (1, 2654435761, 805459861)  # Mueller et al. 2022, eq. 4
_TABLE_SCALE = 1e-4  # their initialisation, section 3
_FEATURES = 2  # numbers a table entry, theirs
_EVALUATED_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HashSizes:
    """Sizes of a `HashGrid`.

    Attributes:
        levels: Number of resolutions, from `coarsest` to `finest` cells a side, geometrically.
        entries: Longest table of a level; a level with fewer corners is stored whole.
        coarsest, finest: Cells along x and y of the first and the last level.
        finest_t: Most cells along t: finer ones would lie wholly within slices that never train.
        hidden, layers: Width and number of the network's hidden layers.
    """

    levels: int
    entries: int
    coarsest: int = 8
    finest: int = 256
    finest_t: int = 48
    hidden: int = 16
    layers: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FourierSizes:
    """Sizes of a `FourierMlp`.

    Attributes:
        frequencies: Random plane waves, each seen through sine and cosine.
        spread: Their standard deviation in turns over half the image; half as much along t.
        hidden, layers: Width and number of the network's hidden layers.
    """

    frequencies: int
    spread: float = 0.7
    hidden: int = 16
    layers: int = 2


class Yardstick(nn.Module):
    """Rows x, y, t in [-1, 1], [n, 3], to log-space RGB, [n, 3].

    Attributes:
        macs: Multiply-accumulates a pixel.
        fetches: Loads a pixel from tables.
        nbytes: Bytes of what is stored.
    """

    macs: int
    fetches: int
    nbytes: int

    def groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters of tables, and of the network."""
        raise NotImplementedError

    def evaluate(self, points: Tensor) -> Tensor:
        """Linear RGB [n, 3] of many points, without gradients and with bounded memory."""
        with torch.no_grad():
            parts = points.split(_EVALUATED_AT_ONCE)
            return torch.cat([decode(self(part)) for part in parts])


class HashGrid(Yardstick):
    """Mueller et al. 2022, "Instant Neural Graphics Primitives with a Multiresolution Hash
    Encoding", in three dimensions and for a ReLU network.

    A level's cell has eight corners, each a table entry: by its index where the level fits its
    table, else by the hash of eq. 4. A GPU cannot filter a hashed table, so all eight are loads of
    their own and the trilinear blend is arithmetic: 8 loads and 16 multiply-accumulates a level on
    top of the network's. Weights and indices of the corners come on top of that.
    """

    _cells: Tensor
    _strides: Tensor
    _offsets: Tensor

    def __init__(self, sizes: HashSizes, *, generator: torch.Generator) -> None:
        super().__init__()
        self.sizes = sizes
        ratio = (sizes.finest / sizes.coarsest) ** (1.0 / max(1, sizes.levels - 1))
        cells, strides, offsets = [], [], []
        total = self._whole = 0
        for level in range(sizes.levels):
            n = round(sizes.coarsest * ratio**level)
            shape = (n, n, min(n, sizes.finest_t))
            whole = math.prod(side + 1 for side in shape)
            fits = whole <= sizes.entries
            self._whole += fits  # levels grow, so those that are stored whole come first
            cells.append(shape)
            strides.append((1, n + 1, (n + 1) ** 2) if fits else _PRIMES)
            offsets.append(total)
            total += min(whole, sizes.entries)
        self.register_buffer("_cells", torch.tensor(cells))
        self.register_buffer("_strides", torch.tensor(strides))
        self.register_buffer("_offsets", torch.tensor(offsets)[:, None])
        start = torch.empty(total, _FEATURES)
        self.table = nn.Parameter(start.uniform_(-_TABLE_SCALE, _TABLE_SCALE, generator=generator))
        self.network, macs = _network(
            sizes.levels * _FEATURES, sizes.hidden, sizes.layers, generator
        )
        self.fetches = 8 * sizes.levels
        self.macs = macs + 8 * sizes.levels * _FEATURES
        network = sum(p.numel() for p in self.network.parameters())
        self.nbytes = 2 * total * _FEATURES + 4 * network

    def forward(self, points: Tensor) -> Tensor:
        unit = (points + 1.0).mul_(0.5).clamp_(0.0, 1.0)
        position = unit[:, None] * self._cells  # [n, levels, 3]
        low = torch.minimum(position.long(), self._cells - 1)
        part = position - low
        share = torch.stack([1.0 - part, part], -1)
        corner = low * self._strides
        corner = torch.stack([corner, corner + self._strides], -1)  # [n, levels, 3, 2]
        x, y, t = (
            share[:, :, 0, None, None],
            share[:, :, 1, None, :, None],
            share[:, :, 2, :, None, None],
        )
        weights = (x * y * t).flatten(2)  # [n, levels, 8]
        x, y, t = (
            corner[:, :, 0, None, None],
            corner[:, :, 1, None, :, None],
            corner[:, :, 2, :, None, None],
        )
        w, h = slice(None, self._whole), slice(self._whole, None)
        whole = x[:, w] + y[:, w] + t[:, w]
        hashed = (x[:, h] ^ y[:, h] ^ t[:, h]) & (self.sizes.entries - 1)
        index = torch.cat([whole.flatten(2), hashed.flatten(2)], 1) + self._offsets
        return self.network(_Blend.apply(self.table, index, weights).flatten(1))

    def groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return [self.table], list(self.network.parameters())


class _Blend(torch.autograd.Function):
    """Weighted sums of table entries: table [m, 2], index and weights [n, levels, 8].

    Entries are gathered as complex numbers and their gradients scattered a feature at a time:
    torch's embedding_bag took 28 ms a step where this takes a fraction of it.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(index, weights)
        ctx.entries = len(table)
        found = torch.view_as_complex(table).index_select(0, index.flatten()).view(index.shape)
        return torch.view_as_real((found * weights).sum(-1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        index, weights = ctx.saved_tensors
        flat = index.flatten()
        columns = [
            torch.zeros(ctx.entries).scatter_add_(0, flat, (g[..., None] * weights).flatten())
            for g in gradients[0].unbind(-1)
        ]
        return torch.stack(columns, 1), None, None


class FourierMlp(Yardstick):
    """Tancik et al. 2020, "Fourier Features Let Networks Learn High Frequency Functions in Low
    Dimensional Domains": random plane waves, then a ReLU network. The waves are fixed.
    """

    _waves: Tensor

    def __init__(self, sizes: FourierSizes, *, generator: torch.Generator) -> None:
        super().__init__()
        self.sizes = sizes
        waves = torch.randn(3, sizes.frequencies, generator=generator) * sizes.spread
        waves[2] *= 0.5
        self.register_buffer("_waves", 2.0 * math.pi * waves)
        inputs = 2 * sizes.frequencies + 3
        self.network, macs = _network(inputs, sizes.hidden, sizes.layers, generator)
        self.fetches = 0
        self.macs = macs + 3 * sizes.frequencies
        self.nbytes = 4 * (3 * sizes.frequencies + sum(p.numel() for p in self.parameters()))

    def forward(self, points: Tensor) -> Tensor:
        phase = points @ self._waves
        return self.network(torch.cat([torch.sin(phase), torch.cos(phase), points], 1))

    def groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return [], list(self.network.parameters())


YARDSTICKS: dict[str, dict[str, HashSizes | FourierSizes]] = {
    "hashgrid": {
        "small": HashSizes(levels=6, entries=1 << 13),
        "medium": HashSizes(levels=8, entries=1 << 15),
        "large": HashSizes(levels=12, entries=1 << 16, hidden=32),
    },
    "mlp": {
        "small": FourierSizes(frequencies=8),
        "medium": FourierSizes(frequencies=16, hidden=32),
        "large": FourierSizes(frequencies=32, hidden=64),
    },
}
"""Sizes by family and preset: a medium hash grid has the bytes of a medium grid and nearly its
network; a small plain network has the grid's MACs (656), a medium one the compact model's (2,288).
"""


def yardstick(family: str, preset: str, *, seed: int) -> Yardstick:
    """A freshly initialised yardstick.

    Raises:
        KeyError: No such family or preset.
    """
    sizes = YARDSTICKS[family][preset]
    generator = torch.Generator().manual_seed(seed)
    if isinstance(sizes, HashSizes):
        return HashGrid(sizes, generator=generator)
    return FourierMlp(sizes, generator=generator)


class YardstickTrainer:
    """Trains a yardstick as `LiveTrainer` and `Learner` train the registry's models.

    Args:
        config: Batch, rates, decay, averaging and loss; tables learn at `texel_rate`, networks
            at `network_rate`.
        plan: The split of t: only training slices train.
    """

    def __init__(self, module: Yardstick, config: TrainConfig, plan: Plan, *, seed: int) -> None:
        torch.set_num_threads(config.threads)
        self.module = module
        self.steps = 0
        self._config = config
        self._replay = Replay(plan, train_rows=config.replay_rows, seed=seed)
        self._draw = np.random.default_rng([seed, 0x44524157])
        tables, network = module.groups()
        self._parameters: list[Tensor] = [*tables, *network]
        rates = [config.texel_rate] * len(tables) + [config.network_rate] * len(network)
        self._average = [p.detach().clone() for p in self._parameters]
        self._halved = len(tables)
        self._optimizer = Adam(self._parameters, rates)

    def add_rows(self, rows: NDArray[np.float32]) -> None:
        """Take rows x, y, t, r, g, b, float32 [n, 6]."""
        self._replay.add(rows)

    @property
    def ready(self) -> bool:
        """Whether enough of the range has been seen to train."""
        return self._replay.coverage(TRAIN) >= self._config.min_coverage

    def train_slice(self, seconds: float) -> None:
        """Train for about this long."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self.step()

    def predict(self, points: NDArray[np.float32]) -> NDArray[np.float32]:
        """Linear RGB [n, 3] of the averaged weights as they would be stored."""
        kept = [p.detach().clone() for p in self._parameters]
        with torch.no_grad():
            for i, (p, average) in enumerate(zip(self._parameters, self._average, strict=True)):
                p.copy_(average.half() if i < self._halved else average)
            colours = self.module.evaluate(torch.from_numpy(points)).numpy()
            for p, value in zip(self._parameters, kept, strict=True):
                p.copy_(value)
        return colours

    def step(self) -> None:
        """One step on a batch of training rows."""
        config = self._config
        data = torch.from_numpy(self._replay.sample(config.batch, self._draw))
        target = data[:, 3:]
        # The learner's own loss: relative in log space, with a floor.
        soft = target.abs().clamp_(max=1.0).add_(config.relative)
        loss = ((self.module(data[:, :3]) - target) / soft).square().mean()
        self._optimizer.forget_gradients()
        loss.backward()
        decay = config.floor + (1.0 - config.floor) / (1.0 + self.steps / config.half_life)
        self._optimizer.step(decay)
        self.steps += 1
        keep = min(config.ema, (1 + self.steps) / (10 + self.steps))
        with torch.no_grad():
            torch._foreach_lerp_(self._average, self._parameters, 1.0 - keep)


def _network(
    inputs: int, hidden: int, layers: int, generator: torch.Generator
) -> tuple[nn.Sequential, int]:
    """`layers` hidden ReLU layers and a linear output to 3, and their MACs."""
    parts: list[nn.Module] = []
    macs = 0
    for fan_in, fan_out in _widths(inputs, hidden, layers):
        linear = nn.Linear(fan_in, fan_out)
        bound = 1.0 / math.sqrt(fan_in)  # torch's own, from the generator
        for parameter in linear.parameters():
            parameter.data.uniform_(-bound, bound, generator=generator)
        parts += [linear, nn.ReLU()]
        macs += fan_in * fan_out
    return nn.Sequential(*parts[:-1]), macs


def _widths(inputs: int, hidden: int, layers: int) -> Iterator[tuple[int, int]]:
    return pairwise([inputs, *([hidden] * layers), 3])
