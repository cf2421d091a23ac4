"""Publishing beside training: what goes on meanwhile, what waits for it, and what its failure ends."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from apps.grpo import GrpoRun
from forgeasync.observability import root_cause
from forgeasync.trainer import NonFiniteWeights
from forgeasync.weights import Manifest
from tests.support.loops import (
    MAX_STEPS,
    Fleet,
    Generators,
    Recorder,
    Trainer,
    make_config,
    make_problem,
    make_run,
)


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
        return Manifest(
            version=version, slot=slot, layout_digest="", checksums=(), waited_s=0.0, staging_s=0.0
        )


async def let_others_run() -> None:
    """After so many turns of the loop all that can happen has happened."""
    for _ in range(1000):
        await asyncio.sleep(0)


def watch(run: GrpoRun, body: Callable[[], Awaitable[None]]) -> None:
    """Run ``body`` beside a run."""

    async def both() -> None:
        loops = asyncio.create_task(run.run(Fleet()))
        try:
            await body()
            await loops
        finally:
            loops.cancel()

    asyncio.run(both())


def make_held_run(folder: Path, *overrides: str) -> tuple[GrpoRun, HeldTrainer, Generators, Recorder]:
    trainer, generators, recorder = HeldTrainer(), Generators(2), Recorder()
    run = make_run(
        make_config(folder, *overrides),
        trainer=trainer,
        generators=generators,
        recorder=recorder,
        held_out=[make_problem(10)],
    )
    return run, trainer, generators, recorder


def test_the_next_step_is_made_while_a_version_is_staged_and_publishes_after_it(tmp_path: Path) -> None:
    run, trainer, generators, recorder = make_held_run(tmp_path, "max_off_policy_steps=2", "max_steps=4")

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

    watch(run, body)
    assert trainer.begun == [1, 2, 3, 4] and recorder.num_published == 4
    assert sorted(generators.swapped)[-1] == (1, 4), "the last version is served before the run ends"


def test_without_age_a_step_waits_until_the_version_before_is_served(tmp_path: Path) -> None:
    run, trainer, _, _ = make_held_run(tmp_path, "max_off_policy_steps=0")

    async def body() -> None:
        for version in range(1, MAX_STEPS + 1):
            await let_others_run()
            assert len(trainer.steps) == version and trainer.begun[-1] == version
            trainer.let_go[version].set()

    watch(run, body)
    assert len(trainer.steps) == MAX_STEPS


def test_an_evaluation_waits_until_its_version_is_staged(tmp_path: Path) -> None:
    run, trainer, _, recorder = make_held_run(
        tmp_path, "max_off_policy_steps=2", "evaluation.every_steps=1", "evaluation.mode=pinned"
    )

    async def body() -> None:
        for version in range(1, MAX_STEPS + 1):
            await let_others_run()
            assert len(trainer.steps) == version == len(recorder.accuracies)
            trainer.let_go[version].set()

    watch(run, body)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_failure_ends_the_run(tmp_path: Path, has_begun: bool) -> None:
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
    run = make_run(make_config(tmp_path, "max_off_policy_steps=2"), trainer=trainer)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run.run(Fleet()))
    assert root_cause(caught.value) is failure
    assert len(trainer.steps) == (2 if has_begun else 1)
    assert run.serving.ledger.newest is None, "generators never see it"
