"""What every host does for a session, on NumPy and on wgpu alike."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from doublure_plugin.evaluate import Evaluator
from doublure_plugin.hosts import Host, HostError, Timing, open_host
from doublure_plugin.hosts.sampling import sample_pixels
from doublure_plugin.scenes import SCENES

from .fakes import COMPACT, GRID, BrokenSession, FakeSession, FakeWeights, weights

SIZE = (48, 32)

# A float16 target rounds to 5e-4, and a GPU's sampler has 8 bits of texel weight where lavapipe's
# is float32. Between the neighbours of random textures that shows: mean 2e-3 on an NVIDIA H200,
# 1e-4 on lavapipe. A wrong axis or texture is off by tenths.
MEAN_ERROR = 5e-3
MAX_ERROR = 6e-2
Open = Callable[..., Host]


@pytest.fixture(params=["numpy", pytest.param("wgpu", marks=pytest.mark.gpu)])
def opener(request: pytest.FixtureRequest) -> Iterator[Open]:
    name = request.param
    if name == "wgpu":
        request.getfixturevalue("adapter")
    hosts: list[Host] = []

    def open_one(scene: Any = "plasma", **settings: Any) -> Host:
        host = open_host(scene, name=name, **{"size": SIZE, "rows_per_capture": 512, **settings})
        hosts.append(host)
        return host

    yield open_one
    for host in hosts:
        host.close()
        host.close()


class RaisingSession(FakeSession):
    def capture_rows(self, rows: Any) -> bool:
        raise OverflowError(f"no room for {len(rows)} rows")


def run(host: Host, frames: int, t: float = 3.0) -> None:
    """Draw exactly `frames` frames, however long the device is busy between them."""
    deadline = time.monotonic() + 60.0
    for _ in range(frames):
        while not host.frame(t):
            assert time.monotonic() < deadline, "the device stays busy"
            time.sleep(0.001)
        time.sleep(0.001)


def run_until(host: Host, done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60.0
    while not done():
        assert time.monotonic() < deadline, "it never happened"
        run(host, 1)


def test_rows_are_the_source_at_the_sampled_pixels(opener: Open) -> None:
    host = opener(seed=7)
    session = FakeSession()
    host.attach(session)
    run_until(host, lambda: len(session.rows) >= 3)
    for index, rows in enumerate(session.rows[:3]):
        assert rows.dtype == np.float32
        assert rows.shape == (512, 6)
        columns, lines = sample_pixels(512, *SIZE, index=index, seed=7)
        np.testing.assert_allclose(rows[:, 0], (2 * columns + 1.0) / SIZE[0] - 1, atol=1e-6)
        np.testing.assert_allclose(rows[:, 1], (2 * lines + 1.0) / SIZE[1] - 1, atol=1e-6)
        np.testing.assert_allclose(rows[:, 2], host.scene.normalise(3.0), atol=1e-6)
        wanted = host.scene.evaluate(rows[:, 0], rows[:, 1], np.float32(3.0))
        # float16 target: 2^-11 of the value.
        np.testing.assert_allclose(rows[:, 3:], wanted, rtol=1e-3, atol=1e-3)
    assert not np.array_equal(session.rows[0][:, :2], session.rows[1][:, :2])
    assert host.stats.rows == 512 * len(session.rows)


def test_sampling_is_uniform() -> None:
    counts = np.zeros((30, 50))
    for index in range(200):
        columns, lines = sample_pixels(4096, 50, 30, index=index, seed=1)
        np.add.at(counts, (lines, columns), 1)
    expected = 200 * 4096 / 1500
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # 1499 degrees of freedom: mean 1499, standard deviation 55; five of them either way.
    assert 1225 < chi_square < 1775


@pytest.mark.parametrize("spec", [GRID, COMPACT], ids=["grid", "compact"])
def test_source_until_the_first_weights_then_the_stand_in(opener: Open, spec: Any) -> None:
    host = opener()
    session = FakeSession(model_specs=(spec,))
    host.attach(session)
    run(host, 3)
    assert host.showing == "source"
    with pytest.raises(HostError, match="expected weights that were swapped in, got none yet"):
        host.read_standin(3.0)

    first = weights(spec, 1)
    session.queue.append(first)
    run_until(host, lambda: session.applied_versions)
    assert session.applied_versions == [1]
    assert host.showing == "standin"
    wanted = Evaluator(spec, first.tensors).image(*SIZE, host.scene.normalise(3.0))
    error = np.abs(host.read_standin(3.0) - wanted) / (1.0 + np.abs(wanted))
    assert error.max() < MAX_ERROR
    assert error.mean() < MEAN_ERROR

    before = len(session.rows)
    run_until(host, lambda: len(session.rows) > before + 2)  # the source is still captured
    host.show_source()
    run(host, 1)
    assert host.showing == "source"


def test_reload_is_drawn_in_the_frame_that_polls_it(opener: Open) -> None:
    host = opener()
    session = FakeSession(model_specs=(GRID, COMPACT))
    host.attach(session)
    for spec in (GRID, COMPACT):
        session.queue.append(weights(spec, 1))
        seen = len(session.applied_versions)
        run_until(host, lambda seen=seen: len(session.applied_versions) > seen)
    compiles = host.stats.shader_compiles
    for version, spec in enumerate([GRID, COMPACT, COMPACT, GRID], start=2):
        new = weights(spec, version, seed=version)
        session.queue.append(new)
        run(host, 1)
        assert session.applied_versions[-1] == version
        if host.name == "wgpu":
            wanted = Evaluator(spec, new.tensors).image(*SIZE, host.scene.normalise(3.0))
            shown = host.read_shown()
            assert (np.abs(shown - wanted) / (1.0 + np.abs(wanted))).mean() < MEAN_ERROR
    assert host.stats.version == 5
    assert host.stats.shader_compiles == compiles


def test_capture_may_sweep_while_the_stand_in_is_shown(opener: Open) -> None:
    host = opener()
    session = FakeSession()
    host.attach(session)
    run(host, 1)
    host.frame(3.0, capture_t=8.0)  # the source is on the screen: its own t is captured
    session.queue.append(weights(COMPACT))
    run_until(host, lambda: session.applied_versions)
    run(host, 3)
    session.rows.clear()
    deadline = time.monotonic() + 30
    while not any(rows[0, 2] == np.float32(0.6) for rows in session.rows):
        assert time.monotonic() < deadline
        host.frame(3.0, capture_t=8.0)
        time.sleep(0.001)
    swept = next(rows for rows in session.rows if rows[0, 2] == np.float32(0.6))
    wanted = host.scene.evaluate(swept[:, 0], swept[:, 1], np.float32(8.0))
    np.testing.assert_allclose(swept[:, 3:], wanted, rtol=1e-3, atol=1e-3)


def test_wrong_tensors_are_rejected_and_the_last_good_ones_kept(opener: Open) -> None:
    host = opener()
    session = FakeSession()
    host.attach(session)
    session.queue.append(weights(GRID, 1))
    run_until(host, lambda: session.applied_versions)
    bad = weights(GRID, 2)
    bad.tensors["plane.xt"] = bad.tensors["plane.xt"][:-1]
    session.queue.append(bad)
    run(host, 2)
    assert session.rejections[0][0] == 2
    assert "tensors.plane.xt: expected float16 [6, 20, 4]" in session.rejections[0][1]
    assert session.applied_versions == [1]
    assert host.stats.version == 1
    assert host.showing == "standin"


def test_a_broken_session_never_reaches_the_engine(
    opener: Open, caplog: pytest.LogCaptureFixture
) -> None:
    host = opener()
    host.attach(BrokenSession())  # type: ignore[arg-type]
    run(host, 5)
    assert host.stats.frames == 5
    assert host.stats.errors >= 10
    assert sum("poll is broken" in r.getMessage() for r in caplog.records) == 1

    host.attach(FakeSession())
    run(host, 3)
    host.attach(RaisingSession())
    run_until(host, lambda: any("capture_rows" in r.getMessage() for r in caplog.records))
    assert host.stats.dropped_rows > 0


def test_nothing_is_captured_for_a_session_that_wants_none(opener: Open) -> None:
    host = opener()
    session = FakeSession(wants_frames=False)
    host.attach(session)
    run(host, 4)
    assert host.stats.captures == 0
    host.attach(None)
    run(host, 2)
    assert host.stats.frames == 6


def test_capture_rate_is_limited(opener: Open) -> None:
    host = opener(capture_fps=0.001)
    host.attach(FakeSession())
    run(host, 5)
    assert host.stats.captures == 1


def test_measure_gives_a_verdict(opener: Open) -> None:
    host = opener()
    timing = host.measure(repeats=3)
    assert timing.source_frame_ms > 0
    assert timing.worth_it is None
    session = FakeSession()
    host.attach(session)
    session.queue.append(weights(COMPACT))
    run_until(host, lambda: session.applied_versions)
    timing = host.measure(repeats=3)
    assert timing.standin_frame_ms is not None
    assert timing.standin_frame_ms > 0
    assert timing.worth_it == (timing.standin_frame_ms < timing.source_frame_ms)


def test_verdicts() -> None:
    assert Timing(2.0, 4.0, "wall clock").verdict.startswith("not worth it")
    assert "4.0 times cheaper" in Timing(8.0, 2.0, "wall clock").verdict


def test_closed_hosts_say_so(opener: Open) -> None:
    host = opener()
    host.close()
    with pytest.raises(HostError, match="expected an open host, got a closed one"):
        host.frame(1.0)


def test_description_names_shader_and_state(opener: Open) -> None:
    description = opener().source_description()
    assert "fn scene_color" in description["wgsl"]
    assert description["size"] == "48x32"
    assert all(isinstance(v, str) for v in description.values())
    assert opener("fbm").source_description() != description


def test_auto_falls_back_to_numpy_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    import doublure_plugin.hosts.wgpu_host as module

    def refuse() -> None:
        raise HostError("wgpu adapter", expected="one adapter", got="none")

    monkeypatch.setattr(module, "Gpu", refuse)
    with open_host("edges", size=SIZE) as host:
        assert host.name == "numpy"
        assert host.reason == "no usable GPU adapter: wgpu adapter: expected one adapter, got none"
    with pytest.raises(HostError, match="wgpu adapter: expected one adapter, got none"):
        open_host("edges", name="wgpu", size=SIZE)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(HostError, match=r"scene: expected one of plasma, fbm, .* got 'plasmo'"):
        open_host("plasmo")
    with pytest.raises(HostError, match="host: expected one of auto, wgpu, numpy, got 'vulkan'"):
        open_host("plasma", name="vulkan")
    with pytest.raises(HostError, match="size: expected width and height"):
        open_host("plasma", name="numpy", size=(0, 5))
    with pytest.raises(HostError, match="device_share"):
        open_host(SCENES["plasma"], name="numpy", device_share=0.0)


def test_numpy_host_rejects_weights_that_miss_their_probes() -> None:
    with open_host("plasma", name="numpy", size=SIZE) as host:
        session = FakeSession()
        host.attach(session)
        good = weights(GRID, 1)
        session.queue.append(
            FakeWeights(1, GRID, good.tensors, (good.probes[0], 0 * good.probes[1]))
        )
        run(host, 2)
        assert host.showing == "source"
        assert "self-test: other colours at the golden probes" in session.rejections[0][1]


def test_importing_hosts_opens_nothing() -> None:
    code = "import sys, doublure_plugin.hosts; print('wgpu' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"
