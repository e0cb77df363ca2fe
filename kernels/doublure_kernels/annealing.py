"""Sigma over the steps of a fit: soft first, so that far triangles feel a gradient, then sharp."""

from __future__ import annotations

from .errors import SettingError

__all__ = ["anneal_sigma"]


def anneal_sigma(step: int, steps: int, start: float = 0.02, end: float = 0.0015) -> float:
    """Sigma for one step, falling geometrically.

    Args:
        step: 0 gives `start`, `steps` - 1 gives `end`; beyond either it stays there.
        steps: All of them, 1 or more; a single step gets `end`.
        start: In normalised units (an image is 1 wide and 1 high), greater than 0.
        end: Likewise.
    Raises:
        SettingError: No steps, or a sigma that is not positive.
    """
    if steps < 1:
        raise SettingError(f"anneal_sigma: expected steps of 1 or more, got {steps}")
    if not (start > 0 and end > 0):
        raise SettingError(f"anneal_sigma: expected start and end over 0, got {start} and {end}")
    if step >= steps - 1:
        return end
    if step <= 0:
        return start
    part: float = step / (steps - 1)
    return float(start * (end / start) ** part)
