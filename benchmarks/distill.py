"""How good a stand-in is for what it costs: quality against CPU seconds, MACs, fetches and bytes.

Every family learns the same stream as benchmarks/train.py's, on one clock: processor seconds of
adding rows, training and scoring, one thread. At each mark what a host would draw (the published
weights, as they are stored) is scored on whole 512 x 512 frames at the middle of all *test* slices,
which neither the gate nor sampling ever looks at.

    python benchmarks/distill.py --scene all --seconds 20 --cells cells.jsonl --json distill.json
    python benchmarks/distill.py --streaming --cells cells.jsonl
    python benchmarks/distill.py --merge cells.jsonl --docs

A cell is one scene, family, preset and seed. Each is appended to `--cells` when it is done, and
what is already there is not run again: a run can be stopped, and split by scene over processes
with a file each. hashgrid and mlp are yardsticks (see yardsticks.py): no host can draw them, and
no gate holds them back.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from _distill_report import Cell, figures, plot, print_summary, tables, write_docs
from _streams import FRAMES_PER_S, Array, Picture, frame, hardware, predict, scores, spread, stream
from doublure_plugin.scenes import SCENES, Scene, choose_scenes
from doublure_trainer.config import TrainConfig
from doublure_trainer.fused import prepare
from doublure_trainer.loop import Candidate, LiveTrainer
from doublure_trainer.models.presets import preset
from doublure_trainer.slices import SlicePlan
from yardsticks import YARDSTICKS, YardstickTrainer, yardstick

FAMILIES = ("grid", "compact", "race", *YARDSTICKS)
PRESETS = ("small", "medium", "large")
MARKS_S = (2.0, 5.0, 10.0, 20.0)
SWEEP_S = 1.25
SIZE = 512
FRAMES = 8  # a frame each test slice
STREAMED = ("fbm", "edges")
DATASET_FRAMES, DATASET_ROWS, VALIDATION_FRAMES = 48, 2048, 12
_EVALUATION_S = 5.0  # of a cell, for the estimate: four marks of eight frames


class Learning(Protocol):
    """One family while it learns."""

    @property
    def ready(self) -> bool: ...

    def add_rows(self, rows: Array) -> Any: ...

    def work(self) -> None:
        """Train for about 30 ms, and score and publish when it is time."""

    def draw(self, points: Array) -> Array | None:
        """What a host would draw; None while it draws the source."""

    def cost(self) -> dict[str, int]:
        """MACs, fetches and bytes of what it would draw."""


class Ours:
    """The live trainer with its gate."""

    def __init__(self, config: TrainConfig, plan: SlicePlan, seed: int) -> None:
        self._trainer = LiveTrainer(config, plan, seed=seed)
        self._candidate: Candidate | None = None

    @property
    def ready(self) -> bool:
        return self._trainer.ready

    def add_rows(self, rows: Array) -> None:
        self._trainer.add_rows(rows)

    def work(self) -> None:
        self._trainer.train_slice(0.03)
        found = self._trainer.maybe_candidate()
        if found is not None:
            self._trainer.published(found)
            self._candidate = found

    def draw(self, points: Array) -> Array | None:
        return None if self._candidate is None else predict(self._candidate, points)

    def cost(self) -> dict[str, int]:
        spec = self._trainer.models[0] if self._candidate is None else self._candidate.spec
        return {"macs": spec.macs, "fetches": spec.fetches, "bytes": spec.nbytes}


class Compared:
    """A yardstick: no gate, so it is drawn from the first step on."""

    def __init__(
        self, family: str, name: str, config: TrainConfig, plan: SlicePlan, seed: int
    ) -> None:
        self._module = yardstick(family, name, seed=seed)
        self._trainer = YardstickTrainer(self._module, config, plan, seed=seed)

    @property
    def ready(self) -> bool:
        return self._trainer.ready

    def add_rows(self, rows: Array) -> None:
        self._trainer.add_rows(rows)

    def work(self) -> None:
        self._trainer.train_slice(0.03)

    def draw(self, points: Array) -> Array | None:
        return self._trainer.predict(points) if self._trainer.steps else None

    def cost(self) -> dict[str, int]:
        module = self._module
        return {"macs": module.macs, "fetches": module.fetches, "bytes": module.nbytes}


def open_learning(family: str, name: str, plan: SlicePlan, seed: int, threads: int) -> Learning:
    """A family of a preset's sizes, untrained."""
    config = TrainConfig(
        family=family if family in ("grid", "compact") else "race",
        threads=threads,
        **_sizes(name),
    )
    if family in YARDSTICKS:
        return Compared(family, name, config, plan, seed)
    return Ours(config, plan, seed)


def _sizes(name: str) -> dict[str, Any]:
    """The models' sizes of a preset, as settings of `TrainConfig`."""
    return {family: preset(family, name) for family in ("grid", "compact")}


def learn(
    learning: Learning, sent: Sequence[Array], marks: Sequence[float], *, per_s: float
) -> Iterator[float]:
    """Let it learn, and stop at every mark of its processor seconds.

    Args:
        sent: What the host sends, an array a frame.
        per_s: Frames a second; infinite sends all at once.
    """
    elapsed, count = 0.0, 0
    for mark in marks:
        while elapsed < mark:
            start = time.process_time()
            while count < len(sent) and count <= elapsed * per_s:
                learning.add_rows(sent[count])
                count += 1
            if learning.ready:
                learning.work()
            else:
                start -= 1.0 / FRAMES_PER_S  # the next frame would have been waited for
            elapsed += time.process_time() - start
        yield mark


def measure_cell(
    scene: Scene,
    family: str,
    name: str,
    seed: int,
    sent: Sequence[Array],
    pictures: Sequence[Picture],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """The rows of one cell, one a mark."""
    learning = open_learning(family, name, SlicePlan(), seed, args.threads)
    return [
        {
            "scene": scene.name,
            "family": family,
            "preset": name,
            "seed": seed,
            "threads": args.threads,
            "cpu_s": mark,
            **_scored(learning, pictures),
            **learning.cost(),
        }
        for mark in learn(learning, sent, _marks(args.seconds), per_s=FRAMES_PER_S)
    ]


def measure_streaming(
    scene: Scene, data: str, seed: int, pictures: Sequence[Picture], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A live stream, or a dataset of fixed pixels again and again; the medium grid both times."""
    plan = SlicePlan()
    learning = open_learning("grid", "medium", plan, seed, args.threads)
    if data == "live":
        sent, per_s = stream(scene, args.seconds, SWEEP_S, seed), float(FRAMES_PER_S)
    else:
        sent, per_s = dataset(scene, plan, seed), float("inf")
    return [
        {
            "scene": scene.name,
            "data": data,
            "seed": seed,
            "threads": args.threads,
            "cpu_s": mark,
            **_scored(learning, pictures),
        }
        for mark in learn(learning, sent, _marks(args.seconds), per_s=per_s)
    ]


def dataset(scene: Scene, plan: SlicePlan, seed: int) -> list[Array]:
    """48 frames of 2,048 random pixels, evenly over t, and 12 more to validate on.

    Frames that would fall into a slice of another kind are moved to the nearest of their own, so
    that all 48 train, and the test slices are as unseen as a live stream leaves them.
    """
    rng = np.random.default_rng([seed, 48])
    wanted = [
        (plan.intervals(0), np.arange(DATASET_FRAMES) / (DATASET_FRAMES - 1)),
        (plan.held_out, (np.arange(VALIDATION_FRAMES) + 0.381966) / VALIDATION_FRAMES),
    ]
    frames = []
    for intervals, phases in wanted:
        for phase in phases:
            t = _nearest(intervals, 2.0 * float(phase) - 1.0)
            rows = np.empty((DATASET_ROWS, 6), np.float32)
            rows[:, :2] = (rng.integers(0, SIZE, (DATASET_ROWS, 2)) * 2 + 1) / SIZE - 1
            rows[:, 2] = t
            rows[:, 3:] = scene.evaluate(rows[:, 0], rows[:, 1], np.float32(scene.denormalise(t)))
            frames.append(rows)
    return frames


def _nearest(intervals: Sequence[tuple[float, float]], t: float) -> float:
    inside = [min(max(t, low + 1e-4), high - 1e-4) for low, high in intervals]
    return min(inside, key=lambda found: abs(found - t))


def _scored(learning: Learning, pictures: Sequence[Picture]) -> dict[str, float | None]:
    drawn = [learning.draw(points) for points, _ in pictures]
    names = ("psnr_db", "relmse", "peak_ratio")
    found = [one for one in drawn if one is not None]
    if len(found) < len(drawn):
        return dict.fromkeys(names)
    measured = scores(found, pictures)
    return {name: measured[name] for name in names}


def _marks(seconds: float) -> list[float]:
    return [m for m in MARKS_S if m < seconds] + [seconds]


def main() -> None:
    prepare()  # or the first seconds would be torch's
    args = _arguments()
    machine = hardware(args.threads)
    print(f"{machine['cpu']}, {args.threads} thread(s), torch {machine['torch']}", flush=True)
    cells = [cell for path in args.merge or [] for cell in read_cells(path)]
    if not args.merge:
        done = read_cells(args.cells) if args.cells and args.cells.exists() else []
        cells = done + run(args, machine, {json.dumps(cell["key"]) for cell in done})
    found = figures(cells)
    print_summary(found)
    if args.table:
        print("\n".join(tables(found)))
    if args.json:
        machines = [m for i, m in enumerate(found.machines) if m not in found.machines[:i]]
        data = {"hardware": machines, "rows": found.rows, "streaming": found.streaming}
        args.json.write_text(json.dumps(data, indent=1))
    if args.plot:
        plot(found, args.plot)
    if args.docs:
        write_docs(found)


def run(args: argparse.Namespace, machine: dict[str, Any], done: set[str]) -> list[Cell]:
    """Measure what is not done yet, and append it to the file of cells as it comes."""
    todo = [key for key in _keys(args) if json.dumps(key) not in done]
    print(_estimate(todo, args), flush=True)
    plan = SlicePlan()
    pictures: dict[str, list[Picture]] = {}
    streamed: tuple[str, int] | None = None
    sent: Sequence[Array] = []
    cells: list[Cell] = []
    for key in todo:
        scene, seed = SCENES[key["scene"]], key["seed"]
        if scene.name not in pictures:
            pictures = {
                scene.name: [frame(scene, t, args.size) for t in spread(plan.test, args.frames)]
            }
        if "data" in key:
            rows = measure_streaming(scene, key["data"], seed, pictures[scene.name], args)
        else:
            if streamed != (scene.name, seed):
                streamed, sent = (scene.name, seed), stream(scene, args.seconds, SWEEP_S, seed)
            rows = measure_cell(
                scene, key["family"], key["preset"], seed, sent, pictures[scene.name], args
            )
        cells.append({"key": key, "hardware": machine, "rows": rows})
        if args.cells:
            append_cell(args.cells, cells[-1])
        name = " ".join(str(v) for k, v in key.items() if k in _NAMED)
        each = ", ".join(f"{r['cpu_s']:g} s {_db(r['psnr_db'])}" for r in rows)
        print(f"{name:32} {each} dB", flush=True)
    return cells


_NAMED = ("scene", "family", "preset", "data", "seed")


def _keys(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What says whether two cells are the same measurement, a scene's together."""
    fixed = {"seconds": args.seconds, "size": args.size, "frames": args.frames}
    fixed["threads"] = args.threads
    for scene in args.scene:
        for seed in range(args.seeds):
            if args.streaming:
                for data in ("live", "dataset"):
                    yield {"scene": scene, "data": data, "seed": seed, **fixed}
                continue
            for family in args.family:
                for name in args.preset:
                    yield {"scene": scene, "family": family, "preset": name, "seed": seed, **fixed}


def _estimate(todo: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    share = args.frames * args.size**2 / (FRAMES * SIZE**2)
    total = len(todo) * (args.seconds + _EVALUATION_S * share)
    for name, _ in {(key["scene"], key["seed"]): None for key in todo}:
        scene = SCENES[name]
        start = time.process_time()
        points = np.random.default_rng(0).uniform(-1, 1, (4096, 2)).astype(np.float32)
        scene.evaluate(points[:, 0], points[:, 1], np.float32(scene.denormalise(0.1)))
        total += (time.process_time() - start) * args.seconds * FRAMES_PER_S
    return f"{len(todo)} cells to measure: about {total / 60:.1f} min on a quiet core"


def read_cells(path: Path) -> list[Cell]:
    """Cells of a JSON lines file; a last line that was cut short is left out."""
    cells: list[Cell] = []
    for line in path.read_text().splitlines():
        try:
            cells.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path}: left out a line that is not whole; its cell is measured again")
    return cells


def append_cell(path: Path, cell: Cell) -> None:
    """Add a line, on a line of its own even after one that was cut short."""
    cut = path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n")
    with path.open("a") as file:
        file.write(("\n" if cut else "") + json.dumps(cell) + "\n")


def _db(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _names(known: Sequence[str]) -> Any:
    def read(text: str) -> list[str]:
        names = list(known) if text == "all" else text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(
                f"expected one of {', '.join(known)} or all, got {unknown[0]!r}"
            )
        return names

    return read


def _scene_names(text: str) -> list[str]:
    parts = text.split(",")
    try:
        names = [name for part in parts for name in choose_scenes(part)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return list(dict.fromkeys(names))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scene", type=_scene_names, help="names with commas, all or every")
    parser.add_argument(
        "--family", type=_names(FAMILIES), default=list(FAMILIES), help=", ".join(FAMILIES)
    )
    parser.add_argument("--preset", type=_names(PRESETS), default=["medium"], help="sizes, or all")
    parser.add_argument("--seeds", type=int, default=3, help="runs a cell, each its own seed")
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU seconds a cell")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streaming", action="store_true", help="a live stream against a dataset")
    parser.add_argument("--quick", action="store_true", help="2 s a cell, one seed, small frames")
    parser.add_argument("--cells", type=Path, metavar="FILE", help="append cells; go on from there")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    parser.add_argument("--table", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--docs", action="store_true", help="write docs/quality.md and its picture")
    args = parser.parse_args()
    args.size, args.frames = SIZE, FRAMES
    if args.quick:
        args.seconds, args.seeds, args.size, args.frames = min(args.seconds, 2.0), 1, 128, 2
    if args.scene is None:
        args.scene = list(STREAMED) if args.streaming else choose_scenes("all")
    return args


if __name__ == "__main__":
    main()
