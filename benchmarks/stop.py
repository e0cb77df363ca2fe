"""Stop: from its arrival at the server to the job's process gone, and what is left behind.

    python benchmarks/stop.py [--quick] [--json FILE] [--runs 50] [--states training,paused]

Starts a server the way a plugin does, brings a real job (torch and all) into each state, sends
Stop, and measures on this side: from sending to `Stopped`, which the server says when waitpid has
returned. Then it counts what is left: processes, the job's directory, and, at the end, the port,
threads and descriptors of the server, and its runtime directory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq
from doublure_bridge import (
    PROTOCOL_OLDEST,
    PROTOCOL_VERSION,
    Credit,
    Dealer,
    Error,
    Heartbeat,
    Hello,
    Message,
    OpenSession,
    Progress,
    Rows,
    SessionOpened,
    Stop,
    Stopped,
    Welcome,
    decode,
)

STATES = ("opened", "waiting", "training", "paused", "persistent")
TARGET_MS = 300.0


class Host:
    """The least host that can bring a job to train."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, token: bytes) -> None:
        self.control = Dealer(context, endpoint)
        self.frames = Dealer(context, endpoint)
        self.credit = 0
        self.session = b""
        self.progress: Progress | None = None
        self._beat = 0.0
        self._rng = np.random.default_rng(0)
        self._send(
            Hello(
                protocol=PROTOCOL_VERSION, oldest=PROTOCOL_OLDEST, software="benchmark",
                host="benchmark", pid=os.getpid(), token=token,
            )
        )  # fmt: skip
        self.expect(Welcome)

    def _send(self, message: Message) -> None:
        while not self.control.send(message):
            time.sleep(0.0005)

    def ask(self) -> None:
        self._send(
            OpenSession(
                digest=bytes(32), source="benchmark", width=256, height=256,
                parameter_low=-1.0, parameter_high=1.0,
            )
        )  # fmt: skip

    def expect(self, kind: type[Message], timeout_s: float = 60.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for message in self.receive():
                if isinstance(message, kind):
                    return message
            time.sleep(0.0005)
        raise TimeoutError(f"no {kind.__name__} within {timeout_s} s")

    def receive(self) -> list[Message]:
        new: list[Message] = []
        while (got := self.control.recv()) is not None:
            message = decode(got.parts)
            if isinstance(message, Error):
                raise RuntimeError(f"{message.code}: {message.what}\n{message.detail}")
            if isinstance(message, Credit):
                self.credit += message.frames
            elif isinstance(message, Progress):
                self.progress = message
            elif isinstance(message, SessionOpened):
                self.session, self.credit = message.session, message.credit
            new.append(message)
        if self.session and time.monotonic() - self._beat > 0.4:
            self._beat = time.monotonic()
            self.control.send(Heartbeat(session=self.session, sequence=1, reply=False))
        return new

    def feed_until_training(self) -> None:
        """Rows of a smooth picture over the whole range of t, until steps are counted."""
        sent = 0
        deadline = time.monotonic() + 60
        while self.progress is None or self.progress.step == 0:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no training within 60 s: {self.progress}")
            self.receive()
            if self.credit > 0:
                t = (sent * 0.6180339887) % 1.0 * 2 - 1
                rows = self._rng.uniform(-1, 1, (2048, 6)).astype(np.float32)
                rows[:, 2] = t
                wave = np.sin(rows[:, :2] @ np.array([[3, 1, 2], [1, 4, 2]], np.float32) + t)
                rows[:, 3:] = 0.5 + 0.5 * wave
                if self.frames.send(Rows(session=self.session, sequence=sent, t=t, rows=rows)):
                    self.credit -= 1
                    sent += 1
            else:
                time.sleep(0.002)

    def stop(self) -> float:
        """Milliseconds from sending Stop to Stopped."""
        start = time.perf_counter()
        self._send(Stop(session=self.session, reason="benchmark"))
        self.expect(Stopped, 10.0)
        return (time.perf_counter() - start) * 1000

    def close(self) -> None:
        self.control.close()
        self.frames.close()


class Trainer:
    """A spawned server with its runtime directory."""

    def __init__(self, *, keep: Path | None, job: str) -> None:
        self.keep = keep
        self.runtime = Path(tempfile.mkdtemp(prefix="doublure-"))
        self.token = os.urandom(32)
        command = [
            sys.executable, "-m", "doublure_trainer.server", "--spawned",
            "--runtime-dir", str(self.runtime), "--parent", str(os.getpid()), "--job", job,
        ]  # fmt: skip
        if keep is not None:
            command += ["--directory", str(keep)]
        with (self.runtime / "server.log").open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"token": self.token.hex()}).encode() + b"\n")
        self.process.stdin.flush()
        self.endpoint = json.loads(self.process.stdout.readline())["endpoint"]
        self.process.stdout.close()
        self.me = psutil.Process(self.process.pid)

    def jobs(self) -> set[int]:
        return {child.pid for child in self.me.children(recursive=True)}

    def leftovers(self) -> Iterator[Path]:
        """Files that no session is entitled to any more."""
        if self.keep is None:
            yield from (self.runtime / "jobs").iterdir()
        else:
            yield from self.keep.rglob("*.tmp*")

    def close(self) -> int:
        """End it as a host does; returns how many things it left."""
        jobs = self.jobs()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)
        port = int(self.endpoint.rsplit(":", 1)[1])
        with socket.socket() as probe:
            probe.settimeout(1)
            port_left = probe.connect_ex(("127.0.0.1", port)) == 0
        return sum(map(psutil.pid_exists, jobs)) + port_left + self.runtime.exists()


def measure(trainer: Trainer, state: str, runs: int) -> tuple[list[float], int]:
    """Milliseconds of each Stop from one state, and the number of things left behind."""
    context: zmq.Context[Any] = zmq.Context()
    times, left = [], 0
    for _ in range(runs):
        host = Host(context, trainer.endpoint, trainer.token)
        host.ask()
        opened = host.expect(SessionOpened)
        if state in ("training", "paused", "persistent"):
            host.feed_until_training()
        if state == "paused":
            os.kill(opened.job_pid, signal.SIGSTOP)
        elif state != "opened":
            time.sleep(0.05)
        times.append(host.stop())
        left += psutil.pid_exists(opened.job_pid)
        left += sum(1 for _ in trainer.leftovers())
        host.close()
    context.term()
    return times, left


def serve_states(states: list[str], runs: int, job: str, keep: Path | None) -> list[dict[str, Any]]:
    """One server, every state in turn; a row a state, and one for the server's own end."""
    rows: list[dict[str, Any]] = []
    if not states:
        return rows
    trainer = Trainer(keep=keep, job=job)
    try:
        measure(trainer, "waiting", 1)  # what the first session allocates stays
        threads, fds = trainer.me.num_threads(), trainer.me.num_fds()
        for state in states:
            times, left = measure(trainer, state, runs)
            times.sort()
            row = {
                "state": state,
                "runs": runs,
                "stop_ms_median": round(statistics.median(times), 2),
                "stop_ms_p99": round(times[min(runs - 1, int(runs * 0.99))], 2),
                "stop_ms_max": round(times[-1], 2),
                "within_target": sum(t <= TARGET_MS for t in times),
                "left_behind": left,
            }
            rows.append(row)
            print(
                f"{state:10} {runs} runs: median {row['stop_ms_median']} ms, "
                f"p99 {row['stop_ms_p99']} ms, max {row['stop_ms_max']} ms, "
                f"{row['within_target']}/{runs} within {TARGET_MS:.0f} ms, left behind: {left}",
                flush=True,
            )
        time.sleep(0.3)
        # A spare that is being started meanwhile holds one pipe.
        grown = {
            "threads": trainer.me.num_threads() - threads,
            "descriptors": trainer.me.num_fds() - fds,
        }
    finally:
        left = trainer.close()
    count = len(states) * runs
    print(f"server after {count} sessions: grown by {grown}; left at its end: {left}")
    return [*rows, {"state": "server end", "left_behind": left, **grown}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--quick", action="store_true", help="4 runs a state")
    parser.add_argument("--runs", type=int, default=50, help="runs a state")
    parser.add_argument("--states", default=",".join(STATES))
    parser.add_argument("--job", default="doublure_trainer.job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    runs = 4 if args.quick else args.runs
    hardware = f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"
    print(hardware)
    states = args.states.split(",")
    rows = serve_states([x for x in states if x != "persistent"], runs, args.job, None)
    if "persistent" in states:
        with tempfile.TemporaryDirectory() as keep:
            rows += serve_states(["persistent"], runs, args.job, Path(keep))
    rows = [{**row, "hardware": hardware} for row in rows]
    if args.json is not None:
        args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    good = all(r["left_behind"] == 0 for r in rows) and all(
        r.get("within_target", 0) == r.get("runs", 0) for r in rows
    )
    return 0 if good else 1


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
