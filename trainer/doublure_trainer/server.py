"""The trainer server's process: how it starts, whom it lives for, and how it ends.

`python -m doublure_trainer.server` is what a plugin spawns (`--spawned`; docs/protocol.md, "Local
trainer"). `serve` is the same server in the foreground, which `doublure trainer` wraps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from doublure_bridge import BridgeError

from .directories import make_runtime_directory, prepare_directory, remove_tree, sweep_stale
from .errors import TrainerError
from .hub import Hub
from .parent import read_line, watch_parent
from .settings import HubSettings

__all__ = ["main", "serve", "setup_logging"]

log = logging.getLogger("doublure.trainer")

_LAST_RESORT_S = 1.5


def setup_logging(*, verbose: bool = False, handler: logging.Handler | None = None) -> None:
    """One line an event on stderr, or through the given handler."""
    if handler is None:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
        )
    root = logging.getLogger("doublure")
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    root.propagate = False


def serve(
    *,
    bind: str,
    directory: Path | None = None,
    device: str = "auto",
    spares: int = 1,
    job: str = "doublure_trainer.job",
    on_ready: Callable[[Hub], None] | None = None,
) -> None:
    """Serve in the foreground until SIGINT or SIGTERM, then stop every job in order.

    Args:
        directory: Where checkpoints and logs are kept; None keeps nothing.
        on_ready: Called once, with the hub, when it listens.

    Raises:
        BridgeError: The address or the directory cannot be used.
    """
    if directory is not None:
        directory = prepare_directory(directory)
    for path in sweep_stale():
        log.info("removed %s, left behind by a process that was killed", path)
    runtime = make_runtime_directory()
    hub: Hub | None = None
    restore: dict[int, Any] = {}
    try:
        hub = Hub(
            HubSettings(
                bind=bind,
                runtime=runtime,
                directory=directory,
                device=device,
                spares=spares,
                job=job,
            )
        )
        restore = _drain_on_signals(hub)
        log.info("listening on %s (pid %d)", hub.endpoint, os.getpid())
        if on_ready is not None:
            on_ready(hub)
        hub.run()
        log.info("stopped: no job is left")
    finally:
        if hub is not None:
            hub.close()
        remove_tree(runtime)
        for number, previous in restore.items():
            signal.signal(number, previous)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m doublure_trainer.server`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m doublure_trainer.server", description=__doc__)
    parser.add_argument("--spawned", action="store_true", help="serve the host on stdin")
    parser.add_argument("--runtime-dir", type=Path, help="private directory made by the host")
    parser.add_argument("--parent", type=int, help="process id of the host")
    parser.add_argument("--bind", default="tcp://127.0.0.1:5570", help="where to listen")
    parser.add_argument("--directory", type=Path, help="keep checkpoints and logs here")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--spares", type=int, default=1, help="warm jobs to keep waiting")
    parser.add_argument("--job", default="doublure_trainer.job", help=argparse.SUPPRESS)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args(argv)
    setup_logging(verbose=args.verbose)
    if args.spawned:
        return _spawned(args)
    try:
        serve(
            bind=args.bind,
            directory=args.directory,
            device=args.device,
            spares=args.spares,
            job=args.job,
        )
    except BridgeError as error:
        print(f"doublure trainer: {error}", file=sys.stderr)
        return 1
    return 0


def _spawned(args: argparse.Namespace) -> int:
    """Serve the one host that started us, and end with it, however it ends."""
    runtime: Path | None = args.runtime_dir
    hub: Hub | None = None
    try:
        if runtime is None or not runtime.is_dir():
            raise TrainerError("--runtime-dir", expected="an existing directory", got=str(runtime))
        token = _read_token()
        directory = None if args.directory is None else prepare_directory(args.directory)
        hub = Hub(
            HubSettings(
                runtime=runtime,
                directory=directory,
                token=token,
                device=args.device,
                spares=args.spares,
                job=args.job,
            )
        )
    except BridgeError as error:
        _say({"error": str(error)})
        log.error("%s", error)
        if runtime is not None and os.getppid() != args.parent:
            remove_tree(runtime)
        return 1
    _drain_on_signals(hub)
    watch_parent(lambda: _orphaned(hub, runtime), parent=args.parent)
    _say({"ready": True, "endpoint": hub.endpoint, "pid": os.getpid()})
    log.info("listening on %s for pid %s", hub.endpoint, args.parent)
    hub.run()
    hub.close(flush_ms=0 if hub.abandoned else 300)
    if hub.abandoned:
        log.info("the host is gone")
        remove_tree(runtime)
    return 0


def _orphaned(hub: Hub, runtime: Path) -> None:
    """The host has gone: end the loop; should it be stuck, end without it."""
    hub.abandon()
    time.sleep(_LAST_RESORT_S)
    remove_tree(runtime)
    os._exit(1)


def _read_token() -> bytes:
    line = read_line()
    try:
        token = bytes.fromhex(json.loads(line)["token"])
    except (ValueError, KeyError, TypeError):
        token = b""
    if len(token) != 32:
        raise TrainerError(
            "first line on stdin", expected='{"token": 64 hex digits}', got=f"{len(line)} bytes"
        )
    return token


def _say(fields: dict[str, Any]) -> None:
    """The one line on stdout, after which stdout ends, so that the host need not read on."""
    # A host that has gone meanwhile is met by its watcher, which also tidies up.
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(fields).encode() + b"\n")
    os.dup2(2, 1)


def _drain_on_signals(hub: Hub) -> dict[int, Any]:
    """Drain on the first SIGINT, SIGTERM or SIGHUP; returns the previous handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP"):
        numbers.append(signal.SIGHUP)
    return {number: signal.signal(number, lambda *_: hub.drain()) for number in numbers}


if __name__ == "__main__":
    sys.exit(main())
