"""Training curves for TensorBoard, written by a thread of their own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ScalarLog"]

log = logging.getLogger("doublure.job")

_FLUSH_S = 1.0
_QUEUE = 4096


class ScalarLog:
    """Scalars over steps into an event file below `directory`.

    The package tensorboard is imported by the writing thread (0.2 s); where it is missing, one
    line says so and everything is dropped.

    Args:
        directory: Made if need be. A resumed job adds another file beside the old ones.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._queue: queue.Queue[tuple[int, float, dict[str, float]] | None] = queue.Queue(_QUEUE)
        self._thread = threading.Thread(target=self._run, name="scalars", daemon=True)
        self._thread.start()

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Queue scalars for one step; never blocks, drops when the disk cannot follow."""
        try:
            self._queue.put_nowait((step, time.time(), dict(scalars)))
        except queue.Full:
            return

    def close(self, *, timeout_s: float = 0.1) -> None:
        """Write out what is queued, waiting at most so long. Idempotent."""
        if self._thread.is_alive():
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            writer = EventFileWriter(str(self.directory))
        except (ImportError, OSError) as error:
            log.warning("no TensorBoard curves: %s", error)
            while self._queue.get() is not None:
                pass
            return
        flushed = time.monotonic()
        while True:
            try:
                item = self._queue.get(timeout=_FLUSH_S)
            except queue.Empty:
                writer.flush()
                continue
            if item is None:
                break
            step, when, scalars = item
            values = [Summary.Value(tag=k, simple_value=v) for k, v in scalars.items()]
            writer.add_event(Event(step=step, wall_time=when, summary=Summary(value=values)))
            if time.monotonic() - flushed > _FLUSH_S:
                writer.flush()
                flushed = time.monotonic()
        writer.close()
