"""Simulates alternatives of a run: single changes, and splits of a number of GPUs between both roles.

Single changes are simulated with the same prompts and lengths as the run, to estimate the gain of each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from forgeasync.config import ModelFacts, RunConfig
from forgeasync.models import check_config
from forgeasync.planning import Machine, changed_config, fit_trainer, generator_fits, planned_machine
from forgeasync.plugins.simulator.profile import Profile, WeightTimes
from forgeasync.plugins.simulator.run import simulate
from forgeasync.plugins.simulator.shape import Prediction, SimulatedRun, of_config
from forgeasync.schema import ConfigError, Problem

MAX_BOUND = 32
"""Largest ``max_off_policy_steps`` that a config may have."""

LEAST_GAIN = 0.02
"""Share of the step time. A smaller gain may be an error of the simulator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The predicted effect of a change on the step time."""

    change: str
    """A few words, such as "one more replica"."""
    bound: str
    """Words for the bottleneck of the run if this change helps most."""
    before_s: float
    """Seconds per step without the change."""
    after_s: float

    @property
    def share(self) -> float:
        """Share of the step time that the change saves; negative if it costs time."""
        return 1.0 - self.after_s / self.before_s


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
        if (best := self.best) is None:
            return f"no change that was tried saves {LEAST_GAIN:.0%} of {self.base.step_s:.3g} s a step"
        return f"{best.bound}; {best.change}: {best.before_s:.3g} -> {best.after_s:.3g} s a step"


def what_if(run: SimulatedRun, profile: Profile) -> WhatIf:
    """Simulate a run unchanged and with each single change that applies to it."""
    base = simulate(run, profile)
    gains = [
        Gain(change=name, bound=bound, before_s=base.step_s, after_s=simulate(changed, times).step_s)
        for name, bound, changed, times in _changes(run, profile)
    ]
    gains.sort(key=lambda gain: -gain.share)
    return WhatIf(base=base, gains=tuple(gains))


def _changes(run: SimulatedRun, profile: Profile) -> Iterator[tuple[str, str, SimulatedRun, Profile]]:
    """Yield name, bottleneck, run and service times of each change."""
    # One on each host, since all hosts have the same number.
    more = replace(run, num_replicas=run.num_replicas + run.num_generator_hosts)
    yield "one more replica", "generators bound", more, profile
    train = tuple(one.model_copy(update={"step_s": 0.5 * one.step_s}) for one in profile.train)
    yield "a trainer twice as fast", "the trainer bounds", run, profile.model_copy(update={"train": train})
    halves = {name: getattr(profile.weights, name).scaled(0.5) for name in WeightTimes.model_fields}
    fast = WeightTimes(**halves)
    yield "weights twice as fast", "new weights bound", run, profile.model_copy(update={"weights": fast})
    scorer = run.scorer.model_copy(update={"num_replicas": run.scorer.num_replicas + 1})
    yield "one more scorer", "scorers bound", replace(run, scorer=scorer), profile
    bounds = {name: getattr(run.buffer, name) for name in ("max_groups", "max_in_flight")}
    if larger := {name: 2 * bound for name, bound in bounds.items() if bound is not None}:
        buffer = run.buffer.model_copy(update=larger)
        yield "a buffer twice as large", "the buffer bounds", replace(run, buffer=buffer), profile
    if run.max_off_policy_steps < MAX_BOUND:
        longer = min(MAX_BOUND, max(1, 2 * run.max_off_policy_steps))
        changed = replace(run, max_off_policy_steps=longer)
        yield f"max_off_policy_steps {longer}", "the bound on age bounds", changed, profile


BOUNDS = (0, 1, 2, 4, 8, 16, 32)

AS_FAST = 0.97
"""Splits that reach this share of the best throughput count as fast. Smaller differences may be errors."""

ProfileOf = Callable[[RunConfig], Profile]
"""Returns the service times of a config. Measured ones are the same for all configs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A config with its split of the GPUs, and the simulator's prediction."""

    config: RunConfig
    prediction: Prediction

    @property
    def num_trainer(self) -> int:
        return self.config.trainer.parallel.num_procs

    @property
    def num_generating(self) -> int:
        return self.config.generator.num_replicas * self.config.generator.tensor_parallel

    @property
    def num_gpus(self) -> int:
        return self.num_trainer + self.num_generating

    @property
    def tokens_per_s(self) -> float:
        return self.prediction.trained_tokens_per_s

    @property
    def order(self) -> tuple[float, float, int]:
        """Sort key, smaller is better: negative throughput, mean age of the data, number of GPUs."""
        return -self.tokens_per_s, self.prediction.mean_age, self.num_gpus

    def is_beaten_by(self, other: "Split") -> bool:
        """Return whether another split dominates this one in throughput, age and GPUs (Pareto)."""
        pairs = zip(other.order, self.order, strict=True)
        return other.order != self.order and all(one <= own for one, own in pairs)

    def overrides(self) -> str:
        """Return the settings of the split as command-line overrides."""
        return (
            f"trainer.parallel.num_procs={self.num_trainer} "
            f"generator.num_replicas={self.config.generator.num_replicas} "
            f"max_off_policy_steps={self.config.max_off_policy_steps}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """All simulated splits, the fastest first, and the recommended one."""

    splits: tuple[Split, ...]
    num_refused: int
    """Splits that break a rule of the config or do not fit into memory."""
    chosen: Split
    reason: str

    @property
    def front(self) -> tuple[Split, ...]:
        """The splits on the Pareto front of throughput, age and GPUs."""
        return tuple(one for one in self.splits if not any(one.is_beaten_by(other) for other in self.splits))


def plan_splits(
    config: RunConfig,
    facts: ModelFacts,
    profile_of: ProfileOf,
    *,
    num_gpus: int,
    num_steps: int,
    gpu_bytes: int,
) -> SplitPlan:
    """Simulate the splits of ``num_gpus`` GPUs (or CPU processes) for ``num_steps`` steps each.

    Returns all splits and the recommended one. Tensor-parallel and context-parallel degrees and the launcher
    are those of the config; the hosts of the launcher allow only some splits.

    Raises:
        ConfigError: no split is legal and fits, or the profile does not fit the config.
    """
    splits, refusals = [], []
    for candidate in _candidates(config, num_gpus):
        if (refusal := _refusal(candidate, facts, gpu_bytes)) is not None:
            refusals.append(refusal)
            continue
        profile = profile_of(candidate)
        run = of_config(candidate, facts, profile, num_steps=num_steps)
        splits.append(Split(config=candidate, prediction=simulate(run, profile)))
    if not splits:
        words = f"; the last one: {refusals[-1]}" if refusals else ""
        remedy = f"must be more: none of {len(refusals)} splits is legal and fits into memory{words}"
        raise ConfigError([Problem(field="--gpus", value=num_gpus, remedy=remedy)])
    splits.sort(key=lambda one: one.order)
    chosen = choose(splits)
    return SplitPlan(
        splits=tuple(splits),
        num_refused=len(refusals),
        chosen=chosen,
        reason=_reason(chosen, splits),
    )


def choose(splits: Sequence[Split]) -> Split:
    """Return the split with the youngest data among the fastest ones; ties go to fewer GPUs."""
    fastest = max(one.tokens_per_s for one in splits)
    fast = [one for one in splits if one.tokens_per_s >= AS_FAST * fastest]
    return min(fast, key=lambda one: (round(one.prediction.mean_age, 1), one.num_gpus, -one.tokens_per_s))


def _reason(chosen: Split, splits: Sequence[Split]) -> str:
    prediction = chosen.prediction
    trainer, generators = prediction.trainer_idle_share, prediction.generators_idle_share
    idle = f"the trainer waits {trainer:.0%} of the time, generators {generators:.0%}"
    fastest = splits[0]
    if chosen is fastest:
        return f"no other split trains on more tokens a second; {idle}"
    share = chosen.tokens_per_s / fastest.tokens_per_s
    younger = fastest.prediction.mean_age - prediction.mean_age
    return (
        f"{share:.1%} of the fastest split's tokens a second, with data {younger:.1f} versions younger and "
        f"{chosen.num_gpus} of its {fastest.num_gpus} GPUs; {idle}"
    )


def _candidates(config: RunConfig, num_gpus: int) -> Iterator[RunConfig]:
    """Yield every trainer with as many replicas as are left, under every bound, and with fewer replicas under
    the config's bound."""
    tensor = config.generator.tensor_parallel
    own = config.max_off_policy_steps
    bounds = sorted({own, *(bound for bound in BOUNDS if bound <= own)})
    for num_procs in _trainer_sizes(config, num_gpus):
        most = (num_gpus - num_procs) // tensor
        for bound in bounds:
            if most >= 1:
                yield _split(config, num_procs, most, bound)
        fewer = most // 2
        while fewer >= 1:
            yield _split(config, num_procs, fewer, own)
            fewer //= 2


def _trainer_sizes(config: RunConfig, num_gpus: int) -> list[int]:
    """Return multiples of what one shard needs: all of them for few GPUs, else powers of two and 1.5 times
    those."""
    parallel = config.trainer.parallel
    unit = parallel.data_replicate * parallel.tensor * parallel.context
    most = num_gpus // unit
    if most <= 16:
        return [unit * factor for factor in range(1, most + 1)]
    factors, power = set(), 1
    while power <= most:
        factors |= {power, power + power // 2}
        power *= 2
    return [unit * factor for factor in sorted(factors) if factor <= most]


def _split(config: RunConfig, num_procs: int, num_replicas: int, bound: int) -> RunConfig:
    changes = {"trainer.parallel.num_procs": num_procs, "generator.num_replicas": num_replicas}
    return changed_config(config, changes | {"max_off_policy_steps": bound})


def _refusal(config: RunConfig, facts: ModelFacts, gpu_bytes: int) -> str | None:
    """Return the problem of a split; None if it could run."""
    if problems := check_config(config, facts):
        return str(problems[0])
    if planned_machine(config) is Machine.CPU:
        return None
    if not fit_trainer(config, facts, gpu_bytes=gpu_bytes).fits:
        return f"a trainer rank of {config.trainer.parallel.num_procs} does not fit on a GPU"
    if not generator_fits(config, facts, gpu_bytes=gpu_bytes):
        return "a generator rank does not fit on a GPU"
    return None


def print_plan(plan: SplitPlan, *, is_stated: bool) -> None:
    """Print the splits on the Pareto front, the recommended split, and the reason."""
    console = Console()
    origin = "stated hardware, nothing of it measured" if is_stated else "measured profile"
    counted = f"{len(plan.splits)} simulated, {plan.num_refused} refused"
    table = Table(
        title=f"splits that no other one beats ({origin}; {counted})",
        caption="GPUs that train, replicas x GPUs that generate, max_off_policy_steps; seconds a step, "
        "tokens trained a second, mean age in versions; shares of time that trainer and generators wait",
        title_justify="left",
        caption_justify="left",
    )
    for name in ("", "train", "generate", "bound", "step", "tokens/s", "age", "wait", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    for split in plan.front:
        table.add_row("*" if split is plan.chosen else "", *_cells(split))
    if plan.chosen not in plan.front:
        table.add_row("*", *_cells(plan.chosen))
    console.print(table)
    console.print(f"recommended: {plan.chosen.overrides()}", soft_wrap=True, highlight=False)
    console.print(f"because {plan.reason}", soft_wrap=True, highlight=False)
    for note in plan.chosen.prediction.notes():
        console.print(f"note: {note}", soft_wrap=True, highlight=False)


def _cells(split: Split) -> tuple[str, ...]:
    prediction = split.prediction
    return (
        str(split.num_trainer),
        f"{split.config.generator.num_replicas} x {split.config.generator.tensor_parallel}",
        str(split.config.max_off_policy_steps),
        f"{prediction.step_s:.3g}",
        f"{prediction.trained_tokens_per_s:,.0f}",
        f"{prediction.mean_age:.1f}",
        f"{prediction.trainer_idle_share:.0%}",
        f"{prediction.generators_idle_share:.0%}",
    )
