"""A scored group whose steps have values."""

from forgeasync.rollouts import Group, Step
from tests.support.buffer_world import make_task
from tests.support.rollouts import make_stored_rollout


def make_group(*steps: tuple[Step, ...], texts: tuple[str, ...] = ("abcdef", "abcd")) -> Group:
    rollouts = tuple(make_stored_rollout((0, 0, 4), text=text) for text in texts)
    return Group(
        group_id=7,
        draw_id=0,
        task=make_task(0),
        rollouts=rollouts,
        rewards=tuple(float(index) for index in range(len(texts))),
        steps=steps or None,
    )
