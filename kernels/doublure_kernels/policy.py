"""Where `device="auto"` draws: what a call is expected to cost on the CPU and on a GPU.

Calibrated (`doublure calibrate`), the times come from calls timed on this machine; `costs` has the
model. Until then they are estimates, of fused forward and backward, 16 scenes of 256 x 256 with 32,
128 and 512 triangles: 34, 134 and 537 million pairs of a pixel and a triangle, whether they touch
or not.

- CPU: the `cpu` backend took .48 to .68 ns of processor time a pair on a server's core (AMD EPYC;
  sigma .004, corners within .12 of the centre).
- A discrete GPU: 3.3, 9.0 and 42.5 ms, published for an RTX 4090 by another rasterizer of this kind
  (diffrast, through wgpu): .08 ns a pair; the smallest leaves .6 ms to copy, start and wait.
- An integrated GPU was not measured. It is taken to have a tenth of the discrete one's arithmetic;
  it shares memory with the processor, so a call starts in half the time. By these figures it is
  never preferred.

The GPU's figures are those of a slower kernel than ours is meant to be, so `auto` errs on the side
of the CPU. It never times anything itself, and opens a GPU only for a call that may be worth it.
Tensors on a CUDA device stay there whatever their size: no copy, no waiting, and CUDA graphs can
capture the call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from . import calibrate, devices
from .backend import Backend
from .calibrate import Calibration, Measured
from .costs import TYPICAL_SHARE, Work, touching
from .errors import DeviceError, SettingError
from .scene import Scene

__all__ = [
    "CPU_NS_A_PAIR",
    "DISCRETE_NS_A_CALL",
    "DISCRETE_NS_A_PAIR",
    "INTEGRATED_NS_A_CALL",
    "INTEGRATED_NS_A_PAIR",
    "Candidate",
    "Explanation",
    "choose",
    "explain",
    "forget_calibration",
    "prefers_gpu",
]

CPU_NS_A_PAIR = 0.5
"""One core's time for one triangle at one pixel."""

DISCRETE_NS_A_PAIR = 0.08
DISCRETE_NS_A_CALL = 600_000.0
INTEGRATED_NS_A_PAIR = 0.8
INTEGRATED_NS_A_CALL = 300_000.0

_FEW, _MOST = 0.003, 0.6  # of the pairs touch: the least and the most that a scene is looked at for

_calibration: Calibration | None = None
_loaded = False
_told: set[str] = set()  # backends whose calibration was said to be stale
_DECISIONS = 4096
_decided: dict[tuple[Any, ...], str] = {}  # by sizes: deciding anew costs as much as a small call


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that `auto` looked at.

    Attributes:
        name: `cpu`, `vulkan` or `cuda`.
        adapter: The device as its driver calls it; None for the processor, or where there is none.
        expected_ms: What the call is expected to take; None where it cannot be drawn on.
        source: `calibrated`, or `estimated` from the constants of this module.
        refused: Why it cannot be drawn on; None where it can.
    """

    name: str
    adapter: str | None
    expected_ms: float | None
    source: str
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a call would be drawn, and why; `str()` is for people.

    Attributes:
        device: As asked for.
        chosen: The backend; None where asking for it is an error.
        why: One sentence.
        candidates: All that there are.
        calibration: What is known of this machine's.
    """

    device: str
    chosen: str | None
    why: str
    candidates: tuple[Candidate, ...]
    calibration: str

    def __str__(self) -> str:
        lines = [f'device="{self.device}": {self.chosen or "none"}. {self.why}']
        for one in self.candidates:
            where = f" ({one.adapter})" if one.adapter else ""
            said = one.refused or f"{one.expected_ms:.3f} ms {one.source}"
            lines.append(f"  {one.name}{where}: {said}")
        lines.append(f"  calibration: {self.calibration}")
        return "\n".join(lines)


def prefers_gpu(batch: int, triangles: int, pixels: int, discrete: bool | None = None) -> bool:
    """Whether the size rule of `device="auto"` favours a GPU for such a call, on host tensors.

    The size rule only: `auto` also needs a GPU to be there. Where the GPU that is there and the
    processor were calibrated, their times decide. Else, and for a `discrete` that is given, the
    constants do; they are estimates, see this module's text. The CPU's cores are counted, so the
    answer differs between machines.

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
    work = Work(batch, triangles, pixels)
    if discrete is None:
        gpu = devices.best_gpu()
        discrete = bool(getattr(gpu, "discrete", True))
        cpu = _measured("cpu", "cpu")
        known = _measured(gpu.name, "cpu", gpu) if cpu and gpu else None
        if cpu and known:
            return cpu.model.ms(work) > known.model.ms(work)
    return _estimate_ms("cpu", work) > _estimate_ms("gpu", work, discrete)


def choose(
    device: str,
    *,
    batch: int,
    triangles: int,
    pixels: int,
    double: bool = False,
    where: str = "cpu",
    scene: Scene | None = None,
) -> Backend:
    """The process's own backend that a call goes to.

    Args:
        device: One of `devices.DEVICES`.
        batch: Scenes.
        triangles: In each scene.
        pixels: Of each image.
        double: The call computes in float64, which `auto` leaves to the CPU.
        where: What the tensors are on, `cpu` or `cuda`.
        scene: In NumPy arrays; looked at, a sample of it, only where it makes a difference how much
            of the image triangles touch. None takes a usual scene.
    Raises:
        DeviceError: `device` is not known, or not there.
    """
    devices.check_device(device)
    if device == "auto":
        name = "cpu" if double else _auto(batch, triangles, pixels, where, scene)
        return devices.default(name)
    if device == "gpu":
        gpu = devices.best_gpu()
        if gpu is None:
            raise DeviceError(
                'device "gpu": expected a GPU backend, got none '
                f'({devices.gpu_trouble()}); use device="auto" or "cpu"'
            )
        return gpu
    return devices.default(device)


def explain(
    batch: int,
    triangles: int,
    height: int,
    width: int,
    device: str = "auto",
    *,
    where: str = "cpu",
    dtype: Any = "float32",
    share: float = TYPICAL_SHARE,
) -> Explanation:
    """Which backend a call would go to, and why; draws nothing, but opens the GPUs.

    Args:
        batch: Scenes.
        triangles: In each scene.
        height: Pixels.
        width: Pixels.
        device: One of `devices.DEVICES`.
        where: What the tensors are on, `cpu` or `cuda`.
        dtype: Of the tensors, by name, or torch's or NumPy's.
        share: Of all pairs of a pixel and a triangle, those that touch.
    Raises:
        DeviceError: `device` is not known.
        SettingError: A negative number, or another place.
    """
    devices.check_device(device)
    sizes = {"batch": batch, "triangles": triangles, "height": height, "width": width}
    for name, value in sizes.items():
        if value < 0:
            raise SettingError(f"explain: expected {name} of 0 or more, got {value}")
    if where not in ("cpu", "cuda"):
        raise SettingError(f'explain: expected where of "cpu" or "cuda", got {where!r}')
    double = "float64" in str(dtype) or "double" in str(dtype)
    work = Work(batch, triangles, height * width, share)
    candidates = tuple(_candidate(name, work, where) for name in ("cpu", *devices.GPUS))
    chosen, why = _explained(device, work, where, double)
    state = calibrate.status()[1]
    return Explanation(device, chosen, why, candidates, state)


def _explained(device: str, work: Work, where: str, double: bool) -> tuple[str | None, str]:
    if device == "gpu":
        gpu = devices.best_gpu()
        if gpu is None:
            return None, f"There is no GPU backend: {devices.gpu_trouble()}."
        return gpu.name, f"The best GPU backend there is, on {gpu.adapter}."
    if device != "auto":
        try:
            devices.default(device)
        except DeviceError as error:
            return None, f"It is not there: {error}."
        return device, "It was asked for by name."
    if double:
        return "cpu", "float64 goes to the CPU."
    name = _best(work, where)
    if where == "cuda" and name == "cuda":
        return name, "The tensors are on a CUDA device, and stay there."
    if not any(devices.gpu(gpu) for gpu in devices.GPUS):
        return name, "There is no GPU backend."
    return name, "It is expected to be the quickest."


def forget_calibration() -> None:
    """Read the calibration anew at the next call, as after `doublure calibrate`."""
    global _loaded, _calibration
    _calibration, _loaded = None, False
    _told.clear()
    _decided.clear()


# What `auto` does.


def _auto(batch: int, triangles: int, pixels: int, where: str, scene: Scene | None) -> str:
    sizes = (batch, triangles, pixels)
    if scene is None or _known() is None:
        return _decide(*sizes, TYPICAL_SHARE, where)
    low = _decide(*sizes, _FEW, where)
    if low == _decide(*sizes, _MOST, where):
        return low
    share = touching(scene.params, scene.sigma)
    # To a quarter of an octave, so that what was decided is found again.
    steps = round(4 * math.log2(max(share, _FEW)))
    return _decide(*sizes, 2.0 ** (steps / 4), where)


def _decide(batch: int, triangles: int, pixels: int, share: float, where: str) -> str:
    key = (batch, triangles, pixels, share, where, devices.generation())
    name = _decided.get(key)
    if name is None:
        if len(_decided) >= _DECISIONS:
            _decided.clear()
        name = _decided[key] = _best(Work(batch, triangles, pixels, share), where)
    return name


def _best(work: Work, where: str) -> str:
    if where == "cuda" and devices.gpu("cuda") is not None:
        return "cuda"
    best, best_ms = "cpu", _cpu_ms(work, where)
    # Before it is opened nobody knows what a GPU is: the better of what was known and of what may
    # be expected, or a stale calibration would never be found out.
    hopes = {name: _hope_ms(name, work, where) for name in devices.GPUS}
    for name in sorted(devices.GPUS, key=lambda name: hopes[name]):
        if hopes[name] >= best_ms:
            continue
        gpu = devices.gpu(name)
        if gpu is not None and (ms := _gpu_ms(gpu, work, where)) < best_ms:
            best, best_ms = name, ms
    return best


def _hope_ms(name: str, work: Work, where: str) -> float:
    known = _measured(name, where)
    estimate = _estimate_ms("gpu", work)
    return estimate if known is None else min(known.model.ms(work), estimate)


def _cpu_ms(work: Work, where: str) -> float:
    known = _measured("cpu", where)
    return _estimate_ms("cpu", work) if known is None else known.model.ms(work)


def _gpu_ms(gpu: Backend, work: Work, where: str) -> float:
    known = _measured(gpu.name, where, gpu)
    if known is None:
        return _estimate_ms("gpu", work, bool(getattr(gpu, "discrete", True)))
    return known.model.ms(work)


def _estimate_ms(kind: str, work: Work, discrete: bool = True) -> float:
    pairs = work.batch * work.triangles * work.pixels
    if kind == "cpu":
        return pairs * CPU_NS_A_PAIR / _cores() * 1e-6
    if discrete:
        return (DISCRETE_NS_A_CALL + pairs * DISCRETE_NS_A_PAIR) * 1e-6
    return (INTEGRATED_NS_A_CALL + pairs * INTEGRATED_NS_A_PAIR) * 1e-6


def _candidate(name: str, work: Work, where: str) -> Candidate:
    if name == "cpu":
        source = "calibrated" if _measured("cpu", where) else "estimated"
        return Candidate(name, None, _cpu_ms(work, where), source)
    gpu = devices.gpu(name)
    if gpu is None:
        return Candidate(name, None, None, "", devices.gpu_refusals().get(name, "not there"))
    source = "calibrated" if _measured(name, where, gpu) else "estimated"
    return Candidate(name, gpu.adapter, _gpu_ms(gpu, work, where), source)


# What is known.


def _known() -> Calibration | None:
    global _loaded, _calibration
    if not _loaded:
        _calibration, said = calibrate.status()
        _loaded = True
        if "ignored" in said:
            calibrate.warn("calibration: %s", said)
    return _calibration


def _measured(name: str, where: str, gpu: Backend | None = None) -> Measured | None:
    """What a calibration says of a backend; nothing where it was made on another GPU or driver."""
    known = _known()
    found = None if known is None else known.find(name, where)
    if found is None or gpu is None or found.device == calibrate.identity(gpu):
        return found
    if name not in _told:
        _told.add(name)
        calibrate.warn(
            "calibration: what it says of %s is of another device or driver (%s, now %s) and "
            "ignored; run `doublure calibrate` again",
            name, found.device, calibrate.identity(gpu),
        )  # fmt: skip
    return None


def _cores() -> int:
    return calibrate.cores()
