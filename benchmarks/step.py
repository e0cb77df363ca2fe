"""What a training step of the grid costs on one CPU thread, in parts, beside torch's.

The trainer's own pieces on a filled replay, compiled and through torch in one run: a whole step,
the pass over the rows, drawing, splines, and what sorting by t is worth.

    python benchmarks/step.py --json step.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _streams import hardware, stream
from doublure_plugin.scenes import SCENES
from doublure_trainer import fused
from doublure_trainer.config import TrainConfig
from doublure_trainer.learner import Learner
from doublure_trainer.models.grid import Grid
from doublure_trainer.replay import Replay
from doublure_trainer.slices import SlicePlan
from doublure_trainer.smoothing import SMOOTH_EVERY

CPU = torch.device("cpu")


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    config = TrainConfig()
    replay = Replay(SlicePlan(), train_rows=config.replay_rows)
    for rows in stream(SCENES["fbm"], 2.0 if args.quick else 8.0, 1.25, 0):
        replay.add(rows)
    print(hardware(1), flush=True)
    # Torch's learners are made before the loops are ready, so that they stay torch's.
    slow = {name: _learner(config, volume) for name, volume in _VOLUMES.items()}
    steps = {f"torch step, {n} volume": _step(one, replay, config) for n, one in slow.items()}
    found = {name: _times(fn, args) for name, fn in steps.items()}
    fused.prepare()
    for name, volume in _VOLUMES.items():
        one = _learner(config, volume)
        one.step(*_rows(replay, config))
        parts = {"step": _step(one, replay, config), **_parts(one, replay, config)}
        for part, fn in parts.items():
            fn()
            found[f"compiled {part}, {name} volume"] = _times(fn, args)
    rows_out = []
    for name, times in found.items():
        median = statistics.median(times)
        rows_out.append({"what": name, "ms_median": median, "ms_spread": max(times) - min(times)})
        print(f"{name:44} {median:7.3f} ms  (spread {max(times) - min(times):.3f})")
    for name in _VOLUMES:
        ours, theirs = (
            statistics.median(found[f"{e} step, {name} volume"]) for e in ("compiled", "torch")
        )
        print(f"{name} volume: torch takes {theirs / ours:.1f} times as long")
    if args.json:
        Path(args.json).write_text(json.dumps({"hardware": hardware(1), "rows": rows_out}))


_VOLUMES = {"coarse": 1, "finest": 3}


def _learner(config: TrainConfig, stage: int) -> Learner:
    still = TrainConfig.from_dict({**config.to_dict(), "growth": [1 << 28, 1 << 29]})
    one = Learner(config.grid, still, device=CPU, seed=0)
    assert isinstance(one.module, Grid)
    one._resize_to(one.module, stage)
    return one


def _rows(replay: Replay, config: TrainConfig) -> tuple[np.ndarray, np.ndarray]:
    drawn = replay.draw(
        config.batch,
        np.random.default_rng(0),
        tries=config.tries,
        share=config.error_share,
        power=config.error_power,
    )
    return drawn.rows, drawn.weights


def _step(one: Learner, replay: Replay, config: TrainConfig) -> Callable[[], Any]:
    rows, weights = _rows(replay, config)
    return lambda: one.step(rows, weights)


def _parts(one: Learner, replay: Replay, config: TrainConfig) -> dict[str, Callable[[], Any]]:
    engine = one._engine
    assert engine is not None
    rows, weights = _rows(replay, config)
    mixed = np.random.default_rng(1).permutation(rows)
    errors = np.empty(len(rows), np.float32)
    rates = [r * 1e-9 for r in one._base_rates]
    rng = np.random.default_rng(2)

    def smooth() -> None:
        for texture, axis in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)):
            engine.smooth(texture, axis, 0.0)

    def splines() -> None:
        engine._textures()

    return {
        "pass over rows sorted by t": lambda: engine.gradients(rows, weights, errors, 0.5),
        "pass over rows in any order": lambda: engine.gradients(mixed, weights, errors, 0.5),
        "splines up, of that pass": splines,
        "Adam, averages and splines down": lambda: engine.update(
            rates, (0.9, 0.99), 1000, config.ema
        ),
        f"smoothing, every {SMOOTH_EVERY} steps": smooth,
        f"drawing, {config.tries} candidates a row": lambda: replay.draw(
            config.batch,
            rng,
            tries=config.tries,
            share=config.error_share,
            power=config.error_power,
        ),
    }


def _times(fn: Callable[[], Any], args: argparse.Namespace) -> list[float]:
    """Milliseconds of processor time a call, a few times over."""
    count = 5 if args.quick else 40
    found = []
    for _ in range(3 if args.quick else 9):
        start = time.process_time()
        for _ in range(count):
            fn()
        found.append((time.process_time() - start) / count * 1e3)
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
