"""A fleet's own logic, with a sampler that answers at once."""

from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from forgeasync.algorithms import Loss
from forgeasync.controller import Fleet
from forgeasync.rollouts import Score, Step, StoredRollout
from forgeasync.runtime import RefusedGroup, SampledGroup, TeacherFailure, Teachers
from forgeasync.schema import ConfigError
from tests.support.loops import make_config, make_prepared, make_problem
from tests.support.rollouts import make_stored_rollout


def rollouts_of(text: str) -> tuple[StoredRollout, ...]:
    return tuple(make_stored_rollout((0, 0, 7), text=text) for _ in range(4))


def make_fleet(
    group: SampledGroup | RefusedGroup, freed: list[StoredRollout], teaching: object = None
) -> Fleet:
    """A fleet whose sampler answers with this group."""
    prepared = make_prepared(make_config())
    generators = SimpleNamespace(free_payloads=AsyncMock(side_effect=freed.extend))
    sampler = SimpleNamespace(sample=AsyncMock(return_value=group))
    return Fleet(prepared, None, generators, None, sampler, teaching or Teachers())  # type: ignore[arg-type]


def sampled(*steps: Step) -> SampledGroup:
    """Rollouts of seven tokens, whose scores have these steps."""
    scores = tuple(Score(value=float(index), is_correct=False, steps=steps) for index in range(4))
    return SampledGroup(rollouts=rollouts_of("right"), scores=scores)


def teacher(answer: tuple[StoredRollout, ...] | TeacherFailure) -> SimpleNamespace:
    return SimpleNamespace(moving=(), teach=AsyncMock(return_value=answer))


async def test_rewards_of_steps_reach_the_groups_of_a_fleet() -> None:
    freed: list[StoredRollout] = []
    fleet = make_fleet(sampled(Step(end=5, value=1.0)), freed)
    (group,) = await fleet.sample([make_problem(0)])
    assert group.steps is not None and len(group.steps) == 4
    assert fleet.problems == freed == []
    (plain,) = await make_fleet(sampled(), freed).sample([make_problem(0)])
    assert plain.steps is None


@pytest.mark.parametrize(
    ("group", "taught", "problem", "num_freed"),
    [
        (sampled(Step(end=10_000, value=1.0)), rollouts_of("taught"), "has steps that end at", 4),
        (sampled(), TeacherFailure(problem="it is gone"), "it is gone", 4),
        (RefusedGroup(problem=None), rollouts_of("taught"), "group 0 was not scored", 0),
    ],
)
async def test_a_group_that_cannot_train_or_be_taught_is_left_out(
    group: SampledGroup, taught: tuple[StoredRollout, ...] | TeacherFailure, problem: str, num_freed: int
) -> None:
    freed: list[StoredRollout] = []
    fleet = make_fleet(group, freed, teaching=teacher(taught))
    assert await fleet.sample([make_problem(0)]) == []
    (words,) = fleet.problems
    assert problem in words and len(freed) == num_freed


async def test_teachers_see_every_group_with_its_scores() -> None:
    """What the generator wrote is freed: what is left is the file with the teacher's record."""
    freed: list[StoredRollout] = []
    teaching = teacher(rollouts_of("taught"))
    (group,) = await make_fleet(sampled(), freed, teaching=teaching).sample([make_problem(0)])
    assert [one.text for one in group.rollouts] == ["taught"] * 4
    assert [one.text for one in freed] == ["right"] * 4
    assert teaching.teach.call_args.args[3] == group.scores


async def test_a_loss_of_its_own_asks_teachers_for_what_the_config_does() -> None:
    loss = Loss.model_validate({"terms": ({"kind": "topk_kl", "top_k": 5},)})
    with pytest.raises(ValueError, match="loss: its terms must need no teacher"):
        async with Fleet.start(make_config(), loss=loss):
            raise AssertionError("started")


A_SET = "{name: more, source: {kind: reasoning_gym, task: chain_sum}, num_problems: 4}"


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.filters=[{kind: dynamic_sampling}]",
        "trainer.steps_per_batch=2",
        "trainer.bad_steps.on_nan=stop",
        "trainer.bad_steps.on_spike=rollback",
        f"evaluation.sets=[{A_SET}]",
    ],
)
async def test_settings_that_a_fleet_passes_over_are_refused(override: str) -> None:
    field = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{field} = .*Fleet ignores it"):
        async with Fleet.start(make_config(override)):
            raise AssertionError("started")
