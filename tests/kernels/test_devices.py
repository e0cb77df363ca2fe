"""Opening, sharing and closing devices, and what importing the package may not do."""

import re
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doublure_kernels
import pytest
from doublure_kernels import devices, errors, policy


def run(code: str) -> str:
    """A fresh interpreter's output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Stand:
    """A backend that only notes when it is closed."""

    adapter = None

    def __init__(self, name: str, closed: list[str], adapter: str | None = None) -> None:
        self.name, self.adapter, self._closed = name, adapter, closed

    def close(self) -> None:
        self._closed.append(self.name)


@pytest.fixture(autouse=True)
def uncalibrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    policy.forget_calibration()
    yield
    policy.forget_calibration()


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Openers of stand-ins for reference and cpu; the names of those closed, in order."""
    names: list[str] = []
    devices.shutdown()
    for name in ("reference", "cpu"):
        monkeypatch.setitem(devices._OPENERS, name, lambda name=name: Stand(name, names))
    yield names
    devices.shutdown()


def add_gpu(monkeypatch: pytest.MonkeyPatch, name: str, closed: list[str], **more: Any) -> None:
    gpu = Stand(name, closed, adapter=f"A {name} card")
    vars(gpu).update(more)
    monkeypatch.setitem(devices._OPENERS, name, lambda: gpu)


def lack_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse() -> None:
        raise errors.DeviceError(f"no {name} here")

    monkeypatch.setitem(devices._OPENERS, name, refuse)


def test_importing_brings_neither_torch_nor_numba_and_opens_nothing() -> None:
    out = run(
        "import sys, atexit\n"
        "before = atexit._ncallbacks()\n"
        "import doublure_kernels as k\n"
        "from doublure_kernels import devices\n"
        "print([m for m in ('torch', 'numba') if m in sys.modules])\n"
        "print(atexit._ncallbacks() - before, devices._opened, k.last_device())\n"
        "k.rasterize\n"
        "print('torch' in sys.modules, devices._opened)\n"
    )
    assert out.splitlines() == ["[]", "0 {} None", "True {}"]


def test_without_torch_a_device_still_draws() -> None:
    out = run(
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, doublure_kernels as k\n"
        "triangles = np.array([[[-1, -1, 3, -1, -1, 3, 1, .5, 0, .5]]], np.float32)\n"
        "scene = k.Scene(triangles, np.full((1, 1), .01, np.float32),\n"
        "    np.zeros((1, 3), np.float32), np.ones(1, np.int64))\n"
        "device = k.open_device('cpu')\n"
        "print(device.forward(scene, k.Raster(4, 4))[0, 1, 1].round(3).tolist())\n"
        "device.close()\n"
        "print(k.anneal_sigma(0, 10), k.prefers_gpu(1, 1, 16))\n"
        "try: k.rasterize\n"
        "except ImportError as error: print('torch' in str(error))\n"
        "try: k.open_device('reference')\n"
        "except k.DeviceError as error: print(error)\n"
    )
    assert out.splitlines() == [
        "[0.5, 0.25, 0.0]",
        "0.02 False",
        "True",
        'device "reference": expected the package torch, got an environment without it; '
        "install doublure[kernels]",
    ]


def test_without_numba_opening_cpu_says_what_to_install() -> None:
    out = run(
        "import sys; sys.modules['numba'] = None\n"
        "import doublure_kernels as k\n"
        "try: k.open_device('cpu')\n"
        "except k.DeviceError as error: print(error)\n"
    )
    assert out.strip() == (
        'device "cpu": expected the package numba, got an environment without it; '
        "install doublure[kernels]"
    )


def test_public_names_are_sorted_and_there() -> None:
    names = doublure_kernels.__all__
    assert names == sorted(names)
    for name in names:
        assert getattr(doublure_kernels, name) is not None
    assert set(names) <= set(dir(doublure_kernels))
    assert set(errors.__all__) <= set(names)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rasterise'"):
        _ = doublure_kernels.rasterise


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_device_of_ones_own_is_apart_from_the_process_s(name: str) -> None:
    own = doublure_kernels.open_device(name)
    assert own.name == name
    assert own.adapter is None
    assert own is not devices.default(name)
    assert devices.default(name) is devices.default(name)
    own.close()
    own.close()


def test_without_the_package_vulkan_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vulkan", None)
    with pytest.raises(errors.DeviceError) as caught:
        doublure_kernels.open_device("vulkan")
    assert str(caught.value) == (
        'device "vulkan": expected the package vulkan, got an environment without it; '
        "install doublure[kernels]"
    )


def test_without_the_loader_of_vulkan_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise OSError("cannot find libvulkan.so")

    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(devices, "import_module", fail)
    with pytest.raises(errors.DeviceError) as caught:
        doublure_kernels.open_device("vulkan")
    assert str(caught.value) == (
        'device "vulkan": expected the Vulkan loader, got none (cannot find libvulkan.so); '
        "install it (Debian, Ubuntu: libvulkan1) and your GPU's driver"
    )


def test_a_choice_of_device_is_vulkan_s_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(devices, "_vulkan", asked.append)
    doublure_kernels.open_device("vulkan", "lavapipe")
    assert asked == ["lavapipe"]
    with pytest.raises(errors.DeviceError) as caught:
        doublure_kernels.open_device("cpu", "0")
    assert str(caught.value) == (
        'open_device: expected a choice of device for "vulkan" only, got \'0\' for "cpu"; '
        "leave it out"
    )


def fake_torch(
    monkeypatch: pytest.MonkeyPatch, built: str | None, there: bool, trouble: str | None = None
) -> None:
    """A torch that `devices` imports instead of the real one."""

    def init() -> None:
        if trouble:
            raise RuntimeError(trouble)

    torch = types.SimpleNamespace(
        __version__="2.11.0",
        version=types.SimpleNamespace(cuda=built),
        cuda=types.SimpleNamespace(is_available=lambda: there, init=init),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.mark.parametrize(
    ("built", "there", "bindings", "trouble", "text"),
    [
        (None, False, True, None, "expected a torch built for CUDA, got torch 2.11.0; install one"),
        ("13.0", False, True, None, "expected an NVIDIA GPU that torch 2.11.0 can use, got none"),
        ("13.0", True, False, None, "run `pip install 'cuda-bindings==13.*'`"),
        ("13.0", True, True, "cannot re-initialize", "got: cannot re-initialize; in a child"),
    ],
)
def test_what_cuda_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch,
    built: str | None,
    there: bool,
    bindings: bool,
    trouble: str | None,
    text: str,
) -> None:
    fake_torch(monkeypatch, built, there, trouble)
    monkeypatch.setattr(devices, "_there", lambda _: bindings)
    with pytest.raises(errors.DeviceError) as caught:
        doublure_kernels.open_device("cuda")
    assert str(caught.value).startswith('device "cuda": ')
    assert text in str(caught.value)


def test_a_module_whose_parent_is_missing_is_not_there() -> None:
    assert devices._there("json.decoder")
    assert not devices._there("no_such_package.bindings")
    assert not devices._there("json.no_such_module")


@pytest.mark.parametrize(
    ("name", "near"), [("gpuu", "gpu"), ("Vulcan", "vulkan"), ("CUDA", "cuda"), ("cpu ", "cpu")]
)
def test_an_unknown_device_is_told_the_nearest(name: str, near: str) -> None:
    with pytest.raises(errors.DeviceError) as caught:
        devices.check_device(name)
    assert str(caught.value) == (
        'device: expected one of "auto", "cpu", "gpu", "cuda", "vulkan", "reference", '
        f'got {name!r}; did you mean "{near}"?'
    )


def test_open_device_knows_no_aliases() -> None:
    with pytest.raises(errors.DeviceError, match="open_device: expected one of"):
        doublure_kernels.open_device("gpu")


def test_shutdown_closes_in_reverse_and_the_next_use_opens_anew(closed: list[str]) -> None:
    first = devices.default("reference")
    devices.default("cpu")
    assert doublure_kernels.shutdown()
    assert closed == ["cpu", "reference"]
    assert not doublure_kernels.shutdown()
    assert closed == ["cpu", "reference"]
    assert devices.default("reference") is not first


def test_a_failing_close_leaves_no_other_open(
    closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.default("reference")
    broken = devices.default("cpu")

    def fail() -> None:
        raise OSError("lost")

    monkeypatch.setattr(broken, "close", fail)
    with pytest.raises(OSError, match="lost"):
        devices.shutdown()
    assert closed == ["reference"]
    assert not devices.shutdown()


def test_threads_that_come_at_once_share_one(
    closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, gate = [], threading.Barrier(8)

    def open_slowly() -> Stand:
        opened.append(1)
        threading.Event().wait(0.05)
        return Stand("cpu", closed)

    monkeypatch.setitem(devices._OPENERS, "cpu", open_slowly)
    got = []

    def use() -> None:
        gate.wait()
        got.append(devices.default("cpu"))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1
    assert len(got) == 8
    assert len(set(map(id, got))) == 1


def test_it_is_closed_at_exit() -> None:
    out = run(
        "from doublure_kernels import devices\n"
        "class Own:\n"
        "    name, adapter = 'cpu', None\n"
        "    def close(self): print('closed')\n"
        "devices._OPENERS['cpu'] = Own\n"
        "devices.default('cpu')\n"
        "print('end')\n"
    )
    assert out.split() == ["end", "closed"]


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="the system has no fork")
def test_a_forked_child_opens_its_own() -> None:
    out = run(
        "import os, sys, warnings, numpy as np, doublure_kernels as k\n"
        "from doublure_kernels import devices\n"
        "warnings.simplefilter('ignore', DeprecationWarning)  # of fork beside threads\n"
        "triangles = np.array([[[-1, -1, 3, -1, -1, 3, 1, .5, 0, .5]]], np.float32)\n"
        "scene = k.Scene(np.repeat(triangles, 4, 0), np.full((4, 1), .01, np.float32),\n"
        "    np.zeros((4, 3), np.float32), np.ones(4, np.int64))\n"
        "def draw():\n"
        "    image = devices.default('cpu').forward(scene, k.Raster(64, 64))\n"
        "    devices.note_device(devices.default('cpu'))\n"
        "    return image.tobytes()\n"
        "before, parent = draw(), devices.default('cpu')\n"
        "devices._lock.acquire()  # as another thread might hold it\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    last = k.last_device()\n"
        "    same = draw() == before\n"
        "    print(last, same, devices.default('cpu') is parent, k.shutdown(), flush=True)\n"
        "    os._exit(0)\n"
        "devices._lock.release()\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "print(k.last_device(), draw() == before, devices.default('cpu') is parent)\n"
    )
    assert out.splitlines() == ["None True False True", "cpu True True"]


def test_last_device_is_the_thread_s_own_where_it_has_one(closed: list[str]) -> None:
    devices.note_device(Stand("reference", closed))
    seen = {}

    def other() -> None:
        seen["before"] = doublure_kernels.last_device()
        devices.note_device(Stand("cpu", closed))
        seen["after"] = doublure_kernels.last_device()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == {"before": "reference", "after": "cpu"}
    assert doublure_kernels.last_device() == "reference"


@pytest.mark.usefixtures("closed")
def test_without_a_gpu_there_is_no_adapter_and_gpu_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in devices.GPUS:
        lack_gpu(monkeypatch, name)
    assert doublure_kernels.adapter() is None
    with pytest.raises(errors.DeviceError) as caught:
        policy.choose("gpu", batch=1, triangles=1, pixels=1)
    text = str(caught.value)
    assert text.startswith('device "gpu": expected a GPU backend, got none (')
    assert "no cuda here; no vulkan here" in text
    assert devices.gpu_refusals() == {"cuda": "no cuda here", "vulkan": "no vulkan here"}
    assert text.endswith('use device="auto" or "cpu"')


def test_with_gpus_the_better_one_serves(
    closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lack_gpu(monkeypatch, "cuda")
    add_gpu(monkeypatch, "vulkan", closed)
    assert doublure_kernels.adapter() == "A vulkan card"
    add_gpu(monkeypatch, "cuda", closed)
    assert doublure_kernels.adapter() == "A vulkan card", "cuda was refused before"
    devices.shutdown()
    assert doublure_kernels.adapter() == "A cuda card"
    assert policy.choose("gpu", batch=1, triangles=1, pixels=1).name == "cuda"
    assert policy.choose("vulkan", batch=1, triangles=1, pixels=1).name == "vulkan"


def test_auto_goes_by_size_and_leaves_float64_to_the_cpu(
    closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "_cores", lambda: 2)
    for name in devices.GPUS:
        lack_gpu(monkeypatch, name)
    large = {"batch": 16, "triangles": 512, "pixels": 65536}
    assert policy.choose("auto", **large).name == "cpu"
    devices.shutdown()
    add_gpu(monkeypatch, "vulkan", closed)
    assert policy.choose("auto", **large).name == "vulkan"
    assert policy.choose("auto", **large, double=True).name == "cpu"
    assert policy.choose("auto", batch=1, triangles=4, pixels=256).name == "cpu"
    assert policy.choose("cpu", **large).name == "cpu"


def test_a_software_device_is_no_gpu_unless_it_is_asked_for(
    closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(devices.VULKAN_DEVICE, raising=False)
    lack_gpu(monkeypatch, "cuda")
    add_gpu(monkeypatch, "vulkan", closed, kind="cpu", discrete=False)
    assert devices.best_gpu() is None
    assert closed == ["vulkan"], "what is not used is not kept open"
    assert devices.gpu_refusals()["vulkan"] == (
        'device "vulkan": expected a GPU, got the software device A vulkan card; use '
        'device="vulkan", or set DOUBLURE_VULKAN_DEVICE before the first call (shutdown() makes '
        "the next one the first) to draw on it all the same"
    )
    assert policy.choose("auto", batch=64, triangles=4096, pixels=1 << 20).name == "cpu"
    assert policy.choose("vulkan", batch=1, triangles=1, pixels=1).name == "vulkan"
    assert devices.best_gpu() is None, "by name it is open, and still no GPU"
    devices.shutdown()
    monkeypatch.setenv(devices.VULKAN_DEVICE, "cpu")
    assert policy.choose("gpu", batch=1, triangles=1, pixels=1).name == "vulkan"


@pytest.mark.usefixtures("closed")
def test_a_small_call_opens_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    for name in devices.GPUS:
        monkeypatch.setitem(devices._OPENERS, name, lambda name=name: opened.append(name))
    assert policy.choose("auto", batch=1, triangles=4, pixels=256).name == "cpu"
    assert opened == []


def test_tensors_on_cuda_stay_there_whatever_their_size(
    closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"batch": 1, "triangles": 1, "pixels": 1}
    add_gpu(monkeypatch, "cuda", closed)
    add_gpu(monkeypatch, "vulkan", closed)
    assert policy.choose("auto", **small, where="cuda").name == "cuda"
    assert policy.choose("auto", **small, where="cuda", double=True).name == "cpu"
    devices.shutdown()
    lack_gpu(monkeypatch, "cuda")
    assert policy.choose("auto", **small, where="cuda").name == "cpu"


@pytest.mark.usefixtures("capsys")
def test_the_examples_of_the_page_run(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.shutdown()
    for name in devices.GPUS:
        lack_gpu(monkeypatch, name)
    page = Path(__file__).parents[2] / "docs" / "devices.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    devices.shutdown()
