"""How long a fit takes to become as good as the plain recipe, and how good it becomes.

Four photographs at 176 pixels, 150 triangles. The plain recipe: triangles of one size anywhere,
800 iterations at the full size, Adam (0.9, 0.999), the gradient from torch's autograd through a
straightforward eager renderer. A few of its iterations are timed and the rest is extrapolated,
since all of them take minutes; its loss is that of the same recipe on the compiled rasterizer,
whose gradients agree with torch's (printed).

    python benchmarks/fit.py --json fit.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from _machine import cpu_name
from doublure_kernels.backend import Backend
from doublure_kernels.cpu import CpuBackend, prepare
from doublure_kernels.fit import Fit, FitSettings, psnr_db, reduce_linear, srgb_to_linear

SIZE = 176
TRIANGLES = 150
PLAIN: dict[str, Any] = {"start": "random", "coarse": 0.0, "beta2": 0.999}
SIGMAS = (0.02, 0.0055, 0.0015)  # of the timed torch iterations: eager torch does not care


def main() -> None:
    args = _arguments()
    print(json.dumps(_hardware(args.threads)), flush=True)
    began = time.perf_counter()
    prepare()
    compiled = time.perf_counter() - began
    print(f"compiling or reading Numba's cache: {compiled:.1f} s", flush=True)
    rows = []
    with CpuBackend(args.threads) as backend:
        for name, target in _photographs().items():
            rows.append(_measure(name, target, backend, args))
            _say(rows[-1])
    if args.json:
        report = {"hardware": _hardware(args.threads), "compiling_s": compiled, "photos": rows}
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")


def _measure(name: str, target: Any, backend: Backend, args: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {"photo": name, "height": len(target), "width": len(target[0])}
    plain = [_run(target, backend, seed, 800, PLAIN) for seed in range(args.runs)]
    goal = statistics.median(loss for loss, _, _ in plain)
    row["plain_loss"] = goal
    row["plain_psnr_db"] = psnr_db(goal)
    row["plain_recipe_here"] = _summary([seconds for _, seconds, _ in plain])
    for label, iterations in (("ours", 800), ("ours_400", 400)):
        runs = [_run(target, backend, seed, iterations, {}, goal) for seed in range(args.runs)]
        losses = [loss for loss, _, _ in runs]
        reached = [at for _, _, at in runs if at is not None]
        row[label] = {
            "iterations": iterations,
            "seconds": _summary([seconds for _, seconds, _ in runs]),
            "loss": _summary(losses),
            "psnr_db": psnr_db(statistics.median(losses)),
            "reached_plain_loss": f"{len(reached)} of {len(runs)}",
            "seconds_to_plain_loss": _summary(reached) if reached else None,
        }
    if not args.no_torch:
        row["torch_eager"] = _torch(target, backend)
    return row


def _run(
    target: Any,
    backend: Backend,
    seed: int,
    iterations: int,
    settings: dict[str, Any],
    goal: float | None = None,
) -> tuple[float, float, float | None]:
    """Loss at full size, seconds of all iterations, and seconds until the goal was met."""
    chosen = FitSettings(triangles=TRIANGLES, iterations=iterations, seed=seed, **settings)
    with Fit(target, chosen, device=backend) as fit:
        reached = None
        began = time.perf_counter()
        while fit.stopped is None:
            fit.step(10)
            whole = fit.size_at(fit.state.best_iteration) == target.shape[:2]
            if goal is not None and reached is None and whole and fit.best_loss <= goal:
                reached = time.perf_counter() - began
        return fit.score(), time.perf_counter() - began, reached


def _torch(target: Any, backend: Backend) -> dict[str, Any]:
    """Seconds of the plain recipe in eager torch, float32, on the same threads; extrapolated."""
    import torch
    from doublure_kernels.fit.optimiser import HIGH, LOW
    from doublure_kernels.fit.start import first_triangles
    from doublure_kernels.scene import Raster, Scene

    torch.set_num_threads(getattr(backend, "threads", 1))
    goal = torch.from_numpy(target)
    start = first_triangles(target, FitSettings(triangles=TRIANGLES, start="random"))
    params = torch.from_numpy(start.copy()).requires_grad_()
    background = goal.mean(dim=(0, 1))
    rates = torch.tensor([0.004] * 6 + [0.02] * 3 + [0.01])
    low, high = torch.from_numpy(LOW), torch.from_numpy(HIGH)
    moments = [torch.zeros_like(params), torch.zeros_like(params)]
    times, agreement = [], 0.0
    for count, sigma in enumerate((SIGMAS[0], *SIGMAS), 1):  # the first one warms up
        began = time.perf_counter()
        loss = ((_draw(params, sigma, background, *target.shape[:2]) - goal) ** 2).mean()
        (gradient,) = torch.autograd.grad(loss, params)
        if count == 1:
            scene = Scene(
                start[None], np.full((1, TRIANGLES), sigma, np.float32),
                background.numpy()[None], np.array([TRIANGLES]),
            )  # fmt: skip
            _, ours = backend.fused_mse(scene, Raster(*target.shape[:2]), target[None])
            error = np.linalg.norm(ours.params[0] - gradient.numpy())
            agreement = float(error / np.linalg.norm(gradient.numpy()))
        with torch.no_grad():
            moments[0].mul_(0.9).add_(gradient, alpha=0.1)
            moments[1].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            root = (moments[1] / (1 - 0.999**count)).sqrt() + 1e-8
            params -= rates * (moments[0] / (1 - 0.9**count)) / root
            params.copy_(torch.minimum(torch.maximum(params, low), high))
        if count > 1:
            times.append(time.perf_counter() - began)
    return {
        "iterations_timed": len(times),
        "seconds_an_iteration": _summary(times),
        "seconds_of_800_extrapolated": 800 * statistics.median(times),
        "gradient_differs_relatively": agreement,
    }


def _draw(params: Any, sigma: float, background: Any, height: int, width: int) -> Any:
    """Soft triangles, all of them at every pixel, as autograd would have it written."""
    import torch

    y, x = torch.meshgrid(
        (torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij"
    )
    x, y = x.reshape(1, -1), y.reshape(1, -1)
    nearest, crosses = None, []
    for k in range(3):
        ax, ay = params[:, 2 * k, None], params[:, 2 * k + 1, None]
        after = (k + 1) % 3
        ex, ey = params[:, 2 * after, None] - ax, params[:, 2 * after + 1, None] - ay
        dx, dy = x - ax, y - ay
        along = ((dx * ex + dy * ey) / (ex * ex + ey * ey).clamp_min(1e-20)).clamp(0, 1)
        away = (dx - along * ex).square() + (dy - along * ey).square()
        nearest = away if nearest is None else torch.minimum(nearest, away)
        crosses.append(ex * dy - ey * dx >= 0)
    inside = (crosses[0] == crosses[1]) & (crosses[1] == crosses[2])
    assert nearest is not None
    nearest = nearest.clamp_min(1e-18).sqrt()
    distance = torch.where(inside, nearest, -nearest)
    weights = params[:, 9, None] * torch.sigmoid(distance / sigma)
    image = background.expand(height * width, 3)
    for weight, colour in zip(weights, params[:, 6:9], strict=True):
        image = image + weight[:, None] * (colour - image)
    return image.reshape(height, width, 3)


def _photographs() -> dict[str, Any]:
    import matplotlib.cbook
    from PIL import Image
    from skimage import data

    with Image.open(matplotlib.cbook.get_sample_data("grace_hopper.jpg")) as image:
        found = {"grace_hopper": np.asarray(image.convert("RGB"))}
    found["astronaut"] = data.astronaut()
    try:
        from sklearn.datasets import load_sample_images
    except ImportError:
        print("china and flower are left out: scikit-learn is not installed", flush=True)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found |= dict(zip(("china", "flower"), load_sample_images().images, strict=True))
    ready = {}
    for name, pixels in found.items():
        light = srgb_to_linear(pixels.astype(np.float32) / np.float32(255))
        scale = SIZE / max(pixels.shape[:2])
        height, width = (round(side * scale) for side in pixels.shape[:2])
        ready[name] = reduce_linear(light, height, width)
    return ready


def _summary(values: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "least": min(values),
        "most": max(values),
        "runs": len(values),
    }


def _say(row: dict[str, Any]) -> None:
    print(f"{row['photo']}, {row['width']} x {row['height']}")
    here = row["plain_recipe_here"]
    print(
        f"  plain recipe, 800 iterations: loss {row['plain_loss']:.6f}, "
        f"{row['plain_psnr_db']:.2f} dB, {here['median']:.2f} s on the compiled rasterizer"
    )
    if "torch_eager" in row:
        eager = row["torch_eager"]
        print(
            f"  the same in eager torch: {eager['seconds_of_800_extrapolated']:.0f} s, "
            f"extrapolated from {eager['iterations_timed']} iterations; gradients differ by "
            f"{eager['gradient_differs_relatively']:.1e}"
        )
    for label in ("ours", "ours_400"):
        one = row[label]
        all_of_it, to_goal = one["seconds"], one["seconds_to_plain_loss"]
        goal = (
            f"plain loss after {to_goal['median']:.2f} s ({to_goal['least']:.2f} to "
            f"{to_goal['most']:.2f})"
            if to_goal
            else "plain loss not reached"
        )
        print(
            f"  ours, {one['iterations']} iterations: loss {one['loss']['median']:.6f}, "
            f"{one['psnr_db']:.2f} dB, {all_of_it['median']:.2f} s ({all_of_it['least']:.2f} to "
            f"{all_of_it['most']:.2f}); {goal}, in {one['reached_plain_loss']} runs"
        )
    print(end="", flush=True)


def _hardware(threads: int | None) -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads or len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="fits of each kind, one a seed")
    parser.add_argument("--threads", type=int, help="CPU threads; all if left out")
    parser.add_argument("--no-torch", action="store_true", help="leave eager torch out")
    parser.add_argument("--json", help="write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
