"""A window on what the wgpu host shows, for people; the host draws the same without one.

The render loop stays the host's: `Window.update`, called once a round of it, pumps events and
presents. rendercanvas gives the window, its events and its surface; none of its loops runs.
Importing this module imports neither rendercanvas nor glfw.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from types import TracebackType
from typing import Any

import numpy as np

from .base import Host, HostError
from .wgpu_host import WgpuHost

__all__ = ["Window"]

_log = logging.getLogger("doublure.window")

_SHORTEST_S = 1.0 / 144.0
"""Between two presented frames, where the render loop runs faster than anyone sees."""
_SHARE = 0.2
"""Part of the render thread's time that presenting may take."""
_TITLE_EVERY_S = 0.125
_TAP_S = 0.35
"""A space bar held longer shows the other image only while it is held."""
_SIDES_PX = (512, 1024)
"""Of the longest side: smaller images are enlarged to this, larger ones shrunk to that."""

# The curve is that of demo/report.py `display`: Reinhard et al. 2002, "Photographic tone
# reproduction", eq. 4, then sRGB (IEC 61966-2-1); alpha is 1 whatever the target holds.
_SHADER = """
struct Look { white: f32, encode: f32 }
@group(0) @binding(0) var<uniform> look: Look;
@group(0) @binding(1) var shown: texture_2d<f32>;
@group(0) @binding(2) var shown_sampler: sampler;

struct Corner { @builtin(position) position: vec4f, @location(0) uv: vec2f }

@vertex
fn cover(@builtin(vertex_index) i: u32) -> Corner {
    let p = vec2f(f32(i32(i & 1u) * 4 - 1), f32(i32(i >> 1u) * 4 - 1));
    return Corner(vec4f(p, 0.0, 1.0), vec2f(0.5 + 0.5 * p.x, 0.5 - 0.5 * p.y));
}

@fragment
fn present(corner: Corner) -> @location(0) vec4f {
    // The upper bound, float16's largest, keeps infinities from becoming NaN below.
    let c = clamp(textureSampleLevel(shown, shown_sampler, corner.uv, 0.0).rgb,
                  vec3f(0.0), vec3f(65504.0));
    let mapped = clamp(c * (1.0 + c / (look.white * look.white)) / (1.0 + c),
                       vec3f(0.0), vec3f(1.0));
    let srgb = select(1.055 * pow(mapped, vec3f(1.0 / 2.4)) - 0.055, 12.92 * mapped,
                      mapped <= vec3f(0.0031308));
    return vec4f(select(mapped, srgb, look.encode > 0.5), 1.0);
}
"""


class Window:
    """Shows a host's frames. Escape or closing it asks to stop; space compares with the source.

    Opens on the device that the host already drew with, so that adapter and pictures are those of
    a run without a window. Use on the main thread, and close it before the host; `close()` may be
    called twice. glfw itself stays initialised until the process ends, as rendercanvas has it.

    Args:
        host: Borrowed.
        white: Smallest linear value shown as white, at least 1.
    Raises:
        HostError: Another host than wgpu's, no display, or rendercanvas or glfw are missing; the
            text says what to install.
    """

    def __init__(self, host: Host, *, title: str = "doublure", white: float = 1.0) -> None:
        if not isinstance(host, WgpuHost):
            raise HostError("window", expected="the wgpu host", got=f"the {host.name} host")
        _check_white(white)
        self.stopped = False
        """Whether the user asked to stop. Stays true."""
        self.presented = 0
        """Frames presented."""
        self.present_s = 0.0
        """Seconds that the last presenting held the render thread."""
        self._host = host
        self._white = white
        self._due = self._title_due = self._pressed_at = 0.0
        self._bound: dict[Any, Any] = {}
        self._uniform: Any = None
        self._context: Any = None
        self._canvas: Any = _canvas(host.size, title)
        try:
            self._build()
        except BaseException as error:
            self.close()
            if isinstance(error, Exception):
                raise HostError(
                    "window",
                    expected=f"a surface that {host.device} can present to",
                    got=str(error) or type(error).__name__,
                ) from error
            raise

    def _build(self) -> None:
        gpu = self._host.gpu
        self._canvas.add_event_handler(self._on_event, "key_down", "key_up", "close")
        self._canvas.request_draw(self._draw)
        self._context = self._canvas.get_wgpu_context()
        preferred = self._context.get_preferred_format(gpu.device.adapter)
        # An sRGB target would encode a second time, and round otherwise than `display`; it is taken
        # only where the surface offers nothing else.
        surface_format = preferred.removesuffix("-srgb")
        try:
            self._context.configure(device=gpu.device, format=surface_format)
        except ValueError:
            surface_format = preferred
            self._context.configure(device=gpu.device, format=surface_format)
        module = gpu.compile(_SHADER, "window")
        self._pipeline = gpu.device.create_render_pipeline(
            label="window",
            layout="auto",
            vertex={"module": module, "entry_point": "cover"},
            primitive={"topology": "triangle-list"},
            fragment={
                "module": module,
                "entry_point": "present",
                "targets": [{"format": surface_format}],
            },
        )
        self._samplers = {
            name: gpu.device.create_sampler(mag_filter=name, min_filter=name)
            for name in ("nearest", "linear")
        }
        self._uniform = gpu.buffer(16, "UNIFORM|COPY_DST", "window")
        self.white = self._white

    @property
    def white(self) -> float:
        """Smallest linear value shown as white; may be set at any time."""
        return self._white

    @white.setter
    def white(self, value: float) -> None:
        _check_white(value)
        self._white = value
        encode = not self._context.get_configuration()["format"].endswith("-srgb")
        values = np.array([value, float(encode), 0.0, 0.0], np.float32)
        self._host.gpu.queue.write_buffer(self._uniform, 0, values)

    def update(self, title: str = "") -> None:
        """Pump events and present what the host drew last. Call it before `host.frame`.

        Presents only when due: with the device busy on a software adapter it would wait for it, and
        a surface that makes us wait (vertical sync, a slow display) is asked less often.
        """
        if self._canvas is None:
            return
        self._canvas._process_events()
        if self._canvas is None:  # closed by the user just now
            return
        now = time.perf_counter()
        if title and now >= self._title_due:
            self._title_due = now + _TITLE_EVERY_S
            self._canvas.set_title(title)
        if now >= self._due and self._host.presentable:
            self._canvas.force_draw()
            took = time.perf_counter() - now
            self.present_s = took
            self._due = now + max(_SHORTEST_S, took / _SHARE)

    def _draw(self) -> None:
        texture = self._context.get_current_texture()
        view = self._host.shown_view
        width, height = self._host.size
        full_width, full_height, _ = texture.size
        scale = min(full_width / width, full_height / height)
        box_width, box_height = round(width * scale), round(height * scale)
        bound = self._bind(view, "nearest" if scale >= 1.0 and scale % 1.0 == 0.0 else "linear")
        encoder = self._host.gpu.device.create_command_encoder()
        attachment = {
            "view": texture.create_view(),
            "clear_value": (0.0, 0.0, 0.0, 1.0),
            "load_op": "clear",
            "store_op": "store",
        }
        work = encoder.begin_render_pass(color_attachments=[attachment])
        if box_width and box_height:
            left, top = (full_width - box_width) // 2, (full_height - box_height) // 2
            work.set_viewport(left, top, box_width, box_height, 0.0, 1.0)
            work.set_pipeline(self._pipeline)
            work.set_bind_group(0, bound)
            work.draw(3)
        work.end()
        self._host.gpu.queue.submit([encoder.finish()])
        self.presented += 1

    def _bind(self, view: Any, sampler: str) -> Any:
        """The host has two views and we two samplers: four bind groups, each made once."""
        key = (id(view), sampler)
        if key not in self._bound:
            self._bound[key] = self._host.gpu.bind(
                self._pipeline, 0, self._uniform, view, self._samplers[sampler]
            )
        return self._bound[key]

    def _on_event(self, event: dict[str, Any]) -> None:
        kind, key = event["event_type"], event.get("key")
        now = time.perf_counter()
        if kind == "close":
            self._let_go()
        elif kind == "key_down" and key == "Escape":
            self.stopped = True
        elif kind == "key_down" and key == " ":
            self._pressed_at = now
            self._host.comparing = not self._host.comparing
        elif kind == "key_up" and key == " " and now - self._pressed_at > _TAP_S:
            self._host.comparing = not self._host.comparing

    def _let_go(self) -> None:
        """The surface must be gone before its window: rendercanvas has unconfigured it by now."""
        self.stopped = True
        self._host.comparing = False
        self._context = None
        self._canvas = None
        self._bound.clear()
        self._samplers = {}
        self._pipeline = None
        if self._uniform is not None:
            self._uniform.destroy()
            self._uniform = None

    def close(self) -> None:
        """Close the window and release what it made."""
        if self._canvas is not None:
            self._canvas.close()  # emits "close"
            self._let_go()

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_white(value: float) -> None:
    if not value >= 1.0:
        raise HostError("white", expected="at least 1", got=value)


def _canvas(size: tuple[int, int], title: str) -> Any:
    """A rendercanvas window, after asking for all that it needs: it would not say what is missing.

    Raises:
        HostError: Something is missing.
    """
    install = "pip install 'doublure[window]'"
    try:
        import glfw
    except ImportError as error:
        raise HostError(
            "window", expected="glfw", got=str(error), next_step=f"run `{install}`"
        ) from error
    if sys.platform == "linux" and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        raise HostError(
            "window",
            expected="a display",
            got="neither DISPLAY nor WAYLAND_DISPLAY set",
            next_step="run it in a desktop session;"
            " a virtual one comes with `sudo apt-get install xvfb` and `xvfb-run`",
        )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ready = glfw.init()
    if not ready:
        raise HostError(
            "window",
            expected="a display that glfw can open",
            got="; ".join(str(w.message) for w in said) or "no reason given",
            next_step="check DISPLAY, and that libX11 is there: `sudo apt-get install libx11-6`",
        )
    try:
        from rendercanvas.glfw import RenderCanvas
    except ImportError as error:
        raise HostError(
            "window", expected="rendercanvas", got=str(error), next_step=f"run `{install}`"
        ) from error
    if not hasattr(RenderCanvas, "_process_events"):
        raise HostError(
            "window",
            expected="a rendercanvas that this release knows",
            got="one without _process_events",
            next_step="pip install 'rendercanvas>=2.7,<3'",
        )
    shortest, longest = _SIDES_PX
    scale = max(1, shortest // max(size)) * min(1.0, longest / max(size))
    try:
        # Neither scheduler nor loop: the render loop is the host's.
        RenderCanvas.select_loop(None)
        # Without vertical sync it asks for immediate or mailbox, which do not wait.
        return RenderCanvas(
            size=(size[0] * scale, size[1] * scale), title=title, vsync=False,
            present_method="screen",
        )  # fmt: skip
    except Exception as error:
        raise HostError("window", expected="a window", got=str(error)) from error
