"""The loops of a run around plain objects: what is scored trains, what is stale ends, what fails stops."""

import asyncio
from pathlib import Path

import pytest

from apps.grpo import start
from forgeasync.config.buffer_schema import AgeOf
from forgeasync.config.weights_schema import Interruption
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
    accuracy, _ = asyncio.run(run.evaluate(0))
    assert accuracy == pytest.approx(2 / 5)
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
    asyncio.run(start(config, make_prepared(config), fleet, Recorder(), tmp_path))
    assert fleet.max_token_age == (3 if age_of is AgeOf.TOKEN else None)
