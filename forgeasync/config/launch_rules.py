"""Rules between the launcher and the procs that are spread over its hosts."""

import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from forgeasync.config.launcher import (
    RESERVED_GPU_RESOURCE,
    KubernetesLauncher,
    LocalLauncher,
    SlurmLauncher,
    SshLauncher,
    gpus_per_host,
    num_hosts,
)
from forgeasync.config.model import Dtype
from forgeasync.config.run import RunConfig
from forgeasync.schema import Problem


def check_launcher(config: RunConfig) -> Iterator[Problem]:
    """Check that the procs of each role divide evenly over its hosts and fit on them."""
    launcher = config.launcher
    if isinstance(launcher, LocalLauncher):
        return
    yield from _check_division(config)
    yield from _check_gpus(config)
    if isinstance(launcher, SshLauncher):
        yield from _check_host_names(launcher)
    if isinstance(launcher, SlurmLauncher):
        yield from _check_slurm_args(launcher)
    if isinstance(launcher, KubernetesLauncher):
        yield from _check_kubernetes(launcher)


def _check_division(config: RunConfig) -> Iterator[Problem]:
    assert not isinstance(config.launcher, LocalLauncher)
    counts = num_hosts(config.launcher)
    spread = (
        ("trainer", counts.trainer, "trainer.parallel.num_procs", config.trainer.parallel.num_procs),
        ("generators", counts.generators, "generator.num_replicas", config.generator.num_engines),
    )
    for role, hosts, field, count in spread:
        if count % hosts:
            yield Problem(
                field=f"launcher.hosts.{role}",
                value=hosts,
                remedy=f"must divide {field} = {count}: every host gets the same number",
            )


def check_trainer_on_gpus(config: RunConfig) -> Iterator[Problem]:
    """What attention over packed rows cannot do on a GPU: FlashAttention has no float32."""
    trainer = config.trainer
    if trainer.dtype is not Dtype.BFLOAT16:
        yield Problem(
            field="trainer.dtype",
            value=trainer.dtype.value,
            remedy="must be bfloat16 on GPUs: attention over packed rows computes in bfloat16 there whatever "
            "the model's dtype; master weights and optimizer state stay float32",
        )


def check_adapters_on_gpus(config: RunConfig) -> Iterator[Problem]:
    """What adapters cannot be served with on a GPU (``lora_shrink_op.py`` and others of vLLM 0.32)."""
    if config.lora is not None and config.generator.dtype is not Dtype.BFLOAT16:
        yield Problem(
            field="generator.dtype",
            value=config.generator.dtype.value,
            remedy="must be bfloat16 on GPUs with a lora section: vLLM's kernels for adapters take no "
            "float32",
        )


def _check_gpus(config: RunConfig) -> Iterator[Problem]:
    assert not isinstance(config.launcher, LocalLauncher)
    gpus = gpus_per_host(config.launcher)
    if not gpus:
        return
    yield from check_trainer_on_gpus(config)
    yield from check_adapters_on_gpus(config)
    counts, generator = num_hosts(config.launcher), config.generator
    trainer = config.trainer.parallel.num_procs // counts.trainer
    if trainer > gpus:
        yield Problem(
            field="launcher.gpus_per_host",
            value=gpus,
            remedy=f"trainer.parallel.num_procs = {config.trainer.parallel.num_procs} on "
            f"launcher.hosts.trainer = {counts.trainer} needs {trainer} GPUs per host; give "
            "the trainer more hosts or fewer procs",
        )
    if generator.tensor_parallel > gpus:
        yield Problem(
            field="generator.tensor_parallel",
            value=generator.tensor_parallel,
            remedy=f"must be at most launcher.gpus_per_host = {gpus}: all GPUs of an engine are on one host",
        )
        return
    replicas = generator.num_engines // counts.generators
    if replicas * generator.tensor_parallel > gpus:
        yield Problem(
            field="launcher.gpus_per_host",
            value=gpus,
            remedy=f"generator.num_replicas = {generator.num_replicas} on launcher.hosts.generators = "
            f"{counts.generators} needs {replicas} x {generator.tensor_parallel} (tensor_parallel) = "
            f"{replicas * generator.tensor_parallel} GPUs per host; give the generators more hosts or fewer "
            "replicas",
        )


def _check_host_names(launcher: SshLauncher) -> Iterator[Problem]:
    names = Counter([*launcher.hosts.trainer, *launcher.hosts.generators])
    for name, count in names.items():
        if count > 1:
            yield Problem(
                field="launcher.hosts",
                value=name,
                remedy=f"is named {count} times; a host has one role, and its worker one port",
            )
        if not name or name.startswith("-"):
            yield Problem(
                field="launcher.hosts",
                value=name,
                remedy="is no host name; must not be empty or begin with -",
            )


def _check_slurm_args(launcher: SlurmLauncher) -> Iterator[Problem]:
    for argument in launcher.slurm_args:
        if not argument.startswith("-") or "\n" in argument:
            yield Problem(
                field="launcher.slurm_args",
                value=argument,
                remedy="must be one option of sbatch that starts with -, such as --constraint=h100",
            )


def _check_kubernetes(launcher: KubernetesLauncher) -> Iterator[Problem]:
    if RESERVED_GPU_RESOURCE in launcher.resources:
        yield Problem(
            field=f"launcher.resources.{RESERVED_GPU_RESOURCE}",
            value=launcher.resources[RESERVED_GPU_RESOURCE],
            remedy="is set by the run itself; give launcher.gpus_per_host instead",
        )
    if launcher.kubeconfig is not None and not Path(launcher.kubeconfig).expanduser().is_file():
        yield Problem(
            field="launcher.kubeconfig",
            value=launcher.kubeconfig,
            remedy="is no file; must be a kubeconfig file, or left out if the controller runs in the cluster",
        )
    if importlib.util.find_spec("kubernetes") is None:
        yield Problem(
            field="launcher.kind",
            value=launcher.kind,
            remedy="needs the kubernetes package: pip install 'forgeasync[kubernetes]'",
        )
