"""The rasterizer on the processor, compiled by Numba: tiles, vectors, and threads over both.

A scene alone is drawn by all threads, a segment of rows each; of a batch, each thread takes whole
items. Either way the same sums are made in the same order, so the bits do not depend on how many
threads there are, nor on what else is in the batch.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import DeviceError, SettingError
from .scene import Gradients, Raster, Scene

__all__ = ["CpuBackend", "prepare"]

_log = logging.getLogger(__name__)

Array = NDArray[Any]

_SETUP = 4096  # triangles that one thread works out by itself rather than wake another


class CpuBackend:
    """`Backend` on NumPy arrays, float32 or float64.

    Args:
        threads: How many draw, this one included; all processors that the process may use if None.
    Raises:
        SettingError: `threads` is less than 1.
    """

    name = "cpu"
    adapter = None

    def __init__(self, threads: int | None = None) -> None:
        if threads is None:
            threads = _processors()
        if threads < 1:
            raise SettingError(f"threads: expected 1 or more, got {threads}")
        self.threads = threads
        self._crew = _Crew(threads - 1)
        self._local = threading.local()
        self._closed = False

    def close(self) -> None:
        """End the threads; a second call does nothing."""
        self._closed = True
        self._crew.close()

    def __enter__(self) -> CpuBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forward(self, scene: Scene, raster: Raster) -> Array:
        """See `Backend.forward`."""
        batch = len(scene.params)
        images = np.empty((batch, raster.height, raster.width, raster.channels), _dtype(scene))
        self._run(scene, raster, 0, None, images)
        return images

    def backward(self, scene: Scene, raster: Raster, grad_images: Any) -> Gradients:
        """See `Backend.backward`."""
        return self._run(scene, raster, 1, grad_images, None)[1]

    def fused_mse(self, scene: Scene, raster: Raster, targets: Any) -> tuple[Array, Gradients]:
        """See `Backend.fused_mse`."""
        return self._run(scene, raster, 2, targets, None)

    def _run(
        self, scene: Scene, raster: Raster, mode: int, given: Any, images: Array | None
    ) -> tuple[Array, Gradients]:
        if self._closed:
            raise DeviceError("this CpuBackend is closed; open another")
        dtype = _dtype(scene)
        loops = _loops(dtype)
        params = np.ascontiguousarray(scene.params)
        sigma, counts = np.asarray(scene.sigma), np.ascontiguousarray(scene.counts)
        background = np.ascontiguousarray(scene.background)
        compact, bbox = raster.kernel == "compact", raster.support == "bbox6"
        batch, triangles = params.shape[:2]
        total = batch * triangles
        geo = np.empty((batch, triangles, loops.GEO))

        def set_up(part: int) -> None:
            first = part * _SETUP
            last = min(first + _SETUP, total)
            loops.setup(params, sigma, counts, compact, bbox, geo, first, last)

        self._crew.run(-(-total // _SETUP), set_up)

        nothing = np.empty((1, 0, 0, 0), dtype)
        given = nothing if given is None else np.ascontiguousarray(given)
        images = nothing if images is None else images
        graded = batch if mode else 0
        rows = triangles + 1 if mode else 0
        grads = np.empty((graded, triangles, 10), dtype)
        grad_sigma = np.empty((graded, triangles), dtype)
        grad_background, losses = np.empty((graded, 3), dtype), np.empty(graded, dtype)
        segments = -(-raster.height // loops.segment_rows(raster.height))

        def draw_items(group: int) -> None:
            scratch = self._scratch(dtype)
            first = group * each
            fits = loops.draw_items(
                mode, compact, bbox, params, geo, background, given, images,
                first, min(first + each, batch), *scratch.lists(triangles), scratch.store,
                scratch.pixel, scratch.sums(rows)[None], scratch.part(rows),
                grads, grad_sigma, grad_background, losses,
            )  # fmt: skip
            _check_room(fits, triangles, loops)

        def draw_segment(unit: int) -> None:
            scratch = self._scratch(dtype)
            item, segment = divmod(unit, segments)
            fits = loops.draw(
                mode, compact, bbox, params[item], geo[item], background[item],
                given[item if mode else 0], images[0 if mode else item], segment, segment + 1,
                *scratch.lists(triangles), scratch.store, scratch.pixel, shared[item, segment],
                scratch.part(rows),
            )  # fmt: skip
            _check_room(fits, triangles, loops)

        def finish(item: int) -> None:
            loops.finish(
                shared[item], geo[item], grads[item], grad_sigma[item], grad_background[item],
                losses[item : item + 1],
            )  # fmt: skip

        if self.threads == 1 or batch >= 2 * self.threads:
            # Whole items, several at once where there are many: fewer calls from Python.
            each = max(1, batch // (8 * self.threads))
            self._crew.run(-(-batch // each), draw_items)
        else:
            shared = np.zeros((batch, segments, rows, loops.ACC))
            self._crew.run(batch * segments, draw_segment)
            self._crew.run(graded, finish)
        return losses, Gradients(grads, grad_sigma, grad_background)

    def _scratch(self, dtype: np.dtype[Any]) -> _Scratch:
        found: _Scratch | None = getattr(self._local, dtype.name, None)
        if found is None:
            found = _Scratch(dtype)
            setattr(self._local, dtype.name, found)
        return found


def _check_room(fits: bool, triangles: int, loops: Any) -> None:
    if not fits:
        raise SettingError(
            f"triangles: expected at most {loops.ROOM // loops.BLOCK:,} in any 16 rows of pixels, "
            f"got more among {triangles:,}; draw fewer at a time"
        )


class _Scratch:
    """What one thread works in, kept from call to call."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._loops = _loops(dtype)
        # Reserved, not used: the system gives memory to what is touched.
        self.store = np.empty(self._loops.FIELDS * self._loops.ROOM, dtype)
        self.pixel = np.empty(self._loops.PIXELS, dtype)
        self._lists = np.empty((0, self._loops.LISTS), np.int64)
        self._spans = np.empty((0, self._loops.TILE_H, self._loops.SPAN), np.int64)
        self._sums = np.empty((0, self._loops.ACC))
        self._part = np.empty((0, self._loops.ACC))

    def lists(self, triangles: int) -> tuple[Array, Array]:
        if len(self._lists) < triangles:
            self._lists = np.empty((triangles, *self._lists.shape[1:]), np.int64)
            self._spans = np.empty((triangles, *self._spans.shape[1:]), np.int64)
        return self._lists[:triangles], self._spans[:triangles]

    def sums(self, rows: int) -> Array:
        if len(self._sums) < rows:
            self._sums = np.empty((rows, self._loops.ACC))
        return self._sums[:rows]

    def part(self, rows: int) -> Array:
        if len(self._part) < rows:
            self._part = np.empty((rows, self._loops.ACC))
        return self._part[:rows]


class _Crew:
    """Threads that help the calling one; idle between calls, and shared by callers.

    Numba's own threads are not used: some of its layers may not be entered by two threads at once.
    """

    def __init__(self, helpers: int) -> None:
        self._helpers = helpers
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def run(self, count: int, work: Callable[[int], None]) -> None:
        """`work(0)` … `work(count - 1)`, each once, in any order; raises what one raised."""
        helpers = min(self._helpers, count - 1)
        if helpers < 1:
            for index in range(count):
                work(index)
            return
        self._start()
        ticket = itertools.count()
        left = threading.Semaphore(0)
        failures: list[BaseException] = []

        def take() -> None:
            try:
                while (index := next(ticket)) < count and not failures:
                    work(index)
            except BaseException as failure:
                failures.append(failure)

        def help_out() -> None:
            take()
            left.release()

        for _ in range(helpers):
            self._queue.put(help_out)
        take()
        for _ in range(helpers):
            left.acquire()
        if failures:
            raise failures[0]

    def close(self) -> None:
        with self._lock:
            threads, self._threads = self._threads, []
        if self._owner == os.getpid():
            for _ in threads:
                self._queue.put(None)
            for thread in threads:
                thread.join()

    def _start(self) -> None:
        with self._lock:
            if self._owner != os.getpid():  # forked: the parent's threads did not come along
                self._owner, self._threads, self._queue = os.getpid(), [], SimpleQueue()
            while len(self._threads) < self._helpers:
                thread = threading.Thread(
                    target=_serve, args=(self._queue,), name="doublure-raster", daemon=True
                )
                self._threads.append(thread)
                thread.start()


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := queue.get()) is not None:
        job()


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _dtype(scene: Scene) -> np.dtype[Any]:
    dtype: np.dtype[Any] = scene.params.dtype
    return dtype


# --- compiling ------------------------------------------------------------------------------------

_lock = threading.Lock()
_module: Any = None
_ready: set[str] = set()


def prepare(dtype: str = "float32") -> None:
    """Have the loops compiled for a dtype, and say so where it takes more than a second.

    The first time on a machine it takes about half a minute; later it reads Numba's cache.
    """
    _loops(np.dtype(dtype))


def _loops(dtype: np.dtype[Any]) -> Any:
    global _module
    if dtype.name in _ready:
        return _module
    with _lock:
        if dtype.name not in _ready:
            notice = threading.Timer(
                1.0, _log.warning, (f"compiling the rasterizer for {dtype.name}, once a machine",)
            )
            notice.daemon = True
            notice.start()
            try:
                from . import cpu_loops

                _module = cpu_loops
                _compile(cpu_loops, dtype)
            finally:
                notice.cancel()
            _ready.add(dtype.name)
    return _module


def _compile(loops: Any, dtype: np.dtype[Any]) -> None:
    """Draw something small through every loop, with the types that real calls have."""
    params = np.zeros((1, 1, 10), dtype)
    params[..., :6], params[..., 9] = (0, 0, 1, 0, 0, 1), 0.5
    broadcast = np.broadcast_to(np.ones(1, dtype), (1, 1))
    geo = np.empty((1, 1, loops.GEO))
    for sigma in (np.ones((1, 1), dtype), broadcast):
        loops.setup(params, sigma, np.ones(1, np.int64), False, False, geo, 0, 1)
    store, pixel = np.empty(loops.FIELDS * loops.ROOM, dtype), np.empty(loops.PIXELS, dtype)
    lists = np.empty((1, loops.LISTS), np.int64)
    spans = np.empty((1, loops.TILE_H, loops.SPAN), np.int64)
    sums, part = np.zeros((1, 2, loops.ACC)), np.zeros((2, loops.ACC))
    image, background = np.zeros((1, 8, 8, 3), dtype), np.zeros((1, 3), dtype)
    grads, grad_sigma = np.empty((1, 1, 10), dtype), np.empty((1, 1), dtype)
    grad_background, loss = np.empty((1, 3), dtype), np.empty(1, dtype)
    for mode in range(3):
        loops.draw_items(
            mode, False, False, params, geo, background, image, image, 0, 1, lists, spans, store,
            pixel, sums, part, grads, grad_sigma, grad_background, loss,
        )  # fmt: skip
    loops.draw(
        0, False, False, params[0], geo[0], background[0], image[0], image[0], 0, 1, lists, spans,
        store, pixel, sums[0], part,
    )  # fmt: skip
    loops.finish(sums, geo[0], grads[0], grad_sigma[0], grad_background[0], loss)
