"""Simulates a run with single changes, each with the same prompts and lengths, to say what they would
bring."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from forgeasync.plugins.simulator.profile import Distribution, Estimate, Profile, TrainPoint
from forgeasync.plugins.simulator.run import simulate
from forgeasync.plugins.simulator.shape import Prediction, SimulatedRun

MAX_BOUND = 32
"""Largest ``max_off_policy_steps`` that a config may have."""

LEAST_GAIN = 0.02
"""Share of the step time. A smaller gain may be an error of the simulator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a run or of its service times."""

    name: str
    """A few words, such as "one more replica"."""
    bound: str
    """What bounds the run if this change helps most."""
    apply: Callable[[SimulatedRun, Profile], tuple[SimulatedRun, Profile]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a change would bring."""

    change: Change
    before_s: float
    """Seconds per step without the change."""
    after_s: float

    @property
    def share(self) -> float:
        """Share of the step time that the change saves; negative if it costs time."""
        return 1.0 - self.after_s / self.before_s

    @property
    def words(self) -> str:
        return f"{self.change.bound}; {self.change.name}: {self.before_s:.3g} -> {self.after_s:.3g} s a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """All changes that were tried, the largest gain first."""

    base: Prediction
    gains: tuple[Gain, ...]

    @property
    def best(self) -> Gain | None:
        """The change with the largest gain; None if none brings ``LEAST_GAIN``."""
        return self.gains[0] if self.gains and self.gains[0].share >= LEAST_GAIN else None

    @property
    def verdict(self) -> str:
        """One line that says what bounds the run and what would help most."""
        if self.best is None:
            return f"nothing that was tried brings {LEAST_GAIN:.0%} of {self.base.step_s:.3g} s a step"
        return self.best.words


def what_if(run: SimulatedRun, profile: Profile) -> WhatIf:
    """Simulate a run as it is, and with each single change that makes sense for it."""
    base = simulate(run, profile)
    gains = []
    for change in _possible_changes(run):
        changed = simulate(*change.apply(run, profile))
        gains.append(Gain(change=change, before_s=base.step_s, after_s=changed.step_s))
    gains.sort(key=lambda gain: -gain.share)
    return WhatIf(base=base, gains=tuple(gains))


def _possible_changes(run: SimulatedRun) -> list[Change]:
    changes = [
        Change(name="one more replica", bound="generators bound", apply=_one_more_replica),
        Change(name="a trainer twice as fast", bound="the trainer bounds", apply=_twice_the_trainer),
        Change(name="weights twice as fast", bound="new weights bound", apply=_faster_weights),
        Change(name="a controller twice as fast", bound="the controller bounds", apply=_faster_controller),
    ]
    if run.has_environment:
        changes.append(
            Change(name="an environment twice as fast", bound="the environment bounds", apply=_faster_turns)
        )
    else:
        changes.append(Change(name="one more scorer", bound="scorers bound", apply=_one_more_scorer))
    if run.buffer.max_groups is not None or run.buffer.max_in_flight is not None:
        changes.append(
            Change(name="a buffer twice as large", bound="the buffer bounds", apply=_larger_buffer)
        )
    if run.max_off_policy_steps < MAX_BOUND:
        longer = min(MAX_BOUND, max(1, 2 * run.max_off_policy_steps))
        changes.append(
            Change(
                name=f"max_off_policy_steps {longer}",
                bound="the bound on age bounds",
                apply=lambda run, profile: (replace(run, max_off_policy_steps=longer), profile),
            )
        )
    return changes


def _one_more_replica(run: SimulatedRun, profile: Profile) -> tuple[SimulatedRun, Profile]:
    """Add one replica on each host, since all hosts have the same number."""
    return replace(run, num_replicas=run.num_replicas + run.num_generator_hosts), profile


def _one_more_scorer(run: SimulatedRun, profile: Profile) -> tuple[SimulatedRun, Profile]:
    scorer = run.scorer.model_copy(update={"num_replicas": run.scorer.num_replicas + 1})
    return replace(run, scorer=scorer), profile


def _larger_buffer(run: SimulatedRun, profile: Profile) -> tuple[SimulatedRun, Profile]:
    bounds = {
        name: 2 * bound
        for name, bound in (
            ("max_groups", run.buffer.max_groups),
            ("max_in_flight", run.buffer.max_in_flight),
        )
        if bound is not None
    }
    return replace(run, buffer=run.buffer.model_copy(update=bounds)), profile


def _twice_the_trainer(run: SimulatedRun, profile: Profile) -> tuple[SimulatedRun, Profile]:
    train = tuple(
        TrainPoint(num_rows=one.num_rows, num_tokens=one.num_tokens, step_s=_halved(one.step_s))
        for one in profile.train
    )
    return run, profile.model_copy(update={"train": train})


def _faster_turns(run: SimulatedRun, profile: Profile) -> tuple[SimulatedRun, Profile]:
    assert profile.environment is not None, "the run has one"
    environment = profile.environment.model_copy(update={"latency_s": _faster(profile.environment.latency_s)})
    return run, profile.model_copy(update={"environment": environment})


def _faster_weights(run: SimulatedRun, profile: Profile) -> tuple[SimulatedRun, Profile]:
    times = profile.weights
    weights = times.model_copy(
        update={
            "wait_s": _faster(times.wait_s),
            "publish_s": _faster(times.publish_s),
            "fetch_s": _faster(times.fetch_s),
            "swap_s": _faster(times.swap_s),
        }
    )
    return run, profile.model_copy(update={"weights": weights})


def _faster_controller(run: SimulatedRun, profile: Profile) -> tuple[SimulatedRun, Profile]:
    halved = {"controller_s": _halved(profile.controller_s), "loops_s": _halved(profile.loops_s)}
    return run, profile.model_copy(update=halved)


def _faster(times: Distribution) -> Distribution:
    return Distribution(mean=_halved(times.mean), quantiles=tuple(value / 2 for value in times.quantiles))


def _halved(estimate: Estimate) -> Estimate:
    return Estimate(
        mean=estimate.mean / 2,
        low=estimate.low / 2,
        high=estimate.high / 2,
        num_samples=estimate.num_samples,
    )
