"""What only a device can get wrong: shaders, versions, memory, waiting."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
from doublure_bridge.models import CompactSpec, GridSpec, ModelSpec
from doublure_plugin.errors import NondeterministicSourceError
from doublure_plugin.evaluate import Evaluator
from doublure_plugin.hosts import HostError
from doublure_plugin.hosts import rows as rows_module
from doublure_plugin.hosts import standin as standin_module
from doublure_plugin.hosts.standin_shader import (
    GPU_STYLE,
    MAX_UNROLLED_MACS,
    SOFTWARE_STYLE,
    Style,
)
from doublure_plugin.hosts.wgpu_host import WgpuHost
from doublure_plugin.scenes import SCENES

from .fakes import COMPACT, GRID, FakeSession, constant_weights, weights
from .test_host_contract import MAX_ERROR, MEAN_ERROR, run, run_until

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("adapter")]

SIZE = (50, 30)  # no multiple of the workgroup, nor of a row's copy alignment
NOISY = replace(
    SCENES["plasma"],
    name="noisy",
    wgsl="""
fn scene_color(p: vec2f, t: f32) -> vec3f {
    return vec3f(0.5 + 0.01 * sin(p.x * 40.0 + f32(source_frame.index) * 1.7 + t));
}""",
)
POISONED = replace(
    SCENES["plasma"],
    name="poisoned",
    wgsl="""
fn scene_color(p: vec2f, t: f32) -> vec3f {
    return vec3f(0.5, 0.5, 1.0 / (abs(p.x) - abs(p.x) + 0.0 * t));
}""",
)


def small_host(scene: Any = None, **settings: Any) -> WgpuHost:
    return WgpuHost(scene or SCENES["plasma"], size=SIZE, rows_per_capture=256, **settings)


@pytest.mark.parametrize("style", [GPU_STYLE, SOFTWARE_STYLE], ids=["gpu style", "software style"])
@pytest.mark.parametrize(
    "spec",
    [
        GRID,
        COMPACT,
        GridSpec(xy=(1, 3), xt=(2, 1), yt=(1, 1), volume=(1, 2, 1), hidden=6, layers=1),
        CompactSpec(hidden=5, layers=1),
    ],
    ids=["grid", "compact", "tiny grid", "tiny compact"],
)
def test_both_shader_styles_draw_the_specification(
    spec: ModelSpec, style: Style, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standin_module, "style_for", lambda *_, **__: style)
    assert_draws(spec)


@pytest.mark.parametrize(
    "spec",
    [CompactSpec(hidden=48, layers=3), replace(GRID, hidden=50, layers=3)],
    ids=["compact", "grid"],
)
def test_large_networks_are_drawn_by_loops(spec: ModelSpec) -> None:
    assert spec.macs > MAX_UNROLLED_MACS
    assert_draws(spec)


def assert_draws(spec: ModelSpec) -> None:
    w = weights(spec, seed=9)
    if spec.hidden > 40:  # keep a wide network within the target's range
        for name in w.tensors:
            w.tensors[name] *= w.tensors[name].dtype.type(0.4)
    with small_host() as host:
        session = FakeSession(queue=[w])
        host.attach(session)
        run_until(host, lambda: session.applied_versions or session.rejections)
        assert session.rejections == []
        for t in (0.0, 3.3, 10.0):
            wanted = Evaluator(spec, w.tensors).image(*SIZE, host.scene.normalise(t))
            error = np.abs(host.read_standin(t) - wanted) / (1.0 + np.abs(wanted))
            assert error.max() < MAX_ERROR
            assert error.mean() < MEAN_ERROR


def test_no_frame_mixes_two_versions() -> None:
    with small_host() as host:
        session = FakeSession(model_specs=(GRID,))
        host.attach(session)
        session.queue.append(constant_weights(GRID, 0, 0.5))
        run_until(host, lambda: session.applied_versions)
        for version in range(1, 40):
            session.queue.append(constant_weights(GRID, version, 0.25 * (1 + version % 3)))
            run(host, 1)
            shown = host.read_shown()
            assert np.unique(shown).size == 1
            assert shown[0, 0, 0] == pytest.approx(0.25 * (1 + version % 3), rel=1e-3)


def test_a_thousand_swaps_compile_nothing_and_leave_nothing() -> None:
    import wgpu

    def live() -> dict[str, int]:
        counts = wgpu.diagnostics.object_counts.get_dict()
        return {name: counts[name]["count"] for name in counts if name != "CommandBuffer"}

    pool = [weights(spec, seed=s) for s in range(4) for spec in (GRID, COMPACT)]
    with small_host() as host:
        session = FakeSession(model_specs=(GRID, COMPACT))
        host.attach(session)
        process = psutil.Process()

        def swap(count: int, start: int) -> None:
            for version in range(start, start + count):
                session.queue.append(replace(pool[version % len(pool)], version=version))
                run(host, 1)
                session.rows.clear()  # the recorder's memory is not the host's

        swap(100, 1)
        run_until(host, lambda: session.applied_versions[-1:] == [100])
        before, compiles, resident = live(), host.stats.shader_compiles, process.memory_info().rss
        swap(1000, 101)
        run_until(host, lambda: session.applied_versions[-1] == 1100)
        assert host.stats.shader_compiles == compiles
        assert len(session.applied_versions) >= 1098  # the first ones waited for the self-test
        grown = {k: n - before[k] for k, n in live().items() if n > before[k] + 2}
        assert grown == {}
        # An allocator's noise; a leaked 24 x 20 plane a swap alone would be 3.8 MB.
        assert process.memory_info().rss - resident < 3_000_000


def test_a_device_that_draws_zeros_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = standin_module.pack_network
    monkeypatch.setattr(standin_module, "pack_network", lambda s, t: 0.0 * pack(s, t))
    with small_host() as host:
        session = FakeSession(queue=[weights(GRID, 1)])
        host.attach(session)
        run_until(host, lambda: session.rejections)
        assert host.showing == "source"
        assert "self-test: the device draws other colours (all zero)" in session.rejections[0][1]
        assert session.applied_versions == []
        assert host.stats.rejected == 1
        # The next weights are tested anew, and drawn if they pass.
        monkeypatch.setattr(standin_module, "pack_network", pack)
        session.queue.append(weights(GRID, 2))
        run_until(host, lambda: session.applied_versions)
        assert session.applied_versions == [2]


def test_weights_that_arrive_during_the_self_test_follow_it() -> None:
    with small_host() as host:
        session = FakeSession(queue=[weights(COMPACT, v, seed=v) for v in (1, 2, 3)])
        host.attach(session)
        run_until(host, lambda: session.applied_versions[-1:] == [3])
        last = weights(COMPACT, 3, seed=3)
        wanted = Evaluator(COMPACT, last.tensors).image(*SIZE, host.scene.normalise(1.0))
        assert (np.abs(host.read_standin(1.0) - wanted) / (1 + np.abs(wanted))).mean() < MEAN_ERROR


def test_a_source_with_noise_by_frame_is_refused() -> None:
    with small_host(NOISY) as host, pytest.raises(NondeterministicSourceError) as caught:
        host.check_determinism()
    text = str(caught.value)
    assert text.startswith("source noisy: expected the same image whenever time is 3.7")
    assert "relative difference of up to 0.0" in text
    with small_host() as host:
        host.check_determinism()


def test_non_finite_samples_are_counted_and_never_sent(caplog: pytest.LogCaptureFixture) -> None:
    with small_host(POISONED) as host:
        session = FakeSession()
        host.attach(session)
        run_until(host, lambda: host.stats.nonfinite)
        run(host, 3)
        assert session.rows == []
        assert host.stats.refused_rows % 256 == 0
        assert host.stats.rows == 0
        text = "poisoned drew 256 non-finite of 256 samples; such captures are not sent"
        assert sum(text in r.getMessage() for r in caplog.records) == 1


def test_a_readback_that_never_comes_costs_captures_not_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows_module, "is_done", lambda _: False)
    with small_host() as host:
        session = FakeSession()
        host.attach(session)
        run(host, 8)
        assert host.stats.frames == 8
        assert host.stats.captures == 3
        assert host.stats.capture_skipped == 5
        assert session.rows == []
        monkeypatch.undo()
        run_until(host, lambda: len(session.rows) >= 4)


def test_a_frame_does_not_wait_for_the_device() -> None:
    # 1024 x 1024 raymarched pixels take lavapipe some 100 ms; `frame` must come back long before,
    # saying that it drew nothing. A device fast enough never to be busy passes as well.
    with WgpuHost(SCENES["sdf"], size=(1024, 1024)) as host:
        session = FakeSession()
        host.attach(session)
        host.read_source(0.0)
        run(host, 2)
        device_ms = host.measure(repeats=3).source_frame_ms
        run(host, 1)
        held = []
        deadline = time.monotonic() + 30
        while len(held) < 200 and time.monotonic() < deadline:
            began = time.perf_counter()
            host.frame(1.0)
            held.append((time.perf_counter() - began) * 1e3)
            time.sleep(0.0005)
        assert np.median(held) < max(0.5 * device_ms, 2.0)


def test_a_scene_that_does_not_compile_is_named() -> None:
    broken = replace(SCENES["plasma"], name="broken", wgsl="fn scene_color(p: vec2f) {}")
    with pytest.raises(HostError, match="source broken"):
        small_host(broken)


def test_wrong_device_share_is_refused() -> None:
    with pytest.raises(HostError, match=r"device_share: expected over 0 and at most 1, got 1\.5"):
        small_host(device_share=1.5)
