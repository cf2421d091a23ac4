"""Builds the report of a dry run: one table about a run, without starting anything or needing a GPU.

The memory plan of each role is compared with a GPU's memory. For a trainer that does not fit, a layout that
fits is proposed. For a generator, the report shows which ``weights.shadow`` fits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from pathlib import Path

from rich.table import Table

from forgeasync.config import (
    ROW_ALIGNMENT,
    ActivationCheckpointing,
    Colocated,
    HostNames,
    InstalledEnvironment,
    LocalLauncher,
    McpEnvironment,
    ModelFacts,
    PythonTool,
    RunConfig,
    SandboxLimits,
    ShadowMemory,
    SshLauncher,
    StdioServer,
    environment_name,
    gpus_per_host,
    num_gpus_needed,
    num_hosts,
    resolve,
    reward_gpus,
    shares_gpus,
    sleeps,
)
from forgeasync.models import SHIPPED_MODELS, check_config, kv_bytes_per_token, recurrent_state_bytes
from forgeasync.planning.memory import (
    Row,
    generator_memory,
    gib,
    memory_plan,
    memory_rows,
    plan_table,
    planned_machine,
    room_for_kv_cache,
    shared_gpu_bytes,
)
from forgeasync.planning.parameters import (
    Machine,
    ParameterCounts,
    active_parameters,
    changed_config,
    count_parameters,
    generator_parameters_per_rank,
    longest_prompt,
    total_bytes,
    trainer_parameters_per_rank,
)
from forgeasync.planning.trainer_memory import trainer_memory
from forgeasync.planning.weight_times import weight_times
from forgeasync.rollouts import Prefixes, num_row_tokens, plan_rows

GPUS_OF_HOST = 8
"""Assumed GPUs per host, for a config that names no hosts and needs more than one."""


def dry_run_report(
    config: RunConfig,
    facts: ModelFacts,
    *,
    shape_from: Path | None = None,
    looked_at: str | None = None,
    gpu_bytes: int | None = None,
) -> Table:
    """Return the plan of a checked config: processes, mesh, parameters, memory, tokens per step, times.

    Args:
        config: The checked config.
        facts: Shape of the model.
        shape_from: The config.json that ``facts`` were read from.
        looked_at: Message about the data that were checked, from ``environments.preview_data``.
        gpu_bytes: Memory of a GPU; default ``GPU_GIB``.
    """
    config = resolve(config, facts)
    is_assumed = _needs_hosts(config)
    if is_assumed:
        config = _on_hosts(config)
    counts = count_parameters(facts)
    return plan_table(
        f"plan of {config.name}",
        _processes(config, are_hosts_assumed=is_assumed),
        _mesh(config),
        _parameters(config, facts, counts, shape_from),
        *(memory_rows(section) for section in memory_plan(config, facts)),
        fit_rows(config, facts, gpu_bytes=gpu_bytes or round(GPU_GIB * 2**30)),
        _data(config, looked_at),
        _steps(config, facts),
        _staleness(config),
        _weight_times(config, facts),
    )


def _needs_hosts(config: RunConfig) -> bool:
    """Return whether a config without a launcher section needs more than ``GPUS_OF_HOST`` GPUs."""
    is_local = isinstance(config.launcher, LocalLauncher)
    return is_local and planned_machine(config) is Machine.GPU and num_gpus_needed(config) > GPUS_OF_HOST


def _on_hosts(config: RunConfig) -> RunConfig:
    """Return the config on the fewest hosts of ``GPUS_OF_HOST`` GPUs that divide each role evenly."""
    generator = config.generator
    num_trainer = _num_hosts(config.trainer.parallel.num_procs, 1)
    num_generators = _num_hosts(generator.num_replicas, generator.tensor_parallel)
    hosts = HostNames(
        trainer=tuple(f"trainer-{number}" for number in range(num_trainer)),
        generators=tuple(f"generators-{number}" for number in range(num_generators)),
    )
    launcher = SshLauncher(kind="ssh", hosts=hosts, gpus_per_host=GPUS_OF_HOST)
    return config.model_copy(update={"launcher": launcher})


def _num_hosts(num_parts: int, gpus_of_part: int) -> int:
    """Return the smallest number of hosts that divides the parts evenly and has enough GPUs."""
    for number in range(1, num_parts):
        if num_parts % number == 0 and num_parts // number * gpus_of_part <= GPUS_OF_HOST:
            return number
    return num_parts


def _processes(config: RunConfig, *, are_hosts_assumed: bool) -> list[Row]:
    generator = config.generator
    num_trainer, num_all = config.trainer.parallel.num_procs, num_gpus_needed(config)
    split = f"num_replicas {generator.num_replicas} x tensor_parallel {generator.tensor_parallel}"
    if generator.expert_parallel:
        split += ", experts split over them"
    num_generators = generator.num_replicas * generator.tensor_parallel
    return [
        ("GPUs, all", str(num_all), "on a machine without GPUs: CPU processes"),
        ("GPUs, trainer", str(num_trainer), f"{num_trainer} processes of 1"),
        ("GPUs, generators", str(num_generators), split),
        *_teachers(config),
        *_rewards(config),
        *_cpu_procs(config),
        *_hosts(config, are_assumed=are_hosts_assumed),
    ]


def _teachers(config: RunConfig) -> list[Row]:
    rows = []
    for name, teacher in config.teachers.items():
        if teacher.endpoint is not None:
            rows.append((f"GPUs, teacher {name}", "0", f"a server: {teacher.endpoint.base_url}"))
            continue
        tensor = teacher.engine.tensor_parallel
        model = teacher.model_path or "the policy itself"
        split = f"num_replicas {teacher.engine.num_replicas} x tensor_parallel {tensor}; {model}"
        rows.append((f"GPUs, teacher {name}", str(teacher.num_engines * tensor), split))
    return rows


def _rewards(config: RunConfig) -> list[Row]:
    gpus = sorted(reward_gpus(config))
    if not gpus:
        return []
    numbers = ", ".join(map(str, gpus))
    return [("GPUs, rewards", str(len(gpus)), f"process reward models, beside all others: GPU {numbers}")]


def _cpu_procs(config: RunConfig) -> list[Row]:
    """Return rows about processes without GPUs, and about an environment's concurrent episodes."""
    shared = "controller, scorer, buffer"
    environment, episodes = config.environment, config.episodes
    if environment is None:
        return [("CPU processes", "3", shared)]
    workers = episodes.num_workers
    rows = [
        ("CPU processes", str(3 + workers), f"{shared}, {workers} environment workers"),
        (
            "live episodes",
            f"<= {workers * episodes.max_live_per_worker:,}",
            f"{environment_name(environment)}; {workers} workers x episodes.max_live_per_worker",
        ),
    ]
    match environment:
        case McpEnvironment():
            num_started = sum(isinstance(one, StdioServer) for one in environment.servers.values())
            num_reached = len(environment.servers) - num_started
            what = f"for every live episode; started {num_started}, reached over HTTP {num_reached}"
            rows.append(("MCP servers", str(len(environment.servers)), what))
        case PythonTool() | InstalledEnvironment(runs_code=True):
            what = f"for every live episode; sandbox.kind {config.sandbox.kind}"
            if isinstance(config.sandbox, SandboxLimits):
                what += f", up to {config.sandbox.memory_mib:,} MiB of memory each"
            rows.append(("sandboxes", "1", what))
    return rows


def _hosts(config: RunConfig, *, are_assumed: bool) -> list[Row]:
    launcher = config.launcher
    if isinstance(launcher, LocalLauncher):
        return []
    counts, tensor = num_hosts(launcher), config.generator.tensor_parallel
    processes = config.trainer.parallel.num_procs // counts.trainer
    replicas = config.generator.num_replicas // counts.generators
    gpus = f", of {gpus_per_host(launcher)} GPUs" if gpus_per_host(launcher) else ""
    kind = "assumed" if are_assumed else launcher.kind
    rows = [
        ("hosts, trainer", str(counts.trainer), f"{kind}{gpus}; {processes} processes each"),
        ("hosts, generators", str(counts.generators), f"{kind}{gpus}; {replicas} replicas of {tensor} each"),
    ]
    if are_assumed:
        how = "name yours: --config configs/launchers/ssh.yaml, slurm.yaml or kubernetes.yaml"
        rows.append(("hosts, all", str(counts.trainer + counts.generators), how))
    return rows


def _mesh(config: RunConfig) -> list[Row]:
    parallel = config.trainer.parallel
    sizes = (parallel.data_replicate, parallel.data_shard, parallel.context, parallel.tensor)
    what = f"dp_replicate x dp_shard x cp x tp; ep {parallel.expert}"
    if parallel.expert > 1:
        num_shards = parallel.data_shard * parallel.context * parallel.tensor // parallel.expert
        what += f", each expert then sharded over {num_shards}"
    return [("trainer mesh", " x ".join(map(str, sizes)), what)]


def _parameters(
    config: RunConfig, facts: ModelFacts, counts: ParameterCounts, shape_from: Path | None
) -> list[Row]:
    origin = "" if shape_from is None else f"shape from {_shown_path(shape_from)}"
    per_trainer = trainer_parameters_per_rank(config, counts)
    per_generator = generator_parameters_per_rank(config, facts, counts)
    in_experts = f"top {facts.top_k} of {facts.num_experts} experts" if facts.num_experts else "a dense model"
    return [
        ("model", config.model.path, origin),
        ("parameters", f"{counts.total:,}", f"{_billions(counts.experts)} of them in experts"),
        ("active per token", f"{active_parameters(facts, counts):,}", in_experts),
        ("per trainer rank", f"{per_trainer:,}", "its shard"),
        ("per generator rank", f"{per_generator:,}", "its tensor-parallel part"),
    ]


def _data(config: RunConfig, looked_at: str | None) -> list[Row]:
    return [
        ("training problems", f"{config.data.num_train:,}", looked_at or ""),
        ("held-out problems", f"{config.data.num_held_out:,}", "lengths of prompts are checked at the start"),
    ]


def _steps(config: RunConfig, facts: ModelFacts) -> list[Row]:
    algorithm, parallel = config.algorithm, config.trainer.parallel
    context, row_length = config.model.max_context_length, config.trainer.tokens_per_row
    rollouts = algorithm.group_size * algorithm.groups_per_step
    ranks = parallel.data_replicate * parallel.data_shard
    lengths, prefixes = [context] * rollouts, None
    if config.trainer.shares_prefixes:
        prefixes = [[(index // algorithm.group_size, longest_prompt(config))] for index in range(rollouts)]
    plan = plan_rows(lengths, tokens_per_row=row_length, num_ranks=ranks, prefixes=prefixes)
    rows = [row for microbatch in plan for row in microbatch if row]
    # States of running sequences take their part of the cache first.
    states = config.generator.max_num_seqs * recurrent_state_bytes(config, facts)
    keys = max(0, int(config.generator.kv_cache_gib * 2**30) - states)
    held = keys // kv_bytes_per_token(config, facts)
    groups = f"{algorithm.groups_per_step} groups of {algorithm.group_size}"
    optimizer = config.trainer.optimizer
    reached = f"from step {max(1, optimizer.warmup_steps):,} on, of {config.max_steps:,}"
    if optimizer.warmup_steps > config.max_steps:
        reached = (
            f"never reached: of {optimizer.warmup_steps:,} warm-up steps the run makes {config.max_steps:,}"
        )
    elif optimizer.decay_steps is not None:
        reached += "; falls to 0 from step {:,} to {:,}".format(*optimizer.decay_steps)
    return [
        ("learning rate", f"{optimizer.learning_rate:g}", reached),
        ("rollouts per step", f"{rollouts:,}", groups),
        ("tokens per step", f"<= {rollouts * context:,}", f"if every one has {context:,} tokens"),
        *([] if prefixes is None else [_computed(rows, lengths, prefixes)]),
        ("rows per step", f"<= {len(rows):,}", f"of {row_length:,} tokens; {len(plan)} a data-parallel rank"),
        (
            "KV cache holds",
            f"{held:,}",
            f"tokens an engine: {held // context:,} sequences of {context:,} (max_num_seqs is "
            f"{config.generator.max_num_seqs})"
            + f", beside {states / 2**30:.3g} GiB of states"
            * (states > 0),
        ),
    ]


def _computed(rows: Sequence[Sequence[int]], lengths: Sequence[int], prefixes: Sequence[Prefixes]) -> Row:
    num = sum(num_row_tokens(row, lengths, prefixes) for row in rows)
    ((_, prompt),), share = prefixes[0], num / sum(lengths)
    how = f"a row has a prompt of {prompt:,} tokens once" if prompt else "prompts of episodes may be short"
    return ("computed tokens", f"<= {num:,}", f"{share:.1%} of these: {how} (trainer.share_prefixes)")


def _staleness(config: RunConfig) -> list[Row]:
    bound, per_step = config.max_off_policy_steps, config.algorithm.groups_per_step
    what = f"(max_off_policy_steps {bound} + 1) x {per_step}: sampled, waiting or in training"
    return [("groups outstanding", f"<= {(bound + 1) * per_step:,}", what)]


def _weight_times(config: RunConfig, facts: ModelFacts) -> list[Row]:
    if planned_machine(config) is Machine.CPU:
        return []
    return [
        (f"weights, {term.name}", f"{term.seconds:.3g} s", term.how) for term in weight_times(config, facts)
    ]


def _shown_path(path: Path) -> str:
    """Return a shipped shape's path relative to the repository, and any other path unchanged."""
    if path.is_relative_to(SHIPPED_MODELS):
        return str(Path("configs/models") / path.relative_to(SHIPPED_MODELS))
    return str(path)


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 10**9 else f"{count / 1e6:.2f} million"


GPU_GIB = 79.0
"""Assumed GPU memory in GiB on a machine without GPUs: the memory that an 80 GB H100 reports."""

USABLE_SHARE = 0.9
"""Share of a GPU's memory that a plan may use. The rest is for fragmentation of the allocator, buffers of
NCCL, the CUDA context and experts with uneven loads."""


Changes = Mapping[str, object]
"""Values of keys of a config, by dotted key."""

_LAYOUT = ("trainer.parallel.context", "trainer.activation_checkpointing", "trainer.tokens_per_row")
"""Keys of the trainer that a proposal may change without changing the number of GPUs."""


def overrides(config: RunConfig, changes: Changes) -> str:
    """Return the command-line overrides that make the changes to a config."""
    texts = ((key, str(new).lower()) for key, new in changes.items() if new != attrgetter(key)(config))
    return " ".join(f"{key}={text}" for key, text in texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Comparison of a trainer rank's memory with a GPU's, in bytes."""

    planned: int
    usable: int
    proposal: Changes | None
    """Layout that fits; None if the config's own layout fits or no layout does."""
    smallest: int
    """Bytes of a rank with ``proposal`` or, without one, with the smallest layout tried."""

    @property
    def fits(self) -> bool:
        return self.planned <= self.usable


def fit_trainer(config: RunConfig, facts: ModelFacts, *, gpu_bytes: int) -> Fit:
    """Compare a trainer rank of a checked config with a GPU; if it does not fit, look for a layout that does.

    The candidates are all legal layouts with more activation checkpointing, rows as short as
    ``model.max_context_length`` allows, and a higher context-parallel degree. They are tried in order of
    cost: lower context degrees first (context-parallel ranks share a row unevenly and gather keys and
    values), then less recomputation, then longer rows.
    """
    counts = count_parameters(facts)
    usable = int(gpu_bytes * USABLE_SHARE)
    planned = smallest = _rank_bytes(config, facts, counts)
    if planned <= usable:
        return Fit(planned=planned, usable=usable, proposal=None, smallest=planned)
    for layout in _layouts(config):
        changed = changed_config(config, layout)
        if check_config(changed, facts):
            continue
        needed = _rank_bytes(changed, facts, counts)
        smallest = min(smallest, needed)
        if needed <= usable:
            return Fit(planned=planned, usable=usable, proposal=layout, smallest=needed)
    return Fit(planned=planned, usable=usable, proposal=None, smallest=smallest)


def _layouts(config: RunConfig) -> Iterator[dict[str, object]]:
    """Yield layouts that may need less memory, in order of cost; some may be illegal."""
    own, choices = config.trainer, list(ActivationCheckpointing)
    shortest = -(-config.model.max_context_length // ROW_ALIGNMENT) * ROW_ALIGNMENT
    contexts = []
    degree = own.parallel.context
    while degree <= own.parallel.num_procs:
        contexts.append(degree)
        degree *= 2
    rows = dict.fromkeys((own.tokens_per_row, min(own.tokens_per_row, shortest)))
    for layout in product(contexts, choices[choices.index(own.activation_checkpointing) :], rows):
        yield dict(zip(_LAYOUT, layout, strict=True))


def _rank_bytes(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> int:
    return trainer_memory(resolve(config, facts), facts, counts, Machine.GPU).total_bytes


def fit_rows(config: RunConfig, facts: ModelFacts, *, gpu_bytes: int) -> list[tuple[str, str, str]]:
    """Return the rows of the dry run's table about GPU memory; empty for a config that trains on CPUs."""
    if planned_machine(config) is Machine.CPU:
        return []
    fit = fit_trainer(config, facts, gpu_bytes=gpu_bytes)
    limit = f"{gib(fit.usable)}, {USABLE_SHARE:.0%} of a GPU with {gpu_bytes / 2**30:g} GiB"
    rows = [_fit_row("trainer rank: fits", fit.planned, fit.usable, limit)]
    if not fit.fits and fit.proposal is None:
        found = (
            f"none with {config.trainer.parallel.num_procs} processes; the smallest takes {gib(fit.smallest)}"
        )
        rows.append(("trainer layout that fits", "none", found))
    elif fit.proposal is not None:
        rows.append(("trainer layout that fits", gib(fit.smallest), overrides(config, fit.proposal)))
    if shares_gpus(config):
        both = shared_gpu_bytes(resolve(config, facts), facts)
        rows.append(_fit_row("both roles on one GPU: fit", both, fit.usable, limit))
        if both > fit.usable:
            changes = _shared_changes(config, facts, fit.usable)
            found = "none" if changes is None else "these"
            rows.append(("overrides with which both fit", found, overrides(config, changes or {})))
        return rows
    # Adapters have no shadow weights.
    shadows = list(ShadowMemory) if config.lora is None else [config.weights.shadow]
    for shadow in shadows:
        name = f"generator rank: fits, shadow: {shadow}" if len(shadows) > 1 else "generator rank: fits"
        rows.append(_fit_row(name, _generator_bytes(config, facts, shadow), fit.usable, limit))
    return rows


def _shared_changes(config: RunConfig, facts: ModelFacts, usable: int) -> Changes | None:
    """Return changes with which trainer and engine fit on one GPU, cheapest first; None if none do.

    The KV cache shrinks to a quarter at most, and not below one sequence of full length.
    """
    cache_gib = config.generator.kv_cache_gib
    one_sequence = config.model.max_context_length * kv_bytes_per_token(config, facts) / 2**30
    offloads = sorted({config.trainer.cpu_offload, True})
    for sleep, offload, layout in product(sorted({sleeps(config), True}), offloads, _layouts(config)):
        changes = dict(layout)
        if sleep:
            changes["generator.colocated"] = Colocated.SLEEP
            changes["max_off_policy_steps"] = min(1, config.max_off_policy_steps)
        changes["trainer.cpu_offload"] = offload
        changed = changed_config(config, changes)
        if check_config(changed, facts):
            continue
        room_gib = room_for_kv_cache(resolve(changed, facts), facts, usable=usable) / 2**30
        kept_gib = min(cache_gib, int(10 * room_gib) / 10)
        if kept_gib >= max(one_sequence, cache_gib / 4):
            return changes | {"generator.kv_cache_gib": kept_gib}
    return None


def generator_fits(config: RunConfig, facts: ModelFacts, *, gpu_bytes: int) -> bool:
    """Return whether a rank of a generator fits on a GPU, with the config's ``weights.shadow``."""
    return _generator_bytes(config, facts, config.weights.shadow) <= int(gpu_bytes * USABLE_SHARE)


def _fit_row(name: str, planned: int, usable: int, limit: str) -> tuple[str, str, str]:
    if planned <= usable:
        return name, "yes", f"{gib(planned)} are at most {limit}"
    return name, "no", f"{gib(planned)} are more than {limit}"


def _generator_bytes(config: RunConfig, facts: ModelFacts, shadow: ShadowMemory) -> int:
    changed = changed_config(config, {"weights.shadow": shadow})
    return total_bytes(generator_memory(changed, facts, count_parameters(facts), Machine.GPU))
