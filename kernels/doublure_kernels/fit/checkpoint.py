"""What `--resume` goes on from: one .npz of plain arrays, and JSON among them; no pickle.

One file, so that a checkpoint cannot be half old and half new. The archive's own checksums find
damage, and every array's type and shape is checked before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ResumeError, SettingError
from .files import write_whole
from .optimiser import FitState, check_state
from .settings import FitSettings

__all__ = ["Checkpoint", "load_checkpoint", "save_checkpoint"]

Array = NDArray[Any]

_FORMAT = "doublure fit"
_VERSION = 1
_ARRAYS = ("triangles", "first", "second", "best")
_STOPS = (None, "completed", "converged", "diverged")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A fit on its way.

    Attributes:
        settings: Of the fit.
        state: Where it is.
        target: What is fitted, linear RGB, [H, W, 3] float32.
        about: What the caller wants back: plain values for JSON.
    """

    settings: FitSettings
    state: FitState
    target: Array
    about: Mapping[str, Any]


def save_checkpoint(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write one whole or not at all; the one before stays until then."""
    state = checkpoint.state
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "settings": checkpoint.settings.to_dict(),
        "best_iteration": state.best_iteration,
        "stopped": state.stopped,
        "about": dict(checkpoint.about),
    }
    arrays: dict[str, Any] = {name: getattr(state, name) for name in _ARRAYS}
    arrays["losses"] = np.array(state.losses, np.float64)
    arrays["target"] = checkpoint.target
    arrays["header"] = np.frombuffer(json.dumps(header, allow_nan=False).encode(), np.uint8)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:  # given a name, NumPy would add a suffix to it
            np.savez(file, allow_pickle=False, **arrays)

    write_whole(Path(path), write)


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read one.

    Raises:
        ResumeError: There is none, or it is damaged or of another version.
    """
    path = Path(path)
    try:
        # Opened here, so that it is closed where NumPy fails to read it, too.
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in (*_ARRAYS, "losses", "target", "header")}
        header = json.loads(arrays["header"].tobytes())
    except FileNotFoundError as error:
        raise ResumeError(
            f"{path}: expected the checkpoint of a fit, got no such file; start without --resume"
        ) from error
    except Exception as error:  # a damaged archive makes its reader raise whatever it trips over
        raise _damaged(path, str(error)) from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise _damaged(path, "another kind of file")
    if header.get("version") != _VERSION:
        raise ResumeError(
            f"{path}: expected version {_VERSION}, got {header.get('version')!r}; go on with the "
            "release of doublure that began it"
        )
    try:
        settings = FitSettings.from_dict(header["settings"])
        best, stopped, about = header["best_iteration"], header["stopped"], header["about"]
    except (KeyError, TypeError, AttributeError, SettingError) as error:
        raise _damaged(path, f"a wrong header: {error}") from error
    if not isinstance(best, int) or stopped not in _STOPS or not isinstance(about, dict):
        raise _damaged(path, "a wrong header")
    target, losses = arrays["target"], arrays["losses"]
    if target.ndim != 3 or target.shape[2] != 3 or target.dtype != np.float32 or not target.size:
        raise _damaged(path, f"a target of {list(target.shape)} {target.dtype}")
    if losses.ndim != 1 or losses.dtype != np.float64:
        raise _damaged(path, f"losses of {list(losses.shape)} {losses.dtype}")
    moments = {name: arrays[name] for name in _ARRAYS}
    state = FitState(**moments, best_iteration=best, losses=losses.tolist(), stopped=stopped)
    trouble = check_state(state, settings)
    if trouble is not None:
        raise _damaged(path, trouble)
    return Checkpoint(settings, state, target, about)


def _damaged(path: Path, got: str) -> ResumeError:
    return ResumeError(
        f"{path}: expected a whole checkpoint of a fit, got: {got}; "
        "fit again into another directory"
    )
