"""`doublure train`'s options, in this process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from doublure_bridge.model_file import read_model
from doublure_trainer.train_command import _read_config, _settings, train
from typer.testing import CliRunner

from .data import SMALL

NONE: dict[str, Any] = dict.fromkeys(
    ("threads", "family", "preset", "budget_macs", "budget_bytes"), None
)
app = typer.Typer()
app.command()(train)


def run(*words: str) -> Any:
    return CliRunner().invoke(app, [*words, "--device", "cpu"])


def test_options_become_settings() -> None:
    settings = _settings('{"batch": 64, "threads": 2}', **{**NONE, "threads": 1, "family": "grid"})
    assert (settings.batch, settings.threads, settings.family) == (64, 1, "grid")


def test_settings_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(SMALL))
    assert _read_config(str(path)) == SMALL


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("{nonsense", "--config: expected JSON"),
        ("nowhere.json", "--config nowhere.json: expected JSON, or a file"),
        ('{"batches": 3}', r"config\.batches: expected a known setting; did you mean batch"),
        ('{"batch": 3}', r"config\.batch: expected a whole number in 16"),
        ('{"family": "gird"}', r"did you mean grid"),
    ],
)
def test_wrong_settings_say_what_is_right(config: str, text: str) -> None:
    with pytest.raises(Exception, match=text):
        _settings(config, **NONE)


def test_one_family_can_be_asked_for(dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "m"
    result = run(
        *("--dataset", str(dataset), "--out", str(out), "--steps", "300"),
        *("--family", "compact", "--seed", "4", "--config", json.dumps(SMALL)),
    )
    assert result.exit_code == 0, result.output
    assert read_model(out).spec.family == "compact"
    assert read_model(out).seed == 4
    assert re.search(r"weights of step \d+: held-out \d+\.\d\d dB, test", result.output)
    assert result.output.splitlines()[-1] == str(out / "weights.safetensors")


def test_help_names_every_option() -> None:
    text = run("--help").output
    for name in ("dataset", "out", "steps", "resume", "seed", "device", "threads", "family"):
        assert f"--{name}" in text
    for name in ("preset", "budget-macs", "budget-bytes", "config", "checkpoint-every"):
        assert f"--{name}" in text
