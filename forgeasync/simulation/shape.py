"""What is simulated of a run: the numbers of its config that times depend on, and a rate of faults."""

from dataclasses import dataclass, field

from forgeasync.config import (
    AccountingSection,
    BufferSection,
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
from forgeasync.profile import Profile, num_steps_ahead, steady_steps
from forgeasync.schema import Problem, raise_if_any


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """Losses per second, of one generator and of the whole trainer."""

    per_generator_per_s: float = 0.0
    trainer_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A run by its numbers. ``of_config`` makes one of a config."""

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
    """Tokens whose keys and values one engine holds."""
    num_data_ranks: int
    tokens_per_row: int
    steps_per_batch: int
    payload_capacity_bytes: int
    largest_group_bytes: int
    longest_group_tokens: int
    """Prompt and response tokens of a group that takes ``largest_group_bytes``."""
    num_groups_held: int
    """Groups whose arrays stay after their step, until the trainer has a snapshot."""
    max_response_tokens: int
    source_weights: dict[str, float]
    num_prompts: int
    """Training problems of all sources together; after them they come again."""
    has_environment: bool = False
    keeps_in_flight: bool = True
    faults: FaultRates = field(default_factory=FaultRates)
    seed: int = 0

    @property
    def num_steps_ahead(self) -> int:
        """Steps that groups may be under way for besides the one that is trained."""
        return num_steps_ahead(
            max_off_policy_steps=self.max_off_policy_steps,
            max_groups=self.buffer.max_groups,
            groups_per_step=self.groups_per_step,
        )

    @property
    def steady_steps(self) -> range:
        """The steps that means are over, counted from 0: not the first third, and not the last ones."""
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
    """Return the run of a config that was checked; so many steps of it (null: all).

    Raises:
        ConfigError: the profile does not know a source of the data, or an environment that the run has.
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
        steps_per_batch=trainer.steps_per_batch,
        payload_capacity_bytes=int(config.payload.capacity_gib * 2**30),
        largest_group_bytes=largest_group_payload_bytes(config, facts),
        longest_group_tokens=config.algorithm.group_size
        * (config.model.max_context_length + longest_response(config)),
        num_groups_held=num_groups_held(config),
        max_response_tokens=longest_response(config),
        source_weights=sources,
        num_prompts=config.data.num_train,
        has_environment=config.environment is not None,
        keeps_in_flight=generator.keep_in_flight,
        seed=config.seed,
    )


def _unknown(config: RunConfig, profile: Profile, sources: dict[str, float]) -> list[Problem]:
    problems = [
        Problem(
            field="lengths",
            value=sorted(profile.lengths),
            remedy=f"the profile must have the lengths of the config's source {name!r}",
        )
        for name in sources
        if name not in profile.lengths
    ]
    if config.environment is not None and profile.environment is None:
        remedy = "the profile must have its times, as the config has an environment"
        problems.append(Problem(field="environment", remedy=remedy))
    return problems
