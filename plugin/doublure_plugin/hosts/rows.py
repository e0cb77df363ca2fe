"""Rows off the device without waiting: a compute pass, and a ring of buffers mapped later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from .gpu import Gpu, is_done
from .sampling import SAMPLER_WGSL

__all__ = ["RowSampler"]

_HEADER = 32
_STAGING = 3


class RowSampler:
    """Samples a texture into rows x, y, t, r, g, b and brings them back some frames later.

    Owned by its host; the texture is borrowed. One thread.

    Args:
        source: View of the rgba16float texture to sample, `size` (width, height).
        count: Rows a capture.
        seed: Of the pixel hash.
    """

    def __init__(
        self, gpu: Gpu, source: Any, *, size: tuple[int, int], count: int, seed: int
    ) -> None:
        self._gpu = gpu
        self._count = count
        self._bytes = _HEADER + count * 24
        module = gpu.compile(SAMPLER_WGSL, "row sampler")
        self._pipeline = gpu.device.create_compute_pipeline(
            label="row sampler",
            layout="auto",
            compute={"module": module, "entry_point": "sample_rows"},
        )
        self._uniform = gpu.buffer(32, "UNIFORM|COPY_DST", "capture")
        self._rows = gpu.buffer(self._bytes, "STORAGE|COPY_SRC|COPY_DST", "rows")
        self._bound = gpu.bind(self._pipeline, 0, self._uniform, source, self._rows)
        self._free = deque(
            gpu.buffer(self._bytes, "MAP_READ|COPY_DST", f"rows staging {i}")
            for i in range(_STAGING)
        )
        self._encoded: Any = None
        self._flying: deque[tuple[Any, Any]] = deque()
        self._settings = np.zeros(8, np.uint32)
        self._settings[:3] = (*size, count)
        self._settings[4] = seed & 0xFFFFFFFF
        self._t = self._settings[5:6].view(np.float32)

    @property
    def ready(self) -> bool:
        """Whether a staging buffer is free."""
        return bool(self._free)

    def encode(self, encoder: Any, *, t: float, index: int) -> None:
        """Sample capture number `index` at normalised `t`; needs `ready`. Then call `sent`."""
        self._settings[3] = index & 0xFFFFFFFF
        self._t[0] = t
        self._gpu.queue.write_buffer(self._uniform, 0, self._settings)
        encoder.clear_buffer(self._rows, 0, _HEADER)
        work = encoder.begin_compute_pass()
        work.set_pipeline(self._pipeline)
        work.set_bind_group(0, self._bound)
        work.dispatch_workgroups((self._count + 63) // 64)
        work.end()
        self._encoded = self._free.popleft()
        encoder.copy_buffer_to_buffer(self._rows, 0, self._encoded, 0, self._bytes)

    def sent(self) -> None:
        """The encoder of the last `encode` was submitted: ask for its buffer to be mapped."""
        buffer, self._encoded = self._encoded, None
        self._flying.append((buffer, self._gpu.map_later(buffer)))

    def collect(self, take: Callable[[Any, int, int], None]) -> None:
        """Hand every capture that has arrived to `take(rows, nonfinite, nonopaque)`; wait for none.

        `rows` is the mapped memory itself, float32 [count, 6], read-only, and gone when `take`
        returns: `take` copies what it keeps, and does not raise.
        """
        while self._flying and is_done(self._flying[0][1]):
            buffer, promise = self._flying.popleft()
            try:
                promise.sync_wait()
            except RuntimeError:
                # Not mapped, for the device is lost or the buffer was destroyed: nothing to read.
                self._free.append(buffer)
                continue
            data = buffer.read_mapped(copy=False)
            nonfinite, nonopaque = np.frombuffer(data, np.uint32, 2).tolist()
            rows = np.frombuffer(data, np.float32, offset=_HEADER).reshape(self._count, 6)
            take(rows, nonfinite, nonopaque)
            del rows, data
            buffer.unmap()
            self._free.append(buffer)

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    def close(self) -> None:
        """Destroy the buffers. The device must be idle."""
        flying = [buffer for buffer, _ in self._flying]
        for buffer in (*self._free, *flying, self._rows, self._uniform):
            buffer.destroy()
        self._free.clear()
        self._flying.clear()
