"""The loops of a run around plain objects: what is scored trains, what is stale ends, what fails stops."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from apps.grpo import StepsSkipped
from apps.starting import start_roles
from forgeasync.buffer.decisions import AGE_REASONS, DropReason
from forgeasync.buffer.starvation import NothingTrains, StarvationWatch
from forgeasync.checkpoint.run_state import RunState
from forgeasync.config.buffer_schema import AgeOf
from forgeasync.config.weights_schema import Interruption
from forgeasync.observability.failures import root_cause
from forgeasync.trainer.step_result import StepResult
from tests.support.loops import (
    MAX_STEPS,
    Fleet,
    Generators,
    Recorder,
    StartingFleet,
    Trainer,
    make_config,
    make_prepared,
    make_problem,
    make_run,
)

SECONDS = 10.0
"""Nothing here waits: past this a loop is stuck."""


def run_to_the_end(folder: Path, *overrides: str, **parts: object) -> None:
    run = make_run(make_config(folder, *overrides), held_out=[make_problem(10)], **parts)
    asyncio.run(asyncio.wait_for(run.run(Fleet()), SECONDS))


def test_every_rollout_trains_with_the_advantage_of_its_own_reward(tmp_path: Path) -> None:
    """From the text that was scored to the item that trains, through every loop."""
    trainer, recorder, generators = Trainer(), Recorder(), Generators()
    run_to_the_end(
        tmp_path, "algorithm.advantage=dr_grpo", trainer=trainer, recorder=recorder, generators=generators
    )
    assert len(trainer.steps) == len(recorder.batches) == MAX_STEPS
    for items, batch in zip(trainer.steps, recorder.batches, strict=True):
        found = {item.rollout.text: item.advantage for item in items}
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
        freed = {one.payload_id for one in (rollout.response for rollout in generators.freed)}
        assert all(item.rollout.response.payload_id in freed for item in items)
    assert recorder.accuracies == [1.0, 1.0], "before the first step and after the last"


STALE = ("max_off_policy_steps=1", "buffer.stale_groups=drop", "buffer.adapt_load=false", "max_steps=6")


def test_stale_groups_are_cancelled_and_their_prompts_come_again(tmp_path: Path) -> None:
    generators = Generators(endless=(1,))
    run_to_the_end(tmp_path, *STALE, "weights.interruption=cancel_stale", generators=generators)
    assert generators.cancelled == [1]
    endless = generators.prompts[1]
    assert generators.prompts.count(endless) == 2


@pytest.mark.parametrize("interruption", sorted(set(Interruption) - {Interruption.CANCEL_STALE}))
def test_other_interruptions_cancel_no_group(tmp_path: Path, interruption: Interruption) -> None:
    """A step that the endless group is missing from never comes: the run is looked at before it."""
    generators, trainer = Generators(endless=(1,)), Trainer()
    run = make_run(
        make_config(tmp_path, *STALE, f"weights.interruption={interruption}"),
        generators=generators,
        trainer=trainer,
        held_out=[make_problem(10)],
    )

    async def until_stale() -> None:
        running = asyncio.create_task(run.run(Fleet()))
        while len(trainer.steps) < 5 and not running.done():
            await asyncio.sleep(0)
        running.cancel()

    asyncio.run(asyncio.wait_for(until_stale(), SECONDS))
    assert len(trainer.steps) == 5
    assert generators.cancelled == []


def test_only_a_full_solution_counts_as_solved(tmp_path: Path) -> None:
    """Rewards 0, 0.3, 0.9, 1.0 and 2.0, one problem each."""
    generators = Generators()
    problems = [make_problem(tenths) for tenths in (0, 3, 9, 10, 20)]
    run = make_run(make_config(tmp_path), generators=generators, held_out=problems)
    held_out, _ = asyncio.run(run.evaluate(0))
    assert held_out.accuracy == pytest.approx(2 / 5)
    assert held_out.score_mean == pytest.approx(4.2 / 5)
    assert generators.seeds == [0, 1, 2, 3, 4], "the same draws at every evaluation"


def serve_one_version(folder: Path, generators: Generators, recorder: Recorder) -> None:
    """Publish version 1 and serve it."""

    async def serve() -> None:
        trainer = Trainer()
        trainer.steps.append([])
        run = make_run(make_config(folder), generators=generators, trainer=trainer, recorder=recorder)
        loops = [asyncio.create_task(loop) for loop in run.serving.loops()]
        served = asyncio.create_task(run.serving.until_served(1))
        await run.serving.publish()
        try:
            done, _ = await asyncio.wait([*loops, served], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*loops, served):
                task.cancel()

    asyncio.run(asyncio.wait_for(serve(), SECONDS))


def test_a_generator_that_never_gets_a_version_whole_ends_the_run(tmp_path: Path) -> None:
    generators, recorder = Generators(2, is_complete=lambda replica, number: replica == 0), Recorder()
    with pytest.raises(RuntimeError, match="generator 1: 5 fetches in a row"):
        serve_one_version(tmp_path, generators, recorder)
    assert generators.num_fetches == [1, 5]
    assert [fetched.is_complete for fetched in recorder.fetches].count(False) == 5
    assert generators.swapped == [(0, 1)], "nothing half-fetched is swapped in"


def test_a_fetch_that_succeeds_makes_up_for_those_before(tmp_path: Path) -> None:
    """Four fail, one succeeds, version by version: that is never five in a row."""
    generators, recorder = Generators(is_complete=lambda replica, number: number % 5 == 4), Recorder()
    run_to_the_end(tmp_path, generators=generators, recorder=recorder)
    assert generators.num_fetches == [5 * MAX_STEPS]
    assert generators.swapped == [(0, version) for version in range(1, MAX_STEPS + 1)]


@pytest.mark.parametrize("age_of", list(AgeOf))
def test_the_trainer_rejects_old_tokens_where_ages_are_of_tokens(tmp_path: Path, age_of: AgeOf) -> None:
    config = make_config(tmp_path, "max_off_policy_steps=3", f"buffer.age_of={age_of}")
    fleet = StartingFleet()
    asyncio.run(start_roles(config, make_prepared(config), fleet, Recorder.console))
    assert fleet.max_token_age == (3 if age_of is AgeOf.TOKEN else None)


def test_groups_refused_one_after_another_end_the_run_with_the_first_reason(tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(ExceptionGroup) as raised:
        run_to_the_end(
            tmp_path,
            "buffer.max_given_up_in_a_row=7",
            generators=Generators(refuses=True),
            recorder=recorder,
        )
    cause = root_cause(raised.value)
    assert isinstance(cause, NothingTrains)
    assert "7 groups in a row were given up (7 bad_record; limit buffer.max_given_up_in_a_row = 7)" in str(
        cause
    )
    assert "the first: group 0 has no experts" in str(cause)
    assert len(recorder.problems) >= 7


def test_what_came_through_ends_a_row_and_age_and_filters_do_not_count() -> None:
    watch = StarvationWatch(3)
    for reason in (DropReason.BAD_RECORD, DropReason.BAD_RECORD):
        watch.given_up(reason, "before")
    watch.came_through()
    watch.given_up(DropReason.UNSCORED, "the first")
    for reason in (*AGE_REASONS, DropReason.FILTERED) * 2:
        watch.given_up(reason, "no matter")
    watch.given_up(DropReason.BAD_RECORD, "the second")
    with pytest.raises(NothingTrains) as raised:
        watch.given_up(DropReason.BAD_RECORD, "the third")
    assert str(raised.value) == (
        "3 groups in a row were given up (2 bad_record, 1 unscored; limit buffer.max_given_up_in_a_row = 3); "
        "the first: the first"
    )
    with pytest.raises(NothingTrains, match="1 groups in a row"):
        StarvationWatch(1).given_up(DropReason.BAD_RECORD, "at once")
    with pytest.raises(AssertionError):
        StarvationWatch(0)


def test_a_skipped_step_is_followed_by_others_but_not_by_many_skipped_ones(tmp_path: Path) -> None:
    trainer = Trainer(skipped=(1, 3, 4))
    run_to_the_end(tmp_path, "max_steps=5", "trainer.max_skipped_steps=3", trainer=trainer)
    assert len(trainer.steps) == 5 and trainer.num_staged == 5
    trainer = Trainer(skipped=(1, 3, 4))
    with pytest.raises(ExceptionGroup) as raised:
        run_to_the_end(tmp_path, "max_steps=5", "trainer.max_skipped_steps=2", trainer=trainer)
    assert isinstance(root_cause(raised.value), StepsSkipped)
    assert len(trainer.steps) == 4, "skipped steps in a row count, not all of them"


def test_a_run_told_to_stop_in_the_middle_of_a_step_writes_a_checkpoint_of_it(tmp_path: Path) -> None:
    """Its cancelled call goes on in the trainer: the step counts once the trainer has made it."""

    class SlowTrainer(Trainer):
        under_way = asyncio.Event()

        async def train_items(self, rows: object, *, step: int) -> StepResult:
            if step == 2:
                self.steps.append([])
                self.under_way.set()
                await asyncio.Event().wait()
            return await super().train_items(rows, step=step)

    async def stop() -> None:
        running = asyncio.create_task(run.run(Fleet()))
        await trainer.under_way.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await run.checkpoint_now() == 2

    trainer = SlowTrainer()
    config = make_config(tmp_path, "max_steps=5", "checkpoint.every_steps=null")
    run = make_run(config, trainer=trainer, held_out=[make_problem(10)])
    asyncio.run(asyncio.wait_for(stop(), SECONDS))
    ((name, run_state),) = trainer.checkpoints
    state = msgspec.json.decode(run_state, type=RunState)
    assert name == "step-00000002" and state.step == state.buffer.trainer_version == 2
