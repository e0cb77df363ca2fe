"""Dying with the parent: a server with the host that spawned it, a job with its server.

The parent holds the other end of our stdin for as long as it lives, so the end of stdin means
that it is gone, however it went. The parent's process id is compared as well, for the case that
some other process has inherited the write end. Both are watched by a thread of their own, which
works while the main thread sits inside a long native call, as long as that releases the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

__all__ = ["kill_on_parent_exit", "read_line", "watch_parent"]

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2


def watch_parent(on_gone: Callable[[], None], *, parent: int | None = None, fd: int = 0) -> None:
    """Call `on_gone`, once, from a daemon thread, when the parent has gone.

    Args:
        parent: Its process id; the current parent when left out.
        fd: Descriptor that ends when the parent does. Whatever arrives on it is discarded.
    """
    expected = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == expected:
            if os.name == "posix":
                ready, _, _ = select.select([fd], [], [], _POLL_S)
                if not ready:
                    continue
            try:
                if not os.read(fd, 4096):
                    break
            except OSError:
                break
        on_gone()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def read_line(fd: int = 0, *, limit: int = 4096) -> bytes:
    """One line from a descriptor, without reading past it; empty when it has ended.

    `sys.stdin` would read ahead into a buffer that `watch_parent` cannot see.
    """
    line = bytearray()
    while len(line) < limit:
        byte = os.read(fd, 1)
        if not byte or byte == b"\n":
            break
        line += byte
    return bytes(line)


def kill_on_parent_exit(parent: int) -> None:
    """Have the kernel SIGKILL this process when the thread that started it ends (Linux only).

    The one way that also works on a process that is stopped (SIGSTOP). Not for a server: the
    host starts it from a helper thread, which may end long before the host does.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have gone before the call took effect.
    if os.getppid() != parent:
        os._exit(1)
