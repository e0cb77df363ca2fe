"""Files of an export: whole or not there, and never over what somebody has already."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .errors import ExportError

__all__ = ["destinations", "write_files"]


def destinations(names: list[str], out: Path | None, *, folder: str) -> dict[str, Path]:
    """Where each file goes.

    Args:
        names: The files' own names.
        out: A directory (existing, or a path without suffix); or a file, for a single one; None for
            the working directory, in `folder` there where there are several files.
    Raises:
        ExportError: `out` is a file and there are several to write.
    """
    if out is None:
        base = Path(folder) if len(names) > 1 else Path()
    elif out.is_dir() or not out.suffix:
        base = out
    elif len(names) == 1:
        return {names[0]: out}
    else:
        raise ExportError(
            f"--out {out}",
            expected="a directory",
            got=f"a file name, for {len(names)} files ({', '.join(names)})",
            next_step=f"use --out {out.with_suffix('')}",
        )
    return {name: base / name for name in names}


def write_files(contents: Mapping[str, bytes], paths: Mapping[str, Path], *, force: bool) -> None:
    """Write each through a temporary file beside it, in order.

    Raises:
        ExportError: One is there already and `force` is false (nothing is written then), or the
            directory cannot be written.
    """
    there = [path for path in paths.values() if path.exists()]
    if there and not force:
        raise ExportError(
            str(there[0]),
            expected="no such file yet",
            next_step="choose another --out, or replace it with --force",
        )
    blocked = [path for path in there if path.is_dir()]
    if blocked:
        raise ExportError(str(blocked[0]), expected="a place for a file", got="a directory")
    try:
        for name, data in contents.items():
            path = paths[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, data, force=force)
    except OSError as error:
        raise ExportError(
            str(error.filename or "--out"),
            expected="a place that can be written",
            got=error.strerror or type(error).__name__,
        ) from error


def _write(path: Path, data: bytes, *, force: bool) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        if not force and path.exists():  # came while we were writing
            raise ExportError(str(path), expected="no such file yet", next_step="use --force")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
