"""Section ``launcher``: runs the roles of a run on this machine, or on hosts started by a Monarch job.

Trainer and generators have separate hosts. The controller, the scorer, the replay buffer and torchstore's
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
"""Name of the Kubernetes resource that ``gpus_per_host`` requests."""


class HostCounts(Section):
    """Number of hosts for each role; processes and replicas are spread evenly over them."""

    trainer: Procs = 1
    """Number of hosts of the trainer."""
    generators: Procs = 1
    """Number of hosts of the generators."""


class HostNames(Section):
    """Names of the hosts for each role."""

    trainer: tuple[str, ...] = Field(min_length=1)
    """Names of the trainer's hosts."""
    generators: tuple[str, ...] = Field(min_length=1)
    """Names of the generators' hosts."""


class LocalLauncher(Section):
    """Run all processes on this machine."""

    kind: Literal["local"] = "local"
    share_gpu: bool = False
    """Run the trainer and the generators on the same GPUs, whose memory must hold both; the trainer starts
    first. false: every process has its own GPUs."""


class ProcessLauncher(Section):
    """Simulate each host by a process on this machine (``ProcessJob``), to test with many hosts; CPU only."""

    kind: Literal["process"]
    hosts: HostCounts = HostCounts()


class SshLauncher(Section):
    """Use running hosts that this user can log in to by ssh (``SSHJob``)."""

    kind: Literal["ssh"]
    hosts: HostNames
    gpus_per_host: int = Field(ge=0, le=1024)
    """GPUs of each host; 0: the roles run on CPUs."""
    python: str = "python"
    """Command of the Python on the hosts in which this package is installed."""
    ssh_args: tuple[str, ...] = ()
    """Additional arguments of ssh."""
    port: int = Field(default=22222, gt=0, le=65535)
    """Port that the hosts' workers listen on."""

    def find_problems(self) -> Iterator[Refusal]:
        """Yield names that ssh would misread, and hosts that are named twice."""
        for name, count in Counter([*self.hosts.trainer, *self.hosts.generators]).items():
            if count > 1:
                remedy = f"is named {count} times; a host has one role, and its worker one port"
                yield "hosts", remedy, name
            if not name or name.startswith("-"):
                remedy = "is not a host name; must not be empty or begin with -"
                yield "hosts", remedy, name


class SlurmLauncher(Section):
    """Submit one sbatch job whose nodes are the hosts, each reserved exclusively (``SlurmJob``)."""

    kind: Literal["slurm"]
    hosts: HostCounts = HostCounts()
    gpus_per_host: int = Field(ge=0, le=1024)
    """GPUs of each host; 0: the roles run on CPUs."""
    partition: str = Field(min_length=1)
    """Partition in which Slurm starts the job."""
    time_limit: str | None = Field(default=None, pattern=r"^(\d+-)?\d+(:\d+){0,2}$")
    """Time limit in sbatch's notation, such as 04:00:00; null: the partition's default."""
    account: str | None = None
    """Account that Slurm charges; null: the user's default."""
    qos: str | None = None
    """Quality of service of the job; null: the user's default."""
    cpus_per_task: Count | None = None
    """CPUs of each host; null: the plan's number (``forgeasync.planning.host_requests``)."""
    mem: str | None = None
    """Memory per host in sbatch's notation, such as 512G; null: the plan's amount."""
    slurm_args: tuple[str, ...] = ()
    """Additional #SBATCH options, such as --constraint=h100."""
    python: str = "python"
    """Command of the Python on the hosts in which this package is installed."""
    port: int = Field(default=22222, gt=0, le=65535)
    """Port that the hosts' workers listen on."""
    start_timeout_s: int | None = Field(default=None, gt=0, le=int(MAX_SECONDS))
    """Time limit for the job to start, in seconds; if it is still in the queue then, the run ends. null: no
    limit."""

    def find_problems(self) -> Iterator[Refusal]:
        """Yield arguments that are not a single option."""
        for argument in self.slurm_args:
            if not argument.startswith("-") or "\n" in argument:
                remedy = "must be one option of sbatch that starts with -, such as --constraint=h100"
                yield "slurm_args", remedy, argument


class KubernetesLauncher(Section):
    """Start one pod per host through the MonarchMesh operator (``KubernetesJob``)."""

    kind: Literal["kubernetes"]
    hosts: HostCounts = HostCounts()
    gpus_per_host: int = Field(ge=0, le=1024)
    """GPUs of each host; 0: the roles run on CPUs."""
    namespace: str = Field(min_length=1)
    """Namespace of the pods."""
    image: str = Field(min_length=1)
    """Container image whose ``python`` has this package installed."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the MonarchMesh objects."""
    resources: dict[str, int | str] = Field(default_factory=dict)
    """Requests and limits of a pod besides its GPUs, such as {cpu: 32, memory: 512Gi}. The plan sets cpu and
    memory if they are missing (``forgeasync.planning.host_requests``)."""
    shared_memory_size: str | None = None
    """Size of each pod's /dev/shm, which holds payloads and weights, such as 64Gi; null: the plan's size."""
    port: int = Field(default=26600, gt=0, le=65535)
    """Port that the hosts' workers listen on."""
    kubeconfig: str | None = None
    """Path of a kubeconfig file, for a controller outside the cluster; null: the controller runs in a pod."""
    start_timeout_s: int | None = Field(default=None, gt=0, le=int(MAX_SECONDS))
    """Time limit for all pods to become ready, in seconds; after it the run ends. null: no limit."""

    def find_problems(self) -> Iterator[Refusal]:
        """Yield resources that the run sets itself, a missing kubeconfig and a missing package."""
        if RESERVED_GPU_RESOURCE in self.resources:
            yield (
                f"resources.{RESERVED_GPU_RESOURCE}",
                "is set by the run itself; give launcher.gpus_per_host instead",
                self.resources[RESERVED_GPU_RESOURCE],
            )
        if self.kubeconfig is not None and not Path(self.kubeconfig).expanduser().is_file():
            remedy = (
                "is not a file; must be a kubeconfig file, or left out if the controller runs in the cluster"
            )
            yield "kubeconfig", remedy
        if importlib.util.find_spec("kubernetes") is None:
            yield "kind", "needs the kubernetes package: pip install 'forgeasync[kubernetes]'"


RemoteLauncher = ProcessLauncher | SshLauncher | SlurmLauncher | KubernetesLauncher
"""Launchers that start processes on hosts other than the controller's."""


LauncherSection = Annotated[LocalLauncher | RemoteLauncher, Field(discriminator="kind")]


def num_hosts(launcher: RemoteLauncher) -> HostCounts:
    """Return the number of hosts for each role."""
    if isinstance(launcher, SshLauncher):
        return HostCounts(trainer=len(launcher.hosts.trainer), generators=len(launcher.hosts.generators))
    return launcher.hosts


def gpus_per_host(launcher: RemoteLauncher) -> int:
    """Return the number of GPUs of each host; 0: its processes run on CPUs."""
    return 0 if isinstance(launcher, ProcessLauncher) else launcher.gpus_per_host
