"""Judges the hosts of a run once they are up, before a model is read on them."""

import torch

from forgeasync.config.launcher import LocalLauncher, ProcessLauncher, gpus_per_host
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.run import RunConfig
from forgeasync.launch.host_limits import check_host_limits, lock_warning
from forgeasync.launch.hosts import Hosts
from forgeasync.launch.jobs import HostRole
from forgeasync.planning.host_requests import role_needs
from forgeasync.schema.problems import Problem, raise_if_any


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
    num_gpus = torch.cuda.device_count() if is_here else gpus_per_host(launcher)
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
