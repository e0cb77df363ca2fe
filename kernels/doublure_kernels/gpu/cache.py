"""Compiled kernels on disk: whole or not at all, and known to be damaged when they are."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from pathlib import Path

__all__ = ["folder", "keep", "kept"]

_log = logging.getLogger(__name__)
_DIGEST = hashlib.sha256().digest_size


def folder(kind: str) -> Path | None:
    """`XDG_CACHE_HOME/doublure/kind`, in `~/.cache` where that is not set to an absolute path.

    None without a home directory. It need not exist.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(root) if root and os.path.isabs(root) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "doublure" / kind


def kept(path: Path | None) -> bytes | None:
    """What `keep` wrote; None where nothing is, or it was damaged since."""
    if path is None:
        return None
    with contextlib.suppress(OSError):
        found = path.read_bytes()
        digest, data = found[:_DIGEST], found[_DIGEST:]
        if data and digest == hashlib.sha256(data).digest():
            return data
    return None


def keep(path: Path | None, data: bytes) -> None:
    """Replace a file at once; where it cannot be written, it is compiled again next time."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        _log.info("compiled kernels are not kept: %s", error)
