"""Simulates single changes of a run, with the same prompts and lengths, to estimate the gain of each."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from forgeasync.plugins.simulator.profile import Profile, WeightTimes
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
    """Words for the bottleneck of the run if this change helps most."""
    run: SimulatedRun
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The predicted effect of a change on the step time."""

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
    """The gains of all simulated changes, the largest first."""

    base: Prediction
    gains: tuple[Gain, ...]

    @property
    def best(self) -> Gain | None:
        """The change with the largest gain; None if no gain reaches ``LEAST_GAIN``."""
        return self.gains[0] if self.gains and self.gains[0].share >= LEAST_GAIN else None

    @property
    def verdict(self) -> str:
        """One line with the bottleneck of the run and the most helpful change."""
        if self.best is None:
            return f"nothing that was tried brings {LEAST_GAIN:.0%} of {self.base.step_s:.3g} s a step"
        return self.best.words


def what_if(run: SimulatedRun, profile: Profile) -> WhatIf:
    """Simulate a run unchanged and with each single change that applies to it."""
    base = simulate(run, profile)
    gains = [
        Gain(change=change, before_s=base.step_s, after_s=simulate(change.run, change.profile).step_s)
        for change in _changes(run, profile)
    ]
    gains.sort(key=lambda gain: -gain.share)
    return WhatIf(base=base, gains=tuple(gains))


def _changes(run: SimulatedRun, profile: Profile) -> Iterator[Change]:
    def of_run(name: str, bound: str, changed: SimulatedRun) -> Change:
        return Change(name=name, bound=bound, run=changed, profile=profile)

    def of_profile(name: str, bound: str, **fields: object) -> Change:
        return Change(name=name, bound=bound, run=run, profile=profile.model_copy(update=fields))

    # One on each host, since all hosts have the same number.
    num_replicas = run.num_replicas + run.num_generator_hosts
    yield of_run("one more replica", "generators bound", replace(run, num_replicas=num_replicas))
    train = tuple(one.model_copy(update={"step_s": one.step_s.scaled(0.5)}) for one in profile.train)
    yield of_profile("a trainer twice as fast", "the trainer bounds", train=train)
    times = profile.weights
    weights = WeightTimes(
        wait_s=times.wait_s.scaled(0.5),
        publish_s=times.publish_s.scaled(0.5),
        fetch_s=times.fetch_s.scaled(0.5),
        swap_s=times.swap_s.scaled(0.5),
    )
    yield of_profile("weights twice as fast", "new weights bound", weights=weights)
    yield of_profile(
        "a controller twice as fast",
        "the controller bounds",
        controller_s=profile.controller_s.scaled(0.5),
        loops_s=profile.loops_s.scaled(0.5),
    )
    if run.has_environment:
        assert profile.environment is not None, "the run has one"
        latency_s = profile.environment.latency_s.scaled(0.5)
        environment = profile.environment.model_copy(update={"latency_s": latency_s})
        yield of_profile("an environment twice as fast", "the environment bounds", environment=environment)
    else:
        scorer = run.scorer.model_copy(update={"num_replicas": run.scorer.num_replicas + 1})
        yield of_run("one more scorer", "scorers bound", replace(run, scorer=scorer))
    bounds = {name: getattr(run.buffer, name) for name in ("max_groups", "max_in_flight")}
    if larger := {name: 2 * bound for name, bound in bounds.items() if bound is not None}:
        changed = replace(run, buffer=run.buffer.model_copy(update=larger))
        yield of_run("a buffer twice as large", "the buffer bounds", changed)
    if run.max_off_policy_steps < MAX_BOUND:
        longer = min(MAX_BOUND, max(1, 2 * run.max_off_policy_steps))
        changed = replace(run, max_off_policy_steps=longer)
        yield of_run(f"max_off_policy_steps {longer}", "the bound on age bounds", changed)
