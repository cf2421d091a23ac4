"""What a simulated run says: of each step, of all of them, and of its groups."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forgeasync.simulation.training import SimulatedStep


@dataclass(slots=True)
class GroupCounts:
    """Groups in flight, as the simulation saw them come and go."""

    num_started: int = 0
    num_ended: int = 0
    num_trained: int = 0
    sojourn_s: float = 0.0
    """Seconds in flight, added up over groups that were scored or given up."""
    _began_s: dict[int, float] = field(default_factory=dict)

    def started(self, group_id: int, now_s: float) -> None:
        """A group is in flight."""
        self.num_started += 1
        self._began_s[group_id] = now_s

    def ended(self, group_id: int, now_s: float) -> None:
        """A group was scored, or given up."""
        self.num_ended += 1
        self.sojourn_s += now_s - self._began_s.pop(group_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A simulated run. Means leave out the first steps, until the buffer is as full as it will be, and the
    last ones, for which there is less and less to sample."""

    steps: tuple[SimulatedStep, ...]
    steady_steps: range
    """Those that means are over, counted from 0."""
    num_replicas: int
    counts: GroupCounts
    num_in_flight: int
    num_complete: int
    """Groups that wait to be trained on at the end."""
    num_dropped: Mapping[str, int]
    """By reason."""
    num_preempted: int
    num_moved: int
    """Groups that lost their generator."""
    trainer_lost_s: float
    num_beyond_decode: int
    """Steps of engines with more sequences than the profile has measured."""
    largest_train_error: float
    """Largest relative difference between the fitted and the measured steps of the trainer."""

    @property
    def steady(self) -> Sequence[SimulatedStep]:
        """The steps that means are over."""
        return self.steps[self.steady_steps.start : self.steady_steps.stop]

    @property
    def run_s(self) -> float:
        return self.steps[-1].end_s

    @property
    def step_s(self) -> float:
        """Mean seconds from one step's beginning to the next."""
        return statistics.fmean(step.step_s for step in self.steady)

    @property
    def trained_tokens_per_s(self) -> float:
        """Response tokens trained on, per second."""
        seconds = sum(step.step_s for step in self.steady)
        return sum(step.num_trained_tokens for step in self.steady) / seconds

    @property
    def trainer_idle_share(self) -> float:
        """Share of the time in which the trainer waits for a batch."""
        seconds = sum(step.step_s for step in self.steady)
        return sum(step.wait_s for step in self.steady) / seconds

    @property
    def generators_idle_share(self) -> float:
        """Share of the generators' time without a request."""
        first, last = self.steady[0], self.steady[-1]
        num_before = self.steady_steps.start
        before_s = self.steps[num_before - 1].generators_busy_s if num_before else 0.0
        busy_s = last.generators_busy_s - before_s
        return max(0.0, 1.0 - busy_s / (self.num_replicas * (last.end_s - first.begin_s)))

    @property
    def num_tokens_by_age(self) -> Mapping[int, int]:
        """Response tokens trained on, by age in versions."""
        ages: Counter[int] = Counter()
        for step in self.steady:
            ages.update(dict(step.ages))
        return dict(sorted(ages.items()))

    @property
    def mean_age(self) -> float:
        ages = self.num_tokens_by_age
        return sum(age * num for age, num in ages.items()) / sum(ages.values())

    @property
    def largest_age(self) -> int:
        """Of all steps."""
        return max(age for step in self.steps for age, _ in step.ages)

    def notes(self) -> list[str]:
        """What makes the prediction less certain, in words."""
        notes = []
        if self.num_beyond_decode:
            notes.append(
                f"{self.num_beyond_decode} decode times are beyond the most sequences that were measured"
            )
        if self.largest_train_error > 0.1:
            notes.append(
                f"the fitted time of a train step is off by up to {self.largest_train_error:.0%} from "
                "what was measured"
            )
        if self.num_preempted:
            notes.append(f"{self.num_preempted} sequences were computed again: the KV cache was full")
        return notes
