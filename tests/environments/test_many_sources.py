"""Several sources in one run, sources in Python, evaluation sets, and how prompts are rendered."""

import asyncio
import dataclasses
import json
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.checkpoints import data_order, differences
from forgeasync.config import DataSection, EvaluationSection, named_sets, named_sources
from forgeasync.environments import (
    StoredTasks,
    TaskOrder,
    WeightedOrder,
    build_source,
    json_like,
    preview_data,
    weighted_order,
)
from forgeasync.rollouts import Task
from forgeasync.schema import ConfigError
from tests.support.buffer_world import make_task
from tests.support.loops import Generators, make_config, make_problem, make_run

OWN = "tests.support.own_rewards"
SUMS = {"kind": "reasoning_gym", "task": "chain_sum", "options": {"min_terms": 2, "max_terms": 2}}


def own(name: str, **options: object) -> dict[str, object]:
    return {"kind": "python", "factory": f"{OWN}.{name}", "options": options}


def section(**fields: object) -> DataSection:
    return DataSection.model_validate({"num_train": 30, "num_held_out": 5} | fields)


def evaluation(*sets: dict[str, object]) -> EvaluationSection:
    return EvaluationSection.model_validate({"num_problems": 5, "sets": sets})


class TestPythonSource:
    def test_records_become_tasks_with_all_their_columns(self) -> None:
        problems = build_source(section(source=own("counting")), seed=3)
        assert len(problems.train) == 30 and len(problems.held_out) == 5
        first = problems.train[0]
        assert (first.prompt, first.answer) == ("train 3: 1 + 1 =", "2")
        assert first.record == {"question": first.prompt, "answer": 2, "difficulty": 0.5}, "no bytes"
        # Held-out problems do not depend on the seed.
        again = build_source(section(source=own("counting")), seed=4)
        assert again.held_out == problems.held_out and again.train != problems.train
        assert len({task.task_id for task in (*problems.train, *again.train, *problems.held_out)}) == 65

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("nothing", "data.source.factory = .*has no 'nothing'"),
            ("three", "data.num_held_out = 5: .*gave only 3 distinct ones"),
            ("broken", r"data.source.factory = .*raised KeyError: 'column', called with \('held_out', "),
            ("wordless", "data.source.factory = 'answer': does not exist in record 0 of 'held_out'"),
            ("exits_at_import", "data.source.factory = .*takes .*task"),
        ],
    )
    def test_what_is_wrong_with_it_is_said_before_a_run_starts(self, name: str, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            build_source(section(source=own(name)), seed=0)


class TestSeveral:
    def test_each_source_gives_its_problems_under_its_name(self) -> None:
        data = section(
            sources=[
                {"source": SUMS, "weight": 2.0},
                {"source": own("counting"), "name": "count", "num_train": 7, "num_held_out": 2},
            ]
        )
        problems = build_source(data, seed=0)
        assert Counter(task.source for task in problems.train) == {"chain_sum": 30, "count": 7}
        assert [task.source for task in problems.held_out] == ["chain_sum", "count"] * 2 + ["chain_sum"] * 3
        assert {"num_terms", "num_digits"} <= problems.train[0].record["metadata"].keys(), (
            "reasoning-gym's own"
        )

    def test_a_text_held_out_in_one_source_or_set_is_trained_on_in_none(self) -> None:
        shared = own("counting")
        data = section(sources=[{"source": SUMS}, {"source": shared, "num_train": 30}])
        sets = named_sets(evaluation({"name": "tens", "source": shared, "num_problems": 25}))
        problems = build_source(data, seed=0, sets=sets)
        evaluated = {task.prompt for task in problems.sets["eval/tens"]}
        assert {"10 + 1 =", "20 + 1 ="} <= evaluated
        assert not evaluated & {task.prompt for task in problems.train}
        assert len(problems.train) == 60 and {task.source for task in problems.sets["eval/tens"]} == {
            "eval/tens"
        }

    def test_a_refusal_names_the_source_by_its_place(self) -> None:
        data = section(sources=[{"source": SUMS}, {"source": own("broken")}])
        with pytest.raises(ConfigError, match=r"^data\.sources\.1\.source\.factory = "):
            build_source(data, seed=0)
        sets = named_sets(evaluation({"name": "a", "source": own("three"), "num_problems": 4}))
        with pytest.raises(ConfigError, match=r"^evaluation\.sets\.0\.num_problems = 4: "):
            build_source(section(source=SUMS), seed=0, sets=sets)

    def test_a_source_without_held_out_problems_is_looked_at(self) -> None:
        entries = [{"source": SUMS, "num_held_out": 4}, {"source": own("counting"), "name": "own"}]
        found = preview_data(section(sources=entries, num_held_out=0), seed=0)
        assert "own" not in found.first_tasks and len(found.first_tasks) == 1

    def test_rewards_are_the_entrys_the_sections_or_the_sources_own(self) -> None:
        entries = [{"source": SUMS, "reward": {"kind": "math"}}, {"source": own("counting")}]
        with_default = section(sources=entries, reward={"kind": "python", "factory": "a.b"})
        kinds = [[reward.kind for reward in one.rewards] for one in named_sources(with_default)]
        assert kinds == [["math"], ["python"]]
        fields = [one.field_of_reward(0) for one in named_sources(with_default)]
        assert fields == ["data.sources.0.reward", "data.reward"]
        kinds = [[reward.kind for reward in one.rewards] for one in named_sources(section(sources=entries))]
        assert kinds == [["math"], ["math"]]


class TestOrder:
    def test_draws_are_in_proportion_and_every_source_makes_whole_passes(self) -> None:
        tasks = [make_task(index, source) for source, num in (("a", 5), ("b", 50)) for index in range(num)]
        order = weighted_order(tasks, {"a": 3.0, "b": 1.0}, seed=1)
        issued = [order.next() for _ in range(8000)]
        share = sum(task.source == "a" for task in issued) / len(issued)
        # Four standard deviations of a binomial share.
        assert abs(share - 0.75) < 4 * math.sqrt(0.75 * 0.25 / len(issued))
        of_b = [task.task_id for task in issued if task.source == "b"]
        assert len(set(of_b[:50])) == 50 == len(set(of_b[50:100])) and of_b[:50] != of_b[50:100]

    @given(
        st.integers(0, 9000), st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(0, 2**32 - 1)
    )
    def test_it_goes_on_from_any_position(self, position: int, sizes: list[int], seed: int) -> None:
        sources = [[make_task(index, str(size)) for index in range(size)] for size in sizes]
        weights = [float(size) for size in sizes]
        whole = WeightedOrder(sources, weights, seed=seed)
        for _ in range(position):
            whole.next()
        resumed = WeightedOrder(sources, weights, seed=seed, position=position)
        assert [resumed.next() for _ in range(20)] == [whole.next() for _ in range(20)]
        assert resumed.position == whole.position == position + 20


async def test_sets_are_evaluated_with_their_own_sampling_beside_what_is_held_out() -> None:
    one_set = (
        "{name: hard, num_problems: 3, num_samples: 2, source: {kind: python, factory: a.b}, "
        "sampling: {temperature: 0.25, max_response_tokens: 8}}"
    )
    config = make_config(f"evaluation.sets=[{one_set}]")
    generators = Generators()
    run = make_run(
        config,
        generators=generators,
        held_out=[make_problem(20), make_problem(5)],
        sets={"hard": [make_problem(3), make_problem(10), make_problem(30)]},
    )
    run.serving.until_served = lambda version: asyncio.sleep(0)
    held_out = await run.evaluations.first()
    others = {f"eval/{part}version_{which}" for part in ("", "hard/") for which in ("min", "max")}
    others.add("eval/wall_s")
    metrics = held_out.metrics()
    assert {key: value for key, value in metrics.items() if key not in others} == pytest.approx(
        {
            "eval/accuracy": 0.5,
            "eval/score_mean": 1.25,
            "eval/num_unscored": 0,
            "eval/hard/accuracy": 2 / 3,
            "eval/hard/score_mean": 4.3 / 3,
            "eval/hard/num_unscored": 0,
        }
    )
    assert [one.temperature for one in generators.sampled_as] == [1.0] * 2 + [0.25] * 6
    assert "; hard 0.667" in str(held_out)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


class TestRecords:
    @given(st.dictionaries(st.text(), json_values, max_size=4))
    def test_what_json_holds_stays_as_it_is(self, record: dict[str, Any]) -> None:
        def has_surrogates(value: object) -> bool:
            return any(0xD800 <= ord(sign) <= 0xDFFF for sign in json.dumps(value, ensure_ascii=False))

        plain = json_like(record)
        assert json.loads(json.dumps(plain, allow_nan=False)) == plain
        assert has_surrogates(record) or plain == record

    def test_what_it_does_not_hold_is_left_out(self) -> None:
        record = {
            "bytes": b"x",
            "nan": math.nan,
            "big": 2**70,
            "list": [1, b"x"],
            "t": (1, 2),
            3: 4,
            "half": "\ud800",
        }
        assert json_like(record) == {"big": str(2**70), "t": [1, 2]}


def test_a_checkpoint_from_before_these_keys_has_the_same_data() -> None:
    """Keys that it lacks are none: nothing differs."""
    now = make_config().data.model_dump(mode="json")
    before = {key: now[key] for key in ("source", "num_train", "num_held_out", "chat_template")}
    assert list(differences(data_order(before), data_order(now))) == []
    assert dataclasses.replace(make_problem(1), record={"a": 1}) != make_problem(1)


# ---- tasks in memory, and the order in which they are issued


TASKS = st.lists(
    st.builds(
        Task,
        task_id=st.text(),
        # Half of a character too: a source of one's own may have it.
        prompt=st.text(st.characters()),
        answer=st.text(),
        source_index=st.integers(-(2**40), 2**40),
        source=st.sampled_from(["a", "b"]),
        record=st.dictionaries(st.text(), json_values, max_size=3),
    ),
    max_size=6,
)


@given(TASKS)
def test_they_are_those_that_were_given(tasks: list[Task]) -> None:
    stored = StoredTasks(tasks)
    assert len(stored) == len(tasks) and list(stored) == tasks
    assert stored[1:] == tasks[1:] and list(reversed(stored)) == tasks[::-1]
    assert stored == StoredTasks(stored)
    for task in tasks[-1:]:
        assert stored[-1] == task and task in stored
        assert stored != StoredTasks([*tasks, task])
        assert stored != StoredTasks([*tasks[:-1], dataclasses.replace(task, answer=task.answer + "1")])


def test_one_can_be_changed_without_the_other() -> None:
    stored = StoredTasks([dataclasses.replace(make_task(0), record={"list": [1]})])
    stored[0].record["list"].append(2)
    assert stored[0].record == {"list": [1]}


def test_there_is_none_outside() -> None:
    stored = StoredTasks([make_task(0)])
    for index in (1, -2):
        with pytest.raises(IndexError):
            stored[index]
    assert not StoredTasks()


def take(order: TaskOrder, count: int) -> list[str]:
    return [order.next().task_id for _ in range(count)]


@settings(deadline=None)
@given(size=st.integers(1, 30), seed=st.integers(0, 2**32), num_epochs=st.integers(1, 4))
def test_every_epoch_is_a_permutation(size: int, seed: int, num_epochs: int) -> None:
    tasks = [make_task(index) for index in range(size)]
    order = TaskOrder(tasks, seed=seed)
    for epoch in range(num_epochs):
        assert (order.position, order.epoch) == (epoch * size, epoch)
        assert sorted(take(order, size)) == sorted(task.task_id for task in tasks)


def test_epochs_and_seeds_differ() -> None:
    tasks = [make_task(index) for index in range(50)]
    order = TaskOrder(tasks, seed=0)
    first, second = take(order, 50), take(order, 50)
    assert first != second
    assert first != [task.task_id for task in tasks]
    assert take(TaskOrder(tasks, seed=1), 50) not in (first, second)
