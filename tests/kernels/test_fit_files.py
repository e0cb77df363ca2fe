"""scene.json, SVG and checkpoints: round trips, damage, and what is drawn from them."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from doublure_kernels.cpu import CpuBackend
from doublure_kernels.errors import ImageError, ResumeError, SettingError
from doublure_kernels.fit import (
    FitSettings,
    FitState,
    FittedScene,
    load_scene,
    save_scene,
    save_svg,
    to_svg,
)
from doublure_kernels.fit.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from doublure_kernels.fit.files import write_whole


def some_scene(count: int = 5) -> FittedScene:
    rng = np.random.default_rng(4)
    triangles = rng.uniform(-0.25, 1.25, (count, 10)).astype(np.float32)
    triangles[:, 6:] = np.clip(triangles[:, 6:], 0.01, 0.99)
    return FittedScene(triangles, np.float32([0.1, 0.2, 0.3]), 0.0123, 30, 40, "compact", "bbox6")


def test_a_scene_comes_back_to_the_bit(tmp_path: Path) -> None:
    scene = some_scene(50)
    save_scene(tmp_path / "scene.json", scene, loss=0.25)
    found = load_scene(tmp_path / "scene.json")
    np.testing.assert_array_equal(found.triangles, scene.triangles)
    np.testing.assert_array_equal(found.background, scene.background)
    assert found.triangles.dtype == found.background.dtype == np.float32
    assert np.float32(found.sigma) == np.float32(scene.sigma)
    assert (found.height, found.width) == (30, 40)
    assert (found.kernel, found.support) == ("compact", "bbox6")
    with CpuBackend(1) as backend:
        np.testing.assert_array_equal(
            found.render(9, 11, backend=backend), scene.render(9, 11, backend=backend)
        )


def test_a_scene_of_nothing_is_its_background(tmp_path: Path) -> None:
    save_scene(tmp_path / "scene.json", some_scene(0))
    found = load_scene(tmp_path / "scene.json")
    assert found.triangles.shape == (0, 10)
    with CpuBackend(1) as backend:
        np.testing.assert_allclose(found.render(2, 2, backend=backend)[1, 1], [0.1, 0.2, 0.3])


def test_the_format_is_as_documented(tmp_path: Path) -> None:
    """Golden: a change here is a new version."""
    triangles = np.float32([[0, 0.5, 1, 0.1, 0.25, 1.25, 0.3, 0.2, 0.7, 0.999]])
    save_scene(
        tmp_path / "scene.json",
        FittedScene(triangles, np.float32([0, 0.5, 1]), 0.0015, 2, 3),
        loss=0.5,
    )
    assert (tmp_path / "scene.json").read_text() == (
        '{\n  "format": "doublure triangles",\n  "version": 1,\n  "width": 3,\n  "height": 2,\n'
        '  "kernel": "sigmoid",\n  "support": "exact",\n  "sigma": 0.0015,\n'
        '  "background": [0.0, 0.5, 1.0],\n  "loss": 0.5,\n  "triangles": [\n'
        "    [0.0, 0.5, 1.0, 0.1, 0.25, 1.25, 0.3, 0.2, 0.7, 0.999]\n  ]\n}\n"
    )


def test_keys_of_the_format_are_not_for_others(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="expected keys other than its own, got sigma"):
        save_scene(tmp_path / "scene.json", some_scene(), sigma=3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "format: expected \"doublure triangles\", got 'other'"),
        ({"version": 2}, "version: expected 1, got 2; read it with the release"),
        ({"version": True}, "version: expected 1, got True"),
        ({"sigma": None}, "sigma: expected a number, got None"),
        ({"sigma": 0}, "sigma: expected more than 0, got 0.0"),
        ({"sigma": 1e-60}, "sigma: expected more than 0"),
        ({"width": 0}, "width: expected 1 to 65,536 pixels, got 0"),
        ({"height": 2.5}, "height: expected 1 to 65,536 pixels, got 2.5"),
        ({"kernel": "box"}, "kernel: expected sigmoid or compact, got 'box'"),
        ({"kernel": []}, "kernel: expected sigmoid or compact, got []"),
        ({"support": None}, "support: expected exact or bbox6, got None"),
        ({"background": [0, 0]}, "background: expected 3 numbers, got 2"),
        ({"background": "red"}, "background: expected 3 numbers, got 'red'"),
        ({"triangles": {}}, "triangles: expected a list, got {}"),
        ({"triangles": [[0.0] * 9]}, "triangles[0]: expected 10 numbers, got 9"),
        ({"triangles": [[0.0] * 10, [0.0] * 9 + ["x"]]}, "triangles[1][9]: expected a number"),
        ({"triangles": [[0.0] * 9 + [float("nan")]]}, "triangles[0][9]: expected a finite number"),
        ({"triangles": [[0.0] * 9 + [10**400]]}, "triangles[0][9]: expected a finite number"),
        ({"triangles": [[True] * 10]}, "triangles[0][0]: expected a number, got True"),
    ],
)
def test_a_wrong_scene_is_refused_with_the_place(change: dict, said: str, tmp_path: Path) -> None:
    path = tmp_path / "scene.json"
    save_scene(path, some_scene())
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ImageError) as caught:
        load_scene(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_key_or_file_and_damage_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "scene.json"
    with pytest.raises(ImageError, match="expected a scene, got: No such file"):
        load_scene(path)
    save_scene(path, some_scene())
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(ImageError, match="expected JSON, got something damaged"):
        load_scene(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ImageError, match="expected JSON, got something damaged"):
        load_scene(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ImageError, match="expected JSON, got something damaged"):
        load_scene(path)
    path.write_text("[1]")
    with pytest.raises(ImageError, match="got 'list'"):
        load_scene(path)
    data = json.loads(text)
    del data["sigma"]
    path.write_text(json.dumps(data))
    with pytest.raises(ImageError, match="sigma: expected this key"):
        load_scene(path)


def test_render_refuses_sizes_that_are_none() -> None:
    with CpuBackend(1) as backend:
        for size in (0, -1, 70_000):
            with pytest.raises(SettingError, match="height: expected 1 to 65,536 pixels"):
                some_scene().render(size, 3, backend=backend)


SVG = "{http://www.w3.org/2000/svg}"


def test_the_svg_is_well_formed_and_in_the_scenes_order(tmp_path: Path) -> None:
    scene = some_scene(20)
    save_svg(tmp_path / "scene.svg", scene, 60, 80)
    root = ElementTree.parse(tmp_path / "scene.svg").getroot()
    assert root.tag == f"{SVG}svg"
    assert (root.get("width"), root.get("height")) == ("80", "60")
    assert root.get("viewBox") == "0 0 80 60"
    background, *polygons = list(root)
    assert background.tag == f"{SVG}rect"
    assert background.get("fill") == "#597c95"  # sRGB of 0.1, 0.2, 0.3 in linear light
    assert len(polygons) == 20
    for polygon, row in zip(polygons, scene.triangles, strict=True):
        assert polygon.tag == f"{SVG}polygon"
        points = [float(v) for v in polygon.get("points", "").replace(",", " ").split()]
        np.testing.assert_allclose(points, row[:6] * ([80, 60] * 3), atol=6e-4)
        assert float(polygon.get("fill-opacity", "")) == pytest.approx(row[9], abs=6e-5)
        assert len(polygon.get("fill", "")) == 7


def test_the_svg_of_nothing_has_the_background_alone() -> None:
    root = ElementTree.fromstring(to_svg(some_scene(0)).encode())
    assert len(root) == 1
    assert (root.get("width"), root.get("height")) == ("40", "30")


def some_checkpoint() -> Checkpoint:
    rng = np.random.default_rng(1)
    settings = FitSettings(triangles=3, iterations=9)
    state = FitState.begin(rng.random((3, 10)))
    state.first[:] = rng.normal(size=(3, 10))
    state.losses[:] = [0.5, 0.25, 0.3]
    state.best_iteration = 1
    return Checkpoint(settings, state, np.float32(rng.random((4, 5, 3))), {"photo": "a.png"})


def test_a_checkpoint_comes_back_to_the_bit(tmp_path: Path) -> None:
    one = some_checkpoint()
    save_checkpoint(tmp_path / "c.npz", one)
    found = load_checkpoint(tmp_path / "c.npz")
    assert found.settings == one.settings
    assert found.about == one.about
    assert found.state.losses == one.state.losses
    assert (found.state.best_iteration, found.state.stopped) == (1, None)
    np.testing.assert_array_equal(found.target, one.target)
    for name in ("triangles", "first", "second", "best"):
        np.testing.assert_array_equal(getattr(found.state, name), getattr(one.state, name))
    assert [path.name for path in tmp_path.iterdir()] == ["c.npz"]


def test_losses_that_are_no_numbers_survive(tmp_path: Path) -> None:
    one = some_checkpoint()
    one.state.losses.append(float("nan"))
    one.state.stopped = "diverged"
    save_checkpoint(tmp_path / "c.npz", one)
    found = load_checkpoint(tmp_path / "c.npz").state
    assert np.isnan(found.losses[-1])
    assert found.stopped == "diverged"


def test_every_byte_of_damage_is_found_or_harmless(tmp_path: Path) -> None:
    one, path = some_checkpoint(), tmp_path / "c.npz"
    save_checkpoint(path, one)
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            found = load_checkpoint(path)
        except ResumeError:
            refused += 1
        else:  # the archive's own bookkeeping, dates and the like
            np.testing.assert_array_equal(found.target, one.target)
            np.testing.assert_array_equal(found.state.first, one.state.first)
            assert found.settings == one.settings
    assert refused > 100
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ResumeError, match="expected a whole checkpoint of a fit"):
            load_checkpoint(path)


def test_other_archives_are_refused_and_no_code_is_run(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    with pytest.raises(ResumeError, match="got no such file; start without --resume"):
        load_checkpoint(path)
    np.savez(path, a=np.zeros(3))
    with pytest.raises(ResumeError, match="expected a whole checkpoint"):
        load_checkpoint(path)
    np.save(tmp_path / "x.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(ResumeError, match="expected a whole checkpoint"):
        load_checkpoint(tmp_path / "x.npy")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "x"}, "another kind of file"),
        ({"version": 2}, "expected version 1, got 2; go on with the release"),
        ({"settings": {"triangels": 3}}, "did you mean triangles"),
        ({"settings": {"triangles": 4}}, r"triangles: expected [4, 10] float32, got [3, 10]"),
        ({"best_iteration": 7}, "best_iteration: expected one of 3, got 7"),
        ({"stopped": "tired"}, "a wrong header"),
        ({"about": []}, "a wrong header"),
    ],
)
def test_a_wrong_header_is_refused(change: dict, said: str, tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    save_checkpoint(path, some_checkpoint())
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(arrays["header"].tobytes()) | change
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(path, **arrays)
    with pytest.raises(ResumeError) as caught:
        load_checkpoint(path)
    assert said in str(caught.value)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("good")

    def half(temporary: Path) -> None:
        temporary.write_text("ha")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left on device") as caught:
        write_whole(path, half)
    assert caught.value.filename == str(path)
    assert path.read_text() == "good"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]
