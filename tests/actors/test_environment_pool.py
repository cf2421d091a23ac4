"""A pool of workers that die, stop answering and cannot be started: real processes, scripted actors."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import psutil
import pytest

from forgeasync.actors import (
    MAX_FAILED_STARTS,
    MAX_STUCK,
    EnvironmentPool,
    EpisodeRequest,
    SpawnedWorker,
    WorkerReport,
    WorkersFail,
    environment_pool,
    supervised,
)
from forgeasync.config import Ending, EpisodesSection, SamplingSection
from forgeasync.environments import WORKER_MARK, marked_processes
from forgeasync.faults import FaultLog
from forgeasync.observability import ProcsFile
from forgeasync.rollouts import EpisodeId, EpisodeOutcome
from tests.support.buffer_world import make_task
from tests.support.loops import Endpoint
from tests.support.standing_still import CALL, standing_still


class ScriptedWorker:
    """An actor beside a process of its own: it answers only while that runs."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.num_stuck = 0
        self.num_reports = 0
        self.hangs_on_connecting = self.is_connecting = False
        self.connect = Endpoint(self._connect)
        self.report = Endpoint(self._report)
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

    async def _report(self) -> WorkerReport:
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
    faults: FaultLog
    listing: ProcsFile
    workers: dict[int, ScriptedWorker] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    num_stopped: int = 0
    fails_to_start: Callable[[int], bool] = lambda number: False
    hangs_on_connecting: Callable[[int], bool] = lambda number: False
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
async def started(
    *, num_workers: int = 2, heartbeat_s: float = 10.0, max_live: int = 4
) -> AsyncIterator[World]:
    world: World

    async def spawn(number: int) -> SpawnedWorker:
        if world.fails_to_start(number):
            raise ValueError("no such module")
        mark = f"mark-{os.getpid()}-{number}"
        # The second one is what the worker has started, and does not end with it.
        process = standing_still(child=True, env=os.environ | {WORKER_MARK: mark})
        world.workers[number] = ScriptedWorker(process)

        async def stop() -> None:
            world.num_stopped += 1

        actor = world.workers[number]
        actor.hangs_on_connecting = world.hangs_on_connecting(number)
        return SpawnedWorker(actor=actor, pid=process.pid, mark=mark, stop=stop)  # type: ignore[arg-type]

    section = EpisodesSection(num_workers=num_workers, max_live_per_worker=max_live, heartbeat_s=heartbeat_s)
    told: list[str] = []
    faults, listing = FaultLog(tell=told.append), ProcsFile()
    pool = EnvironmentPool(spawn, section, num_agents=1, tell=told.append, faults=faults, listing=listing)
    world = World(pool=pool, told=told, faults=faults, listing=listing)
    try:
        await world.pool.start()
        world.watching = asyncio.create_task(world.pool.watch())
        yield world
    finally:
        if world.watching is not None:
            world.watching.cancel()
        await world.pool.close()
        for number, worker in world.workers.items():
            assert worker.process.wait() is not None
            while marked_processes(f"mark-{os.getpid()}-{number}"):
                await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_pool, "LOOK_S", 0.01)
    monkeypatch.setattr(supervised, "BEAT_S", 0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_gone_is_named_and_replaced(number: signal.Signals) -> None:
    async def go() -> None:
        async with started(heartbeat_s=0.5) as world:
            pool = world.pool
            running = [asyncio.create_task(pool.run_episode(request(index))) for index in range(4)]
            await world.until(lambda: sum(one.num_running for one in world.workers.values()) == 4)
            assert [one.num_running for one in world.workers.values()] == [2, 2]
            os.kill(world.workers[0].process.pid, number)
            await world.until(lambda: sum(one.done() for one in running) == 2)
            lost = [one.result() for one in running if one.done()]
            assert all(one.ending is Ending.INFRASTRUCTURE for one in lost)
            assert "environment worker 0 (process" in lost[0].problem
            await world.until(lambda: 2 in world.workers)
            world.workers[1].is_released.set()
            # Those of the other worker have not noticed.
            await world.until(lambda: all(one.done() for one in running))
            endings = [one.result().ending for one in running]
            assert sorted(endings) == [Ending.COMPLETED] * 2 + [Ending.INFRASTRUCTURE] * 2
            assert (f"MainThread in {CALL} (" in world.told[0]) == (number is signal.SIGSTOP)
            if number is signal.SIGSTOP:
                assert "; the controller waits in EnvironmentPool.run_episode (forgeasync/" in world.told[0]
            why = (
                "has died"
                if number is signal.SIGKILL
                else "has not answered for episodes.heartbeat_s = 0.5 s"
            )
            await world.until(lambda: world.faults.metrics()["faults/recovered_environment"] == 1)
            assert world.faults.metrics()["faults/detected_environment"] == 1 and not world.faults.open
            assert len(world.told) == 2 and why in world.told[0]
            replacement = world.workers[2].process.pid
            assert f"was replaced by environment worker 2 (process {replacement})" in world.told[1]
            listed = {one.rank: one.pid for one in world.listing.entries}
            assert listed == {0: replacement, 1: world.workers[1].process.pid}
            assert pool.metrics()["environment/num_restarted_workers"] == 1.0
            await world.until(lambda: world.num_stopped == 1)
            assert not marked_processes(f"mark-{os.getpid()}-0"), "nothing of it is left"
            assert len(marked_processes(f"mark-{os.getpid()}-1")) == 2
            again = asyncio.create_task(pool.run_episode(request(0)))
            world.workers[2].is_released.set()
            assert (await again).ending is Ending.COMPLETED
            assert pool.num_live == 0

    asyncio.run(go())


def test_episodes_wait_for_room() -> None:
    async def go() -> None:
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

    asyncio.run(go())


def test_a_worker_with_stuck_threads_retires_when_its_episodes_have_ended() -> None:
    async def go() -> None:
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

    asyncio.run(go())


def test_a_worker_that_was_starting_is_ended_too() -> None:
    async def go() -> None:
        async with started() as world:
            await world.pool.connect(lambda: ((), ()))
            world.hangs_on_connecting = lambda number: True
            os.kill(world.workers[0].process.pid, signal.SIGKILL)
            await world.until(lambda: 2 in world.workers and world.workers[2].is_connecting)
        # Leaving has closed the pool, and ``started`` looks at what is left.

    asyncio.run(go())


def test_workers_that_cannot_be_started_any_more_end_the_run() -> None:
    async def go() -> None:
        async with started(num_workers=1) as world:
            world.fails_to_start = lambda number: True
            os.kill(world.workers[0].process.pid, signal.SIGKILL)
            with pytest.raises(WorkersFail, match=r"cannot be started: no such module"):
                await world.watching
            assert len(world.told) == 1 + MAX_FAILED_STARTS - 1

    asyncio.run(go())


def test_a_worker_that_fails_once_is_started_again() -> None:
    async def go() -> None:
        async with started(num_workers=1) as world:
            world.fails_to_start = lambda number: number == 1
            os.kill(world.workers[0].process.pid, signal.SIGKILL)
            await world.until(lambda: 2 in world.workers)
            world.workers[2].is_released.set()
            assert (await world.pool.run_episode(request(0))).ending is Ending.COMPLETED
            counts = world.faults.metrics()
            assert counts["faults/detected_environment"] == counts["faults/recovered_environment"] == 1

    asyncio.run(go())
