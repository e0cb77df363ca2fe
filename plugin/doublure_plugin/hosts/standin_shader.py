"""The stand-in as a fixed shader: WGSL for a specification, and its weights as one block.

The text depends on the specification alone. Weights sit in a uniform block (loads with a constant
index are then one scalar load for all pixels, on a GPU as in a software rasteriser), as 4 x 4
blocks: for every four outputs the bias, then one matrix for every four inputs. A layer is a sum
of matrix-vector products, written out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from doublure_bridge.models import LOG_LIMIT, GridSpec, ModelSpec

__all__ = ["MAX_UNROLLED_MACS", "TEXTURES", "pack_network", "packed_vectors", "standin_wgsl"]

Array: TypeAlias = npt.NDArray[Any]

TEXTURES = ("plane.xy", "plane.xt", "plane.yt", "volume")
"""Feature textures of a grid model, at bindings 2 and up in this order; the sampler follows."""

MAX_UNROLLED_MACS = 16384
"""Larger networks are loops over private arrays: slower a pixel, but they compile in time."""

_UNIFORM_LIMIT = 65536 // 16

_FRAME = """
struct Frame { size: vec2f, t: f32, points: u32 }
@group(0) @binding(0) var<uniform> frame: Frame;
"""

_MAIN = """
@group(1) @binding(0) var<storage, read> points: array<vec4f>;

@vertex
fn cover(@builtin(vertex_index) i: u32) -> @builtin(position) vec4f {
    return vec4f(f32(i32(i & 1u) * 4 - 1), f32(i32(i >> 1u) * 4 - 1), 0.0, 1.0);
}

// One pipeline draws images and, for the self-test, given points: what was tested is what is shown.
@fragment
fn standin(@builtin(position) position: vec4f) -> @location(0) vec4f {
    var p = vec3f(2.0 * position.xy / frame.size - 1.0, frame.t);
    if (frame.points != 0u) { p = points[u32(position.x)].xyz; }
    let o = network(p);
    let limited = min(abs(o), vec3f(LOG_LIMIT));
    return vec4f(sign(o) * (exp(limited) - 1.0), 1.0);
}
"""


def _quads(count: int) -> int:
    return (count + 3) // 4


def _widths(spec: ModelSpec) -> list[int]:
    return [spec.inputs, *([spec.hidden] * spec.layers), 3]


def packed_vectors(spec: ModelSpec) -> int:
    """Length of the block in vec4f."""
    widths = _widths(spec)
    return sum(_quads(b) * (1 + 4 * _quads(a)) for a, b in itertools.pairwise(widths))


def pack_network(spec: ModelSpec, tensors: Mapping[str, Array]) -> Array:
    """The weights as the shader reads them, float32 [packed_vectors, 4]; padding is zero."""
    widths = _widths(spec)
    parts = []
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        rows, columns = _quads(fan_out), _quads(fan_in)
        weight = np.zeros((rows * 4, columns * 4), np.float32)
        weight[:fan_out, :fan_in] = tensors[f"mlp.{i}.weight"]
        bias = np.zeros((rows, 1, 4), np.float32)
        bias.reshape(-1)[:fan_out] = tensors[f"mlp.{i}.bias"]
        # WGSL matrices are columns: block [row, column] is stored as its four input columns.
        blocks = weight.reshape(rows, 4, columns, 4).transpose(0, 2, 3, 1)
        parts.append(np.concatenate([bias, blocks.reshape(rows, columns * 4, 4)], axis=1))
    return np.concatenate([p.reshape(-1, 4) for p in parts])


def standin_wgsl(spec: ModelSpec) -> str:
    """The whole shader module for `spec`: entry points `cover` and `standin`."""
    vectors = packed_vectors(spec)
    space = "uniform" if vectors <= _UNIFORM_LIMIT else "storage, read"
    text = [
        f"const LOG_LIMIT = {LOG_LIMIT:.1f};",
        _FRAME,
        f"@group(0) @binding(1) var<{space}> w: array<vec4f, {vectors}>;",
    ]
    if isinstance(spec, GridSpec):
        for i, name in enumerate(TEXTURES):
            kind = "texture_3d<f32>" if name == "volume" else "texture_2d<f32>"
            text.append(f"@group(0) @binding({i + 2}) var {name.replace('.', '_')}: {kind};")
        text.append(f"@group(0) @binding({len(TEXTURES) + 2}) var linear: sampler;")
    unrolled = spec.macs <= MAX_UNROLLED_MACS
    text.append(_network_unrolled(spec) if unrolled else _network_looped(spec))
    text.append(_MAIN)
    return "\n".join(text)


def _input_vectors(spec: ModelSpec) -> list[str]:
    """WGSL for the network's inputs in fours."""
    if isinstance(spec, GridSpec):
        return [
            "textureSampleLevel(plane_xy, linear, u.xy, 0.0)",
            "textureSampleLevel(plane_xt, linear, u.xz, 0.0)",
            "textureSampleLevel(plane_yt, linear, u.yz, 0.0)",
            "textureSampleLevel(volume, linear, u, 0.0)",
            "vec4f(p, 0.0)",
        ]
    return ["vec4f(p, 0.0)"]


def _activate(spec: ModelSpec, value: str) -> str:
    return f"max({value}, vec4f(0.0))" if isinstance(spec, GridSpec) else f"sin({value})"


def _network_unrolled(spec: ModelSpec) -> str:
    lines = ["fn network(p: vec3f) -> vec3f {", "    let u = p * 0.5 + 0.5;"]
    lines += [f"    let h0_{i} = {v};" for i, v in enumerate(_input_vectors(spec))]
    widths = _widths(spec)
    at = 0
    for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        last = layer == spec.layers
        for row in range(_quads(fan_out)):
            terms = [f"w[{at}]"]
            at += 1
            for column in range(_quads(fan_in)):
                block = ", ".join(f"w[{at + k}]" for k in range(4))
                terms.append(f"mat4x4f({block}) * h{layer}_{column}")
                at += 4
            total = " + ".join(terms)
            value = total if last else _activate(spec, total)
            lines.append(f"    let h{layer + 1}_{row} = {value};")
    lines += [f"    return h{spec.layers + 1}_0.xyz;", "}"]
    return "\n".join(lines)


def _network_looped(spec: ModelSpec) -> str:
    widths = _widths(spec)
    size = max(_quads(n) for n in widths)
    lines = [
        "fn network(p: vec3f) -> vec3f {",
        "    let u = p * 0.5 + 0.5;",
        f"    var a: array<vec4f, {size}>;",
        f"    var b: array<vec4f, {size}>;",
        "    var at = 0u;",
    ]
    lines += [f"    a[{i}] = {v};" for i, v in enumerate(_input_vectors(spec))]
    for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
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
    lines += ["    return a[0].xyz;", "}"]
    return "\n".join(lines)
