"""Offline capture: the files it leaves, the pixels it picks, and what it leaves after a failure."""

import errno
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doublure_bridge import open_dataset
from doublure_plugin import CaptureError, Source
from doublure_plugin.offline import capture, capture_dataset
from doublure_plugin.offline.java_random import JavaRandom

SHADERS = {"sky.vert": "void main() {}", "sky.frag": "out vec4 c;\n", "extra.wgsl": "// ä\n"}


class Engine:
    """An engine whose image is a formula, with a fault where a test wants one."""

    name = "formula"
    width, height = 40, 30
    formats: tuple[str, ...] = ("rgba32float",)
    in_frame = False

    def __init__(self) -> None:
        self.shaders = dict(SHADERS)
        self.state: dict[str, Any] = {"camera": [0.0, 1.0]}
        self.drawn: list[float] = []
        self.fault: Callable[[int, Any], Any] = lambda _, image: image

    def source_digest(self) -> str:
        return Source("x", self.shaders, self.state, self.width, self.height).digest.hex()

    def render(self, t: float) -> Any:
        y, x = np.mgrid[0 : self.height, 0 : self.width]
        image = np.stack([x + t, y * 100.0 - t, x * 0 - 0.5, x * 0 + 1.0], axis=-1)
        self.drawn.append(t)
        return self.fault(len(self.drawn), image.astype(np.float32))


SMALL: dict[str, Any] = {"training_frames": 5, "validation_frames": 3, "pixels_per_frame": 50}


@pytest.fixture
def engine() -> Engine:
    return Engine()


# -- java.util.Random ---------------------------------------------------------------------------

# `new Random(seed)`, then nextInt(width) and nextInt(height) by turns, of OpenJDK 17: the first
# eight, and h = 31 h + n over the first 400,000 in 64 bits, where that many are quick to draw.
JAVA: list[tuple[int, int, int, list[int], int | None]] = [
    (42, 10, 10, [0, 3, 8, 4, 0, 5, 5, 8], -45650015401935212),
    (4090, 512, 512, [411, 468, 465, 368, 356, 148, 462, 107], 628154379379011084),
    (4090, 1920, 1080, [1144, 468, 1734, 649, 1560, 635, 1907, 1070], -783266988273427906),
    (-7, 100, 37, [62, 1, 90, 2, 78, 34, 91, 12], -6495780517435169720),
    (42, 1, 3, [0, 0, 0, 2, 0, 1, 0, 2], -8156986387879686959),
    (0, 65536, 65535, [47904, 4873, 15763, 1532, 41773, 8108, 36073, 8571], 5358185722948707997),
    # About half, and a third, of these draws are refused and drawn again.
    (42, 1073741825, 1431655766, [117392763, 102948884, 662969970, 595021505, 196118093,
     969067502, 791955276, 819572292], None),
    (4090, 1073741825, 1431655766, [621375395, 450746630, 269477761, 612466151, 612362759,
     892318138, 575643443, 679784839], None),
]  # fmt: skip


@pytest.mark.parametrize(("seed", "width", "height", "first", "digest"), JAVA)
def test_the_pixels_are_those_of_java(
    seed: int, width: int, height: int, first: list[int], digest: int | None
) -> None:
    one = JavaRandom(seed)
    assert [one.next_int((width, height)[i % 2]) for i in range(8)] == first
    columns, lines = JavaRandom(seed).pixels(4, width, height)
    assert np.stack([columns, lines], axis=1).ravel().tolist() == first
    if digest is None:
        return
    many = JavaRandom(seed)
    # In parts, as frames take them: the sequence goes on where it was.
    parts = [many.pixels(n, width, height) for n in (1, 2047, 100_000, 97_952)]
    drawn = np.concatenate([np.stack(part, axis=1).ravel() for part in parts])
    assert len(drawn) == 400_000
    h = 0
    for number in drawn.tolist():
        h = (h * 31 + number) & ((1 << 64) - 1)
    assert h - (1 << 64 if h >= 1 << 63 else 0) == digest


def test_one_by_one_and_all_at_once_are_the_same() -> None:
    one, many = JavaRandom(99), JavaRandom(99)
    size = (1073741825, 1431655766)
    columns, lines = many.pixels(300, *size)
    expected = [(one.next_int(size[0]), one.next_int(size[1])) for _ in range(300)]
    assert list(zip(columns.tolist(), lines.tolist(), strict=True)) == expected
    assert one.next_int(10) == many.next_int(10)


# -- what a capture leaves ------------------------------------------------------------------------


def test_a_capture_is_a_dataset(engine: Engine, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    out = capture_dataset(
        engine, tmp_path / "deep" / "d", parameter=(2.0, 6.0), seed=7, fixed_state="All of it",
        progress=lambda done, total: seen.append((done, total)), **SMALL,
    )  # fmt: skip
    assert out == tmp_path / "deep" / "d"
    assert seen == [(i, 8) for i in range(1, 9)]
    data = open_dataset(out)
    manifest = data.manifest
    assert manifest.train.parameters == (2.0, 3.0, 4.0, 5.0, 6.0)
    assert manifest.validation.parameters == (2.509288, 3.8426213, 5.175955)
    assert engine.drawn == [float(np.float32(p)) for s in ("train", "validation")
                            for p in getattr(manifest, s).parameters]  # fmt: skip
    random = JavaRandom(7)
    for rows, parameters in (
        (data.train, manifest.train.parameters),
        (data.validation, manifest.validation.parameters),
    ):
        for i, at in enumerate(parameters):
            part = rows[i * 50 : i * 50 + 50]
            x, y = random.pixels(50, 40, 30)
            assert part[:, 0] == pytest.approx((x + 0.5) / 20 - 1, abs=1e-6)
            assert part[:, 1] == pytest.approx((y + 0.5) / 15 - 1, abs=1e-6)
            assert part[:, 2] == pytest.approx(np.full(50, (at - 2) / 2 - 1), abs=1e-6)
            assert len(np.unique(part[:, 2])) == 1
            assert part[:, 3] == pytest.approx(x + at, rel=1e-6)
            assert part[:, 4] == pytest.approx(y * 100 - at, rel=1e-6)
            assert (part[:, 5] == -0.5).all()
    assert manifest.fixed_state == "All of it"
    assert manifest.resolution == (40, 30)
    assert manifest.source_digest == engine.source_digest()
    assert manifest.extra["doublure"]["host"] == "formula"
    names = [p.name for p in sorted(out.iterdir())]
    assert names == ["dataset.json", "source-0.wgsl", "source-1.frag", "source-1.vert",
                     "train.f32", "validation.f32"]  # fmt: skip
    assert (out / "source-1.vert").read_text() == SHADERS["sky.vert"]
    assert (out / "source-0.wgsl").read_text(encoding="utf-8") == SHADERS["extra.wgsl"]


def test_the_manifest_has_the_keys_of_the_format(engine: Engine, tmp_path: Path) -> None:
    out = capture_dataset(engine, tmp_path / "d")
    data = json.loads((out / "dataset.json").read_text())
    splits = data.pop("splits")
    assert data.pop("doublure").keys() == {"version", "host", "format", "shaders"}
    assert data.pop("sourceDigest") == engine.source_digest()
    by_name = sorted(SHADERS)
    text = "".join(f"{name}\0{SHADERS[name]}\0" for name in by_name)
    assert data == {
        "schema": 1,
        "sourceKind": "captured-module",
        "sourceShaderDigest": hashlib.sha256(text.encode()).hexdigest(),
        "fixedState": "Fixed camera, geometry, textures and all other uniforms",
        "resolution": [40, 30],
        "parameterRange": [-1.0, 1.0],
        "rowFormat": "little-endian float32: x,y,t,r,g,b",
        "coordinates": "pixel centers; x right, y down; x,y,t normalized to [-1,1]",
        "color": "linear RGB, unclamped, opaque",
        "seed": 4090,
    }
    assert {name: s["rows"] for name, s in splits.items()} == {
        "train": 48 * 2048,
        "validation": 13 * 2048,
    }
    for name, split in splits.items():
        stored = (out / split["file"]).read_bytes()
        assert split["file"] == f"{name}.f32"
        assert len(stored) == split["rows"] * 24
        assert split["sha256"] == hashlib.sha256(stored).hexdigest()
    assert splits["train"]["parameters"][0] == -1.0
    assert splits["train"]["parameters"][-1] == 1.0
    assert splits["train"]["parameters"][1] == -0.9574468  # 1/47 * 2 - 1 in float32
    assert not set(splits["train"]["parameters"]) & set(splits["validation"]["parameters"])


def test_the_same_seed_gives_the_same_bytes(engine: Engine, tmp_path: Path) -> None:
    a, b, c = (
        capture_dataset(engine, tmp_path / str(i), seed=seed, **SMALL)
        for i, seed in enumerate((1, 1, 2))
    )
    same = [(a / n).read_bytes() == (b / n).read_bytes() for n in ("train.f32", "dataset.json")]
    assert same == [True, True]
    assert (a / "train.f32").read_bytes() != (c / "train.f32").read_bytes()


def test_half_floats_and_an_array_used_again_are_taken(engine: Engine, tmp_path: Path) -> None:
    target = np.empty((30, 40, 4), np.float16)

    def draw_into(_: int, image: Any) -> Any:
        target[:] = image
        return target

    engine.fault, engine.formats = draw_into, ("rgba16float",)
    data = open_dataset(capture_dataset(engine, tmp_path / "d", **SMALL))
    assert len(np.unique(data.train[:, 3])) > 40
    half = np.asarray(data.train[:, 3:]).astype(np.float16).astype(np.float32)
    assert (half == data.train[:, 3:]).all()


def test_shader_names_become_files_and_never_paths(engine: Engine, tmp_path: Path) -> None:
    engine.shaders = {"../../up.frag": "a", "/etc/x": "b", "/etc/x.txt": "c", "n": "d"}
    out = capture_dataset(engine, tmp_path / "d", **SMALL)
    assert [(p.name, p.read_text()) for p in sorted(out.glob("source*"))] == [
        ("source-0.frag", "a"), ("source-1.txt", "b"), ("source-2.txt", "c"), ("source-3.txt", "d"),
    ]  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


# -- what is refused ------------------------------------------------------------------------------

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"parameter": (1.0, 1.0)}, "parameter: expected a finite range with low < high"),
    ({"parameter": (1.0, -1.0)}, "parameter: expected a finite range"),
    ({"parameter": (0.0, math.inf)}, "parameter: expected a finite range"),
    ({"parameter": (math.nan, 1.0)}, "parameter: expected a finite range"),
    ({"parameter": (-3e38, 3e38)}, "parameter: expected a finite range"),
    ({"parameter": (0.0, 1e39)}, "parameter: expected a finite range"),
    ({"parameter": (1e6, 1e6 + 1)}, "a range that holds 61 float32 numbers"),
    ({"parameter": "ab"}, "parameter: expected two numbers"),
    ({"parameter": (1,)}, "parameter: expected two numbers"),
    ({"training_frames": 1}, "training_frames: expected a whole number in 2..512, got 1"),
    ({"training_frames": 513}, "training_frames: expected a whole number in 2..512, got 513"),
    ({"training_frames": 8.0}, "training_frames: expected a whole number in 2..512, got 8.0"),
    ({"validation_frames": 1}, "validation_frames: expected a whole number in 2..128, got 1"),
    ({"validation_frames": 129}, "validation_frames: expected a whole number in 2..128"),
    ({"pixels_per_frame": 0}, "pixels_per_frame: expected a whole number in 1..65536, got 0"),
    ({"pixels_per_frame": 65537}, "pixels_per_frame: expected a whole number in 1..65536"),
    ({"seed": 1 << 63}, "seed: expected a whole number in"),
    ({"seed": True}, "seed: expected a whole number in"),
    ({"fixed_state": None}, "fixed_state: expected text, got NoneType"),
]


@pytest.mark.parametrize(("settings", "text"), SETTINGS)
def test_settings_out_of_range_are_refused(
    engine: Engine, tmp_path: Path, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        capture_dataset(engine, tmp_path / "d", **settings)
    assert text in str(caught.value)
    assert not engine.drawn
    assert not list(tmp_path.iterdir())


HOSTS: list[tuple[dict[str, Any], str]] = [
    ({"in_frame": True}, "capture: expected to be called between frames, got a frame begun"),
    ({"formats": ()}, "formats: expected one linear RGBA16F or RGBA32F attachment"),
    ({"formats": ("rgba8unorm-srgb",)}, "got rgba8unorm-srgb"),
    ({"formats": ("rgba16float", "rgba16float")}, "got rgba16float, rgba16float"),
    ({"shaders": {}}, "shaders: expected at least one valid shader, got none"),
    ({"shaders": {"a": "b", "c": ""}}, "at least one valid shader, got no text for 'c'"),
    ({"shaders": {"a": " \n"}}, "at least one valid shader, got no text for 'a'"),
    ({"shaders": {"a": b"x"}}, "at least one valid shader, got no text for 'a'"),
    ({"width": 0}, "OfflineHost.width: expected a whole number in 1..65536, got 0"),
    ({"source_digest": lambda: "xyz"}, "source_digest(): expected lower-case hexadecimal"),
]


@pytest.mark.parametrize(("fields", "text"), HOSTS)
def test_hosts_that_cannot_be_captured_are_refused(
    engine: Engine, tmp_path: Path, fields: dict[str, Any], text: str
) -> None:
    for name, value in fields.items():
        setattr(engine, name, value)
    with pytest.raises(CaptureError) as caught:
        capture_dataset(engine, tmp_path / "d")
    assert text in str(caught.value)
    assert not engine.drawn
    assert not list(tmp_path.iterdir())


def test_a_directory_that_holds_something_is_left_alone(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(CaptureError, match="got one that is not empty; Choose a new dataset dir"):
        capture_dataset(engine, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(CaptureError, match=r"expected one that can be written, got \w+"):
        capture_dataset(engine, tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "kept"


def spoil(value: float, channel: int = 0) -> Callable[[Any], Any]:
    def change(image: Any) -> Any:
        image[3, 4, channel] = value
        return image

    return change


FRAMES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nan": (spoil(math.nan), r"Source produced NaN/Inf at parameter 0\.5: .* column 4, row 3"),
    "infinite": (spoil(-math.inf, 2), r"Source produced NaN/Inf at parameter 0\.5"),
    "nan alpha": (spoil(math.nan, 3), r"Source produced NaN/Inf at parameter 0\.5"),
    "clear": (spoil(0.998, 3), r"requires opaque output; at parameter 0\.5: expected alpha"),
    "over opaque": (spoil(1.002, 3), "requires opaque output"),
    "no alpha": (
        lambda i: i[..., :3],
        r"expected float16\|float32 \[30, 40, 4\], got float32 \[30",
    ),
    "8 bits": (lambda i: i.astype(np.uint8), r"got uint8 \[30, 40, 4\]"),
    "another size": (lambda i: i[1:], r"got float32 \[29, 40, 4\]"),
    "nothing": (lambda _: None, "got NoneType"),
}


@pytest.mark.parametrize("fault", FRAMES)
@pytest.mark.parametrize("existed", [False, True])
def test_a_frame_at_fault_leaves_nothing(
    engine: Engine, tmp_path: Path, fault: str, existed: bool
) -> None:
    change, text = FRAMES[fault]
    engine.fault = lambda frame, image: change(image) if frame == 4 else image
    if existed:
        (tmp_path / "d").mkdir()
    with pytest.raises(CaptureError, match=text):
        capture_dataset(engine, tmp_path / "d", **SMALL)
    assert len(engine.drawn) == 4
    assert list(tmp_path.rglob("*")) == ([tmp_path / "d"] if existed else [])


def test_alpha_within_a_thousandth_is_opaque(engine: Engine, tmp_path: Path) -> None:
    engine.fault = lambda _, image: spoil(1.0009, 3)(image)
    capture_dataset(engine, tmp_path / "d", **SMALL)


@pytest.mark.parametrize("frame", [1, 5, 8])
@pytest.mark.parametrize("what", ["shader", "state"])
def test_a_source_that_changes_meanwhile_is_refused(
    engine: Engine, tmp_path: Path, frame: int, what: str
) -> None:
    def reload(now: int, image: Any) -> Any:
        if now == frame and what == "shader":
            engine.shaders["sky.frag"] += "// edited"
        elif now == frame:
            engine.state["camera"] = [0.0, 2.0]
        return image

    engine.fault = reload
    with pytest.raises(CaptureError, match=f"Source {what} changed during capture; let nothing"):
        capture_dataset(engine, tmp_path / "d", **SMALL)
    assert len(engine.drawn) == frame
    assert not list(tmp_path.iterdir())


class EngineError(Exception):
    pass


@pytest.mark.parametrize("frame", range(1, 9))
@pytest.mark.parametrize("error", [EngineError("lost"), KeyboardInterrupt()])
def test_a_failure_at_any_frame_leaves_nothing(
    engine: Engine, tmp_path: Path, frame: int, error: BaseException
) -> None:
    def fail(now: int, image: Any) -> Any:
        if now == frame:
            assert not list((tmp_path / "a" / "d").glob("*.json"))
            raise error
        return image

    engine.fault = fail
    with pytest.raises(type(error)):
        capture_dataset(engine, tmp_path / "a" / "d", **SMALL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_around_the_manifest_leaves_none(
    engine: Engine, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = capture.write_manifest

    def interrupted(*given: Any) -> Path:
        if when == "after":
            write(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(capture, "write_manifest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        capture_dataset(engine, tmp_path / "d", **SMALL)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_and_leaves_nothing(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(capture.os, "fsync", full)
    with pytest.raises(CaptureError, match=r"dataset directory .*/d: .* got No space left on dev"):
        capture_dataset(engine, tmp_path / "d", **SMALL)
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_engine_is_not_blamed_on_the_directory(
    engine: Engine, tmp_path: Path
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(5, "device gone")

    engine.fault = fail
    with pytest.raises(CaptureError, match=r"OfflineHost.render\(\): got \[Errno 5\] device gone"):
        capture_dataset(engine, tmp_path / "d", **SMALL)


def test_a_file_that_appears_meanwhile_is_not_overwritten(engine: Engine, tmp_path: Path) -> None:
    def intrude(now: int, image: Any) -> Any:
        if now == 5:
            (tmp_path / "d" / "validation.f32").write_text("theirs")
        return image

    engine.fault = intrude
    with pytest.raises(CaptureError, match="got File exists"):
        capture_dataset(engine, tmp_path / "d", **SMALL)
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["validation.f32"]
    assert (tmp_path / "d" / "validation.f32").read_text() == "theirs"
