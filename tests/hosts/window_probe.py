"""Opens windows on the display it is given and prints what it saw there as JSON.

A process of its own: Xlib ends the process whose X server goes away.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

import glfw
import numpy as np
import wgpu
from doublure_plugin.demo.report import display
from doublure_plugin.hosts import open_host
from doublure_plugin.hosts.wgpu_host import WgpuHost
from doublure_plugin.hosts.window import Window
from PIL import ImageGrab

from .fakes import GRID, FakeSession, constant_weights

SIZE = (256, 160)
T = 0.3


def settle(host: WgpuHost, window: Window) -> None:
    """Draw one more frame and have exactly that one on the display."""
    while not host.frame(T):
        host.wait()
    host.gpu.wait()
    host._collect()
    before = window.presented
    while window.presented == before:
        window.update()
    time.sleep(0.1)


def grab(window: Window) -> np.ndarray:
    x, y = glfw.get_window_pos(window._canvas._window)
    width, height = glfw.get_framebuffer_size(window._canvas._window)
    screen = ImageGrab.grab(xdisplay=os.environ["DISPLAY"]).convert("RGB")
    return np.asarray(screen)[y : y + height, x : x + width].astype(int)


def difference(window: Window, host: WgpuHost, white: float = 1.0) -> dict[str, Any]:
    shot = grab(window)
    wanted = display(host.read_shown(), white)
    scale = shot.shape[0] // wanted.shape[0]
    wanted = wanted.repeat(scale, axis=0).repeat(scale, axis=1).astype(int)
    return {
        "shapes": [shot.shape, wanted.shape],
        "largest": int(np.abs(shot - wanted).max()) if shot.shape == wanted.shape else 999,
        "spread": float(shot.std()),
        "flipped": float(np.abs(shot[::-1] - wanted).mean()),
    }


def pictures() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    session = FakeSession(model_specs=(GRID,))
    with open_host("plasma", name="wgpu", size=SIZE, fps=0) as host, Window(host) as window:
        assert isinstance(host, WgpuHost)
        host.attach(session)
        settle(host, window)
        seen["source"] = difference(window, host)
        window.white = 4.0
        settle(host, window)
        seen["white 4"] = difference(window, host, 4.0)
        window.white = 1.0
        session.queue.append(constant_weights(GRID, 1, 0.5))
        while not session.applied_versions:
            host.frame(T)
            host.wait()
        settle(host, window)
        seen["stand-in"] = grab(window)[80, 80].tolist()
        for name, kind in (("down", "key_down"), ("up", "key_up")):
            window._canvas.submit_event({"event_type": kind, "key": " "})
            settle(host, window)
            seen[f"space {name}"] = (host.showing, difference(window, host))
        time.sleep(0.1)
        window._canvas.submit_event({"event_type": "key_down", "key": " "})
        settle(host, window)
        seen["space again"] = host.showing
        window._canvas.set_logical_size(400, 400)
        for _ in range(3):
            settle(host, window)
        shot = grab(window)
        # 256 x 160 in 400 x 400 is 400 x 250 with bars of 75 above and below.
        seen["letterbox"] = {
            "shape": shot.shape,
            "bars": int(max(shot[:75].max(), shot[325:].max())),
            "edges": shot[[75, 324], 200].tolist(),
        }
        window._canvas.submit_event({"event_type": "key_down", "key": "Escape"})
        window.update()
        seen["escape"] = window.stopped
        host.comparing = True
    seen["comparing after"] = host.comparing
    return seen


def counts() -> dict[str, Any]:
    gc.collect()
    every = wgpu.diagnostics.object_counts.get_dict()
    return {name: one["count"] for name, one in every.items() if name != "total"}


def life() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with open_host("plasma", name="wgpu", size=SIZE, fps=0) as host:
        assert isinstance(host, WgpuHost)
        # Bind groups and pipelines of the host's own appear with its first frame.
        host.frame(T)
        host.gpu.wait()
        before = counts()
        for how in ("close", "user"):
            window = Window(host)
            settle(host, window)
            opened = counts(), window.presented
            for _ in range(300):
                settle_quickly(host, window)
            seen[f"{how}: grown"] = {
                name: count for name, count in counts().items() if count != opened[0][name]
            }
            seen[f"{how}: presented"] = window.presented - opened[1]
            if how == "user":
                glfw.set_window_should_close(window._canvas._window, True)
                window.update()
                window.update()
                seen["stopped"] = window.stopped
            window.close()
            window.close()
            host.gpu.wait()
            seen[f"{how}: left"] = {
                name: count for name, count in counts().items() if count != before[name]
            }
        host.frame(T)
        seen["still draws"] = bool(np.isfinite(host.read_shown()).all())
    return seen


def settle_quickly(host: WgpuHost, window: Window) -> None:
    while not host.frame(T):
        time.sleep(0.0005)
    host.gpu.wait()
    host._collect()
    window._due = 0.0
    window.update("frame")


if __name__ == "__main__":
    print(json.dumps({"pictures": pictures, "life": life}[sys.argv[1]]()))
