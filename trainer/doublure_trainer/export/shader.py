"""Whole shader files: what it is, the function, and entry points that run as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from doublure_bridge.model_file import ModelFile

from ..models.reference import evaluate
from .body import MAX_UNROLLED_MACS, STORAGES, body, helpers, inlined, symbol
from .dialects import GLSL, HLSL, WGSL, Dialect, number
from .errors import ExportError
from .layout import layout, pack
from .variant import Variant

__all__ = ["CONSTANT_WORDS", "SHADER_TARGETS", "check_points", "constant_words", "shader_text"]

Array: TypeAlias = npt.NDArray[Any]

CONSTANT_WORDS = {"glsl": 4096, "hlsl": 4096, "shadertoy": 4096, "wgsl": 256}
"""Most words of 16 bytes in a constant array, by target.

4096 vectors are what Direct3D's immediate constant buffer holds, which WebGL on Windows compiles to
as well; with twice as many, Mesa's GLSL compiler took over 40 s (2 s at the limit). WGSL tools copy
a constant array to each invocation that indexes it: with naga on lavapipe 256 vectors took 0.7 s,
1,024 took 14 s.
"""

_DIALECTS: dict[str, Dialect] = {"glsl": GLSL, "hlsl": HLSL, "shadertoy": GLSL, "wgsl": WGSL}

SHADER_TARGETS = tuple(_DIALECTS)


def check_points(parameter: tuple[float, float]) -> Array:
    """Where a port is checked: x, y and raw t, float64 [n, 3]; corners and inner points."""
    low, high = parameter
    inner = np.array([[0.1, -0.7, 0.35], [-0.55, 0.2, 0.8], [0.93, 0.61, 0.5]])
    corners = np.array([[-1, -1, 0], [1, 1, 1]], np.float64)
    points = np.concatenate([inner, corners])
    points[:, 2] = low + points[:, 2] * (high - low)
    return points


def normalised(points: Array, parameter: tuple[float, float]) -> Array:
    """Points with raw t to points with t in [-1, 1]."""
    low, high = parameter
    found = np.array(points, np.float64)
    found[:, 2] = np.clip((found[:, 2] - low) / (high - low) * 2.0 - 1.0, -1.0, 1.0)
    return found


def constant_words(variant: Variant) -> int:
    """Words of 16 bytes that the `constants` storage puts into an array."""
    parts = layout(variant, network=not inlined(variant, "constants"))
    return sum(p.words for p in parts)


def shader_text(model: ModelFile, variant: Variant, target: str, storage: str, *, name: str) -> str:
    """A standalone shader file.

    Args:
        target: One of `SHADER_TARGETS`.
        storage: One of `STORAGES`: everything in the text, texels in textures and the network in a
            storage buffer, or everything in one storage buffer.
        name: The function's name; every other name in the text starts with it.
    Raises:
        ExportError: The storage does not suit the target or the family, or is too small.
    """
    _check(variant, target, storage)
    dialect = _DIALECTS[target]
    parts = _Parts(model, variant, target, storage, name)
    lines = _header(parts)
    if target == "glsl":
        lines = ["#version 450", *lines]
    lines += _bindings(parts, dialect)
    if storage == "constants" and constant_words(variant):
        block = pack(variant, network=not inlined(variant, storage))
        lines += [dialect.words(f"{name}_data", block), ""]
    lines += helpers(variant, dialect, storage, name)
    lines += body(variant, dialect, storage, name, model.parameter)
    lines += _ENTRIES[target](parts)
    return "\n".join(lines).rstrip() + "\n"


@dataclass(frozen=True, slots=True)
class _Parts:
    model: ModelFile
    variant: Variant
    target: str
    storage: str
    name: str


def _check(variant: Variant, target: str, storage: str) -> None:
    family = variant.spec.family
    if storage not in STORAGES:
        raise ExportError("--storage", expected=", ".join(STORAGES), got=storage)
    if target == "shadertoy" and storage != "constants":
        raise ExportError(
            f"--to shadertoy --storage {storage}",
            expected="--storage constants",
            got="a place without textures or buffers of one's own",
        )
    if storage == "textures" and not variant.texels:
        raise ExportError(
            f"--storage textures of a {family} model",
            expected="a family with texels",
            next_step="use --storage constants or buffers",
        )
    if storage == "constants" and variant.texels and not inlined(variant, storage):
        raise ExportError(
            f"--storage constants of this {family} model",
            expected=f"a network of at most {MAX_UNROLLED_MACS} multiply-accumulates",
            got=f"{variant.spec.macs}",
            next_step="use --storage textures or buffers"
            if target != "shadertoy"
            else "train a smaller model for Shadertoy",
        )
    words, limit = constant_words(variant), CONSTANT_WORDS[target]
    if storage == "constants" and words > limit:
        other = (
            "train a smaller grid or the compact family for Shadertoy"
            if target == "shadertoy"
            else "use --storage textures or buffers"
        )
        if variant.texels and not variant.texels[0].eight_bit and words // 2 <= limit:
            other = f"use --precision int8, or {other.removeprefix('use ')}"
        raise ExportError(
            f"--storage constants of this {family} model in {target}",
            expected=f"at most {limit * 16:,} bytes in constant arrays",
            got=f"{words * 16:,} at {variant.precision}",
            next_step=other,
        )


# --- what it is ----------------------------------------------------------------------------------


def _header(parts: _Parts) -> list[str]:
    model, variant, name = parts.model, parts.variant, parts.name
    spec = variant.spec
    low, high = model.parameter
    signature = {
        "glsl": f"vec3 {name}(vec2 p, float t)",
        "shadertoy": f"vec3 {name}(vec2 p, float t)",
        "hlsl": f"float3 {name}(float2 p, float t)",
        "wgsl": f"fn {name}(p: vec2f, t: f32) -> vec3f",
    }[parts.target]
    sizes = ", ".join(
        f"{t.name} {'x'.join(str(s) for s in reversed(t.stored.shape[:-1]))}"
        for t in variant.texels
    )
    lines = [
        f"{name}: a learned stand-in for {_plain(model.name)}, exported by doublure.",
        "",
        f"  {signature}",
        "",
        "p is in [-1, 1], x right and y down. t is the source's own parameter, from "
        f"{low:g} to {high:g}; beyond, it is",
        "clamped. The result is linear RGB, not clamped: tone-map it like the source's.",
        "",
        f"Family: {spec.family}, {spec.layers} hidden layers of {spec.hidden}"
        + (f"; {sizes}." if sizes else "."),
        f"Cost: {spec.macs} multiply-accumulates a pixel"
        + (f" and {spec.fetches} filtered fetches." if spec.fetches else "."),
        f"Stored: {variant.precision}, {variant.nbytes:,} bytes, in {parts.storage}.",
    ]
    if model.source_digest:
        lines.append(f"Source: SHA-256 {model.source_digest}")
    for split, figures in model.scores.items():
        if figures:
            text = ", ".join(f"{k} {v:.5g}" for k, v in figures.items())
            lines.append(f"Scores ({split.replace('_', '-')}, before rounding): {text}")
    points = check_points(model.parameter)
    colours = evaluate(spec, variant.tensors(), normalised(points, model.parameter))
    lines += ["", "Check a port by:"]
    for (x, y, t), colour in zip(points, colours, strict=True):
        rgb = ", ".join(f"{c:.6g}" for c in colour)
        lines.append(f"  {name}(({x:g}, {y:g}), {t:.7g}) = ({rgb})")
    if parts.storage != "constants":
        lines += ["", *_loading(parts)]
    return [*(f"// {line}".rstrip() for line in lines), ""]


def _plain(text: str) -> str:
    """One printable line, so that nothing in a name ends the comment."""
    return "".join(c if c.isprintable() and c != "\\" else " " for c in text)


def _loading(parts: _Parts) -> list[str]:
    """How the .bin beside the shader reaches its bindings."""
    found = layout(parts.variant, network=True)
    if parts.storage == "buffers":
        return [f"Load {parts.name}.bin whole into one read-only storage buffer of uint vectors."]
    lines = [
        f"Load {parts.name}.bin: the first {found[0].words * 16} bytes into a read-only storage",
        "buffer of uint vectors, the rest into textures without mipmaps, linear filter, clamp to",
        "edge (on every axis):",
    ]
    for texels, part in zip(parts.variant.texels, found[1:], strict=True):
        kind = "RGBA8 unorm (not sRGB)" if texels.eight_bit else "RGBA16F"
        size = " x ".join(str(s) for s in reversed(texels.stored.shape[:-1]))
        lines.append(
            f"  {symbol(parts.name, texels.name)}: {size}, {kind}, from byte {part.word * 16}"
        )
    return lines


# --- bindings ------------------------------------------------------------------------------------


def _bindings(parts: _Parts, d: Dialect) -> list[str]:
    """Declarations of the block and of the textures: bindings 1 and up; 0 is the entry's frame."""
    name = parts.name
    if parts.storage == "constants":
        return []
    lines = []
    if d.name == "glsl":
        lines.append(
            f"layout(std430, binding = 1) readonly buffer {name}_block {{ uvec4 {name}_data[]; }};"
        )
    elif d.name == "hlsl":
        lines.append(f"StructuredBuffer<uint4> {name}_data : register(t0);")
    else:
        lines.append(f"@group(0) @binding(1) var<storage, read> {name}_data: array<vec4u>;")
    if parts.storage == "textures":
        for i, texels in enumerate(parts.variant.texels):
            what, volume = symbol(name, texels.name), texels.stored.ndim == 4
            if d.name == "glsl":
                kind = "sampler3D" if volume else "sampler2D"
                lines.append(f"layout(binding = {i + 2}) uniform highp {kind} {what};")
            elif d.name == "hlsl":
                kind = "Texture3D" if volume else "Texture2D"
                lines.append(f"{kind}<float4> {what} : register(t{i + 1});")
            else:
                kind = "texture_3d<f32>" if volume else "texture_2d<f32>"
                lines.append(f"@group(0) @binding({i + 2}) var {what}: {kind};")
        if d.name == "hlsl":
            lines.append(f"SamplerState {name}_linear : register(s0);")
        elif d.name == "wgsl":
            last = len(parts.variant.texels) + 2
            lines.append(f"@group(0) @binding({last}) var {name}_linear: sampler;")
    return [*lines, ""]


# --- entry points --------------------------------------------------------------------------------

_RULE = "// ---- Entry points: leave out what follows where you call the function yourself. ----"


def _glsl_entries(parts: _Parts) -> list[str]:
    name = parts.name
    return f"""{_RULE}
// A fragment shader; with DOUBLURE_COMPUTE defined a compute shader, with DOUBLURE_NO_MAIN neither.
// Binding 0 is the frame: its size in pixels and t.
#ifndef DOUBLURE_NO_MAIN
layout(std140, binding = 0) uniform {name}_frame {{ vec2 {name}_size; float {name}_t; }};
#ifdef DOUBLURE_COMPUTE
layout(local_size_x = 8, local_size_y = 8) in;
layout(rgba16f, binding = 6) writeonly uniform highp image2D {name}_image;  // row 0 is the top
void main() {{
    ivec2 pixel = ivec2(gl_GlobalInvocationID.xy);
    if (any(greaterThanEqual(vec2(pixel), {name}_size))) return;
    vec2 p = (2.0 * vec2(pixel) + 1.0) / {name}_size - 1.0;
    imageStore({name}_image, pixel, vec4({name}(p, {name}_t), 1.0));
}}
#else
layout(location = 0) out vec4 {name}_color;
void main() {{
    vec2 p = 2.0 * gl_FragCoord.xy / {name}_size - 1.0;
#ifndef VULKAN
    p.y = -p.y;  // OpenGL counts rows from the bottom
#endif
    {name}_color = vec4({name}(p, {name}_t), 1.0);
}}
#endif
#endif""".splitlines()


def _shadertoy_entries(parts: _Parts) -> list[str]:
    name = parts.name
    low, high = parts.model.parameter
    return f"""{_RULE}
const float {name}_SECONDS = 5.0;  // from one end of t to the other

vec3 {name}_display(vec3 light) {{  // Reinhard, then the sRGB curve
    light = max(light, 0.0) / (1.0 + max(light, 0.0));
    return mix(1.055 * pow(light, vec3(1.0 / 2.4)) - 0.055, 12.92 * light,
               vec3(lessThanEqual(light, vec3(0.0031308))));
}}

void mainImage(out vec4 fragColor, in vec2 fragCoord) {{
    vec2 p = 2.0 * fragCoord / iResolution.xy - 1.0;
    float there_and_back = abs(mod(iTime / {name}_SECONDS + 1.0, 2.0) - 1.0);
    float t = mix({number(low)}, {number(high)}, there_and_back);
    fragColor = vec4({name}_display({name}(vec2(p.x, -p.y), t)), 1.0);
}}""".splitlines()


def _hlsl_entries(parts: _Parts) -> list[str]:
    name = parts.name
    return f"""{_RULE}
cbuffer {name}_frame : register(b0) {{ float2 {name}_size; float {name}_t; }};

float4 {name}_pixel(float4 position : SV_Position) : SV_Target {{
    float2 p = 2.0 * position.xy / {name}_size - 1.0;
    return float4({name}(p, {name}_t), 1.0);
}}

#ifdef DOUBLURE_COMPUTE
RWTexture2D<float4> {name}_image : register(u0);

[numthreads(8, 8, 1)]
void {name}_compute(uint3 id : SV_DispatchThreadID) {{
    if (any(float2(id.xy) >= {name}_size)) return;
    float2 p = (2.0 * float2(id.xy) + 1.0) / {name}_size - 1.0;
    {name}_image[id.xy] = float4({name}(p, {name}_t), 1.0);
}}
#endif""".splitlines()


def _wgsl_entries(parts: _Parts) -> list[str]:
    name = parts.name
    image = 7 if parts.storage == "textures" else 2
    return f"""{_RULE}
struct {name}_Frame {{ size: vec2f, t: f32 }}
@group(0) @binding(0) var<uniform> {name}_frame: {name}_Frame;
@group(0) @binding({image}) var {name}_image: texture_storage_2d<rgba16float, write>;

@compute @workgroup_size(8, 8)
fn {name}_compute(@builtin(global_invocation_id) id: vec3u) {{
    let p = (2.0 * vec2f(id.xy) + 1.0) / {name}_frame.size - 1.0;
    textureStore({name}_image, id.xy, vec4f({name}(p, {name}_frame.t), 1.0));
}}

// Three vertices that cover the screen.
@vertex
fn {name}_vertex(@builtin(vertex_index) i: u32) -> @builtin(position) vec4f {{
    return vec4f(f32(i & 1u) * 4.0 - 1.0, f32(i >> 1u) * 4.0 - 1.0, 0.0, 1.0);
}}

@fragment
fn {name}_fragment(@builtin(position) at: vec4f) -> @location(0) vec4f {{
    let p = 2.0 * at.xy / {name}_frame.size - 1.0;
    return vec4f({name}(p, {name}_frame.t), 1.0);
}}""".splitlines()


_ENTRIES: dict[str, Callable[[_Parts], Sequence[str]]] = {
    "glsl": _glsl_entries,
    "hlsl": _hlsl_entries,
    "shadertoy": _shadertoy_entries,
    "wgsl": _wgsl_entries,
}
