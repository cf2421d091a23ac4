"""Turns the launcher section of a run into one of Monarch's jobs, with a host mesh for each role.

A job has to be made before anything else of Monarch's is used: it decides by which transport procs talk.
"""

import logging
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from monarch._src.job.job import SSHJob  # not among the public names of Monarch 0.7.0
from monarch.job import JobTrait, ProcessJob, SlurmJob

from forgeasync.config import (
    RESERVED_GPU_RESOURCE,
    KubernetesLauncher,
    ProcessLauncher,
    RemoteLauncher,
    SlurmLauncher,
    SshLauncher,
    num_hosts,
)

if TYPE_CHECKING:
    from monarch.job.kubernetes import KubeConfig, KubernetesJob

MAX_KUBERNETES_NAME = 63


class HostRole(StrEnum):
    """Roles that have hosts of their own."""

    TRAINER = "trainer"
    GENERATORS = "generators"
    TEACHERS = "teachers"
    """On the controller's machine only."""


JOB_ROLES = (HostRole.TRAINER, HostRole.GENERATORS)
"""Roles that jobs have hosts for."""


def mesh_name(launcher: RemoteLauncher, run_name: str, role: HostRole) -> str:
    """What a role's host mesh is called in the job.

    In Kubernetes it is an object of the namespace, of lowercase letters and digits: there the run's name is
    part of it.
    """
    if not isinstance(launcher, KubernetesLauncher):
        return role.value
    letters = re.sub(r"[^a-z0-9]", "", run_name.lower())
    return f"run{letters}"[: MAX_KUBERNETES_NAME - len(role.value)] + role.value


def build_job(launcher: RemoteLauncher, run_name: str, log_dir: Path) -> JobTrait:
    """The job, not yet started; schedulers write their own logs into ``log_dir``."""
    # Monarch's jobs tell every step of theirs on stderr.
    logging.getLogger("monarch._src.job").setLevel(logging.WARNING)
    for name in ("job", "process", "slurm", "kubernetes"):
        logging.getLogger(f"monarch._src.job.{name}").setLevel(logging.WARNING)
    counts = num_hosts(launcher)
    by_role = {HostRole.TRAINER: counts.trainer, HostRole.GENERATORS: counts.generators}
    meshes = {mesh_name(launcher, run_name, role): count for role, count in by_role.items()}
    match launcher:
        case ProcessLauncher():
            return ProcessJob(meshes)
        case SshLauncher():
            job = SSHJob(python_exe=launcher.python, ssh_args=launcher.ssh_args, monarch_port=launcher.port)
            job.add_mesh(HostRole.TRAINER, list(launcher.hosts.trainer))
            job.add_mesh(HostRole.GENERATORS, list(launcher.hosts.generators))
            return job
        case SlurmLauncher():
            return _slurm_job(launcher, meshes, run_name, log_dir)
        case KubernetesLauncher():
            from monarch.job.kubernetes import KubeConfig

            kubeconfig = None if launcher.kubeconfig is None else KubeConfig.from_path(launcher.kubeconfig)
            return build_kubernetes_job(launcher, meshes, kubeconfig)


def _slurm_job(launcher: SlurmLauncher, meshes: dict[str, int], run_name: str, log_dir: Path) -> SlurmJob:
    return SlurmJob(
        meshes,
        python_exe=launcher.python,
        # Slurm starts a batch job again that has lost a node. Its hosts would wait for nobody: a run that has
        # lost hosts asks for a new job.
        slurm_args=("--no-requeue", *launcher.slurm_args),
        monarch_port=launcher.port,
        job_name=run_name,
        time_limit=launcher.time_limit,
        partition=launcher.partition,
        log_dir=str(log_dir),
        gpus_per_node=launcher.gpus_per_host or None,
        cpus_per_task=launcher.cpus_per_task,
        mem=launcher.mem,
        # Ours, which can say why (``Submission``).
        job_start_timeout=None,
        account=launcher.account,
        qos=launcher.qos,
    )


def build_kubernetes_job(
    launcher: KubernetesLauncher, meshes: dict[str, int], kubeconfig: "KubeConfig | None"
) -> "KubernetesJob":
    """The same with another way to the cluster than the launcher's own."""
    # Needs the kubernetes package, which other launchers do without.
    from monarch.job.kubernetes import ImageSpec, KubernetesJob

    gpus = {RESERVED_GPU_RESOURCE: launcher.gpus_per_host} if launcher.gpus_per_host else {}
    job = KubernetesJob(launcher.namespace, timeout=launcher.start_timeout_s, kubeconfig=kubeconfig)
    for name, count in meshes.items():
        job.add_mesh(
            name,
            count,
            image_spec=ImageSpec(
                launcher.image,
                resources={**launcher.resources, **gpus} or None,
                shared_memory_size=launcher.shared_memory_size,
            ),
            port=launcher.port,
            labels=dict(launcher.labels) or None,
        )
    return job
