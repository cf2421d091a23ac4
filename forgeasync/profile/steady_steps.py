"""Which steps of a run its means are over: neither those of its start nor those of its end."""

import math


def num_steps_ahead(*, max_off_policy_steps: int, max_groups: int | None, groups_per_step: int) -> int:
    """Return for how many steps a run may have groups under way besides those of the step that is trained.

    ``max_groups`` is the buffer's depth bound. For the last so many steps of a run there is less and less to
    sample, and they are faster than the others.
    """
    if max_groups is None:
        return max_off_policy_steps
    return min(max_off_policy_steps, math.ceil(max_groups / groups_per_step))


def steady_steps(num_steps: int, *, num_first: int, num_ahead: int) -> range:
    """Return the steps in between, counted from 0.

    At least ``num_first`` steps are left out at the start, and ``num_ahead`` at the end, but at most half of
    what is left: a short run has some steps too. Groups that begin together may end together, and a run then
    goes in waves of ``num_ahead`` + 1 steps, of which one waits for most of the time: where there is a whole
    wave, there are only whole ones.
    """
    assert 0 <= num_first < max(1, num_steps)
    end = num_steps - min(num_ahead, (num_steps - num_first) // 2)
    num_beyond = (end - num_first) % (num_ahead + 1)
    return range(num_first + num_beyond if end - num_first > num_ahead else num_first, end)
