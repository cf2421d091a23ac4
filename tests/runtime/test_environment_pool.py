"""Episodes of workers that die, or that are stuck: real processes, scripted actors."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import psutil
import pytest

from forgeasync.config import Ending, EpisodesSection, SamplingSection
from forgeasync.observability import FaultLog, ProcessListFile
from forgeasync.rollouts import EpisodeId, EpisodeOutcome
from forgeasync.runtime import (
    MAX_STUCK,
    EnvironmentPool,
    EpisodeRequest,
    Spawned,
    WorkerReport,
    supervised,
)
from tests.support.buffer_world import make_task
from tests.support.loops import Endpoint
from tests.support.standing_still import standing_still


class ScriptedWorker:
    """An actor beside a process of its own: it answers only while that runs."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.num_stuck = 0
        self.num_reports = 0
        self.hangs_on_connecting = self.is_connecting = False
        self.connect = Endpoint(self._connect)
        self.beat = Endpoint(self._beat)
        self.run_episode = Endpoint(self._run_episode)
        self.num_running = 0
        self.is_released = asyncio.Event()

    async def _answering(self) -> None:
        """A process that has stopped or died never answers, as with a real actor."""
        status = psutil.STATUS_RUNNING
        with contextlib.suppress(psutil.Error):
            status = psutil.Process(self.process.pid).status()
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            await asyncio.Event().wait()

    async def _connect(self, generators: object, lost: object) -> None:
        if self.hangs_on_connecting:
            self.is_connecting = True
            await asyncio.Event().wait()

    async def _beat(self) -> WorkerReport:
        await self._answering()
        self.num_reports += 1
        return WorkerReport(num_stuck=self.num_stuck, num_killed_processes=2, serving=None)

    async def _run_episode(self, request: EpisodeRequest) -> EpisodeOutcome:
        self.num_running += 1
        try:
            await self.is_released.wait()
            await self._answering()
        finally:
            self.num_running -= 1
        return EpisodeOutcome(
            ending=Ending.COMPLETED, agents=(), episode_s=1.0, sampling_s=0.5, attempt=request.episode.attempt
        )


@dataclass
class World:
    pool: EnvironmentPool
    workers: dict[int, ScriptedWorker] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    hangs_on_connecting: bool = False
    watching: "asyncio.Task[None] | None" = None

    async def until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            assert self.watching is None or not self.watching.done(), self.watching
            await asyncio.sleep(0.01)


def request(index: int) -> EpisodeRequest:
    return EpisodeRequest(
        task=make_task(index),
        episode=EpisodeId(group_id=1, index=index),
        generator=None,
        generator_number=0,
        sampling=SamplingSection(max_response_tokens=4),
        seed=None,
        keeps_record=False,
    )


@contextlib.asynccontextmanager
async def started(*, num_workers: int = 2, max_live: int = 4) -> AsyncIterator[World]:
    world: World

    async def spawn(rank: int, number: int) -> Spawned:
        process = standing_still()
        actor = world.workers[number] = ScriptedWorker(process)
        actor.hangs_on_connecting = world.hangs_on_connecting

        async def stop() -> None:
            return None

        return Spawned(actor=actor, pid=process.pid, stop=stop)  # type: ignore[arg-type]

    section = EpisodesSection(num_workers=num_workers, max_live_per_worker=max_live)
    told: list[str] = []
    faults = FaultLog(tell=told.append)
    pool = EnvironmentPool(
        spawn, section, num_agents=1, tell=told.append, faults=faults, listing=ProcessListFile()
    )
    world = World(pool=pool, told=told)
    try:
        await world.pool.start(num_workers)
        world.watching = asyncio.create_task(world.pool.watch())
        yield world
    finally:
        if world.watching is not None:
            world.watching.cancel()
        await world.pool.close()
        for worker in world.workers.values():
            assert worker.process.wait() is not None


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "LOOK_S", 0.01)
    monkeypatch.setattr(supervised, "BEAT_S", 0.01)


async def test_only_the_episodes_of_a_lost_worker_end() -> None:
    async with started() as world:
        running = [asyncio.create_task(world.pool.run_episode(request(index))) for index in range(4)]
        await world.until(lambda: sum(one.num_running for one in world.workers.values()) == 4)
        assert [one.num_running for one in world.workers.values()] == [2, 2]
        os.kill(world.workers[0].process.pid, signal.SIGKILL)
        await world.until(lambda: sum(one.done() for one in running) == 2)
        lost = [one.result() for one in running if one.done()]
        assert all(one.ending is Ending.INFRASTRUCTURE for one in lost)
        assert "environment worker 0 (process" in lost[0].problem
        await world.until(lambda: 2 in world.workers)
        world.workers[1].is_released.set()
        await world.until(lambda: all(one.done() for one in running))
        endings = [one.result().ending for one in running]
        assert sorted(endings) == [Ending.COMPLETED] * 2 + [Ending.INFRASTRUCTURE] * 2
        assert world.pool.metrics()["environment/num_restarted_workers"] == 1.0
        assert world.pool.metrics()["environment/num_killed_processes"] >= 2, "also those of a lost one"
        again = asyncio.create_task(world.pool.run_episode(request(0)))
        world.workers[2].is_released.set()
        assert (await again).ending is Ending.COMPLETED
        assert world.pool.num_live == 0


async def test_episodes_wait_for_room() -> None:
    async with started(num_workers=1, max_live=2) as world:
        running = [asyncio.create_task(world.pool.run_episode(request(index))) for index in range(5)]
        await world.until(lambda: world.workers[0].num_running == 2)
        for _ in range(100):
            await asyncio.sleep(0)
        assert world.workers[0].num_running == world.pool.num_live == 2
        # One that gives up waiting takes no room.
        running.pop().cancel()
        world.workers[0].is_released.set()
        outcomes = await asyncio.gather(*running)
        assert [one.ending for one in outcomes] == [Ending.COMPLETED] * 4
        assert world.pool.num_live == 0


async def test_a_worker_with_stuck_threads_retires_when_its_episodes_have_ended() -> None:
    async with started(num_workers=2) as world:
        first = asyncio.create_task(world.pool.run_episode(request(0)))
        await world.until(lambda: world.workers[0].num_running == 1)
        world.workers[0].num_stuck = MAX_STUCK + 1
        # A second answer shows that the first one was looked at.
        num_reports = world.workers[0].num_reports
        await world.until(lambda: world.workers[0].num_reports == num_reports + 2)
        second = asyncio.create_task(world.pool.run_episode(request(1)))
        third = asyncio.create_task(world.pool.run_episode(request(2)))
        await world.until(lambda: world.workers[1].num_running == 2)
        assert not world.told, "it ends what it has"
        world.workers[0].is_released.set()
        assert (await first).ending is Ending.COMPLETED
        await world.until(lambda: 2 in world.workers)
        assert "had threads that nothing ended" in world.told[0]
        world.workers[1].is_released.set()
        await asyncio.gather(second, third)


async def test_a_worker_that_is_connecting_at_the_end_is_ended_too() -> None:
    async with started() as world:
        await world.pool.connect(lambda: ((), ()))
        world.hangs_on_connecting = True
        os.kill(world.workers[0].process.pid, signal.SIGKILL)
        await world.until(lambda: 2 in world.workers and world.workers[2].is_connecting)
        # Leaving has closed the pool, and ``started`` waits for the end of each process.
