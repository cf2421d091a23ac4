"""Training tasks: how they are held in memory, and the order in which they are issued."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.environments import StoredTasks, TaskOrder, weighted_order
from forgeasync.rollouts import Task

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
TASKS = st.lists(
    st.builds(
        Task,
        task_id=st.text(),
        # Half of a character too: a source of one's own may have it.
        prompt=st.text(st.characters()),
        answer=st.text(),
        source_index=st.integers(-(2**40), 2**40),
        source=st.sampled_from(["a", "b"]),
        record=st.dictionaries(st.text(), PLAIN, max_size=3),
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


def make_task(index: int, source: str = "a") -> Task:
    return Task(
        task_id=f"{index}", prompt=f"{index}?", answer="1", source_index=index, source=source, record={}
    )


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


def test_they_are_issued_in_the_order_of_a_list() -> None:
    tasks = [make_task(index, "ab"[index % 3 == 0]) for index in range(50)]
    for weights in ({"a": 1.0, "b": 3.0},):
        one = weighted_order(tasks, weights, seed=3)
        other = weighted_order(StoredTasks(tasks), weights, seed=3)
        issued = [one.next() for _ in range(200)]
        assert issued == [other.next() for _ in range(200)]
        assert {task.source for task in issued} == {"a", "b"}


sizes = st.integers(min_value=1, max_value=30)
seeds = st.integers(min_value=0, max_value=2**32)


def make_tasks(size: int) -> list[Task]:
    return [
        Task(task_id=str(i), prompt=f"p{i}", answer=str(i), source_index=i, source="s") for i in range(size)
    ]


def take(order: TaskOrder, count: int) -> list[str]:
    return [order.next().task_id for _ in range(count)]


@settings(deadline=None)
@given(size=sizes, seed=seeds, num_epochs=st.integers(min_value=1, max_value=4))
def test_every_epoch_is_a_permutation(size: int, seed: int, num_epochs: int) -> None:
    tasks = make_tasks(size)
    order = TaskOrder(tasks, seed=seed)
    for epoch in range(num_epochs):
        assert (order.position, order.epoch) == (epoch * size, epoch)
        assert sorted(take(order, size)) == sorted(task.task_id for task in tasks)


@settings(deadline=None)
@given(size=sizes, seed=seeds, position=st.integers(min_value=0, max_value=100))
def test_an_order_from_a_position_continues_identically(size: int, seed: int, position: int) -> None:
    order = TaskOrder(make_tasks(size), seed=seed)
    take(order, position)
    assert order.position == position
    expected = take(order, 2 * size + 1)
    assert take(TaskOrder(make_tasks(size), seed=seed, position=position), 2 * size + 1) == expected


def test_epochs_and_seeds_differ() -> None:
    tasks = make_tasks(50)
    order = TaskOrder(tasks, seed=0)
    first, second = take(order, 50), take(order, 50)
    assert first != second
    assert first != [task.task_id for task in tasks]
    assert take(TaskOrder(tasks, seed=1), 50) not in (first, second)
