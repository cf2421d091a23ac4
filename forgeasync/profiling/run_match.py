"""A profile's own steps of the run, as they were measured and as they are simulated with it."""

import statistics
from dataclasses import replace

from forgeasync.profile.profile import Profile
from forgeasync.simulation.run import simulate
from forgeasync.simulation.shape import SimulatedRun

NUM_SEEDS = 8
"""Simulated runs that are compared with the measured one."""


def simulated_s(run: SimulatedRun, profile: Profile, *, num_left_out: int) -> float:
    """Return what a run takes for its steps after the first ones: the mean over seeds."""
    found = []
    for number in range(NUM_SEEDS):
        steps = simulate(replace(run, seed=NUM_SEEDS * run.seed + number), profile).steps
        found.append(steps[-1].end_s - steps[num_left_out - 1].end_s)
    return statistics.fmean(found)
