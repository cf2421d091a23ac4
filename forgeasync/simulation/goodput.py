"""Which share of a run's time is effective where procs are lost."""

from dataclasses import dataclass, replace

from forgeasync.profile import Profile
from forgeasync.simulation.prediction import Prediction
from forgeasync.simulation.run import simulate
from forgeasync.simulation.shape import FaultRates, SimulatedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """A run with faults beside the same run without."""

    with_faults: Prediction
    without: Prediction

    @property
    def effective_share(self) -> float:
        """Share of the time that the run would have taken without faults."""
        return self.without.run_s / self.with_faults.run_s


def goodput(run: SimulatedRun, profile: Profile) -> Goodput:
    """Simulate a run with its rates of faults and without any."""
    without = simulate(replace(run, faults=FaultRates()), profile)
    return Goodput(with_faults=simulate(run, profile), without=without)
