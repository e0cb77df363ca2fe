"""The embedded hosts' scenes as something that `capture_dataset` can draw."""

from __future__ import annotations

from ..digest import Source
from ..hosts import Host, HostError, open_host
from ..scenes import Scene
from .capture import Array

__all__ = ["MAX_SIDE", "SceneHost", "open_scene"]

MAX_SIDE = 4096
_FORMATS = {"wgpu": "rgba16float", "numpy": "rgba32float"}


class SceneHost:
    """An `OfflineHost` of one scene, over an embedded host that it owns. Close it after use.

    Args:
        host: Without a session: nobody else draws with it.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.scene = host.scene
        self.name = f"doublure {host.name}: {host.device}"
        self.width, self.height = host.size
        self.formats = (_FORMATS[host.name],)
        self.in_frame = False

    @property
    def shaders(self) -> dict[str, str]:
        return {f"{self.scene.name}.wgsl": self.host.source_description()["wgsl"]}

    def source_digest(self) -> str:
        state = self.host.source_description()
        del state["wgsl"]
        source = Source(self.scene.name, self.shaders, state, self.width, self.height)
        return source.digest.hex()

    def render(self, t: float) -> Array:
        """The whole target at `t`, float32 [height, width, 4]; waits for the device."""
        return self.host.read_target(t)

    def check_determinism(self) -> None:
        """Raise `NondeterministicSourceError` if the same parameter draws two images."""
        self.host.check_determinism()

    def close(self) -> None:
        """Close the host. May be called twice."""
        self.host.close()

    def __enter__(self) -> SceneHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_scene(
    scene: Scene | str,
    *,
    name: str = "auto",
    size: tuple[int, int] = (512, 512),
) -> SceneHost:
    """Open a scene for offline capture.

    Args:
        scene: A scene or the name of one.
        name: Of the host, one of `HOSTS`.
        size: (width, height), each 1..4096.
    Raises:
        HostError: Unknown scene or host, no such size, or the named host cannot be opened.
    """
    if not all(type(side) is int and 1 <= side <= MAX_SIDE for side in size):
        raise HostError("size", expected=f"width and height in 1..{MAX_SIDE}", got=size)
    # The sampler of the live path is not used; one row of it is the least there is.
    return SceneHost(open_host(scene, name=name, size=size, rows_per_capture=1))
