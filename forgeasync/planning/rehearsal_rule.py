"""Derives the config of a rehearsal from a run's config.

Model, lengths and batch are made small. Replicas and data-parallel groups that do not fit this machine are
left out whole. Features that need a GPU are replaced if there is none. Everything else stays: roles, parallel
degrees, transports, the objective with its corrections and filters, the replay of routed experts and kept
sets, staleness and dtypes.
"""

import math
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from pydantic import BaseModel

from forgeasync.algorithms import ConstantLength, DynamicSampling, OverlongPenalty
from forgeasync.config import (
    EvaluationMode,
    EvaluationSet,
    HostCounts,
    HuggingFaceSource,
    LocalLauncher,
    ModelFacts,
    ParallelSection,
    ProcessLauncher,
    PythonReward,
    ReasoningGymSource,
    Rewards,
    RunConfig,
    SourceSection,
    TimeoutSection,
    WeightedSource,
    default_name,
    gpus_per_host,
    longest_response,
    name_of,
    named_sources,
    num_hosts,
    rewards_of,
    shares_gpus,
)
from forgeasync.models import kv_bytes_per_token, largest_group_payload_bytes
from forgeasync.planning.parameters import KV_BLOCK_TOKENS, Machine, changed_config
from forgeasync.planning.tiny_model import small_facts
from forgeasync.schema import ConfigError, Problem

GIB = 2**30
"""Bytes of a GiB."""

# Allowances for the fixed memory of processes: measured with torch 2.13 and vLLM 0.32 on CPUs and a model
# of two layers, plus 10 %.
TRAINER_PROC_BYTES = round(0.7 * GIB)
GENERATOR_PROC_BYTES = round(0.52 * GIB)
"""Memory of a generator's actor; with ``tensor_parallel: 1`` its engine runs in the same process."""
ENGINE_BYTES = round(0.25 * GIB)
ENGINE_WORKER_BYTES = round(0.62 * GIB)
"""Memory of each process of an engine with ``tensor_parallel`` above 1."""
HOST_BYTES = round(0.3 * GIB)
"""Memory of a host that is a process, with its agent."""
SCORER_WORKER_BYTES = round(0.15 * GIB)
OTHER_BYTES = round(1.1 * GIB)
"""Memory of controller, scorer, buffer and environment together."""

SPARE_BYTES = 2 * GIB
"""Memory left for other programs on the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Resources of this machine that a rehearsal may use."""

    memory_bytes: int
    num_gpus: int
    """Number of GPUs; with 0 the rehearsal runs on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Part of a topology to rehearse."""

    parallel: ParallelSection
    num_replicas: int
    num_trainer_hosts: int
    num_generator_hosts: int


def largest_part(config: RunConfig, capacity: Capacity | None) -> Part:
    """Return the largest part of a topology that fits; without ``capacity``, the whole topology.

    The degrees of tensor, context and expert parallelism are kept. Replicas are left out first, down to two;
    then data-parallel groups of the trainer. One replica is used only if two do not fit.

    Raises:
        ConfigError: one engine and the smallest trainer with these degrees do not fit.
    """
    generator = config.generator
    hosts = (1, 1)
    if not isinstance(config.launcher, LocalLauncher):
        counts = num_hosts(config.launcher)
        hosts = (counts.trainer, counts.generators)
    layouts = _layouts(config.trainer.parallel)
    for fewest in (min(2, generator.num_replicas), 1):
        for parallel in layouts:
            for num_replicas in range(generator.num_replicas, fewest - 1, -1):
                part = Part(
                    parallel=parallel,
                    num_replicas=num_replicas,
                    num_trainer_hosts=_most_hosts(hosts[0], parallel.num_procs),
                    num_generator_hosts=_most_hosts(hosts[1], num_replicas),
                )
                if capacity is None or (
                    needed_bytes(config, part, on_gpus=capacity.num_gpus > 0) <= capacity.memory_bytes
                    and (not capacity.num_gpus or _num_gpus(config, part) <= capacity.num_gpus)
                ):
                    return part
    assert capacity is not None
    raise ConfigError([_too_small(config, layouts[-1], capacity)])


def needed_bytes(config: RunConfig, part: Part, *, on_gpus: bool) -> int:
    """Return an estimate of the host memory that a rehearsal needs, including ``SPARE_BYTES``."""
    tensor = config.generator.tensor_parallel
    engine = ENGINE_BYTES if tensor == 1 else tensor * ENGINE_WORKER_BYTES
    processes = part.parallel.num_procs * TRAINER_PROC_BYTES + part.num_replicas * (
        GENERATOR_PROC_BYTES + engine
    )
    if on_gpus:
        # A CUDA context and its libraries need about the same amount again.
        processes *= 2
    num_hosts = part.num_trainer_hosts + part.num_generator_hosts
    hosts = 0 if isinstance(config.launcher, LocalLauncher) else num_hosts * HOST_BYTES
    num_workers = config.scorer.num_replicas * config.scorer.num_workers
    others = OTHER_BYTES + num_workers * SCORER_WORKER_BYTES
    return processes + hosts + others + SPARE_BYTES


def _num_gpus(config: RunConfig, part: Part) -> int:
    of_trainer, of_engines = part.parallel.num_procs, part.num_replicas * config.generator.tensor_parallel
    return max(of_trainer, of_engines) if shares_gpus(config) else of_trainer + of_engines


def _layouts(parallel: ParallelSection) -> list[ParallelSection]:
    """Return all layouts with these degrees and at most as many data-parallel groups, largest first."""
    others = parallel.tensor * parallel.context
    found = [
        parallel.model_copy(
            update={"num_procs": replicate * shard * others, "data_replicate": replicate},
        )
        for replicate in _divisors(parallel.data_replicate)
        for shard in _divisors(parallel.data_shard)
        if shard * others % parallel.expert == 0
    ]
    return sorted(found, key=lambda layout: (layout.num_procs, layout.data_replicate), reverse=True)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _most_hosts(num_hosts: int, num_procs: int) -> int:
    """Return the largest number of hosts, up to ``num_hosts``, that divides ``num_procs`` evenly."""
    return max(count for count in range(1, min(num_hosts, num_procs) + 1) if num_procs % count == 0)


def _too_small(config: RunConfig, parallel: ParallelSection, capacity: Capacity) -> Problem:
    smallest = Part(parallel=parallel, num_replicas=1, num_trainer_hosts=1, num_generator_hosts=1)
    needed = needed_bytes(config, smallest, on_gpus=capacity.num_gpus > 0)
    tensor = config.generator.tensor_parallel
    gpus = f" and {_num_gpus(config, smallest)} GPUs" if capacity.num_gpus else ""
    has_gpus = f" and {capacity.num_gpus} GPUs" if capacity.num_gpus else ""
    return Problem(
        field="--rehearse",
        remedy=f"the smallest rehearsal with these parallel degrees has {parallel.num_procs} trainer "
        f"processes and one engine of {tensor}; it needs {needed / GIB:.3g} GiB of memory{gpus}, this "
        f"machine has {capacity.memory_bytes / GIB:.3g} GiB{has_gpus}. Use a larger machine, or "
        "--rehearse --hosts",
    )


NUM_STEPS = 3

EVERY_STEPS = 2
"""Steps between two evaluations and between two checkpoints."""

RESPONSE_TOKENS = 32

EPISODE_TOKENS = 1024
"""Context length of runs with an environment, which makes its own prompts."""

MAX_SEQUENCES_PER_ROW = 4

NUM_SEQS, BATCHED_TOKENS = 32, 512

SMALLEST_KV_CACHE_GIB = 0.02

SMALLEST_STORE_GIB = 0.02

ANSWER_LIMIT_S = 30.0

DEADLINE_S = 1800.0
"""Minimum of most deadlines, because many processes on few cores are slow."""

HOST_S = 300.0
"""Minimum of ``timeouts.host_s``; after twice that time, hosts of a killed controller end by themselves."""


MADE_UP_SCORE = PythonReward(factory="forgeasync.planning.made_up_score.score", name="made_up")

GENERATED = ReasoningGymSource(
    kind="reasoning_gym",
    task="chain_sum",
    options={"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2},
)
"""Source of the tasks of a rehearsal, in place of a data set that is not on this machine."""

NUM_TRAIN, NUM_EVALUATED = 256, 8

_FEWER = "enough for three steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A config key or model size whose value in the rehearsal differs from the run's."""

    field: str
    before: str
    after: str
    why: str
    untried: str | None = None
    """Part of the run that this change leaves unexercised; None if only sizes differ."""


@dataclass(slots=True)
class Draft:
    """A config that is being changed, with the changes made so far."""

    config: RunConfig
    changes: list[Change] = field(default_factory=list)

    def set(self, key: str, value: object, why: str, untried: str | None = None) -> None:
        """Replace the value at a dotted key and record the change; do nothing if the values are equal."""
        before = attrgetter(key)(self.config)
        if before == value:
            return
        self.put(key, value)
        self.note(key, before, value, why, untried)

    def put(self, key: str, value: object) -> None:
        """Replace the value at a dotted key without recording a change; ``note`` records it."""
        self.config = changed_config(self.config, {key: value})

    def note(self, name: str, before: object, after: object, why: str, untried: str | None = None) -> None:
        """Record a change that was made elsewhere; do nothing if the values are equal."""
        if before != after:
            self.changes.append(
                Change(field=name, before=_shown(before), after=_shown(after), why=why, untried=untried)
            )


def _shown(value: object) -> str:
    if isinstance(value, BaseModel):
        # Launchers and sources have a kind, which is shown instead of the class name.
        return str(value.model_dump(mode="json").get("kind", type(value).__name__))
    if isinstance(value, tuple | list):
        return ", ".join(map(_shown, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where a rehearsal runs, and facts about that place."""

    folder: Path
    """Run folder of the rehearsal."""
    capacity: Capacity | None
    """Resources of this machine; None if the config's launcher places the run and nothing is left out."""
    num_gpus: int
    """Number of GPUs of this machine, used if the run is placed on it."""
    local_paths: frozenset[str]
    """Paths of the data sets that are on this machine."""
    longest_prompt: int
    """Tokens of the longest prompt, with the rehearsal's tokenizer and problems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Config of a rehearsal, with its model's shape and all changes."""

    config: RunConfig
    facts: ModelFacts
    changes: tuple[Change, ...]


def rehearsed(config: RunConfig, facts: ModelFacts, stage: Stage) -> Rehearsal:
    """Return the rehearsal of a checked config.

    Raises:
        ConfigError: the machine is too small for the parallel degrees, or the run has teachers.
    """
    if config.teachers:
        remedy = "must be left out of a rehearsal, with the terms that need them: it has no small teachers"
        raise ConfigError([Problem(field="teachers", value=sorted(config.teachers), remedy=remedy)])
    draft = Draft(config)
    draft.set("run_dir", str(stage.folder), "so that no file of the run is overwritten")
    draft.set("checkpoint.folder", None, "in the rehearsal's own folder", None)
    draft.set("logging.wandb", None, "no run of anybody's project", "Weights & Biases")
    on_gpus = _runs_on_gpus(config, stage)
    _place(draft, stage)
    rehearse_data(draft, stage.local_paths)
    _shorten(draft, stage.longest_prompt)
    _reduce_batch(draft)
    if not on_gpus:
        _replace_what_needs_gpus(draft)
    if stage.capacity is not None:
        _be_patient(draft)
    draft.set("model.path", str(stage.folder / "model"), "random weights", "the model's own weights")
    small = small_facts(
        facts,
        draft.config.trainer.parallel,
        draft.config.generator,
        max_context_length=draft.config.model.max_context_length,
        on_gpus=on_gpus,
    )
    _note_sizes(draft, facts, small)
    _fit_vocabulary(draft, small)
    _scale_memory(draft, config, facts, small)
    return Rehearsal(config=draft.config, facts=small, changes=tuple(draft.changes))


def _runs_on_gpus(config: RunConfig, stage: Stage) -> bool:
    if stage.capacity is None and not isinstance(config.launcher, LocalLauncher):
        return gpus_per_host(config.launcher) > 0
    return stage.num_gpus > 0


def _place(draft: Draft, stage: Stage) -> None:
    part = largest_part(draft.config, stage.capacity)
    _leave_out(draft, part)
    launcher = draft.config.launcher
    if stage.capacity is None or isinstance(launcher, LocalLauncher):
        return
    hosts = HostCounts(trainer=part.num_trainer_hosts, generators=part.num_generator_hosts)
    why = "not on this machine"
    lost = f"the launcher {launcher.kind}, its scheduler and the network between hosts"
    if stage.num_gpus:
        draft.set(
            "launcher", LocalLauncher(), f"{why}; hosts that are processes have no GPUs", f"{lost}; hosts"
        )
        return
    before = num_hosts(launcher)
    if not isinstance(launcher, ProcessLauncher):
        draft.set("launcher", ProcessLauncher(kind="process", hosts=hosts), why, lost)
    for role in ("trainer", "generators"):
        counts = (getattr(before, role), getattr(hosts, role))
        draft.note(f"launcher.hosts.{role}", *counts, "processes spread evenly over hosts", None)
    draft.put("launcher", ProcessLauncher(kind="process", hosts=hosts))


def _leave_out(draft: Draft, part: Part) -> None:
    parallel, why = draft.config.trainer.parallel, "does not fit this machine"
    for name, after, what in (
        ("data_replicate", part.parallel.data_replicate, "replicas of the sharded model"),
        ("num_procs", part.parallel.num_procs, "trainer processes"),
    ):
        before = getattr(parallel, name)
        draft.set(f"trainer.parallel.{name}", after, why, f"{before} {what}, only {after}")
    before = draft.config.generator.num_replicas
    lost = f"{before} generators, only {part.num_replicas}"
    draft.set("generator.num_replicas", part.num_replicas, why, lost)


def _shorten(draft: Draft, longest_prompt: int) -> None:
    config = draft.config
    why = "a tiny model needs no long responses"
    longest = longest_response(config)
    response = min(config.sampling.max_response_tokens, RESPONSE_TOKENS)
    draft.set("sampling.max_response_tokens", response, why, "responses of the run's length")
    sets = []
    for index, one in enumerate(config.evaluation.sets):
        if one.sampling is not None:
            tokens = min(one.sampling.max_response_tokens, RESPONSE_TOKENS)
            field = f"evaluation.sets.{index}.sampling.max_response_tokens"
            draft.note(field, one.sampling.max_response_tokens, tokens, why)
            one = changed_config(one, {"sampling.max_response_tokens": tokens})
        sets.append(one)
    draft.put("evaluation.sets", tuple(sets))
    context = EPISODE_TOKENS if config.environment is not None else longest_prompt + RESPONSE_TOKENS
    # Rounded up to a multiple of 64, to which packed rows are padded.
    context = math.ceil(max(context, longest_prompt + RESPONSE_TOKENS) / 64) * 64
    per_row = min(config.trainer.tokens_per_row // config.model.max_context_length, MAX_SEQUENCES_PER_ROW)
    draft.set("model.max_context_length", context, "the longest prompt, by characters, and a response")
    draft.set("trainer.tokens_per_row", per_row * context, f"rows of {per_row} longest sequences")
    aggregation = config.algorithm.aggregation
    if isinstance(aggregation, ConstantLength):
        # Measured in characters, an episode's context can exceed that of the run in tokens.
        length = max(aggregation.length, longest_response(draft.config))
        draft.set("algorithm.aggregation.length", length, "no response may be longer")
    _shorten_penalties(draft, longest)


def _shorten_penalties(draft: Draft, longest_before: int) -> None:
    longest = longest_response(draft.config)
    filters = []
    for index, one in enumerate(draft.config.algorithm.filters):
        if isinstance(one, OverlongPenalty):
            length = max(1, one.max_length * longest // longest_before)
            short = one.model_copy(update={"max_length": length})
            # After rounding, the penalty could begin at a length that no response reaches.
            while short.max_length - short.buffer >= longest:
                short = short.model_copy(update={"max_length": short.max_length - 1})
            field = f"algorithm.filters.{index}.max_length"
            draft.note(field, one.max_length, short.max_length, "shorter by as much as responses")
            one = short
        filters.append(one)
    draft.put("algorithm.filters", tuple(filters))


def _reduce_batch(draft: Draft) -> None:
    config = draft.config
    algorithm, steps = config.algorithm, config.trainer.steps_per_batch
    parallel = config.trainer.parallel
    ranks = parallel.data_replicate * parallel.data_shard
    # At least two rollouts per data-parallel rank and optimizer step, and a group per generator.
    fewest = max(2, config.generator.num_replicas, math.ceil(2 * ranks * steps / algorithm.group_size))
    before = algorithm.groups_per_step
    groups = min(before, math.ceil(fewest / steps) * steps)
    draft.set(
        "algorithm.groups_per_step",
        groups,
        "a group for each generator, two rollouts for each data-parallel rank",
    )
    scale = groups / before
    if config.buffer.max_groups is not None:
        depth = max(groups, math.floor(config.buffer.max_groups * scale))
        draft.set("buffer.max_groups", depth, "as many batches as before")
    if config.buffer.max_in_flight is not None:
        in_flight = max(1, math.floor(config.buffer.max_in_flight * scale))
        draft.set("buffer.max_in_flight", in_flight, "as many batches as before")
    draft.set("max_steps", min(config.max_steps, NUM_STEPS), "a rehearsal makes three steps")
    # Beside training, no evaluation begins after the last but one step.
    is_beside = config.evaluation.mode is EvaluationMode.BESIDE
    every = min(config.evaluation.every_steps, 1 if is_beside else EVERY_STEPS)
    draft.set("evaluation.every_steps", every, "within three steps")
    if config.checkpoint.every_steps is not None:
        every = min(config.checkpoint.every_steps, EVERY_STEPS)
        draft.set("checkpoint.every_steps", every, "within three steps")


def _replace_what_needs_gpus(draft: Draft) -> None:
    why = "compiling takes minutes in each of several processes"
    for key in ("generator.compile", "trainer.compile"):
        draft.set(key, False, why, f"{key}: true")
    draft.set(
        "generator.expert_parallel",
        False,
        "vLLM's CPU build has no expert parallelism",
        "generator.expert_parallel: true; experts are split within instead",
    )


_SIZES = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim"),
    *("num_experts", "top_k", "expert_hidden_size", "dense_hidden_size"),
)


def _note_sizes(draft: Draft, facts: ModelFacts, small: ModelFacts) -> None:
    why = "as small as kernels and parallel degrees allow"
    for name in _SIZES:
        draft.note(f"model: {name}", getattr(facts, name), getattr(small, name), why)
    untried = "the model's tokenizer and chat template"
    sizes = facts.vocab_size, small.vocab_size
    draft.note("model: vocab_size", *sizes, "a tokenizer of characters", untried)


def _be_patient(draft: Draft) -> None:
    """Raise all deadlines except ``timeouts.sigterm_s``."""
    config = draft.config
    deadlines = {
        name: max(getattr(config.timeouts, name), HOST_S if name == "host_s" else DEADLINE_S)
        for name in TimeoutSection.model_fields
        if name != "sigterm_s"
    }
    draft.put("timeouts", config.timeouts.model_copy(update=deadlines))
    why = "many processes share few cores"
    draft.note("timeouts", "as configured", f"at least {DEADLINE_S:.0f} s", why, "deadlines of the run")
    scorer = config.scorer
    # Even if every answer of a group hits this limit, the group is scored before its deadline.
    longest = DEADLINE_S / 2 / math.ceil(config.algorithm.group_size / scorer.num_workers)
    limit_s = max(scorer.answer_limit_s, min(ANSWER_LIMIT_S, longest))
    draft.set("scorer.answer_limit_s", limit_s, why)


def _fit_vocabulary(draft: Draft, small: ModelFacts) -> None:
    """Fit top-k and top-p to the tiny vocabulary, so that they still cut it but leave at least two tokens."""
    sampling, vocabulary = draft.config.sampling, small.vocab_size
    top_k = min(sampling.top_k, vocabulary // 2)
    draft.set("sampling.top_k", top_k, "half of the tiny vocabulary at the most")
    draft.set("sampling.top_p", max(sampling.top_p, 2 / vocabulary), "two tokens of equal probability")


def _scale_memory(draft: Draft, config: RunConfig, facts: ModelFacts, small: ModelFacts) -> None:
    now = draft.config
    sequences = min(now.generator.max_num_seqs, NUM_SEQS)
    draft.set("generator.max_num_seqs", sequences, "as many as the batch needs")
    batched = min(now.generator.max_num_batched_tokens, BATCHED_TOKENS)
    draft.set("generator.max_num_batched_tokens", batched, "prompts are short")
    # A sequence occupies whole blocks.
    block = KV_BLOCK_TOKENS[Machine.CPU]
    tokens = math.ceil(now.model.max_context_length / block) * block
    cache = 2 * sequences * tokens * kv_bytes_per_token(now, small) / GIB
    draft.set("generator.kv_cache_gib", max(cache, SMALLEST_KV_CACHE_GIB), "twice what max_num_seqs need")
    of_run = config.algorithm.groups_per_step * largest_group_payload_bytes(config, facts)
    here = now.algorithm.groups_per_step * largest_group_payload_bytes(draft.config, small)
    capacity = max(config.payload.capacity_gib * GIB / of_run, 2.0) * here / GIB
    draft.set("payload.capacity_gib", max(capacity, SMALLEST_STORE_GIB), "as many batches as before, or more")


def rehearse_data(draft: Draft, local_paths: frozenset[str]) -> None:
    """Change data, rewards and evaluation; ``local_paths`` are the paths of data sets on this machine."""
    data = draft.config.data
    draft.set("data.num_train", min(data.num_train, NUM_TRAIN), _FEWER)
    draft.set("data.num_held_out", min(data.num_held_out, NUM_EVALUATED), _FEWER)
    num_problems = min(draft.config.evaluation.num_problems, NUM_EVALUATED)
    draft.set("evaluation.num_problems", num_problems, _FEWER)
    if data.source is not None:
        update: dict[str, object] = {
            "source": _at_hand(draft, "data.source", data.source, local_paths),
            "reward": _differing(draft, "data.reward", data.reward, data.source),
        }
    else:
        sources = enumerate(data.sources or ())
        update = {"sources": tuple(_weighted(draft, index, one, local_paths) for index, one in sources)}
    sets = tuple(
        _evaluation_set(draft, f"evaluation.sets.{index}", one, local_paths)
        for index, one in enumerate(draft.config.evaluation.sets)
    )
    draft.put("data", draft.config.data.model_copy(update=update))
    draft.put("evaluation.sets", sets)
    _drop_filters(draft)


def _weighted(draft: Draft, index: int, one: WeightedSource, local_paths: frozenset[str]) -> WeightedSource:
    field = f"data.sources.{index}"
    configured = draft.config.data.reward if one.reward is None else one.reward
    update = {
        "source": _at_hand(draft, f"{field}.source", one.source, local_paths),
        # Keep the original source's name: two generated sources would have the same default name.
        "name": one.name or default_name(one.source),
        "reward": _differing(draft, f"{field}.reward", configured, one.source),
        "num_train": None if one.num_train is None else min(one.num_train, NUM_TRAIN),
        "num_held_out": None if one.num_held_out is None else min(one.num_held_out, NUM_EVALUATED),
    }
    return one.model_copy(update=update)


def _evaluation_set(
    draft: Draft, field: str, one: EvaluationSet, local_paths: frozenset[str]
) -> EvaluationSet:
    source = _at_hand(draft, f"{field}.source", one.source, local_paths)
    num_problems = min(one.num_problems, NUM_EVALUATED)
    draft.note(f"{field}.num_problems", one.num_problems, num_problems, _FEWER)
    # The default reward of a generated source differs from that of the data set.
    keep = source == one.source or draft.config.environment is not None
    reward = one.reward if keep else rewards_of(one.reward, one.source)
    if reward is not None and reward != one.reward:
        names = " + ".join(map(name_of, rewards_of(reward, one.source)))
        draft.note(f"{field}.reward", "that of the data set", names, "generated problems have another one")
    return one.model_copy(update={"source": source, "num_problems": num_problems, "reward": reward})


def _at_hand(draft: Draft, field: str, source: SourceSection, local_paths: frozenset[str]) -> SourceSection:
    """Return the source, or a generated one instead of a data set on the Hugging Face hub."""
    if not isinstance(source, HuggingFaceSource) or source.path in local_paths:
        return source
    draft.note(
        field,
        source.path,
        GENERATED.task,
        "data sets of the hub are not downloaded for a rehearsal",
        f"the data set {source.path} and its fields",
    )
    return GENERATED


def _differing(draft: Draft, field: str, configured: Rewards | None, source: SourceSection) -> Rewards | None:
    """Return rewards that differ between responses of a random model; the user's own code is kept."""
    rewards = rewards_of(configured, source)
    if draft.config.environment is not None or _has_own_code(rewards):
        return configured
    draft.note(
        field,
        " + ".join(map(name_of, rewards)),
        " + ".join(map(name_of, (*rewards, MADE_UP_SCORE))),
        "a random model is always wrong, and equal rewards give no gradient",
        "whether rewards rise",
    )
    return (*rewards, MADE_UP_SCORE)


def _has_own_code(rewards: tuple[object, ...]) -> bool:
    return any(isinstance(reward, PythonReward) and reward != MADE_UP_SCORE for reward in rewards)


def scores_are_own(config: RunConfig) -> bool:
    """Return whether some training responses are scored by the user's own code without a made-up score."""
    return config.environment is not None or any(
        _has_own_code(source.rewards) for source in named_sources(config.data)
    )


def _drop_filters(draft: Draft) -> None:
    """Remove filters that could drop every group of a random model and leave the run without a batch."""
    filters = draft.config.algorithm.filters
    if not scores_are_own(draft.config):
        return
    draft.set(
        "algorithm.filters",
        tuple(one for one in filters if not isinstance(one, DynamicSampling)),
        "own scores of a random model's responses may all be equal",
        "the filter dynamic_sampling",
    )
