"""Which version goes where: generators take all, teachers what is due, and nobody waits for a teacher."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from forgeasync.actors import MovingTeacher
from forgeasync.config import AveragedPolicy, EveryVersions, FixedSource, TeacherSource, WeightsSection
from forgeasync.controller import WeightServing
from forgeasync.faults import ReplicaState
from forgeasync.weights import Manifest
from tests.support.loops import Endpoint, Recorder, Trainer
from tests.support.replicas import ReplicaWorld, generators_of

LIVE = FixedSource.LIVE


class VersionedTrainer(Trainer):
    """Publishes whatever version it is said to have."""

    version = 0

    async def stage_weights(self, slot: int, *, when_begun: Callable[[], None] = lambda: None) -> Manifest:
        when_begun()
        return Manifest(
            version=self.version, slot=slot, layout_digest="", checksums=(), waited_s=0.0, staging_s=0.0
        )


@dataclass(slots=True, kw_only=True)
class World:
    trainer: VersionedTrainer
    generators: ReplicaWorld
    engines: ReplicaWorld
    """Of the teacher."""
    teacher: MovingTeacher
    serving: WeightServing

    async def publish(self, version: int) -> None:
        """Until the generators have it."""
        self.trainer.version = version
        await self.serving.publish()
        await self.serving.until_served(version)

    @property
    def taken(self) -> int:
        return self.engines.pool.table.state.served


@asynccontextmanager
async def world_of(source: TeacherSource, num_engines: int = 1) -> AsyncIterator[World]:
    async def nothing(*told: object) -> None:
        return None

    buffer = SimpleNamespace(progressed=Endpoint(nothing), set_served_version=Endpoint(nothing))
    async with generators_of(("a", "a")) as generators, generators_of(("a",) * num_engines) as engines:
        teacher = MovingTeacher(name="t", source=source, router=engines.router)
        trainer = VersionedTrainer()
        serving = WeightServing(
            WeightsSection(),
            trainer=trainer,  # type: ignore[arg-type]
            generators=generators.router,
            buffer=buffer,  # type: ignore[arg-type]
            recorder=Recorder(),  # type: ignore[arg-type]
            teachers=[teacher],
        )
        async with asyncio.TaskGroup() as loops:
            tasks = [loops.create_task(loop) for loop in serving.loops()]
            yield World(
                trainer=trainer, generators=generators, engines=engines, teacher=teacher, serving=serving
            )
            for task in tasks:
                task.cancel()


def run(source: TeacherSource, body: Callable[[World], Awaitable[None]], num_engines: int = 1) -> None:
    async def go() -> None:
        async with world_of(source, num_engines) as world:
            await body(world)

    asyncio.run(go())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (LIVE, [1, 2, 3, 4, 5, 6, 7]),
        (AveragedPolicy(ema=0.9), [1, 2, 3, 4, 5, 6, 7]),
        (EveryVersions(every=1), [1, 2, 3, 4, 5, 6, 7]),
        (EveryVersions(every=3), [0, 0, 3, 3, 3, 6, 6]),
        (FixedSource.FROZEN, [0] * 7),
    ],
)
def test_a_teacher_has_what_is_due(source: TeacherSource, expected: list[int]) -> None:
    async def body(world: World) -> None:
        found = []
        for version in range(1, 8):
            await world.publish(version)
            await world.serving.until_taught_by(version)
            found.append(world.taken)
        assert found == expected
        assert world.teacher.num_updates == 2 * len({*expected} - {0}), "two engines"

    run(source, body, num_engines=2)


def test_a_teacher_that_does_not_answer_holds_nobody_up_and_loses_its_turn() -> None:
    """It reads one staging buffer to the end of its lease; what it was to have is overwritten meanwhile."""

    async def body(world: World) -> None:
        world.engines.generators[0].holds.add("begin_update")
        for version in range(1, 6):
            await world.publish(version)
        assert world.taken == 0 and world.serving.ledger.num_skipped == 0
        assert world.teacher.wanted == 4
        world.engines.kill(0)
        await world.serving.until_taught_by(5)
        assert world.taken == 5, "version 4 is gone: the newest takes its place"
        assert world.engines.state(1) is ReplicaState.HEALTHY
        await world.publish(6)
        await world.serving.until_taught_by(6)
        assert world.taken == 6

    run(EveryVersions(every=2), body)


@pytest.mark.parametrize("act", ["begin_update", "stage_update"])
def test_an_update_that_dies_midway_leaves_the_others_with_the_old_version(act: str) -> None:
    async def body(world: World) -> None:
        await world.publish(1)
        await world.serving.until_taught_by(1)
        dying, other = world.engines.generators[0], world.engines.generators[1]
        dying.holds.add(act)
        other.holds.add("abandon_update")
        await world.publish(2)
        await world.engines.until(lambda: (act, 0, "begins") in world.engines.log[-4:])
        world.engines.kill(0)
        await world.engines.until(lambda: ("abandon_update", 1, "begins") in world.engines.log)
        assert world.engines.pool.table.state.of(1).version == world.taken == 1
        assert not any(call == ("finish_update", 1, "begins") for call in world.engines.log[-3:])

    run(LIVE, body, num_engines=2)


@pytest.mark.parametrize(("source", "expected"), [(LIVE, 13), (EveryVersions(every=5), 13)])
def test_a_run_that_is_resumed_waits_for_its_teacher(source: TeacherSource, expected: int) -> None:
    async def body(world: World) -> None:
        world.engines.generators[0].holds.add("finish_update")
        await world.publish(13)
        waiting = asyncio.ensure_future(world.serving.until_taught_by(13))
        await world.engines.until(lambda: ("finish_update", 0, "begins") in world.engines.log)
        assert not waiting.done()
        world.engines.kill(0)
        await waiting
        assert world.taken == expected

    run(source, body)


def test_a_run_resumed_before_the_first_due_version_waits_for_nothing() -> None:
    async def body(world: World) -> None:
        await world.publish(3)
        await world.serving.until_taught_by(3)
        assert world.taken == 0, "version 0 is what the teacher began with, and what it would have had"

    run(EveryVersions(every=5), body)
