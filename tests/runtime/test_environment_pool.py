"""Episodes of workers that die, or that are stuck: real processes, scripted actors."""

import asyncio
import functools
from contextlib import AbstractAsyncContextManager

from forgeasync.config import Ending, SamplingSection
from forgeasync.rollouts import EpisodeId, EpisodeOutcome
from forgeasync.runtime import MAX_STUCK, EpisodeRequest, WorkerReport
from tests.runtime.supervised_world import Process, SupervisedWorld, answers, workers
from tests.runtime.supervised_world import started as started_pool
from tests.support.buffer_world import make_task
from tests.support.loops import Endpoint


class ScriptedWorker:
    """Its episodes end when it is released."""

    def __init__(self, process: Process, *, hangs_on_connecting: bool = False) -> None:
        self.hangs_on_connecting = hangs_on_connecting
        self.num_stuck = self.num_reports = self.num_running = 0
        self.is_connecting = False
        self.is_released = asyncio.Event()
        self._answers = answers(process)
        self.connect = Endpoint(self._connect)
        self.beat = Endpoint(self._beat)
        self.run_episode = Endpoint(self._run_episode)

    async def _connect(self, generators: object, lost: object) -> None:
        if self.hangs_on_connecting:
            self.is_connecting = True
            await asyncio.Event().wait()

    async def _beat(self) -> WorkerReport:
        await self._answers.call_one()
        self.num_reports += 1
        return WorkerReport(num_stuck=self.num_stuck, num_killed_processes=2, serving=None)

    async def _run_episode(self, request: EpisodeRequest) -> EpisodeOutcome:
        self.num_running += 1
        try:
            await self.is_released.wait()
            await self._answers.call_one()
        finally:
            self.num_running -= 1
        return EpisodeOutcome(
            ending=Ending.COMPLETED, agents=(), episode_s=1.0, sampling_s=0.5, attempt=request.episode.attempt
        )


def run_episode(world: SupervisedWorld, index: int) -> "asyncio.Task[EpisodeOutcome]":
    request = EpisodeRequest(
        task=make_task(index),
        episode=EpisodeId(group_id=1, index=index),
        generator=None,
        generator_number=0,
        sampling=SamplingSection(max_response_tokens=4),
        seed=None,
        keeps_record=False,
    )
    return asyncio.create_task(world.pool.run_episode(request))


def started(num_workers: int = 2) -> AbstractAsyncContextManager[SupervisedWorld]:
    return started_pool(
        lambda world: workers(world, num_workers=num_workers, max_live_per_worker=2),
        num_workers,
        script=ScriptedWorker,
    )


async def test_only_the_episodes_of_a_lost_worker_end() -> None:
    async with started() as world:
        running = [run_episode(world, index) for index in range(4)]
        await world.until(lambda: sum(one.num_running for one in world.actors) == 4)
        assert [one.num_running for one in world.actors] == [2, 2]
        world.kill()
        await world.until(lambda: sum(one.done() for one in running) == 2)
        lost = [one.result() for one in running if one.done()]
        assert all(one.ending is Ending.INFRASTRUCTURE for one in lost)
        assert "environment worker 0 (process" in lost[0].problem
        await world.until(lambda: len(world.actors) == 3)
        world.actors[1].is_released.set()
        await world.until(lambda: all(one.done() for one in running))
        endings = [one.result().ending for one in running]
        assert sorted(endings) == [Ending.COMPLETED] * 2 + [Ending.INFRASTRUCTURE] * 2
        assert world.pool.metrics()["environment/num_restarted_workers"] == 1.0
        assert world.pool.metrics()["environment/num_killed_processes"] >= 2, "also those of a lost one"
        again = run_episode(world, 0)
        world.actors[2].is_released.set()
        assert (await again).ending is Ending.COMPLETED
        assert world.pool.num_live == 0


async def test_episodes_wait_for_room() -> None:
    async with started(num_workers=1) as world:
        running = [run_episode(world, index) for index in range(5)]
        await world.until(lambda: world.actors[0].num_running == 2)
        for _ in range(100):
            await asyncio.sleep(0)
        assert world.actors[0].num_running == world.pool.num_live == 2
        # One that gives up waiting takes no room.
        running.pop().cancel()
        world.actors[0].is_released.set()
        outcomes = await asyncio.gather(*running)
        assert [one.ending for one in outcomes] == [Ending.COMPLETED] * 4
        assert world.pool.num_live == 0


async def test_a_worker_with_stuck_threads_retires_when_its_episodes_have_ended() -> None:
    async with started() as world:
        first = run_episode(world, 0)
        await world.until(lambda: world.actors[0].num_running == 1)
        world.actors[0].num_stuck = MAX_STUCK + 1
        # A second answer shows that the first one was looked at.
        num_reports = world.actors[0].num_reports
        await world.until(lambda: world.actors[0].num_reports == num_reports + 2)
        second = run_episode(world, 1)
        third = run_episode(world, 2)
        await world.until(lambda: world.actors[1].num_running == 2)
        assert not world.told, "it ends what it has"
        world.actors[0].is_released.set()
        assert (await first).ending is Ending.COMPLETED
        await world.until(lambda: len(world.actors) == 3)
        assert "had threads that nothing ended" in world.told[0]
        world.actors[1].is_released.set()
        await asyncio.gather(second, third)


async def test_a_worker_that_is_connecting_at_the_end_is_ended_too() -> None:
    async with started() as world:
        await world.pool.connect(lambda: ((), ()))
        world.script = functools.partial(ScriptedWorker, hangs_on_connecting=True)
        world.kill()
        await world.until(lambda: len(world.actors) == 3 and world.actors[2].is_connecting)
        # Leaving has closed the pool, and ``started`` waits for the end of each process.
