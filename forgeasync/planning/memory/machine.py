"""Whether what a run is sure to allocate fits the machine that it is started on.

Counts KV caches, weights and the optimizer's state only, which are exact: what is refused here would end in
an error of the engine or the allocator. What else a rank holds is an estimate (``memory_plan``).
"""

import re
from collections.abc import Iterator
from pathlib import Path

from forgeasync.config.launcher import LocalLauncher, ProcessLauncher
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.run import RunConfig
from forgeasync.models.sizes import BYTES_PER_ELEMENT
from forgeasync.planning.memory.items import FLOAT32_BYTES
from forgeasync.planning.memory.parameters import (
    count_parameters,
    generator_parameters_per_rank,
    trainer_parameters_per_rank,
)
from forgeasync.schema.problems import Problem

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


def check_memory(
    config: RunConfig, facts: ModelFacts, *, host_bytes: int, gpu_bytes: int | None
) -> Iterator[Problem]:
    """Check that a run fits this machine's host memory or, with ``gpu_bytes`` of each, its GPUs."""
    if not isinstance(config.launcher, LocalLauncher | ProcessLauncher):
        # The run is not on this machine: its memory says nothing.
        return
    counts, generator = count_parameters(facts), config.generator
    weights = generator_parameters_per_rank(config, facts, counts) * BYTES_PER_ELEMENT[generator.dtype]
    kv_cache = round(generator.kv_cache_gib * 2**30)
    if gpu_bytes is not None:
        if weights + kv_cache > gpu_bytes:
            yield Problem(
                field="generator.kv_cache_gib",
                value=generator.kv_cache_gib,
                remedy=f"with {_gib(weights)} GiB of weights must be at most {_gib(gpu_bytes - weights)}: a "
                f"GPU of this machine has {_gib(gpu_bytes)} GiB",
            )
        return
    num_engines = generator.num_replicas * generator.tensor_parallel
    num_procs = config.trainer.parallel.num_procs
    states = _trainer_state_bytes(config, trainer_parameters_per_rank(config, counts))
    others = num_engines * weights + num_procs * states
    if num_engines * kv_cache + others <= host_bytes:
        return
    parts = (
        f"{_gib(num_engines * weights)} GiB for the weights of {num_engines} engine processes and "
        f"{_gib(num_procs * states)} GiB for parameters and optimizer of {num_procs} trainer procs"
    )
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


def _trainer_state_bytes(config: RunConfig, num_parameters: int) -> int:
    """Bytes on one rank: float32 parameters, gradients and two moments, or a frozen model."""
    if config.lora is not None:
        return num_parameters * BYTES_PER_ELEMENT[config.trainer.dtype]
    return num_parameters * 4 * FLOAT32_BYTES


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}"
