"""The smallest host: a render loop in NumPy that learns its own expensive function live.

Run it: python examples/minimal.py [--seconds 10]
"""

import argparse
import time

import doublure_plugin as doublure
import numpy as np

WIDTH, HEIGHT = 192, 128
GRID = np.meshgrid(np.linspace(-1, 1, WIDTH), np.linspace(-1, 1, HEIGHT))


def expensive(t: float) -> np.ndarray:
    """A slow shader: forty ripples. Linear RGB, float32 [H, W, 3]."""
    x, y = GRID
    level = sum(np.sin(6 * np.hypot(x - np.cos(k), y - np.sin(k)) - t) for k in range(40)) / 40
    return np.stack([level * level, 0.5 + 0.5 * level, 1 - level * level], -1).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    seconds = parser.parse_args().seconds

    source = doublure.Source("ripples", {"python": "forty ripples"}, {}, WIDTH, HEIGHT)
    standin = None
    with doublure.Session(source, parameter=(0.0, 6.0), host="minimal") as session:
        end = time.monotonic() + seconds
        while time.monotonic() < end and session.state != "failed":
            t = 3.0 + 3.0 * np.sin(2.0 * time.monotonic())
            pixels = expensive(t)
            session.capture(pixels, t)  # never blocks
            if (weights := session.poll()) is not None:  # validated already
                standin = doublure.Evaluator(weights.spec, weights.tensors)
                session.applied(weights)
                print(f"version {weights.version}: {weights.scores['psnr_db']:.1f} dB held out")
            time.sleep(0.02)
        if session.error is not None:
            raise SystemExit(str(session.error))

    if standin is None:
        raise SystemExit("nothing was learned; give it more --seconds")
    error = np.abs(standin.image(WIDTH, HEIGHT, 0.1) - expensive(3.3)).mean()
    print(f"mean error of the stand-in at t = 3.3: {error:.4f}")


if __name__ == "__main__":
    main()
