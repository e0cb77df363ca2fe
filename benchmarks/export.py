"""What an export's precision loses: dB on frames that were not trained on, errors, and bytes.

For each family, preset and scene a model is trained on a captured dataset, rounded as the exporter
rounds it, and read back with the float64 evaluator. Errors are |a - b| / (1 + |b|) against the
stored model, so that highlights count relatively.

    python benchmarks/export.py --json export.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _streams import frame, hardware
from doublure_bridge.model_file import read_model
from doublure_bridge.scores import psnr_db
from doublure_plugin.offline.capture import capture_dataset
from doublure_plugin.offline.scene_hosts import open_scene
from doublure_plugin.scenes import SCENES
from doublure_trainer.config import TrainConfig
from doublure_trainer.export.errors import ExportError
from doublure_trainer.export.variant import PRECISIONS, make_variant
from doublure_trainer.models.presets import preset
from doublure_trainer.models.reference import evaluate
from doublure_trainer.offline.train import train_offline

_TIMES = (-0.62, -0.11, 0.37, 0.83)  # between the frames that are captured


def main() -> None:
    args = _arguments()
    print(hardware(1))
    print(
        "model           scene    precision    bytes   PSNR, dB  lost, dB (spread)  largest error"
    )
    rows = []
    for model in args.models.split(","):
        family, size = model.split(":")
        for scene in args.scenes.split(","):
            found = [measure(family, size, scene, seed, args) for seed in range(args.seeds)]
            for precision in PRECISIONS:
                some = [f[precision] for f in found]
                row = {"family": family, "preset": size, "scene": scene, "precision": precision}
                if any(s is None for s in some):
                    print(f"{family:8} {size:6} {scene:8} {precision:9}   refused", flush=True)
                    rows.append({**row, "refused": True})
                    continue
                lost = [s["lost_db"] for s in some]
                row |= {
                    "bytes": some[0]["bytes"], "seeds": args.seeds, "steps": args.steps,
                    "psnr_db": statistics.median(s["psnr_db"] for s in some),
                    "lost_db": statistics.median(lost), "lost_db_spread": max(lost) - min(lost),
                    "error": max(s["error"] for s in some),
                }  # fmt: skip
                rows.append(row)
                print(
                    f"{family:8} {size:6} {scene:8} {precision:9} {row['bytes']:9,}  "
                    f"{row['psnr_db']:9.2f}  {row['lost_db']:8.3f} ({row['lost_db_spread']:.3f})  "
                    f"{row['error']:12.1e}",
                    flush=True,
                )
    if args.json:
        Path(args.json).write_text(json.dumps({"hardware": hardware(1), "rows": rows}, indent=1))


def measure(
    family: str, size: str, scene: str, seed: int, args: argparse.Namespace
) -> dict[str, dict[str, Any] | None]:
    """A model's loss by precision; None where that is refused."""
    config = TrainConfig.from_dict({"family": family, family: preset(family, size)})
    with tempfile.TemporaryDirectory() as folder:
        with open_scene(scene, size=(512, 512), name="numpy") as host:
            dataset = capture_dataset(
                host, Path(folder) / "dataset", parameter=SCENES[scene].parameter, seed=seed
            )
        out = train_offline(
            dataset, Path(folder) / "model", steps=args.steps, config=config, seed=seed
        )
        model = read_model(out / "weights.safetensors")
    pictures = [frame(SCENES[scene], t, args.size) for t in _TIMES]
    stored = [evaluate(model.spec, model.tensors, points) for points, _ in pictures]
    whole = statistics.mean(psnr_db(s, c) for s, (_, c) in zip(stored, pictures, strict=True))
    found: dict[str, dict[str, Any] | None] = {}
    for precision in PRECISIONS:
        try:
            variant = make_variant(model.spec, model.tensors, precision)
        except ExportError:
            found[precision] = None
            continue
        tensors = variant.tensors()
        ours = [evaluate(model.spec, tensors, points) for points, _ in pictures]
        psnr = statistics.mean(psnr_db(o, c) for o, (_, c) in zip(ours, pictures, strict=True))
        error = max(
            float(np.max(np.abs(o - s) / (1 + np.abs(s))))
            for o, s in zip(ours, stored, strict=True)
        )
        found[precision] = {
            "bytes": variant.nbytes, "psnr_db": psnr, "lost_db": whole - psnr, "error": error
        }  # fmt: skip
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="grid:medium,grid:small,compact:medium")
    parser.add_argument("--scenes", default="plasma,sun,edges")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--size", type=int, default=256, help="pixels a side of the frames")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
