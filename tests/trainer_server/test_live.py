"""How a session's request becomes a live trainer. Imports torch; no processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from doublure_bridge import OpenSession
from doublure_trainer import live
from doublure_trainer.errors import RefusedError
from doublure_trainer.job import Options
from doublure_trainer.jobs import Assignment
from doublure_trainer.link import Task
from doublure_trainer.loop import LiveTrainer

SMALL = {"replay_rows": 1 << 12, "held_out_rows": 1 << 8}


def build(directory: Path, *, model: str = "auto", device: str = "cpu", **config: Any) -> Any:
    task = Task(
        Assignment(
            session="00" * 16, resume="11" * 16, directory=str(directory), load=True,
            persistent=False, credit=4,
        ),
        OpenSession(
            digest=bytes(32), source="s", width=8, height=8, parameter_low=0.0,
            parameter_high=1.0, model=model, config=config,
        ),
    )  # fmt: skip
    options = Options(config, persistent=False, device=device)
    return live._build(task, options)


def test_auto_races_every_family(tmp_path: Path) -> None:
    trainer = build(tmp_path, **SMALL)
    assert [spec.family for spec in trainer.models] == ["grid", "compact"]
    assert trainer.config.threads == live.default_threads()
    trainer.close()


def test_a_family_can_be_asked_for_and_the_config_has_the_last_word(tmp_path: Path) -> None:
    trainer = build(tmp_path, model="compact", threads=1, **SMALL)
    assert [spec.family for spec in trainer.models] == ["compact"]
    assert trainer.config.threads == 1
    trainer.close()
    trainer = build(tmp_path, model="compact", family="grid", **SMALL)
    assert [spec.family for spec in trainer.models] == ["grid"]
    trainer.close()


@pytest.mark.parametrize(
    ("request_", "what", "hint"),
    [
        ({"model": "grids"}, "OpenSession.model", "auto, "),
        ({"bacth": 9}, "config.bacth", "did you mean batch?"),
        ({"batch": "many"}, "config.batch", "a whole number"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, request_: dict[str, Any], what: str, hint: str
) -> None:
    with pytest.raises(RefusedError) as info:
        build(tmp_path, **request_)
    assert info.value.code == "config"
    assert info.value.what == what
    assert hint in str(info.value)


def test_a_checkpoint_of_other_models_is_refused_with_what_to_do(tmp_path: Path) -> None:
    trainer = build(tmp_path, model="grid", **SMALL)
    trainer.save()
    trainer.close()
    other = build(tmp_path, model="compact", **SMALL)
    with pytest.raises(RefusedError, match="use another directory") as info:
        other.resume()
    assert info.value.code == "open_refused"
    other.close()


def test_cuda_is_taken_when_there_and_refused_when_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [live.choose_device(x) for x in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [live.choose_device(x) for x in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(RefusedError, match="none that torch can use"):
        live.choose_device("cuda")


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (8, 4)])
def test_half_of_the_cores_stay_with_the_engine(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert live.default_threads() == threads


def test_warming_up_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(LiveTrainer, "close", lambda self: closed.append(self))
    assert callable(live.load())
    assert len(closed) == 1
