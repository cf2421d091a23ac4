"""A fleet's own logic, with a sampler that answers at once."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from forgeasync.algorithms import Loss
from forgeasync.controller import Fleet
from forgeasync.rollouts import Score, Step, StoredRollout, Task
from forgeasync.runtime import RefusedGroup, SampledGroup, TeacherFailure, Teaching
from forgeasync.schema import ConfigError
from tests.support.loops import make_config, make_prepared, make_problem
from tests.support.rollouts import make_stored_rollout


class Sampler:
    """Every group has rollouts of seven tokens, scored as it is told."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self._steps = steps

    async def sample(self, group_id: int, task: Task, *, seed: int | None) -> SampledGroup:
        rollouts = tuple(make_stored_rollout((0, 0, 7), text="right") for _ in range(4))
        scores = tuple(Score(value=float(index), is_correct=False, steps=self._steps) for index in range(4))
        return SampledGroup(rollouts=rollouts, scores=scores)


@dataclass
class Teacher:
    """Writes groups once more, or says why it does not; ``seen`` has the scores that it was given."""

    problem: str | None = None
    seen: list[Sequence[Score]] = field(default_factory=list)
    moving = ()

    async def teach(
        self, group_id: int, task: Task, rollouts: tuple[StoredRollout, ...], scores: Sequence[Score]
    ) -> tuple[StoredRollout, ...] | TeacherFailure:
        self.seen.append(scores)
        if self.problem is not None:
            return TeacherFailure(problem=self.problem)
        return tuple(make_stored_rollout((0, 0, 7), text="taught") for _ in rollouts)


def make_fleet(
    steps: tuple[Step, ...],
    freed: list[StoredRollout],
    *overrides: str,
    teaching: Teaching | Teacher | None = None,
) -> Fleet:
    async def free(rollouts: tuple[StoredRollout, ...]) -> None:
        freed.extend(rollouts)

    prepared = make_prepared(make_config(*overrides))
    generators = SimpleNamespace(free_payloads=free)
    return Fleet(prepared, None, generators, None, Sampler(steps), teaching or Teaching())  # type: ignore[arg-type]


def test_rewards_of_steps_reach_the_groups_of_a_fleet() -> None:
    freed: list[StoredRollout] = []
    fleet = make_fleet((Step(end=5, value=1.0),), freed)
    (group,) = asyncio.run(fleet.sample([make_problem(0)]))
    assert group.steps is not None and len(group.steps) == 4
    assert fleet.problems == freed == []
    (plain,) = asyncio.run(make_fleet((), freed).sample([make_problem(0)]))
    assert plain.steps is None


def test_steps_that_cannot_train_cost_their_group() -> None:
    freed: list[StoredRollout] = []
    behind = (Step(end=10_000, value=1.0),)
    fleet = make_fleet(behind, freed)
    assert asyncio.run(fleet.sample([make_problem(0)])) == []
    assert len(fleet.problems) == 1 and len(freed) == 4


def test_a_group_that_nobody_scored_is_a_problem_in_words() -> None:
    class Unscored:
        async def sample(self, group_id: int, task: Task, *, seed: int | None) -> RefusedGroup:
            return RefusedGroup(problem=None)

    prepared = make_prepared(make_config())
    fleet = Fleet(prepared, None, None, None, Unscored(), Teaching())  # type: ignore[arg-type]
    assert asyncio.run(fleet.sample([make_problem(0)])) == []
    assert fleet.problems == ["group 0: nobody has scored it"]


def test_teachers_see_every_group_with_its_scores() -> None:
    """What the generator wrote is freed: what is left is the file with the teacher's record."""
    freed: list[StoredRollout] = []
    teacher = Teacher()
    fleet = make_fleet((), freed, teaching=teacher)
    (group,) = asyncio.run(fleet.sample([make_problem(0)]))
    assert [one.text for one in group.rollouts] == ["taught"] * 4
    assert [one.text for one in freed] == ["right"] * 4
    assert teacher.seen == [group.scores]


def test_a_group_that_a_teacher_cannot_see_is_left_out() -> None:
    freed: list[StoredRollout] = []
    fleet = make_fleet((), freed, teaching=Teacher(problem="it is gone"))
    assert asyncio.run(fleet.sample([make_problem(0)])) == []
    assert fleet.problems == ["it is gone"] and len(freed) == 4


def test_a_loss_of_its_own_asks_teachers_for_what_the_config_does() -> None:
    async def start(loss: Loss) -> None:
        async with Fleet.start(make_config(), loss=loss):
            raise AssertionError("started")

    terms = ({"kind": "topk_kl", "top_k": 5},)
    with pytest.raises(ValueError, match="loss: its terms must need no teacher"):
        asyncio.run(start(Loss.model_validate({"terms": terms})))


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("algorithm.filters=[{kind: dynamic_sampling}]", "algorithm.filters"),
        ("trainer.steps_per_batch=2", "trainer.steps_per_batch"),
        ("trainer.bad_steps.on_nan=stop", "trainer.bad_steps.on_nan"),
        ("trainer.bad_steps.on_spike=rollback", "trainer.bad_steps.on_spike"),
        (
            "evaluation.sets=[{name: more, source: {kind: reasoning_gym, task: chain_sum}, num_problems: 4}]",
            "evaluation.sets",
        ),
    ],
)
def test_settings_that_a_fleet_passes_over_are_refused(override: str, field: str) -> None:
    async def start() -> None:
        async with Fleet.start(make_config(override)):
            raise AssertionError("started")

    with pytest.raises(ConfigError, match=rf"{field} = .*a Fleet does not act on it"):
        asyncio.run(start())
