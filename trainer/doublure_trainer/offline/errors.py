"""What offline training refuses, and how it stops."""

from __future__ import annotations

from ..errors import TrainerError

__all__ = ["OfflineError", "StoppedError"]


class OfflineError(TrainerError):
    """A dataset, a directory or a setting that offline training cannot use."""


class StoppedError(TrainerError):
    """Training that was asked to stop, after its checkpoint was written.

    Args:
        step: Steps done.
        steps: Steps asked for.
    """

    def __init__(self, step: int, steps: int) -> None:
        super().__init__(
            f"training was stopped at step {step} of {steps}", next_step="go on with --resume"
        )
        self.step = step
        self.steps = steps
