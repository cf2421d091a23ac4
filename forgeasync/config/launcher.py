"""Where the roles of a run are placed: on this machine, or on hosts that one of Monarch's job APIs starts.

Trainer and generators have hosts of their own; the controller, the scorer, the replay buffer and torchstore's
volume stay on the machine where the run is started. Fields are those that Monarch's jobs take.
"""

from typing import Annotated, Literal

from pydantic import Field

from forgeasync.schema.section import MAX_SECONDS, Count, Procs, Section

RESERVED_GPU_RESOURCE = "nvidia.com/gpu"
"""What ``gpus_per_host`` is called in Kubernetes."""


class HostCounts(Section):
    """Hosts of each role; procs and replicas are spread evenly over them."""

    trainer: Procs = 1
    generators: Procs = 1


class HostNames(Section):
    """Hosts of each role by name."""

    trainer: tuple[str, ...] = Field(min_length=1)
    generators: tuple[str, ...] = Field(min_length=1)


class LocalLauncher(Section):
    """Every proc on this machine, which has one set of GPUs for all roles."""

    kind: Literal["local"] = "local"


class ProcessLauncher(Section):
    """Every host is a process of this machine (``ProcessJob``): many hosts tried out on one; CPU only."""

    kind: Literal["process"]
    hosts: HostCounts = HostCounts()


class SshLauncher(Section):
    """Hosts that are there already and let this user in (``SSHJob``)."""

    kind: Literal["ssh"]
    hosts: HostNames
    gpus_per_host: int = Field(ge=0, le=1024)
    """0: the roles run on CPUs."""
    python: str = "python"
    """Python on the hosts, in which this package is installed."""
    ssh_args: tuple[str, ...] = ()
    """Further arguments of ssh."""
    port: int = Field(default=22222, gt=0, le=65535)
    """Where the hosts' workers listen."""


class SlurmLauncher(Section):
    """One sbatch job whose nodes are the hosts, each of them exclusively (``SlurmJob``)."""

    kind: Literal["slurm"]
    hosts: HostCounts = HostCounts()
    gpus_per_host: int = Field(ge=0, le=1024)
    """0: the roles run on CPUs."""
    partition: str = Field(min_length=1)
    time_limit: str | None = Field(default=None, pattern=r"^(\d+-)?\d+(:\d+){0,2}$")
    """In sbatch's notation, such as 04:00:00; null: the partition's."""
    account: str | None = None
    qos: str | None = None
    cpus_per_task: Count | None = None
    mem: str | None = None
    """Memory of a host in sbatch's notation, such as 512G."""
    slurm_args: tuple[str, ...] = ()
    """Further #SBATCH lines, such as --constraint=h100."""
    python: str = "python"
    """Python on the hosts, in which this package is installed."""
    port: int = Field(default=22222, gt=0, le=65535)
    start_timeout_s: int | None = Field(default=None, gt=0, le=int(MAX_SECONDS))
    """The run ends when the job has not started by then; null: it waits."""


class KubernetesLauncher(Section):
    """Pods that the MonarchMesh operator makes, one a host (``KubernetesJob``)."""

    kind: Literal["kubernetes"]
    hosts: HostCounts = HostCounts()
    gpus_per_host: int = Field(ge=0, le=1024)
    """0: the roles run on CPUs."""
    namespace: str = Field(min_length=1)
    image: str = Field(min_length=1)
    """In which this package is installed for ``python``."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Of the MonarchMesh objects."""
    resources: dict[str, int | str] = Field(default_factory=dict)
    """Requests and limits of a pod besides its GPUs, such as {cpu: 32, memory: 512Gi}."""
    shared_memory_size: str | None = None
    """Size of a pod's /dev/shm, such as 64Gi, where payloads and weights lie; null: the cluster's default."""
    port: int = Field(default=26600, gt=0, le=65535)
    kubeconfig: str | None = None
    """A kubeconfig file, for a controller outside of the cluster; null: it runs in a pod."""
    start_timeout_s: int | None = Field(default=None, gt=0, le=int(MAX_SECONDS))
    """The run ends when a role's pods are not ready by then; null: it waits."""


RemoteLauncher = ProcessLauncher | SshLauncher | SlurmLauncher | KubernetesLauncher


LauncherSection = Annotated[LocalLauncher | RemoteLauncher, Field(discriminator="kind")]


def num_hosts(launcher: RemoteLauncher) -> HostCounts:
    """Hosts of each role."""
    if isinstance(launcher, SshLauncher):
        return HostCounts(trainer=len(launcher.hosts.trainer), generators=len(launcher.hosts.generators))
    return launcher.hosts


def gpus_per_host(launcher: RemoteLauncher) -> int:
    """GPUs that a host has for its one role; 0: its procs run on CPUs."""
    return 0 if isinstance(launcher, ProcessLauncher) else launcher.gpus_per_host
