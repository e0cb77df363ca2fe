"""A hub in this process, driven by the tests themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doublure_trainer.hub import Hub
from doublure_trainer.jobs import Launch
from doublure_trainer.settings import HubSettings

from .client import Client
from .fakes import FakeJob


class Stage:
    """A hub, its fake jobs, and its clients, all played by `turn`."""

    def __init__(self, runtime: Path, **settings: Any) -> None:
        self.jobs: list[FakeJob] = []
        self.obedient = True
        self.playing = True
        self.clients: list[Client] = []
        self.hub = Hub(HubSettings(runtime=runtime, **settings), start=self._start)

    def _start(self, launch: Launch) -> FakeJob:
        self.jobs.append(FakeJob(launch, obedient=self.obedient))
        return self.jobs[-1]

    def turn(self) -> None:
        self.hub.step(5)
        if self.playing:
            for job in self.jobs:
                job.play()

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def until(self, condition: Callable[[], Any], turns: int = 600) -> None:
        for _ in range(turns):
            if condition():
                return
            for client in self.clients:
                client.receive()
            self.turn()
        raise AssertionError("the condition was never met")

    def client(self, **kwargs: Any) -> Client:
        client = Client(self.hub.endpoint, pump=self.turn, **kwargs)
        self.clients.append(client)
        return client

    def job_of(self, client: Client) -> FakeJob:
        return next(
            job for job in self.jobs
            if job.code is None and job.assignment and job.session == client.session
        )  # fmt: skip

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.hub.close(flush_ms=0)
        for job in self.jobs:
            job.end()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    stages: list[Stage] = []

    def make(**settings: Any) -> Stage:
        runtime = tmp_path / f"runtime{len(stages)}"
        runtime.mkdir(mode=0o700)
        stages.append(Stage(runtime, **settings))
        return stages[-1]

    yield make
    for made in stages:
        made.close()
