"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["TEMPORARY", "write_text", "write_whole"]

TEMPORARY = ".tmp"
"""How the name of a half-written file ends."""


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file written beside its place, forced to the disk, and renamed.

    Raises:
        OSError: As the system says, with the name of the file that was meant.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        write(temporary)
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        # A full disk is met while writing, where the system names no file.
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """UTF-8, by `write_whole`."""
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
