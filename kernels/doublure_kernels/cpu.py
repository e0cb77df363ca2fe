"""The rasterizer on the processor, compiled by Numba: tiles, vectors, and threads over both.

A scene alone is drawn by all threads, a segment of rows each; of a batch, each thread takes whole
items. Either way the same sums are made in the same order, so the bits do not depend on how many
threads there are, nor on what else is in the batch.
"""

from __future__ import annotations

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

_WORTH_US = 250.0  # of work for each thread that is woken, which takes some 50 to 100 µs
_LISTEN = 1_000_000  # looks at the bell before a helper sleeps: some 400 µs


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
        params, sigma = _input(scene.params), _input(scene.sigma)
        background, counts = _input(scene.background), _input(scene.counts)
        compact, bbox = raster.kernel == "compact", raster.support == "bbox6"
        batch, triangles = params.shape[:2]
        geo = np.empty((batch, triangles, loops.GEO))
        nothing = np.empty((1, 0, 0, 0), dtype)
        given = _input(nothing if given is None else given)
        images = nothing if images is None else images
        graded = batch if mode else 0
        rows = triangles + 1 if mode else 0
        grads = np.empty((graded, triangles, 10), dtype)
        grad_sigma = np.empty((graded, triangles), dtype)
        grad_background, losses = np.empty((graded, 3), dtype), np.empty(graded, dtype)
        # Whole items, several at once where there are many; of few items, segments of rows.
        segments = 0
        each = max(1, batch // (8 * self.threads))
        if self.threads > 1 and batch < 2 * self.threads:
            segments = -(-raster.height // loops.segment_rows(raster.height))
        shared = np.zeros((batch if segments else 0, segments, rows, loops.ACC))
        desk = np.zeros(5, np.int64)

        def take_part(call: int) -> None:
            scratch = self._scratch(dtype)
            loops.take_part(
                self._crew.bell, call, desk, segments, each, mode, compact, bbox, params, sigma,
                counts, geo, background, given, images, *scratch.lists(triangles), scratch.spots,
                scratch.store, scratch.pixel, scratch.sums(rows)[None], scratch.part(rows), shared,
                grads, grad_sigma, grad_background, losses,
            )  # fmt: skip

        units = batch * segments or -(-batch // each)
        # Roughly what it takes: pixels, and rows of triangles of which a quarter is usually met.
        expected_us = batch * raster.height * (0.003 * raster.width + 0.025 * triangles)
        self._crew.lead(take_part, min(units - 1, int(expected_us / _WORTH_US)))
        if desk[3]:
            raise SettingError(
                f"triangles: expected at most {loops.ROOM // loops.BLOCK:,} in any 16 rows of "
                f"pixels, got more among {triangles:,}; draw fewer at a time"
            )
        return losses, Gradients(grads, grad_sigma, grad_background)

    def _scratch(self, dtype: np.dtype[Any]) -> _Scratch:
        found: _Scratch | None = getattr(self._local, dtype.name, None)
        if found is None:
            found = _Scratch(dtype, _module)
            setattr(self._local, dtype.name, found)
        return found


class _Scratch:
    """What one thread works in, kept from call to call."""

    def __init__(self, dtype: np.dtype[Any], loops: Any) -> None:
        self._loops = loops
        # Reserved, not used: the system gives memory to what is touched.
        self.store = np.empty(self._loops.FIELDS * self._loops.ROOM, dtype)
        self.spots = np.empty(self._loops.ROOM // self._loops.BLOCK, np.int64)
        self.pixel = np.empty(self._loops.PIXELS, dtype)
        self._lists = np.empty((0, self._loops.LISTS), np.int64)
        self._spans = np.empty((0, self._loops.SPAN))
        self._sums = np.empty((0, self._loops.ACC))
        self._part = np.empty((0, self._loops.ACC))

    def lists(self, triangles: int) -> tuple[Array, Array]:
        if len(self._lists) < triangles:
            self._lists = np.empty((triangles, *self._lists.shape[1:]), np.int64)
            self._spans = np.empty((triangles, self._loops.SPAN))
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
    """Threads that help whoever calls; idle between calls, and shared by callers.

    Waking a sleeping thread takes longer than drawing a small scene. So a helper listens for a
    moment after its work, without the interpreter's lock, for the caller to ring; only then does it
    sleep. A call waits for those that came, never for one that did not.

    Numba's own threads are not used: some of its layers may not be entered by two threads at once.
    """

    def __init__(self, helpers: int) -> None:
        self.bell = np.zeros(1, np.int64)
        self._helpers = helpers
        self._calls = 0
        self._work: Callable[[int], None] | None = None
        self._queue: SimpleQueue[None] = SimpleQueue()
        self._asleep = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def lead(self, work: Callable[[int], None], helpers: int) -> None:
        """`work(call)` in this thread, which rings `bell` with it, and `work(0)` in others.

        So many sleeping helpers are woken; any that listen may come too.
        """
        helpers = min(helpers, self._helpers)
        if helpers < 1:
            work(-1)  # rings nobody: helpers look for a call that they were told of
            return
        self._leave_parent()
        with self._lock:
            self._start(helpers)
            self._calls += 1
            call, self._work = self._calls, work
            self._wake(helpers)
        try:
            work(call)
        finally:
            with self._lock:
                if self._calls == call:
                    self._work = None  # or the arrays would live until another call

    def close(self) -> None:
        self._leave_parent()
        with self._lock:
            self._calls += 1
            self._closed, self._work = True, None
            self.bell[0] = self._calls
            self._wake(self._asleep)
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()

    def _leave_parent(self) -> None:
        """In a forked child: the threads did not come along, but a lock that one held did."""
        if self._owner != os.getpid():
            self._owner, self._threads, self._lock = os.getpid(), [], threading.Lock()
            self._queue, self._asleep = SimpleQueue(), 0

    def _wake(self, count: int) -> None:
        for _ in range(min(count, self._asleep)):
            self._queue.put(None)
            self._asleep -= 1

    def _start(self, count: int) -> None:
        while len(self._threads) < count and not self._closed:
            thread = threading.Thread(
                target=self._serve, args=(self._calls,), name="doublure-raster", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # as many as the system allows, or it is shutting down
                _log.info("drawing with %d helpers: %s", len(self._threads), error)
                return
            self._threads.append(thread)

    def _serve(self, seen: int) -> None:
        tries = 0
        while True:
            rung = _module.wait(self.bell, seen, _LISTEN)
            tries += 1
            with self._lock:
                called, work, closed = self._calls, self._work, self._closed
                # Called, but not rung for: the caller is still setting up, or could not.
                early = rung == seen and work is not None
                sleep = called == seen or (early and tries >= 100)
                self._asleep += sleep
            if sleep or early:
                work = None  # not to keep a call's arrays
                if sleep:
                    self._queue.get()
                    tries = 0
                continue
            seen, tries = called, 0
            if closed:
                return
            if work is not None:
                try:
                    work(0)
                except MemoryError as error:  # before it took any: others draw it
                    _log.info("a helper lacks memory to work in: %s", error)
            work = None


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _input(array: Any) -> Array:
    """As the loops were compiled for: in C order, and not to be written to.

    Numba would compile anew for each combination of layouts and of what may be written.
    """
    view = np.ascontiguousarray(array).view()
    if not view.flags.aligned:
        view = view.copy()
    view.flags.writeable = False
    return view


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
    scratch = _Scratch(dtype, loops)
    image = np.zeros((1, 8, 8, 3), dtype)
    bell = np.zeros(1, np.int64)
    loops.wait(bell, 1, 1)
    loops.take_part(
        bell, -1, np.zeros(5, np.int64), 0, 1, 2, False, False, _input(params),
        _input(np.ones((1, 1), dtype)), _input(np.ones(1, np.int64)), np.empty((1, 1, loops.GEO)),
        _input(np.zeros((1, 3), dtype)), _input(image), image, *scratch.lists(1), scratch.spots,
        scratch.store, scratch.pixel, scratch.sums(2)[None], scratch.part(2),
        np.zeros((0, 0, 2, loops.ACC)), np.empty((1, 1, 10), dtype), np.empty((1, 1), dtype),
        np.empty((1, 3), dtype), np.empty(1, dtype),
    )  # fmt: skip
