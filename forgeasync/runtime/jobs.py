"""Monarch's jobs, which start the hosts of a run: prerequisites, construction, life cycle, and a dry run.

Create a job before you use anything else of Monarch, because the job chooses the transport of processes.

Monarch 0.7.0 reports problems late or never. With Slurm before 24.05 it reports a job as ended right after
submission. If hosts cannot reach the controller, or ssh fails, it waits forever. Therefore
``check_prerequisites`` runs first, and ``Submission`` reports the problems of Slurm or ssh.
"""

import asyncio
import concurrent.futures
import ipaddress
import json
import logging
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import yaml
from monarch._src.job.job import (
    LoginJob,  # not among the public names of Monarch 0.7.0
    SSHJob,  # not among the public names of Monarch 0.7.0
)
from monarch.job import JobState, JobTrait, ProcessJob, SlurmJob

from forgeasync.config import (
    RESERVED_GPU_RESOURCE,
    KubernetesLauncher,
    LocalLauncher,
    ProcessLauncher,
    RemoteLauncher,
    RunConfig,
    SlurmLauncher,
    SshLauncher,
    num_hosts,
)
from forgeasync.processes import is_running
from forgeasync.schema import Problem
from forgeasync.waiting import DeadlineExceeded, deadline

if TYPE_CHECKING:
    from monarch.job.kubernetes import KubeConfig, KubernetesJob

MAX_KUBERNETES_NAME = 63


class HostRole(StrEnum):
    """Roles that have their own hosts."""

    TRAINER = "trainer"
    GENERATORS = "generators"
    TEACHERS = "teachers"
    """Teachers run only on the controller's machine."""


JOB_ROLES = (HostRole.TRAINER, HostRole.GENERATORS)
"""Roles whose hosts are started by a job."""


def mesh_name(launcher: RemoteLauncher, run_name: str, role: HostRole) -> str:
    """Return the name of a role's host mesh in the job.

    In Kubernetes a mesh is an object of the namespace, so its name includes the run's name, in lowercase
    letters and digits.
    """
    if not isinstance(launcher, KubernetesLauncher):
        return role.value
    letters = re.sub(r"[^a-z0-9]", "", run_name.lower())
    return f"run{letters}"[: MAX_KUBERNETES_NAME - len(role.value)] + role.value


def build_job(launcher: RemoteLauncher, run_name: str, log_dir: Path) -> JobTrait:
    """Create the job without starting it; schedulers write their own logs to ``log_dir``."""
    # Monarch's jobs log every step on stderr.
    logging.getLogger("monarch._src.job").setLevel(logging.WARNING)
    for name in ("job", "process", "slurm", "kubernetes"):
        logging.getLogger(f"monarch._src.job.{name}").setLevel(logging.WARNING)
    meshes = _meshes(launcher, run_name)
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
            return _kubernetes_job(launcher, meshes, kubeconfig)


def _meshes(launcher: RemoteLauncher, run_name: str) -> dict[str, int]:
    """Return the number of hosts in each mesh of a job, by the mesh's name."""
    counts = num_hosts(launcher)
    by_role = {HostRole.TRAINER: counts.trainer, HostRole.GENERATORS: counts.generators}
    return {mesh_name(launcher, run_name, role): count for role, count in by_role.items()}


def _slurm_job(launcher: SlurmLauncher, meshes: dict[str, int], run_name: str, log_dir: Path) -> SlurmJob:
    return SlurmJob(
        meshes,
        python_exe=launcher.python,
        # Slurm requeues a batch job that has lost a node, but no run would use those hosts: a run that has
        # lost hosts submits a new job.
        slurm_args=("--no-requeue", *launcher.slurm_args),
        monarch_port=launcher.port,
        job_name=run_name,
        time_limit=launcher.time_limit,
        partition=launcher.partition,
        log_dir=str(log_dir),
        gpus_per_node=launcher.gpus_per_host or None,
        cpus_per_task=launcher.cpus_per_task,
        mem=launcher.mem,
        # ``Submission`` has its own deadline, which reports the reason.
        job_start_timeout=None,
        account=launcher.account,
        qos=launcher.qos,
    )


def _kubernetes_job(
    launcher: KubernetesLauncher, meshes: dict[str, int], kubeconfig: "KubeConfig | None"
) -> "KubernetesJob":
    # Only this launcher needs the kubernetes package.
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


COMMANDS = {"slurm": ("sbatch", "squeue", "scancel"), "ssh": ("ssh",)}
"""Commands that Monarch's jobs call, by kind of launcher."""

MIN_DATA_PARSER = 41
"""First version of ``squeue --json`` with ``job_resources.nodes.allocation``, which Monarch 0.7.0 reads.

v0.0.41 came with Slurm 24.05 (``src/plugins/data_parser/v0.0.41/parsers.c``, "nodes/allocation"). v0.0.40 of
Slurm 23.11 has ``allocated_nodes`` instead. Versions up to v0.0.46 keep ``allocation``.
"""

MIN_SLURM = "24.05"

CHECK_S = 60.0
"""Time limit of the first query to Slurm, in seconds. Slurm's commands give up after 10 s by default
(MessageTimeout), some of them after a retry."""


def check_prerequisites(launcher: LocalLauncher | RemoteLauncher) -> list[Problem]:
    """Return what prevents this machine from using ``launcher``. Queries Slurm, starts nothing."""
    if isinstance(launcher, LocalLauncher | ProcessLauncher | KubernetesLauncher):
        # The first two run on this machine; for pods see ``KubernetesLauncher.kubeconfig``.
        return []
    problems = list(_check_commands(launcher.kind))
    if isinstance(launcher, SlurmLauncher) and not problems:
        problems += _check_slurm()
    if isinstance(launcher, SlurmLauncher) or not _all_here(launcher):
        problems += _check_own_name(launcher.kind)
    return problems


def _check_commands(kind: str) -> Iterator[Problem]:
    absent = [command for command in COMMANDS[kind] if shutil.which(command) is None]
    if absent:
        client = "Slurm's client commands" if kind == "slurm" else "OpenSSH's client"
        remedy = (
            f"needs {', '.join(absent)}, which no folder of PATH has; install {client} on this machine, or "
            "start the run on one that has them"
        )
        yield Problem(field="launcher.kind", value=kind, remedy=remedy)


def _check_slurm() -> Iterator[Problem]:
    try:
        # Only the format matters, so request only this user's jobs.
        squeue = subprocess.run(
            ["squeue", "--me", "--json"], capture_output=True, text=True, check=False, timeout=CHECK_S
        )
    except subprocess.TimeoutExpired:
        yield _slurm_problem(f"squeue --json has not answered within {CHECK_S:.0f} s; is slurmctld up?")
        return
    if squeue.returncode != 0:
        words = " ".join(squeue.stderr.split()) or f"exit code {squeue.returncode}"
        yield _slurm_problem(f"squeue --json fails on this machine: {words}")
        return
    form = _data_parser(squeue.stdout)
    if form is None or form < MIN_DATA_PARSER:
        printed = "without the number of its form" if form is None else f"in the form v0.0.{form}"
        yield _slurm_problem(
            f"{_release()} prints jobs {printed}, but Monarch reads v0.0.{MIN_DATA_PARSER} and later, which "
            f"Slurm has from {MIN_SLURM} on; use a cluster with such a release, or reserve nodes with "
            "salloc and name them in launcher: {kind: ssh, ...}"
        )


def _slurm_problem(remedy: str) -> Problem:
    return Problem(field="launcher.kind", value="slurm", remedy=remedy)


def _data_parser(text: str) -> int | None:
    """Return the last number of ``meta.plugin.data_parser`` (41 of data_parser/v0.0.41), or None."""
    try:
        parser = json.loads(text)["meta"]["plugin"]["data_parser"]
    except (ValueError, KeyError, TypeError):
        return None
    match = re.search(r"v0\.0\.(\d+)", str(parser))
    return None if match is None else int(match[1])


def _release() -> str:
    command = ["squeue", "--version"]
    squeue = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CHECK_S)
    return squeue.stdout.strip().replace("slurm", "Slurm", 1) or "this Slurm"


def _check_own_name(kind: str) -> Iterator[Problem]:
    """Yield a problem if the controller's host name has only loopback addresses or none.

    Hosts connect to an address of that name (Monarch 0.7.0: TcpWithHostname). If the name has several
    addresses, Monarch uses one that is not loopback.
    """
    name = socket.gethostname()
    try:
        addresses = _addresses(name)
    except socket.gaierror as error:
        problem = f"no address ({error.strerror})"
    else:
        if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
            return
        problem = f"{', '.join(addresses)} only, which no other machine can reach"
    remedy = (
        f"hosts call this machine by the address of its name, but {name!r} has {problem}; give the name the "
        "address of this machine's network in /etc/hosts (ip address shows it), or start the run on a "
        "machine whose name has one"
    )
    yield Problem(field="launcher.kind", value=kind, remedy=remedy)


def _addresses(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    # An IPv6 address may include its interface.
    return sorted({str(address[0]).partition("%")[0] for *_, address in found})


def _all_here(launcher: SshLauncher) -> bool:
    """Return whether the name of each host is an address of this machine's loopback interface."""
    for name in (*launcher.hosts.trainer, *launcher.hosts.generators):
        try:
            addresses = _addresses(name.rpartition("@")[2])
        except socket.gaierror:
            # The name may be defined in ssh's own configuration.
            return False
        if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
            return False
    return True


ASK_S = 30.0
"""Time limit of Slurm's commands while a job exists, in seconds."""

TELL_S = 15.0
"""Seconds between two queries of why a job is still in the queue."""

SUBMIT_S = 60.0
"""Time that the end of a run waits for a submission in progress, to cancel its job, in seconds."""

ENDINGS = {
    "CANCELLED": "was cancelled by someone other than this run (scancel)",
    "TIMEOUT": "has reached its time limit (launcher.time_limit, or the partition's)",
    "PREEMPTED": "was preempted by another job",
    "NODE_FAIL": "has lost a node",
    "OUT_OF_MEMORY": "has used more memory than it requested (launcher.mem)",
    "FAILED": "has failed",
    "BOOT_FAIL": "has failed: a node did not boot",
    "DEADLINE": "has reached its deadline",
    "COMPLETED": "has ended",
}
"""Description of each final state of a Slurm job (squeue(1), JOB STATE CODES)."""

REQUEUED = "was put back into the queue (scontrol requeue), which ends its hosts"
"""Description of a job that is pending again after its hosts had started."""

logger = logging.getLogger(__name__)


class LaunchFailed(RuntimeError):
    """The hosts of a run did not start, or their job has ended."""


class Submission:
    """One job, from submission to its end."""

    def __init__(self, job: JobTrait, launcher: RemoteLauncher, log_dir: Path) -> None:
        """``log_dir`` gets the scheduler's own logs, and the output of ssh."""
        self._job = job
        self._log_dir = log_dir
        self._launcher = launcher
        self._submitted = threading.Event()
        self._slurm_id: str | None = None
        self._is_started = False
        self._has_hosts = False

    async def start(self, tell: Callable[[str], None]) -> JobState:
        """Submit the job and wait for its hosts, which can take hours in a scheduler's queue.

        ``tell`` is called with the reason that Slurm gives for waiting, each time it changes.

        Raises:
            LaunchFailed: the job was refused, has not started within ``launcher.start_timeout_s``, or has
                ended.
        """
        self._is_started = True
        waiting = asyncio.wrap_future(_in_thread(self._run))
        if not isinstance(self._launcher, SlurmLauncher):
            return await waiting
        limit_s = self._launcher.start_timeout_s
        try:
            if limit_s is None:
                return await self._wait(waiting, tell)
            async with deadline(limit_s, call="the queue", key="launcher.start_timeout_s"):
                return await self._wait(waiting, tell)
        except DeadlineExceeded as late:
            raise LaunchFailed(
                f"{self._name} has not started within {limit_s} s (launcher.start_timeout_s): it is "
                f"{await self._state_and_reason()}. It was cancelled. Allow more time, or request "
                f"less: it needs {_total_hosts(self._launcher)} nodes of partition {self._launcher.partition}"
            ) from late
        except RuntimeError as error:
            await self.require_present()
            # Monarch's message includes the output of sbatch.
            raise LaunchFailed(str(error)) from error

    async def _wait(self, waiting: asyncio.Future[JobState], tell: Callable[[str], None]) -> JobState:
        last = ""
        while not (await asyncio.wait([waiting], timeout=TELL_S))[0]:
            if (state := await self._state_and_reason()) != last:
                tell(f"{self._name} is {state}")
                last = state
        return await waiting

    def _run(self) -> JobState:
        try:
            self._job.apply()
            if isinstance(self._job, SlurmJob):
                self._slurm_id = self._job._slurm_job_id
        finally:
            self._submitted.set()
        state = self._job.state(cached_path=None)
        self._has_hosts = True
        return state

    async def require_present(self) -> None:
        """Check that the job exists, while its hosts start.

        Raises:
            LaunchFailed: the job has ended.
        """
        if (words := await self.describe_end()) is not None:
            raise LaunchFailed(f"{words} before all hosts had started; see {self._log_dir}")

    async def describe_end(self) -> str | None:
        """Return a description of the job's end; None if it exists, as far as this machine can tell."""
        if isinstance(self._job, SlurmJob) and self._slurm_id is not None:
            state = (await self._state_and_reason()).split(" ")[0]
            if state == "PENDING" and self._has_hosts:
                return f"{self._name} {REQUEUED}"
            return f"{self._name} {ENDINGS[state]}" if state in ENDINGS else None
        if isinstance(self._job, LoginJob):
            ended = [name for name, one in self._job._host_to_pid.items() if not is_running(one.pid)]
            if ended:
                return f"ssh to {', '.join(ended)} has ended"
        return None

    @property
    def _name(self) -> str:
        return f"Slurm job {self._slurm_id}" if self._slurm_id is not None else "the Slurm job"

    async def _state_and_reason(self) -> str:
        """Return the state and the reason that Slurm prints, such as "PENDING (Resources)"."""
        if self._slurm_id is None:
            return "not submitted yet"
        format_ = "--format=%T (%r)"
        command = ["squeue", "--noheader", "--states=all", "--jobs", self._slurm_id, format_]
        try:
            squeue = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, check=False, timeout=ASK_S
            )
        except subprocess.TimeoutExpired:
            return f"in a state that squeue has not reported within {ASK_S:.0f} s"
        # Slurm drops a job a few minutes after its end (MinJobAge).
        return squeue.stdout.strip() or f"unknown to squeue ({' '.join(squeue.stderr.split())})"

    async def end(self) -> None:
        """Cancel the job, even if it is still being submitted; a second call does nothing."""
        if self._is_started:
            if not await asyncio.to_thread(self._submitted.wait, SUBMIT_S):
                logger.warning("the job was still being submitted after %.0f s, and may stay", SUBMIT_S)
            await asyncio.to_thread(self._job.kill)


def _total_hosts(launcher: RemoteLauncher) -> int:
    counts = num_hosts(launcher)
    return counts.trainer + counts.generators


def _in_thread(run: Callable[[], JobState]) -> "concurrent.futures.Future[JobState]":
    """Run in a daemon thread, so that Ctrl-C does not wait for a scheduler."""
    started: concurrent.futures.Future[JobState] = concurrent.futures.Future()
    # A running future cannot be cancelled.
    started.set_running_or_notify_cancel()

    def start() -> None:
        try:
            started.set_result(run())
        except BaseException as error:
            started.set_exception(error)

    threading.Thread(target=start, name="job", daemon=True).start()
    return started


PLANNED_LOGS = "runs/<name>-<time>/logs"
"""Log folder in the output of a dry run, for a config without ``run_dir``."""


def render_launch(config: RunConfig) -> str | None:
    """Return the script, commands or manifests that start the hosts of a checked config; None for local ones.

    Nothing is submitted. Monarch's jobs run, but calls of commands and of the Kubernetes API are recorded
    instead of made.
    """
    launcher = config.launcher
    match launcher:
        case LocalLauncher():
            return None
        case ProcessLauncher():
            return f"{_total_hosts(launcher)} host processes on this machine"
        case SshLauncher():
            return "\n".join(_commands(config, launcher))
        case SlurmLauncher():
            (script,) = _commands(config, launcher)
            return script
        case KubernetesLauncher():
            return yaml.safe_dump_all(_manifests(config, launcher), sort_keys=False)


def _commands(config: RunConfig, launcher: SshLauncher | SlurmLauncher) -> list[str]:
    """Return the commands that the job runs, in order: the input of sbatch, or the command lines of ssh."""
    sent: list[str] = []

    def run(command: list[str], *, input: str, **options: object) -> subprocess.CompletedProcess[str]:
        sent.append(input)
        return subprocess.CompletedProcess(command, 0, stdout="Submitted batch job 0")

    def popen(command: list[str], **options: object) -> mock.Mock:
        sent.append(shlex.join(command))
        return mock.Mock(pid=sys.maxsize)

    with (
        tempfile.TemporaryDirectory() as logs,
        mock.patch.object(subprocess, "run", run),
        mock.patch.object(subprocess, "Popen", popen),
    ):
        build_job(launcher, config.name, Path(logs)).apply()
    planned = PLANNED_LOGS if config.run_dir is None else str(Path(config.run_dir) / "logs")
    return [one.replace(logs, planned) for one in sent]


def _manifests(config: RunConfig, launcher: KubernetesLauncher) -> list[dict[str, object]]:
    """Return the MonarchMesh objects that the job creates."""
    from kubernetes.client import ApiException, Configuration, CustomObjectsApi
    from monarch.job.kubernetes import KubeConfig

    kubeconfig = KubeConfig.from_config(Configuration())
    job = _kubernetes_job(launcher, _meshes(launcher, config.name), kubeconfig)
    created: list[str] = []
    absent = mock.Mock(side_effect=ApiException(status=HTTPStatus.NOT_FOUND))
    with (
        mock.patch.object(CustomObjectsApi, "get_namespaced_custom_object", absent),
        mock.patch.object(CustomObjectsApi, "create_namespaced_custom_object") as create,
    ):
        create.side_effect = lambda **sent: created.append(json.dumps(sent["body"]))
        job.apply()
    return [json.loads(body) for body in created]
