"""Which job a directory's source resumes: one small file, replaced as a whole."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["read_resume", "write_resume"]

_NAME = "session.json"


def read_resume(directory: Path | None, digest: bytes) -> bytes:
    """The token of an earlier session about the same source, or nothing.

    Raises:
        OSError: The file is there and cannot be read.
        ValueError: It is not what `write_resume` writes.
    """
    if directory is None:
        return b""
    try:
        stored = json.loads((directory / _NAME).read_text())
    except FileNotFoundError:
        return b""
    if not isinstance(stored, dict) or not isinstance(stored.get("resume"), str):
        raise ValueError("no resume token in it")
    if stored.get("digest") != digest.hex():
        return b""
    token = bytes.fromhex(stored["resume"])
    if len(token) != 16:
        raise ValueError(f"a resume token of {len(token)} bytes")
    return token


def write_resume(directory: Path | None, digest: bytes, token: bytes) -> None:
    """Remember the token for this source, atomically.

    Raises:
        OSError: It cannot be written.
    """
    if directory is None:
        return
    path = directory / _NAME
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"digest": digest.hex(), "resume": token.hex()}))
    part.replace(path)
