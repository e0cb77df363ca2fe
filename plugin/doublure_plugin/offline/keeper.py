"""Runs one command and takes all of its processes along: when it ends, or when the host does.

A program of its own, run by path with nothing but the standard library, in between a host and the
training it started. `python keeper.py LOG COMMAND...` writes the command's output to LOG. End of
standard input means that the command is no longer wanted: SIGTERM, two seconds, SIGKILL, for it
and for every process that came from it. On Linux those that left its session are found as well,
since they become children of this process. At the end one line of JSON on standard output says
the command's status.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

__all__: list[str] = []

GRACE_S = 2.0
_TICK_S = 0.05
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        # Where it is missing, processes that leave the session are not followed.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _descendants() -> list[int]:
    """Processes that came from this one and have not ended, the nearest first; Linux only."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with (
                contextlib.suppress(OSError, IndexError, ValueError),
                open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file,
            ):
                # After the name in parentheses, which may hold any: state, parent. See proc(5).
                state, parent = file.read().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    children.setdefault(int(parent), []).append(int(name))
    found, todo = [], [os.getpid()]
    while todo:
        todo = [pid for parent in todo for pid in children.get(parent, [])]
        found += todo
    return found


def _signal_all(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    pids = _descendants()
    if process.poll() is None and process.pid not in pids:
        pids.append(process.pid)  # no /proc
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _left(process: subprocess.Popen[bytes]) -> bool:
    """Whether anything still runs; reaps what does not."""
    running = process.poll() is None
    if not running:
        # Orphans that became ours. Never before: the command's own status must not get lost.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    return running or bool(_descendants())


def _end(process: subprocess.Popen[bytes]) -> None:
    for number, seconds in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        deadline = time.monotonic() + seconds
        if number is signal.SIGTERM:
            _signal_all(process, number)
            # One that is stopped would not hear it.
            _signal_all(process, signal.SIGCONT)
        while _left(process) and time.monotonic() < deadline:
            if number is signal.SIGKILL:
                # Again each time: they may be starting others meanwhile.
                _signal_all(process, number)
            time.sleep(_TICK_S / 5)


def main() -> None:
    log, command = sys.argv[1], sys.argv[2:]
    parent = os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def in_child() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # Should this process be killed itself. It has one thread, so the signal is not early.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    try:
        with open(log, "ab") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=in_child
            )
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    wanted = True
    while wanted and process.poll() is None:
        # Input only ever ends. A parent that died without closing it has been replaced.
        ready, _, _ = select.select([0], [], [], _TICK_S)
        wanted = not (ready and not os.read(0, 4096)) and os.getppid() == parent
    status = process.poll()
    # What a command leaves running belongs to nobody.
    _end(process)
    with contextlib.suppress(OSError):
        print(json.dumps({"status": process.poll() if status is None else status}), flush=True)


if __name__ == "__main__":
    main()
