"""How good a stand-in is after so many seconds of training, without any process or socket.

A simulated host streams 16,384 random pixels a frame at 30 frames a second, t going up and down its
range without a pause. Its rows are computed before, so that the scene's own cost does not count.
What is measured is what a host would draw: the *published* weights, rounded as they are stored,
on whole frames at the middle of held-out slices and of test slices.

    python benchmarks/train.py --scene all --seconds 30 --json train.json

The clock counts adding rows, training and scoring, and not the benchmark's own evaluations.
`--clock cpu` counts processor seconds instead of wall seconds: on a shared machine, the one that
can be compared. `--slices 64` and the like show what the width of the gaps in t costs.
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
from _streams import FRAMES_PER_S, Picture, frame, hardware, predict, scores, spread, stream
from doublure_bridge.scores import tonemap
from doublure_plugin.scenes import SCENES, Scene, choose_scenes
from doublure_trainer.config import TrainConfig
from doublure_trainer.fused import prepare
from doublure_trainer.loop import Candidate, LiveTrainer
from doublure_trainer.slices import SlicePlan

MARKS_S = (1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0)


def main() -> None:
    prepare()  # or the first seconds would be torch's
    args = _arguments()
    machine = hardware(args.threads)
    print(f"{machine['cpu']}, {args.threads} thread(s), torch {machine['torch']}", flush=True)
    try:
        names = choose_scenes(args.scene)
    except ValueError as error:
        raise SystemExit(f"--scene: {error}") from None
    rows: list[dict[str, Any]] = []
    for name in names:
        for seed in range(args.seed, args.seed + args.repeat):
            rows += _measure(SCENES[name], seed, args)
    _summarise(rows)
    if args.json:
        Path(args.json).write_text(
            json.dumps({"hardware": machine, "rows": [{**r, **machine} for r in rows]}, indent=1)
        )


def _measure(scene: Scene, seed: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    config = TrainConfig.from_dict({"threads": args.threads, **json.loads(args.config)})
    plan = SlicePlan(args.slices)
    rows_sent = stream(scene, args.seconds, args.sweep, seed)
    frames = {
        kind: [frame(scene, t, args.size) for t in spread(bounds, args.frames)]
        for kind, bounds in (("held_out", plan.held_out), ("test", plan.test))
    }
    trainer = LiveTrainer(config, plan, device=args.device, seed=seed)
    clock: Callable[[], float] = time.process_time if args.clock == "cpu" else time.perf_counter
    marks = [m for m in MARKS_S if m < args.seconds] + [args.seconds]
    rows: list[dict[str, Any]] = []
    elapsed, sent, candidate, first_s = 0.0, 0, None, None
    score_s = add_s = 0.0
    while marks:
        start = clock()
        while sent < len(rows_sent) and sent <= elapsed * FRAMES_PER_S:
            trainer.add_rows(rows_sent[sent])
            sent += 1
        add_s += clock() - start
        if trainer.ready:
            trainer.train_slice(0.03)
            before = clock()
            new = trainer.maybe_candidate()
            if new is not None:
                trainer.published(new)
                candidate = new
            score_s += clock() - before
        else:
            start -= 1.0 / FRAMES_PER_S  # the next frame would have been waited for
        elapsed += clock() - start
        if candidate is not None and first_s is None:
            first_s = elapsed
        if elapsed >= marks[0]:
            now = trainer.progress()
            row: dict[str, Any] = {
                "scene": scene.name,
                "seed": seed,
                "seconds": marks.pop(0),
                "clock": args.clock,
                "slices": args.slices,
                "sweep_s": args.sweep,
                "first_candidate_s": first_s,
                "steps": now.step,
                "steps_per_s": now.step / elapsed,
                "samples_per_s": now.samples / elapsed,
                "scoring_share": score_s / elapsed,
                "adding_share": add_s / elapsed,
                "reloads": now.published,
                "family": now.family,
                "race": now.race,
                "coverage": now.coverage,
                "loss": now.loss,
            }
            for kind, pictures in frames.items():
                row |= _scores(candidate, pictures, kind)
            if args.pictures and not marks:
                _draw(candidate, frames, scene, args)
            rows.append(row)
            print(_line(row), flush=True)
    return rows


def _scores(
    candidate: Candidate | None,
    pictures: list[Picture],
    kind: str,
) -> dict[str, Any]:
    if candidate is None:
        return {f"{kind}_psnr_db": None}
    predicted = [predict(candidate, points) for points, _ in pictures]
    return {f"{kind}_{name}": value for name, value in scores(predicted, pictures).items()}


def _line(row: dict[str, Any]) -> str:
    def db(kind: str) -> str:
        if row[f"{kind}_psnr_db"] is None:
            return "     -"
        low, high = row[f"{kind}_psnr_db_worst"], row[f"{kind}_psnr_db_best"]
        return f"{row[f'{kind}_psnr_db']:6.2f} ({low:.1f}..{high:.1f})"

    first = "-" if row["first_candidate_s"] is None else f"{row['first_candidate_s']:.2f}"
    return (
        f"{row['scene']:7} {row['seconds']:5.1f} s  held-out {db('held_out')}  test {db('test')} dB"
        f"  peak {row.get('held_out_peak_ratio', 0):.2f} relmse {row.get('held_out_relmse', 0):.4f}"
        f"  first {first} s  {row['steps_per_s']:.0f} steps/s"
        f"  {row['samples_per_s'] / 1e6:.2f} M samples/s  scoring {row['scoring_share']:.0%}"
        f"  reloads {row['reloads']}  {row['race']}"
    )


def _summarise(rows: list[dict[str, Any]]) -> None:
    print("\nheld-out PSNR after tone mapping, dB: median over seeds (lowest..highest)")
    marks = sorted({r["seconds"] for r in rows})
    print("scene   " + "".join(f"{m:>21g} s" for m in marks))
    for name in dict.fromkeys(r["scene"] for r in rows):
        cells = []
        for mark in marks:
            found = [
                r["held_out_psnr_db"]
                for r in rows
                if r["scene"] == name and r["seconds"] == mark and r["held_out_psnr_db"] is not None
            ]
            text = "-"
            if found:
                text = f"{statistics.median(found):.1f} ({min(found):.1f}..{max(found):.1f})"
            cells.append(f"{text:>23}")
        print(f"{name:8}" + "".join(cells))


def _draw(
    candidate: Candidate | None, frames: dict[str, Any], scene: Scene, args: argparse.Namespace
) -> None:
    """Write source | stand-in | error (times 4) for held-out frames."""
    from PIL import Image

    if candidate is None:
        return
    folder = Path(args.pictures)
    folder.mkdir(parents=True, exist_ok=True)
    for i, (points, true) in enumerate(frames["held_out"][:4]):
        shown, ours = tonemap(true), tonemap(predict(candidate, points))
        panels = [shown, ours, np.clip(np.abs(ours - shown) * 4, 0, 1)]
        wide = np.concatenate([p.reshape(args.size, args.size, 3) for p in panels], axis=1)
        path = folder / f"{scene.name}-{i}.png"
        Image.fromarray((np.nan_to_num(wide) * 255 + 0.5).astype(np.uint8)).save(path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scene", default="all", help="a name, several with commas, all or every")
    parser.add_argument("--seconds", type=float, default=30.0, help="of training a scene")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=1, help="runs a scene, each its own seed")
    parser.add_argument("--slices", type=int, default=SlicePlan().count)
    parser.add_argument(
        "--sweep", type=float, default=1.25, help="seconds from one end of t to the other"
    )
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=512, help="side of the frames evaluated")
    parser.add_argument("--frames", type=int, default=6, help="frames evaluated a kind of slice")
    parser.add_argument("--config", default="{}", help="settings of TrainConfig, as JSON")
    parser.add_argument("--pictures", metavar="DIR", help="write source | stand-in | error PNGs")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--quick", action="store_true", help="3 s a scene, small frames")
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.size, args.frames = min(args.seconds, 3.0), 128, 3
    return args


if __name__ == "__main__":
    main()
