"""The trainer core as a job runs it: its options read, its device chosen, torch warmed up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from .checkpoint import CheckpointError
from .config import ConfigError, TrainConfig
from .errors import RefusedError
from .job import Build, Options
from .link import Task
from .loop import LiveTrainer
from .models import FAMILIES

__all__ = ["choose_device", "default_threads", "load"]


class _JobTrainer(LiveTrainer):
    """A live trainer whose unusable checkpoint is a refusal, not a crash."""

    def resume(self) -> bool:
        try:
            return super().resume()
        except CheckpointError as error:
            raise RefusedError(
                error.what,
                code="open_refused",
                expected=error.expected,
                got=error.got,
                next_step=error.next_step,
            ) from error


def load() -> Build:
    """What a warm job has done before it has a session: imports, and torch's first step."""
    # Every kernel is set up and every lazy import done on a throw-away model.
    LiveTrainer(TrainConfig(replay_rows=1 << 10, held_out_rows=1 << 8)).close()
    return _build


def _build(task: Task, options: Options) -> LiveTrainer:
    request = task.request
    settings = {"threads": default_threads(), **_family(request.model), **options.rest}
    try:
        config = TrainConfig.from_dict(settings)
    except ConfigError as error:
        raise RefusedError(
            error.what,
            code="config",
            expected=error.expected,
            got=error.got,
            next_step=error.next_step,
        ) from error
    device = choose_device(options.device)
    directory = Path(task.assignment.directory)
    return _JobTrainer(config, device=device, directory=directory, seed=options.seed)


def _family(model: str) -> dict[str, Any]:
    """The setting that stands for `OpenSession.model`."""
    if model in ("auto", ""):
        return {}
    if model not in FAMILIES:
        known = ", ".join(["auto", *FAMILIES])
        raise RefusedError(
            "OpenSession.model", code="config", expected=f"one of {known}", got=repr(model)
        )
    return {"family": model}


def choose_device(wish: str) -> str:
    """A torch device for `auto`, `cpu` or `cuda`.

    Raises:
        RefusedError: cuda was asked for, and there is none.
    """
    there = wish != "cpu" and torch.cuda.is_available()
    if wish == "cuda" and not there:
        raise RefusedError(
            "device",
            code="config",
            expected="a CUDA device",
            got="none that torch can use",
            next_step="use device auto or cpu, or install a torch with CUDA",
        )
    return "cuda" if there else "cpu"


def default_threads() -> int:
    """CPU threads for training: half of the cores, so that the engine keeps the other half."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // 2)
