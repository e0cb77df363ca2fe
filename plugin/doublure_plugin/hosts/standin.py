"""The stand-in on the device: pipelines made ahead, weights in two sets, flipped between frames.

Each specification has one pipeline and two sets of resources. New weights are written into the set
that is not drawn from, and `swap` makes it the front one: a frame reads one set and so one version.
Nothing is created or compiled by a reload.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from doublure_bridge.models import GridSpec, ModelSpec

from ..evaluate import Evaluator, check_tensors
from .base import Array, HostError, WeightsLike
from .gpu import Gpu, is_done
from .standin_shader import (
    TEXTURES,
    WEIGHTS_WIDTH,
    WORKGROUP,
    Style,
    pack_network,
    packed_vectors,
    standin_wgsl,
    style_for,
)

__all__ = ["StandIn"]

_PROBE_SIDE = 32
_PROBE_ROW = 256
"""Bytes a row of the probe image: texture copies are aligned to 256."""
_FORMAT = "rgba16float"

# A GPU's linear sampler may keep 8 bits of the texel weight, and the target is float16: together
# under half a percent of the mean log colour where measured (NVIDIA H200; lavapipe: 0.02 %). Zeros,
# swapped axes or channels and stale buffers are off by tens of percent.
_RELATIVE = 0.02
_ABSOLUTE = 1e-3


@dataclass(slots=True)
class _Set:
    """One version's weights on the device."""

    network: Any
    """A buffer, or an rgba32float texture, as the style has it."""
    textures: list[Any]
    probe: Any
    """Bind group for drawing given points; `images` those for drawing, by target."""
    images: dict[Any, Any]


@dataclass(slots=True)
class _Prepared:
    spec: ModelSpec
    style: Style
    pipeline: Any
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


def _frame_values(
    size: tuple[int, int], *, t: float, steps: tuple[float, float] = (0.0, 0.0)
) -> npt.NDArray[np.uint32]:
    """The shader's `Frame` as 32 bytes; `t_step` is aligned to eight."""
    values = np.zeros(8, np.uint32)
    values[:2] = size
    values[2:3].view(np.float32)[0] = t
    values[4:6].view(np.float32)[:] = steps
    return values


class StandIn:
    """Draws models on the device. Owned by its host; one thread.

    Args:
        submit: Submits one encoder and keeps count of it.
        size: (width, height) of the images drawn.
        targets: Views of the rgba16float storage textures that `draw` will be given; borrowed.
    """

    def __init__(
        self,
        gpu: Gpu,
        submit: Callable[[Any], None],
        *,
        size: tuple[int, int],
        targets: list[Any],
    ) -> None:
        self._gpu = gpu
        self._submit = submit
        self._targets = targets
        self._size = size
        self._prepared: dict[ModelSpec, _Prepared] = {}
        self._frame = gpu.buffer(32, "UNIFORM|COPY_DST", "stand-in frame")
        self._probe_frame = gpu.buffer(32, "UNIFORM|COPY_DST", "probe frame")
        self._target = gpu.device.create_texture(
            label="probes",
            size=(_PROBE_SIDE, _PROBE_SIDE, 1),
            format=_FORMAT,
            usage="STORAGE_BINDING|COPY_SRC",
        )
        self._target_view = self._target.create_view()
        self._staging = gpu.buffer(_PROBE_SIDE * _PROBE_ROW, "MAP_READ|COPY_DST", "probes staging")
        self._sampler = gpu.device.create_sampler(
            address_mode_u="clamp-to-edge",
            address_mode_v="clamp-to-edge",
            address_mode_w="clamp-to-edge",
            mag_filter="linear",
            min_filter="linear",
        )
        self._values = _frame_values(size, t=0.0)
        self._t = self._values[2:3].view(np.float32)
        # Over the probe image t runs from -1 to 1, along both axes and unevenly, so that no two
        # of x, y and t could change places unnoticed.
        steps = np.array([0.7, 1.3], np.float32) / np.float32(_PROBE_SIDE - 1)
        probe = _frame_values((_PROBE_SIDE, _PROBE_SIDE), t=-1.0, steps=(steps[0], steps[1]))
        gpu.queue.write_buffer(self._probe_frame, 0, probe)
        row, column = np.mgrid[:_PROBE_SIDE, :_PROBE_SIDE].astype(np.float32)
        x, y = (2.0 * (axis + 0.5) / _PROBE_SIDE - 1.0 for axis in (column, row))
        t = column * steps[0] + row * steps[1] - 1.0
        self._points = np.stack([x, y, t], axis=-1).reshape(-1, 3).astype(np.float32)
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
        style = style_for(spec, software=self._gpu.software)
        module = self._gpu.compile(standin_wgsl(spec, style), label)
        pipeline = self._gpu.device.create_compute_pipeline(
            label=label, layout="auto", compute={"module": module, "entry_point": "standin"}
        )
        sets = (self._make_set(spec, style, pipeline), self._make_set(spec, style, pipeline))
        prepared = _Prepared(spec, style, pipeline, sets)
        self._prepared[spec] = prepared
        # A software device compiles at the first draw, for a second or so: that is now, not then.
        encoder = self._gpu.device.create_command_encoder()
        self._encode(encoder, prepared, sets[0].probe, (_PROBE_SIDE, _PROBE_SIDE))
        self._submit(encoder)

    def _make_set(self, spec: ModelSpec, style: Style, pipeline: Any) -> _Set:
        vectors = packed_vectors(spec)
        if style.texture:
            rows = -(-vectors // WEIGHTS_WIDTH)
            network = self._gpu.device.create_texture(
                label="network",
                size=(WEIGHTS_WIDTH, rows, 1),
                format="rgba32float",
                usage="TEXTURE_BINDING|COPY_DST",
            )
        else:
            network = self._gpu.buffer(vectors * 16, "UNIFORM|STORAGE|COPY_DST", "network")
        textures = []
        if isinstance(spec, GridSpec):
            for name in TEXTURES:
                *outer, rows, columns, _ = spec.tensors()[name].shape
                textures.append(
                    self._gpu.device.create_texture(
                        label=name,
                        size=(columns, rows, outer[0] if outer else 1),
                        dimension="3d" if outer else "2d",
                        format=_FORMAT,
                        usage="TEXTURE_BINDING|COPY_DST",
                    )
                )
        bound = [network.create_view() if style.texture else network]
        bound += [t.create_view() for t in textures]
        if textures:
            bound.append(self._sampler)
        bind = self._gpu.bind
        probe = bind(pipeline, 0, self._probe_frame, self._target_view, *bound)
        images = {view: bind(pipeline, 0, self._frame, view, *bound) for view in self._targets}
        return _Set(network, textures, probe, images)

    def upload(self, weights: WeightsLike) -> None:
        """Write `weights` into the back set. `swap` brings them to the front once they pass.

        The first weights of a specification are drawn small first, through the pipeline itself,
        and compared with the NumPy evaluator; that takes until a later frame. (The golden probes
        that come with weights are the session's: it holds the evaluator against the trainer.)

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
        packed = pack_network(weights.spec, weights.tensors)
        if prepared.style.texture:
            rows = back.network.size[1]
            block = np.zeros((rows * WEIGHTS_WIDTH, 4), np.float32)
            block[: len(packed)] = packed
            self._write(back.network, block)
        else:
            self._gpu.queue.write_buffer(back.network, 0, packed)
        for name, texture in zip(TEXTURES, back.textures, strict=False):
            self._write(texture, weights.tensors[name])
        if prepared.verified:
            self._ready = (weights, prepared)
        else:
            self._ready = None
            self._start_probe(weights, prepared, back)

    def _write(self, texture: Any, data: Array) -> None:
        width, height, depth = texture.size
        bytes_per_row = data.nbytes // (height * depth)
        self._gpu.queue.write_texture(
            {"texture": texture, "mip_level": 0, "origin": (0, 0, 0)},
            np.ascontiguousarray(data),
            {"offset": 0, "bytes_per_row": bytes_per_row, "rows_per_image": height},
            (width, height, depth),
        )

    def _start_probe(self, weights: WeightsLike, prepared: _Prepared, back: _Set) -> None:
        expected = Evaluator(weights.spec, weights.tensors)(self._points)
        encoder = self._gpu.device.create_command_encoder()
        self._encode(encoder, prepared, back.probe, (_PROBE_SIDE, _PROBE_SIDE))
        encoder.copy_texture_to_buffer(
            {"texture": self._target, "mip_level": 0, "origin": (0, 0, 0)},
            {"buffer": self._staging, "offset": 0, "bytes_per_row": _PROBE_ROW},
            (_PROBE_SIDE, _PROBE_SIDE, 1),
        )
        self._submit(encoder)
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
        drawn = data.reshape(-1, 4)[:, :3].astype(np.float32)
        if not np.isfinite(drawn).all():
            return "self-test: the device drew values that are not finite"
        expected = np.copysign(np.log1p(np.abs(probe.expected)), probe.expected)
        got = np.copysign(np.log1p(np.abs(drawn)), drawn)
        error = float(np.abs(got - expected).mean())
        allowed = _RELATIVE * float(np.abs(expected).mean()) + _ABSOLUTE
        if error <= allowed:
            return ""
        what = "other colours" if drawn.any() else "other colours (all zero)"
        return (
            f"self-test: the device draws {what} than the evaluator: mean log error {error:.3g},"
            f" expected at most {allowed:.3g}"
        )

    def draw(self, encoder: Any, view: Any, *, t: float, timing: Any = None) -> None:
        """Encode one image at normalised `t` from the front set into one of `targets`.

        Needs `showing`.
        """
        assert self._shown is not None
        self._t[0] = t
        self._gpu.queue.write_buffer(self._frame, 0, self._values)
        prepared = self._shown
        bound = prepared.sets[prepared.front].images[view]
        self._encode(encoder, prepared, bound, self._size, timing)

    def _encode(
        self,
        encoder: Any,
        prepared: _Prepared,
        bound: Any,
        size: tuple[int, int],
        timing: Any = None,
    ) -> None:
        extra = {"timestamp_writes": timing} if timing else {}
        work = encoder.begin_compute_pass(**extra)
        work.set_pipeline(prepared.pipeline)
        work.set_bind_group(0, bound)
        across = WORKGROUP[0] * prepared.style.pixels
        work.dispatch_workgroups(-(-size[0] // across), -(-size[1] // WORKGROUP[1]))
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
        for resource in (self._frame, self._probe_frame, self._target, self._staging):
            resource.destroy()
