"""A group that is refused or cancelled is counted; its prompt comes again and the others train."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from apps.grpo import GrpoRun
from forgeasync.algorithms import DynamicSampling, ResampleOnCorrect
from forgeasync.buffer import Batch, DropReason, Update
from forgeasync.config import AlgorithmSection, RunConfig, SamplingSection, ScorerSection
from forgeasync.controller import prepare
from forgeasync.environments import Response
from forgeasync.observability import root_cause
from forgeasync.rollouts import PayloadBudget, Score, StoredRollout, Task, VerifierCounts
from forgeasync.runtime import (
    BufferReport,
    CancelledGroup,
    GroupScoring,
    ProcessManager,
    RefusedGroup,
    ScoredResponses,
    ScorerPool,
    start_buffer,
)
from forgeasync.scoring import AllFiltered
from forgeasync.testing import tiny_config, write_tiny_model
from tests.support.loops import Recorder, make_files, make_roles
from tests.support.rollouts import make_ref, make_stored_rollout

# Their fleet starts the proc of the replay buffer.
pytestmark = pytest.mark.procs

REFUSED = (1,)
"""Ids of groups; those that take their places have later ones."""
CANCELLED = (3,)
OVERSIZED = (0,)
"""Written, but larger than all of the store: kept sets with ties can be larger than what was reserved."""
UNWRITTEN = (2,)
"""The writer had no room."""


class Generators:
    """Answers as a router does; some groups are broken, some given up."""

    num_replicas = 1

    def __init__(self) -> None:
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.freed: list[StoredRollout] = []

    async def sample_group(
        self,
        group_id: int,
        prompt_ids_P: np.ndarray,
        *,
        num_samples: int,
        sampling: SamplingSection,
        seed: int,
        on_finished: object = None,
    ) -> tuple[StoredRollout, ...] | RefusedGroup | CancelledGroup:
        self.prompts[group_id] = tuple(prompt_ids_P.tolist())
        if group_id in REFUSED:
            return RefusedGroup(problem=f"rollout 0 of group {group_id}: routed_experts: found 2; 3")
        if group_id in CANCELLED:
            return CancelledGroup()
        if group_id in UNWRITTEN:
            return RefusedGroup(problem=f"group {group_id}: full", reason=DropReason.OVERSIZED)
        if group_id in OVERSIZED:
            small = make_stored_rollout((0, 0, 4))
            branch = dataclasses.replace(small.branches[0], response=make_ref(num_bytes=2**40))
            large = dataclasses.replace(small, branches=(branch,))
            return tuple(large for _ in range(num_samples))
        return tuple(make_stored_rollout((0, 0, 4)) for _ in range(num_samples))

    async def until_all_have(self, version: int) -> None:
        """They always do."""

    async def free_payloads(self, rollouts: Iterable[StoredRollout]) -> None:
        self.freed += rollouts


ALGORITHM = AlgorithmSection(group_size=4, groups_per_step=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run after its first batch."""

    batch: Batch
    report: BufferReport
    payloads: PayloadBudget


async def score(task: Task, responses: Sequence[Response], first: int) -> ScoredResponses:
    """Rewards that differ."""
    scores = tuple(Score(value=float(first + index), is_correct=False) for index in range(len(responses)))
    return ScoredResponses(scores=scores, counts=VerifierCounts())


class UnluckyScorer:
    """Refuses its first connection, and all for one prompt."""

    def __init__(self) -> None:
        self.first: Task | None = None
        self.refused: Task | None = None
        self.num_calls = 0

    async def score(self, task: Task, responses: Sequence[Response], first: int) -> ScoredResponses:
        self.num_calls += 1
        if self.num_calls == 1:
            self.first = task
            raise ConnectionRefusedError("nobody listens")
        if self.refused is None and task != self.first:
            self.refused = task
        if task == self.refused:
            raise ConnectionRefusedError(f"never for {task.task_id}")
        return await score(task, responses, first)


def make_scoring(
    call: Callable[[Task, Sequence[Response], int], Awaitable[ScoredResponses]] = score,
) -> GroupScoring:
    return GroupScoring(ScorerPool([call], ScorerSection(), retry_wait_s=0.0), ScorerSection())


async def _first_batch(
    config: RunConfig, generators: Generators, recorder: Recorder, log_dir: Path, scoring: GroupScoring | None
) -> Ended:
    manager = ProcessManager(log_dir)
    try:
        prepared, buffer = prepare(config), await start_buffer(manager, config, log_dir / "ledger.jsonl")
        run = GrpoRun(
            config,
            prepared,
            make_roles(prepared, None, generators, buffer, scorer=scoring or make_scoring()),
            recorder=recorder,
            files=make_files(log_dir),
        )
        loops = [asyncio.create_task(loop) for loop in (run.collect(), run.score())]
        batch = await run.buffer.take.call_one()
        await run.lifecycle.free(batch.groups)
        await run.lifecycle.commit(batch, trainer_wait_share=0.0, update=Update.MADE)
        report = await run.buffer.report.call_one()
        for loop in loops:
            loop.cancel()
        return Ended(batch=batch, report=report, payloads=run.payloads.state)
    finally:
        await manager.close()


def run_first_batch(
    algorithm: AlgorithmSection,
    folder: Path,
    generators: Generators,
    recorder: Recorder,
    scoring: GroupScoring | None = None,
) -> Ended:
    config = tiny_config(write_tiny_model(folder / "model")).model_copy(update={"algorithm": algorithm})
    return asyncio.run(_first_batch(config, generators, recorder, folder, scoring))


def test_groups_that_do_not_come_are_counted_and_their_prompts_come_again(tmp_path: Path) -> None:
    generators, recorder = Generators(), Recorder()
    ended = run_first_batch(ALGORITHM, tmp_path, generators, recorder)
    assert len(ended.batch.groups) == ALGORITHM.groups_per_step
    dropped = ended.report.num_dropped
    assert dropped[DropReason.BAD_RECORD] == len(REFUSED)
    assert dropped[DropReason.CANCELLED] == len(CANCELLED)
    assert dropped[DropReason.OVERSIZED] == len(OVERSIZED + UNWRITTEN)
    assert len(recorder.problems) == len(REFUSED + OVERSIZED + UNWRITTEN)
    assert sum("routed_experts" in problem for problem in recorder.problems) == len(REFUSED)
    assert sum("group 0 takes 1,099,511,627,776 bytes" in problem for problem in recorder.problems) == 1
    lost_groups = REFUSED + CANCELLED + OVERSIZED + UNWRITTEN
    for lost in lost_groups:
        again = [one for one, prompt in generators.prompts.items() if prompt == generators.prompts[lost]]
        assert max(again) > lost, "its prompt was sampled again"
    assert ended.report.metrics["buffer/num_reissued"] == len(lost_groups)
    num_freed = ALGORITHM.groups_per_step + len(OVERSIZED)
    assert len(generators.freed) == num_freed * ALGORITHM.group_size, "those of the batch and the oversized"
    assert ended.payloads.num_bytes_held == ended.payloads.num_bytes_reserved == 0


def test_a_group_that_cannot_be_scored_is_given_up_and_the_others_train(tmp_path: Path) -> None:
    scorer, generators, recorder = UnluckyScorer(), Generators(), Recorder()
    scoring = make_scoring(scorer.score)
    ended = run_first_batch(ALGORITHM, tmp_path, generators, recorder, scoring)
    assert len(ended.batch.groups) == ALGORITHM.groups_per_step
    assert scorer.refused is not None
    assert all(group.task != scorer.refused for group in ended.batch.groups)
    num_unscored = ended.report.num_dropped[DropReason.UNSCORED]
    assert num_unscored >= 1
    problems = [problem for problem in recorder.problems if "was not scored in 3 attempts" in problem]
    assert len(problems) == num_unscored
    assert f"never for {scorer.refused.task_id}" in problems[0]
    assert scoring.metrics()["scoring/num_failed_attempts"] >= 1 + 3 * num_unscored
    num_done = ALGORITHM.groups_per_step + len(OVERSIZED) + num_unscored
    assert len(generators.freed) == num_done * ALGORITHM.group_size
    assert scorer.first in [group.task for group in ended.batch.groups], "a second attempt helped"
    assert ended.payloads.num_bytes_held == ended.payloads.num_bytes_reserved == 0


def test_groups_are_with_the_scorer_side_by_side(tmp_path: Path) -> None:
    async def run() -> Ended:
        num_waiting, together = 0, asyncio.Event()

        async def wait_for_the_others(
            task: Task, responses: Sequence[Response], first: int
        ) -> ScoredResponses:
            nonlocal num_waiting
            num_waiting += 1
            if num_waiting == ALGORITHM.groups_per_step * ALGORITHM.group_size:
                together.set()
            await together.wait()
            return await score(task, responses, first)

        config = tiny_config(write_tiny_model(tmp_path / "model"))
        scoring = make_scoring(wait_for_the_others)
        return await _first_batch(config, Generators(), Recorder(), tmp_path, scoring)

    assert len(asyncio.run(run()).batch.groups) == ALGORITHM.groups_per_step


def test_filters_leave_out_rollouts_and_count_whole_groups(tmp_path: Path) -> None:
    filters = (ResampleOnCorrect(kind="resample_on_correct", num_kept=2),)
    generators = Generators()
    ended = run_first_batch(
        ALGORITHM.model_copy(update={"filters": filters}), tmp_path, generators, Recorder()
    )
    assert {len(group.rollouts) for group in ended.batch.groups} == {2}
    assert all(len(group.rewards) == 2 for group in ended.batch.groups)


def test_a_run_that_filters_everything_says_so(tmp_path: Path) -> None:
    filters = (DynamicSampling(kind="dynamic_sampling", min_std=100.0),)
    starving = ALGORITHM.model_copy(update={"filters": filters, "max_filtered_in_a_row": 6})
    config = tiny_config(write_tiny_model(tmp_path / "model")).model_copy(update={"algorithm": starving})

    async def starve() -> None:
        manager = ProcessManager(tmp_path)
        try:
            prepared, buffer = prepare(config), await start_buffer(manager, config, tmp_path / "ledger.jsonl")
            run = GrpoRun(
                config,
                prepared,
                make_roles(prepared, None, Generators(), buffer, scorer=make_scoring()),
                recorder=Recorder(),
                files=make_files(tmp_path),
            )
            collecting = asyncio.create_task(run.collect())
            with pytest.raises(ExceptionGroup) as ended:
                await run.score()
            cause = root_cause(ended.value)
            assert isinstance(cause, AllFiltered) and "6 groups in a row" in str(cause)
            collecting.cancel()
        finally:
            await manager.close()

    asyncio.run(starve())
