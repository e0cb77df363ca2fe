"""How a trainer server behaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["HubSettings"]


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    """How a server behaves. Times in seconds.

    Attributes:
        bind: Where to listen for hosts; loopback only; port 0 lets the system pick.
        runtime: Private directory for the local socket, logs, and ephemeral jobs.
        directory: Where jobs are kept for good; None keeps them in `runtime`, until they end.
        token: Secret that hosts must present; empty takes every host on this machine.
        job: Module that is run as the job.
    """

    runtime: Path
    bind: str = "tcp://127.0.0.1:0"
    directory: Path | None = None
    token: bytes = b""
    device: str = "auto"
    job: str = "doublure_trainer.job"
    spares: int = 1
    max_sessions: int = 16
    credit: int = 16
    pending_bytes: int = 512 << 20
    heartbeat_ms: int = 500
    host_silence_s: float = 10.0
    open_s: float = 60.0
    job_silence_s: float = 5.0
    stop_grace_s: float = 0.2
    deaths_allowed: int = 3
    deaths_window_s: float = 60.0
