"""Directories of the server and its jobs: private, and gone when they should be.

A runtime directory (`doublure-*` in the system's temporary folder, mode 0700) holds the local
socket, the jobs' logs, and the job directories unless the caller gave a persistent one. Its
`owner.json` names the process that is to remove it, so that a later run can sweep what a process
left behind that was killed together with its trainer.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from .errors import DirectoryError

__all__ = [
    "OWNER_FILE",
    "PREFIX",
    "make_runtime_directory",
    "prepare_directory",
    "process_start",
    "remove_tree",
    "sweep_stale",
    "sweep_temporaries",
]

PREFIX = "doublure-"
OWNER_FILE = "owner.json"


def process_start(pid: int) -> str | None:
    """When a process began, as the system counts it; None when there is no such process.

    With the pid it names a process for good: pids are reused.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        pass
    else:
        # Field 22 (man proc_pid_stat); the command, field 2, may hold blanks and brackets.
        fields = stat.rpartition(")")[2].split()
        # A zombie holds its pid but owns nothing any more.
        return None if fields[0] in "ZX" else fields[19]
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return ""


def make_runtime_directory() -> Path:
    """A fresh private directory owned by this process."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    owner = {"pid": os.getpid(), "start": process_start(os.getpid())}
    (path / OWNER_FILE).write_text(json.dumps(owner))
    return path


def prepare_directory(path: Path) -> Path:
    """Create a directory for results if need be, and prove that it can be written.

    Raises:
        DirectoryError: It cannot; the message names the path and the system's reason.
    """
    path = path.expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise DirectoryError(
            f"directory {path}",
            expected="one that can be written",
            got=error.strerror or str(error),
            next_step="name another with --directory, or change its permissions",
        ) from None
    return path


def remove_tree(path: Path) -> bool:
    """Remove a directory and all in it; True when it is gone (or never was)."""
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def sweep_stale(root: Path | None = None) -> list[Path]:
    """Remove runtime directories whose owner is dead. Returns what was removed.

    Directories of other users, and those without a readable owner, are left alone.
    """
    removed = []
    for path in (root or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            owner = json.loads((path / OWNER_FILE).read_text())
            pid, start = int(owner["pid"]), owner.get("start")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        now = process_start(pid)
        alive = now is not None and (start is None or str(start) == now)
        if not alive and remove_tree(path):
            removed.append(path)
    return removed


def sweep_temporaries(path: Path) -> int:
    """Remove half-written files that a killed job left; returns how many.

    They are `*.tmp`, and `.checkpoint-*` of `checkpoint.Checkpoints`.
    """
    count = 0
    for file in path.rglob("*"):
        name = file.name
        if (name.endswith(".tmp") or name.startswith(".checkpoint-")) and file.is_file():
            file.unlink(missing_ok=True)
            count += 1
    return count
