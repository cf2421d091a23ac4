"""Starts the hosts of a run, and checks each one against the run's needs before a model is read.

``check_hosts`` checks memory and limits of every host. ``check_local_gpus`` checks the GPUs of this machine
before anything starts; ``check_gpus_of_hosts`` checks those of the hosts that a launcher has started.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from forgeasync.config import (
    LocalLauncher,
    ModelFacts,
    ProcessLauncher,
    RunConfig,
    gpus_per_host,
    num_gpus_needed,
    num_hosts,
    places_of,
    reward_gpus,
    shares_gpus,
    sleeps,
)
from forgeasync.planning import (
    SHARED_CONTEXTS_BYTES,
    Machine,
    count_parameters,
    generator_memory,
    role_needs,
    shared_gpu_bytes,
    total_bytes,
    trainer_memory,
)
from forgeasync.runtime import (
    LOCAL_HOST_ID,
    HostGpus,
    HostRole,
    Hosts,
    ProcessManager,
    RolePlan,
    check_host_limits,
    check_hosts_gpus,
    gather_gpu_facts,
    gpu_warnings,
    lock_warning,
)
from forgeasync.schema import Problem, raise_if_any


def places_of_rewards(config: RunConfig, num_gpus: int) -> frozenset[int]:
    """Return the indices, among this machine's ``num_gpus`` visible GPUs, that rewards use.

    Returns an empty set without GPUs, and with launchers that start other hosts.

    Raises:
        ConfigError: a reward's GPU does not exist.
    """
    if not isinstance(config.launcher, LocalLauncher) or num_gpus == 0:
        return frozenset()
    gpus, visible = sorted(reward_gpus(config)), os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        places = places_of(gpus, visible)
    except ValueError as error:
        raise_if_any([Problem(field="process_reward_model gpu", value=gpus, remedy=str(error))])
        raise
    if places and max(places) >= num_gpus:
        remedy = f"must be below {num_gpus}, the GPUs of this machine"
        raise_if_any([Problem(field="process_reward_model gpu", value=max(places), remedy=remedy)])
    return places


def check_local_gpus(
    config: RunConfig, facts: ModelFacts, *, trains: bool = True
) -> tuple[list[Problem], list[str]]:
    """Return problems and warnings about this machine's GPUs; empty lists if the run does not use them.

    A CPU build of torch uses no GPUs. ``forgeasync.config.check_gpus`` reports missing GPUs of a run. With
    ``trains=False`` the generators run alone, and missing GPUs are reported here.
    """
    if not isinstance(config.launcher, LocalLauncher) or torch.version.cuda is None:
        return [], []
    found = gather_gpu_facts(os.environ.get("CUDA_VISIBLE_DEVICES"))
    reserved = places_of_rewards(config, len(found.gpus))
    found = replace(found, gpus=tuple(gpu for place, gpu in enumerate(found.gpus) if place not in reserved))
    plans: tuple[RolePlan, ...] = (generator_plan(config, facts),)
    num_needed = config.generator.num_replicas * config.generator.tensor_parallel
    if trains:
        plans = (trainer_plan(config, facts), *plans)
        needed = num_gpus_needed(config)
        num_needed = min(needed, len(found.gpus)) or needed
    is_shared = trains and shares_gpus(config)
    host = HostGpus(
        host=LOCAL_HOST_ID,
        facts=found,
        num_needed=num_needed,
        plans=(shared_plan(config, facts),) if is_shared else plans,
        is_trainer=trains,
        is_shared=is_shared,
    )
    return _judge(config, [host])


def _judge(config: RunConfig, hosts: Sequence[HostGpus]) -> tuple[list[Problem], list[str]]:
    choice = config.trainer.flash_attention
    return list(check_hosts_gpus(hosts, choice)), gpu_warnings(hosts, choice)


async def check_gpus_of_hosts(config: RunConfig, facts: ModelFacts, hosts: Hosts) -> list[str]:
    """Check the GPUs of the hosts that a launcher has started; return warnings.

    Raises:
        ConfigError: lists every problem of every host.
    """
    launcher = config.launcher
    if isinstance(launcher, LocalLauncher | ProcessLauncher) or not gpus_per_host(launcher):
        return []
    counts, generator = num_hosts(launcher), config.generator
    trainers, generators = await asyncio.gather(hosts.gpus(HostRole.TRAINER), hosts.gpus(HostRole.GENERATORS))
    num_of_trainer = config.trainer.parallel.num_procs // counts.trainer
    num_of_generators = generator.num_replicas // counts.generators * generator.tensor_parallel
    problems, warnings = _judge(
        config,
        [
            HostGpus(host=host, facts=found, num_needed=num_needed, plans=(plan,), is_trainer=is_trainer)
            for of_role, num_needed, plan, is_trainer in (
                (trainers, num_of_trainer, trainer_plan(config, facts), True),
                (generators, num_of_generators, generator_plan(config, facts), False),
            )
            for host, found in of_role.items()
        ],
    )
    raise_if_any(problems)
    return warnings


def trainer_plan(config: RunConfig, facts: ModelFacts) -> RolePlan:
    """Return the GPU memory that a trainer process needs, and the remedy if there is too little."""
    memory = trainer_memory(config, facts, count_parameters(facts), Machine.GPU)
    num_procs = config.trainer.parallel.num_procs
    remedy = f"use more than {num_procs} processes, split rows (trainer.parallel.tensor, context) or layers "
    remedy += "(activation_checkpointing: full), or keep what is sharded in host memory (trainer.cpu_offload)"
    return RolePlan(
        role="trainer",
        num_bytes=memory.total_bytes,
        field="trainer.parallel.num_procs",
        value=num_procs,
        remedy=remedy,
    )


def generator_plan(config: RunConfig, facts: ModelFacts) -> RolePlan:
    """Return the GPU memory that each process of an engine needs, and the remedy if there is too little."""
    memory = generator_memory(config, facts, count_parameters(facts), Machine.GPU)
    others = total_bytes([item for item in memory if item.name != "KV cache"])
    return RolePlan(
        role="generator",
        num_bytes=total_bytes(memory),
        field="generator.kv_cache_gib",
        value=config.generator.kv_cache_gib,
        remedy=f"lower it: {others / 2**30:.3g} GiB are for the rest, of which weights are less with a "
        f"larger generator.tensor_parallel than {config.generator.tensor_parallel}",
    )


def shared_plan(config: RunConfig, facts: ModelFacts) -> RolePlan:
    """Return the plan of a GPU that a trainer process shares with an engine's process."""
    generator = generator_plan(config, facts)
    of_trainer, of_generator = (one.num_bytes / 2**30 for one in (trainer_plan(config, facts), generator))
    sleep = "" if sleeps(config) else ", generator.colocated=sleep with max_off_policy_steps=1"
    return RolePlan(
        role="trainer with the generator",
        num_bytes=shared_gpu_bytes(config, facts),
        field=generator.field,
        value=generator.value,
        remedy=f"{of_trainer:.3g} GiB are the trainer's, {of_generator:.3g} the generator's, "
        f"{SHARED_CONTEXTS_BYTES / 2**30:.3g} for CUDA contexts: "
        "lower generator.kv_cache_gib or trainer.tokens_per_row, train adapters (lora), or set "
        f"trainer.cpu_offload{sleep}; configs/qwen3_0.6b_1gpu.yaml fits 24 GB",
    )


async def open_hosts(
    config: RunConfig, facts: ModelFacts, processes: ProcessManager, *, tell: Callable[[str], None]
) -> None:
    """Start and check the run's hosts; ``tell`` is called with progress messages and warnings.

    Raises:
        ConfigError: lists every problem of every host.
    """
    await processes.open(tell)
    warnings = check_hosts(config, facts, processes.hosts)
    for warning in (*warnings, *await check_gpus_of_hosts(config, facts, processes.hosts)):
        tell(f"warning: {warning}")


def check_hosts(config: RunConfig, facts: ModelFacts, hosts: Hosts) -> list[str]:
    """Check the memory and limits of every host against the needs of its role; return warnings.

    Raises:
        ConfigError: lists every problem of every host.
    """
    launcher = config.launcher
    is_here = isinstance(launcher, LocalLauncher | ProcessLauncher)
    # This machine holds both roles together, and was checked before the hosts were opened.
    simulated = ProcessLauncher(kind="process")
    needs = role_needs(config, facts, simulated if isinstance(launcher, LocalLauncher) else launcher)
    num_gpus = (
        torch.cuda.device_count()
        if isinstance(launcher, LocalLauncher | ProcessLauncher)
        else gpus_per_host(launcher)
    )
    problems: list[Problem] = []
    warnings: list[str] = []
    for role, of_role in ((HostRole.TRAINER, needs.trainer), (HostRole.GENERATORS, needs.generators)):
        for host, limits in hosts.limits(role).items():
            if not is_here:
                problems += check_host_limits(host, limits, of_role)
            if num_gpus and (words := lock_warning(host, limits, of_role)) is not None:
                warnings.append(words)
    raise_if_any(problems)
    return list(dict.fromkeys(warnings))
