"""The device, and waiting for it without waiting.

wgpu-py resolves a promise from a thread of its own that polls the device with a *blocking* call.
While that call waits, wgpu holds the device's fence, and the render thread's next `submit` or
`map_async` waits with it: 220 ms behind a 220 ms frame on lavapipe (wgpu 0.32). A render loop
polls once a frame anyway, so the promises of the live path are made with that thread asleep and
resolve in `Gpu.poll`, which never blocks. Blocking reads, for reports and tests, use the thread as
wgpu-py means it. Where a wgpu-py lacks the parts this needs, `Gpu` refuses to open.

Nothing here imports wgpu before a `Gpu` is opened.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .base import HostError

__all__ = ["FramesInFlight", "Gpu", "is_done"]

Array: TypeAlias = npt.NDArray[Any]


class _IdleToken:
    """Stands in for the poll thread's token: nobody polls on its behalf."""

    def set_done(self) -> None:
        """The promise resolved; there is no thread to tell."""

    def is_done(self) -> bool:
        return True


class _Poller:
    """wgpu-py's poll thread, with a switch that leaves it asleep."""

    def __init__(self, thread: Any) -> None:
        self.thread = thread
        self.asleep = False

    def get_token(self) -> Any:
        return _IdleToken() if self.asleep else self.thread.get_token()

    def stop(self) -> None:
        self.thread.stop()


def is_done(promise: Any) -> bool:
    """Whether a wgpu promise has its result, so that `sync_wait` returns at once."""
    return bool(promise._state != "pending")


class Gpu:
    """One wgpu device and its queue, owned; close it after everything made from it.

    Attributes:
        description: Adapter and driver, in words.
        software: Whether the adapter draws on the CPU.
        timestamps: Whether passes can be timed on the device.
        compiles: Shader modules compiled so far.
    Raises:
        HostError: wgpu is not installed, finds no adapter, or is a version this cannot drive.
    """

    def __init__(self) -> None:
        try:
            import wgpu
        except ImportError as error:
            raise HostError(
                "wgpu host",
                expected="wgpu-py",
                got=str(error),
                next_step="pip install doublure[wgpu]",
            ) from error
        try:
            adapter = wgpu.gpu.request_adapter_sync(power_preference="high-performance")
        except Exception as error:
            # wgpu-native explains itself over several lines.
            said = " ".join(str(error).split())
            raise HostError("wgpu adapter", expected="one adapter", got=said) from error
        if adapter is None:
            raise HostError("wgpu adapter", expected="one adapter", got="none")
        info = adapter.info
        self.software = str(info.get("adapter_type", "")).lower() == "cpu"
        parts = [info.get("device", ""), info.get("description", ""), info.get("backend_type", "")]
        self.description = ", ".join(str(p) for p in parts if p)
        self.timestamps = "timestamp-query" in adapter.features
        features = ["timestamp-query"] if self.timestamps else []
        self.device: Any = adapter.request_device_sync(required_features=features)
        self.queue: Any = self.device.queue
        self.compiles = 0
        missing = [n for n in ("_poller", "_poll", "_poll_wait") if not hasattr(self.device, n)]
        if missing:
            self.device.destroy()
            raise HostError(
                "wgpu-py",
                expected="a version from 0.29 on that this release knows",
                got=f"{wgpu.__version__} without {', '.join(missing)}",
                next_step="pip install 'wgpu>=0.29,<0.33'",
            )
        self._poller = _Poller(self.device._poller)
        self.device._poller = self._poller
        self._closed = False

    def compile(self, code: str, label: str) -> Any:
        """One shader module; every compilation of the host goes through here and is counted."""
        self.compiles += 1
        return self.device.create_shader_module(label=label, code=code)

    def frames(self, limit: int) -> FramesInFlight:
        """A tracker of up to `limit` submissions in flight; owned by the caller."""
        return FramesInFlight(self, limit)

    def buffer(self, size: int, usage: str, label: str = "") -> Any:
        return self.device.create_buffer(label=label, size=size, usage=usage)

    def bind(self, pipeline: Any, group: int, *resources: Any) -> Any:
        """A bind group with `resources` at bindings 0, 1, …; buffers are bound whole."""
        entries = [
            {"binding": i, "resource": {"buffer": r} if hasattr(r, "map_state") else r}
            for i, r in enumerate(resources)
        ]
        layout = pipeline.get_bind_group_layout(group)
        return self.device.create_bind_group(layout=layout, entries=entries)

    def poll(self) -> None:
        """Resolve what the device has finished. Never blocks."""
        self.device._poll(False)

    def map_later(self, buffer: Any) -> Any:
        """Ask for `buffer` to be mapped for reading; a promise that `poll` resolves.

        Call it after the submission that writes the buffer.
        """
        self._poller.asleep = True
        try:
            # NOSYNC: wgpu-py would otherwise submit an empty command buffer first. The copy into
            # this buffer was submitted before, and wgpu waits for exactly that submission.
            return buffer.map_async("READ_NOSYNC")
        finally:
            self._poller.asleep = False

    def wait(self) -> None:
        """Block until the device is idle. Not for the live loop."""
        self.device._poll_wait()

    def read_texture(self, texture: Any) -> Array:
        """Wait for an rgba16float texture and read it: float32 [height, width, 4]."""
        width, height, _ = texture.size
        data = self.queue.read_texture(
            {"texture": texture, "mip_level": 0, "origin": (0, 0, 0)},
            {"offset": 0, "bytes_per_row": width * 8, "rows_per_image": height},
            (width, height, 1),
        )
        return np.frombuffer(data, np.float16).reshape(height, width, 4).astype(np.float32)

    def close(self) -> None:
        """Wait for the device and destroy it. May be called twice."""
        if not self._closed:
            self._closed = True
            self.wait()
            self.device.destroy()


class FramesInFlight:
    """Knows, without waiting, which submissions the device has finished.

    A few bytes written by each submission, and mapped after it, are its fence: wgpu-py's own
    `on_submitted_work_done_async` raises TypeError in 0.32.

    Args:
        limit: Submissions that may be in flight.
    """

    def __init__(self, gpu: Gpu, limit: int) -> None:
        self._gpu = gpu
        self._free = [gpu.buffer(16, "MAP_READ|COPY_DST", f"fence {i}") for i in range(limit)]
        self._encoded: Any = None
        self._flying: deque[tuple[Any, Any, float]] = deque()

    @property
    def full(self) -> bool:
        return not self._free

    @property
    def count(self) -> int:
        return len(self._flying)

    def encode(self, encoder: Any) -> None:
        """Mark the end of `encoder`'s work; needs one that is not `full`. Then call `sent`."""
        self._encoded = self._free.pop()
        encoder.clear_buffer(self._encoded, 0, 16)

    def sent(self) -> None:
        """The encoder was submitted."""
        buffer, self._encoded = self._encoded, None
        self._flying.append((buffer, self._gpu.map_later(buffer), time.perf_counter()))

    def finished(self) -> float | None:
        """Retire one finished submission and give the time it was sent; None if there is none."""
        if not self._flying or not is_done(self._flying[0][1]):
            return None
        buffer, promise, began = self._flying.popleft()
        try:
            promise.sync_wait()
            buffer.unmap()
        except RuntimeError:
            # The device is lost: nothing will be drawn, and nothing is left to wait for either.
            pass
        self._free.append(buffer)
        return began

    def close(self) -> None:
        """Destroy the buffers. The device must be idle."""
        for buffer in (*self._free, *(flying[0] for flying in self._flying)):
            buffer.destroy()
        self._free.clear()
        self._flying.clear()
