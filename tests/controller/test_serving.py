"""New weights on their way to generators and teachers: who gets which version, and who waits for whom."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from apps.grpo import GrpoRun
from forgeasync.config import (
    AveragedPolicy,
    EveryVersions,
    FixedSource,
    TeacherSection,
    TeacherSource,
    TimeoutSection,
    WeightsSection,
)
from forgeasync.controller import WeightServing
from forgeasync.observability import root_cause
from forgeasync.runtime import ReplicaState, TeacherEngines
from forgeasync.trainer import NonFiniteWeights
from forgeasync.weights import FetchReport, Manifest
from tests.support.loops import (
    MAX_STEPS,
    Generators,
    Recorder,
    Trainer,
    let_others_run,
    make_config,
    make_manifest,
    make_run,
    run_loops,
)
from tests.support.replicas import ReplicaWorld, generators_of


class HeldTrainer(Trainer):
    """Has a version staged once it is let go; its copies have begun before."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.begun: list[int] = []

    async def stage_weights(self, slot: int, *, when_begun: Callable[[], None] = lambda: None) -> Manifest:
        version = len(self.steps)
        self.begun.append(version)
        when_begun()
        await self.let_go[version].wait()
        return make_manifest(version, slot)


def test_the_next_step_is_made_while_a_version_is_staged_and_publishes_after_it() -> None:
    trainer, generators, recorder = HeldTrainer(), Generators(2), Recorder()
    config = make_config("max_off_policy_steps=2", "max_steps=4")
    run = make_run(config, trainer=trainer, generators=generators, recorder=recorder)

    async def body() -> None:
        await let_others_run()
        assert len(trainer.steps) == 2, "the second step is made, and waits to publish"
        assert trainer.begun == [1] and generators.swapped == []
        trainer.let_go[1].set()
        await let_others_run()
        assert trainer.begun == [1, 2], "one version at a time"
        assert sorted(generators.swapped) == [(0, 1), (1, 1)]
        assert len(trainer.steps) == 3
        for version in range(2, 5):
            trainer.let_go[version].set()

    run_loops(run, body)
    assert trainer.begun == [1, 2, 3, 4] and recorder.num_published == 4
    assert sorted(generators.swapped)[-1] == (1, 4), "the last version is served before the run ends"


def test_an_evaluation_waits_until_its_version_is_staged() -> None:
    trainer, recorder = HeldTrainer(), Recorder()
    config = make_config("max_off_policy_steps=2", "evaluation.every_steps=1", "evaluation.mode=pinned")
    run = make_run(config, trainer=trainer, recorder=recorder)

    async def body() -> None:
        for version in range(1, MAX_STEPS + 1):
            await let_others_run()
            assert len(trainer.steps) == version == len(recorder.accuracies)
            trainer.let_go[version].set()

    run_loops(run, body)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_failure_ends_the_run(has_begun: bool) -> None:
    """Before the copies have begun no further step is made."""
    failure = NonFiniteWeights("publishing version 1 is refused")

    class Failing(Trainer):
        async def stage_weights(
            self, slot: int, *, when_begun: Callable[[], None] = lambda: None
        ) -> Manifest:
            if has_begun:
                when_begun()
            await let_others_run()
            raise failure

    trainer = Failing()
    run = make_run(make_config("max_off_policy_steps=2"), trainer=trainer, held_out=())
    with pytest.raises(ExceptionGroup) as caught:
        run_loops(run)
    assert root_cause(caught.value) is failure
    assert len(trainer.steps) == (2 if has_begun else 1)
    assert run.serving.ledger.newest is None, "generators never see it"


class HeldGenerators(Generators):
    """Fetches of these replicas end when they are let go."""

    def __init__(self, num_replicas: int, *held: int) -> None:
        super().__init__(num_replicas)
        self.let_go = {replica: asyncio.Event() for replica in held}

    async def begin_update(self, replica: int, manifest: Manifest) -> FetchReport:
        if replica in self.let_go:
            await self.let_go[replica].wait()
        return await super().begin_update(replica, manifest)


@asynccontextmanager
async def serving(generators: Generators) -> AsyncIterator[tuple[GrpoRun, Trainer]]:
    """A run whose serving loops go on, and its trainer."""
    trainer = Trainer()
    run = make_run(make_config(), generators=generators, trainer=trainer)
    async with asyncio.TaskGroup() as group:
        loops = [group.create_task(loop) for loop in run.serving.loops()]
        yield run, trainer
        for loop in loops:
            loop.cancel()


async def publish(run: GrpoRun, trainer: Trainer) -> None:
    """Publish what one more step has made."""
    trainer.steps.append([])
    await run.serving.publish()


def test_a_fetch_that_succeeds_makes_up_for_those_before() -> None:
    """Four fail, one succeeds, version by version: that is never five in a row."""
    generators = Generators(is_complete=lambda replica, number: number % 5 == 4)
    run = make_run(make_config(), generators=generators)
    run_loops(run)
    assert generators.num_fetches == [5 * MAX_STEPS]
    assert generators.swapped == [(0, version) for version in range(1, MAX_STEPS + 1)]


async def test_a_version_counts_as_served_once_every_generator_has_it() -> None:
    generators = HeldGenerators(2, 1)
    told: list[int] = []
    async with serving(generators) as (run, trainer):
        run.buffer.instead["set_served_version"] = AsyncMock(side_effect=told.append)
        await publish(run, trainer)
        served = asyncio.create_task(run.serving.until_served(1))
        await let_others_run()
        assert generators.swapped == [(0, 1)] and not served.done() and told == []
        generators.let_go[1].set()
        await served
        await let_others_run()
        assert told == [1]


async def test_generators_of_one_host_are_served_together() -> None:
    generators = Generators(3, hosts=[(0, 2), (1,)])
    async with serving(generators) as (run, trainer):
        for version in (1, 2):
            await publish(run, trainer)
            await run.serving.until_served(version)
        assert sorted(generators.swapped) == [(r, v) for r in range(3) for v in (1, 2)]
        assert generators.num_fetches == [2, 2], "a version is fetched once for each host"


async def test_a_version_that_found_no_free_buffer_is_published_later() -> None:
    """Two generators hold one buffer each; what is skipped meanwhile comes when they let go."""
    generators = HeldGenerators(2, 0, 1)
    async with serving(generators) as (run, trainer):
        late = generators.let_go.pop(1)
        generators.let_go[1] = asyncio.Event()
        generators.let_go[1].set()
        await publish(run, trainer)
        await let_others_run()
        assert generators.swapped == [(1, 1)], "the first one holds version 1"
        generators.let_go[1] = late
        await publish(run, trainer)
        await let_others_run()
        await publish(run, trainer)
        assert trainer.num_staged == 2 and run.serving.ledger.num_skipped == 1
        for event in generators.let_go.values():
            event.set()
        await run.serving.until_served(3)
        assert trainer.num_staged == 3


async def test_an_archive_that_leaves_out_versions_is_one_fault_until_it_has_all() -> None:
    async with serving(Generators()) as (run, trainer):
        stage = trainer.stage_weights
        refusal: str | None = None

        async def stage_weights(slot: int, **options: Callable[[], None]) -> Manifest:
            return replace(await stage(slot, **options), archive_refusal=refusal)

        trainer.stage_weights = stage_weights  # type: ignore[method-assign]
        counts = []
        for said in (None, "full", "full", None, None):
            refusal = said
            await publish(run, trainer)
            await run.serving.until_served(len(trainer.steps))
            found = run.faults.metrics()
            counts.append((found["faults/detected_storage"], found["faults/recovered_storage"]))
        assert counts == [(0, 0), (1, 0), (1, 0), (1, 1), (1, 1)]


async def test_the_end_of_a_run_reports_versions_that_the_disk_refused_last() -> None:
    trainer = Trainer()
    trainer.flush_archive = AsyncMock(return_value="full")  # type: ignore[attr-defined]
    run = make_run(make_config(), trainer=trainer)
    await run.finish_archive()
    assert run.faults.metrics()["faults/detected_storage"] == 1


LIVE = FixedSource.LIVE


class VersionedTrainer(Trainer):
    """Publishes whatever version it is said to have."""

    version = 0

    async def stage_weights(self, slot: int, *, when_begun: Callable[[], None] = lambda: None) -> Manifest:
        when_begun()
        return make_manifest(self.version, slot)


@dataclass(slots=True, kw_only=True)
class World:
    trainer: VersionedTrainer
    engines: ReplicaWorld
    """Of the teacher."""
    teacher: TeacherEngines
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
    buffer = SimpleNamespace(change=AsyncMock(return_value=None))
    async with generators_of(("a", "a")) as generators, generators_of(("a",) * num_engines) as engines:
        section = TeacherSection(model_path="x", source=source)
        teacher = TeacherEngines(engines.pool, section, TimeoutSection())
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
            yield World(trainer=trainer, engines=engines, teacher=teacher, serving=serving)
            for task in tasks:
                task.cancel()


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
async def test_a_teacher_has_what_is_due(source: TeacherSource, expected: list[int]) -> None:
    async with world_of(source, num_engines=2) as world:
        found = []
        for version in range(1, 8):
            await world.publish(version)
            await world.serving.until_taught_by(version)
            found.append(world.taken)
        assert found == expected
        assert world.teacher.num_updates == 2 * len({*expected} - {0}), "two engines"


async def test_a_teacher_that_does_not_answer_holds_nobody_up_and_loses_its_turn() -> None:
    """It reads one staging buffer to the end of its lease; what it was to have is overwritten meanwhile."""
    async with world_of(EveryVersions(every=2)) as world:
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


@pytest.mark.parametrize("act", ["begin_update", "stage_update"])
async def test_an_update_that_dies_midway_leaves_the_others_with_the_old_version(act: str) -> None:
    async with world_of(LIVE, num_engines=2) as world:
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


@pytest.mark.parametrize("source", [LIVE, EveryVersions(every=5)])
async def test_a_run_that_is_resumed_waits_for_its_teacher(source: TeacherSource) -> None:
    async with world_of(source) as world:
        world.engines.generators[0].holds.add("finish_update")
        await world.publish(13)
        waiting = asyncio.ensure_future(world.serving.until_taught_by(13))
        await world.engines.until(lambda: ("finish_update", 0, "begins") in world.engines.log)
        assert not waiting.done()
        world.engines.kill(0)
        await waiting
        assert world.taken == 13


async def test_a_run_resumed_before_the_first_due_version_waits_for_nothing() -> None:
    async with world_of(EveryVersions(every=5)) as world:
        await world.publish(3)
        await world.serving.until_taught_by(3)
        assert world.taken == 0, "version 0 is what the teacher began with, and what it would have had"
