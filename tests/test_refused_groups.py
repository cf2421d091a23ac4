"""A group that is refused or cancelled is counted; its prompt comes again and the others train."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from apps.grpo import GrpoRun
from apps.preparation import prepare
from forgeasync.actors.generator import CancelledGroup, RefusedGroup
from forgeasync.buffer.replay_buffer import DropReason
from forgeasync.config.schema import SamplingSection
from forgeasync.data.rollout import Group, StoredRollout
from forgeasync.data.task import Task
from tests.support.models import write_random_model
from tests.support.rollouts import make_stored_rollout
from tests.support.runs import tiny_config

REFUSED = (1, 2)
"""Which of the generator's answers, counted from 0."""
CANCELLED = (3,)


class Generators:
    """Answers as a router does; some groups are broken, some given up."""

    num_replicas = 1

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.freed: list[StoredRollout] = []

    async def sample_group(
        self, group_id: int, prompt_ids_P: np.ndarray, *, num_samples: int, sampling: SamplingSection
    ) -> tuple[StoredRollout, ...] | RefusedGroup | CancelledGroup:
        self.prompts.append(tuple(prompt_ids_P.tolist()))
        if len(self.prompts) - 1 in REFUSED:
            return RefusedGroup(problem=f"rollout 0 of group {group_id}: routed_experts: found 2; 3")
        if len(self.prompts) - 1 in CANCELLED:
            return CancelledGroup()
        return tuple(make_stored_rollout((0, 0, 4)) for _ in range(num_samples))

    async def free_payloads(self, rollouts: Iterable[StoredRollout]) -> None:
        self.freed += rollouts


class Scorer:
    """Its one endpoint, called as an actor's."""

    @property
    def score(self) -> "Scorer":
        return self

    async def call_one(self, task: Task, responses: list[str]) -> tuple[float, ...]:
        return tuple(float(index) for index in range(len(responses)))


class Recorder:
    """Remembers what it is warned of."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def warn(self, problem: str) -> None:
        self.problems.append(problem)


async def _first_batch(run: GrpoRun) -> list[Group]:
    loops = [asyncio.create_task(loop) for loop in (run.collect(), run.score())]
    batch, stale = await asyncio.wait_for(run.buffer.take(0), 20)
    assert not stale
    await run.free(batch)
    for loop in loops:
        loop.cancel()
    return batch


def test_groups_that_do_not_come_are_counted_and_their_prompts_come_again(tmp_path: Path) -> None:
    config = tiny_config(write_random_model(tmp_path / "model"))
    generators, recorder = Generators(), Recorder()
    run = GrpoRun(
        config,
        prepare(config),
        trainer=None,
        generators=generators,
        scorer=Scorer(),
        recorder=recorder,
    )
    batch = asyncio.run(_first_batch(run))
    assert len(batch) == config.algorithm.groups_per_step
    assert run.buffer.state.num_dropped[DropReason.BAD_RECORD] == len(REFUSED) == len(recorder.problems)
    assert run.buffer.state.num_dropped[DropReason.CANCELLED] == len(CANCELLED)
    assert "routed_experts" in recorder.problems[0]
    # Each of their prompts was sampled once more.
    again = [generators.prompts.count(generators.prompts[index]) for index in REFUSED + CANCELLED]
    assert again == [2, 2, 2]
    assert len(generators.freed) == config.algorithm.groups_per_step * config.algorithm.group_size
    assert run.payloads.state.num_bytes_held == run.payloads.state.num_bytes_reserved == 0
