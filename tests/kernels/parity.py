"""Cases for comparing a backend with the reference, and what the reference says of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from doublure_kernels.reference import ReferenceBackend
from doublure_kernels.scene import Gradients, Raster, Scene
from numpy.typing import NDArray

from . import scenes

Array = NDArray[Any]

SIZES = ((1, 1), (5, 7), (17, 9), (8, 30))
LARGE = ((33, 65), (64, 64), (96, 128))
SIGMAS = (0.02, 0.004, 0.0015)
SETTINGS = tuple(itertools.product(SIGMAS, ("sigmoid", "compact"), ("exact", "bbox6")))


@dataclass(frozen=True)
class Case:
    kind: str
    sigma: float
    raster: Raster

    def __str__(self) -> str:
        r = self.raster
        alpha = "-alpha" if r.alpha else ""
        return f"{self.kind}-{r.height}x{r.width}-{self.sigma}-{r.kernel}-{r.support}{alpha}"


def cases() -> Iterator[Case]:
    """All settings at a small size, and in turn over the others, a large one for each kind."""
    turn, large, alpha = itertools.cycle(SETTINGS), itertools.cycle(LARGE), False
    for kind in sorted(scenes.KINDS):
        for sigma, kernel, support in SETTINGS:
            yield Case(kind, sigma, Raster(7, 5, kernel, support, alpha))
            alpha = not alpha
        alpha = not alpha
        for height, width in (*SIZES, next(large)):
            sigma, kernel, support = next(turn)
            yield Case(kind, sigma, Raster(height, width, kernel, support))


CASES = list(dict.fromkeys(cases()))


@dataclass(frozen=True)
class Truth:
    """What the reference makes of a case.

    Attributes:
        scene: In float32.
        scale: The largest colour, at least 1.
        image: [B, H, W, C].
        steady: [B, H, W], the pixels whose colour does not jump.
        grad_images: [B, H, W, C], zero where gradients jump.
        grads: By `grad_images`.
        targets: [B, H, W, 3], float32; the image itself where that jumps.
        losses: [B].
        fused: dL/dC of the losses' sum.
    """

    scene: Scene
    scale: float
    image: Array
    steady: Array
    grad_images: Array
    grads: Gradients
    targets: Array
    losses: Array
    fused: Array


@cache
def truth(case: Case) -> Truth:
    raster = case.raster
    batch = 3 if raster.height < 32 else 1
    scene = scenes.make(case.kind, sigma=case.sigma, batch=batch)
    exact, reference = scenes.double(scene), ReferenceBackend()
    image = reference.forward(exact, raster)
    smooth = scenes.smooth_pixels(exact, raster)[..., None]
    rng = np.random.default_rng(11)
    grad_images = (rng.normal(size=image.shape) * smooth).astype(np.float32)
    steady = scenes.smooth_pixels(exact, raster, gradient=False)
    targets = np.where(steady[..., None], rng.random((*image.shape[:3], 3)), image[..., :3])
    targets = targets.astype(np.float32)
    errors = image[..., :3] - targets
    colours = np.abs(np.concatenate([exact.params[..., 6:9].ravel(), exact.background.ravel()]))
    return Truth(
        scene,
        max(1.0, float(colours[np.isfinite(colours)].max())),
        image,
        steady,
        grad_images,
        reference.backward(exact, raster, grad_images),
        targets,
        np.square(errors).mean((1, 2, 3)),
        2.0 * errors / (3 * raster.height * raster.width),
    )


def relative_errors(found: Gradients, expected: Gradients) -> dict[str, float]:
    """By what gradients are off, vertices, colours, opacity, sigma and background apart.

    `all`: the norm over the array. `one`: the worst triangle's, relative to its own norm, or to a
    hundredth of the largest one's where that is more (a tenth for opacity and sigma, single numbers
    that often cancel over pixels): the rounding of what was added, 6e-8 of it in float32, stays.
    """
    errors = {}
    for name, a, b in (
        ("vertices", found.params[..., :6], expected.params[..., :6]),
        ("colours", found.params[..., 6:9], expected.params[..., 6:9]),
        ("opacity", found.params[..., 9:], expected.params[..., 9:]),
        ("sigma", found.sigma[..., None], expected.sigma[..., None]),
        ("background", found.background[:, None], expected.background[:, None]),
    ):
        norms = np.linalg.norm(b, axis=-1)
        off = np.linalg.norm(np.asarray(a, np.float64) - b, axis=-1)
        if norms.max(initial=0.0) < 1e-12:  # nothing shines through: near to it is enough
            errors[f"{name}, all"] = float(off.max(initial=0.0))
            continue
        errors[f"{name}, all"] = float(np.linalg.norm(off) / np.linalg.norm(norms))
        least = (0.1 if b.shape[-1] == 1 else 0.01) * norms.max()
        errors[f"{name}, one"] = float((off / np.maximum(norms, least)).max())
    return errors
