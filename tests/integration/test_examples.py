"""The examples run as they are printed in the documentation."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.process
def test_the_minimal_host_learns_and_leaves() -> None:
    result = subprocess.run(
        [sys.executable, EXAMPLES / "minimal.py", "--seconds", "10"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert any(line.startswith("version 1: ") for line in lines)
    # The mean of the picture is about 0.4: a tenth of it says that something was learned.
    assert float(lines[-1].rsplit(" ", 1)[1]) < 0.04


def test_every_example_is_short_enough_to_read() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lengths
    assert all(length < 60 for length in lengths.values()), lengths
