"""Training on a dataset: a fixed number of steps, resumable at any instant, the best weights kept.

Everything that decides about the weights depends on the dataset, the settings and the count of
steps, and on how the machine and its libraries round. The clock only decides when checkpoints and
figures are written.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doublure_bridge.dataset import Dataset, open_dataset
from doublure_bridge.model_file import ModelFile, write_model

from ..config import TrainConfig
from ..fused import prepare
from ..gate import golden_probes
from ..loop import Candidate, LiveTrainer
from ..models.reference import evaluate
from .errors import OfflineError, StoppedError
from .frames import FrameSet, fitted, load_frames
from .measure import Measured, measure
from .report import Run, write_report
from .workplace import Workplace

__all__ = ["MAX_STEPS", "OfflineProgress", "train_offline"]

MAX_STEPS = 200_000

_SCORES = 60
_SCORE_EVERY = (10, 500)
# A score takes about as long as five steps.
_SLICE_S = 0.1
_PROGRESS_S = 0.5
_SAY_S = 5.0
_GOLDEN_POINTS = 64


@dataclass(frozen=True, slots=True)
class OfflineProgress:
    """Where an offline training stands.

    Attributes:
        step: Optimiser steps done, those of families that left the race included.
        steps: Steps in all.
        loss: Mean loss of the last few steps; None before there is one.
        held_out_psnr_db: Held-out tonemapped PSNR of the best weights so far; None before.
        eta_s: Seconds until the last step; None before the rate is known.
        state: `training`, `reporting`, `done`, `stopped` or `failed`.
        samples_per_s: Rows trained on a second.
        steps_per_s: Steps a second.
        family: The family that leads.
    """

    step: int
    steps: int
    loss: float | None
    held_out_psnr_db: float | None
    eta_s: float | None
    state: str
    samples_per_s: float = 0.0
    steps_per_s: float = 0.0
    family: str = ""

    @property
    def line(self) -> str:
        """All of it in one plain line."""
        parts = [f"step {self.step} of {self.steps}"]
        if self.held_out_psnr_db is not None:
            parts.append(f"held-out {self.held_out_psnr_db:.2f} dB")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3g}")
        parts += [self.family, f"{self.steps_per_s:.0f} steps/s"]
        if self.eta_s is not None:
            parts.append(f"{self.eta_s:.0f} s to go")
        return "  ".join(part for part in parts if part)


def train_offline(
    dataset: Path | str,
    out: Path | str,
    *,
    steps: int = 12_000,
    resume: bool = False,
    config: TrainConfig | None = None,
    device: str = "cpu",
    seed: int = 0,
    checkpoint_s: float = 5.0,
    on_progress: Callable[[OfflineProgress], None] | None = None,
    on_line: Callable[[str], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Path:
    """Learn a stand-in from a captured dataset; writes a model directory.

    Blocks. `steps` counts every optimiser step, those of each family in the race and of both
    halves of a growth's trial. Candidates are scored on held-out frames every so many steps; the
    one with the highest `Scores.merit` among those that beat a flat colour becomes the weights.

    On a CPU, with the same libraries on the same kind of processor, the result depends on nothing
    but dataset, settings and seed: killed at any instant and resumed, it is the same to the last
    bit.

    Args:
        dataset: Directory with dataset.json, train.f32 and validation.f32.
        out: Model directory; new, empty, or with `resume` the one of the same training.
        steps: 1..200000.
        resume: Go on from the checkpoint in `out`; where there is none yet, begin.
        config: Settings; by default `TrainConfig()`. Sizes of the replay follow the dataset.
        device: A torch device, or `auto`.
        checkpoint_s: Seconds between checkpoints.
        on_progress: Called about ten times a second, in this thread.
        on_line: Called with each line of training.log.
        should_stop: Asked about ten times a second; true ends training after a checkpoint.
    Returns:
        `out`, with weights.json, weights.safetensors and the report.
    Raises:
        DatasetError: The dataset is missing, damaged or of another schema.
        OfflineError: It cannot be trained on, `out` cannot be used, the disk is full, or no
            candidate was better than a flat colour.
        DivergedError: Training cannot be kept finite.
        StoppedError: `should_stop` said so; the checkpoint is written.
    """
    if type(steps) is not int or not 1 <= steps <= MAX_STEPS:
        raise OfflineError("steps", expected=f"a whole number in 1..{MAX_STEPS}", got=repr(steps))
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise OfflineError("seed", expected="a whole number from 0 up", got=repr(seed))
    config = config or TrainConfig()
    device = _device(device)
    data = open_dataset(Path(dataset), verify=True)
    frames = load_frames(data)
    settings = {
        "dataset": [data.manifest.train.sha256, data.manifest.validation.sha256],
        "steps": steps,
        "seed": seed,
        "device": device,
        "config": config.to_dict(),
    }
    out = Path(out)
    with Workplace(out, settings, resume=resume) as place:
        prepare()  # before the first step: bits depend on who makes it
        job = _Job(place, data, frames, fitted(config, frames), steps, device, seed)
        job.dataset_path = Path(dataset)
        job.checkpoint_s = checkpoint_s
        job.on_progress, job.on_line, job.should_stop = on_progress, on_line, should_stop
        try:
            job.run()
        except StoppedError:
            job.show("stopped")
            raise
        except Exception:
            job.show("failed")
            raise
        finally:
            job.trainer.close()
    return out


class _Job:
    """One training, from the checkpoint or from nothing to the report."""

    dataset_path: Path
    checkpoint_s: float
    on_progress: Callable[[OfflineProgress], None] | None = None
    on_line: Callable[[str], None] | None = None
    should_stop: Callable[[], bool] | None = None

    def __init__(
        self,
        place: Workplace,
        data: Dataset,
        frames: FrameSet,
        config: TrainConfig,
        steps: int,
        device: str,
        seed: int,
    ) -> None:
        self.place = place
        self.data = data
        self.frames = frames
        self.steps = steps
        self.seed = seed
        self.device = device
        self.score_every = min(max(steps // _SCORES, _SCORE_EVERY[0]), _SCORE_EVERY[1])
        try:
            self.trainer = LiveTrainer(
                config,
                frames.plan,
                device=device,
                directory=place.checkpoints,
                seed=seed,
                same_rows=True,
            )
        except MemoryError as error:
            rows = sum(len(frame.rows) for frame in frames.frames)
            raise OfflineError(
                "training", expected=f"memory for {rows} rows", got="too little"
            ) from error
        self._chunk = 1
        self._shown_at = -math.inf
        self._train_s = 0.0

    @property
    def step(self) -> int:
        return self.trainer.progress().step

    @property
    def best(self) -> Candidate | None:
        return self.trainer.last_published()

    def run(self) -> None:
        for frame in self.frames.frames:
            kept = self.trainer.add_rows(np.ascontiguousarray(frame.rows, dtype=np.float32))
            if kept != len(frame.rows):
                raise OfflineError(
                    f"dataset frame at {frame.parameter:g}",
                    expected="finite rows with x, y, t in [-1, 1]",
                    got=f"{len(frame.rows) - kept} others",
                )
        manifest = self.data.manifest
        if self.trainer.resume():
            self.place.resumed_at(self.step)
            self.say(f"resumed at step {self.step} of {self.steps}")
        else:
            self.place.history = []
            self.say(
                f"training on {manifest.train.rows} rows of {len(manifest.train.parameters)} "
                f"frames for {self.steps} steps on {self.device}, seed {self.seed}"
            )
        self._train()
        self.show("reporting")
        best = self.best
        if best is None:
            raise OfflineError(
                "training",
                expected="weights that are better than one flat colour",
                got=self.trainer.progress().verdict or "none",
                next_step="train for more steps, or look at the dataset",
            )
        measured = measure(best.spec, best.tensors, self.frames)
        self._write(best, measured)
        self.show("done")

    def _train(self) -> None:
        saved_at = said_at = time.monotonic()
        if self.step == 0:
            self._save()
        while (step := self.step) < self.steps:
            if self.should_stop is not None and self.should_stop():
                self._save()
                self.say(f"stopped at step {step} of {self.steps}")
                raise StoppedError(step, self.steps)
            due = min(self.steps, (step // self.score_every + 1) * self.score_every)
            report = self.trainer.train_steps(min(self._chunk, due - step))
            self._train_s += report.seconds
            # Slices short enough to notice a stop; their length has no effect on the weights.
            pace = report.seconds / max(1, report.steps)
            self._chunk = max(1, min(2 * self._chunk, round(_SLICE_S / max(pace, 1e-6))))
            if self.step == due:
                self._score()
            now = time.monotonic()
            if now - saved_at >= self.checkpoint_s:
                self._save()
                saved_at = time.monotonic()
            self.show("training")
            if now - said_at >= _SAY_S:
                said_at = now
                self.say(self._progress("training").line)
        self._save()

    def _score(self) -> None:
        """Score the weights as they are; keep them if they are the best that passed."""
        candidate = self.trainer.candidate_now()
        now = self.trainer.progress()
        best = self.best
        kept = candidate is not None and (
            best is None or candidate.scores.merit > best.scores.merit
        )
        if candidate is not None and kept:
            self.trainer.published(candidate)
        entry: dict[str, Any] = {"step": now.step, "family": now.family, "race": now.race}
        if now.candidate_scores is not None:
            scores = {**now.candidate_scores.to_dict(), "merit": now.candidate_scores.merit}
            entry |= {k: v if math.isfinite(v) else None for k, v in scores.items()}
        entry |= {"verdict": now.verdict, "kept": kept}
        self.place.history.append(entry)

    def _save(self) -> None:
        try:
            self.place.save_history()
            self.trainer.save()
        except OSError as error:
            raise OfflineError(
                f"checkpoint of step {self.step} in {self.place.checkpoints}",
                expected="a disk that takes it",
                got=error.strerror or str(error),
                next_step="free some space and go on with --resume: the checkpoint before is whole",
            ) from error

    def _write(self, best: Candidate, measured: Measured) -> None:
        """Weights first: they are whole whatever becomes of the report."""
        manifest = self.data.manifest
        points, _ = golden_probes(best.spec, best.tensors, n=_GOLDEN_POINTS, seed=self.seed)
        model = ModelFile(
            spec=best.spec,
            tensors=best.tensors,
            name=self.dataset_path.resolve().name,
            parameter=(manifest.parameter_range[0], manifest.parameter_range[1]),
            resolution=(manifest.resolution[0], manifest.resolution[1]),
            source_digest=manifest.source_digest or manifest.source_shader_digest,
            seed=self.seed,
            steps=self.steps,
            scores={
                "held_out": measured.held_out.to_dict(),
                "test": measured.test.to_dict() if measured.test is not None else None,
            },
            probes=(points, evaluate(best.spec, best.tensors, points)),
            versions=_versions(),
        )
        run = Run(
            model=model,
            best_step=best.step,
            train_seconds=self.trainer.progress().train_seconds,
            device=self.device,
            history=self.place.history,
            measured=measured,
            frames=self.frames,
        )
        try:
            write_model(self.place.directory, model)
            self.say(f"weights of step {best.step}: {_figures(measured)}")
            write_report(self.place.directory, run)
        except OSError as error:
            raise OfflineError(
                f"results in {self.place.directory}",
                expected="a disk that takes them",
                got=error.strerror or str(error),
                next_step="free some space and go on with --resume: nothing is trained again",
            ) from error
        except ImportError as error:
            # Drawn with packages that training itself does not need.
            self.say(f"no report: {error}; pip install 'doublure[trainer]'")
        else:
            self.say(f"report: {self.place.directory / 'report.html'}")

    def say(self, text: str) -> None:
        self.place.say(text)
        if self.on_line is not None:
            self.on_line(text)

    def show(self, state: str) -> None:
        """Give figures to the caller, and twice a second to progress.json."""
        progress = self._progress(state)
        now = time.monotonic()
        if state != "training" or now - self._shown_at >= _PROGRESS_S:
            self._shown_at = now
            self.place.progress(asdict(progress))
        if self.on_progress is not None:
            self.on_progress(progress)

    def _progress(self, state: str) -> OfflineProgress:
        now = self.trainer.progress()
        rate = now.steps_per_s
        return OfflineProgress(
            step=now.step,
            steps=self.steps,
            loss=_finite(now.loss),
            held_out_psnr_db=None if self.best is None else self.best.scores.psnr_db,
            eta_s=round((self.steps - now.step) / rate, 1) if rate else None,
            state=state,
            samples_per_s=round(now.samples_per_s),
            steps_per_s=round(rate, 1),
            family=now.family,
        )


def _device(name: str) -> str:
    """A device that is there.

    Raises:
        OfflineError: Unknown, or not there.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = name.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise OfflineError("device", expected="auto, cpu or cuda", got=repr(name))
    if kind == "cuda" and not torch.cuda.is_available():
        raise OfflineError(
            "device cuda", expected="a CUDA device", got="none", next_step="use --device cpu"
        )
    return name


def _versions() -> dict[str, str]:
    return {
        "doublure": version("doublure"),
        "numpy": np.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
    }


def _figures(measured: Measured) -> str:
    parts = [f"held-out {measured.held_out.psnr_db:.2f} dB"]
    if measured.test is not None:
        parts.append(f"test {measured.test.psnr_db:.2f} dB")
    return ", ".join(parts)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
