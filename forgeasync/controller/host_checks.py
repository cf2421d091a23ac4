"""Starts the hosts of a run, and judges them before a model is read on them."""

from collections.abc import Callable

import torch

from forgeasync.actors import ProcessManager
from forgeasync.config import LocalLauncher, ModelFacts, ProcessLauncher, RunConfig, gpus_per_host
from forgeasync.controller.host_gpus import check_gpus_of_hosts
from forgeasync.launch import HostRole, Hosts, check_host_limits, lock_warning
from forgeasync.planning import role_needs
from forgeasync.schema import Problem, raise_if_any


async def open_hosts(
    config: RunConfig, facts: ModelFacts, procs: ProcessManager, *, tell: Callable[[str], None]
) -> None:
    """Start the run's hosts; what they wait for, and what may become a problem, is told in words.

    Raises:
        ConfigError: lists what hosts lack, all of it.
    """
    await procs.open(tell)
    warnings = check_hosts(config, facts, procs.hosts)
    for warning in (*warnings, *await check_gpus_of_hosts(config, facts, procs.hosts)):
        tell(f"warning: {warning}")


def check_hosts(config: RunConfig, facts: ModelFacts, hosts: Hosts) -> list[str]:
    """Compare every host with what its role needs there; returns warnings.

    Raises:
        ConfigError: lists what hosts lack, all of it.
    """
    launcher = config.launcher
    is_here = isinstance(launcher, LocalLauncher | ProcessLauncher)
    # What fits this machine depends on both roles together, and was checked before the hosts were opened.
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
