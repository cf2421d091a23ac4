"""Computes what a scheduler is asked for on every host besides its GPUs: CPUs, memory and shared memory."""

import math
from dataclasses import dataclass

from forgeasync.config import (
    KubernetesLauncher,
    LocalLauncher,
    ModelFacts,
    RemoteLauncher,
    RunConfig,
    SlurmLauncher,
    num_hosts,
)
from forgeasync.models import BYTES_PER_ELEMENT, num_adapter_parameters, published_weight_bytes
from forgeasync.planning.memory.host import host_shadow_bytes, snapshot_memory_bytes
from forgeasync.planning.memory.items import FLOAT32_BYTES, Machine
from forgeasync.planning.memory.parameters import count_merged, count_parameters, merges_adapters

PROCESS_BYTES = 8 * 2**30
"""Allowance for what a process holds of its own: Python, torch, the CUDA context, NCCL."""

HOST_BYTES = 8 * 2**30
"""Allowance for the host's agent, its operating system and files being read."""

CPUS_OF_TRAINER_PROC = 4
"""The step, copies and writing of checkpoints, and the weights' transport have threads of their own."""

CPUS_OF_REPLICA = 3
"""The engine's thread, the event loop beside it and the fetch of weights; every further rank takes one."""

CPUS_OF_HOST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeeds:
    """What the larger of the two roles needs on one of its hosts."""

    num_cpus: int
    shared_bytes: int
    """In /dev/shm: staged or fetched weights, and payloads."""
    memory_bytes: int
    """All of it; schedulers count shared memory too."""
    buffer_bytes: int
    """What of it is no allowance: buffers whose sizes config and model give, in shared memory or not."""
    locked_bytes: int
    """The most that one process page-locks, or registers for RDMA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNeeds:
    """What each role needs on one of its hosts."""

    trainer: HostNeeds
    generators: HostNeeds


def host_needs(config: RunConfig, facts: ModelFacts) -> HostNeeds:
    """Return what each host of a run is to have, whichever role lands on it; the run has hosts."""
    assert not isinstance(config.launcher, LocalLauncher)
    needs = role_needs(config, facts, config.launcher)
    trainer, generators = needs.trainer, needs.generators
    return HostNeeds(
        num_cpus=max(trainer.num_cpus, generators.num_cpus),
        shared_bytes=max(trainer.shared_bytes, generators.shared_bytes),
        memory_bytes=max(trainer.memory_bytes, generators.memory_bytes),
        buffer_bytes=max(trainer.buffer_bytes, generators.buffer_bytes),
        locked_bytes=max(trainer.locked_bytes, generators.locked_bytes),
    )


def role_needs(config: RunConfig, facts: ModelFacts, launcher: RemoteLauncher) -> RoleNeeds:
    """Return what each role needs on one of its hosts."""
    return RoleNeeds(
        trainer=_trainer_host(config, facts, launcher), generators=_generator_host(config, facts, launcher)
    )


def _trainer_host(config: RunConfig, facts: ModelFacts, launcher: RemoteLauncher) -> HostNeeds:
    hosts, trainer = num_hosts(launcher).trainer, config.trainer
    num_procs = trainer.parallel.num_procs // hosts
    staged = math.ceil(2 * _version_bytes(config, facts) / hosts)
    shared = staged + math.ceil(snapshot_memory_bytes(config, facts) / hosts)
    # What is trained and its two moments, copied to the host for a checkpoint and kept for the next one.
    trained = (
        count_parameters(facts).total if config.lora is None else num_adapter_parameters(facts, config.lora)
    )
    copies = 0 if config.checkpoint.every_steps is None else 3 * trained * FLOAT32_BYTES
    # Parameters, gradients and moments.
    offloaded = 4 * trained * FLOAT32_BYTES if trainer.cpu_offload else 0
    replicas = trainer.parallel.data_replicate
    memory = shared + math.ceil((copies + offloaded * replicas) / hosts)
    return HostNeeds(
        num_cpus=CPUS_OF_HOST + num_procs * CPUS_OF_TRAINER_PROC,
        shared_bytes=shared,
        memory_bytes=HOST_BYTES + num_procs * PROCESS_BYTES + memory,
        buffer_bytes=memory,
        # Each rank stages its part of the weights, and page-locks its copies for checkpoints.
        locked_bytes=math.ceil((staged + copies / hosts) / num_procs),
    )


def _generator_host(config: RunConfig, facts: ModelFacts, launcher: RemoteLauncher) -> HostNeeds:
    generator = config.generator
    num_replicas = generator.num_engines // num_hosts(launcher).generators
    machine = Machine.GPU if launcher.kind != "process" and launcher.gpus_per_host else Machine.CPU
    # The replicas of a host receive a version once; what adapters are merged into is each one's own.
    received = _version_bytes(config, facts) + host_shadow_bytes(config, facts, machine)
    weights = received
    if config.lora is not None and merges_adapters(config, machine):
        weights += num_replicas * count_merged(facts, config.lora) * BYTES_PER_ELEMENT[generator.dtype]
    shared = weights + round(config.payload.capacity_gib * 2**30)
    return HostNeeds(
        num_cpus=CPUS_OF_HOST + num_replicas * (CPUS_OF_REPLICA + generator.tensor_parallel - 1),
        shared_bytes=shared,
        memory_bytes=HOST_BYTES + num_replicas * generator.tensor_parallel * PROCESS_BYTES + shared,
        buffer_bytes=shared,
        # A replica's process maps what its host receives, and offers the payloads that it has sampled.
        locked_bytes=received + round(config.payload.capacity_gib * 2**30),
    )


def _version_bytes(config: RunConfig, facts: ModelFacts) -> int:
    if config.lora is None:
        return published_weight_bytes(config, facts)
    return num_adapter_parameters(facts, config.lora) * BYTES_PER_ELEMENT[config.generator.dtype]


def with_host_requests(config: RunConfig, facts: ModelFacts) -> RunConfig:
    """Return the config with the launcher's open requests filled in from the plan.

    What the launcher says already stays as it is. Other launchers than Slurm and Kubernetes ask for nothing.
    """
    launcher = config.launcher
    if isinstance(launcher, SlurmLauncher):
        needs = host_needs(config, facts)
        asked = {
            "cpus_per_task": launcher.cpus_per_task or needs.num_cpus,
            "mem": launcher.mem or f"{_gib(needs.memory_bytes)}G",
        }
    elif isinstance(launcher, KubernetesLauncher):
        needs = host_needs(config, facts)
        resources = {"cpu": needs.num_cpus, "memory": f"{_gib(needs.memory_bytes)}Gi"}
        asked = {
            "resources": resources | launcher.resources,
            "shared_memory_size": launcher.shared_memory_size or f"{_gib(needs.shared_bytes)}Gi",
        }
    else:
        return config
    return config.model_copy(update={"launcher": launcher.model_copy(update=asked)})


def _gib(num_bytes: int) -> int:
    return math.ceil(num_bytes / 2**30)
