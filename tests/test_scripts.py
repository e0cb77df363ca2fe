"""scripts/setup.sh and scripts/demo, with everything that they would install or run replaced."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

_ROOT = Path(__file__).parent.parent
_RECORD = """#!/bin/sh
echo "$(basename "$0") in $PWD: $*" >>"{log}"
"""
_START = """#!/bin/sh
echo "doublure in $PWD: $*" >>"{log}"
echo "started $DOUBLURE_STARTED" >>"{log}"
"""
_DRIVERS = ("usr/share/vulkan/icd.d", "etc/vulkan/icd.d")


class Machine:
    """A folder with a made-up environment, and commands that only write down their use."""

    def __init__(self, folder: Path) -> None:
        self.venv = folder / "environment"
        self.log = folder / "log"
        self.commands = folder / "commands"
        for place, names in ((self.venv / "bin", ["python"]), (self.commands, ["apt-get", "sudo"])):
            place.mkdir(parents=True)
            for name in names:
                self._write(place / name, _RECORD)
        self._write(self.venv / "bin" / "doublure", _START)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text.format(log=self.log))
        path.chmod(0o755)

    def demo(self, *words: str, cwd: Path, venv: str | None = None) -> list[str]:
        """Run scripts/demo; the lines of the log."""
        environment = dict(os.environ)
        environment.pop("DOUBLURE_EXTRAS", None)
        environment["PATH"] = f"{self.commands}{os.pathsep}{environment['PATH']}"
        environment["DOUBLURE_VENV"] = venv or str(self.venv)
        done = subprocess.run(
            [_ROOT / "scripts" / "demo", *words],
            cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("venv", [None, "../environment"])
def test_the_environment_may_be_elsewhere(
    machine: Machine, tmp_path: Path, venv: str | None
) -> None:
    """An absolute path, and one relative to where the command was given."""
    cwd = tmp_path / "somewhere"
    cwd.mkdir()
    log = machine.demo("--seconds", "8", cwd=cwd, venv=venv)
    assert f"doublure in {cwd}: demo --seconds 8" in log
    assert (machine.venv / ".doublure-installed").is_file()


def test_a_second_run_installs_nothing(machine: Machine, tmp_path: Path) -> None:
    machine.demo(cwd=tmp_path)
    machine.log.unlink()
    log = machine.demo(cwd=tmp_path)
    assert not any("python" in line and "install" in line for line in log)


def test_system_packages_only_where_no_driver_is(machine: Machine, tmp_path: Path) -> None:
    """One of two folders is enough for a driver to be there."""
    there = any(list(Path("/", folder).glob("*.json")) for folder in _DRIVERS)
    log = machine.demo(cwd=tmp_path)
    assert any("apt-get" in line for line in log) is not there


@pytest.mark.skipif(not Path("/proc/uptime").exists(), reason="the clock is /proc/uptime")
def test_installing_does_not_count_as_starting(machine: Machine, tmp_path: Path) -> None:
    """The demo measures from here on: not before the environment was there."""
    log = machine.demo(cwd=tmp_path)
    started = next(line for line in log if line.startswith("started")).split()[1]
    installed = (machine.venv / ".doublure-installed").stat().st_mtime
    booted = float(Path("/proc/uptime").read_text().split()[0])
    age_of_stamp = float(subprocess.check_output(["date", "+%s.%N"])) - installed
    assert booted - float(started) <= age_of_stamp + 0.05
