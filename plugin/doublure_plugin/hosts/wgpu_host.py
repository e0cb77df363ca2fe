"""The embedded host: draws on the GPU, or on lavapipe, through wgpu; window.py can show it."""

from __future__ import annotations

import time
from typing import Any, Literal

import numpy as np
from doublure_bridge.models import ModelSpec

from ..scenes import Scene
from .base import Array, Host, HostError, Timing, WeightsLike
from .gpu import Gpu
from .rows import RowSampler
from .standin import StandIn

__all__ = ["WgpuHost"]

_FORMAT = "rgba16float"

# Engines hand shaders a frame number, and noise is seeded by it: so does this one, and the
# determinism probe is there to find out.
_PRELUDE = """
struct SourceFrame { size: vec2f, t: f32, index: u32 }
@group(0) @binding(0) var<uniform> source_frame: SourceFrame;
"""

_MAIN = """
@vertex
fn source_cover(@builtin(vertex_index) i: u32) -> @builtin(position) vec4f {
    return vec4f(f32(i32(i & 1u) * 4 - 1), f32(i32(i >> 1u) * 4 - 1), 0.0, 1.0);
}

@fragment
fn source_main(@builtin(position) position: vec4f) -> @location(0) vec4f {
    let p = 2.0 * position.xy / source_frame.size - 1.0;
    return vec4f(scene_color(p, source_frame.t), 1.0);
}
"""


class WgpuHost(Host):
    """Draws a scene's WGSL into an RGBA16F target and samples it on the device.

    Args:
        device_share: On a software adapter, the share of time that drawing may take: the CPU it
            uses is the one that training needs. `wait` keeps to it. Ignored on a GPU.
    Raises:
        HostError: wgpu is missing, finds no adapter, or does not compile the scene.
    """

    name = "wgpu"

    def __init__(self, scene: Scene, *, device_share: float = 0.5, **settings: Any) -> None:
        super().__init__(scene, **settings)
        if not 0.0 < device_share <= 1.0:
            raise HostError("device_share", expected="over 0 and at most 1", got=device_share)
        self.comparing = False
        """Show the source although there is a stand-in; set on the render thread."""
        self._share = device_share
        self._gpu = Gpu()
        try:
            self._build()
        except BaseException:
            self._gpu.close()
            raise

    def _build(self) -> None:
        gpu, (width, height) = self._gpu, self.size
        self.device = gpu.description
        usage = "RENDER_ATTACHMENT|TEXTURE_BINDING|STORAGE_BINDING|COPY_SRC"
        self._source, self._display, self._scratch = (
            gpu.device.create_texture(
                label=label, size=(width, height, 1), format=_FORMAT, usage=usage
            )
            for label in ("source", "display", "scratch")
        )
        self._source_view = self._source.create_view()
        self._display_view = self._display.create_view()
        self._scratch_view = self._scratch.create_view()
        self._uniform = gpu.buffer(16, "UNIFORM|COPY_DST", "source frame")
        self._values = np.zeros(4, np.float32)
        self._values[:2] = self.size
        self._index = self._values[3:4].view(np.uint32)
        self._code = _PRELUDE + self.scene.wgsl + _MAIN
        try:
            module = gpu.compile(self._code, f"source {self.scene.name}")
            self._pipeline = gpu.device.create_render_pipeline(
                label=f"source {self.scene.name}",
                layout="auto",
                vertex={"module": module, "entry_point": "source_cover"},
                primitive={"topology": "triangle-list"},
                fragment={
                    "module": module,
                    "entry_point": "source_main",
                    "targets": [{"format": _FORMAT}],
                },
            )
        except Exception as error:
            raise HostError(f"source {self.scene.name}", got=str(error)) from error
        self._bound = gpu.bind(self._pipeline, 0, self._uniform)
        self._sampler = RowSampler(
            gpu,
            self._source_view,
            size=self.size,
            count=self.rows_per_capture,
            seed=self.seed,
        )
        self._standin = StandIn(
            gpu, self._submit, size=self.size, targets=[self._display_view, self._scratch_view]
        )
        # A software device draws on the CPU in submission order: a second submission in flight
        # would only make `submit` wait for the first. A GPU keeps one frame ahead.
        self._frames = gpu.frames(1 if gpu.software else 2)
        self._device_seconds = 0.0
        self._finished_at = 0.0
        self._was_busy = False
        self._shown: Any = self._source
        self.stats.shader_compiles = gpu.compiles

    # -- the live loop ------------------------------------------------------------------------

    @property
    def showing(self) -> Literal["source", "standin"]:
        return "standin" if self._standin.showing and not self.comparing else "source"

    def show_source(self) -> None:
        self._standin.forget()
        self.stats.version = 0

    def prepare(self, spec: ModelSpec) -> None:
        self._standin.prepare(spec)
        self.stats.shader_compiles = self._gpu.compiles

    def _collect(self) -> None:
        self._gpu.poll()
        while (began := self._frames.finished()) is not None:
            self._finished_at = time.perf_counter()
            # Seen late by up to a wait, so this overestimates; half of the new one smooths it.
            self._device_seconds += 0.5 * (self._finished_at - began - self._device_seconds)
        self._sampler.collect(self._take)

    def _take(self, rows: Array, nonfinite: int, nonopaque: int) -> None:
        self._hand_over(rows, nonfinite=nonfinite, nonopaque=nonopaque)

    def _busy(self) -> bool:
        self._was_busy = self._frames.full
        return self._was_busy

    def _draw(self, t: float, capture_t: float, capture: bool) -> None:
        encoder = self._gpu.device.create_command_encoder()
        if capture and not self._sampler.ready:
            self.stats.capture_skipped += 1
            capture = False
        standin = self.showing == "standin"
        if capture or not standin:
            self._draw_source(encoder, self._source_view, capture_t)
        if capture:
            self._sampler.encode(
                encoder, t=self.scene.normalise(capture_t), index=self.stats.captures
            )
            self.stats.captures += 1
        if standin:
            self._standin.draw(encoder, self._display_view, t=self.scene.normalise(t))
        self._shown = self._display if standin else self._source
        self._submit(encoder)
        if capture:
            self._sampler.sent()

    def _submit(self, encoder: Any) -> None:
        """Submit and count. In the loop there is always room; elsewhere this makes some."""
        while self._frames.full:
            self._gpu.wait()
            self._collect()
        self._frames.encode(encoder)
        self._gpu.queue.submit([encoder.finish()])
        self._frames.sent()

    def _draw_source(self, encoder: Any, view: Any, t: float, timing: Any = None) -> None:
        self._values[2] = t
        self._index[0] = (int(self._index[0]) + 1) & 0xFFFFFFFF
        self._gpu.queue.write_buffer(self._uniform, 0, self._values)
        extra = {"timestamp_writes": timing} if timing else {}
        attachment = {"view": view, "load_op": "clear", "store_op": "store"}
        work = encoder.begin_render_pass(color_attachments=[attachment], **extra)
        work.set_pipeline(self._pipeline)
        work.set_bind_group(0, self._bound)
        work.draw(3)
        work.end()

    def _upload(self, weights: WeightsLike) -> None:
        self._standin.upload(weights)
        self.stats.shader_compiles = self._gpu.compiles

    def _swap(self) -> None:
        for weights, reason in self._standin.swap():
            if reason:
                self._rejected(weights, reason)
            else:
                self._applied(weights)

    def wait(self) -> None:
        if self._was_busy:
            time.sleep(0.001)
            return
        super().wait()
        if self._gpu.software and self._share < 1.0:
            # Let the device's last work end, then leave it idle for its share of the time.
            deadline = time.perf_counter() + 0.5
            while self._frames.count and time.perf_counter() < deadline:
                time.sleep(0.001)
                self._collect()
            rest = self._device_seconds * (1.0 / self._share - 1.0)
            time.sleep(min(0.5, max(0.0, self._finished_at + rest - time.perf_counter())))

    # -- for a window -----------------------------------------------------------------------------

    @property
    def gpu(self) -> Gpu:
        """The device, borrowed."""
        return self._gpu

    @property
    def shown_view(self) -> Any:
        """View of the texture that the last frame was drawn into: rgba16float, linear."""
        return self._display_view if self._shown is self._display else self._source_view

    @property
    def presentable(self) -> bool:
        """Whether presenting now would not wait: a software adapter draws while it presents."""
        return not self._gpu.software or not self._frames.count

    # -- reports and tests ----------------------------------------------------------------------

    def read_source(self, t: float) -> Array:
        return self.read_target(t)[..., :3]

    def read_target(self, t: float) -> Array:
        encoder = self._gpu.device.create_command_encoder()
        self._draw_source(encoder, self._scratch_view, t)
        self._gpu.queue.submit([encoder.finish()])
        return self._gpu.read_texture(self._scratch)

    def read_standin(self, t: float) -> Array:
        if not self._standin.showing:
            raise HostError("stand-in", expected="weights that were swapped in", got="none yet")
        encoder = self._gpu.device.create_command_encoder()
        self._standin.draw(encoder, self._scratch_view, t=self.scene.normalise(t))
        self._gpu.queue.submit([encoder.finish()])
        return self._gpu.read_texture(self._scratch)[..., :3]

    def read_shown(self) -> Array:
        return self._gpu.read_texture(self._shown)[..., :3]

    def measure(self, *, repeats: int = 15, t: float | None = None) -> Timing:
        low, high = self.scene.parameter
        raw = 0.5 * (low + high) if t is None else t
        # A software adapter's timestamps lie around the recording of work, not around the work.
        on_device = self._gpu.timestamps and not self._gpu.software
        timer = _Timer(self._gpu, on_device)
        try:
            source = timer.run(
                lambda e, w: self._draw_source(e, self._scratch_view, raw, w), repeats
            )
            standin = None
            if self._standin.showing:
                at = self.scene.normalise(raw)
                standin = timer.run(
                    lambda e, w: self._standin.draw(e, self._scratch_view, t=at, timing=w), repeats
                )
        finally:
            timer.close()
        return Timing(
            source[0],
            standin[0] if standin else None,
            "timestamps" if on_device else "wall clock",
            (source[1], standin[1] if standin else None),
        )

    def source_description(self) -> dict[str, str]:
        low, high = self.scene.parameter
        return {
            "host": self.name,
            "scene": self.scene.name,
            "wgsl": self._code,
            "entry_points": "source_cover, source_main",
            "size": f"{self.size[0]}x{self.size[1]}",
            "format": f"{_FORMAT}, linear",
            "uniforms": "size: vec2f, t: f32, index: u32",
            "parameter": f"{self.scene.parameter_name} {low!r}..{high!r}",
        }

    def _release(self) -> None:
        self._gpu.wait()
        self._standin.close()
        self._sampler.close()
        self._frames.close()
        for resource in (self._source, self._display, self._scratch, self._uniform):
            resource.destroy()
        self._gpu.close()


class _Timer:
    """Times one pass, submitted alone: by the device's clock, or around a synchronised wait."""

    def __init__(self, gpu: Gpu, on_device: bool) -> None:
        self._gpu = gpu
        self._queries: Any = None
        if on_device:
            self._queries = gpu.device.create_query_set(type="timestamp", count=2)
            self._resolved = gpu.buffer(256, "QUERY_RESOLVE|COPY_SRC", "timestamps")

    def run(self, encode: Any, repeats: int) -> tuple[float, float]:
        """Median and interquartile range in milliseconds, after two frames of warm-up."""
        times = [self._once(encode) for _ in range(repeats + 2)][2:]
        low, median, high = np.percentile(times, (25, 50, 75))
        return float(median), float(high - low)

    def _once(self, encode: Any) -> float:
        encoder = self._gpu.device.create_command_encoder()
        if self._queries is None:
            self._gpu.wait()
            began = time.perf_counter()
            encode(encoder, None)
            self._gpu.queue.submit([encoder.finish()])
            self._gpu.wait()
            return (time.perf_counter() - began) * 1e3
        writes = {
            "query_set": self._queries,
            "beginning_of_pass_write_index": 0,
            "end_of_pass_write_index": 1,
        }
        encode(encoder, writes)
        encoder.resolve_query_set(self._queries, 0, 2, self._resolved, 0)
        self._gpu.queue.submit([encoder.finish()])
        begin, end = np.frombuffer(self._gpu.queue.read_buffer(self._resolved, 0, 16), np.uint64)
        # In ticks, whose length wgpu-py does not tell: one nanosecond on NVIDIA. On a device with
        # another, both figures scale alike and the verdict stands.
        return float(int(end) - int(begin)) / 1e6

    def close(self) -> None:
        if self._queries is not None:
            self._resolved.destroy()
            self._queries.destroy()
