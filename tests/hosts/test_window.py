"""The window, on a virtual display: its pixels, its keys, and what is left when it closes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doublure_plugin.hosts import HostError, open_host
from doublure_plugin.hosts.window import Window, _canvas

_ROOT = Path(__file__).parent.parent.parent
on_display = [pytest.mark.gpu, pytest.mark.process]


@pytest.fixture(scope="module")
def environment(adapter: str) -> Iterator[dict[str, str]]:
    """Variables of a process that has a display of its own, 900 x 700."""
    del adapter
    if shutil.which("Xvfb") is None:
        pytest.skip("no Xvfb; run: sudo apt-get install xvfb")
    read, write = os.pipe()
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(write), "-screen", "0", "900x700x24", "-nolisten", "tcp"],
        pass_fds=[write], stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(write)
    try:
        with os.fdopen(read) as pipe:
            number = pipe.readline().strip()
        if not number:
            pytest.skip("Xvfb does not start here")
        without_wayland = {k: v for k, v in os.environ.items() if k != "WAYLAND_DISPLAY"}
        yield without_wayland | {"DISPLAY": f":{number}"}
    finally:
        server.terminate()
        server.wait(10)


def probe(what: str, environment: dict[str, str]) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.hosts.window_probe", what],
        capture_output=True, text=True, timeout=120, cwd=_ROOT, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    seen: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return seen


def test_without_a_display_or_a_package_one_line_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    if sys.platform == "linux":
        monkeypatch.delenv("DISPLAY", raising=False)
        with pytest.raises(HostError, match=r"neither DISPLAY nor .*apt-get install xvfb"):
            _canvas((64, 64), "none")
        monkeypatch.setenv("DISPLAY", ":65000")
        with pytest.raises(HostError, match=r"display that glfw can open.*:65000"):
            _canvas((64, 64), "none")
    monkeypatch.setitem(sys.modules, "glfw", None)
    with pytest.raises(HostError, match=r"expected glfw.*pip install 'doublure\[window\]'"):
        _canvas((64, 64), "none")


def test_only_the_wgpu_host_has_a_window() -> None:
    with (
        open_host("plasma", name="numpy", size=(16, 16)) as host,
        pytest.raises(HostError, match="expected the wgpu host, got the numpy host"),
    ):
        Window(host)


class TestOnADisplay:
    pytestmark = on_display

    def test_it_shows_what_the_host_draws_the_right_way_up(
        self, environment: dict[str, str]
    ) -> None:
        seen = probe("pictures", environment)
        for name in ("source", "white 4"):
            # The device's pow may round to the other side of a half: one step of 255.
            assert seen[name]["largest"] <= 1, (name, seen)
            assert seen[name]["spread"] > 20
            assert seen[name]["flipped"] > 20
        # sRGB of linear 0.5 is 188 of 255; weights are float16.
        assert all(abs(value - 188) <= 1 for value in seen["stand-in"])
        # A tap leaves the source on the screen; another one takes it away.
        for name in ("space down", "space up"):
            showing, shown = seen[name]
            assert showing == "source"
            assert shown["largest"] <= 1
        assert seen["space again"] == "standin"
        assert seen["letterbox"]["shape"] == [400, 400, 3]
        assert seen["letterbox"]["bars"] == 0
        assert all(abs(v - 188) <= 1 for edge in seen["letterbox"]["edges"] for v in edge)
        assert seen["escape"] is True
        assert seen["comparing after"] is False

    def test_it_grows_by_nothing_and_leaves_nothing(self, environment: dict[str, str]) -> None:
        seen = probe("life", environment)
        for how in ("close", "user"):
            assert seen[f"{how}: presented"] == 300
            assert seen[f"{how}: grown"] == {}
            assert seen[f"{how}: left"] == {}
        assert seen["stopped"] is True
        assert seen["still draws"] is True
