"""A profile's own steps of the run, as they were measured and as they are simulated with it."""

import statistics

from forgeasync.profile import Profile
from forgeasync.simulation import SimulatedRun, simulate_seeds

NUM_SEEDS = 8
"""Simulated runs that are compared with the measured one."""


def simulated_s(run: SimulatedRun, profile: Profile, *, num_left_out: int) -> float:
    """Return what a run takes for its steps after the first ones: the mean over seeds."""
    found = [one.steps for one in simulate_seeds(run, profile, num_seeds=NUM_SEEDS)]
    return statistics.fmean(steps[-1].end_s - steps[num_left_out - 1].end_s for steps in found)
