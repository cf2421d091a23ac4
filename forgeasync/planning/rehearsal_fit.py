"""Finds the part of a topology that fits on this machine: whole replicas and whole data-parallel groups."""

from dataclasses import dataclass

from forgeasync.config import LocalLauncher, ParallelSection, RunConfig, num_hosts
from forgeasync.schema import ConfigError, Problem

GIB = 2**30

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
    procs = part.parallel.num_procs * TRAINER_PROC_BYTES + part.num_replicas * (GENERATOR_PROC_BYTES + engine)
    if on_gpus:
        # A CUDA context and its libraries need about the same amount again.
        procs *= 2
    num_hosts = part.num_trainer_hosts + part.num_generator_hosts
    hosts = 0 if isinstance(config.launcher, LocalLauncher) else num_hosts * HOST_BYTES
    num_workers = config.scorer.num_replicas * config.scorer.num_workers
    others = OTHER_BYTES + num_workers * SCORER_WORKER_BYTES
    return procs + hosts + others + SPARE_BYTES


def _num_gpus(config: RunConfig, part: Part) -> int:
    return part.parallel.num_procs + part.num_replicas * config.generator.tensor_parallel


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
        remedy=f"the smallest rehearsal with these parallel degrees has {parallel.num_procs} trainer procs "
        f"and one engine of {tensor}; it needs {needed / GIB:.3g} GiB of memory{gpus}, this machine has "
        f"{capacity.memory_bytes / GIB:.3g} GiB{has_gpus}. Use a larger machine, or --rehearse --hosts",
    )
