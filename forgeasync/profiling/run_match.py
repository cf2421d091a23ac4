"""Tells what sharing cores costs from the time that a few steps of the run take.

It can be told from what engines compute for the same with the trainer beside them and without it, too. But
without it others are still beside them, and what remains of the difference tells little: on one machine 1.0
was found that way, and 0.5 foretold its runs.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace

from forgeasync.profile.profile import MOST_CROWDING, Profile
from forgeasync.simulation.run import simulate
from forgeasync.simulation.shape import SimulatedRun

NUM_SEEDS = 6
"""Simulated runs that are compared with the measured one."""

NUM_HALVINGS = 6
"""Of the range in which the cost is looked for."""


def crowding_of_run(
    run: SimulatedRun, with_crowding: Callable[[float], Profile], *, num_left_out: int, run_s: float
) -> float:
    """Return the ``Cores.crowding`` with which a run takes as long as it did, up to ``MOST_CROWDING``.

    ``run_s`` is what the steps after the first ``num_left_out`` took. ``with_crowding`` returns the profile
    that goes with a cost: what was measured beside others depends on it too.
    """
    low, high = 0.0, MOST_CROWDING
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2.0
        if _simulated_s(run, with_crowding(middle), num_left_out) < run_s:
            low = middle
        else:
            high = middle
    if low == 0.0 or high == MOST_CROWDING:
        # It is beyond the end of the range, as far as can be told.
        return 0.0 if low == 0.0 else MOST_CROWDING
    return (low + high) / 2.0


def _simulated_s(run: SimulatedRun, profile: Profile, num_left_out: int) -> float:
    """Return what a simulated run takes for the steps after the first ones: the mean over seeds."""
    found = []
    for number in range(NUM_SEEDS):
        steps = simulate(replace(run, seed=NUM_SEEDS * run.seed + number), profile).steps
        found.append(steps[-1].end_s - steps[num_left_out - 1].end_s)
    return statistics.fmean(found)
