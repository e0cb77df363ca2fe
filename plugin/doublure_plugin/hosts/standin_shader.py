"""The stand-in as a fixed shader: WGSL for a specification, and its weights as one block.

The text depends on the specification and the kind of device alone. Weights are 4 x 4 blocks: for
every four outputs the bias, then one matrix for every four inputs. A layer is a sum of
matrix-vector products, written out.

Two kinds of device want two styles of the same arithmetic. A GPU reads a uniform block with
constant indices for free. A software rasteriser compiles every scalar of such a block into a
bounds-checked branch (lavapipe, Mesa 22.3: 9 s for the compact model, 1.1 s for the grid one), so
there the block is a texture, and one invocation evaluates four pixels for each weight it loads:
measured together at 512 x 512, 0.2 s to compile and a third of the time a frame. Nor does any
branch depend on a uniform: lavapipe compiles the shader again whenever such a uniform changes.

The self-test draws through the same pipeline: `t_step` lets one image cover all of x, y and t.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from doublure_bridge.models import LOG_LIMIT, GridSpec, ModelSpec

__all__ = [
    "GPU_STYLE",
    "MAX_UNROLLED_MACS",
    "SOFTWARE_STYLE",
    "TEXTURES",
    "WEIGHTS_WIDTH",
    "WORKGROUP",
    "Style",
    "pack_network",
    "packed_vectors",
    "standin_wgsl",
    "style_for",
]

Array: TypeAlias = npt.NDArray[Any]

TEXTURES = ("plane.xy", "plane.xt", "plane.yt", "volume")
"""Feature textures of a grid model, at bindings 3 and up in this order; the sampler follows."""

MAX_UNROLLED_MACS = 4096
"""Larger networks are loops over private arrays: slower a pixel, but they compile in time."""

WEIGHTS_WIDTH = 256
"""Texels a row where the weights are a texture."""

WORKGROUP = (8, 8)

_UNIFORM_LIMIT = 65536 // 16


@dataclass(frozen=True, slots=True)
class Style:
    """How the shader is written for a kind of device.

    Attributes:
        pixels: Pixels side by side that one invocation evaluates.
        texture: Whether the weights are an rgba32float texture instead of a buffer.
    """

    pixels: int
    texture: bool


GPU_STYLE = Style(pixels=1, texture=False)
SOFTWARE_STYLE = Style(pixels=4, texture=True)


def style_for(spec: ModelSpec, *, software: bool) -> Style:
    """The style that suits the device; loops are written for one pixel and a buffer only."""
    return SOFTWARE_STYLE if software and spec.macs <= MAX_UNROLLED_MACS else GPU_STYLE


_HEAD = """
struct Frame { size: vec2u, t: f32, t_step: vec2f }
@group(0) @binding(0) var<uniform> frame: Frame;
@group(0) @binding(1) var image: texture_storage_2d<rgba16float, write>;

fn position(pixel: vec2u) -> vec3f {
    let at = vec2f(pixel);
    return vec3f(2.0 * (at + 0.5) / vec2f(frame.size) - 1.0, frame.t + dot(frame.t_step, at));
}

// Pixels beyond the image need no test: WGSL drops stores that are out of bounds.
fn store_color(pixel: vec2u, o: vec3f) {
    let limited = min(abs(o), vec3f(LOG_LIMIT));
    textureStore(image, pixel, vec4f(sign(o) * (exp(limited) - 1.0), 1.0));
}
"""


def _quads(count: int) -> int:
    return (count + 3) // 4


def _widths(spec: ModelSpec) -> list[int]:
    return [spec.inputs, *([spec.hidden] * spec.layers), 3]


def packed_vectors(spec: ModelSpec) -> int:
    """Length of the block in vec4f."""
    return sum(_quads(b) * (1 + 4 * _quads(a)) for a, b in pairwise(_widths(spec)))


def pack_network(spec: ModelSpec, tensors: Mapping[str, Array]) -> Array:
    """The weights as the shader reads them, float32 [packed_vectors, 4]; padding is zero."""
    parts = []
    for i, (fan_in, fan_out) in enumerate(pairwise(_widths(spec))):
        rows, columns = _quads(fan_out), _quads(fan_in)
        weight = np.zeros((rows * 4, columns * 4), np.float32)
        weight[:fan_out, :fan_in] = tensors[f"mlp.{i}.weight"]
        bias = np.zeros((rows, 1, 4), np.float32)
        bias.reshape(-1)[:fan_out] = tensors[f"mlp.{i}.bias"]
        # WGSL matrices are columns: block [row, column] is stored as its four input columns.
        blocks = weight.reshape(rows, 4, columns, 4).transpose(0, 2, 3, 1)
        parts.append(np.concatenate([bias, blocks.reshape(rows, columns * 4, 4)], axis=1))
    return np.concatenate([p.reshape(-1, 4) for p in parts])


def standin_wgsl(spec: ModelSpec, style: Style) -> str:
    """The whole shader module for `spec`: a compute entry point `standin`."""
    vectors = packed_vectors(spec)
    text = [f"const LOG_LIMIT = {LOG_LIMIT:.1f};", _HEAD]
    if style.texture:
        text.append("@group(0) @binding(2) var w: texture_2d<f32>;")
    else:
        space = "uniform" if vectors <= _UNIFORM_LIMIT else "storage, read"
        text.append(f"@group(0) @binding(2) var<{space}> w: array<vec4f, {vectors}>;")
    if isinstance(spec, GridSpec):
        for i, name in enumerate(TEXTURES):
            kind = "texture_3d<f32>" if name == "volume" else "texture_2d<f32>"
            text.append(f"@group(0) @binding({i + 3}) var {name.replace('.', '_')}: {kind};")
        text.append(f"@group(0) @binding({len(TEXTURES) + 3}) var linear: sampler;")
    unrolled = spec.macs <= MAX_UNROLLED_MACS
    text.append(_main_unrolled(spec, style) if unrolled else _main_looped(spec))
    return "\n".join(text)


def _main(body: list[str], pixels: int) -> str:
    head = [
        f"@compute @workgroup_size({WORKGROUP[0]}, {WORKGROUP[1]})",
        "fn standin(@builtin(global_invocation_id) id: vec3u) {",
    ]
    for k in range(pixels):
        head += [
            f"    let pixel{k} = vec2u(id.x * {pixels}u + {k}u, id.y);",
            f"    let p{k} = position(pixel{k});",
            f"    let u{k} = p{k} * 0.5 + 0.5;",
        ]
    return "\n".join([*head, *body, "}"])


def _inputs(spec: ModelSpec, k: int) -> list[str]:
    """WGSL for the network's inputs in fours, of the invocation's pixel `k`."""
    if isinstance(spec, GridSpec):
        return [
            f"textureSampleLevel(plane_xy, linear, u{k}.xy, 0.0)",
            f"textureSampleLevel(plane_xt, linear, u{k}.xz, 0.0)",
            f"textureSampleLevel(plane_yt, linear, u{k}.yz, 0.0)",
            f"textureSampleLevel(volume, linear, u{k}, 0.0)",
            f"vec4f(p{k}, 0.0)",
        ]
    return [f"vec4f(p{k}, 0.0)"]


def _activate(spec: ModelSpec, value: str) -> str:
    return f"max({value}, vec4f(0.0))" if isinstance(spec, GridSpec) else f"sin({value})"


def _constant_load(index: int, style: Style) -> str:
    if not style.texture:
        return f"w[{index}]"
    return f"textureLoad(w, vec2u({index % WEIGHTS_WIDTH}u, {index // WEIGHTS_WIDTH}u), 0)"


def _main_unrolled(spec: ModelSpec, style: Style) -> str:
    ks = range(style.pixels)
    lines = [f"    let h{k}_0_{i} = {v};" for k in ks for i, v in enumerate(_inputs(spec, k))]
    at = 0
    for layer, (fan_in, fan_out) in enumerate(pairwise(_widths(spec))):
        for row in range(_quads(fan_out)):
            name = f"{layer + 1}_{row}"
            lines.append(f"    let b{name} = {_constant_load(at, style)};")
            lines += [f"    var s{k}_{name} = b{name};" for k in ks]
            for column in range(_quads(fan_in)):
                first = at + 1 + 4 * column
                block = ", ".join(_constant_load(first + j, style) for j in range(4))
                lines.append(f"    let m{name}_{column} = mat4x4f({block});")
                lines += [
                    f"    s{k}_{name} += m{name}_{column} * h{k}_{layer}_{column};" for k in ks
                ]
            at += 1 + 4 * _quads(fan_in)
            for k in ks:
                total = f"s{k}_{name}"
                value = total if layer == spec.layers else _activate(spec, total)
                lines.append(f"    let h{k}_{name} = {value};")
    lines += [f"    store_color(pixel{k}, h{k}_{spec.layers + 1}_0.xyz);" for k in ks]
    return _main(lines, style.pixels)


def _main_looped(spec: ModelSpec) -> str:
    """One pixel, weights in a buffer (`GPU_STYLE`)."""
    size = max(_quads(n) for n in _widths(spec))
    lines = [
        f"    var a: array<vec4f, {size}>;",
        f"    var b: array<vec4f, {size}>;",
        "    var at = 0u;",
    ]
    lines += [f"    a[{i}] = {v};" for i, v in enumerate(_inputs(spec, 0))]
    for layer, (fan_in, fan_out) in enumerate(pairwise(_widths(spec))):
        value = "sum" if layer == spec.layers else _activate(spec, "sum")
        lines += [
            f"    for (var row = 0u; row < {_quads(fan_out)}u; row++) {{",
            "        var sum = w[at];",
            "        at += 1u;",
            f"        for (var column = 0u; column < {_quads(fan_in)}u; column++) {{",
            "            sum += mat4x4f(w[at], w[at + 1u], w[at + 2u], w[at + 3u]) * a[column];",
            "            at += 4u;",
            "        }",
            f"        b[row] = {value};",
            "    }",
            "    a = b;",
        ]
    return _main([*lines, "    store_color(pixel0, a[0].xyz);"], 1)
