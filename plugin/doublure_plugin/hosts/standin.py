"""The stand-in on the device: pipelines made ahead, weights in two sets, flipped between frames.

Each specification has one pipeline and two sets of resources. New weights are written into the set
that is not drawn from, and `swap` makes it the front one: a frame reads one set and so one version.
Nothing is created or compiled by a reload.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from doublure_bridge.models import GridSpec, ModelSpec

from ..evaluate import Evaluator, check_tensors
from .base import Array, HostError, WeightsLike
from .gpu import Gpu, is_done
from .standin_shader import TEXTURES, pack_network, packed_vectors, standin_wgsl

__all__ = ["StandIn"]

_PROBES = 1024
_FORMAT = "rgba16float"

# A GPU's linear sampler may keep 8 bits of the texel weight, and the target is float16: together
# under half a percent of the mean log colour in measurements (lavapipe: 0.02 %). Zeros, swapped
# axes or channels and stale buffers are off by tens of percent.
_RELATIVE = 0.02
_ABSOLUTE = 1e-3


@dataclass(slots=True)
class _Set:
    """One version's weights on the device."""

    network: Any
    textures: list[Any]
    image: Any
    """Bind group for drawing images; `probe` is the one for drawing given points."""
    probe: Any


@dataclass(slots=True)
class _Prepared:
    spec: ModelSpec
    pipeline: Any
    points: Any
    sets: tuple[_Set, _Set]
    front: int = 0
    verified: bool = False


@dataclass(slots=True)
class _Probe:
    """A self-test in flight."""

    weights: WeightsLike
    prepared: _Prepared
    promise: Any
    expected: Array


class StandIn:
    """Draws models on the device. Owned by its host; one thread.

    Args:
        size: (width, height) of the images drawn.
    """

    def __init__(self, gpu: Gpu, *, size: tuple[int, int]) -> None:
        self._gpu = gpu
        self._prepared: dict[ModelSpec, _Prepared] = {}
        self._frame = gpu.buffer(16, "UNIFORM|COPY_DST", "stand-in frame")
        self._probe_frame = gpu.buffer(16, "UNIFORM|COPY_DST", "probe frame")
        self._points = gpu.buffer(_PROBES * 16, "STORAGE|COPY_DST", "probe points")
        self._target = gpu.device.create_texture(
            label="probes", size=(_PROBES, 1, 1), format=_FORMAT, usage="RENDER_ATTACHMENT|COPY_SRC"
        )
        self._target_view = self._target.create_view()
        self._staging = gpu.buffer(_PROBES * 8, "MAP_READ|COPY_DST", "probes staging")
        self._sampler = gpu.device.create_sampler(
            address_mode_u="clamp-to-edge",
            address_mode_v="clamp-to-edge",
            address_mode_w="clamp-to-edge",
            mag_filter="linear",
            min_filter="linear",
        )
        self._values = np.zeros(4, np.float32)
        self._values[:2] = size
        gpu.queue.write_buffer(self._probe_frame, 0, np.array([_PROBES, 1, 0, 0], np.float32))
        gpu.queue.write_buffer(self._probe_frame, 12, np.array([1], np.uint32))
        self._shown: _Prepared | None = None
        self._ready: tuple[WeightsLike, _Prepared] | None = None
        self._probe: _Probe | None = None
        self._waiting: WeightsLike | None = None

    @property
    def showing(self) -> bool:
        """Whether weights have been swapped in."""
        return self._shown is not None

    def prepare(self, spec: ModelSpec) -> None:
        """Compile `spec`'s shader and allocate both its sets, unless done before.

        Raises:
            HostError: The device's limits are too small for it.
        """
        if spec in self._prepared:
            return
        limits = self._gpu.device.limits
        if isinstance(spec, GridSpec):
            largest = max(*spec.xy, *spec.xt, *spec.yt)
            if largest > limits["max-texture-dimension-2d"]:
                raise HostError("model.xy", expected="a plane the device can hold", got=largest)
            if max(spec.volume) > limits["max-texture-dimension-3d"]:
                raise HostError(
                    "model.volume", expected="a volume the device can hold", got=spec.volume
                )
        label = f"stand-in {spec.family}"
        module = self._gpu.compile(standin_wgsl(spec), label)
        pipeline = self._gpu.device.create_render_pipeline(
            label=label,
            layout="auto",
            vertex={"module": module, "entry_point": "cover"},
            primitive={"topology": "triangle-list"},
            fragment={
                "module": module,
                "entry_point": "standin",
                "targets": [{"format": _FORMAT}],
            },
        )
        points = self._gpu.bind(pipeline, 1, self._points)
        sets = (self._make_set(spec, pipeline), self._make_set(spec, pipeline))
        self._prepared[spec] = _Prepared(spec, pipeline, points, sets)

    def _make_set(self, spec: ModelSpec, pipeline: Any) -> _Set:
        network = self._gpu.buffer(packed_vectors(spec) * 16, "UNIFORM|STORAGE|COPY_DST", "network")
        textures = []
        if isinstance(spec, GridSpec):
            for name in TEXTURES:
                *outer, rows, columns, _ = spec.tensors()[name].shape
                textures.append(
                    self._gpu.device.create_texture(
                        label=name,
                        size=(columns, rows, outer[0] if outer else 1),
                        dimension="3d" if outer else "2d",
                        format="rgba16float",
                        usage="TEXTURE_BINDING|COPY_DST",
                    )
                )
        shared = [t.create_view() for t in textures]
        if textures:
            shared.append(self._sampler)
        image = self._gpu.bind(pipeline, 0, self._frame, network, *shared)
        probe = self._gpu.bind(pipeline, 0, self._probe_frame, network, *shared)
        return _Set(network, textures, image, probe)

    def upload(self, weights: WeightsLike) -> None:
        """Write `weights` into the back set. `swap` brings them to the front once they pass.

        The first weights of a specification are drawn at their golden probes first, through the
        pipeline itself, and compared with the NumPy evaluator; that takes until a later frame.

        Raises:
            SpecError: A tensor is missing or misshaped.
        """
        if self._probe is not None:
            self._waiting = weights
            return
        self.prepare(weights.spec)
        check_tensors(weights.spec, weights.tensors, finite=False)
        prepared = self._prepared[weights.spec]
        # `front` only counts while this specification is shown; either set will do otherwise.
        back = prepared.sets[1 - prepared.front]
        queue = self._gpu.queue
        queue.write_buffer(back.network, 0, pack_network(weights.spec, weights.tensors))
        for name, texture in zip(TEXTURES, back.textures, strict=False):
            width, height, depth = texture.size
            queue.write_texture(
                {"texture": texture, "mip_level": 0, "origin": (0, 0, 0)},
                np.ascontiguousarray(weights.tensors[name]),
                {"offset": 0, "bytes_per_row": width * 8, "rows_per_image": height},
                (width, height, depth),
            )
        if prepared.verified:
            self._ready = (weights, prepared)
        else:
            self._ready = None
            self._start_probe(weights, prepared, back)

    def _start_probe(self, weights: WeightsLike, prepared: _Prepared, back: _Set) -> None:
        points = np.asarray(weights.probes[0], np.float32).reshape(-1, 3)[:_PROBES]
        if len(points) == 0:
            points = np.random.default_rng(0).uniform(-1, 1, (256, 3)).astype(np.float32)
        expected = Evaluator(weights.spec, weights.tensors)(points)
        padded = np.zeros((_PROBES, 4), np.float32)
        padded[: len(points), :3] = points
        self._gpu.queue.write_buffer(self._points, 0, padded)
        encoder = self._gpu.device.create_command_encoder()
        self._encode(encoder, self._target_view, prepared, back.probe)
        encoder.copy_texture_to_buffer(
            {"texture": self._target, "mip_level": 0, "origin": (0, 0, 0)},
            {"buffer": self._staging, "offset": 0, "bytes_per_row": _PROBES * 8},
            (_PROBES, 1, 1),
        )
        self._gpu.queue.submit([encoder.finish()])
        promise = self._gpu.map_later(self._staging)
        self._probe = _Probe(weights, prepared, promise, expected)

    def swap(self) -> list[tuple[WeightsLike, str]]:
        """At a frame boundary: flip to what has passed. Never waits.

        Returns:
            Weights and why they were rejected, or "" for those that are now drawn.
        """
        results: list[tuple[WeightsLike, str]] = []
        if self._probe is not None and is_done(self._probe.promise):
            probe, self._probe = self._probe, None
            reason = self._judge(probe)
            probe.prepared.verified = not reason
            if reason:
                results.append((probe.weights, reason))
            else:
                self._flip(probe.weights, probe.prepared, results)
            if self._waiting is not None:
                weights, self._waiting = self._waiting, None
                try:
                    self.upload(weights)
                except Exception as error:
                    results.append((weights, str(error)))
        if self._ready is not None:
            weights, prepared = self._ready
            self._ready = None
            self._flip(weights, prepared, results)
        return results

    def _flip(
        self, weights: WeightsLike, prepared: _Prepared, results: list[tuple[WeightsLike, str]]
    ) -> None:
        prepared.front = 1 - prepared.front
        self._shown = prepared
        results.append((weights, ""))

    def _judge(self, probe: _Probe) -> str:
        """Why the drawn probes are wrong, or nothing."""
        try:
            probe.promise.sync_wait()
        except RuntimeError as lost:
            return f"self-test could not be read back: {lost}"
        data = np.frombuffer(self._staging.read_mapped(copy=True), np.float16)
        self._staging.unmap()
        drawn = data.reshape(_PROBES, 4)[: len(probe.expected), :3].astype(np.float32)
        if not np.isfinite(drawn).all():
            return "self-test: the device drew values that are not finite"
        expected = np.copysign(np.log1p(np.abs(probe.expected)), probe.expected)
        got = np.copysign(np.log1p(np.abs(drawn)), drawn)
        error = float(np.abs(got - expected).mean())
        allowed = _RELATIVE * float(np.abs(expected).mean()) + _ABSOLUTE
        if error <= allowed:
            return ""
        what = "zeros" if not drawn.any() else "other colours"
        return (
            f"self-test: the device draws {what} at the golden probes: mean log error {error:.3g},"
            f" expected at most {allowed:.3g}"
        )

    def draw(self, encoder: Any, view: Any, *, t: float, timing: Any = None) -> None:
        """Encode one image at normalised `t` from the front set; needs `showing`."""
        assert self._shown is not None
        self._values[2] = t
        self._gpu.queue.write_buffer(self._frame, 0, self._values)
        prepared = self._shown
        self._encode(encoder, view, prepared, prepared.sets[prepared.front].image, timing)

    def _encode(
        self, encoder: Any, view: Any, prepared: _Prepared, bound: Any, timing: Any = None
    ) -> None:
        extra = {"timestamp_writes": timing} if timing else {}
        attachment = {"view": view, "load_op": "clear", "store_op": "store"}
        work = encoder.begin_render_pass(color_attachments=[attachment], **extra)
        work.set_pipeline(prepared.pipeline)
        work.set_bind_group(0, bound)
        work.set_bind_group(1, prepared.points)
        work.draw(3)
        work.end()

    def forget(self) -> None:
        """Show nothing until the next weights; pipelines stay. A probe in flight is left to end."""
        self._shown = None
        self._ready = None
        self._waiting = None

    def close(self) -> None:
        """Destroy everything. The device must be idle."""
        self.forget()
        self._probe = None
        for prepared in self._prepared.values():
            for side in prepared.sets:
                for resource in (*side.textures, side.network):
                    resource.destroy()
        self._prepared.clear()
        for resource in (self._frame, self._probe_frame, self._points, self._target, self._staging):
            resource.destroy()
