"""Computes the memory of each rank of a run from its config and its model's config.json alone.

Every number is a formula over config and facts, in bytes;
tests/planning/test_memory_plan.py compares the numbers with the memory that runs allocate.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from forgeasync.checkpoints import bytes_per_parameter, num_trained, state_bytes
from forgeasync.config import (
    PATCH_SHARE,
    Delta,
    Dtype,
    LocalLauncher,
    ModelFacts,
    ProcessLauncher,
    RunConfig,
    ShadowMemory,
    longest_response,
    num_averages,
    num_hosts,
    shares_gpus,
    sleeps,
)
from forgeasync.models import (
    BYTES_PER_ELEMENT,
    kept_bytes_per_token,
    num_adapter_parameters,
    published_dtype,
    read_model_facts,
    routing_bytes_per_token,
    sampled_mark_bytes_per_token,
    teacher_bytes_per_token,
    version_bytes,
)
from forgeasync.planning.parameters import (
    FLOAT32_BYTES,
    Machine,
    MemoryItem,
    ParameterCounts,
    count_parameters,
    generator_parameters_per_rank,
    merged_bytes,
    total_bytes,
    trained_parameters_per_rank,
)
from forgeasync.planning.trainer_memory import TrainerMemory, trainer_memory
from forgeasync.schema import ConfigError, Problem

NOTE = (
    "Memory is within 10 % as measured on CPUs, in float32. Not so exact: rows with fewer than "
    "tokens_per_row tokens, experts with uneven loads, compiled layers and adapters take less or more; the "
    "engine's forward pass is a bound, the payload store is at its fullest. The allocator's fragmentation, "
    "buffers of NCCL, CUDA graphs and the libraries of each process come on top."
)

SHARED_CONTEXTS_BYTES = 2 * 2**30
"""Memory of a GPU for the CUDA contexts and graphs of a trainer process and an engine (assumed)."""

Row = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySection:
    """Memory of one rank of a role, or of a host."""

    owner: str
    items: Sequence[MemoryItem]
    total: MemoryItem | None
    """Total of the items; None if they are in different places."""


def planned_machine(config: RunConfig) -> Machine:
    """Return the device that a config is planned for: CPUs if it trains in float32, otherwise GPUs."""
    return Machine.CPU if config.trainer.dtype is Dtype.FLOAT32 else Machine.GPU


def memory_plan(config: RunConfig, facts: ModelFacts) -> tuple[MemorySection, ...]:
    """Return the sections of the memory plan; ``config`` must have been checked with ``facts``.

    Raises:
        ConfigError: a teacher's folder has no readable config.json.
    """
    machine = planned_machine(config)
    counts = count_parameters(facts)
    trainer = trainer_memory(config, facts, counts, machine)
    generator = generator_memory(config, facts, counts, machine)
    fullest = MemoryItem(
        name="total",
        num_bytes=trainer.total_bytes,
        how=f"of a {machine.value}, in the {trainer.fullest.name}: not all of the above is there at once",
    )
    return (
        MemorySection(owner="trainer rank", items=(*trainer.always, *trainer.come_and_go), total=fullest),
        MemorySection(owner="generator rank", items=generator, total=_whole(generator, machine)),
        *([_shared(config, trainer, generator, machine)] if shares_gpus(config) else []),
        *(
            MemorySection(owner=f"rank of teacher {name}", items=items, total=_whole(items, machine))
            for name, items in teacher_memory(config, machine)
        ),
        MemorySection(owner="host", items=host_memory(config, facts, machine), total=None),
    )


def _shared(
    config: RunConfig, trainer: TrainerMemory, generator: Sequence[MemoryItem], machine: Machine
) -> MemorySection:
    """Return the section of a GPU with a rank of both roles."""
    engine_bytes = total_bytes(generator)
    items = [
        MemoryItem(name="trainer rank", num_bytes=trainer.total_bytes, how="its total"),
        MemoryItem(name="generator rank", num_bytes=engine_bytes, how="its total"),
    ]
    if machine is Machine.CPU:
        return MemorySection(owner="shared GPU", items=items, total=_whole(items, machine))
    how = "CUDA contexts and graphs of two processes (assumed)"
    items.append(MemoryItem(name="contexts", num_bytes=SHARED_CONTEXTS_BYTES, how=how))
    total = trainer.total_bytes + _beside_trainer(config, trainer, engine_bytes)
    how = "of a GPU" + ": the generator's are off it during a step (generator.colocated: sleep)" * sleeps(
        config
    )
    whole = MemoryItem(name="total", num_bytes=total, how=how)
    return MemorySection(owner="shared GPU", items=items, total=whole)


def _beside_trainer(config: RunConfig, trainer: TrainerMemory, engine_bytes: int) -> int:
    """Return what a shared GPU needs besides the trainer's peak.

    An engine that sleeps takes the memory that a step has taken temporarily.
    """
    return max(0, engine_bytes - _freed_by_step(config, trainer)) + SHARED_CONTEXTS_BYTES


def _freed_by_step(config: RunConfig, trainer: TrainerMemory) -> int:
    """Return the memory of a step that an engine takes between steps."""
    return math.ceil(trainer.fullest.total) if sleeps(config) else 0


def trainer_gpu_share(config: RunConfig, facts: ModelFacts) -> float | None:
    """Return the share of a GPU's memory that is for the trainer's tensors; None if no GPU is shared."""
    if not shares_gpus(config):
        return None
    trainer = trainer_memory(config, facts, count_parameters(facts), Machine.GPU).total_bytes
    return trainer / shared_gpu_bytes(config, facts)


def shared_gpu_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the memory of a GPU with a rank of both roles."""
    counts = count_parameters(facts)
    trainer = trainer_memory(config, facts, counts, Machine.GPU)
    engine_bytes = total_bytes(generator_memory(config, facts, counts, Machine.GPU))
    return trainer.total_bytes + _beside_trainer(config, trainer, engine_bytes)


def room_for_kv_cache(config: RunConfig, facts: ModelFacts, *, usable: int) -> int:
    """Return the bytes of a KV cache with which both roles take ``usable`` bytes of a GPU.

    Negative if they do not fit without one.
    """
    counts = count_parameters(facts)
    trainer = trainer_memory(config, facts, counts, Machine.GPU)
    beside = usable - trainer.total_bytes - SHARED_CONTEXTS_BYTES
    if beside < 0:
        return beside
    engine_bytes = total_bytes(generator_memory(config, facts, counts, Machine.GPU))
    without_cache = engine_bytes - round(config.generator.kv_cache_gib * 2**30)
    return beside + _freed_by_step(config, trainer) - without_cache


def _whole(items: Sequence[MemoryItem], machine: Machine) -> MemoryItem:
    return MemoryItem(name="total", num_bytes=total_bytes(items), how=f"of a {machine.value}")


def memory_rows(section: MemorySection) -> list[Row]:
    """Return a row of name, size and explanation for each item, then for the total."""
    items = [*section.items, *([] if section.total is None else [section.total])]
    return [(f"{section.owner}: {item.name}", gib(item.num_bytes), item.how) for item in items]


def plan_table(title: str, *sections: Sequence[Row]) -> Table:
    """Return a table of sections of rows."""
    table = Table(title=title, title_justify="left", caption=NOTE, caption_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("what that is")
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"


def generator_memory(
    config: RunConfig,
    facts: ModelFacts,
    counts: ParameterCounts,
    machine: Machine,
    *,
    section: str = "generator",
) -> list[MemoryItem]:
    """Return the items of one rank of an engine that receives new weights; see ``engine_memory``."""
    return [
        *engine_memory(config, facts, counts, section=section),
        *_update_memory(config, facts, counts, machine),
    ]


def engine_memory(
    config: RunConfig, facts: ModelFacts, counts: ParameterCounts, *, section: str
) -> list[MemoryItem]:
    """Return the items of one engine rank: the forward pass is an upper bound, the others are exact.

    ``config.generator`` describes the engine; ``section`` is the path of its section in the user's config.
    """
    generator = config.generator
    return [
        MemoryItem(
            name="weights",
            num_bytes=_weights(config, facts, counts),
            how=generator.dtype.value,
        ),
        MemoryItem(
            name="KV cache", num_bytes=round(generator.kv_cache_gib * 2**30), how=f"{section}.kv_cache_gib"
        ),
        MemoryItem(
            name="forward pass",
            num_bytes=_forward_pass(config, facts),
            how=f"{generator.max_num_batched_tokens:,} tokens, {generator.max_num_seqs} sequences' logits",
        ),
    ]


def _weights(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> int:
    return generator_parameters_per_rank(config, facts, counts) * BYTES_PER_ELEMENT[config.generator.dtype]


def _update_memory(
    config: RunConfig, facts: ModelFacts, counts: ParameterCounts, machine: Machine
) -> list[MemoryItem]:
    """Return the memory that a rank needs for the next version, in addition to the one in use."""
    generator = config.generator
    merged = merged_bytes(config, facts, machine)
    if config.lora is not None and not merged:
        adapters = num_adapter_parameters(facts, config.lora) * BYTES_PER_ELEMENT[generator.dtype]
        adapters //= generator.tensor_parallel
        return [MemoryItem(name="adapters", num_bytes=adapters, how="served beside the base model")]
    if machine is Machine.CPU:
        changed = merged // generator.tensor_parallel or _weights(config, facts, counts)
        shadows = changed + _largest_packed_parameter(config, facts)
        how = "the next version, and its largest experts before packing"
        return [MemoryItem(name="shadow weights", num_bytes=shadows, how=how)]
    if config.lora is None and config.weights.shadow is ShadowMemory.DEVICE:
        weights = _weights(config, facts, counts)
        return [MemoryItem(name="shadow weights", num_bytes=weights, how="weights.shadow: device")]
    return []


def _forward_pass(config: RunConfig, facts: ModelFacts) -> int:
    """Return an upper bound of a forward pass: the activations of one layer, and the logits of sampling.

    Without a backward pass only one layer's activations exist at a time. Sampling uses float32 logits of one
    token per sequence; top-k and top-p sort them, which needs a second copy.
    """
    generator = config.generator
    tensor = generator.tensor_parallel
    experts = facts.top_k * (facts.hidden_size + 3 * facts.expert_hidden_size // tensor)
    experts += 3 * facts.shared_hidden_size // tensor
    network = max(experts, 3 * facts.dense_hidden_size // tensor)
    element = BYTES_PER_ELEMENT[generator.dtype]
    forward = generator.max_num_batched_tokens * (4 * facts.hidden_size + network) * element
    return forward + 2 * generator.max_num_seqs * facts.vocab_size * FLOAT32_BYTES


def _largest_packed_parameter(config: RunConfig, facts: ModelFacts) -> int:
    """Return the bytes of vLLM's largest parameter: gate and up projections of all of a rank's experts."""
    elements = facts.num_experts * 2 * facts.expert_hidden_size * facts.hidden_size
    return elements // config.generator.tensor_parallel * BYTES_PER_ELEMENT[config.generator.dtype]


def teacher_memory(config: RunConfig, machine: Machine) -> Iterator[tuple[str, list[MemoryItem]]]:
    """Yield the name and the items of one engine rank of each teacher that the run starts engines for.

    Raises:
        ConfigError: a teacher's folder has no readable config.json.
    """
    for name, teacher in config.teachers.items():
        if not teacher.num_engines:
            continue
        facts, section = teacher_facts(config, name), f"teachers.{name}.engine"
        counts = count_parameters(facts)
        # The functions below read config.generator, so the teacher's engine takes its place.
        lora = config.lora if teacher.moves else None
        own = config.model_copy(update={"generator": teacher.engine, "lora": lora})
        if teacher.moves:
            yield name, generator_memory(own, facts, counts, machine, section=section)
        else:
            yield name, engine_memory(own, facts, counts, section=section)


def teacher_facts(config: RunConfig, name: str) -> ModelFacts:
    """Return the model shape of a teacher that the run starts engines for.

    Raises:
        ConfigError: its folder has no readable config.json.
    """
    path = config.teachers[name].path(config.model.path)
    try:
        return read_model_facts(path)
    except ConfigError as error:
        field = f"teachers.{name}.model_path"
        raise ConfigError(
            [Problem(field=field, value=path, remedy=problem.remedy) for problem in error.problems]
        ) from error


def check_memory(
    config: RunConfig, facts: ModelFacts, *, host_bytes: int, trains: bool = True
) -> Iterator[Problem]:
    """Yield a problem if the memory that a run on CPUs certainly allocates exceeds this machine's.

    This memory is the weights and KV caches of engines, and the parameters and optimizer state of trainer
    ranks. With ``trains=False`` the generators run alone.

    Raises:
        ConfigError: a teacher's folder has no readable config.json.
    """
    if not isinstance(config.launcher, LocalLauncher | ProcessLauncher):
        # The run is on other machines.
        return
    counts, generator = count_parameters(facts), config.generator
    weights, kv_cache, *_ = engine_memory(config, facts, counts, section="generator")
    num_engines = generator.num_replicas * generator.tensor_parallel
    others = num_engines * weights.num_bytes
    parts = [f"{_gib(others)} GiB for the weights of {num_engines} engine processes"]
    if trains:
        num_procs = config.trainer.parallel.num_procs
        states = num_procs * total_bytes(trainer_memory(config, facts, counts, Machine.CPU).always)
        others += states
        parts.append(f"{_gib(states)} GiB for parameters and optimizer of {num_procs} trainer processes")
    if trains and (teachers := _all_teacher_bytes(config)):
        others += teachers
        parts.append(f"{_gib(teachers)} GiB for weights and KV caches of teachers")
    if num_engines * kv_cache.num_bytes + others <= host_bytes:
        return
    what = " and ".join(parts)
    if others >= host_bytes:
        yield Problem(
            field="model.path",
            value=config.model.path,
            remedy=f"needs {what}; this machine has {_gib(host_bytes)} GiB of memory available",
        )
        return
    yield Problem(
        field="generator.kv_cache_gib",
        value=generator.kv_cache_gib,
        remedy=f"must be at most {_gib((host_bytes - others) // num_engines)}: with {what}, this machine "
        f"has {_gib(host_bytes)} GiB of memory available",
    )


def _all_teacher_bytes(config: RunConfig) -> int:
    """Return the bytes of weights and KV caches of all engines of all teachers."""
    total = 0
    for name, (weights, kv_cache, *_) in teacher_memory(config, Machine.CPU):
        engine = config.teachers[name].engine
        total += engine.num_replicas * engine.tensor_parallel * (weights.num_bytes + kv_cache.num_bytes)
    return total


def checkpoint_copy_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the host memory of all ranks into which checkpoints are copied before they are written.

    It is kept for the next checkpoint.
    """
    return 0 if config.checkpoint.every_steps is None else state_bytes(config, facts)


def offloaded_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the host memory of all ranks that ``trainer.cpu_offload`` needs, gradients included."""
    if not config.trainer.cpu_offload:
        return 0
    gradients = num_trained(config, facts) * FLOAT32_BYTES
    return config.trainer.parallel.data_replicate * (state_bytes(config, facts) + gradients)


def check_host_memory(config: RunConfig, facts: ModelFacts, *, host_bytes: int) -> Iterator[Problem]:
    """Yield a problem if a run on GPUs certainly needs more of this machine's own memory than ``host_bytes``.

    This memory is shared memory, copies for checkpoints, and what ``trainer.cpu_offload`` keeps.
    """
    if not isinstance(config.launcher, LocalLauncher | ProcessLauncher):
        # The run's hosts are checked after they have started.
        return
    parts = {
        "weights on their way and payloads": sum(shared_memory(config, facts, Machine.GPU)),
        "snapshots of the trainer (trainer.recovery.snapshot_every_steps)": snapshot_memory_bytes(
            config, facts
        ),
        "copies for checkpoints (checkpoint.every_steps)": checkpoint_copy_bytes(config, facts),
        "parameters and optimizer (trainer.cpu_offload)": offloaded_bytes(config, facts),
    }
    if (needed := sum(parts.values())) > host_bytes:
        each = ", ".join(f"{_gib(size)} GiB for {what}" for what, size in parts.items() if size)
        yield Problem(
            field="host memory",
            value=f"{_gib(host_bytes)} GiB available",
            remedy=f"must be at least {_gib(needed)} GiB: {each}",
        )


def shared_memory(config: RunConfig, facts: ModelFacts, machine: Machine) -> tuple[int, int]:
    """Return the bytes of this machine's shared memory for weights, and for payloads, without snapshots."""
    launcher = config.launcher
    assert isinstance(launcher, LocalLauncher | ProcessLauncher)
    hosts = 1 if isinstance(launcher, LocalLauncher) else num_hosts(launcher).generators
    moving = [one for one in config.teachers.values() if one.moves]
    engines = config.generator.num_replicas + sum(one.num_engines for one in moving)
    weights = (
        staging_bytes(config, facts)
        + (hosts + len(moving)) * received_bytes(config, facts)
        + hosts * host_shadow_bytes(config, facts, machine)
        + engines * merged_bytes(config, facts, machine)
    )
    # Simulated hosts on this machine share the budget of payloads, so it counts once.
    return weights, round(config.payload.capacity_gib * 2**30)


def check_shared_memory(
    config: RunConfig, facts: ModelFacts, machine: Machine, *, free_bytes: int
) -> Iterator[Problem]:
    """Yield a problem if a run needs more shared memory than the ``free_bytes`` of this machine."""
    if not isinstance(config.launcher, LocalLauncher | ProcessLauncher):
        # The run's hosts are checked after they have started.
        return
    weights, payloads = shared_memory(config, facts, machine)
    snapshots = snapshot_memory_bytes(config, facts)
    if payloads + weights + snapshots > free_bytes:
        yield Problem(
            field="payload.capacity_gib",
            value=config.payload.capacity_gib,
            remedy=f"with {_gib(weights)} for weights (staged ones, and what generators receive) and "
            f"{_gib(snapshots)} for snapshots of the trainer must be at most {_gib(free_bytes)}, what this "
            "machine has free in /dev/shm; docker run --shm-size=... gives a container more, and "
            "trainer.recovery.snapshot_every_steps=null takes no snapshots: a lost trainer then ends the run",
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}"


NUM_SNAPSHOTS = 2
"""Number of snapshots that a trainer rank keeps in shared memory."""

PAYLOAD_HEADER_BYTES = 256
"""Bytes of header, table and alignment of the arrays of one payload."""


def host_memory(config: RunConfig, facts: ModelFacts, machine: Machine) -> list[MemoryItem]:
    """Return the items in host memory: buffers of weights, snapshots, shadow weights and payloads."""
    version = received_bytes(config, facts)
    patches = f" and {PATCH_SHARE:.0%} for patches" * (config.weights.delta is Delta.EXACT)
    dtype = published_dtype(config).value
    what = "version" if config.lora is None else "version of the adapters"
    beside, tensor = " and its average" * num_averages(config.teachers), config.generator.tensor_parallel
    staged = staging_bytes(config, facts)
    asleep = 0
    if machine is Machine.GPU and sleeps(config):
        weights = _weights(config, facts, count_parameters(facts))
        asleep = config.generator.num_replicas * tensor * weights
    trained = "what is trained" + ", its average" * num_averages(config.teachers)
    items = (
        (
            "staging buffers, all ranks",
            staged,
            f"2 x one {what}{beside}{patches} in {dtype}: one read, one written",
        ),
        (
            "archive, all ranks",
            staged // 2 * config.weights.archive,
            f"at most one {what}{beside}{patches} that waits for the disk, where a step adds at most "
            "one to the run's folder",
        ),
        ("receive buffer, each host", version, f"one {what}{patches}, for all replicas of a host"),
        *(
            (f"receive buffer, teacher {name}", version, f"one {what}")
            for name, teacher in config.teachers.items()
            if teacher.moves
        ),
        (
            "trainer snapshots, all ranks",
            snapshot_memory_bytes(config, facts),
            f"{NUM_SNAPSHOTS} x {trained} and its moments, float32: one whole, one written",
        ),
        (
            "merged weights, each replica",
            merged_bytes(config, facts, machine),
            "what adapters are merged into",
        ),
        (
            "shadow weights, each host",
            host_shadow_bytes(config, facts, machine),
            f"the next version as the kernels of {tensor} ranks keep it",
        ),
        ("weights of engines that sleep", asleep, "generator.colocated: sleep"),
    )
    found = [MemoryItem(name=name, num_bytes=size, how=how) for name, size, how in items if size]
    return [*found, _payload_store(config, facts)]


def staging_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the bytes of the staging buffers of all trainer ranks: two versions, each with its average."""
    return 2 * (1 + num_averages(config.teachers)) * received_bytes(config, facts)


def received_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the bytes of a receive buffer: a version, and room for patches with ``weights.delta``."""
    patches = PATCH_SHARE * (config.weights.delta is Delta.EXACT)
    return math.ceil((1 + patches) * version_bytes(config, facts))


def snapshot_memory_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the bytes of all trainer ranks' snapshots in shared memory: a checkpoint's arrays, twice."""
    if config.trainer.recovery.snapshot_every_steps is None:
        return 0
    trained = trained_parameters_per_rank(config, facts, count_parameters(facts))
    return config.trainer.parallel.num_procs * NUM_SNAPSHOTS * bytes_per_parameter(config) * trained


def host_shadow_bytes(config: RunConfig, facts: ModelFacts, machine: Machine) -> int:
    """Return the bytes of the shadow weights that the generators of a host share; 0 without host shadows."""
    generator = config.generator
    if machine is Machine.CPU or config.lora is not None or config.weights.shadow is not ShadowMemory.HOST:
        return 0
    per_rank = generator_parameters_per_rank(config, facts, count_parameters(facts))
    return generator.tensor_parallel * per_rank * BYTES_PER_ELEMENT[generator.dtype]


def _payload_store(config: RunConfig, facts: ModelFacts) -> MemoryItem:
    capacity = round(config.payload.capacity_gib * 2**30)
    num_groups = groups_outstanding(config)
    group = group_payload_bytes(config, facts)
    how = f"{num_groups:,} groups of {group / 2**20:.3g} MiB, if all responses are as long as can be"
    if num_groups * group > capacity:
        how = f"payload.capacity_gib; {how} would take {num_groups * group / 2**30:.3g} GiB"
    return MemoryItem(name="payload store", num_bytes=min(capacity, num_groups * group), how=how)


def groups_outstanding(config: RunConfig) -> int:
    """Return the maximum number of groups that are started and not yet trained on."""
    outstanding = (config.max_off_policy_steps + 1) * config.algorithm.groups_per_step
    return min(outstanding, config.buffer.max_groups or outstanding)


def group_payload_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the bytes of one group's payload with the longest responses and the largest kept sets.

    Unlike ``largest_group_payload_bytes``, a strict bound, this counts the prompt's record once: the rollouts
    of a group share it unless weights were swapped between their first steps.
    """
    # A model without experts has no routing to record, whatever the setting.
    routing = routing_bytes_per_token(config, facts) if facts.num_experts else 0
    kept = kept_bytes_per_token(config, facts)
    response = longest_response(config)
    prompt = config.model.max_context_length - response
    # int32 ids; responses also have float32 log-probabilities.
    of_prompt = prompt * (4 + routing) + PAYLOAD_HEADER_BYTES
    marks = sampled_mark_bytes_per_token(config)
    of_teacher = teacher_bytes_per_token(config)
    of_response = response * (4 + 4 + routing + kept + marks + of_teacher) + PAYLOAD_HEADER_BYTES
    return of_prompt + config.algorithm.group_size * of_response
