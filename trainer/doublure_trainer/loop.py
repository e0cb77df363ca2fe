"""The live trainer: rows in on one thread, validated candidates out on another."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doublure_bridge.models import ModelSpec, model_spec_from_dict, spec_to_dict
from doublure_bridge.scores import Scores, score
from numpy.typing import NDArray

from .checkpoint import CheckpointError, Checkpoints, State
from .config import TrainConfig
from .fused import prepare
from .gate import GateLimits, constant_scores, golden_probes, judge
from .learner import DivergedError, Learner, LearnerState
from .models import build, load_tensors
from .models.grid import LEAST_VOLUME, Grid, has_coarse_planes
from .on_device import Mirror
from .race import Entrant, Race
from .replay import Replay
from .slices import HELD_OUT, TEST, TRAIN, Plan, SlicePlan

__all__ = ["Candidate", "LiveTrainer", "StepReport", "TrainerProgress"]

Tensors = dict[str, NDArray[np.generic]]

_LEAST_SCORE_ROWS = 256
_LEAST_HELD_OUT = 3  # slices; fewer say nothing about the range between them
_STALLED_S = 2.0  # training without a new held-out slice: the host's range is what it is
_HURRY_S, _HURRY_SHARE = 3.0, 0.25
# At first every quarter of a second shows: what is drawn gains 5 dB a second then.
_RATE_MEMORY = 0.9  # of the running samples/s, per train_slice
_PUBLISHED = "published."
_ERRORS = "replay.errors"


@dataclass(frozen=True, slots=True)
class Candidate:
    """Weights that have passed the gate.

    Attributes:
        family: Family of the model.
        spec: Its specification.
        tensors: Its tensors in the specification's names, order and dtypes.
        scores: Held-out scores of exactly these tensors.
        points: Golden probes' x, y, t, float32 [n, 3].
        colours: Linear RGB that any reader must find there, float32 [n, 3].
        step: The trainer's step; no two candidates share one.
        train_seconds: Seconds of training so far.
    """

    family: str
    spec: ModelSpec
    tensors: Tensors
    scores: Scores
    points: NDArray[np.float32]
    colours: NDArray[np.float32]
    step: int
    train_seconds: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one `train_slice` did.

    Attributes:
        steps: Steps done, of all families.
        samples: Rows drawn.
        seconds: Seconds it took.
        loss: Mean loss; NaN when there was no step, or no finite loss.
        rolled_back: Whether a learner went back to its last good state.
    """

    steps: int
    samples: int
    seconds: float
    loss: float
    rolled_back: bool


@dataclass(frozen=True, slots=True)
class TrainerProgress:
    """Where training stands. Scores are held-out ones; None until there are any."""

    step: int
    samples: int
    samples_per_s: float
    steps_per_s: float
    loss: float
    train_seconds: float
    family: str
    race: str
    candidate_scores: Scores | None
    published_scores: Scores | None
    rows_seen: int
    rows_kept: int
    rows_rejected: int
    coverage: float
    rollbacks: int
    published: int
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data; numbers that are not finite become None."""
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in asdict(self).items()
        }


class _Scorer:
    """Evaluates stored tensors: a module of its own, so that training's is never touched."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self.module = build(spec).to(device)
        self._device = device

    def colours(self, points: NDArray[np.float32]) -> NDArray[np.float32]:
        where = torch.from_numpy(np.ascontiguousarray(points)).to(self._device)
        return self.module.evaluate(where).cpu().numpy()


class LiveTrainer:
    """Learns a stand-in from a stream of rows, for as long as it is asked to.

    `add_rows` and `ready` may be used from any thread; everything else belongs to the one thread
    that trains. Nothing runs by itself: training happens inside `train_slice`. Steps depend only
    on the seed and on what the replay holds when each is made, so `train_steps` is reproducible
    on a CPU; when candidates are scored depends on the clock, and has no effect on the weights.

    Args:
        plan: The split of t; by default `SlicePlan()`.
        device: A torch device.
        directory: Where checkpoints go; None for none. Created if missing.
        seed: For weights, replay, batches and scoring.
        same_rows: Whether the same rows are added in the same order before each `resume`. Then
            what is known of each row's error is in the checkpoints too.
    Raises:
        OSError: The directory cannot be used.
    """

    def __init__(
        self,
        config: TrainConfig,
        plan: Plan | None = None,
        *,
        device: str | torch.device = "cpu",
        directory: Path | str | None = None,
        seed: int = 0,
        same_rows: bool = False,
    ) -> None:
        if torch.device(device).type == "cpu":
            prepare(background=True)
        self.config = config
        self.plan: Plan = plan or SlicePlan()
        self._device = torch.device(device)
        torch.set_num_threads(config.threads)
        self._checkpoints = Checkpoints(Path(directory)) if directory is not None else None
        self._replay = Replay(
            self.plan,
            train_rows=config.replay_rows,
            held_out_rows=config.held_out_rows,
            test_rows=config.held_out_rows,
            seed=seed,
        )
        self._seed = seed
        self._same_rows = same_rows
        self._draw = np.random.default_rng([seed, 0x44524157])
        self._pick = np.random.default_rng([seed, 0x5049434B])
        specs: dict[str, ModelSpec] = {"grid": config.grid, "compact": config.compact}
        families = list(specs) if config.family == "race" else [config.family]
        self.models: list[ModelSpec] = [specs[name] for name in families]
        """Specifications that may be published, the most likely first."""
        favourites: dict[str, Entrant] = {}
        challengers: dict[str, Entrant] = {}
        if "grid" in families:
            favourites["grid"] = Entrant(1.0, config.race_rungs)
            if min(config.grid.volume) > LEAST_VOLUME:
                favourites["planes"] = Entrant(1.0, config.race_rungs)
        if "compact" in families:
            place = challengers if favourites else favourites
            place["compact"] = Entrant(config.race_share, config.race_rungs)
        if "grid" in families and has_coarse_planes(config.grid):
            challengers["fine"] = Entrant(1.0, config.fine_rungs, config.fine_below_db)
        self._learners = {
            name: Learner(
                specs["compact" if name == "compact" else "grid"],
                config,
                device=self._device,
                seed=seed,
                name=name,
            )
            for name in [*favourites, *challengers]
        }
        self._scorers = {
            name: _Scorer(learner.spec, self._device) for name, learner in self._learners.items()
        }
        self._race = Race(favourites, challengers, margin_db=config.race_margin_db)
        self._mirror: Mirror | None = None
        if self._device.type == "cuda":
            self._mirror = Mirror(self._replay, self._device)
        self._limits = GateLimits(
            min_gain_db=config.min_gain_db,
            relmse_tolerance=config.relmse_tolerance,
            peak_tolerance=config.peak_tolerance,
        )
        self._step = 0
        self._samples = 0
        self._train_s = 0.0
        self._loss = math.nan
        self._samples_per_s = self._steps_per_s = 0.0
        self._published: Candidate | None = None
        self._published_scorer: _Scorer | None = None
        self._published_count = 0
        self._candidate_scores: Scores | None = None
        self._published_scores: Scores | None = None
        self._verdict = ""
        self._leader = families[0]
        self._score_at = config.first_candidate_s
        self._score_cost_s = 0.0
        self._held_out_seen = 0
        self._held_out_grew_at = 0.0
        self._best: tuple[float, str, LearnerState] | None = None
        self._best_dirty = False
        self._warm_up()

    # --- any thread ------------------------------------------------------------------------------

    def add_rows(self, rows: NDArray[np.float32]) -> int:
        """Take rows x, y, t, r, g, b, float32 [n, 6]; returns how many were fit to keep.

        Raises:
            ValueError: Wrong dtype or shape.
        """
        return self._replay.add(rows)

    @property
    def ready(self) -> bool:
        """Whether enough of the range has been seen to train; also after `resume`."""
        return self._replay.coverage(TRAIN) >= max(self.config.min_coverage, 1e-9)

    @property
    def held_out(self) -> list[tuple[float, float]]:
        """Held-out intervals of t."""
        return self.plan.held_out

    @property
    def test(self) -> list[tuple[float, float]]:
        """Test intervals of t."""
        return self.plan.test

    # --- the training thread ---------------------------------------------------------------------

    def train_slice(self, seconds: float = 0.05) -> StepReport:
        """Train for about this long (one step longer at most), so that Stop is noticed.

        Raises:
            DivergedError: The only family left cannot be kept finite.
        """
        return self._train(time.perf_counter() + seconds, None)

    def train_steps(self, count: int) -> StepReport:
        """Do exactly this many steps, if there are rows; the same stream gives the same weights."""
        return self._train(None, count)

    def maybe_candidate(self) -> Candidate | None:
        """Score the averaged weights when it is time, and hand them out if they pass the gate.

        Call it after every `train_slice`: when nothing is due it costs nothing. Scoring takes at
        most `score_share` of the time, the first candidate aside.
        """
        if self._train_s < self._score_at or not self._step:
            return None
        start = time.perf_counter()
        try:
            return self._score_candidates()
        finally:
            cost = time.perf_counter() - start
            self._score_cost_s = cost
            share = self.config.score_share
            if self._train_s < _HURRY_S:
                share = max(share, _HURRY_SHARE)
            wait = max(self.config.candidate_interval_s, cost * (1.0 - share) / share)
            self._score_at = self._train_s + wait

    def candidate_now(self) -> Candidate | None:
        """Score the averaged weights now and hand them out if they beat one flat colour.

        For a job that knows all its rows and counts its steps: neither the clock, nor how much of
        the range was seen, nor what is published has a say, so the same steps give the same
        candidates. Which of them to keep is for the caller; `progress` has scores and verdict.
        """
        rows = self._replay.snapshot(HELD_OUT, self.config.score_rows, self._pick)
        return self._judged(rows, None) if self._step and len(rows) else None

    def published(self, candidate: Candidate) -> None:
        """Say that a candidate went out: from now on the gate compares with this one."""
        self._published = candidate
        self._published_count += 1
        self._published_scores = candidate.scores
        scorer = _Scorer(candidate.spec, self._device)
        load_tensors(scorer.module, candidate.tensors)
        self._published_scorer = scorer

    def last_published(self) -> Candidate | None:
        """What was published last, also after `resume`: a host that comes back gets this."""
        return self._published

    def progress(self) -> TrainerProgress:
        """Where training stands now."""
        rows = self._replay.counters
        return TrainerProgress(
            step=self._step,
            samples=self._samples,
            samples_per_s=self._samples_per_s,
            steps_per_s=self._steps_per_s,
            loss=self._loss,
            train_seconds=self._train_s,
            family=self._learners[self._leader].family if self._learners else self._leader,
            race=self._race.state,
            candidate_scores=self._candidate_scores,
            published_scores=self._published_scores,
            rows_seen=rows.seen,
            rows_kept=rows.seen - rows.rejected,
            rows_rejected=rows.rejected,
            coverage=self._replay.coverage(TRAIN),
            rollbacks=sum(learner.rollbacks for learner in self._learners.values()),
            published=self._published_count,
            verdict=self._verdict,
        )

    def report_scores(self) -> Scores | None:
        """Scores of the published weights on test slices, for the report alone.

        Returns:
            None while nothing is published or no test slice has data.
        """
        return self._score_published(
            self._replay.snapshot(TEST, self.config.score_rows, self._pick)
        )

    def save(self) -> Path | None:
        """Write a checkpoint; None without a directory.

        Raises:
            OSError: The disk does not take it; the checkpoints that were there stay.
        """
        if self._checkpoints is None:
            return None
        best = None
        if self._best is not None and self._best_dirty:
            _, family, state = self._best
            states = {name: learner.state() for name, learner in self._learners.items()}
            best = self._packed(states | {family: state})
        path = self._checkpoints.save(self._packed(), best=best)
        self._best_dirty = False
        return path

    def resume(self) -> bool:
        """Go on from the newest whole checkpoint: weights, moments, averages, generators, step.

        The replay is not kept: training waits until rows cover enough of the range again. Given
        the same rows in the same order, what follows is what would have followed, bit for bit on
        a CPU.

        Returns:
            False where there is none.
        Raises:
            CheckpointError: There are some, but none that fits this configuration.
        """
        state = self._checkpoints.load() if self._checkpoints is not None else None
        if state is None:
            return False
        try:
            self._unpack(state)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"checkpoint in {self._checkpoints.directory if self._checkpoints else ''}",
                expected="one of the same models",
                got=str(error),
                next_step="use another directory, or the settings it was written with",
            ) from error
        return True

    def close(self) -> None:
        """Drop models and scorers; idempotent. Saves nothing."""
        for learner in self._learners.values():
            learner.close()
        self._learners.clear()
        self._scorers.clear()
        self._published_scorer = None

    # --- training --------------------------------------------------------------------------------

    def _train(self, until: float | None, count: int | None) -> StepReport:
        start = time.perf_counter()
        steps = samples = 0
        losses: list[float] = []
        rolled_back = False
        while True:
            family = self._race.next({n: learner.steps for n, learner in self._learners.items()})
            learner = self._learners[family]
            before = learner.rollbacks
            try:
                loss, drawn = self._one_step(learner)
            except DivergedError:
                if not self._race.running:
                    raise
                self._drop(family)
                continue
            if not drawn:
                break
            rolled_back |= learner.rollbacks > before
            if math.isfinite(loss):
                losses.append(loss)
            steps += 1
            samples += drawn
            self._step += 1
            if due := self._race.due({n: learner.steps for n, learner in self._learners.items()}):
                self._compare(due)
            if learner.wants_score:
                found = self._step_score(family, learner.steps)
                learner.trial_score(None if found is None else found.merit)
            if count is not None and steps >= count:
                break
            if until is not None and time.perf_counter() >= until:
                break
        seconds = time.perf_counter() - start
        self._samples += samples
        if steps:
            self._train_s += seconds
            self._loss = float(np.mean(losses)) if losses else math.nan
            keep = _RATE_MEMORY if self._samples_per_s else 0.0
            self._samples_per_s += (1 - keep) * (samples / seconds - self._samples_per_s)
            self._steps_per_s += (1 - keep) * (steps / seconds - self._steps_per_s)
        return StepReport(steps, samples, seconds, self._loss if losses else math.nan, rolled_back)

    def _one_step(self, learner: Learner) -> tuple[float, int]:
        """Loss and rows of one step; no rows where there are none."""
        if self._mirror is not None and isinstance(learner.module, Grid):
            self._mirror.refresh()
            if self._mirror.empty:
                return math.nan, 0
            return learner.step_on_device(self._mirror), self.config.device_batch
        config = self.config
        early = learner.steps < config.early_steps
        drawn = self._replay.draw(
            max(16, config.batch // 2) if early else config.batch,
            self._draw,
            tries=config.tries,
            share=config.error_share,
            power=config.error_power,
        )
        if not len(drawn.rows):
            return math.nan, 0
        loss = learner.step(drawn.rows, drawn.weights)
        if config.tries > 1 and learner.errors is not None and math.isfinite(loss):
            self._replay.learned(drawn, learner.errors)
        return loss, len(drawn.rows)

    def _compare(self, names: list[str]) -> None:
        found = {name: self._step_score(name, self._step) for name in names}
        merits = {name: None if one is None else one.merit for name, one in found.items()}
        for name in self._race.judge(merits):
            self._drop(name)

    def _step_score(self, family: str, steps: int) -> Scores | None:
        """A held-out score that belongs to a step and not to the clock; None without data.

        Its own generator: when candidates are scored must not change who wins.
        """
        rng = np.random.default_rng([self._seed, 0x52554E47, steps])
        rows = self._replay.snapshot(HELD_OUT, self.config.score_rows, rng)
        return self._scored(family, rows)[0] if len(rows) >= _LEAST_SCORE_ROWS else None

    def _drop(self, family: str) -> None:
        self._race.drop(family)
        if (learner := self._learners.pop(family, None)) is not None:
            learner.close()
        self._scorers.pop(family, None)
        self._leader = self._race.active[0]
        if self._best is not None and self._best[1] == family:
            self._best = None

    def _warm_up(self) -> None:
        """Torch's first step of each kind costs up to 100 ms; have it before the clock starts."""
        for learner in self._learners.values():
            state = learner.state()
            learner.step(np.zeros((self.config.batch, 6), dtype=np.float32))
            learner.restore(state)
            learner.steps = 0

    # --- scoring ---------------------------------------------------------------------------------

    def _scored(self, family: str, rows: NDArray[np.float32]) -> tuple[Scores, Tensors]:
        """Scores of a family's averaged, rounded weights on rows, and those weights."""
        tensors = self._learners[family].tensors()
        scorer = self._scorers[family]
        load_tensors(scorer.module, tensors)
        return self._score(scorer, rows), tensors

    def _score(self, scorer: _Scorer, rows: NDArray[np.float32]) -> Scores:
        colours = scorer.colours(rows[:, :3])
        return score(colours, rows[:, 3:], slices=self.plan.index_of(rows[:, 2]))

    def _score_published(self, rows: NDArray[np.float32]) -> Scores | None:
        if self._published_scorer is None or not len(rows):
            return None
        return self._score(self._published_scorer, rows)

    def _may_publish(self) -> bool:
        """Whether held-out data says enough about the range; always once something is out."""
        seen = self._replay.covered(HELD_OUT)
        if seen > self._held_out_seen:
            self._held_out_seen, self._held_out_grew_at = seen, self._train_s
        if self._published is not None:
            return True
        if self._replay.span(TRAIN) >= self.config.publish_coverage and seen >= _LEAST_HELD_OUT:
            return True
        return bool(seen) and self._train_s - self._held_out_grew_at > _STALLED_S

    def _score_candidates(self) -> Candidate | None:
        rows = self._replay.snapshot(HELD_OUT, self.config.score_rows, self._pick)
        if not self._may_publish() or len(rows) < _LEAST_SCORE_ROWS:
            self._verdict = "held-out slices have too little data yet"
            return None
        return self._judged(rows, self._score_published(rows))

    def _judged(self, rows: NDArray[np.float32], published: Scores | None) -> Candidate | None:
        """The best family's weights, if they pass the gate against what is published."""
        started = [n for n in self._race.active if self._learners[n].steps]
        found = {name: self._scored(name, rows) for name in started or self._race.active[:1]}
        family = max(found, key=lambda name: _rank(found[name][0]))
        scores, tensors = found[family]
        learner = self._learners[family]
        self._leader = family
        self._candidate_scores = scores
        if scores.finite and (self._best is None or scores.psnr_db > self._best[0]):
            learner.mark_good()
            self._best = (scores.psnr_db, family, learner.good)
            self._best_dirty = True
        self._published_scores = published
        verdict = judge(
            scores,
            published,
            constant_scores(rows[:, 3:], self.plan.index_of(rows[:, 2])),
            limits=self._limits,
        )
        self._verdict = "passed" if verdict.passed else verdict.reason
        if not verdict.passed:
            return None
        points, colours = golden_probes(learner.spec, tensors, seed=self._step)
        if not np.isfinite(colours).all():
            self._verdict = "not finite"
            return None
        return Candidate(
            learner.family,
            learner.spec,
            tensors,
            scores,
            points,
            colours,
            self._step,
            self._train_s,
        )

    # --- checkpoints -----------------------------------------------------------------------------

    def _packed(self, states: Mapping[str, LearnerState] | None = None) -> State:
        """A checkpoint of these states of the learners; by default of all there is."""
        tensors: dict[str, NDArray[Any]] = {}
        learners: dict[str, Any] = {}
        for name, learner in self._learners.items():
            # One that has not started is made again by its seed: half of the bytes, early on.
            if not (learner.steps or learner.rollbacks):
                learners[name] = None
                continue
            arrays, learners[name] = learner.dump(states[name] if states is not None else None)
            tensors |= arrays
        meta: dict[str, Any] = {
            "config": self.config.to_dict(),
            "slices": self.plan.count,
            "step": self._step,
            "samples": self._samples,
            "train_seconds": self._train_s,
            "race": self._race.to_dict(),
            "learners": learners,
            "draw": self._draw.bit_generator.state,
            "pick": self._pick.bit_generator.state,
            "best": None if self._best is None else list(self._best[:2]),
            "published": None,
        }
        if self._same_rows:
            tensors[_ERRORS], meta["unknown_error"] = self._replay.errors()
        if (out := self._published) is not None:
            tensors |= {_PUBLISHED + name: value for name, value in out.tensors.items()}
            meta["published"] = {
                "spec": spec_to_dict(out.spec),
                "scores": out.scores.to_dict(),
                "step": out.step,
                "train_seconds": out.train_seconds,
                "count": self._published_count,
            }
        return State(tensors, meta)

    def _unpack(self, state: State) -> None:
        meta = state.meta
        if meta["slices"] != self.plan.count:
            # Other slices would have trained on what is held out now.
            raise ValueError(f"{meta['slices']} slices, not {self.plan.count}")
        active = meta["race"]["active"]
        unknown = [name for name in active if name not in self._learners]
        if unknown:
            raise ValueError(f"models {', '.join(active)}, not {', '.join(self._learners)}")
        saved = TrainConfig.from_dict(meta["config"])
        if (saved.grid, saved.compact) != (self.config.grid, self.config.compact):
            raise ValueError("models of other sizes")
        for name in active:
            if (known := meta["learners"][name]) is not None:
                self._learners[name].take(state.tensors, known)
        for name in [n for n in self._learners if n not in active]:
            self._drop(name)
        self._race.restore(meta["race"])
        self._leader = active[0]
        if meta["best"] is not None:
            merit, family = meta["best"]
            self._best = (float(merit), family, self._learners[family].good)
        self._step, self._samples = int(meta["step"]), int(meta["samples"])
        self._train_s = float(meta["train_seconds"])
        self._score_at = self._train_s
        self._draw.bit_generator.state = meta["draw"]
        self._pick.bit_generator.state = meta["pick"]
        if self._same_rows:
            self._replay.restore_errors(state.tensors[_ERRORS], float(meta["unknown_error"]))
        if (out := meta["published"]) is not None:
            self._restore_published(out, state)

    def _restore_published(self, out: Mapping[str, Any], state: State) -> None:
        spec = model_spec_from_dict(out["spec"])
        tensors = {name: state.tensors[_PUBLISHED + name] for name in spec.tensors()}
        points, colours = golden_probes(spec, tensors, seed=out["step"])
        candidate = Candidate(
            spec.family,
            spec,
            tensors,
            Scores(**out["scores"]),
            points,
            colours,
            int(out["step"]),
            float(out["train_seconds"]),
        )
        self.published(candidate)
        self._published_count = int(out["count"])


def _rank(scores: Scores) -> float:
    return scores.psnr_db if scores.finite else -math.inf
