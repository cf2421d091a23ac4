"""Computes the memory of hosts: what they have, and the shared memory that weights and rollouts take."""

import re
from collections.abc import Iterator
from pathlib import Path

from forgeasync.config import (
    LocalLauncher,
    ModelFacts,
    ProcessLauncher,
    RunConfig,
    ShadowMemory,
    longest_response,
    num_averages,
)
from forgeasync.models import (
    BYTES_PER_ELEMENT,
    kept_bytes_per_token,
    num_adapter_parameters,
    published_weight_bytes,
    routing_bytes_per_token,
    sampled_mark_bytes_per_token,
    teacher_bytes_per_token,
)
from forgeasync.planning.memory.items import FLOAT32_BYTES, Machine, MemoryItem
from forgeasync.planning.memory.parameters import (
    count_merged,
    count_parameters,
    generator_parameters_per_rank,
    merges_adapters,
    trained_parameters_per_rank,
    trainer_parameters_per_rank,
)
from forgeasync.planning.memory.teachers import all_teacher_bytes
from forgeasync.schema import Problem

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_host_bytes() -> int:
    """Memory that this machine can still give, also within a container's limit."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    (available,) = (line for line in lines if line.startswith("MemAvailable:"))
    found = [int(re.findall(r"\d+", available)[0]) * 1024]
    for file in map(Path, _CGROUP_LIMITS):
        if file.is_file() and (text := file.read_text(encoding="ascii").strip()).isdecimal():
            found.append(int(text))
    return min(found)


def check_memory(config: RunConfig, facts: ModelFacts, *, host_bytes: int) -> Iterator[Problem]:
    """Check that a run on CPUs fits this machine's memory.

    Raises:
        ConfigError: a teacher's folder has no config.json that can be read.
    """
    if not isinstance(config.launcher, LocalLauncher | ProcessLauncher):
        # The run is not on this machine: its memory says nothing.
        return
    counts, generator = count_parameters(facts), config.generator
    weights = generator_parameters_per_rank(config, facts, counts) * BYTES_PER_ELEMENT[generator.dtype]
    kv_cache = round(generator.kv_cache_gib * 2**30)
    num_engines = generator.num_engines * generator.tensor_parallel
    num_procs = config.trainer.parallel.num_procs
    states = _trainer_state_bytes(config, trainer_parameters_per_rank(config, counts))
    teachers = all_teacher_bytes(config)
    others = num_engines * weights + num_procs * states + teachers
    if num_engines * kv_cache + others <= host_bytes:
        return
    parts = (
        f"{_gib(num_engines * weights)} GiB for the weights of {num_engines} engine processes and "
        f"{_gib(num_procs * states)} GiB for parameters and optimizer of {num_procs} trainer procs"
    )
    if teachers:
        parts += f" and {_gib(teachers)} GiB for weights and KV caches of teachers"
    if others >= host_bytes:
        yield Problem(
            field="model.path",
            value=config.model.path,
            remedy=f"needs {parts}; this machine has {_gib(host_bytes)} GiB of memory available",
        )
        return
    yield Problem(
        field="generator.kv_cache_gib",
        value=generator.kv_cache_gib,
        remedy=f"must be at most {_gib((host_bytes - others) // num_engines)}: with {parts}, this machine "
        f"has {_gib(host_bytes)} GiB of memory available",
    )


def check_generator_memory(config: RunConfig, facts: ModelFacts, *, host_bytes: int) -> Iterator[Problem]:
    """Check that the generators alone, without a trainer, fit this machine's memory."""
    generator = config.generator
    num_engines = generator.num_engines * generator.tensor_parallel
    parameters = generator_parameters_per_rank(config, facts, count_parameters(facts))
    weights = num_engines * parameters * BYTES_PER_ELEMENT[generator.dtype]
    kv_cache = num_engines * round(generator.kv_cache_gib * 2**30)
    if weights + kv_cache > host_bytes:
        yield Problem(
            field="generator.kv_cache_gib",
            value=generator.kv_cache_gib,
            remedy=f"{num_engines} engine processes need {_gib(weights)} GiB for weights and "
            f"{_gib(kv_cache)} GiB for KV caches; this machine has {_gib(host_bytes)} GiB available",
        )


def _trainer_state_bytes(config: RunConfig, num_parameters: int) -> int:
    """Bytes on one rank: float32 parameters, gradients, two moments and an average, or a frozen model."""
    if config.lora is not None:
        return num_parameters * BYTES_PER_ELEMENT[config.trainer.dtype]
    return num_parameters * (4 + num_averages(config.teachers)) * FLOAT32_BYTES


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}"


NUM_SNAPSHOTS = 2
"""Snapshots of a trainer rank in shared memory."""

PAYLOAD_HEADER_BYTES = 256
"""Header, table and alignment of the arrays of one payload."""


def host_memory(config: RunConfig, facts: ModelFacts, machine: Machine) -> list[MemoryItem]:
    """Staging buffers of all trainer ranks together, what a host of generators receives, and payloads."""
    element, dtype = BYTES_PER_ELEMENT[config.generator.dtype], config.generator.dtype.value
    version, what = published_weight_bytes(config, facts), "version"
    merged = []
    if config.lora is not None:
        version, what = num_adapter_parameters(facts, config.lora) * element, "version of the adapters"
        if merges_adapters(config, machine):
            size = count_merged(facts, config.lora) * element
            how = "what adapters are merged into"
            merged = [MemoryItem(name="merged weights, each replica", num_bytes=size, how=how)]
    num_sets = 1 + num_averages(config.teachers)
    beside = " and its average" * (num_sets - 1)
    return [
        MemoryItem(
            name="staging buffers, all ranks",
            num_bytes=2 * num_sets * version,
            how=f"2 x one {what}{beside} in {dtype}: one read, one written",
        ),
        MemoryItem(
            name="receive buffer, each host",
            num_bytes=version,
            how=f"one {what}, for all replicas of a host",
        ),
        *(
            MemoryItem(name=f"receive buffer, teacher {name}", num_bytes=version, how=f"one {what}")
            for name, teacher in config.teachers.items()
            if teacher.moves
        ),
        *_snapshots(config, facts),
        *merged,
        *_host_shadow(config, facts, machine),
        _payload_store(config, facts),
    ]


def snapshot_memory_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Bytes of shared memory that snapshots of all trainer ranks take: what a checkpoint has, twice."""
    if config.trainer.recovery.snapshot_every_steps is None:
        return 0
    trained = trained_parameters_per_rank(config, facts, count_parameters(facts))
    num_states = 3 + num_averages(config.teachers)
    return config.trainer.parallel.num_procs * NUM_SNAPSHOTS * num_states * FLOAT32_BYTES * trained


def _snapshots(config: RunConfig, facts: ModelFacts) -> list[MemoryItem]:
    if (num_bytes := snapshot_memory_bytes(config, facts)) == 0:
        return []
    average = ", its average" * num_averages(config.teachers)
    how = f"{NUM_SNAPSHOTS} x what is trained{average} and its moments, float32: one whole, one written"
    return [MemoryItem(name="trainer snapshots, all ranks", num_bytes=num_bytes, how=how)]


def _host_shadow(config: RunConfig, facts: ModelFacts, machine: Machine) -> list[MemoryItem]:
    if (num_bytes := host_shadow_bytes(config, facts, machine)) == 0:
        return []
    how = f"the next version as the kernels of {config.generator.tensor_parallel} ranks keep it"
    return [MemoryItem(name="shadow weights, each host", num_bytes=num_bytes, how=how)]


def host_shadow_bytes(config: RunConfig, facts: ModelFacts, machine: Machine) -> int:
    """Bytes of the shadows that the generators of one host share; 0 where they have none on the host."""
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
    """Most groups started and not yet trained on."""
    outstanding = (config.max_off_policy_steps + 1) * config.algorithm.groups_per_step
    return min(outstanding, config.buffer.max_groups or outstanding)


def group_payload_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the bytes of one group's file, with the longest responses and kept sets as large as top-k.

    Unlike ``largest_group_payload_bytes``, which nothing may exceed, this counts the prompt's record once:
    rollouts of a group share it unless weights were swapped in between their first steps.
    """
    # A model without experts has no routing to record, whatever the setting.
    routing = routing_bytes_per_token(config, facts) if facts.num_experts else 0
    kept = kept_bytes_per_token(config, facts)
    response = longest_response(config)
    prompt = config.model.max_context_length - response
    # int32 ids; of responses float32 log-probabilities too.
    of_prompt = prompt * (4 + routing) + PAYLOAD_HEADER_BYTES
    marks = sampled_mark_bytes_per_token(config)
    of_teacher = teacher_bytes_per_token(config)
    of_response = response * (4 + 4 + routing + kept + marks + of_teacher) + PAYLOAD_HEADER_BYTES
    return of_prompt + config.algorithm.group_size * of_response
