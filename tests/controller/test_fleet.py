"""A fleet's own logic, with a sampler that answers at once."""

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
    steps: tuple[Step, ...], freed: list[StoredRollout], teaching: Teaching | Teacher | None = None
) -> Fleet:
    async def free(rollouts: tuple[StoredRollout, ...]) -> None:
        freed.extend(rollouts)

    prepared = make_prepared(make_config())
    generators = SimpleNamespace(free_payloads=free)
    return Fleet(prepared, None, generators, None, Sampler(steps), teaching or Teaching())  # type: ignore[arg-type]


async def test_rewards_of_steps_reach_the_groups_of_a_fleet() -> None:
    freed: list[StoredRollout] = []
    fleet = make_fleet((Step(end=5, value=1.0),), freed)
    (group,) = await fleet.sample([make_problem(0)])
    assert group.steps is not None and len(group.steps) == 4
    assert fleet.problems == freed == []
    (plain,) = await make_fleet((), freed).sample([make_problem(0)])
    assert plain.steps is None


@pytest.mark.parametrize(
    ("end", "teacher", "problem"),
    [(10_000, Teacher(), "has steps that end at"), (5, Teacher(problem="it is gone"), "it is gone")],
)
async def test_a_group_that_cannot_train_or_be_taught_is_left_out(
    end: int, teacher: Teacher, problem: str
) -> None:
    freed: list[StoredRollout] = []
    fleet = make_fleet((Step(end=end, value=1.0),), freed, teaching=teacher)
    assert await fleet.sample([make_problem(0)]) == []
    (words,) = fleet.problems
    assert problem in words and len(freed) == 4


async def test_a_group_that_nobody_scored_is_a_problem_in_words() -> None:
    class Unscored:
        async def sample(self, group_id: int, task: Task, *, seed: int | None) -> RefusedGroup:
            return RefusedGroup(problem=None)

    fleet = Fleet(make_prepared(make_config()), None, None, None, Unscored(), Teaching())  # type: ignore[arg-type]
    assert await fleet.sample([make_problem(0)]) == []
    assert fleet.problems == ["group 0: nobody has scored it"]


async def test_teachers_see_every_group_with_its_scores() -> None:
    """What the generator wrote is freed: what is left is the file with the teacher's record."""
    freed: list[StoredRollout] = []
    teacher = Teacher()
    (group,) = await make_fleet((), freed, teaching=teacher).sample([make_problem(0)])
    assert [one.text for one in group.rollouts] == ["taught"] * 4
    assert [one.text for one in freed] == ["right"] * 4
    assert teacher.seen == [group.scores]


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
