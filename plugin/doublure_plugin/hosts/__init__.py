"""Hosts: engines with a render loop that a session can learn from.

`open_host` gives the embedded one: wgpu where an adapter is found, NumPy otherwise. Importing this
package imports neither wgpu nor anything else that opens a device.
"""

from __future__ import annotations

from typing import Any

from ..scenes import SCENES, Scene
from .base import Host, HostError, HostStats, SessionLike, Timing, WeightsLike

__all__ = [
    "HOSTS",
    "Host",
    "HostError",
    "HostStats",
    "SessionLike",
    "Timing",
    "WeightsLike",
    "open_host",
]

HOSTS = ("auto", "wgpu", "numpy")
"""Names that `open_host` takes."""


def open_host(scene: Scene | str, *, name: str = "auto", **settings: Any) -> Host:
    """Open a host for `scene`; `host.name`, `.device` and `.reason` say which, where and why.

    Args:
        scene: A scene or the name of one.
        name: `auto` takes wgpu where it works and NumPy otherwise; the others are taken or refused.
        settings: Of `Host`: size, rows_per_capture, capture_fps, fps, seed, device_share.
    Raises:
        HostError: Unknown scene or host, or the named host cannot be opened.
    """
    if isinstance(scene, str):
        if scene not in SCENES:
            raise HostError("scene", expected=f"one of {', '.join(SCENES)}", got=repr(scene))
        scene = SCENES[scene]
    if name not in HOSTS:
        raise HostError("host", expected=f"one of {', '.join(HOSTS)}", got=repr(name))
    if name != "numpy":
        from .wgpu_host import WgpuHost

        try:
            host: Host = WgpuHost(scene, **settings)
        except HostError as error:
            # Only a missing device is a reason to go on without one: wrong settings are not.
            if name == "wgpu" or not error.what.startswith("wgpu"):
                raise
            missing = str(error)
        else:
            host.reason = "asked for" if name == "wgpu" else "an adapter was found"
            return host
    from .numpy_host import NumpyHost

    host = NumpyHost(scene, **settings)
    host.reason = "asked for" if name == "numpy" else f"no usable GPU adapter: {missing}"
    return host
