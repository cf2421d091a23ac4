"""Input and output of a simulation.

``SimulatedRun`` has the settings of a config that affect times. ``Prediction`` has the steps of a simulated
run and means over them.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from forgeasync.config import (
    AccountingSection,
    BufferSection,
    Interruption,
    LocalLauncher,
    ModelFacts,
    RunConfig,
    ScorerSection,
    WeightsSection,
    longest_response,
    named_sources,
    num_groups_held,
    num_hosts,
)
from forgeasync.models import kv_bytes_per_token, largest_group_payload_bytes
from forgeasync.observability import num_steps_ahead, steady_steps
from forgeasync.planning import pair_cost
from forgeasync.plugins.simulator.profile import Profile
from forgeasync.schema import Problem, raise_if_any, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """The settings of a run that affect times. Use ``of_config`` to get them from a config."""

    num_steps: int
    groups_per_step: int
    group_size: int
    max_off_policy_steps: int
    buffer: BufferSection
    accounting: AccountingSection
    scorer: ScorerSection
    weights: WeightsSection
    num_replicas: int
    num_generator_hosts: int
    max_num_seqs: int
    max_kv_tokens: int
    """Capacity of one engine's KV cache, in tokens."""
    num_data_ranks: int
    tokens_per_row: int
    share_prefixes: bool = False
    pair_cost: float = 0.0
    """Work for a pair of a query and a key, relative to the other work on a token."""
    steps_per_batch: int
    payload_capacity_bytes: int
    largest_group_bytes: int
    longest_group_tokens: int
    """Prompt and response tokens of a group that takes ``largest_group_bytes``."""
    num_groups_held: int
    """Number of groups whose arrays are kept after their step, until the trainer has a snapshot."""
    max_response_tokens: int
    source_weights: dict[str, float]
    num_prompts: int
    """Number of training tasks of all sources; after the last one they repeat."""
    seed: int = 0

    @property
    def num_steps_ahead(self) -> int:
        """Number of further steps for which groups may be in flight during a step."""
        return num_steps_ahead(
            max_off_policy_steps=self.max_off_policy_steps,
            max_groups=self.buffer.max_groups,
            groups_per_step=self.groups_per_step,
        )

    @property
    def steady_steps(self) -> range:
        """Steps over which means are computed, from 0; excludes the first third and the last steps."""
        return steady_steps(self.num_steps, num_first=self.num_steps // 3, num_ahead=self.num_steps_ahead)

    def __post_init__(self) -> None:
        if self.num_replicas % self.num_generator_hosts:
            raise ValueError(
                f"num_replicas = {self.num_replicas} must be a multiple of num_generator_hosts = "
                f"{self.num_generator_hosts}"
            )


def of_config(
    config: RunConfig, facts: ModelFacts, profile: Profile, *, num_steps: int | None = None
) -> SimulatedRun:
    """Return the run of a checked config, with ``num_steps`` steps (None: all of the config's).

    Raises:
        ConfigError: the run has an environment or an interruption other than in_flight, or the profile does
            not know a source of its data.
    """
    sources = {source.name: source.weight for source in named_sources(config.data)}
    raise_if_any(_unknown(config, profile, sources))
    generator, trainer, launcher = config.generator, config.trainer, config.launcher
    parallel = trainer.parallel
    per_token = kv_bytes_per_token(config, facts)
    return SimulatedRun(
        num_steps=num_steps or config.max_steps,
        groups_per_step=config.algorithm.groups_per_step,
        group_size=config.algorithm.group_size,
        max_off_policy_steps=config.max_off_policy_steps,
        buffer=config.buffer,
        accounting=config.accounting,
        scorer=config.scorer,
        weights=config.weights,
        num_replicas=generator.num_replicas,
        num_generator_hosts=1 if isinstance(launcher, LocalLauncher) else num_hosts(launcher).generators,
        max_num_seqs=generator.max_num_seqs,
        max_kv_tokens=max(config.model.max_context_length, int(generator.kv_cache_gib * 2**30 / per_token)),
        num_data_ranks=parallel.data_shard * parallel.data_replicate,
        tokens_per_row=trainer.tokens_per_row,
        share_prefixes=trainer.shares_prefixes,
        pair_cost=pair_cost(facts),
        steps_per_batch=trainer.steps_per_batch,
        payload_capacity_bytes=int(config.payload.capacity_gib * 2**30),
        largest_group_bytes=largest_group_payload_bytes(config, facts),
        longest_group_tokens=config.algorithm.group_size
        * (config.model.max_context_length + longest_response(config)),
        num_groups_held=num_groups_held(config),
        max_response_tokens=longest_response(config),
        source_weights=sources,
        num_prompts=config.data.num_train,
        seed=config.seed,
    )


def _unknown(config: RunConfig, profile: Profile, sources: dict[str, float]) -> Iterator[Problem]:
    for name in sources:
        if name not in profile.lengths:
            remedy = f"the profile must have the lengths of the config's source {name!r}"
            yield Problem(field="lengths", value=sorted(profile.lengths), remedy=remedy)
    if config.environment is not None:
        yield Problem(field="environment", remedy="must be left out: a profile has no times of episodes")
    if config.weights.interruption is not Interruption.IN_FLIGHT:
        yield refuse(config, "weights.interruption", "must be 'in_flight': others are not simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step of the training loop, from the trainer's request for its batch to its next request."""

    begin_s: float
    end_s: float
    wait_s: float
    train_s: float
    publish_s: float
    """Seconds that training waited for publishing."""
    num_trained_tokens: int
    """Number of response tokens."""
    ages: tuple[tuple[int, int], ...]
    """Pairs of age in versions and number of tokens, youngest first."""
    generators_busy_s: float
    """Seconds with at least one sequence, summed over generators, from the run's start to the step's end."""

    @property
    def step_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The steps of a simulated run and means over them.

    Means exclude the first steps, in which the buffer fills, and the last ones, in which sampling runs out.
    """

    steps: tuple[SimulatedStep, ...]
    steady_steps: range
    """Indices of the steps over which means are computed."""
    num_replicas: int
    num_preempted: int
    num_beyond_decode: int
    """Number of decode times that were extrapolated to more sequences than the profile has."""

    @property
    def steady(self) -> Sequence[SimulatedStep]:
        """The steps over which means are computed."""
        return self.steps[self.steady_steps.start : self.steady_steps.stop]

    @property
    def step_s(self) -> float:
        """Mean seconds per step."""
        return statistics.fmean(step.step_s for step in self.steady)

    @property
    def trained_tokens_per_s(self) -> float:
        """Response tokens trained on, per second."""
        seconds = sum(step.step_s for step in self.steady)
        return sum(step.num_trained_tokens for step in self.steady) / seconds

    @property
    def trainer_idle_share(self) -> float:
        """Share of the time that the trainer waits for a batch."""
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
        """Mean age of the trained tokens in policy versions."""
        ages = self.num_tokens_by_age
        return sum(age * num for age, num in ages.items()) / sum(ages.values())

    def notes(self) -> list[str]:
        """Return notes about what makes the prediction less certain."""
        notes = []
        if self.num_beyond_decode:
            notes.append(
                f"{self.num_beyond_decode} decode times are beyond the most sequences that were measured"
            )
        if self.num_preempted:
            notes.append(f"{self.num_preempted} sequences were computed again: the KV cache was full")
        return notes
