"""Plans the CPUs, memory and shared memory of each host, and fills in the launcher's scheduler requests."""

import dataclasses
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
from forgeasync.planning.memory import (
    checkpoint_copy_bytes,
    host_shadow_bytes,
    offloaded_bytes,
    received_bytes,
    snapshot_memory_bytes,
    staging_bytes,
)
from forgeasync.planning.parameters import (
    Machine,
    merged_bytes,
)

PROCESS_BYTES = 8 * 2**30
"""Allowance for the fixed memory of a process: Python, torch, the CUDA context, NCCL."""

HOST_BYTES = 8 * 2**30
"""Allowance for the host's agent, its operating system and the page cache."""

CPUS_OF_TRAINER_PROC = 4
"""One CPU each for the step, copies, the writing of checkpoints and the weight transport."""

CPUS_OF_REPLICA = 3
"""One CPU each for the engine's thread, the event loop and weight fetches; each further rank adds one."""

CPUS_OF_HOST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeeds:
    """CPUs and memory that one host needs."""

    num_cpus: int
    shared_bytes: int
    """Memory in /dev/shm: staged or fetched weights, snapshots and payloads."""
    memory_bytes: int
    """Total memory, including shared memory, which schedulers count too."""
    buffer_bytes: int
    """Part of ``memory_bytes`` without allowances: buffers with sizes given by config and model."""
    locked_bytes: int
    """Maximum memory that one process page-locks or registers for RDMA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNeeds:
    """Needs of one host of each role."""

    trainer: HostNeeds
    generators: HostNeeds


def host_needs(config: RunConfig, facts: ModelFacts) -> HostNeeds:
    """Return the needs of a host that can take either role; the run must have a launcher with hosts."""
    assert not isinstance(config.launcher, LocalLauncher)
    needs = role_needs(config, facts, config.launcher)
    return HostNeeds(
        **{
            one.name: max(getattr(needs.trainer, one.name), getattr(needs.generators, one.name))
            for one in dataclasses.fields(HostNeeds)
        }
    )


def role_needs(config: RunConfig, facts: ModelFacts, launcher: RemoteLauncher) -> RoleNeeds:
    """Return the needs of one host of each role."""
    return RoleNeeds(
        trainer=_trainer_host(config, facts, launcher), generators=_generator_host(config, facts, launcher)
    )


def _trainer_host(config: RunConfig, facts: ModelFacts, launcher: RemoteLauncher) -> HostNeeds:
    hosts, trainer = num_hosts(launcher).trainer, config.trainer
    num_procs = trainer.parallel.num_procs // hosts
    staged = math.ceil(staging_bytes(config, facts) / hosts)
    shared = staged + math.ceil(snapshot_memory_bytes(config, facts) / hosts)
    copies = checkpoint_copy_bytes(config, facts)
    memory = shared + math.ceil((copies + offloaded_bytes(config, facts)) / hosts)
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
    num_replicas = generator.num_replicas // num_hosts(launcher).generators
    machine = Machine.GPU if launcher.kind != "process" and launcher.gpus_per_host else Machine.CPU
    # The replicas of a host share one receive buffer; each replica has its own merged weights.
    received = received_bytes(config, facts) + host_shadow_bytes(config, facts, machine)
    weights = received + num_replicas * merged_bytes(config, facts, machine)
    shared = weights + round(config.payload.capacity_gib * 2**30)
    return HostNeeds(
        num_cpus=CPUS_OF_HOST + num_replicas * (CPUS_OF_REPLICA + generator.tensor_parallel - 1),
        shared_bytes=shared,
        memory_bytes=HOST_BYTES + num_replicas * generator.tensor_parallel * PROCESS_BYTES + shared,
        buffer_bytes=shared,
        # Each replica's process maps the host's receive buffer, and serves the payloads that it sampled.
        locked_bytes=received + round(config.payload.capacity_gib * 2**30),
    )


def with_host_requests(config: RunConfig, facts: ModelFacts) -> RunConfig:
    """Return the config with the launcher's unset requests filled in from the plan.

    Only the launchers Slurm and Kubernetes have requests.
    """
    launcher = config.launcher
    if isinstance(launcher, SlurmLauncher):
        needs = host_needs(config, facts)
        requested = {
            "cpus_per_task": launcher.cpus_per_task or needs.num_cpus,
            "mem": launcher.mem or f"{_gib(needs.memory_bytes)}G",
        }
    elif isinstance(launcher, KubernetesLauncher):
        needs = host_needs(config, facts)
        resources = {"cpu": needs.num_cpus, "memory": f"{_gib(needs.memory_bytes)}Gi"}
        requested = {
            "resources": resources | launcher.resources,
            "shared_memory_size": launcher.shared_memory_size or f"{_gib(needs.shared_bytes)}Gi",
        }
    else:
        return config
    return config.model_copy(update={"launcher": launcher.model_copy(update=requested)})


def _gib(num_bytes: int) -> int:
    return math.ceil(num_bytes / 2**30)
