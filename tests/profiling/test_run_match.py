"""A profile's own steps of the run are simulated without the first ones."""

import statistics
from dataclasses import replace

import pytest

from forgeasync.profiling import NUM_SEEDS, simulated_s
from forgeasync.simulation import simulate
from tests.support.profiles import simple_profile
from tests.support.simulated import small_run


def test_it_is_the_mean_over_seeds_of_what_the_later_steps_take() -> None:
    run, profile = small_run(groups_per_step=8), simple_profile()
    seeds = range(NUM_SEEDS * run.seed, NUM_SEEDS * (run.seed + 1))
    of_seeds = [simulate(replace(run, seed=seed), profile).steps for seed in seeds]
    expected = statistics.fmean(sum(one.step_s for one in steps[3:]) for steps in of_seeds)
    assert simulated_s(run, profile, num_left_out=3) == pytest.approx(expected)
