"""The size rule of `device="auto"`, and what a calibration makes of it."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doublure_kernels import Scene, calibrate, devices, errors, explain, policy, prefers_gpu
from doublure_kernels.calibrate import Calibration, Measured
from doublure_kernels.costs import Model


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Of a machine that nobody calibrated."""
    monkeypatch.setattr(policy, "_cores", lambda: 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    policy.forget_calibration()
    yield
    policy.forget_calibration()


class Card:
    """A GPU backend, or the processor's, that only says what it is."""

    kind, discrete = "discrete", True

    def __init__(self, name: str, adapter: str | None) -> None:
        self.name, self.adapter = name, adapter

    def close(self) -> None:
        """Nothing to free."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Stand-ins for the CPU and both GPUs; the names of those opened."""
    names: list[str] = []

    def opener(name: str) -> Any:
        def opens() -> Card:
            names.append(name)
            return Card(name, None if name == "cpu" else f"A {name} card")

        return opens

    devices.shutdown()
    monkeypatch.setattr(calibrate, "_cuda_identity", lambda: ("GPU-1", "driver 1"))
    for name in ("cpu", *devices.GPUS):
        monkeypatch.setitem(devices._OPENERS, name, opener(name))
    yield names
    devices.shutdown()


def lack(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def refuse(name: str) -> None:
        raise errors.DeviceError(f"no {name} here")

    for name in names:
        monkeypatch.setitem(devices._OPENERS, name, lambda name=name: refuse(name))


def keep(**costs: dict[str, float]) -> None:
    """A calibration of this machine: nanoseconds `a_call` and `a_pair`, `touching` or not."""

    def model(a_call: float = 0.0, a_pair: float = 0.0, touching: float = 0.0) -> Model:
        return Model((a_call, 0.0, 0.0, a_pair, touching, 0.0))

    measured = []
    for name, cost in costs.items():
        device = {}
        if name != "cpu":
            uuid, driver = ("GPU-1", "driver 1") if name == "cuda" else ("", "")
            device = {"adapter": f"A {name} card", "uuid": uuid, "driver": driver}
        measured.append(Measured(name, "cpu", device, model(**cost), (), 0.0))
    made = Calibration("2026-01-01T00:00:00+00:00", calibrate.machine(), tuple(measured), 1.0)
    calibrate.save(made)
    policy.forget_calibration()


def auto(batch: int = 1, triangles: int = 1, pixels: int = 1, **more: Any) -> str:
    return policy.choose("auto", batch=batch, triangles=triangles, pixels=pixels, **more).name


def crossover() -> int:
    """The least number of triangles, at 256 x 256, for which a discrete GPU is preferred."""
    return next(t for t in range(1, 100_000) if prefers_gpu(1, t, 65536, True))


def test_nothing_to_draw_is_nothing_for_a_gpu() -> None:
    for shape in ((0, 5, 100), (5, 0, 100), (5, 100, 0)):
        assert not prefers_gpu(*shape, True)


def test_preference_turns_once_with_size() -> None:
    answers = [prefers_gpu(1, 2**k, 4096, True) for k in range(20)]
    assert answers == sorted(answers)
    assert not answers[0]
    assert answers[-1]


def test_only_the_product_counts() -> None:
    edge = crossover()
    assert prefers_gpu(edge, 1, 65536, True)
    assert not prefers_gpu(edge - 1, 1, 65536, True)


def test_the_crossover_follows_from_the_constants() -> None:
    pairs = policy.DISCRETE_NS_A_CALL / (policy.CPU_NS_A_PAIR / 2 - policy.DISCRETE_NS_A_PAIR)
    assert crossover() == int(pairs // 65536) + 1


def test_more_cores_do_more_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prefers_gpu(16, 512, 65536, True)
    monkeypatch.setattr(policy, "_cores", lambda: 64)
    assert not prefers_gpu(16, 512, 65536, True)


def test_an_integrated_gpu_is_preferred_by_its_own_constants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not prefers_gpu(16, 512, 65536, False)
    monkeypatch.setattr(policy, "INTEGRATED_NS_A_PAIR", 0.1)
    assert prefers_gpu(16, 512, 65536, False)


def test_the_kind_that_is_there_decides_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert prefers_gpu(16, 512, 65536)

    class Integrated:
        discrete = False

    monkeypatch.setattr(devices, "best_gpu", Integrated)
    assert not prefers_gpu(16, 512, 65536)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(errors.SettingError) as caught:
        prefers_gpu(1, -2, 5)
    assert str(caught.value) == "prefers_gpu: expected triangles of 0 or more, got -2"


def test_choosing_an_unknown_device_is_refused() -> None:
    with pytest.raises(errors.DeviceError, match='did you mean "auto"'):
        policy.choose("autto", batch=1, triangles=1, pixels=1)


@pytest.mark.usefixtures("opened")
def test_a_calibration_turns_the_estimate_round() -> None:
    large = {"batch": 16, "triangles": 512, "pixels": 65536}
    assert auto(**large) == "cuda"
    assert auto(triangles=8) == "cpu"
    keep(cpu={"a_call": 10.0}, cuda={"a_call": 20.0}, vulkan={"a_call": 30.0})
    assert auto(**large) == "cpu"
    keep(cpu={"a_call": 30.0}, cuda={"a_call": 20.0}, vulkan={"a_call": 10.0})
    assert auto(**large) == "vulkan"
    assert auto(triangles=8) == "vulkan"
    assert auto(triangles=8, double=True) == "cpu"


@pytest.mark.usefixtures("opened")
def test_a_calibration_decides_for_prefers_gpu_but_not_for_a_kind_that_is_given() -> None:
    assert not prefers_gpu(1, 8, 64)
    keep(cpu={"a_call": 30.0}, cuda={"a_call": 20.0})
    assert prefers_gpu(1, 8, 64)
    assert not prefers_gpu(1, 8, 64, True)


def test_what_is_known_to_be_slow_is_not_opened(opened: list[str]) -> None:
    keep(cpu={"a_call": 1000.0}, cuda={"a_call": 500.0}, vulkan={"a_call": 2000.0})
    assert auto(triangles=8) == "cuda"
    assert opened == ["cuda"]


def test_a_gpu_that_cannot_be_opened_leaves_the_call_to_the_next(
    opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(cpu={"a_call": 1e6}, cuda={"a_call": 500.0}, vulkan={"a_call": 2000.0})
    lack(monkeypatch, "cuda")
    assert auto(triangles=8) == "vulkan"
    lack(monkeypatch, "vulkan")
    devices.shutdown()
    assert auto(triangles=8) == "cpu"
    assert opened == ["vulkan", "cpu"]


@pytest.mark.usefixtures("opened")
def test_another_driver_makes_a_calibration_stale(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep(cpu={"a_call": 30.0}, cuda={"a_call": 20.0})
    monkeypatch.setattr(calibrate, "_cuda_identity", lambda: ("GPU-1", "driver 2"))
    with caplog.at_level(logging.WARNING):
        assert auto(triangles=8) == "cpu"
        assert auto(triangles=8) == "cpu"
    assert len(caplog.records) == 1, "it is said once"
    assert "another device or driver" in caplog.text
    assert "driver 2" in caplog.text
    assert "run `doublure calibrate` again" in caplog.text


@pytest.mark.usefixtures("opened")
def test_a_stale_calibration_against_the_gpu_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lack(monkeypatch, "vulkan")
    large = {"batch": 16, "triangles": 512, "pixels": 65536}
    keep(cpu={"a_pair": 0.1}, cuda={"a_call": 1e12})
    assert auto(**large) == "cpu"
    known = calibrate.load()
    assert known is not None
    stored = known.to_dict()
    stored["measured"][1]["device"]["driver"] = "driver 0"
    calibrate.save(Calibration.from_dict(stored))
    policy.forget_calibration()
    assert auto(**large) == "cuda"


@pytest.mark.usefixtures("opened")
def test_a_scene_is_looked_at_where_it_matters_how_much_of_the_image_it_covers() -> None:
    sizes = {"batch": 1, "triangles": 64, "pixels": 4096}
    pairs = 64 * 4096
    # The GPU is the quicker one from a tenth of all pairs on.
    keep(cpu={"touching": 1.0}, cuda={"a_call": 0.1 * pairs})

    def scene(side: float) -> Scene:
        params = np.zeros((1, 64, 10), np.float32)
        params[..., :6] = np.array([0.5, 0.5, 0.5 + side, 0.5, 0.5, 0.5 + side])
        return Scene(params, np.full((1, 64), 1e-4, np.float32), np.zeros((1, 3)), np.array([64]))

    assert auto(**sizes, scene=scene(0.05)) == "cpu"
    assert auto(**sizes, scene=scene(0.6)) == "cuda"
    keep(cpu={"touching": 1.0}, cuda={"a_call": 1e12})
    unread = Scene(None, None, None, None)
    assert auto(**sizes, scene=unread) == "cpu"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is damaged (JSONDecodeError"),
        ('{"format": 1, "machines": [{"made": 3}]}', "is damaged (KeyError: 'machine')"),
        ('{"format": 99}', "is of another format and ignored"),
        ("[]", "is damaged (TypeError"),
    ],
)
def test_a_damaged_calibration_is_ignored_and_said(
    text: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = calibrate.cache_file()
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert auto(triangles=8) == "cpu"
        assert auto(triangles=8) == "cpu"
    assert len(caplog.records) == 1
    assert said in caplog.text
    assert "run `doublure calibrate` again" in caplog.text


@pytest.mark.usefixtures("opened")
def test_explain_tells_what_auto_would_do_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    lack(monkeypatch, "vulkan")
    keep(cpu={"a_call": 3e6}, cuda={"a_call": 2e6})
    found = explain(1, 8, 16, 16)
    assert (found.device, found.chosen) == ("auto", "cuda")
    assert str(found).splitlines()[:4] == [
        'device="auto": cuda. It is expected to be the quickest.',
        "  cpu: 3.000 ms calibrated",
        "  cuda (A cuda card): 2.000 ms calibrated",
        "  vulkan: no vulkan here",
    ]
    assert "calibrated at 2026-01-01T00:00:00+00:00" in found.calibration
    assert [one.expected_ms for one in found.candidates] == [3.0, 2.0, None]


@pytest.mark.usefixtures("opened")
def test_explain_agrees_with_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    for lacking in ((), ("cuda",), ("cuda", "vulkan")):
        lack(monkeypatch, *lacking)
        devices.shutdown()
        for triangles in (1, 512, 8192):
            for where in ("cpu", "cuda"):
                for dtype in ("float32", np.float64):
                    double = dtype is np.float64
                    chosen = auto(8, triangles, 65536, where=where, double=double)
                    found = explain(8, triangles, 256, 256, where=where, dtype=dtype)
                    assert found.chosen == chosen
    assert found.why == "float64 goes to the CPU."
    assert explain(1, 1, 1, 1).why == "There is no GPU backend."


@pytest.mark.usefixtures("opened")
def test_explain_answers_for_devices_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explain(1, 1, 1, 1, "vulkan").chosen == "vulkan"
    assert explain(1, 1, 1, 1, "gpu").why == "The best GPU backend there is, on A cuda card."
    assert explain(1, 1, 1, 1, where="cuda").chosen == "cuda"
    devices.shutdown()
    lack(monkeypatch, "cuda", "vulkan")
    assert explain(1, 1, 1, 1, "vulkan").why == "It is not there: no vulkan here."
    assert explain(1, 1, 1, 1, "gpu").chosen is None
    assert str(explain(1, 1, 1, 1, "gpu")).startswith('device="gpu": none. There is no GPU backend')


def test_explain_refuses_what_no_call_can_be() -> None:
    with pytest.raises(errors.SettingError, match="expected height of 0 or more, got -1"):
        explain(1, 1, -1, 1)
    with pytest.raises(errors.SettingError, match="expected where of"):
        explain(1, 1, 1, 1, where="gpu")
    with pytest.raises(errors.DeviceError, match='did you mean "cuda"'):
        explain(1, 1, 1, 1, "cud")
