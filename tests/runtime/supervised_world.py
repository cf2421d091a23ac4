"""A supervised pool in this process: its processes are real, and the actors beside them are scripted."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil

from forgeasync.config import EpisodesSection, ScorerSection
from forgeasync.observability import FaultLog, ProcessListFile
from forgeasync.processes import WORKER_MARK, marked_processes
from forgeasync.runtime import (
    LOCAL_HOST_ID,
    EnvironmentPool,
    LocalHost,
    ScorerProcesses,
    Spawned,
    SupervisedPool,
)
from tests.support.loops import Endpoint
from tests.support.replicas import looking_often
from tests.support.standing_still import standing_still

Process = subprocess.Popen[bytes]


def answers(process: Process, answer: object = None) -> Endpoint[[], object]:
    """A process that has stopped or died never answers, as with a real actor."""

    async def call() -> object:
        status = psutil.STATUS_ZOMBIE
        with contextlib.suppress(psutil.Error):
            status = psutil.Process(process.pid).status()
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            await asyncio.Event().wait()
        return answer

    return Endpoint(call)


@dataclass(frozen=True, slots=True)
class Started:
    process: Process
    mark: str


def only_beats(process: Process) -> SimpleNamespace:
    return SimpleNamespace(beat=answers(process))


class SupervisedWorld:
    """A pool, and the processes that it has started; ``script`` makes the actor of each one."""

    def __init__(
        self,
        build: Callable[["SupervisedWorld"], SupervisedPool[Any]],
        script: Callable[[Process], object] = only_beats,
    ) -> None:
        self.script = script
        self.told: list[str] = []
        self.faults, self.listing = FaultLog(tell=self.told.append), ProcessListFile()
        self.started: list[Started] = []
        self.actors: list[Any] = []
        self.num_spawned = self.num_stopped = 0
        self.fails_to_start: Callable[[int], bool] = lambda number: False
        self.starts_slowly = False
        self.watching: asyncio.Task[None] | None = None
        self.pool: Any = build(self)

    async def spawn(self, rank: int, number: int) -> Spawned[Any]:
        spawned, self.num_spawned = self.num_spawned, self.num_spawned + 1
        if self.fails_to_start(spawned):
            raise ValueError("no such module")
        mark = f"supervised-{os.getpid()}-{id(self)}-{len(self.started)}"
        # The second process is what the first one has started, and does not end with it.
        process = standing_still(child=True, env=os.environ | {WORKER_MARK: mark})
        self.started.append(Started(process, mark))
        if self.starts_slowly:
            try:
                await asyncio.Event().wait()
            finally:
                # As a real start does that is given up.
                process.kill()
                for one in marked_processes(mark):
                    one.kill()
        self.actors.append(self.script(process))

        async def stop() -> None:
            self.num_stopped += 1

        return Spawned(actor=self.actors[-1], pid=process.pid, mark=mark, stop=stop)

    async def until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            assert self.watching is None or not self.watching.done(), self.watching
            await asyncio.sleep(0.01)

    def pids(self) -> dict[int, int]:
        """Process by place."""
        return {one.rank: one.pid for one in self.pool.replicas}

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process at the first place."""
        os.kill(self.pids()[0], number)


def scorers(world: SupervisedWorld, **section: float) -> ScorerProcesses:
    config = ScorerSection.model_validate(section)
    return ScorerProcesses(world.spawn, world, config)


def workers(world: SupervisedWorld, **section: float) -> EnvironmentPool:
    return EnvironmentPool(
        world.spawn, world, EpisodesSection.model_validate(section), num_agents=1, tell=world.told.append
    )


@contextlib.asynccontextmanager
async def started(
    build: Callable[[SupervisedWorld], SupervisedPool[Any]],
    num: int,
    *,
    script: Callable[[Process], object] = only_beats,
    are_ended_by_monarch: bool = False,
) -> AsyncIterator[SupervisedWorld]:
    """A pool that is watched; nothing of it is left afterwards."""
    world = SupervisedWorld(build, script)
    try:
        with looking_often():
            await world.pool.start(num)
            world.watching = asyncio.create_task(world.pool.watch())
            yield world
    finally:
        if world.watching is not None:
            world.watching.cancel()
        await world.pool.close()
        num_spawned = world.num_spawned
        if are_ended_by_monarch:
            for pid in world.pids().values():
                await LocalHost(LOCAL_HOST_ID, []).kill(pid)
        for one in world.started:
            assert one.process.wait() is not None
            while marked_processes(one.mark):
                await asyncio.sleep(0.01)
        assert world.num_spawned == num_spawned, "nothing is started after the end"
