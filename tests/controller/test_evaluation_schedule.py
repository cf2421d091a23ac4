"""When a run evaluates, and what training waits for: the real loops around plain objects."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.actors import SampledResponse, sampled_response
from forgeasync.config import SamplingSection
from forgeasync.controller import EvaluationSchedule, StepRecord, max_beside, waited_every_steps
from forgeasync.observability import HeldOutScores
from forgeasync.rollouts import VersionRange, VersionSpan
from tests.support.loops import (
    Console,
    Fleet,
    Generators,
    Recorder,
    Trainer,
    make_config,
    make_prepared,
    make_problem,
    make_run,
)
from tests.support.recorded_rollouts import make_rollout


async def let_others_run() -> None:
    """After so many turns of the loop all that can happen has happened."""
    for _ in range(1000):
        await asyncio.sleep(0)


class HeldGenerators(Generators):
    """Held-out responses come when they are let go, except those of version 0."""

    def __init__(self) -> None:
        super().__init__(2)
        self.let_go = asyncio.Event()
        self.num_waiting = 0

    async def respond(
        self, prompt_ids_P: np.ndarray, *, num_samples: int, sampling: SamplingSection, seed: int
    ) -> tuple[SampledResponse, ...]:
        first = min(self._fetched)
        if first:
            self.num_waiting += 1
            await self.let_go.wait()
        (sampled,) = await super().respond(
            prompt_ids_P, num_samples=num_samples, sampling=sampling, seed=seed
        )
        versions = VersionRange(first=first, last=max(self._fetched))
        return (dataclasses.replace(sampled, versions=versions),)


class StepsRecorder(Recorder):
    """Keeps the evaluation and the counts of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.by_step: dict[int, StepRecord] = {}

    def record(self, record: StepRecord) -> None:
        super().record(record)
        self.by_step[record.step] = record

    @property
    def evaluated(self) -> dict[int, HeldOutScores]:
        return {step: one.held_out for step, one in self.by_step.items() if one.held_out is not None}


def held_run(folder: Path, *overrides: str) -> tuple[Trainer, HeldGenerators, StepsRecorder, Callable]:
    trainer, generators, recorder = Trainer(), HeldGenerators(), StepsRecorder()
    run = make_run(
        make_config(folder, *overrides),
        trainer=trainer,
        generators=generators,
        recorder=recorder,
        held_out=[make_problem(number) for number in range(40)],
    )

    def go(body: Callable[[], Awaitable[None]]) -> None:
        async def both() -> None:
            loops = asyncio.create_task(run.run(Fleet()))
            try:
                await body()
                await loops
            finally:
                loops.cancel()

        asyncio.run(both())

    return trainer, generators, recorder, go


def test_training_goes_on_while_an_evaluation_is_under_way(tmp_path: Path) -> None:
    trainer, generators, recorder, go = held_run(tmp_path, "max_steps=6", "evaluation.every_steps=1")

    async def body() -> None:
        await let_others_run()
        # The last step's line is for the last evaluation: until this one has ended it is not made.
        assert len(trainer.steps) == 5 and list(recorder.by_step) == [1, 2, 3, 4]
        assert generators.num_waiting == 16, "a quarter of the 64 sequences of the engine"
        generators.let_go.set()

    go(body)
    evaluated = recorder.evaluated
    assert list(evaluated) == [5, 6]
    assert evaluated[5].num_scored == 40
    assert evaluated[5].versions.first < evaluated[5].versions.last == 5
    assert evaluated[6].versions == VersionRange(first=6, last=6), "the last version alone"
    assert [one.counters["eval/num_skipped"] for one in recorder.by_step.values()] == [0, 1, 2, 3, 4, 4]
    assert [one.times.eval_s > 0.0 for one in recorder.by_step.values()] == [False] * 4 + [True] * 2


def test_pinned_training_waits(tmp_path: Path) -> None:
    trainer, generators, recorder, go = held_run(
        tmp_path, "max_steps=6", "evaluation.every_steps=2", "evaluation.mode=pinned"
    )

    async def body() -> None:
        await let_others_run()
        assert len(trainer.steps) == 2 and generators.num_waiting == 40
        generators.let_go.set()

    go(body)
    expected = {step: VersionRange(first=step, last=step) for step in (2, 4, 6)}
    assert {step: one.versions for step, one in recorder.evaluated.items()} == expected
    assert "eval/num_skipped" not in recorder.by_step[6].counters


def test_an_evaluation_beside_training_that_fails_ends_the_run(tmp_path: Path) -> None:
    _, generators, recorder, go = held_run(tmp_path, "max_steps=9", "evaluation.every_steps=1")

    async def fails(*arguments: object, **keywords: object) -> None:
        if min(generators._fetched):
            raise ConnectionError("the engine is dead")
        return await Generators.respond(generators, *arguments, **keywords)

    generators.respond = fails
    with pytest.raises(ExceptionGroup) as caught:
        go(let_others_run)
    assert caught.group_contains(ConnectionError, match="the engine is dead")
    assert not recorder.evaluated


@pytest.mark.parametrize(("step", "begins_again"), [(2, True), (3, False), (4, False)])
def test_a_resumed_run_begins_again_what_its_checkpoint_had_begun(
    tmp_path: Path, step: int, begins_again: bool
) -> None:
    """After step 3 none was due; after step 4, the last but one, none is begun."""
    config = make_config(tmp_path, "max_steps=5", "evaluation.every_steps=2")
    schedule = make_schedule(config, {})
    schedule.resume(step)
    assert schedule._is_under_way == begins_again


def test_a_response_carries_the_versions_that_sampled_it() -> None:
    rollout = dataclasses.replace(
        make_rollout(0, 3, 9),
        version_spans=(
            VersionSpan(version=4, start=0, end=2),
            VersionSpan(version=5, start=2, end=6),
            VersionSpan(version=7, start=6, end=9),
        ),
    )
    assert sampled_response(rollout).versions == VersionRange(first=4, last=7)


def test_what_training_waits_for_is_sampled_once_its_version_is_served(tmp_path: Path) -> None:
    served: list[int] = []
    config = make_config(tmp_path, "max_steps=4", "evaluation.every_steps=2", "evaluation.mode=pinned")

    async def until_served(version: int) -> None:
        served.append(version)

    async def go() -> None:
        schedule = EvaluationSchedule(make_prepared(config), None, Console(), until_served=until_served)
        await schedule.first()
        for step in range(1, 5):
            await schedule.after_step(step)

    asyncio.run(go())
    assert served == [0, 2, 4]


def make_schedule(config: object, served: Mapping[str, object]) -> EvaluationSchedule:
    async def until_served(version: int) -> None:
        return None

    return EvaluationSchedule(make_prepared(config), None, Console(), until_served=until_served)


@given(
    max_steps=st.integers(1, 12),
    every=st.integers(1, 5),
    first=st.integers(0, 6),
    durations=st.lists(st.integers(0, 6), min_size=12, max_size=12),
)
@settings(max_examples=150, deadline=None)
def test_every_evaluation_that_has_begun_is_on_one_line_and_the_last_version_is_evaluated(
    tmp_path_factory: pytest.TempPathFactory, max_steps: int, every: int, first: int, durations: list[int]
) -> None:
    """An evaluation takes so many steps; lines may lack one, and never get two."""
    folder = tmp_path_factory.mktemp("schedule")
    config = make_config(folder, f"max_steps={max_steps}", f"evaluation.every_steps={every}")
    first = min(first, max_steps - 1)
    begun: list[int] = []
    on_line: dict[int, object] = {}

    async def go() -> None:
        schedule = make_schedule(config, {})
        now = first
        tick = asyncio.Condition()
        is_free = False

        async def evaluate(*arguments: object, **keywords: object) -> HeldOutScores:
            number = len(begun)
            begun.append(now)
            ends = now + durations[number]
            async with tick:
                # Training that waits makes no steps: then an evaluation ends by itself.
                await tick.wait_for(lambda: now >= ends or is_free)
            return HeldOutScores(num_correct=number, score_sum=0.0, num_scored=1, num_unscored=0)

        import forgeasync.controller.evaluation as module

        real, module.evaluate_all = module.evaluate_all, evaluate
        loop = asyncio.create_task(schedule.loop())
        try:
            if first:
                schedule.resume(first)
            for step in range(first + 1, max_steps + 1):
                await asyncio.sleep(0)
                async with tick:
                    now, is_free = step, schedule.waits_after(step)
                    tick.notify_all()
                for _ in range(5):
                    await asyncio.sleep(0)
                if (ended := await schedule.after_step(step)) is not None:
                    on_line[step] = ended.num_correct
            num_skipped = schedule.metrics()["eval/num_skipped"]
        finally:
            module.evaluate_all = real
            loop.cancel()
        due = [step for step in range(first + 1, max_steps) if step % every == 0]
        again = first > 0 and first % every == 0 and first < max_steps - 1
        assert len(begun) == len(due) - num_skipped + again + 1

    asyncio.run(go())
    assert sorted(on_line.values()) == list(range(len(begun))), "each on a line of its own"
    assert on_line[max_steps] == len(begun) - 1 and begun[-1] == max_steps


def test_beside_training_evaluation_takes_a_quarter_of_the_engines(tmp_path: Path) -> None:
    assert max_beside(make_config(tmp_path, "generator={max_num_seqs: 64, num_replicas: 2}")) == 32
    assert max_beside(make_config(tmp_path, "generator={max_num_seqs: 3}")) == 1


def test_the_clock_expects_only_evaluations_that_training_waits_for(tmp_path: Path) -> None:
    assert waited_every_steps(make_config(tmp_path, "max_steps=50", "evaluation.mode=pinned")) == 20
    assert waited_every_steps(make_config(tmp_path, "max_steps=50")) == 50
