"""Where `device="auto"` draws: a small model of what a call costs on the CPU and on a GPU.

All of it is an estimate until somebody calibrates it on the device at hand. Times are of fused
forward and backward, 16 scenes of 256 x 256 with 32, 128 and 512 triangles: 34, 134 and 537 million
pairs of a pixel and a triangle, whether they touch or not.

- CPU: the `cpu` backend took .48 to .68 ns of processor time a pair on a server's core (AMD EPYC;
  sigma .004, corners within .12 of the centre).
- A discrete GPU: 3.3, 9.0 and 42.5 ms, published for an RTX 4090 by another rasterizer of this kind
  (diffrast, through wgpu): .08 ns a pair; the smallest leaves .6 ms to copy, start and wait.
- An integrated GPU was not measured. It is taken to have a tenth of the discrete one's arithmetic;
  it shares memory with the processor, so a call starts in half the time. By these figures it is
  never preferred.

The GPU's figures are those of a slower kernel than ours is meant to be, so `auto` errs on the side
of the CPU.
"""

from __future__ import annotations

import os

from . import devices
from .backend import Backend
from .errors import DeviceError, SettingError

__all__ = [
    "CPU_NS_A_PAIR",
    "DISCRETE_NS_A_CALL",
    "DISCRETE_NS_A_PAIR",
    "INTEGRATED_NS_A_CALL",
    "INTEGRATED_NS_A_PAIR",
    "choose",
    "prefers_gpu",
]

CPU_NS_A_PAIR = 0.5
"""One core's time for one triangle at one pixel."""

DISCRETE_NS_A_PAIR = 0.08
DISCRETE_NS_A_CALL = 600_000.0
INTEGRATED_NS_A_PAIR = 0.8
INTEGRATED_NS_A_CALL = 300_000.0


def prefers_gpu(batch: int, triangles: int, pixels: int, discrete: bool | None = None) -> bool:
    """Whether the size rule of `device="auto"` favours a GPU for such a call.

    The size rule only: `auto` also needs a GPU to be there. The constants are estimates; see this
    module's text. The CPU's cores are counted, so the answer differs between machines.

    Args:
        batch: Scenes.
        triangles: In each scene.
        pixels: Of each image, height times width.
        discrete: The kind of GPU; None takes the one that is there, discrete where there is none.
    Raises:
        SettingError: A negative number.
    """
    for name, value in (("batch", batch), ("triangles", triangles), ("pixels", pixels)):
        if value < 0:
            raise SettingError(f"prefers_gpu: expected {name} of 0 or more, got {value}")
    if discrete is None:
        discrete = bool(getattr(devices.best_gpu(), "discrete", True))
    pairs = batch * triangles * pixels
    cpu = pairs * CPU_NS_A_PAIR / _cores()
    if discrete:
        return cpu > DISCRETE_NS_A_CALL + pairs * DISCRETE_NS_A_PAIR
    return cpu > INTEGRATED_NS_A_CALL + pairs * INTEGRATED_NS_A_PAIR


def choose(
    device: str, *, batch: int, triangles: int, pixels: int, double: bool = False
) -> Backend:
    """The process's own backend that a call goes to.

    Args:
        device: One of `devices.DEVICES`.
        batch: Scenes.
        triangles: In each scene.
        pixels: Of each image.
        double: The call computes in float64, which `auto` leaves to the CPU.
    Raises:
        DeviceError: `device` is not known, or not there.
    """
    devices.check_device(device)
    if device == "auto":
        gpu = None if double else devices.best_gpu()
        if gpu is None or not prefers_gpu(batch, triangles, pixels):
            return devices.default("cpu")
        return gpu
    if device == "gpu":
        gpu = devices.best_gpu()
        if gpu is None:
            raise DeviceError(
                'device "gpu": expected a GPU backend, got none '
                f'({devices.gpu_trouble()}); use device="auto" or "cpu"'
            )
        return gpu
    return devices.default(device)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1
