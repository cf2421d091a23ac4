"""What a trainer with some number of ranks takes, by what the one that was measured took."""

from dataclasses import dataclass

from forgeasync.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCost:
    """A trainer's steps, beside those that the profile has."""

    time_share: float
    """Time of a step alone, by that of the measured trainer with as many rows of each rank."""
    cores: float
    """Cores that all ranks keep busy together."""
    lag: float
    """How much less of the cores than others they get where these are short: ``Cores.trainer_lag``."""


def trainer_cost(profile: Profile, *, num_data_ranks: int) -> TrainerCost:
    """Return what a trainer with so many data ranks is like; each is as many procs as in the profile.

    Several procs wait for each other in every step, for as long as they keep no core busy. One that is alone
    waits for nobody: it takes the time that one of them computes, and gets as much of the cores as others.
    What it saves by exchanging nothing is not known. On GPUs nothing is known of either.
    """
    setup, cores = profile.setup, profile.cores
    of_each = cores.trainer / setup.num_data_ranks
    becomes_one_proc = num_data_ranks == 1 < setup.num_trainer_procs == setup.num_data_ranks
    if not becomes_one_proc or not of_each:
        return TrainerCost(time_share=1.0, cores=of_each * num_data_ranks, lag=cores.trainer_lag)
    time_share = min(1.0, of_each)
    return TrainerCost(time_share=time_share, cores=of_each / time_share, lag=0.0)
