"""What figures were measured on; without torch, which not every benchmark needs."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["cpu_name"]


def cpu_name() -> str:
    """The processor as the system calls it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if lines:
            return lines[0].split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
