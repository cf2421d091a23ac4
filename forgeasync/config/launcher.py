"""Where the roles of a run are placed: on this machine, or on hosts that one of Monarch's job APIs starts.

Trainer and generators have separate hosts; the controller, the scorer, the replay buffer and torchstore's
volume stay on the machine where the run is started. The fields are the arguments of Monarch's jobs.
"""

import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from forgeasync.schema import MAX_SECONDS, Count, Procs, Refusal, Section

RESERVED_GPU_RESOURCE = "nvidia.com/gpu"
"""Kubernetes' name for the resource that ``gpus_per_host`` requests."""


class HostCounts(Section):
    """Number of hosts for each role; procs and replicas are spread evenly over them."""

    trainer: Procs = 1
    generators: Procs = 1


class HostNames(Section):
    """Names of the hosts for each role."""

    trainer: tuple[str, ...] = Field(min_length=1)
    generators: tuple[str, ...] = Field(min_length=1)


class LocalLauncher(Section):
    """Run every proc on this machine, which has one set of GPUs for all roles."""

    kind: Literal["local"] = "local"


class ProcessLauncher(Section):
    """Simulate every host by a process of this machine (``ProcessJob``), to try out many hosts; CPU only."""

    kind: Literal["process"]
    hosts: HostCounts = HostCounts()


class SshLauncher(Section):
    """Use running hosts that this user can log in to by ssh (``SSHJob``)."""

    kind: Literal["ssh"]
    hosts: HostNames
    gpus_per_host: int = Field(ge=0, le=1024)
    """0: the roles run on CPUs."""
    python: str = "python"
    """Python on the hosts, in which this package is installed."""
    ssh_args: tuple[str, ...] = ()
    """Further arguments of ssh."""
    port: int = Field(default=22222, gt=0, le=65535)
    """Port that the hosts' workers listen on."""

    def find_problems(self) -> Iterator[Refusal]:
        """Find names that ssh would misread, and hosts that are named twice."""
        for name, count in Counter([*self.hosts.trainer, *self.hosts.generators]).items():
            if count > 1:
                remedy = f"is named {count} times; a host has one role, and its worker one port"
                yield "hosts", remedy, name
            if not name or name.startswith("-"):
                remedy = "is no host name; must not be empty or begin with -"
                yield "hosts", remedy, name


class SlurmLauncher(Section):
    """Submit one sbatch job whose nodes are the hosts, each reserved exclusively (``SlurmJob``)."""

    kind: Literal["slurm"]
    hosts: HostCounts = HostCounts()
    gpus_per_host: int = Field(ge=0, le=1024)
    """0: the roles run on CPUs."""
    partition: str = Field(min_length=1)
    time_limit: str | None = Field(default=None, pattern=r"^(\d+-)?\d+(:\d+){0,2}$")
    """Time limit in sbatch's notation, such as 04:00:00; null: the partition's."""
    account: str | None = None
    qos: str | None = None
    cpus_per_task: Count | None = None
    """CPUs of each host; null: what the plan says (``forgeasync.planning.host_requests``)."""
    mem: str | None = None
    """Memory per host in sbatch's notation, such as 512G; null: what the plan says."""
    slurm_args: tuple[str, ...] = ()
    """Further #SBATCH lines, such as --constraint=h100."""
    python: str = "python"
    """Python on the hosts, in which this package is installed."""
    port: int = Field(default=22222, gt=0, le=65535)
    start_timeout_s: int | None = Field(default=None, gt=0, le=int(MAX_SECONDS))
    """How long the job may wait in the queue; if it has not started then, the run ends. null: no limit."""

    def find_problems(self) -> Iterator[Refusal]:
        """Find arguments that are no single option."""
        for argument in self.slurm_args:
            if not argument.startswith("-") or "\n" in argument:
                remedy = "must be one option of sbatch that starts with -, such as --constraint=h100"
                yield "slurm_args", remedy, argument


class KubernetesLauncher(Section):
    """Have the MonarchMesh operator start one pod for each host (``KubernetesJob``)."""

    kind: Literal["kubernetes"]
    hosts: HostCounts = HostCounts()
    gpus_per_host: int = Field(ge=0, le=1024)
    """0: the roles run on CPUs."""
    namespace: str = Field(min_length=1)
    image: str = Field(min_length=1)
    """Container image in which this package is installed for ``python``."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the MonarchMesh objects."""
    resources: dict[str, int | str] = Field(default_factory=dict)
    """Requests and limits of a pod besides its GPUs, such as {cpu: 32, memory: 512Gi}. The plan gives either
    of these two if it is missing (``forgeasync.planning.host_requests``)."""
    shared_memory_size: str | None = None
    """Size of each pod's /dev/shm, which holds payloads and weights, such as 64Gi; null: as planned."""
    port: int = Field(default=26600, gt=0, le=65535)
    kubeconfig: str | None = None
    """Path of a kubeconfig file, for a controller outside the cluster; null: the controller runs in a pod."""
    start_timeout_s: int | None = Field(default=None, gt=0, le=int(MAX_SECONDS))
    """How long pods may take to become ready; if any is not ready by then, the run ends. null: no limit."""

    def find_problems(self) -> Iterator[Refusal]:
        """Find resources that the run sets itself, and what is not installed here."""
        if RESERVED_GPU_RESOURCE in self.resources:
            yield (
                f"resources.{RESERVED_GPU_RESOURCE}",
                "is set by the run itself; give launcher.gpus_per_host instead",
                self.resources[RESERVED_GPU_RESOURCE],
            )
        if self.kubeconfig is not None and not Path(self.kubeconfig).expanduser().is_file():
            remedy = (
                "is no file; must be a kubeconfig file, or left out if the controller runs in the cluster"
            )
            yield "kubeconfig", remedy
        if importlib.util.find_spec("kubernetes") is None:
            yield "kind", "needs the kubernetes package: pip install 'forgeasync[kubernetes]'"


RemoteLauncher = ProcessLauncher | SshLauncher | SlurmLauncher | KubernetesLauncher


LauncherSection = Annotated[LocalLauncher | RemoteLauncher, Field(discriminator="kind")]


def num_hosts(launcher: RemoteLauncher) -> HostCounts:
    """Return the number of hosts for each role."""
    if isinstance(launcher, SshLauncher):
        return HostCounts(trainer=len(launcher.hosts.trainer), generators=len(launcher.hosts.generators))
    return launcher.hosts


def gpus_per_host(launcher: RemoteLauncher) -> int:
    """Return the GPUs of each host; 0: its procs run on CPUs."""
    return 0 if isinstance(launcher, ProcessLauncher) else launcher.gpus_per_host
