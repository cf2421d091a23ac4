"""Hosts that one of Monarch's jobs starts, with an agent on each of them.

Monarch 0.7.0 does not report the loss of a host: there is no supervision event within 90 s, and calls hang.
Hosts also outlive a killed controller. Therefore the controller calls every agent periodically, and an agent
whose calls stop ends its host.
"""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, HostMesh, ProcMesh, concurrent_endpoint

from forgeasync.config import (
    KubernetesLauncher,
    LocalLauncher,
    ProcessLauncher,
    RemoteLauncher,
    RunConfig,
    SlurmLauncher,
    SshLauncher,
    TimeoutSection,
    gpus_per_host,
    places_of,
    reward_gpus,
)
from forgeasync.observability import redirect_process_output
from forgeasync.processes import is_running
from forgeasync.rollouts import InFlightRead, sweep_stale_folders
from forgeasync.runtime.bootstrap_main import HOST_DEVICES_VARIABLE
from forgeasync.runtime.host_checks import GpuFacts, HostLimits, gather_gpu_facts, gather_host_limits
from forgeasync.runtime.hosts import HostLost, LocalHost, LocalHosts, stop
from forgeasync.runtime.jobs import (
    JOB_ROLES,
    HostRole,
    LaunchFailed,
    Submission,
    build_job,
    mesh_name,
)
from forgeasync.runtime.placement import GpuAllocator, spawn_role
from forgeasync.runtime.supervised import call_limit
from forgeasync.waiting import DeadlineExceeded, deadline, forget

BEAT_S = 1.0
"""Seconds between two heartbeats."""
LOOK_S = 0.5
"""Seconds between two checks that a host's process exists, during a call to its agent."""
ASK_JOB_S = 5.0
"""Seconds between two checks of the job while its hosts start."""
CLOSE_S = 20.0
"""Time limit of each step of closing hosts, in seconds."""
SILENCE_FACTOR = 2.0
"""A host waits this many times longer than the controller, so that the controller reports a loss first."""
WATCH_S = 1.0
"""Seconds between an agent's checks that it is still being called."""
ANSWER_S = 1.0
"""Seconds between an answer and the end of its host, so that the answer arrives."""

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def build_hosts(config: RunConfig, log_dir: Path) -> "Hosts":
    """Create the hosts of a run's launcher, before Monarch is used; they are not yet started."""
    if isinstance(config.launcher, LocalLauncher):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        reserved = places_of(reward_gpus(config), visible)
        return LocalHosts(reserved_gpus=reserved, share_gpu=config.launcher.share_gpu)
    return JobHosts(config.launcher, config.name, log_dir, config.timeouts)


class HostAgent(Actor):
    """One process on every host of a job, until the run ends."""

    def __init__(self, log_file: Path, max_silence_s: float) -> None:
        """After ``max_silence_s`` without a call, the agent ends this host with all its processes."""
        redirect_process_output(log_file)
        self._host = LocalHost("", [])
        self._max_silence_s = max_silence_s
        self._heard_s = time.monotonic()
        sweep_stale_folders()
        threading.Thread(target=self._watch, name="silence", daemon=True).start()

    @concurrent_endpoint
    async def beat(self) -> int:
        """Record that the controller is alive; return the process id of this host's worker."""
        self._heard_s = time.monotonic()
        return os.getppid()

    @concurrent_endpoint
    async def limits(self) -> HostLimits:
        """Return the memory and the limits of this host."""
        return gather_host_limits()

    @concurrent_endpoint
    async def gpus(self) -> GpuFacts:
        """Return the GPUs that this host's processes may use; the agent itself sees none of them."""
        # In a thread, because the driver may be slow.
        return await asyncio.to_thread(gather_gpu_facts, os.environ.get(HOST_DEVICES_VARIABLE))

    @concurrent_endpoint
    async def on_host(self, method: Callable[..., Coroutine[Any, Any, R]], arguments: tuple[Any, ...]) -> R:
        """Call a method of this machine's ``LocalHost``."""
        return await method(self._host, *arguments)

    @concurrent_endpoint
    async def remove_folders(self) -> None:
        """Remove all of this run's folders from the host's shared memory."""
        self._host.remove_folders()

    @concurrent_endpoint
    async def end_host(self) -> None:
        """End this host's worker with all its processes, after this call was answered."""
        try:
            self._host.remove_folders()
        finally:
            threading.Timer(ANSWER_S, _end_host).start()

    def _watch(self) -> None:
        while time.monotonic() - self._heard_s < self._max_silence_s:
            time.sleep(WATCH_S)
        print(f"no controller has called for {self._max_silence_s:.0f} s: this host ends")
        try:
            self._host.remove_folders()
        finally:
            _end_host()


def _end_host() -> None:
    # The processes of a host end with the worker, which started them.
    worker = os.getppid()
    # In a pod the worker is process 1, and the kernel ignores SIGKILL from inside the pod. SIGINT ends it:
    # Python handles it, and Monarch's loop checks for it.
    os.kill(worker, signal.SIGINT if worker == 1 else signal.SIGKILL)


@dataclass(slots=True, kw_only=True)
class JobHost:
    """One host of a job."""

    id: str
    role: HostRole
    agent: HostAgent
    log_file: Path
    worker_pid: int = 0
    """Process id, on that host, of the worker that started the host's processes."""
    limits: HostLimits | None = None
    """Memory and limits; None until its agent has answered."""
    heard_s: float = field(default_factory=time.monotonic)
    """Time of its last answer."""
    problem: str | None = None
    """Description of its loss; None if it is not lost."""

    @property
    def is_lost(self) -> bool:
        """Whether the host is lost."""
        return self.problem is not None

    @property
    def name(self) -> str:
        """Name in messages, with the machine's host name."""
        machine = None if self.limits is None else self.limits.machine
        place = self.role if machine in (None, self.id) else f"{self.role}, {machine}"
        return f"{self.id} ({place})"

    async def make_folder(self, num_bytes: int) -> Path:
        """See ``LocalHost``."""
        try:
            return await self._call(LocalHost.make_folder, num_bytes)
        except ActorError as error:
            if isinstance(error.exception, ValueError):
                raise ValueError(f"host {self.id}: {error.exception}") from error
            raise

    async def is_running(self, pid: int) -> bool:
        """See ``LocalHost``."""
        return await self._call(LocalHost.is_running, pid)

    async def kill(self, pid: int) -> None:
        """See ``LocalHost``; the processes of a lost host end with it."""
        if not self.is_lost:
            await self._call(LocalHost.kill, pid)

    async def read_stacks(self, pid: int) -> str:
        """See ``LocalHost``."""
        return await self._call(LocalHost.read_stacks, pid)

    async def remove_files(self, files: Sequence[str]) -> None:
        """See ``LocalHost``."""
        await self._call(LocalHost.remove_files, list(files))

    async def read_in_flight(self, folder: Path, group_ids: Sequence[int]) -> InFlightRead:
        """See ``LocalHost``."""
        return await self._call(LocalHost.read_in_flight, folder, group_ids)

    async def remove_in_flight(self, folder: Path) -> None:
        """See ``LocalHost``."""
        await self._call(LocalHost.remove_in_flight, folder)

    async def keep_group(self, target: Path, facts: bytes, source: str) -> str | None:
        """See ``LocalHost``."""
        return await self._call(LocalHost.keep_group, target, facts, source)

    async def _call(
        self,
        method: Callable[Concatenate[LocalHost, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        assert not kwargs
        answer: R = await self.agent.on_host.call_one(method, args)
        return answer


def describe_lost_hosts(hosts: Sequence[JobHost], why: str | None) -> str:
    """Describe the lost hosts, starting with the first to be lost, which may have caused the others.

    ``why`` describes the end of the whole job, if it has ended.
    """
    first, *others = sorted((host for host in hosts if host.is_lost), key=lambda host: host.heard_s)
    problem = first.problem if why is None else f"{why}, and {first.problem}"
    text = f"host {first.name} is lost: {problem}; see {first.log_file}"
    return text if not others else f"{text}; lost after it: {', '.join(host.name for host in others)}"


class JobHosts:
    """The hosts of a job, by role."""

    def __init__(
        self, launcher: RemoteLauncher, run_name: str, log_dir: Path, timeouts: TimeoutSection
    ) -> None:
        self._launcher = launcher
        self._run_name = run_name
        self._log_dir = log_dir
        self._timeouts = timeouts
        self._submission = Submission(build_job(launcher, run_name, log_dir), launcher, log_dir)
        self._is_open = False
        self._meshes: dict[HostRole, HostMesh] = {}
        self._hosts: dict[HostRole, list[JobHost]] = {}
        self._gpus = {role: GpuAllocator(gpus_per_host(launcher)) for role in JOB_ROLES}
        self._gpus_of: dict[HostRole, list[list[int]]] = {}
        """GPUs of each process of one host, by role; all hosts of a role have the same."""
        self._watching: list[asyncio.Task[None]] = []

    @property
    def _all(self) -> list[JobHost]:
        return [host for hosts in self._hosts.values() for host in hosts]

    async def open(self, tell: Callable[[str], None]) -> None:
        """See ``LocalHosts``; waits for the scheduler, then for the agent of every host.

        Raises:
            LaunchFailed: the job was refused, has ended, or has waited too long.
            DeadlineExceeded: an agent has not answered within ``timeouts.setup_s``.
        """
        state = await self._submission.start(tell)
        async with call_limit(self._timeouts, "setup_s", "waiting for the agents of all hosts"):
            for role in JOB_ROLES:
                self._meshes[role] = state._hosts[mesh_name(self._launcher, self._run_name, role)]
                self._hosts[role] = self._start_agents(role, self._meshes[role])
            answers = asyncio.gather(*(self._greet(host) for host in self._all))
            try:
                while not (await asyncio.wait([answers], timeout=ASK_JOB_S))[0]:
                    await self._submission.require_present()
                await answers
            except RuntimeError as error:
                await self._submission.require_present()
                # The first line of Monarch's error names the host; the others are Monarch's own stack.
                raise LaunchFailed(str(error).splitlines()[0]) from error
            finally:
                answers.cancel()
        self._is_open = True

    async def _greet(self, host: JobHost) -> None:
        host.worker_pid = await host.agent.beat.call_one()
        host.limits = await host.agent.limits.call_one()

    def _start_agents(self, role: HostRole, mesh: HostMesh) -> list[JobHost]:
        ids = [f"{role}-{index}" for index in range(mesh.size("hosts"))]
        if isinstance(self._launcher, SshLauncher):
            names = self._launcher.hosts
            ids = list(names.trainer if role is HostRole.TRAINER else names.generators)
        hosts = []
        for index, host_id in enumerate(ids):
            host = mesh.slice(hosts=index)
            proc = self._spawn(host, f"agent-{role}-{index}")
            log_file = self._log_dir / f"host-{host_id}.log"
            agent = proc.spawn("agent", HostAgent, log_file, SILENCE_FACTOR * self._timeouts.host_s)
            hosts.append(JobHost(id=host_id, role=role, agent=agent, log_file=log_file))
        return hosts

    @property
    def _python(self) -> str | None:
        """Python interpreter of the hosts; None: the same as the controller's."""
        match self._launcher:
            case SshLauncher() | SlurmLauncher():
                return self._launcher.python
            case KubernetesLauncher():
                # Pods start with this command.
                return "python"
            case ProcessLauncher():
                return None

    async def gpus(self, role: HostRole) -> Mapping[str, GpuFacts]:
        """See ``LocalHosts``."""
        hosts = self._hosts[role]
        async with call_limit(self._timeouts, "setup_s", f"looking at the GPUs of the hosts of {role}"):
            found = await asyncio.gather(*(host.agent.gpus.call_one() for host in hosts))
        return {host.id: facts for host, facts in zip(hosts, found, strict=True)}

    def limits(self, role: HostRole) -> Mapping[str, HostLimits]:
        """See ``LocalHosts``."""
        return {host.id: host.limits for host in self._hosts[role] if host.limits is not None}

    def spawn(self, role: HostRole, name: str, num_procs: int, *, gpus_per_proc: int) -> ProcMesh:
        """See ``LocalHosts``."""
        per_host = self._per_host(role, num_procs)
        if role not in self._gpus_of:
            self.allot(role, num_procs, gpus_per_proc=gpus_per_proc)
        gpus = self._gpus_of[role]
        assert len(gpus) == per_host, "as many processes as before"
        return self._spawn(self._meshes[role], name, gpus)

    def allot(self, role: HostRole, num_procs: int, *, gpus_per_proc: int) -> None:
        """See ``LocalHosts``."""
        per_host = self._per_host(role, num_procs)
        self._gpus_of[role] = [self._gpus[role].take(gpus_per_proc, role=role) for _ in range(per_host)]

    def allot_more(self, role: HostRole, *, gpus_per_proc: int) -> JobHost:
        """See ``LocalHosts``; the places on a job's hosts are fixed when it is submitted."""
        num_procs = len(self._gpus_of[role]) * len(self._hosts[role])
        raise ValueError(
            f"the run has places for {num_procs} processes of {role} on hosts of launcher "
            f"{self._launcher.kind}"
        )

    async def stop_one(self, mesh: ProcMesh) -> None:
        """See ``LocalHosts``."""
        await stop(mesh)

    def spawn_one(self, role: HostRole, name: str, rank: int) -> ProcMesh:
        """See ``LocalHosts``."""
        host, place = divmod(rank, len(self._gpus_of[role]))
        mesh = self._meshes[role].slice(hosts=host)
        return self._spawn(mesh, name, [self._gpus_of[role][place]])

    def _spawn(self, mesh: HostMesh, name: str, gpus: Sequence[list[int]] = ([],)) -> ProcMesh:
        """Spawn one process for each element of ``gpus`` on every host of a mesh."""
        return spawn_role(mesh, name, num_procs=len(gpus), gpus_per_proc=list(gpus), python=self._python)

    def _per_host(self, role: HostRole, num_procs: int) -> int:
        num_hosts = len(self._hosts[role])
        assert num_procs % num_hosts == 0, f"{num_procs} processes on {num_hosts} hosts: checks let it pass"
        return num_procs // num_hosts

    def hosts_for(self, role: HostRole, num_procs: int) -> Sequence[JobHost]:
        """See ``LocalHosts``."""
        per_host = self._per_host(role, num_procs)
        return [self._hosts[role][proc // per_host] for proc in range(num_procs)]

    def master_address_is_ip(self) -> bool:
        """See ``LocalHosts``; other pods cannot resolve a pod's host name."""
        return isinstance(self._launcher, KubernetesLauncher)

    async def watch(self) -> None:
        """See ``LocalHosts``."""
        # All heartbeats continue until the hosts are closed. A run needs its remaining hosts to end in order,
        # and a host that is not called ends itself.
        self._watching = [asyncio.create_task(self._watch(host)) for host in self._all]
        for watching in self._watching:
            watching.add_done_callback(forget)
        ended, _ = await asyncio.wait(self._watching, return_when=asyncio.FIRST_COMPLETED)
        for watching in ended:
            watching.result()

    async def _watch(self, host: JobHost) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self._check(host)

    async def _check(self, host: JobHost) -> None:
        problem = None
        beat = asyncio.create_task(self._beat(host))
        try:
            # A call to a process that ends during the call would wait until its deadline.
            while not beat.done() and problem is None:
                if isinstance(self._launcher, ProcessLauncher) and not is_running(host.worker_pid):
                    problem = "its process has ended"
                else:
                    await asyncio.wait([beat], timeout=LOOK_S)
            problem = problem or beat.result()
        finally:
            beat.cancel()
        if problem is not None:
            host.problem = problem
            raise HostLost(describe_lost_hosts(self._all, await self._submission.describe_end()))

    async def _beat(self, host: JobHost) -> str | None:
        """Call the agent of a host; return the problem if it does not answer, else None."""
        try:
            async with call_limit(self._timeouts, "host_s", "waiting for an answer"):
                await host.agent.beat.call_one()
        except DeadlineExceeded as late:
            return str(late)
        except (ActorError, SupervisionError) as error:
            return f"its agent cannot be reached ({str(error).strip().splitlines()[0]})"
        host.heard_s = time.monotonic()
        return None

    async def close(self) -> None:
        """See ``LocalHosts``; checks each host again: connections to a lost one break before its beat."""
        for watching in self._watching:
            watching.cancel()
        if self._is_open:
            await asyncio.gather(
                *(self._check(host) for host in self._all if not host.is_lost), return_exceptions=True
            )
        # Ask before this run ends the job.
        lost = None
        if any(host.is_lost for host in self._all):
            lost = HostLost(describe_lost_hosts(self._all, await self._submission.describe_end()))
        await self._clean_up()
        if lost is not None:
            raise lost

    async def _clean_up(self) -> None:
        # A host whose agent has not answered has no folders, and ends with its mesh as soon as it is up.
        alive = [host for host in self._all if host.limits is not None and not host.is_lost]
        await asyncio.gather(
            *(_bounded(f"folders of {host.id}", host.agent.remove_folders.call_one()) for host in alive)
        )
        # All processes of a host end with it. A mesh with a lost host would not answer.
        whole = [role for role in self._meshes if not any(host.is_lost for host in self._hosts[role])]
        await asyncio.gather(
            *(_bounded(f"end of the hosts of {role}", self._meshes[role].shutdown()) for role in whole)
        )
        # The other hosts of such a mesh are ended one by one.
        await asyncio.gather(
            *(
                _bounded(f"end of {host.id}", host.agent.end_host.call_one())
                for host in alive
                if host.role not in whole
            )
        )
        await self._submission.end()
        if isinstance(self._launcher, ProcessLauncher):
            # A killed host has left its folder in this machine's shared memory.
            sweep_stale_folders()


async def _bounded(what: str, work: Awaitable[object]) -> None:
    """Wait at most ``CLOSE_S`` for a step of closing, so that the next steps run in any case."""
    try:
        async with deadline(CLOSE_S, call=what, key="CLOSE_S in job_hosts.py"):
            await work
    except Exception as error:
        logger.warning("%s: %r", what, error)


Host = LocalHost | JobHost
"""One machine; processes on hosts with different ids share no memory."""

Hosts = LocalHosts | JobHosts
"""All machines of a run, for all processes except the controller's own."""
