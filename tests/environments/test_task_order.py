"""The order of training problems: every pass issues each once, and one int restores it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.environments import TaskOrder
from forgeasync.rollouts import Task

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
@given(size=sizes, seed=seeds, position=st.integers(min_value=0, max_value=100), data=st.data())
def test_restoring_a_position_continues_identically(
    size: int, seed: int, position: int, data: st.DataObject
) -> None:
    order = TaskOrder(make_tasks(size), seed=seed)
    take(order, position)
    assert order.position == position
    expected = take(order, 2 * size + 1)

    assert take(TaskOrder(make_tasks(size), seed=seed, position=position), 2 * size + 1) == expected

    elsewhere = TaskOrder(make_tasks(size), seed=seed)
    take(elsewhere, data.draw(st.integers(min_value=0, max_value=100)))
    elsewhere.restore(position)
    assert take(elsewhere, 2 * size + 1) == expected


def test_epochs_and_seeds_differ() -> None:
    tasks = make_tasks(50)
    order = TaskOrder(tasks, seed=0)
    first, second = take(order, 50), take(order, 50)
    assert first != second
    assert first != [task.task_id for task in tasks]
    assert take(TaskOrder(tasks, seed=1), 50) not in (first, second)
