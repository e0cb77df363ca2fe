"""What a host and its trainer need, looked at one by one: interpreter, packages, devices, ports."""

from __future__ import annotations

import json
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from .errors import SpawnError
from .spawn import find_python, make_runtime_directory, scrubbed_environment

__all__ = ["Check", "check_all", "doctor"]

_DEFAULT_PORT = 5570
# The first import of torch from a cold disk takes its time.
_IMPORT_S = 120.0

_ASK_TRAINER = """
import json, sys
import torch, doublure_trainer
print(json.dumps({
    "python": sys.version.split()[0], "torch": torch.__version__,
    "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    "where": doublure_trainer.__file__,
}))
"""
_ASK_ADAPTERS = """
import json, wgpu
print(json.dumps({
    "wgpu": wgpu.__version__,
    "adapters": [dict(a.info) for a in wgpu.gpu.enumerate_adapters_sync()],
}))
"""
_MARK = "doublure-doctor: "
_ASK_SECTIONS = f"""
import json
from importlib.metadata import entry_points
for entry in sorted(entry_points(group="doublure.doctor"), key=lambda entry: entry.name):
    try:
        for record in entry.load()():
            print({_MARK!r} + json.dumps(record), flush=True)
    except Exception as error:
        text = f"{{type(error).__name__}}: {{error}}"
        record = {{"name": entry.name, "status": "note", "text": text}}
        print({_MARK!r} + json.dumps(record), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at.

    Attributes:
        name: What.
        status: ``ok``; ``note``, something optional is missing; ``missing``, it will not work.
        text: What was found, and what to do.
    """

    name: str
    status: Literal["ok", "note", "missing"]
    text: str


def doctor(*, as_json: bool = False) -> int:
    """Print every check as it is made; 1 when something needed is missing, else 0."""
    checks = []
    for check in check_all():
        checks.append(check)
        if not as_json:
            print(f"{check.status:8} {check.name}: {check.text}", flush=True)
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    return int(any(check.status == "missing" for check in checks))


def check_all() -> Iterator[Check]:
    """Every check, in the order in which one needs the other."""
    for look in (_host, _packages, _temporary, _loopback, _port, _transport, _trainer, _adapters):
        yield look()
    yield from _sections()


def _host() -> Check:
    where = f"Python {platform.python_version()} at {sys.executable or 'an embedding program'}"
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    status: Literal["ok", "missing"] = "ok" if sys.version_info >= (3, 11) else "missing"
    return Check("host", status, f"{where}; {system}; plugin at {Path(__file__).parent}")


def _packages() -> Check:
    found, missing = [], []
    for name in ("doublure", "pyzmq", "msgpack", "numpy"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    # Vendored into an add-on's folder, doublure itself has no metadata.
    needed = [name for name in missing if name != "doublure"]
    text = ", ".join(found)
    if needed:
        command = f"{sys.executable} -m pip install {' '.join(needed)}"
        return Check("packages", "missing", f"{text}; run `{command}`")
    return Check("packages", "ok", text)


def _temporary() -> Check:
    try:
        path = make_runtime_directory()
    except OSError as error:
        return Check("runtime directory", "missing", f"{error}; set TMPDIR to a writable directory")
    mode = path.stat().st_mode & 0o777
    shutil.rmtree(path, ignore_errors=True)
    free = shutil.disk_usage(tempfile.gettempdir()).free >> 20
    return Check(
        "runtime directory", "ok", f"in {tempfile.gettempdir()}, mode {mode:o}, {free} MiB free"
    )


def _loopback() -> Check:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
    except OSError as error:
        return Check("loopback", "missing", f"cannot bind a port on 127.0.0.1: {error}")
    return Check("loopback", "ok", f"ports can be bound on 127.0.0.1 (tried {port})")


def _port() -> Check:
    with socket.socket() as caller:
        caller.settimeout(0.5)
        taken = caller.connect_ex(("127.0.0.1", _DEFAULT_PORT)) == 0
    if taken:
        text = f"something listens on {_DEFAULT_PORT}: attach to it, or use another --port"
        return Check("trainer port", "note", text)
    return Check("trainer port", "ok", f"{_DEFAULT_PORT} is free; no trainer runs there")


def _transport() -> Check:
    import zmq

    ipc = "ipc" if zmq.has("ipc") else "no ipc (loopback TCP instead)"
    return Check("transport", "ok", f"libzmq {zmq.zmq_version()}, {ipc}")


def _trainer() -> Check:
    try:
        python = find_python()
    except SpawnError as error:
        return Check("trainer", "missing", str(error))

    def describe(said: dict[str, Any]) -> str:
        devices = f"{said['cuda']} CUDA devices" if said["cuda"] else "CPU only"
        return f"Python {said['python']}, torch {said['torch']}, {devices}; {said['where']}"

    return _ask(
        "trainer", python, _ASK_TRAINER, describe, missing="missing",
        hint=f"run `{python} -m pip install 'doublure[trainer]'`, or set DOUBLURE_PYTHON",
    )  # fmt: skip


def _adapters() -> Check:
    def describe(said: dict[str, Any]) -> str:
        names = [
            f"{a.get('device', '?')} ({a.get('backend_type', '?')}, {a.get('adapter_type', '?')})"
            for a in said["adapters"]
        ]
        return f"wgpu {said['wgpu']}: {'; '.join(names) or 'no adapter, the NumPy host is used'}"

    # The host's own interpreter, not the trainer's: this is where it would draw.
    if not Path(sys.executable or "").name.lower().startswith("python"):
        return Check("wgpu", "note", "not looked at from inside an engine, which has its own GPU")
    return _ask(
        "wgpu", sys.executable, _ASK_ADAPTERS, describe, missing="note",
        hint="only the wgpu host needs it: pip install 'doublure[wgpu]'",
    )  # fmt: skip


def _sections() -> Iterator[Check]:
    """What other packages look at, by the entry points ``doublure.doctor``.

    Each names a function without arguments that yields dictionaries of a `Check`'s fields; nothing
    that the plugin needs, so no status is worse than ``note``. They run in the trainer's
    interpreter, where those packages are; what was said before a driver crashed is still told.
    """
    try:
        python = find_python()
    except SpawnError:
        return  # which the look at the trainer has said
    try:
        done = subprocess.run(
            [python, "-c", _ASK_SECTIONS],
            env=scrubbed_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_IMPORT_S,
            check=False,
        )
    except OSError as error:
        yield Check("further checks", "note", f"{python}: {error}")
        return
    except subprocess.TimeoutExpired as error:
        yield from _marked(error.stdout or b"")
        yield Check("further checks", "note", f"{python}: no answer in {_IMPORT_S:.0f} s")
        return
    yield from _marked(done.stdout)
    if done.returncode != 0:
        log = done.stderr.decode("utf-8", "replace").strip().rsplit("\n", 1)[-1]
        text = f"{python}: ended with status {done.returncode} before it was done"
        yield Check("further checks", "note", f"{text}; {log}" if log else text)


def _marked(output: bytes) -> Iterator[Check]:
    for line in output.decode("utf-8", "replace").splitlines():
        if not line.startswith(_MARK):
            continue  # drivers print what they like
        try:
            said = json.loads(line.removeprefix(_MARK))
            status: Literal["ok", "note"] = "ok" if said["status"] == "ok" else "note"
            yield Check(str(said["name"]), status, str(said["text"]))
        except (ValueError, KeyError, TypeError):
            yield Check("further checks", "note", f"not understood: {line[:80]!r}")


def _ask(
    name: str,
    python: str,
    code: str,
    describe: Callable[[dict[str, Any]], str],
    *,
    missing: Literal["note", "missing"],
    hint: str,
) -> Check:
    """Ask another interpreter: an import that crashes must not take this one with it."""
    try:
        done = subprocess.run(
            [python, "-c", code],
            env=scrubbed_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_IMPORT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name, missing, f"{python}: {error}; {hint}")
    if done.returncode != 0:
        log = done.stderr.decode("utf-8", "replace").strip()
        last = log.rsplit("\n", 1)[-1] if log else f"exit status {done.returncode}"
        return Check(name, missing, f"{python}: {last}; {hint}")
    try:
        # The last line: drivers print what they like before it.
        return Check(name, "ok", describe(json.loads(done.stdout.splitlines()[-1])))
    except (ValueError, KeyError, IndexError, TypeError):
        return Check(name, missing, f"{python} answered {done.stdout[:80]!r}; {hint}")
