"""The loops of a run around plain objects: what is scored trains, what is stale ends, what fails stops."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest

from apps.grpo import GrpoRun
from forgeasync.buffer import (
    AGE_REASONS,
    START,
    Batch,
    BufferSnapshot,
    CheckpointedBuffer,
    Committed,
    DropReason,
    NothingTrains,
    ReplayBuffer,
    StarvationDetector,
    Submission,
    Update,
)
from forgeasync.checkpoints import RunState
from forgeasync.config import AgeOf, Interruption, RunConfig, TeacherSection
from forgeasync.controller import FoundGroups, Resumed, start_roles, starting
from forgeasync.environments import Response, TaskOrder, sampling_seed
from forgeasync.files import Refusal
from forgeasync.generator import EngineStats, SwapReport
from forgeasync.observability import RunDir, root_cause
from forgeasync.rollouts import (
    EVERY_HOST,
    Group,
    GroupProgress,
    SampledTurn,
    Score,
    SpilledGroup,
    Step,
    StoredRollout,
    Task,
    TeacherPrompts,
    TeacherReads,
    WithoutPrompt,
)
from forgeasync.runtime import (
    CANCELLED,
    GroupScoring,
    RefusedGroup,
    ScoredResponses,
    ScoreQueue,
    Teacher,
    Teachers,
)
from forgeasync.scoring import AllFiltered, GroupFiltering
from forgeasync.testing import VirtualTime
from forgeasync.trainer import BadStepsEndRun, StepResult
from forgeasync.weights import FetchReport, Manifest
from tests.support.buffer_world import make_snapshot
from tests.support.loops import (
    MAX_STEPS,
    Fleet,
    Generators,
    LocalBuffer,
    Recorder,
    Trainer,
    let_others_run,
    make_config,
    make_files,
    make_prepared,
    make_problem,
    make_roles,
    make_run,
    run_loops,
    score_by_text,
)
from tests.support.rollouts import make_ref, make_stored_rollout


def run_to_the_end(*overrides: str, **parts: object) -> GrpoRun:
    run = make_run(make_config(*overrides), **parts)
    run_loops(run)
    return run


def failure_of(*overrides: str, **parts: object) -> BaseException:
    """What ends a run with these parts."""
    with pytest.raises(ExceptionGroup) as raised:
        run_to_the_end(*overrides, **parts)
    return root_cause(raised.value)


def run_scored_by(score: Callable[..., Awaitable[ScoredResponses]], recorder: Recorder) -> None:
    """Run to the end with another scorer than ``score_by_text``."""
    config = make_config()
    run = make_run(config, recorder=recorder)
    run.scorer = run.lifecycle._scorer = GroupScoring(ScoreQueue([score], config.scorer))
    run_loops(run)


def resume_after_two_steps(
    folder: Path, config: RunConfig, snapshot: BufferSnapshot, generators: Generators, found: FoundGroups
) -> tuple[Trainer, Recorder]:
    """Run from a checkpoint of step 2 to the end."""
    state = RunState(step=2, elapsed_s=100.0, model={}, config={}, problems="", buffer=snapshot, ledger=START)
    resumed = Resumed(folder=folder, state=state, found=found)
    prepared = dataclasses.replace(make_prepared(config, [make_problem(10)]), resumed=resumed)
    trainer, recorder, buffer = Trainer(), Recorder(), LocalBuffer(config)
    trainer.steps += [[], []]
    now = resumed.buffer
    buffer.restore(snapshot, batches=now.batches, num_groups=now.num_groups)
    roles = make_roles(prepared, trainer, generators, buffer)
    run_loops(GrpoRun(config, prepared, roles, recorder=recorder, files=make_files(folder)))
    return trainer, recorder


def test_every_rollout_trains_with_the_advantage_of_its_own_reward() -> None:
    """From the text that was scored to the item that trains, through every loop."""
    trainer, recorder, generators = Trainer(), Recorder(), Generators()
    run_to_the_end("algorithm.advantage=dr_grpo", trainer=trainer, recorder=recorder, generators=generators)
    assert len(trainer.steps) == len(recorder.batches) == generators.num_sleeps == MAX_STEPS
    of_each_part = {
        "filtered/num_rollouts",
        "scoring/num_failed_attempts",
        "payload/num_bytes_held",
        "payload/num_bytes_reserved",
        "payload/num_waits",
        "weights/num_skipped_versions",
        "weights/num_expired_leases",
    }
    assert of_each_part <= recorder.counters[-1].keys()
    for items, batch in zip(trainer.steps, recorder.batches, strict=True):
        found = {item.branch.text: item.advantages[0].value for item in items}
        expected = {}
        for group in batch.groups:
            rewards = [float(rollout.text) for rollout in group.rollouts]
            assert group.rewards == pytest.approx(rewards)
            expected |= {
                one.text: reward - sum(rewards) / len(rewards)
                for one, reward in zip(group.rollouts, rewards, strict=True)
            }
        assert found == pytest.approx(expected, abs=1e-5)
        assert len(found) == len(items) == 8
        freed = {branch.response.payload_id for rollout in generators.freed for branch in rollout.branches}
        assert all(item.branch.response.payload_id in freed for item in items)
    assert recorder.accuracies == [1.0, 1.0], "before the first step and after the last"
    assert generators.seeds == [0, 0], "the same draws at every evaluation"


STALE = ("max_off_policy_steps=1", "buffer.stale_groups=drop", "buffer.adapt_load=false", "max_steps=6")


def test_stale_groups_are_cancelled_and_their_prompts_come_again() -> None:
    generators = Generators(endless=(1,))
    no_other = "buffer.max_given_up_in_a_row=1"
    run_to_the_end(*STALE, "weights.interruption=cancel_stale", no_other, generators=generators)
    assert generators.cancelled == [1]
    endless = generators.prompts[1]
    assert generators.prompts.count(endless) == 2


@pytest.mark.parametrize("interruption", sorted(set(Interruption) - {Interruption.CANCEL_STALE}))
async def test_other_interruptions_cancel_no_group(interruption: Interruption) -> None:
    """A step that the endless group is missing from never comes: the run is looked at before it."""
    generators, trainer = Generators(endless=(1,)), Trainer()
    config = make_config(*STALE, f"weights.interruption={interruption}")
    run = make_run(config, generators=generators, trainer=trainer)
    running = asyncio.create_task(run.run(Fleet()))
    while len(trainer.steps) < 5 and not running.done():
        await asyncio.sleep(0)
    running.cancel()
    assert len(trainer.steps) == 5
    assert generators.cancelled == []


@pytest.mark.parametrize("age_of", list(AgeOf))
def test_the_trainer_rejects_old_tokens_where_ages_are_of_tokens(
    tmp_path: Path, age_of: AgeOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("max_off_policy_steps=3", f"buffer.age_of={age_of}")
    start_trainer = AsyncMock(side_effect=ConnectionError)
    monkeypatch.setattr(starting, "start_trainer", start_trainer)
    with pytest.raises(ExceptionGroup):
        asyncio.run(start_roles(config, make_prepared(config), None, Recorder.console, RunDir(path=tmp_path)))
    (_, setup, _) = start_trainer.call_args.args
    assert setup.max_token_age == (3 if age_of is AgeOf.TOKEN else None)


def test_a_skipped_step_is_followed_by_others_but_not_by_many_skipped_ones() -> None:
    trainer = Trainer(skipped=(1, 3, 4))
    run = run_to_the_end("max_steps=5", "trainer.bad_steps.max_in_a_row=3", trainer=trainer)
    assert len(trainer.steps) == 5 and trainer.num_staged == 5
    assert [one.update for one in run.buffer.book.steps] == [
        Update.SKIPPED if step in (1, 3, 4) else Update.MADE for step in range(1, 6)
    ]


@pytest.mark.parametrize(("skips", "num_steps"), [({"skipped": (1, 3, 4)}, 4), ({"ends_run": 2}, 2)])
def test_skipped_steps_that_end_a_run_are_recorded(skips: dict[str, object], num_steps: int) -> None:
    trainer, recorder = Trainer(**skips), Recorder()
    cause = failure_of("max_steps=5", "trainer.bad_steps.max_in_a_row=2", trainer=trainer, recorder=recorder)
    assert isinstance(cause, BadStepsEndRun)
    assert len(trainer.steps) == len(recorder.batches) == num_steps


def test_of_a_batch_that_is_rolled_back_nothing_counts_as_trained() -> None:
    """Its version is published all the same, and its prompts end: they come neither again nor in a step."""
    trainer, recorder = Trainer(rolled_back=(2,)), Recorder()
    run = run_to_the_end(trainer=trainer, recorder=recorder)
    book = run.buffer.book
    assert [one.update for one in book.steps] == [Update.MADE, Update.SKIPPED, Update.MADE]
    assert trainer.num_staged == MAX_STEPS == run.version
    prompts = [group.draw_id for batch in recorder.batches for group in batch.groups]
    assert len(prompts) == len(set(prompts)) == MAX_STEPS * len(recorder.batches[0].groups)


class MixedGenerators(Generators):
    """What becomes of a group follows from its number: of eight, the first and the last can train."""

    def __init__(self, kind_of: Callable[[int], int] = lambda group_id: group_id % 8) -> None:
        super().__init__()
        self.kind_of = kind_of
        self.written: list[StoredRollout] = []
        self.seed_of_group: dict[int, object] = {}

    async def sample_group(
        self, group_id: int, *arguments: object, **keywords: object
    ) -> tuple[StoredRollout, ...] | RefusedGroup:
        self.seed_of_group[group_id] = keywords["seed"]
        answer = await super().sample_group(group_id, *arguments, **keywords)
        assert isinstance(answer, tuple)
        change: dict[str, object] = {}
        match self.kind_of(group_id):
            case 1:
                return RefusedGroup(problem=f"group {group_id} has no experts")
            case 2:
                return RefusedGroup(problem=f"group {group_id}: no room", reason=DropReason.OVERSIZED)
            case 3:
                return CANCELLED
            case 4:
                change["text"] = "1.0"
            case 5:
                change["text"] = "no number"
            case 6:
                # Kept sets with ties can be larger than what was reserved.
                change["prompt"] = make_ref(num_bytes=2**40)
        answer = tuple(
            dataclasses.replace(one, branches=(dataclasses.replace(one.branches[0], **change),))
            for one in answer
        )
        self.written += answer
        return answer


def test_whatever_becomes_of_a_group_its_arrays_and_its_reservation_are_freed_once() -> None:
    """Trained, filtered or given up: at the end of a run nothing is held, and the prompts come again."""
    generators, trainer, recorder = MixedGenerators(), Trainer(), Recorder()
    config = make_config(
        "max_steps=8",
        "algorithm.filters=[{kind: dynamic_sampling}]",
        "scorer.max_attempts=1",
        "buffer.max_attempts=100",
    )
    run = make_run(config, generators=generators, trainer=trainer, recorder=recorder)
    run_loops(run)
    freed = Counter(rollout.branches[0].response.payload_id for rollout in generators.freed)
    assert freed == Counter(rollout.branches[0].response.payload_id for rollout in generators.written)
    state = run.payloads.state
    assert (state.num_bytes_held, state.num_bytes_reserved) == (0, 0)
    scored = [
        float(one.text)
        for one in generators.written
        if one.text != "no number" and one.branches[0].prompt.num_bytes < 2**40
    ]
    assert sorted(recorder.rewards) == sorted(scored), "before filters, and none of what was not scored"
    for words in (
        "group 1 has no experts",
        "group 2: no room",
        "group 5 was not scored in 1 attempt",
        "group 6 takes ",
    ):
        assert sum(words in problem for problem in recorder.problems) == 1, words
    totals = run.buffer.book.totals
    lost, with_problem = totals.num_lost, {DropReason.BAD_RECORD, DropReason.UNSCORED, DropReason.OVERSIZED}
    assert set(lost) == {DropReason.CANCELLED, DropReason.FILTERED, *with_problem}
    assert sum(lost[reason] for reason in with_problem) == len(recorder.problems)
    assert totals.num_reissued == lost.total() - lost[DropReason.FILTERED], "prompts of the others come again"
    assert generators.prompts[1] in generators.prompts[2:]
    assert len(trainer.steps) == 8
    for group in (group for batch in recorder.batches for group in batch.groups):
        # Not by its group's number, which depends on what became of others.
        assert generators.seed_of_group[group.group_id] == sampling_seed(config.seed, group.draw_id)


def test_groups_that_come_through_begin_the_count_of_given_up_ones_anew() -> None:
    """More are given up than buffer.max_given_up_in_a_row, but never that many between two that train."""
    recorder = Recorder()
    run_to_the_end(
        "max_steps=20",
        "buffer.max_given_up_in_a_row=8",
        "algorithm.max_filtered_in_a_row=4",
        "algorithm.filters=[{kind: dynamic_sampling}]",
        "scorer.max_attempts=1",
        generators=MixedGenerators(),
        recorder=recorder,
    )
    assert len(recorder.problems) > 8


def test_what_a_filter_draws_follows_from_the_prompt_and_not_from_the_number_of_its_group() -> None:
    """That number depends on what became of other groups."""
    config = make_config("algorithm.filters=[{kind: resample_on_correct, num_kept: 2}]")
    filtering = GroupFiltering(config.algorithm, seed=config.seed)
    rollouts = tuple(make_stored_rollout((0, 0, 4), text=str(index)) for index in range(4))
    scores = [Score(value, value > 0.5) for value in (1.0, 1.0, 0.0, 0.0)]

    def kept(group_id: int, draw_id: int) -> tuple[int, ...]:
        group = Group(group_id=group_id, draw_id=draw_id, task=make_problem(0), rollouts=rollouts)
        return tuple(filtering.apply(group, scores).kept)

    by_draw = [kept(0, draw_id) for draw_id in range(20)]
    assert len(set(by_draw)) > 1
    assert [kept(100 + draw_id, draw_id) for draw_id in range(20)] == by_draw


@pytest.mark.parametrize("reason", [DropReason.BAD_RECORD, DropReason.UNSCORED])
def test_groups_given_up_one_after_another_end_the_run_with_the_first_reason(reason: DropReason) -> None:
    recorder = Recorder()
    generators = Generators(refuses=reason is DropReason.BAD_RECORD)
    if reason is DropReason.UNSCORED:
        generators = MixedGenerators(lambda group_id: 5)
    limits = ("buffer.max_given_up_in_a_row=7", "scorer.max_attempts=1")
    cause = failure_of(*limits, generators=generators, recorder=recorder)
    assert isinstance(cause, NothingTrains)
    words, _, problem = str(cause).partition("; the first: ")
    limit = "limit buffer.max_given_up_in_a_row = 7"
    assert words == f"7 groups in a row were given up (7 {reason}; {limit})"
    assert problem == recorder.problems[0] and len(recorder.problems) >= 7


def test_losses_to_age_and_to_filters_are_not_given_up_groups() -> None:
    watch = StarvationDetector(1)
    for reason in (*AGE_REASONS, DropReason.FILTERED):
        watch.given_up(reason, "no matter")
    with pytest.raises(NothingTrains, match="1 groups in a row"):
        watch.given_up(DropReason.BAD_RECORD, "at once")


def test_a_run_that_filters_everything_says_so() -> None:
    """Filtered groups have a limit of their own."""
    filters = "algorithm.filters=[{kind: dynamic_sampling, min_std: 100.0}]"
    limits = ("algorithm.max_filtered_in_a_row=6", "buffer.max_given_up_in_a_row=1")
    cause = failure_of(filters, *limits)
    assert isinstance(cause, AllFiltered) and "6 groups in a row" in str(cause)


def test_filters_leave_out_rollouts() -> None:
    recorder = Recorder()
    run_to_the_end("algorithm.filters=[{kind: resample_on_correct, num_kept: 2}]", recorder=recorder)
    groups = [group for batch in recorder.batches for group in batch.groups]
    assert {len(group.rollouts) for group in groups} == {2}
    for group in groups:
        rewards = [float(rollout.text) for rollout in group.rollouts]
        assert list(group.rewards) == [score.value for score in group.scores] == pytest.approx(rewards)


def test_steps_reach_what_trains_and_where_they_do_not_fit_cost_their_group_and_not_the_run() -> None:
    """Every third group has rewards of steps for one of its rollouts only."""
    steps = (Step(end=1, value=1.0),)

    async def with_steps(task: Task, responses: Sequence[Response], first: int) -> ScoredResponses:
        scored = await score_by_text(task, responses, first)
        if task.source_index % 3 == 0 and first:
            return scored
        scores = tuple(dataclasses.replace(score, steps=steps) for score in scored.scores)
        return ScoredResponses(scores=scores, counts=scored.counts)

    recorder = Recorder()
    run_scored_by(with_steps, recorder)
    assert len(recorder.batches) == MAX_STEPS
    assert all(group.steps == (steps,) * 4 for batch in recorder.batches for group in batch.groups)
    assert recorder.problems and all("has no rewards of steps" in text for text in recorder.problems)


async def test_groups_that_became_too_old_are_freed() -> None:
    """While they were scored, and while they waited for the trainer."""
    generators = Generators()
    run = make_run(make_config(), generators=generators)

    def make_group(number: int) -> Group:
        rollouts = (make_stored_rollout((0, 0, 4), text=str(number)),)
        return Group(group_id=number, draw_id=number, task=make_problem(number), rollouts=rollouts)

    groups = [make_group(number) for number in range(3)]
    for group in groups:
        await run.payloads.reserve(group.group_id)
    run.buffer.instead["scored"] = AsyncMock(return_value=(groups[0],))
    run.buffer.instead["committed"] = AsyncMock(return_value=Committed(cancelled=(), lost=(groups[2],)))
    await run.complete(groups[0])
    assert generators.freed == list(groups[0].rollouts)
    await run.lifecycle.free([groups[1]])
    batch = Batch(trainer_version=0, groups=(groups[1],), weights=(1.0,))
    await run.lifecycle.commit(batch, trainer_wait_share=0.5, update=Update.MADE)
    assert generators.freed == [rollout for group in groups for rollout in group.rollouts]
    assert run.payloads.state.num_bytes_reserved == 0


class SlowTrainer(Trainer):
    """A step takes 3 s, a checkpoint 7 s."""

    async def train_items(self, *arguments: object, **keywords: object) -> StepResult:
        await asyncio.sleep(3.0)
        return await super().train_items(*arguments, **keywords)

    async def begin_checkpoint(self, *arguments: object, **keywords: object) -> None:
        await asyncio.sleep(7.0)
        await super().begin_checkpoint(*arguments, **keywords)


class SlowGenerators(Generators):
    """An evaluation takes 5 s, a report 2 s."""

    async def respond(self, *arguments: object, **keywords: object) -> tuple[SampledTurn, ...]:
        await asyncio.sleep(5.0)
        return await super().respond(*arguments, **keywords)

    async def stats(self) -> list[EngineStats]:
        await asyncio.sleep(2.0)
        return await super().stats()


def test_the_times_of_a_step_are_those_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch takes 1 s, and at each checkpoint a disk refuses the ledger for 20 s."""
    time, shares, recorder = VirtualTime(), [], Recorder()
    config = make_config("max_steps=3", "checkpoint.every_steps=2")
    run = make_run(config, trainer=SlowTrainer(), generators=SlowGenerators(), recorder=recorder)
    buffer, checkpoint = run.buffer.local, run.buffer.checkpoint

    async def slow_take() -> Batch:
        batch = await buffer.until(ReplayBuffer.take)
        await asyncio.sleep(1.0)
        return batch

    async def told(trainer_wait_share: float, update: Update) -> Committed:
        shares.append(trainer_wait_share)
        return buffer.change(lambda one: one.committed(trainer_wait_share=trainer_wait_share, update=update))

    async def waits() -> CheckpointedBuffer:
        await asyncio.sleep(20.0)
        return await checkpoint()

    run.buffer.instead |= {"take": slow_take, "committed": told}
    run.buffer.checkpoint = waits
    run.buffer.refusal = AsyncMock(return_value=Refusal(path="ledger.jsonl", reason="full"))
    clock = SimpleNamespace(perf_counter=time.now_s)
    monkeypatch.setattr("forgeasync.controller.recorder.time", clock)
    time.run(run.run(Fleet()))
    assert shares == [0.25] * 3
    parts = [(one.wait_for_batch_s, one.train_s, one.publish_weights_s, one.eval_s) for one in recorder.times]
    assert parts == [(1.0, 3.0, 0.0, 0.0), (1.0, 3.0, 0.0, 0.0), (1.0, 3.0, 0.0, 5.0)]
    assert [(one.step_s, one.controller_s) for one in recorder.times] == [(4.0, 0.0), (4.0, 0.0), (9.0, 0.0)]
    after = [(one.record_s, one.wait_for_disk_s, one.checkpoint_s) for one in recorder.times]
    assert after == [(2.0, 0.0, 0.0), (2.0, 20.0, 7.0), (2.0, 20.0, 7.0)]


def test_a_resumed_run_goes_on_in_the_data_under_the_weights_of_its_checkpoint(tmp_path: Path) -> None:
    """Two steps of two groups are behind it; six prompts were submitted, none of them is in flight."""

    class ResumedGenerators(Generators):
        async def begin_update(self, replica: int, manifest: Manifest) -> FetchReport:
            await let_others_run()
            return await super().begin_update(replica, manifest)

        async def sample_group(self, *arguments: object, **keywords: object) -> object:
            assert min(self._fetched) >= 2, "they started under version 0, which is not the run's"
            return await super().sample_group(*arguments, **keywords)

    snapshot = make_snapshot(2, num_submitted=6, next_group_id=6)
    config, generators = make_config("max_steps=4"), ResumedGenerators()
    order = TaskOrder(make_prepared(config).train, seed=config.seed, position=0)
    prompts = [int(order.next().prompt) for _ in range(10)]
    trainer, recorder = resume_after_two_steps(tmp_path, config, snapshot, generators, FoundGroups())
    assert len(trainer.steps) == 4 and trainer.num_staged == 3
    assert generators.prompts == prompts[6:]
    assert len(recorder.accuracies) == 1, "the evaluation before the first step was made before"


def kept_group(task: Task, prompt: int) -> SpilledGroup:
    """A group with rewards 0, 1, ..., on a disk, that version 2 has sampled."""
    rollouts = tuple(make_stored_rollout((2, 0, 4), text=f"{prompt}, {index}") for index in range(4))
    kept = SpilledGroup(
        group=Group(group_id=77, draw_id=prompt, task=task, rollouts=rollouts),
        rewards=(0.0, 1.0, 2.0, 3.0),
        kept=(0, 1, 2, 3),
        scores=tuple(Score(float(index), index > 0) for index in range(4)),
    )
    return kept.with_refs(lambda ref: dataclasses.replace(ref, host_id=EVERY_HOST))


def test_a_resumed_run_makes_lost_steps_again_and_samples_nothing_for_them(tmp_path: Path) -> None:
    """Prompts 6 to 9 were trained in steps 3 and 4, which are lost; they are on the disk."""
    config, generators = make_config("max_steps=5", "max_off_policy_steps=1"), Generators()
    order = TaskOrder(make_prepared(config).train, seed=config.seed, position=0)
    tasks = [order.next() for _ in range(12)]
    pending = (Submission(submission_id=6, task=tasks[6]),)
    snapshot = make_snapshot(2, num_submitted=7, next_group_id=6, pending=pending)
    kept = tuple(kept_group(tasks[prompt], prompt) for prompt in (6, 7, 8, 9))
    found = FoundGroups(groups=kept, batches=((6, 9), (7, 8)))
    trainer, recorder = resume_after_two_steps(tmp_path, config, snapshot, generators, found)
    trained = [{item.branch.text.partition(",")[0] for item in step} for step in trainer.steps[2:4]]
    assert trained == [{"6", "9"}, {"7", "8"}] and len(trainer.steps) == 5
    assert {group.group_id for batch in recorder.batches[:2] for group in batch.groups} == {6, 7, 8, 9}
    assert generators.prompts[:2] == [int(tasks[prompt].prompt) for prompt in (10, 11)]
    assert not any("," in rollout.text for rollout in generators.freed), "they are in no shared memory"


def test_what_a_generator_tells_of_its_running_groups_at_a_swap_reaches_the_buffer() -> None:
    told: list[int] = []

    class Telling(Generators):
        async def finish_update(self, replica: int, version: int) -> dict[int, SwapReport]:
            progress = (GroupProgress(group_id=replica, version=version, num_running=4, num_tokens=0),)
            swaps = await super().finish_update(replica, version)
            return {number: dataclasses.replace(swap, progress=progress) for number, swap in swaps.items()}

    async def progressed(groups: Sequence[GroupProgress]) -> None:
        told.extend(progress.group_id for progress in groups)

    run = make_run(make_config(), generators=Telling(2))
    run.buffer.instead["progressed"] = progressed
    run_loops(run)
    assert sorted(told) == [0] * MAX_STEPS + [1] * MAX_STEPS


# --- groups whose teacher reads what was correct ---

WORDS = "no number"
"""A response that cannot be scored."""


class Characters:
    """Encodes a prompt as its characters."""

    def encode(self, prompt: str) -> np.ndarray:
        return np.array([ord(one) for one in prompt], np.int32)

    def has_special_text(self, text: str) -> bool:
        return False


class SeenGroups:
    """A teacher that remembers what it read before which responses, and stores groups anew."""

    version = 0

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[str, ...], tuple[str | None, ...]]] = []

    async def teach(
        self, rollouts: Sequence[StoredRollout], reads: Sequence[TeacherReads]
    ) -> tuple[StoredRollout, ...]:
        shown = tuple(None if isinstance(one, WithoutPrompt) else "".join(map(chr, one)) for one in reads)
        self.seen.append((tuple(one.text for one in rollouts), shown))
        return tuple(
            dataclasses.replace(
                one, branches=tuple(dataclasses.replace(b, response=make_ref()) for b in one.branches)
            )
            for one in rollouts
        )


class SomeUnscored(Generators):
    """Every fifth group has a response that is no number."""

    async def sample_group(self, group_id: int, *arguments: object, **keywords: object) -> object:
        rollouts = await super().sample_group(group_id, *arguments, **keywords)  # type: ignore[arg-type]
        assert isinstance(rollouts, tuple)
        if group_id % 5 == 1:
            (branch,) = rollouts[0].branches
            wrong = dataclasses.replace(branch, text=WORDS)
            return (dataclasses.replace(rollouts[0], branches=(wrong,)), *rollouts[1:])
        return rollouts


def test_a_group_is_scored_before_its_teacher_sees_it_and_then_trains() -> None:
    """By the very scores that decided what was shown. What has none is seen by nobody, and freed."""
    model, trainer, recorder, generators = SeenGroups(), Trainer(), Recorder(), SomeUnscored()
    teacher = Teacher(
        name="t",
        section=TeacherSection(model_path="x", prompt="$sibling|$prompt"),
        model=model,
        prompts=TeacherPrompts(encoder=Characters(), max_tokens=100),  # type: ignore[arg-type]
        room=asyncio.Semaphore(3),
    )
    run = make_run(
        make_config("scorer.max_attempts=1"),
        generators=generators,
        trainer=trainer,
        recorder=recorder,
        teaching=Teachers({make_problem(0).source: teacher}),
    )
    run_loops(run)
    seen = dict(model.seen)
    num_without = 0
    for texts, shown in seen.items():
        assert WORDS not in texts
        for index, one in enumerate(shown):
            others = {text for place, text in enumerate(texts) if place != index and float(text) >= 1.0}
            assert (one is None) == (not others)
            assert one is None or one.split("|")[0] in others
            num_without += one is None
    counted = recorder.counters[-1]["teacher/num_without_sibling"]
    assert 0 < counted <= num_without, "a group may have been seen since the last step"
    assert len(recorder.batches) == MAX_STEPS
    for batch in recorder.batches:
        for group in batch.groups:
            texts = tuple(one.text for one in group.rollouts)
            assert texts in seen and list(group.rewards or ()) == [float(text) for text in texts]
    freed = [one.text for one in generators.freed]
    assert WORDS in freed
    # Once as the generator stored it, once as the teacher did.
    for item in trainer.steps[0]:
        assert freed.count(item.branch.text) == 2
