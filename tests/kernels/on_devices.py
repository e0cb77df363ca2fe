"""What tests of several devices do alike."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from doublure_kernels.fit import Fit, FitSettings

__all__ = ["check_fit", "in_threads"]


def in_threads(work: Callable[[], None], count: int = 4) -> None:
    """Run it in several threads at once, to their ends."""
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def check_fit(device: str, coarse: float) -> None:
    """A fit there is as good as on the host, and the same when it goes on from a saved state."""
    y, x = np.mgrid[0:40, 0:56]
    inside = (x / 56 - 0.4) ** 2 + (y / 40 - 0.5) ** 2 < 0.07
    ramp = np.stack([x / 56, 0.3 + 0 * x, y / 40], axis=2) * 0.5
    picture = np.where(inside[..., None], [0.9, 0.8, 0.1], ramp).astype(np.float32)
    settings = FitSettings(triangles=8, iterations=80, seed=3, coarse=coarse)
    with (
        Fit(picture, settings, device="cpu") as host,
        Fit(picture, settings, device=device) as fit,
        Fit(picture, settings, device=device) as part,
    ):
        host.step(80)
        fit.step(80)
        assert fit.device == device
        assert fit.stopped == "completed"
        np.testing.assert_allclose(fit.state.losses[:20], host.state.losses[:20], rtol=1e-3)
        assert fit.best_loss == pytest.approx(host.best_loss, rel=0.1)
        part.step(33)
        with Fit(picture, settings, device=device, state=part.state) as again:
            again.step(80)
            assert again.state.losses == fit.state.losses
            assert np.array_equal(again.state.best, fit.state.best)
