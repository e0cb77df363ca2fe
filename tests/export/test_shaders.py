"""Every shader that can be exported, compiled and drawn, beside the evaluator in float64."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from doublure_bridge.model_file import ModelFile
from doublure_bridge.models import CompactSpec, GridSpec
from doublure_bridge.scores import tonemap
from doublure_trainer.export import ExportError
from doublure_trainer.export.body import MAX_UNROLLED_MACS
from doublure_trainer.export.shader import check_points, normalised, shader_text
from doublure_trainer.export.variant import Variant, make_variant
from doublure_trainer.models.reference import evaluate

from .models import frame, golden_model, largest_error, random_model, raw, trained_model
from .runners import GL, Wgpu, spirv

pytestmark = pytest.mark.gpu

SIZE = 128
TIMES = (-1.0, -0.4, 0.37, 1.0)
NAME = "stand_in"
MAX_ERROR = 5e-5
"""Of float32 against float64, and exp and sin as Mesa's llvmpipe computes them."""
HALF_ERROR = 1e-3
"""Of images stored as float16."""
FILTER_ERROR = 6e-2
"""llvmpipe filters RGBA8 textures in 8-bit arithmetic: a 255th of each channel's range."""
WIDE_ERROR = 5e-3
"""The same levels in float16 textures, to filter them exactly: rounded once more, to 11 bits."""

STORAGES = ("constants", "textures", "buffers")
CASES = [("grid", p, s) for p in ("fp32", "fp16", "int8") for s in STORAGES]
CASES += [("compact", p, s) for p in ("fp32", "fp16") for s in ("constants", "buffers")]


def images_wanted(model: ModelFile, variant: Variant) -> list[np.ndarray]:
    return [frame(model.spec, variant.tensors(), SIZE, t) for t in TIMES]


def frames(model: ModelFile) -> list[bytes]:
    """The entry points' uniform block at each of `TIMES`: width, height, raw t."""
    return [struct.pack("<ffff", SIZE, SIZE, raw(model, t), 0.0) for t in TIMES]


def check(got: list[np.ndarray], wanted: list[np.ndarray], *, limit: float = MAX_ERROR) -> None:
    assert len(got) == len(wanted)
    for image, true in zip(got, wanted, strict=True):
        assert largest_error(image[..., :3], true) < limit
        assert (image[..., 3] == 1.0).all()


@pytest.mark.parametrize(("family", "precision", "storage"), CASES)
def test_glsl(gl: GL, tmp_path: Path, family: str, precision: str, storage: str) -> None:
    model = golden_model(family)
    variant = make_variant(model.spec, model.tensors, precision)
    text = shader_text(model, variant, "glsl", storage, name=NAME)
    spirv(text, tmp_path, stage="frag")
    spirv(text, tmp_path, stage="comp", defines=("DOUBLURE_COMPUTE",))
    bound = None if storage == "constants" else variant
    wanted = images_wanted(model, variant)
    drawn = gl.fragment(text, SIZE, variant=bound, wide=True, frames=frames(model))
    check(drawn, wanted)
    image = gl.compute(text, SIZE, variant=bound, frame=frames(model)[1])
    narrow = precision == "int8" and storage == "textures"
    check([image], wanted[1:2], limit=FILTER_ERROR if narrow else HALF_ERROR)


@pytest.mark.parametrize(("family", "precision", "storage"), CASES)
def test_wgsl(family: str, precision: str, storage: str) -> None:
    model = golden_model(family)
    variant = make_variant(model.spec, model.tensors, precision)
    text = shader_text(model, variant, "wgsl", storage, name=NAME)
    bound = None if storage == "constants" else variant
    wanted = images_wanted(model, variant)
    wide = Wgpu(SIZE, bound, storage, wide=True)
    narrow = precision == "int8" and storage == "textures"
    drawn = wide.fragment(text, f"{NAME}_fragment", frames(model))
    check(drawn, wanted, limit=WIDE_ERROR if narrow else MAX_ERROR)
    image = Wgpu(SIZE, bound, storage).compute(
        text, f"{NAME}_compute", frames(model)[1], image=7 if storage == "textures" else 2
    )
    check([image], wanted[1:2], limit=FILTER_ERROR if narrow else HALF_ERROR)


@pytest.mark.parametrize(("family", "precision", "storage"), CASES)
def test_hlsl(tmp_path: Path, family: str, precision: str, storage: str) -> None:
    model = golden_model(family)
    variant = make_variant(model.spec, model.tensors, precision)
    text = shader_text(model, variant, "hlsl", storage, name=NAME)
    pixel = spirv(text, tmp_path, stage="frag", hlsl_entry=f"{NAME}_pixel")
    compute = spirv(
        text,
        tmp_path,
        stage="comp",
        hlsl_entry=f"{NAME}_compute",
        defines=("DOUBLURE_COMPUTE",),
    )
    if (family, storage) == ("grid", "constants"):
        return  # drawn below, with fewer texels
    bound = None if storage == "constants" else variant
    wanted = images_wanted(model, variant)
    narrow = precision == "int8" and storage == "textures"
    gpu = Wgpu(SIZE, bound, storage, wide=True)
    limit = WIDE_ERROR if narrow else MAX_ERROR
    check(gpu.fragment(pixel, f"{NAME}_pixel", frames(model)), wanted, limit=limit)
    if "texture-adapter-specific-format-features" in gpu.gpu.features:
        image = gpu.compute(
            compute,
            f"{NAME}_compute",
            frames(model)[1],
            image=7,
            image_format="rgba32float",
        )
        check([image], wanted[1:2], limit=limit)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_hlsl_texels_in_constants(tmp_path: Path, precision: str) -> None:
    """The HLSL compiler at hand copies the array for each fetch: lavapipe bears few texels."""
    spec = GridSpec(xy=(2, 3), xt=(1, 2), yt=(2, 1), volume=(2, 1, 2), hidden=5)
    model = random_model(spec, scale=0.7)
    variant = make_variant(spec, model.tensors, precision)
    text = shader_text(model, variant, "hlsl", "constants", name=NAME)
    pixel = spirv(text, tmp_path, stage="frag", hlsl_entry=f"{NAME}_pixel")
    drawn = Wgpu(SIZE, None, "constants").fragment(pixel, f"{NAME}_pixel", frames(model))
    check(drawn, images_wanted(model, variant))


SHADERTOY = """#version 300 es
precision highp float;
precision highp int;
uniform vec3 iResolution;
uniform float iTime;
out vec4 shown;
{text}
void main() {{ {call} }}
"""


@pytest.mark.parametrize(("family", "precision"), [(f, p) for f, p, s in CASES if s == "constants"])
def test_shadertoy(gl: GL, family: str, precision: str) -> None:
    model = golden_model(family)
    variant = make_variant(model.spec, model.tensors, precision)
    text = shader_text(model, variant, "shadertoy", "constants", name=NAME)
    assert "#version" not in text
    wanted = images_wanted(model, variant)
    # As the site does it: iTime in seconds, five from one end of t to the other, and back.
    page = SHADERTOY.format(text=text, call="mainImage(shown, gl_FragCoord.xy);")
    for seconds in ([(t + 1) / 2 * 5 for t in TIMES], [10 - (t + 1) / 2 * 5 for t in TIMES]):
        uniforms = [{"iResolution": (SIZE, SIZE, 1), "iTime": s} for s in seconds]
        for image, true in zip(gl.fragment(page, SIZE, uniforms=uniforms), wanted, strict=True):
            # The curve's slope in the dark is 12.92: this is the display's error.
            assert np.abs(image[..., :3] - tonemap(true)).max() < 10 * MAX_ERROR


@pytest.mark.parametrize(
    "spec",
    [
        CompactSpec(hidden=48, layers=3),
        GridSpec(xy=(4, 5), xt=(3, 4), yt=(4, 3), volume=(2, 3, 4), hidden=50, layers=3),
    ],
    ids=["compact", "grid"],
)
def test_large_networks_are_loops(gl: GL, spec: CompactSpec | GridSpec) -> None:
    assert spec.macs > MAX_UNROLLED_MACS
    model = random_model(spec, scale=0.2)
    variant = make_variant(spec, model.tensors, "fp16")
    wanted = images_wanted(model, variant)
    if isinstance(spec, CompactSpec):
        text = shader_text(model, variant, "glsl", "constants", name=NAME)
        assert "for (int" in text
        check(gl.fragment(text, SIZE, frames=frames(model)), wanted)
    else:  # Mesa's GLSL compiler takes minutes
        with pytest.raises(ExportError, match=r"at most 4096 multiply-accumulates, got 61"):
            shader_text(model, variant, "glsl", "constants", name=NAME)
    text = shader_text(model, variant, "wgsl", "buffers", name=NAME)
    drawn = Wgpu(SIZE, variant, "buffers").fragment(text, f"{NAME}_fragment", frames(model))
    check(drawn, wanted)


@pytest.mark.parametrize(
    "spec",
    [
        GridSpec(xy=(1, 3), xt=(2, 1), yt=(1, 1), volume=(1, 2, 1), hidden=6, layers=1),
        CompactSpec(hidden=5, layers=1),
    ],
    ids=["grid", "compact"],
)
def test_smallest_models(gl: GL, spec: CompactSpec | GridSpec) -> None:
    model = random_model(spec)
    variant = make_variant(spec, model.tensors, "fp32")
    wanted = images_wanted(model, variant)
    text = shader_text(model, variant, "glsl", "constants", name=NAME)
    check(gl.fragment(text, SIZE, frames=frames(model)), wanted)
    text = shader_text(model, variant, "wgsl", "constants", name=NAME)
    drawn = Wgpu(SIZE, None, "constants").fragment(text, f"{NAME}_fragment", frames(model))
    check(drawn, wanted)


def test_beyond_its_range_t_is_clamped(gl: GL) -> None:
    model = golden_model("compact")
    variant = make_variant(model.spec, model.tensors, "fp32")
    text = shader_text(model, variant, "glsl", "constants", name=NAME)
    ends = [model.parameter[1] + 5.0, model.parameter[1]]
    blocks = [struct.pack("<ffff", SIZE, SIZE, t, 0.0) for t in ends]
    first, second = gl.fragment(text, SIZE, frames=blocks)
    assert (first == second).all()


def test_two_exports_fit_into_one_shader(gl: GL) -> None:
    """Names do not collide: the sum of two stand-ins, as a blend would draw them."""
    texts, wanted = [], np.zeros((SIZE, SIZE, 3))
    for name, family in (("first", "grid"), ("second", "compact")):
        model = golden_model(family)
        variant = make_variant(model.spec, model.tensors, "fp16")
        text = shader_text(model, variant, "shadertoy", "constants", name=name)
        texts.append(text.split("// ---- Entry points")[0])
        wanted += frame(model.spec, variant.tensors(), SIZE, 0.25)
    call = (
        "vec2 p = 2.0 * gl_FragCoord.xy / iResolution.xy - 1.0; p.y = -p.y;"
        "shown = vec4(first(p, iTime) + second(p, iTime), 1.0);"
    )
    page = SHADERTOY.format(text="\n".join(texts), call=call)
    t = raw(golden_model("grid"), 0.25)
    drawn = gl.fragment(page, SIZE, uniforms=[{"iResolution": (SIZE, SIZE, 1), "iTime": t}])
    check(drawn, [wanted])


@pytest.mark.parametrize("family", ["grid", "compact"])
def test_a_learned_model_in_half_precision(gl: GL, family: str) -> None:
    """Against the weights as learned: all that rounding and the shader lose together."""
    model = trained_model("sun", family)
    variant = make_variant(model.spec, model.tensors, "fp16")
    storage = "textures" if family == "grid" else "constants"
    text = shader_text(model, variant, "glsl", storage, name=NAME)
    bound = variant if family == "grid" else None
    wanted = [frame(model.spec, model.tensors, SIZE, t) for t in TIMES]
    check(gl.fragment(text, SIZE, variant=bound, frames=frames(model)), wanted, limit=2e-3)


def test_the_comment_says_what_a_port_must_give() -> None:
    model = golden_model("grid")
    variant = make_variant(model.spec, model.tensors, "int8")
    text = shader_text(model, variant, "hlsl", "textures", name=NAME)
    for part in (
        "golden grid", "float3 stand_in(float2 p, float t)", "from 0.5 to 3", "ab" * 32,
        "psnr_db 40.25", f"{model.spec.macs} multiply-accumulates", "4 filtered fetches",
        "RGBA8 unorm", "int8",
    ):  # fmt: skip
        assert part in text, part
    points = check_points(model.parameter)
    colours = evaluate(model.spec, variant.tensors(), normalised(points, model.parameter))
    assert all(f"{c:.6g}" in text for c in colours.ravel())


def test_a_name_cannot_leave_its_comment() -> None:
    model = random_model(CompactSpec(hidden=4, layers=1))
    bad = ModelFile(spec=model.spec, tensors=model.tensors, name="a\\\nb", parameter=(0.0, 1.0))
    variant = make_variant(bad.spec, bad.tensors, "fp32")
    text = shader_text(bad, variant, "glsl", "constants", name=NAME)
    assert "\\" not in text
    assert "for a  b, exported" in text
