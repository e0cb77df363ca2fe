"""The protocol behind the public functions: what reference, cpu, vulkan and cuda each offer.

A backend is opened by its constructor, owns what it opens, and is done after `close()`. All of them
compute the same function (docs/rasterizer.md); tests hold them to the reference.
"""

from __future__ import annotations

from typing import Any, Protocol

from .scene import Gradients, Raster, Scene

__all__ = ["Backend"]


class Backend(Protocol):
    """One way of drawing. Calls block, may come from several threads, and never change an input."""

    @property
    def name(self) -> str:
        """`reference`, `cpu`, `vulkan` or `cuda`."""

    @property
    def adapter(self) -> str | None:
        """The device as its driver calls it; None where it is the processor."""

    def forward(self, scene: Scene, raster: Raster) -> Any:
        """Draw.

        Returns:
            Linear colour, [B, H, W, `raster.channels`].
        """

    def backward(self, scene: Scene, raster: Raster, grad_images: Any) -> Gradients:
        """Gradients of a loss of which those to the images are known.

        Args:
            grad_images: [B, H, W, `raster.channels`], the scene's dtype.
        """

    def fused_mse(self, scene: Scene, raster: Raster, targets: Any) -> tuple[Any, Gradients]:
        """Draw, compare and differentiate in one pass; no image is stored.

        Args:
            targets: [B, H, W, 3], the scene's dtype. `raster.alpha` must be False.
        Returns:
            Each item's mean of (C - target)² over H·W·3, [B], and the gradients of their *sum*.
        """

    def close(self) -> None:
        """Free everything; a second call does nothing."""
