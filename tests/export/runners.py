"""Drawing exported shaders without a window: OpenGL through EGL, and wgpu."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doublure_trainer.export.layout import layout, pack
from doublure_trainer.export.variant import Variant
from numpy.typing import NDArray

Array = NDArray[Any]

_VERTEX = """{version}
void main() {{ gl_Position = vec4(float(gl_VertexID & 1) * 4.0 - 1.0,
                                 float(gl_VertexID >> 1) * 4.0 - 1.0, 0.0, 1.0); }}
"""


def tool(name: str) -> str:
    """Path of a command of glslang-tools or spirv-tools; skips where it is missing."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: glslang-tools, spirv-tools)")
    return found


def spirv(
    text: str, folder: Path, *, stage: str, hlsl_entry: str = "", defines: tuple[str, ...] = ()
) -> bytes:
    """Compile GLSL, or HLSL where an entry is named, to SPIR-V that spirv-val accepts."""
    suffix = "hlsl" if hlsl_entry else stage
    source, out = folder / f"shader.{suffix}", folder / f"{stage}.spv"
    source.write_text(text)
    command = [tool("glslangValidator"), "-V", "-S", stage, *(f"-D{d}" for d in defines)]
    if hlsl_entry:
        command += ["-D", "-e", hlsl_entry, "--auto-map-bindings"]
        # register() counts each kind from 0: b0 -> 0, t0 -> 1 and up, s0 -> 6, u0 -> 7.
        command += ["--stb", stage, "1", "--sbb", stage, "1", "--suavb", stage, "7"]
        command += ["--sib", stage, "7", "--ssb", stage, "6", "--scb", stage, "0"]
    done = subprocess.run(
        [*command, "-o", str(out), str(source)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checked = subprocess.run([tool("spirv-val"), str(out)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    return out.read_bytes()


class GL:
    """OpenGL 4.5 without a window; owns its context."""

    def __init__(self) -> None:
        moderngl = pytest.importorskip("moderngl")
        try:
            self.context = moderngl.create_context(standalone=True, backend="egl", require=450)
        except Exception as error:
            pytest.skip(f"no OpenGL 4.5 through EGL: {error}")

    def close(self) -> None:
        self._current().release()

    def _current(self) -> Any:
        """The context, made current again: wgpu looks for adapters through EGL as well."""
        self.context.__enter__()
        return self.context

    def fragment(
        self,
        text: str,
        size: int,
        *,
        variant: Variant | None = None,
        wide: bool = False,
        frames: Sequence[bytes] = (),
        uniforms: Sequence[Mapping[str, Any]] = (),
    ) -> list[Array]:
        """Images, float32 [size, size, 4], row 0 at the top, one for each of frames or uniforms.

        Args:
            variant: Whose block and textures to bind at 1 and up; None for constants.
            wide: Bind texels of 8 bits as float32 textures.
            frames: Contents of the uniform block at 0.
            uniforms: Values of plain uniforms.
        """
        import moderngl

        context = self._current()
        # Vertex and fragment shader must be of one language: Shadertoy's is GLSL ES 3.00.
        vertex = _VERTEX.format(version=text.splitlines()[0])
        program = context.program(vertex_shader=vertex, fragment_shader=text)
        held = self._bind(variant, wide)
        target = context.texture((size, size), 4, dtype="f4")
        framebuffer = context.framebuffer([target])
        framebuffer.use()
        array = context.vertex_array(program, [])
        images = []
        for values in uniforms or frames:
            if isinstance(values, bytes):
                held.append(context.buffer(values))
                held[-1].bind_to_uniform_block(0)
            else:
                for key, value in values.items():
                    program[key].value = value
            array.render(moderngl.TRIANGLES, 3)
            pixels = np.frombuffer(framebuffer.read(components=4, dtype="f4"), np.float32)
            images.append(pixels.reshape(size, size, 4)[::-1].copy())
        for thing in (*held, array, framebuffer, target, program):
            thing.release()
        return images

    def compute(self, text: str, size: int, *, variant: Variant | None, frame: bytes) -> Array:
        """The image that a compute variant writes, float32 [size, size, 4], row 0 first."""
        context = self._current()
        program = context.compute_shader(
            text.replace("#version 450", "#version 450\n#define DOUBLURE_COMPUTE", 1)
        )
        held = [*self._bind(variant, False), context.buffer(frame)]
        held[-1].bind_to_uniform_block(0)
        target = context.texture((size, size), 4, dtype="f2")
        target.bind_to_image(6, read=False, write=True)
        program.run((size + 7) // 8, (size + 7) // 8)
        context.finish()
        pixels = np.frombuffer(target.read(), np.float16).astype(np.float32)
        for thing in (*held, target, program):
            thing.release()
        return pixels.reshape(size, size, 4)

    def _bind(self, variant: Variant | None, wide: bool) -> list[Any]:
        import moderngl

        held: list[Any] = []
        if variant is None:
            return held
        block = self.context.buffer(pack(variant, network=True).tobytes())
        block.bind_to_storage_buffer(1)
        held.append(block)
        for i, texels in enumerate(variant.texels):
            size = tuple(reversed(texels.stored.shape[:-1]))
            kind, data = ("f1" if texels.eight_bit else "f2"), texels.stored
            if texels.eight_bit and wide:
                kind, data = "f4", data.astype(np.float32) / np.float32(255.0)
            make = self.context.texture if len(size) == 2 else self.context.texture3d
            texture = make(size, 4, data.tobytes(), dtype=kind, alignment=1)
            texture.filter = (moderngl.LINEAR, moderngl.LINEAR)
            texture.repeat_x = texture.repeat_y = False
            if len(size) == 3:
                texture.repeat_z = False
            texture.use(i + 2)
            held.append(texture)
        return held


@cache
def device() -> Any:
    """A wgpu device; skips where there is no adapter."""
    wgpu = pytest.importorskip("wgpu")
    try:
        adapter = wgpu.gpu.request_adapter_sync(power_preference="low-power")
    except RuntimeError as error:
        pytest.skip(f"no wgpu adapter: {error}")
    # HLSL's RWTexture2D can be read as well: wgpu wants this feature for it.
    extra = {"texture-adapter-specific-format-features"} & set(adapter.features)
    return adapter.request_device_sync(required_features=sorted(extra))


class Wgpu:
    """One variant's bindings on a device, to draw with any entry point that uses them.

    Args:
        variant: Whose block is at 1 and whose textures follow it; None for constants.
        storage: "textures" binds them and, at 6, a sampler.
        wide: Bind texels of 8 bits as float16 textures.
    """

    def __init__(
        self, size: int, variant: Variant | None, storage: str, *, wide: bool = False
    ) -> None:
        import wgpu

        self.gpu = device()
        self.size = size
        usage = wgpu.BufferUsage
        uniform = self.gpu.create_buffer(size=16, usage=usage.UNIFORM | usage.COPY_DST)
        self.uniform = uniform
        self.entries: list[dict[str, Any]] = [{"binding": 0, "resource": {"buffer": uniform}}]
        if variant is None:
            return
        data = pack(variant, network=True)
        if storage == "textures":
            data = data[: layout(variant, network=True)[0].words]
        block = self.gpu.create_buffer_with_data(data=data.tobytes(), usage=usage.STORAGE)
        self.entries.append({"binding": 1, "resource": {"buffer": block}})
        if storage == "textures":
            self.entries += _wgpu_textures(self.gpu, variant, wide)
            linear = self.gpu.create_sampler(mag_filter="linear", min_filter="linear")
            self.entries.append({"binding": 6, "resource": linear})

    def fragment(self, code: str | bytes, entry: str, frames: Sequence[bytes]) -> list[Array]:
        """Images that a fragment entry draws, float32 [size, size, 4], one a frame.

        Args:
            code: WGSL or SPIR-V.
        """
        import wgpu

        target = self._target("rgba32float", wgpu.TextureUsage.RENDER_ATTACHMENT)
        vertex = self.gpu.create_shader_module(
            code="@vertex fn cover(@builtin(vertex_index) i: u32) -> @builtin(position) vec4f {"
            " return vec4f(f32(i & 1u) * 4.0 - 1.0, f32(i >> 1u) * 4.0 - 1.0, 0.0, 1.0); }"
        )
        pipeline = self.gpu.create_render_pipeline(
            layout="auto",
            vertex={"module": vertex, "entry_point": "cover"},
            primitive={"topology": "triangle-list"},
            fragment={
                "module": self.gpu.create_shader_module(code=code),
                "entry_point": entry,
                "targets": [{"format": "rgba32float"}],
            },
        )
        group, images = self._group(pipeline, self.entries), []
        for frame in frames:
            self.gpu.queue.write_buffer(self.uniform, 0, frame)
            encoder = self.gpu.create_command_encoder()
            work = encoder.begin_render_pass(
                color_attachments=[
                    {"view": target.create_view(), "load_op": "clear", "store_op": "store"}
                ]
            )
            work.set_pipeline(pipeline)
            work.set_bind_group(0, group)
            work.draw(3)
            work.end()
            self.gpu.queue.submit([encoder.finish()])
            images.append(self._read(target, np.dtype(np.float32)))
        return images

    def compute(
        self,
        code: str | bytes,
        entry: str,
        frame: bytes,
        *,
        image: int,
        image_format: str = "rgba16float",
    ) -> Array:
        """The image that a compute entry writes to binding `image`, float32 [size, size, 4]."""
        import wgpu

        self.gpu.queue.write_buffer(self.uniform, 0, frame)
        target = self._target(image_format, wgpu.TextureUsage.STORAGE_BINDING)
        pipeline = self.gpu.create_compute_pipeline(
            layout="auto",
            compute={
                "module": self.gpu.create_shader_module(code=code),
                "entry_point": entry,
            },
        )
        entries = [*self.entries, {"binding": image, "resource": target.create_view()}]
        encoder = self.gpu.create_command_encoder()
        work = encoder.begin_compute_pass()
        work.set_pipeline(pipeline)
        work.set_bind_group(0, self._group(pipeline, entries))
        work.dispatch_workgroups((self.size + 7) // 8, (self.size + 7) // 8)
        work.end()
        self.gpu.queue.submit([encoder.finish()])
        kind = np.dtype(np.float16 if image_format == "rgba16float" else np.float32)
        return self._read(target, kind)

    def _target(self, image_format: str, usage: int) -> Any:
        import wgpu

        return self.gpu.create_texture(
            size=(self.size, self.size),
            format=image_format,
            usage=usage | wgpu.TextureUsage.COPY_SRC,
        )

    def _group(self, pipeline: Any, entries: list[dict[str, Any]]) -> Any:
        return self.gpu.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)

    def _read(self, target: Any, kind: np.dtype[Any]) -> Array:
        size = self.size
        raw = self.gpu.queue.read_texture(
            {"texture": target},
            {"bytes_per_row": size * 4 * kind.itemsize, "rows_per_image": size},
            (size, size, 1),
        )
        return np.frombuffer(raw, kind).reshape(size, size, 4).astype(np.float32)


def _wgpu_textures(gpu: Any, variant: Variant, wide: bool) -> list[dict[str, Any]]:
    import wgpu

    entries = []
    for i, texels in enumerate(variant.texels):
        size = tuple(reversed(texels.stored.shape[:-1]))
        data, small = texels.stored, texels.eight_bit
        if small and wide:
            data, small = (data.astype(np.float32) / np.float32(255.0)).astype(np.float16), False
        texture = gpu.create_texture(
            size=size,
            dimension="2d" if len(size) == 2 else "3d",
            format="rgba8unorm" if small else "rgba16float",
            usage=wgpu.TextureUsage.TEXTURE_BINDING | wgpu.TextureUsage.COPY_DST,
        )
        row = size[0] * data.dtype.itemsize * 4
        gpu.queue.write_texture(
            {"texture": texture},
            data.tobytes(),
            {"bytes_per_row": row, "rows_per_image": size[1]},
            size,
        )
        entries.append({"binding": i + 2, "resource": texture.create_view()})
    return entries
