"""A grid learner's step through the compiled loops, where Numba is there and ready.

The loops do what `Learner` does through torch, in the same order and several times as fast. Until
they are ready (the first time on a machine they are compiled, for about 15 s) torch does the work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .models.grid import Grid
from .models.spline import Taps

__all__ = ["FusedGrid", "compiled_draw", "prepare", "ready", "view"]

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_kernels: Any = None
_tried = False
_ROWS_A_THREAD = 1024  # fewer are not worth a second thread

Array = NDArray[np.float32]


def prepare(*, background: bool = False) -> bool:
    """Import the compiled loops, compiling them where that was not done before.

    Args:
        background: Return at once and do it in a daemon thread.
    Returns:
        Whether they are ready; False also where Numba is missing, which is logged once.
    """
    if background:
        if not _tried:
            threading.Thread(target=_import, name="doublure-compile", daemon=True).start()
        return ready()
    _import()
    return ready()


def ready() -> bool:
    """Whether the loops can be used now; never blocks."""
    return _kernels is not None


def compiled_draw() -> Callable[..., None] | None:
    """`kernels_cpu.draw` where it is ready."""
    return None if _kernels is None else _kernels.draw


def _import() -> None:
    global _kernels, _tried
    with _lock:
        if _tried:
            return
        _tried = True
        try:
            from . import kernels_cpu
        except ImportError as error:
            _log.warning("training through torch alone, several times slower: %s", error)
            return
        _kernels = kernels_cpu


def view(tensor: Tensor) -> Array:
    """A tensor's memory as the loops see it: texels channels last, [..., 4]."""
    data = tensor.detach()
    if data.dim() > 2:
        data = data[0].permute(*range(1, data.dim() - 1), 0)
    return data.numpy()


_Spline = tuple[Taps, Taps, Array, Array]
"""Taps along rows and columns, scratch, and the texels that control points stand for."""


class FusedGrid:
    """The compiled step of one grid model; borrows every tensor and writes into them.

    Textures must lie in memory channels last. One thread uses it at a time.

    Args:
        grid: At the stage that the tensors are at.
        values, averages, first, second: As in `LearnerState`, in the order of `parameters()`.
        threads: Rows of a batch are shared among so many; bits depend on their number.
    """

    def __init__(
        self,
        grid: Grid,
        values: Sequence[Tensor],
        averages: Sequence[Tensor],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        *,
        threads: int = 1,
    ) -> None:
        self._all = [[view(t) for t in tensors] for tensors in (values, averages, first, second)]
        self._values = self._all[0]
        for array in (a for arrays in self._all for a in arrays):
            assert array.flags.c_contiguous
            assert array.dtype == np.float32
        spec = grid.spec
        self._layers, self._units, self._inputs = spec.layers, spec.hidden, spec.inputs
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._planes: list[_Spline | None] = []
        for i, texels in ((1, spec.xt), (2, spec.yt)):
            controls = tuple(self._values[i].shape[:2])
            if controls == texels:
                self._planes.append(None)
                continue
            rows, columns = grid.plane_taps(texels, controls)
            scratch = np.empty((controls[0], texels[1], 4), np.float32)
            self._planes.append((rows, columns, scratch, np.empty((*texels, 4), np.float32)))
        self._gradients = [self._zeros() for _ in range(threads)]
        self._middle = np.empty((self._layers - 1, self._units, self._units), np.float32)
        self._middle_bias = np.empty((self._layers - 1, self._units), np.float32)
        self._scratch = np.empty(max(v.size for v in self._values[:4]), np.float32)

    def close(self) -> None:
        """End the threads, if there are any; idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def gradients(self, rows: Array, weights: Array, errors: Array, relative: float) -> float:
        """The loss of rows [n, 6] in log space; fills `errors` [n] and keeps the gradients."""
        textures, network = self._textures(), self._network()
        total = len(rows)
        parts = max(1, min(self._threads, total // _ROWS_A_THREAD))
        bounds = np.linspace(0, total, parts + 1).astype(int)

        def run(i: int) -> float:
            low, high = bounds[i], bounds[i + 1]
            return float(
                _kernels.rows_pass(
                    rows[low:high], weights[low:high], np.float32(relative), total,
                    *textures, *network, *self._gradients[i], errors[low:high],
                )
            )  # fmt: skip

        if parts == 1:
            return run(0)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "doublure-step")
        losses = list(self._pool.map(run, range(parts)))
        for more in self._gradients[1:parts]:
            for whole, part in zip(self._gradients[0], more, strict=True):
                whole += part
                part[...] = 0.0
        return float(sum(losses))

    def forget(self) -> None:
        """Throw the gradients away."""
        for arrays in self._gradients:
            for array in arrays:
                array[...] = 0.0

    def update(
        self, rates: Sequence[float], betas: tuple[float, float], count: int, keep: float
    ) -> None:
        """Adam's step number `count` along the gradients, and the averages; clears them."""
        textures = self._gradients[0][:4]
        g_first, g_first_bias, g_middle, g_middle_bias, g_last, g_last_bias = self._gradients[0][4:]
        for i, plane in zip((1, 2), self._planes, strict=True):
            if plane is not None:
                rows, columns, scratch, _ = plane
                control = np.zeros(self._values[i].shape, np.float32)
                _kernels.spline_down(
                    textures[i], rows.at, rows.weights, columns.at, columns.weights,
                    scratch, control,
                )  # fmt: skip
                textures[i][...] = 0.0
                textures[i] = control
        gradients = [
            *textures, g_first, *g_middle, g_last, g_first_bias, *g_middle_bias, g_last_bias
        ]  # fmt: skip
        for i, gradient in enumerate(gradients):
            value, average, first, second = (arrays[i].ravel() for arrays in self._all)
            _kernels.adam_step(
                value, gradient.ravel(), first, second, average,
                np.float32(rates[i]), np.float32(betas[0]), np.float32(betas[1]),
                float(count), np.float32(keep),
            )  # fmt: skip

    def smooth(self, texture: int, axis: int, pull: float) -> None:
        """Pull texture number 0 to 3 towards straight lines along one of its axes."""
        texels = self._values[texture]
        size = texels.shape[axis]
        if size < 3:
            return
        inner = int(np.prod(texels.shape[axis + 1 :]))
        scratch = self._scratch[: size * inner].reshape(size, inner)
        lines = texels.reshape(-1, size, inner)
        _kernels.bend_columns(lines, np.float32(pull), scratch)

    def _textures(self) -> list[Array]:
        textures = self._values[:4]
        for i, plane in zip((1, 2), self._planes, strict=True):
            if plane is not None:
                rows, columns, scratch, texels = plane
                _kernels.spline_up(
                    textures[i], rows.at, rows.weights, columns.at, columns.weights,
                    scratch, texels,
                )  # fmt: skip
                textures[i] = texels
        return textures

    def _network(self) -> list[Array]:
        weights = self._values[4 : 5 + self._layers]
        biases = self._values[5 + self._layers :]
        for i in range(self._layers - 1):  # a few hundred numbers
            self._middle[i], self._middle_bias[i] = weights[i + 1], biases[i + 1]
        return [weights[0], biases[0], self._middle, self._middle_bias, weights[-1], biases[-1]]

    def _zeros(self) -> list[Array]:
        shapes: list[tuple[int, ...]] = [v.shape for v in self._values[:4]]
        for i, plane in zip((1, 2), self._planes, strict=True):
            if plane is not None:
                shapes[i] = plane[3].shape
        units, inputs, more = self._units, self._inputs, self._layers - 1
        shapes += [(units, inputs), (units,), (more, units, units), (more, units), (3, units), (3,)]
        return [np.zeros(shape, np.float32) for shape in shapes]
