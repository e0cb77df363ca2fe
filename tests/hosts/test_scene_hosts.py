"""Scenes captured offline: both hosts give the same dataset, at any size."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doublure_bridge import Dataset, open_dataset
from doublure_plugin import NondeterministicSourceError
from doublure_plugin.hosts import HostError
from doublure_plugin.offline import capture_dataset
from doublure_plugin.offline.scene_hosts import open_scene

SMALL: dict[str, Any] = {"training_frames": 4, "validation_frames": 2, "pixels_per_frame": 600}


def captured(directory: Path, scene: str, name: str, size: tuple[int, int]) -> Dataset:
    with open_scene(scene, name=name, size=size) as host:
        capture_dataset(host, directory, parameter=host.scene.parameter, **SMALL)
    return open_dataset(directory)


@pytest.mark.gpu
@pytest.mark.usefixtures("adapter")
@pytest.mark.parametrize(
    ("scene", "size"), [("plasma", (100, 37)), ("sun", (64, 128)), ("edges", (71, 64))]
)
def test_the_device_and_numpy_capture_the_same(
    tmp_path: Path, scene: str, size: tuple[int, int]
) -> None:
    device = captured(tmp_path / "device", scene, "wgpu", size)
    plain = captured(tmp_path / "plain", scene, "numpy", size)
    assert device.manifest.resolution == size
    assert device.manifest.extra["doublure"]["format"] == "rgba16float"
    assert plain.manifest.extra["doublure"]["format"] == "rgba32float"
    assert device.manifest.source_digest != plain.manifest.source_digest
    for mine, theirs in ((device.train, plain.train), (device.validation, plain.validation)):
        assert (mine[:, :3] == theirs[:, :3]).all()
        assert np.ptp(theirs[:, 3:]) > 0.5
        # Half precision is 5e-4 of a value; float32 functions differ a little on top of it. A
        # pixel on an edge may fall to the other side, so a few in a thousand may differ by more.
        error = np.abs(mine[:, 3:] - theirs[:, 3:]) / (1.0 + np.abs(theirs[:, 3:]))
        assert np.quantile(error, 0.995) < 2e-3
        assert error.mean() < 1e-3


def test_the_numpy_host_captures_what_its_scene_is(tmp_path: Path) -> None:
    data = captured(tmp_path / "d", "plasma", "numpy", (48, 20))
    with open_scene("plasma", name="numpy", size=(48, 20)) as host:
        scene = host.scene
        assert (tmp_path / "d" / "source-0.wgsl").read_text() == scene.wgsl
        assert data.manifest.source_digest == host.source_digest()
    rows = np.asarray(data.validation)
    raw = np.repeat(np.asarray(data.manifest.validation.parameters, np.float32), 600)
    assert rows[:, 3:] == pytest.approx(scene.evaluate(rows[:, 0], rows[:, 1], raw), abs=1e-4)


def test_the_digest_follows_scene_and_size() -> None:
    digests = set()
    for scene, size in (("plasma", (8, 8)), ("plasma", (8, 9)), ("sun", (8, 8))):
        with open_scene(scene, name="numpy", size=size) as host:
            digests.add(host.source_digest())
    assert len(digests) == 3


@pytest.mark.parametrize("size", [(0, 8), (8, 4097), (8.0, 8)])
def test_sizes_out_of_range_are_refused(size: Any) -> None:
    with pytest.raises(HostError, match=r"size: expected width and height in 1..4096"):
        open_scene("plasma", name="numpy", size=size)


def test_noise_is_found_out() -> None:
    """A source that draws anew each time is no function of t."""
    with open_scene("plasma", name="numpy", size=(8, 8)) as host:
        draw, count = host.host.read_source, iter(range(100))
        host.host.read_source = lambda t: draw(t) + next(count)  # type: ignore[method-assign]
        with pytest.raises(NondeterministicSourceError):
            host.check_determinism()
