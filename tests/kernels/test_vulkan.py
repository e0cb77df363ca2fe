"""The Vulkan backend, on whatever device there is: choice, buffers, pieces, loss, and its layers.

That it draws right is what test_parity_*.py and test_robustness.py say of every backend.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import doublure_kernels as dk
import numpy as np
import psutil
import pytest
import torch
from doublure_kernels.devices import VULKAN_DEVICE
from doublure_kernels.errors import DeviceError, DtypeError
from doublure_kernels.gpu import cache, plan, selftest
from doublure_kernels.scene import Raster, Scene

from . import scenes
from .conftest import vulkan_is_there
from .on_devices import check_fit, in_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not vulkan_is_there(), reason="no Vulkan device can run the kernels"),
]

RASTER = Raster(70, 50)
NAMES = ("params", "sigma", "background")
LAYER = "VK_LAYER_KHRONOS_validation"


@pytest.fixture
def backend() -> Iterator[Any]:
    from doublure_kernels.gpu.vulkan.backend import VulkanBackend

    opened = VulkanBackend()
    yield opened
    opened.close()


def given(batch: int, raster: Raster = RASTER, channels: int = 3) -> Any:
    rng = np.random.default_rng(7)
    return rng.random((batch, raster.height, raster.width, channels), dtype=np.float32)


def everything(backend: Any, scene: Scene, raster: Raster = RASTER) -> list[Any]:
    """What all three calls give."""
    batch = len(scene.params)
    losses, fused = backend.fused_mse(scene, raster, given(batch, raster))
    back = backend.backward(scene, raster, given(batch, raster))
    return [
        backend.forward(scene, raster), losses,
        *(getattr(one, name) for one in (fused, back) for name in NAMES),
    ]  # fmt: skip


def same(a: list[Any], b: list[Any]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def limit(backend: Any, largest: int, scratch: int) -> None:
    """As if the device had less."""
    device = backend.device
    device.adapter = replace(device.adapter, largest=largest)
    device.scratch = scratch


# Pieces, copies, buffers.


@pytest.mark.parametrize(("scratch", "largest"), [(0, 1 << 27), (0, 20_000), (1 << 30, 30_000)])
@pytest.mark.parametrize("kind", ["small", "mixed_sigma"])
def test_a_batch_drawn_in_pieces_is_the_same(
    backend: Any, monkeypatch: pytest.MonkeyPatch, kind: str, scratch: int, largest: int
) -> None:
    scene = scenes.make(kind, batch=3)
    whole = everything(backend, scene)
    limit(backend, largest, scratch)
    regions: list[plan.Region] = []
    draw = backend._region

    def noted(*args: Any) -> None:
        regions.append(args[3])
        draw(*args)

    monkeypatch.setattr(backend, "_region", noted)
    pieces = everything(backend, scene)
    assert np.array_equal(pieces[0], whole[0])
    for piece, one in zip(pieces, whole, strict=True):
        np.testing.assert_allclose(piece, one, rtol=1e-5, atol=1e-6)
    assert len(regions) > 3 or largest == 1 << 27


def test_staged_copies_give_the_same_bits(backend: Any) -> None:
    from doublure_kernels.gpu.vulkan.backend import VulkanBackend

    with VulkanBackend(staged=True) as staged:
        assert not staged.device.direct
        for kind, batch in (("small", 1), ("mixed_sigma", 3), ("opaque", 2)):
            scene = scenes.make(kind, batch=batch)
            assert same(everything(staged, scene), everything(backend, scene))


def test_numbers_in_settings_and_in_buffers_are_the_same(backend: Any) -> None:
    """One sigma and one background for all go with the call, others through memory."""
    scene = scenes.make("small", batch=2, ragged=False)
    shape = scene.sigma.shape
    background = np.array([0.1, 0.2, 0.3], np.float32)
    short = Scene(
        scene.params,
        np.broadcast_to(np.float32(0.004), shape),
        np.broadcast_to(background, (2, 3)),
        scene.counts,
    )
    long = Scene(
        scene.params, np.full(shape, 0.004, np.float32), np.tile(background, (2, 1)), scene.counts
    )
    for a, b in zip(everything(backend, short), everything(backend, long), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_the_same_bits_from_run_to_run_and_from_threads(backend: Any) -> None:
    scene = scenes.make("small", batch=2, triangles=40)
    expected = everything(backend, scene)
    wrong: list[int] = []

    def work() -> None:
        wrong.extend(i for i in range(10) if not same(everything(backend, scene), expected))

    in_threads(work)
    assert not wrong


@pytest.mark.parametrize("staged", [False, True])
def test_buffers_grow_and_stay_and_programs_are_recorded_once(
    staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from doublure_kernels.gpu.vulkan.backend import VulkanBackend

    small, large = scenes.make("small", batch=1), scenes.make("small", batch=6, triangles=80)
    with VulkanBackend(staged=staged) as backend:
        everything(backend, small)
        buffers = backend._opened[1]
        before = buffers.allocated
        everything(backend, large)
        grown = buffers.allocated
        assert grown > before
        first = everything(backend, small)
        programs = dict(buffers._programs)
        assert len(programs) >= 3  # one a call at least

        def never(*_: Any, **__: Any) -> None:
            raise AssertionError("allocated anew")

        monkeypatch.setattr(type(backend.device), "allocate", never)
        resident = psutil.Process().memory_info().rss
        for _ in range(100):  # of three calls each
            assert same(everything(backend, small), first)
        assert psutil.Process().memory_info().rss - resident < 8 << 20  # 300 images are 12 MiB
        assert buffers.allocated == grown
        assert buffers._programs == programs  # the same objects: they do not compare by content


def test_many_shapes_keep_so_many_programs(backend: Any) -> None:
    scene = scenes.make("small", batch=1)
    for width in range(79, 0, -1):  # the widest first, since growing begins anew
        backend.forward(scene, Raster(4, width))
    assert len(backend._opened[1]._programs) == 64
    assert same([backend.forward(scene, Raster(4, 5))], [backend.forward(scene, Raster(4, 5))])


def test_nothing_to_draw(backend: Any) -> None:
    none = scenes.make("small", batch=0)
    assert backend.forward(none, RASTER).shape == (0, 70, 50, 3)
    assert backend.fused_mse(none, RASTER, given(0))[0].shape == (0,)
    empty = scenes.make("small", batch=2, triangles=0)
    losses, gradients = backend.fused_mse(empty, RASTER, given(2))
    image = np.broadcast_to(empty.background[:, None, None], (2, 70, 50, 3))
    np.testing.assert_allclose(losses, np.square(image - given(2)).mean((1, 2, 3)), rtol=1e-5)
    assert gradients.params.shape == (2, 0, 10)
    assert np.array_equal(backend.forward(empty, RASTER), image)


def test_rows_of_more_tiles_than_a_call_can_name_are_drawn_in_pieces(backend: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    params = dk.random_params(1, 20, generator=generator)
    tile = plan.tile_size(backend.device.adapter.lanes)[0]
    width = min(65_536 * tile + 40, 1 << 20)
    found = dk.rasterize(params, 1, width, 1e-3, device="vulkan")
    expected = dk.rasterize(params, 1, width, 1e-3, device="cpu")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("staged", [False, True])
def test_a_call_interrupted_while_buffers_grow_leaves_the_next_one_right(staged: bool) -> None:
    """At any line of it, one after the other."""
    from doublure_kernels.gpu.vulkan import device
    from doublure_kernels.gpu.vulkan.backend import VulkanBackend

    small, large = scenes.make("small", batch=1), scenes.make("small", batch=3, triangles=40)
    with VulkanBackend() as opened:
        expected = everything(opened, small) + everything(opened, large)
    functions = {
        one.__code__
        for one in (
            device.Buffers.reserve, device.Buffers._describe, device.Buffers._forget,
            device.Buffers.staging, device.Buffers.program, device.Program.__init__,
        )
    }  # fmt: skip
    at, reached = 0, True
    while reached:
        at += 17
        reached, count = False, 0

        def trace(frame: Any, event: str, _: Any, at: int = at) -> Any:
            nonlocal count, reached
            if frame.f_code not in functions:
                return None if event == "call" else trace
            if event == "line":
                count += 1
                if count == at:
                    reached = True
                    raise KeyboardInterrupt
            return trace

        with VulkanBackend(staged=staged) as opened:
            everything(opened, small)
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                with contextlib.suppress(KeyboardInterrupt):
                    opened.fused_mse(large, RASTER, given(3))
            finally:
                sys.settrace(before)
            assert same(everything(opened, small) + everything(opened, large), expected), at


# Which device.


def adapter(backend: Any, **changes: Any) -> Any:
    return replace(backend.device.adapter, **changes)


@pytest.mark.parametrize(
    "spelled",
    [
        lambda one: one.uuid,
        lambda one: f"{one.uuid[:8]}-{one.uuid[8:12]}-{one.uuid[12:16]}-{one.uuid[16:]}",
        lambda one: f"GPU-{one.uuid.upper()}",
        lambda one: str(one.index),
        lambda one: one.kind,
        lambda one: one.kind.upper(),
        lambda one: one.name[2:6].upper(),
    ],
)
def test_a_device_is_chosen_by(backend: Any, spelled: Any) -> None:
    from doublure_kernels.gpu.vulkan.adapters import choose

    other = adapter(backend, index=77, uuid="f" * 32, name="Ghost", kind="virtual")
    found = choose([other, backend.device.adapter], spelled(backend.device.adapter))
    assert found is backend.device.adapter


def test_the_best_usable_kind_is_taken(backend: Any) -> None:
    from doublure_kernels.gpu.vulkan.adapters import choose

    made = [
        adapter(backend, index=i, kind=kind, name=f"a {kind} device")
        for i, kind in enumerate(("cpu", "integrated", "discrete", "discrete"))
    ]
    assert choose(made).index == 2
    lame = [replace(one, lacks=("subgroup vote operations",)) for one in made[2:]]
    assert choose(made[:2] + lame).index == 1
    with pytest.raises(DeviceError, match="lack it: a discrete device: subgroup vote operations"):
        choose(made[:2] + lame, "discrete")
    with pytest.raises(DeviceError, match="expected a Vulkan device, got none"):
        choose([])


def test_the_environment_chooses(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VULKAN_DEVICE, "0")
    dk.open_device("vulkan").close()
    monkeypatch.setenv(VULKAN_DEVICE, "no such device")
    with pytest.raises(DeviceError, match=rf"\({VULKAN_DEVICE}\).*got 'no such device'") as raised:
        dk.open_device("vulkan")
    assert backend.adapter in str(raised.value)
    dk.open_device("vulkan", "0").close()  # what the call says goes first


def test_the_doctor_lists_what_there_is(backend: Any) -> None:
    from doublure_kernels import doctor
    from doublure_kernels.gpu.vulkan.diagnose import diagnose

    records = list(diagnose())
    assert any(record.get("loader", "").startswith("Vulkan 1.") for record in records)
    assert any("drivers" in record for record in records)
    (one,) = [record for record in records if record.get("verdict") == "taken"]
    assert one["uuid"] == backend.uuid
    assert backend.adapter in one["device"]
    checks = [one for one in doctor.checks() if one["name"] == "rasterizer vulkan"]
    assert any(one["status"] == "ok" and backend.adapter in one["text"] for one in checks)


def test_the_doctor_says_why_a_device_is_not_taken(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from doublure_kernels.gpu.vulkan import adapters
    from doublure_kernels.gpu.vulkan.diagnose import diagnose

    good = adapter(backend, index=0, kind="integrated")
    worse = adapter(backend, index=1, kind="cpu")
    lame = adapter(backend, index=2, kind="discrete", lacks=("subgroup vote operations",))
    monkeypatch.delenv(VULKAN_DEVICE, raising=False)
    monkeypatch.setattr(adapters, "adapters", lambda _: [good, worse, lame])
    verdicts = [one["verdict"] for one in diagnose() if "device" in one]
    assert verdicts[0] == "taken"
    assert "better kind" in verdicts[1]
    assert "it lacks subgroup vote operations" in verdicts[2]
    monkeypatch.setattr(adapters, "adapters", lambda _: [lame])
    (reason,) = [one["choice"] for one in diagnose() if "choice" in one]
    assert "subgroup vote operations" in reason


# What goes wrong.


def test_a_lost_device_is_told_of_and_opened_anew(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vulkan as vk

    scene = scenes.make("small", batch=1)
    expected = everything(backend, scene)
    engine = backend.fit_engine()
    engine.open({"params": 400})
    device = backend.device

    def lose(*_: Any) -> None:
        raise vk.VkErrorDeviceLost

    with monkeypatch.context() as patch:
        patch.setattr(type(device), "submit", lose)
        with pytest.raises(DeviceError, match="lost one"):
            backend.forward(scene, RASTER)
    assert same(everything(backend, scene), expected)
    assert backend.device is not device
    with pytest.raises(DeviceError, match="lost or closed since"):
        engine.read("params", 10)
    engine.close()


def test_a_device_that_draws_wrong_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from doublure_kernels.gpu.vulkan.device import Program

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    get = Program.get
    with monkeypatch.context() as patch:
        patch.setattr(Program, "get", lambda *args: get(*args) * np.float32(0))
        for _ in range(2):
            with pytest.raises(DeviceError, match="to draw a known scene right, got 0 instead of"):
                dk.open_device("vulkan")
    folder = tmp_path / "doublure" / "vulkan"
    assert not list(folder.glob("*.tested"))
    dk.open_device("vulkan").close()
    (kept,) = folder.glob("*.tested")
    with monkeypatch.context() as patch:
        patch.setattr(selftest, "check", lambda _: pytest.fail("tested again"))
        dk.open_device("vulkan").close()
    kept.unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))  # where nothing can be kept
    dk.open_device("vulkan").close()


def test_the_numbers_to_be_drawn_are_the_references() -> None:
    from doublure_kernels.reference import ReferenceBackend

    scene = scenes.double(selftest.scene())
    targets = selftest.targets().astype(np.float64)
    reference = ReferenceBackend()
    losses, gradients = reference.fused_mse(scene, selftest.RASTER, targets)
    images = reference.forward(scene, selftest.RASTER)
    found = selftest.numbers(images, losses, gradients.params)
    np.testing.assert_allclose(found, selftest.EXPECTED, rtol=0, atol=1e-6)
    assert np.abs(found).min() < 0.5 < np.abs(found).max()  # a device of zeros would be noticed


def test_too_little_memory_harms_no_later_call(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vulkan as vk

    small = scenes.make("small", batch=1)
    expected = everything(backend, small)
    kind = type(backend.device)
    allocate = kind.allocate

    def scarce(self: Any, size: int, **how: Any) -> Any:
        if size > 100_000:
            raise vk.VkErrorOutOfDeviceMemory
        return allocate(self, size, **how)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "allocate", scarce)
        with pytest.raises(DeviceError, match="more free memory"):
            backend.forward(small, Raster(300, 400))
        assert same(everything(backend, small), expected)
    backend.forward(small, Raster(300, 400))
    assert same(everything(backend, small), expected)


def test_what_no_piece_is_small_enough_for(backend: Any) -> None:
    limit(backend, 4096, 0)
    with pytest.raises(DeviceError, match=r"at most 0\.0 MiB.*MiB for (params|geometry)"):
        backend.forward(scenes.make("small", batch=1, triangles=200), RASTER)


def test_doubles_are_refused(backend: Any) -> None:
    with pytest.raises(DtypeError, match=r"float32.*vulkan.*float64"):
        backend.forward(scenes.double(scenes.make("small", batch=1)), RASTER)


def test_closed_is_closed() -> None:
    opened = dk.open_device("vulkan")
    opened.close()
    opened.close()
    with pytest.raises(DeviceError, match="closed"):
        opened.forward(scenes.make("small", batch=1), RASTER)


def test_an_interrupted_call_leaves_the_device_usable(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the device draws: what runs is waited for before its buffers are used again."""
    scene = scenes.make("small", batch=1)
    expected = everything(backend, scene)
    kind = type(backend.device)

    def interrupt(self: Any) -> None:
        if self._pending:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kind, "settle", interrupt)
        with pytest.raises(KeyboardInterrupt):
            backend.forward(scene, RASTER)
        assert backend.device._pending
    assert same(everything(backend, scene), expected)
    assert not backend.device._pending


def test_a_signal_gets_through_while_the_device_draws() -> None:
    """One long submission: the signal is not kept until its end, and what comes after is right."""
    code = """
import os, signal, threading, time
import doublure_kernels as dk, torch
torch.manual_seed(0)
params = dk.random_params(1, 4000)
def draw(count, size):
    return dk.rasterize(params[:, :count], size, size, 0.05, device="vulkan")
small = draw(20, 64)
begin = time.monotonic()
draw(4000, 320)
whole = time.monotonic() - begin
if whole < 0.8:
    print("too quick")
    raise SystemExit
threading.Timer(0.2 * whole, os.kill, (os.getpid(), signal.SIGINT)).start()
begin = time.monotonic()
try:
    draw(4000, 320)
    print("never came")
except KeyboardInterrupt:
    took = time.monotonic() - begin
    print("through" if took < 0.7 * whole else f"after {took:.2f} of {whole:.2f} s")
assert torch.equal(draw(20, 64), small)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "too quick":
        pytest.skip("this device draws too quickly to be interrupted")
    assert done.stdout.strip() == "through", done.stderr


# Processes.


@pytest.mark.parametrize(
    "code",
    [
        "import doublure_kernels as dk, numpy as np\n"
        "from doublure_kernels.scene import Raster, Scene\n"
        "b = dk.open_device('vulkan')\n"
        "s = Scene(np.ones((1, 2, 10), 'f4'), np.ones((1, 2), 'f4'), np.ones((1, 3), 'f4'),"
        " np.array([2]))\n"
        "b.forward(s, Raster(8, 8))\n",
        "import torch, doublure_kernels as dk\n"
        "p = dk.random_params(1, 4, ).requires_grad_()\n"
        "dk.rasterize(p, 9, 9, 0.1, device='vulkan').sum().backward()\n"
        "assert dk.last_device() == 'vulkan'\n",
    ],
)
def test_a_process_ends_cleanly_without_closing(code: str) -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stderr


def test_a_backend_of_its_own_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import doublure_kernels.devices as d\n"
        "d.open_device('vulkan').close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_opens_its_own() -> None:
    code = (
        "import os, signal, torch, doublure_kernels as dk\n"
        "torch.manual_seed(0)\n"
        "p = dk.random_params(1, 4)\n"
        "a = dk.rasterize(p, 9, 9, 0.1, device='vulkan')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(30)\n"  # one that hangs would outlive the test
        "    b = dk.rasterize(p, 9, 9, 0.1, device='vulkan')\n"
        "    os._exit(0 if torch.equal(a, b) else 3)\n"
        "_, status = os.waitpid(child, 0)\n"
        "assert status == 0, status\n"
        "assert torch.equal(a, dk.rasterize(p, 9, 9, 0.1, device='vulkan'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()


def test_opening_and_closing_leaves_nothing(backend: Any) -> None:  # noqa: ARG001
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("no /proc here")
    scene = scenes.make("small", batch=1)

    def once() -> None:
        with dk.open_device("vulkan") as opened:
            opened.forward(scene, RASTER)

    once()
    tasks = Path("/proc/self/task")  # the driver's threads too
    before = len(list(folder.iterdir())), len(list(tasks.iterdir()))
    for _ in range(5):
        once()
    assert (len(list(folder.iterdir())), len(list(tasks.iterdir()))) == before


# The cache.


def test_pipelines_are_kept_and_a_damaged_file_is_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vulkan as vk

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    scene = scenes.make("small", batch=1)
    size = vk.ffi.new("size_t *")
    with dk.open_device("vulkan") as opened:
        expected = opened.forward(scene, RASTER)
        device = opened.device
        vk.lib.vkGetPipelineCacheData(device.handle, device._cache, size, vk.ffi.NULL)
    if not size[0]:
        pytest.skip("this driver keeps nothing")
    (path,) = (tmp_path / "doublure" / "vulkan").glob("*.pipelines")
    good = path.read_bytes()
    for damage in (good[:-1] + bytes([good[-1] ^ 1]), good[:40], b""):
        path.write_bytes(damage)
        with dk.open_device("vulkan") as opened:
            assert np.array_equal(opened.forward(scene, RASTER), expected)
        assert cache.kept(path) is not None  # written anew
    with dk.open_device("vulkan") as opened:
        assert opened.device._cached > 0


def test_a_cache_tells_what_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "one"
    assert cache.kept(path) is None
    cache.keep(path, b"code")
    assert cache.kept(path) == b"code"
    path.write_bytes(path.read_bytes()[:-1])
    assert cache.kept(path) is None
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache.keep(blocked / "one", b"code")
    assert cache.kept(blocked / "one") is None
    assert [one.name for one in (tmp_path / "deep").iterdir()] == ["one"]


# A fit.


@pytest.mark.parametrize("coarse", [0.0, 1.0])
def test_a_fit_on_the_device_is_as_good_as_on_the_host(coarse: float) -> None:
    check_fit("vulkan", coarse)


def test_torch_tensors_by_name() -> None:
    params = dk.random_params(2, 20)
    targets = torch.rand(2, 40, 30, 3)
    found = dk.fused_loss(params, targets, 0.01, device="vulkan")
    assert dk.last_device() == "vulkan"
    expected = dk.fused_loss(params, targets, 0.01, device="cpu")
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-6)


# The validation layer.

VALIDATED = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import numpy as np
import vulkan as vk
from doublure_kernels import devices
from doublure_kernels.errors import DeviceError
from doublure_kernels.fit import Fit, FitSettings
from doublure_kernels.gpu.vulkan.backend import VulkanBackend
from doublure_kernels.gpu.vulkan.device import Device
from doublure_kernels.scene import Raster
from tests.kernels import scenes
from tests.kernels.test_vulkan import RASTER, everything, given, limit

for staged in (False, True):
    backend = VulkanBackend(staged=staged)
    for kind, batch in (("small", 1), ("mixed_sigma", 3), ("small", 7)):
        everything(backend, scenes.make(kind, batch=batch))
    everything(backend, scenes.make("small", batch=2, triangles=0))
    backend.forward(scenes.make("small", batch=1), Raster(33, 31, "compact", "bbox6", True))
    engine = backend.fit_engine()
    engine.open({{"params": 4000, "fit": 4000}})
    engine.write("params", np.arange(100))
    assert engine.read("params", 100)[-1] == 99
    limit(backend, 1 << 27, 0)
    everything(backend, scenes.make("small", batch=3))
    limit(backend, 20_000, 0)
    everything(backend, scenes.make("small", batch=3))
    backend.close()
allocate = Device.allocate
def scarce(self, size, **how):
    if size > 100_000:
        raise vk.VkErrorOutOfDeviceMemory
    return allocate(self, size, **how)
with VulkanBackend() as backend:
    scene = scenes.make("small", batch=1)
    everything(backend, scene)
    Device.allocate = scarce
    try:
        backend.forward(scene, Raster(300, 400))
    except DeviceError:
        backend.fused_mse(scene, RASTER, given(1))  # with the set that names what was to grow
    else:
        raise AssertionError("expected too little memory")
    Device.allocate = allocate
picture = np.random.default_rng(0).random((30, 40, 3), dtype=np.float32)
for coarse in (0.0, 1.0):
    settings = FitSettings(triangles=5, iterations=12, coarse=coarse)
    with Fit(picture, settings, device="vulkan") as fit:
        fit.step(7)
        fit.step(5)
        assert fit.device == "vulkan"
devices.shutdown()
print("done")
"""
WRONG = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import vulkan as vk
from doublure_kernels.gpu.vulkan.backend import VulkanBackend
from doublure_kernels.gpu.vulkan.device import Device
from tests.kernels import scenes
from tests.kernels.test_vulkan import everything

Device.barrier = lambda *_: None
backend = VulkanBackend()
vk.vkCreateFence(backend.device.handle, vk.VkFenceCreateInfo(flags=0x7000), None)
everything(backend, scenes.make("small", batch=2))
backend.close()
print("done")
"""


def validated(code: str) -> str:
    """What a process prints with the layer on, threads' and memory's hazards looked for too."""
    settings = {
        "VK_INSTANCE_LAYERS": LAYER,
        "VK_LAYER_ENABLES": "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("done"), done.stdout
    return done.stdout + done.stderr


def layer_is_there() -> bool:
    import vulkan as vk

    return any(one.layerName == LAYER for one in vk.vkEnumerateInstanceLayerProperties())


def test_the_validation_layer_finds_nothing() -> None:
    if not layer_is_there():
        pytest.skip(f"{LAYER} is not installed")
    wrong = validated(WRONG)  # or it might be silent for not being there
    assert "VUID-VkFenceCreateInfo-flags" in wrong
    assert "has not been destroyed" in wrong
    assert "SYNC-HAZARD" in wrong
    clean = validated(VALIDATED)
    assert "Validation Error" in wrong
    for word in ("VUID", "HAZARD", "Validation Error"):  # leaks have a name of their own
        assert word not in clean, clean


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_subgroups_of_other_sizes_draw_the_same(backend: Any, lanes: int) -> None:
    """lavapipe's subgroups are as wide as the vectors it is told to use."""
    if "llvmpipe" not in backend.adapter:
        pytest.skip(f"{backend.adapter} has subgroups of {backend.device.adapter.lanes} lanes only")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "import numpy as np\n"
        "from doublure_kernels.gpu.vulkan.backend import VulkanBackend\n"
        "from tests.kernels import scenes\n"
        "from tests.kernels.test_vulkan import everything\n"
        "with VulkanBackend() as b:\n"
        "    scene = scenes.make('mixed_sigma', batch=3, triangles=70)\n"
        "    np.savez(sys.argv[1], lanes=b.device.adapter.lanes, *everything(b, scene))\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.npz"
        settings = {"LP_NATIVE_VECTOR_WIDTH": str(32 * lanes)}
        done = subprocess.run(
            [sys.executable, "-c", code, path], env=os.environ | settings, capture_output=True
        )
        assert done.returncode == 0, done.stderr.decode()
        with np.load(path) as stored:
            found = dict(stored)
    if found.pop("lanes") != lanes:
        pytest.skip(f"this lavapipe has no subgroups of {lanes} lanes")
    expected = everything(backend, scenes.make("mixed_sigma", batch=3, triangles=70))
    for one, other in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=3e-6)
