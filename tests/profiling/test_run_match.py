"""What sharing cores costs is found again in the time of a run that was simulated with it."""

from collections.abc import Callable

import pytest

from forgeasync.profile.profile import MOST_CROWDING, Cores, Profile
from forgeasync.profiling.run_match import crowding_of_run
from forgeasync.simulation.run import simulate
from tests.support.profiles import simple_profile
from tests.support.simulated import small_run

NUM_LEFT_OUT = 3

RUN = small_run(num_replicas=2, groups_per_step=8)


def shared_cores(token_s: float) -> Callable[[float], Profile]:
    """Two engines, a trainer and a controller on two cores."""

    def with_crowding(crowding: float) -> Profile:
        cores = Cores(trainer=1.5, generator=1.0, scorer=0.5, crowding=crowding, trainer_share=0.8)
        return simple_profile(
            cores=cores,
            num_cores=2,
            token_s=token_s,
            controller_s=0.001,
            score_s=0.002,
            # All alike: how long responses are makes more of a difference to so small a run.
            lengths=(40.0, 40.0, 40.0),
        )

    return with_crowding


def run_s(profile: Profile) -> float:
    steps = simulate(RUN, profile).steps
    return steps[-1].end_s - steps[NUM_LEFT_OUT - 1].end_s


@pytest.mark.parametrize("crowding", [0.2, 0.5, 0.8])
def test_it_is_found_again(crowding: float) -> None:
    with_crowding = shared_cores(1e-3)
    found = crowding_of_run(
        RUN, with_crowding, num_left_out=NUM_LEFT_OUT, run_s=run_s(with_crowding(crowding))
    )
    assert found == pytest.approx(crowding, abs=0.02)


def test_what_cannot_be_is_at_the_end_of_the_range() -> None:
    with_crowding = shared_cores(1e-3)
    fast, slow = (
        crowding_of_run(
            RUN, with_crowding, num_left_out=NUM_LEFT_OUT, run_s=factor * run_s(with_crowding(end))
        )
        for factor, end in ((0.8, 0.0), (1.3, MOST_CROWDING))
    )
    assert (fast, slow) == (0.0, MOST_CROWDING)
