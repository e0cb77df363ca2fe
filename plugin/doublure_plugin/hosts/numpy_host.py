"""The host of last resort: the same job without any device, the scene's NumPy text as its engine.

It evaluates the source at the sampled pixels, exactly those that the wgpu host would sample, and
draws a small preview of what would be on the screen.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import numpy as np
from doublure_bridge.models import ModelSpec

from ..evaluate import Evaluator
from ..scenes import Scene, pixel_centres
from .base import Array, Host, HostError, Timing, WeightsLike
from .sampling import sample_pixels

__all__ = ["NumpyHost"]

# As the wgpu host judges its device; here only rounding differs, and other weights than the
# trainer's are what it finds.
_RELATIVE = 0.02
_ABSOLUTE = 1e-3


class NumpyHost(Host):
    """Draws in NumPy on the render thread.

    Args:
        preview: Longest side of the image that `frame` draws, in pixels; the rows are sampled at
            the full `size`.
        device_share: The share of time that drawing may take; `wait` keeps to it.
    """

    name = "numpy"

    def __init__(
        self, scene: Scene, *, preview: int = 96, device_share: float = 0.5, **settings: Any
    ) -> None:
        super().__init__(scene, **settings)
        if not 0.0 < device_share <= 1.0:
            raise HostError("device_share", expected="over 0 and at most 1", got=device_share)
        if preview < 1:
            raise HostError("preview", expected="at least one pixel", got=preview)
        scale = min(1.0, preview / max(self.size))
        self.preview_size = tuple(max(1, round(side * scale)) for side in self.size)
        self.device = f"NumPy {np.__version__} on the CPU"
        self._share = device_share
        self._columns, self._lines = pixel_centres(*self.size)
        self._rows = np.empty((self.rows_per_capture, 6), np.float32)
        self._evaluator: Evaluator | None = None
        self._back: tuple[WeightsLike, Evaluator] | None = None
        self._shown = np.zeros((self.preview_size[1], self.preview_size[0], 3), np.float32)
        self._captured = False
        self._frame_seconds = 0.0

    @property
    def showing(self) -> Literal["source", "standin"]:
        return "source" if self._evaluator is None else "standin"

    def show_source(self) -> None:
        self._evaluator = None
        self._back = None
        self.stats.version = 0

    def prepare(self, spec: ModelSpec) -> None:
        """Nothing to compile."""

    def _busy(self) -> bool:
        return False

    def _collect(self) -> None:
        """Hand over what the last frame sampled: one frame late, as from a device."""
        if self._captured:
            self._captured = False
            nonfinite = int(np.count_nonzero(~np.isfinite(self._rows[:, 3:]).all(axis=1)))
            self._hand_over(self._rows, nonfinite=nonfinite)

    def _draw(self, t: float, capture_t: float, capture: bool) -> None:
        began = time.perf_counter()
        if self._evaluator is not None:
            self._shown = self._evaluator.image(*self._preview(), self.scene.normalise(t))
        else:
            self._shown = self.scene.image(*self._preview(), t)
        if capture:
            columns, lines = sample_pixels(
                self.rows_per_capture, *self.size, index=self.stats.captures, seed=self.seed
            )
            rows = self._rows
            rows[:, 0], rows[:, 1] = self._columns[columns], self._lines[lines]
            rows[:, 2] = self.scene.normalise(capture_t)
            rows[:, 3:] = self.scene.evaluate(rows[:, 0], rows[:, 1], np.float32(capture_t))
            self._captured = True
            self.stats.captures += 1
        self._frame_seconds = time.perf_counter() - began

    def _preview(self) -> tuple[int, int]:
        width, height = self.preview_size
        return width, height

    def _upload(self, weights: WeightsLike) -> None:
        evaluator = Evaluator(weights.spec, weights.tensors)
        points = np.asarray(weights.probes[0], np.float32).reshape(-1, 3)
        if len(points):
            wanted = np.asarray(weights.probes[1], np.float32).reshape(-1, 3)
            got = evaluator(points)
            wanted = np.copysign(np.log1p(np.abs(wanted)), wanted)
            error = float(np.abs(np.copysign(np.log1p(np.abs(got)), got) - wanted).mean())
            allowed = _RELATIVE * float(np.abs(wanted).mean()) + _ABSOLUTE
            if not error <= allowed:
                self._rejected(
                    weights,
                    f"self-test: other colours at the golden probes: mean log error {error:.3g},"
                    f" expected at most {allowed:.3g}",
                )
                return
        self._back = (weights, evaluator)

    def _swap(self) -> None:
        if self._back is not None:
            weights, self._evaluator = self._back
            self._back = None
            self._applied(weights)

    def wait(self) -> None:
        super().wait()
        time.sleep(min(0.5, self._frame_seconds * (1.0 / self._share - 1.0)))

    def read_source(self, t: float) -> Array:
        return self.scene.image(*self.size, t)

    def read_standin(self, t: float) -> Array:
        if self._evaluator is None:
            raise HostError("stand-in", expected="weights that were swapped in", got="none yet")
        return self._evaluator.image(*self.size, self.scene.normalise(t))

    def read_shown(self) -> Array:
        """The last preview, float32 [height, width, 3] of `preview_size`."""
        return self._shown

    def measure(self, *, repeats: int = 15, t: float | None = None) -> Timing:
        low, high = self.scene.parameter
        raw = 0.5 * (low + high) if t is None else t

        def times(draw: Any) -> tuple[float, float]:
            taken = []
            for _ in range(repeats + 1):
                began = time.perf_counter()
                draw(raw)
                taken.append((time.perf_counter() - began) * 1e3)
            first, median, third = np.percentile(taken[1:], (25, 50, 75))
            return float(median), float(third - first)

        source = times(self.read_source)
        if self._evaluator is None:
            return Timing(source[0], None, "wall clock", (source[1], None))
        standin = times(self.read_standin)
        return Timing(source[0], standin[0], "wall clock", (source[1], standin[1]))

    def source_description(self) -> dict[str, str]:
        low, high = self.scene.parameter
        return {
            "host": self.name,
            "scene": self.scene.name,
            "wgsl": self.scene.wgsl,
            "size": f"{self.size[0]}x{self.size[1]}",
            "format": "float32, linear",
            "parameter": f"{self.scene.parameter_name} {low!r}..{high!r}",
        }

    def _release(self) -> None:
        self._evaluator = None
        self._back = None
