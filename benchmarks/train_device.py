"""Training on a CUDA device: samples a second, and the time to 40 dB at 1080p.

Three things in one run, so that their ratios mean something:

- `graph`: the trainer's own step, captured (drawing by error, grid, Adam, smoothing, averages);
- `eager`: the same step, launched kernel by kernel;
- `mlp`: a plain ReLU network on Fourier features of about the grid's multiply-accumulates, with
  rows drawn evenly and torch's fused Adam; eager, captured, and through torch.compile.

    python benchmarks/train_device.py --json device.json

`--reach SCENE` streams a 1920 x 1080 source, 60 frames/s of 16,384 rows, into `LiveTrainer` and
reports when the published weights first reach 40 dB on whole frames at test slices; the network
trains on the same rows for as long.
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
from _streams import hardware, spread
from doublure_plugin.scenes import SCENES, Scene
from doublure_trainer.config import TrainConfig
from doublure_trainer.loop import LiveTrainer
from doublure_trainer.models import build, load_tensors
from doublure_trainer.models.base import decode
from doublure_trainer.slices import TRAIN, SlicePlan
from numpy.typing import NDArray
from torch import Tensor, nn

WIDTH, HEIGHT = 1920, 1080
FRAMES_PER_S, ROWS_PER_FRAME = 60, 16384
BATCHES = (1 << 12, 1 << 15, 1 << 18, 1 << 20)
GOAL_DB = 40.0


class Plain(nn.Module):
    """24 Fourier features and 12-wide hidden layers: about as many multiply-adds as the grid."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        waves = torch.randn(3, 12, generator=generator) * torch.tensor([[4.0], [4.0], [2.0]])
        self.register_buffer("waves", waves)
        self.network = nn.Sequential(
            nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
        )
        self.macs = 3 * 12 + 24 * 16 + 16 * 16 + 16 * 3

    def forward(self, points: Tensor) -> Tensor:
        phase = points @ self.waves
        return self.network(torch.cat([phase.sin(), phase.cos()], 1))


class PlainStep:
    """A plain training loop for `Plain`, rows on the device."""

    def __init__(self, rows: Tensor, batch: int, *, compiled: bool, seed: int = 0) -> None:
        self.rows, self.batch = rows, batch
        self.module = Plain(seed).to(rows.device)
        self._optimizer = torch.optim.Adam(
            self.module.parameters(), lr=0.01, betas=(0.9, 0.99), fused=True, capturable=True
        )
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss = torch.compile(self._forward) if compiled else self._forward

    def _forward(self, rows: Tensor) -> Tensor:
        target = rows[:, 3:]
        soft = target.abs().clamp(max=1.0) + 0.5
        return ((self.module(rows[:, :3]) - target) / soft).square().mean()

    def run(self) -> None:
        rows = self.rows[torch.randint(len(self.rows), (self.batch,), device=self.rows.device)]
        self._optimizer.zero_grad(set_to_none=True)
        self._loss(rows).backward()
        self._optimizer.step()

    def captured(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        self._graph = graph
        return graph.replay


def main() -> None:
    args = _arguments()
    device = torch.device(args.device)
    info = {**hardware(1), "device": torch.cuda.get_device_name(device)}
    print(info, flush=True)
    rows: list[dict[str, Any]] = []
    if not args.no_rates:
        rows += _rates(device, args)
    for name in args.reach.split(",") if args.reach else []:
        rows += _reach(SCENES[name], device, args)
    if args.json:
        Path(args.json).write_text(json.dumps({"hardware": info, "rows": rows}, indent=1))


def _rates(device: torch.device, args: argparse.Namespace) -> list[dict[str, Any]]:
    scene = SCENES["fbm"]
    stream = _stream(scene, 2.2, 512, 512, 0)
    found = []
    for batch in BATCHES:
        config = TrainConfig.from_dict({"device_batch": batch, "family": "grid"})
        trainer = LiveTrainer(config, device=device)
        for one in stream:
            trainer.add_rows(one)
        mirror = trainer._mirror
        assert mirror is not None
        mirror.refresh()
        held = mirror.rows[mirror.rows[:, :3].abs().sum(1) > 0]
        learner = trainer._learners["grid"]
        for stage in ("coarse", "fine"):
            if stage == "fine":
                learner._resize_to(learner.module, learner._last)
            learner.close()
            learner.step_on_device(mirror)
            step = learner._device_step
            assert step is not None
            graph = _timed(step.run, batch, args)
            eager = _timed(step.body, batch, args)
            for engine, ms in (("graph", graph), ("eager", eager)):
                found.append(_row(f"grid {stage} {engine}", batch, ms, args.repeats))
        trainer.close()
        plain = PlainStep(held, batch, compiled=False)
        found.append(_row("mlp eager", batch, _timed(plain.run, batch, args), args.repeats))
        found.append(_row("mlp graph", batch, _timed(plain.captured(), batch, args), args.repeats))
        try:
            tuned = PlainStep(held, batch, compiled=True)
            found.append(_row("mlp compiled", batch, _timed(tuned.run, batch, args), args.repeats))
        except Exception as error:
            print("mlp compiled:", type(error).__name__, str(error)[:200])
    return found


def _timed(step: Callable[[], None], batch: int, args: argparse.Namespace) -> list[float]:
    """Milliseconds a step, several times over, by the device's events."""
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    count = max(5, min(300, (1 << 24) // batch))
    times = []
    for _ in range(args.repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / count)
    return times


def _row(what: str, batch: int, ms: list[float], repeats: int) -> dict[str, Any]:
    median = statistics.median(ms)
    row = {
        "what": what,
        "batch": batch,
        "ms_median": median,
        "ms_spread": max(ms) - min(ms),
        "repeats": repeats,
        "samples_per_s": batch / median * 1e3,
    }
    print(
        f"{what:18} batch {batch:8,}  {median:8.3f} ms (spread {row['ms_spread']:.3f})"
        f"  {row['samples_per_s'] / 1e6:8.1f} M samples/s",
        flush=True,
    )
    return row


def _reach(scene: Scene, device: torch.device, args: argparse.Namespace) -> list[dict[str, Any]]:
    plan = SlicePlan()
    stream = _stream(scene, args.seconds + 1, WIDTH, HEIGHT, 1)
    pictures = [_frame(scene, t) for t in spread(plan.test, 3)]
    points = [torch.from_numpy(p).to(device) for p, _ in pictures]
    truth = [_tonemapped(torch.from_numpy(c).to(device)) for _, c in pictures]

    def psnr_db(drawn: Callable[[Tensor], Tensor]) -> float:
        """Over all pixels of all frames."""
        pairs = zip(points, truth, strict=True)
        errors = [(_tonemapped(drawn(p)) - true).square().mean() for p, true in pairs]
        return float(-10.0 * torch.log10(torch.stack(errors).mean()))

    rows = np.concatenate(stream)
    rows = rows[plan.kind_of(rows[:, 2]) == TRAIN].copy()
    rows[:, 3:] = np.copysign(np.log1p(np.abs(rows[:, 3:])), rows[:, 3:])
    out = []
    for batch in args.batches:
        config = TrainConfig.from_dict({"device_batch": batch})
        with LiveDevice(config, plan, device, stream) as live:
            out.append(_row_of(scene, "grid", batch, *live.run(args.seconds, psnr_db)))
        plain = PlainStep(torch.from_numpy(rows).to(device), batch, compiled=False)
        out.append(_row_of(scene, "mlp", batch, *_run_plain(plain, args.seconds, psnr_db)))
    return out


def _row_of(
    scene: Scene,
    what: str,
    batch: int,
    steps: int,
    elapsed: float,
    curve: list[tuple[float, float]],
) -> dict[str, Any]:
    """A row of the figures, printed; `curve` is dB on test slices by seconds."""
    reached = next((at for at, db in curve if db >= GOAL_DB), None)
    row = {
        "what": f"reach {what}",
        "scene": scene.name,
        "batch": batch,
        "to_40_db_s": reached,
        "psnr_db": curve[-1][1] if curve else None,
        "seconds": elapsed,
        "steps": steps,
        "samples_per_s": steps * batch / elapsed,
        "curve": curve,
    }
    shown = [(round(at, 2), round(db, 1)) for at, db in curve[:: max(1, len(curve) // 10)]]
    print(
        f"{scene.name} {what}, batch {batch:,}: {GOAL_DB:g} dB after {reached} s;"
        f" {row['psnr_db']} dB after {elapsed:.1f} s, {steps} steps,"
        f" {row['samples_per_s'] / 1e6:.1f} M samples/s; {shown}",
        flush=True,
    )
    return row


class LiveDevice:
    """A live trainer on the device, fed as a host feeds it."""

    def __init__(
        self,
        config: TrainConfig,
        plan: SlicePlan,
        device: torch.device,
        stream: list[NDArray[np.float32]],
    ) -> None:
        self._trainer = LiveTrainer(config, plan, device=device)
        self._device, self._stream = device, stream

    def __enter__(self) -> LiveDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self._trainer.close()

    def run(
        self, seconds: float, psnr_db: Callable[[Callable[[Tensor], Tensor]], float]
    ) -> tuple[int, float, list[tuple[float, float]]]:
        """Steps, seconds, and dB of the published weights by seconds."""
        trainer = self._trainer
        elapsed, sent = 0.0, 0
        curve: list[tuple[float, float]] = []
        while elapsed < seconds:
            start = time.perf_counter()
            while sent < len(self._stream) and sent <= elapsed * FRAMES_PER_S:
                trainer.add_rows(self._stream[sent])
                sent += 1
            new = None
            if trainer.ready:
                trainer.train_slice(0.02)
                torch.cuda.synchronize()
                if (new := trainer.maybe_candidate()) is not None:
                    trainer.published(new)
            else:
                start -= 1.0 / FRAMES_PER_S
            elapsed += time.perf_counter() - start
            if new is not None:  # the benchmark's own look does not count
                module = build(new.spec).to(self._device)
                load_tensors(module, new.tensors)
                curve.append((elapsed, psnr_db(module.evaluate)))
        return trainer.progress().step, elapsed, curve


def _run_plain(
    plain: PlainStep, seconds: float, psnr_db: Callable[[Callable[[Tensor], Tensor]], float]
) -> tuple[int, float, list[tuple[float, float]]]:
    run, elapsed, steps = plain.captured(), 0.0, 0
    curve: list[tuple[float, float]] = []

    def drawn(points: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([decode(plain.module(part)) for part in points.split(1 << 18)])

    while elapsed < seconds:
        start = time.perf_counter()
        for _ in range(500):
            run()
        torch.cuda.synchronize()
        elapsed += time.perf_counter() - start
        steps += 500
        curve.append((elapsed, psnr_db(drawn)))
    return steps, elapsed, curve


def _tonemapped(colours: Tensor) -> Tensor:
    """As `doublure_bridge.scores.tonemap`, on the device."""
    light = colours.double().clamp(min=0.0)
    light = light / (1.0 + light)
    return torch.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def _stream(
    scene: Scene, seconds: float, width: int, height: int, seed: int
) -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    count = int(seconds * FRAMES_PER_S)
    phases = np.cumsum(rng.uniform(0.67, 1.33, count)) / FRAMES_PER_S / 1.25 % 2.0
    frames = []
    for t in 1.0 - 2.0 * np.abs(1.0 - phases):
        rows = np.empty((ROWS_PER_FRAME, 6), dtype=np.float32)
        rows[:, 0] = (rng.integers(0, width, ROWS_PER_FRAME) * 2 + 1) / width - 1
        rows[:, 1] = (rng.integers(0, height, ROWS_PER_FRAME) * 2 + 1) / height - 1
        rows[:, 2] = t
        rows[:, 3:] = scene.evaluate(rows[:, 0], rows[:, 1], np.float32(scene.denormalise(t)))
        frames.append(rows)
    return frames


def _frame(scene: Scene, t: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    x = ((np.arange(WIDTH) * 2 + 1) / WIDTH - 1).astype(np.float32)
    y = ((np.arange(HEIGHT) * 2 + 1) / HEIGHT - 1).astype(np.float32)
    gy, gx = np.meshgrid(y, x, indexing="ij")
    points = np.stack([gx.ravel(), gy.ravel(), np.full(gx.size, t, np.float32)], axis=1)
    colours = scene.evaluate(points[:, 0], points[:, 1], np.float32(scene.denormalise(t)))
    return points, np.asarray(colours, dtype=np.float32)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-rates", action="store_true")
    parser.add_argument("--reach", default="plasma,fbm", help="scenes, or nothing")
    parser.add_argument("--seconds", type=float, default=10.0, help="of training a scene")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[TrainConfig().device_batch], help="rows a step"
    )
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
