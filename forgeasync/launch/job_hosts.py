"""Hosts that one of Monarch's jobs starts, with an agent on each of them."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, HostMesh, ProcMesh

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
from forgeasync.launch.agent import HostAgent
from forgeasync.launch.gpu_facts import GpuFacts
from forgeasync.launch.host_limits import HostLimits
from forgeasync.launch.hosts import Host, HostLost, Hosts, LocalHosts, stop
from forgeasync.launch.jobs import JOB_ROLES, HostRole, build_job, mesh_name
from forgeasync.launch.placement import GpuAllocator, spawn_role
from forgeasync.launch.submission import LaunchFailed, Submission
from forgeasync.rollouts import InFlightRead, sweep_stale_folders
from forgeasync.waiting import DeadlineExceeded, deadline, forget

BEAT_S = 1.0
LOOK_S = 0.5
"""Seconds between two looks for a host's process while a call to it is under way."""
ASK_JOB_S = 5.0
"""Seconds between two looks at the job while its hosts start."""
CLOSE_S = 20.0
"""Seconds for each of the steps that hosts take at the end."""
SILENCE_FACTOR = 2.0
"""A host waits this much longer for the controller than the controller for it: it is the one to tell."""

logger = logging.getLogger(__name__)


def build_hosts(config: RunConfig, log_dir: Path) -> Hosts:
    """The hosts that a run's launcher asks for, not yet started; made before Monarch is used."""
    if isinstance(config.launcher, LocalLauncher):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return LocalHosts(reserved_gpus=places_of(reward_gpus(config), visible))
    return JobHosts(config.launcher, config.name, log_dir, config.timeouts)


@dataclass(slots=True, kw_only=True)
class JobHost:
    """One host of a job."""

    id: str
    role: HostRole
    agent: HostAgent
    log_file: Path
    worker_pid: int = 0
    """Process id, on that host, of the process that started the host's procs."""
    limits: HostLimits | None = None
    """None: its agent has not answered yet."""
    heard_s: float = field(default_factory=time.monotonic)
    """When it last answered."""
    problem: str | None = None
    """How it was lost; None: it was not."""

    @property
    def is_lost(self) -> bool:
        return self.problem is not None

    @property
    def name(self) -> str:
        """In words, with what the machine calls itself."""
        machine = None if self.limits is None else self.limits.machine
        place = self.role if machine in (None, self.id) else f"{self.role}, {machine}"
        return f"{self.id} ({place})"

    async def make_folder(self, num_bytes: int) -> Path:
        """See ``Host``."""
        try:
            return await self.agent.make_folder.call_one(num_bytes)
        except ActorError as error:
            if isinstance(error.exception, ValueError):
                raise ValueError(f"host {self.id}: {error.exception}") from error
            raise

    async def is_running(self, pid: int) -> bool:
        """See ``Host``."""
        return await self.agent.is_running.call_one(pid)

    async def kill(self, pid: int) -> None:
        """See ``Host``; the procs of a host that is lost end with it."""
        if not self.is_lost:
            await self.agent.kill.call_one(pid)

    async def read_stacks(self, pid: int) -> str:
        """See ``Host``."""
        return await self.agent.read_stacks.call_one(pid)

    async def remove_files(self, files: Sequence[str]) -> None:
        """See ``Host``."""
        await self.agent.remove_files.call_one(list(files))

    async def read_in_flight(self, folder: Path, group_ids: Sequence[int]) -> InFlightRead:
        """See ``Host``."""
        return await self.agent.read_in_flight.call_one(folder, group_ids)

    async def remove_in_flight(self, folder: Path) -> None:
        """See ``Host``."""
        await self.agent.remove_in_flight.call_one(folder)

    async def keep_group(self, target: Path, facts: bytes, source: str) -> str | None:
        """See ``Host``."""
        return await self.agent.keep_group.call_one(target, facts, source)


def lost_words(hosts: Sequence[JobHost], why: str | None) -> str:
    """Words about those of ``hosts`` that are lost, the first one first: it may be why the others are.

    ``why`` says what has ended the whole job, if anything has.
    """
    first, *others = sorted((host for host in hosts if host.is_lost), key=lambda host: host.heard_s)
    problem = first.problem if why is None else f"{why}, and {first.problem}"
    text = f"host {first.name} is lost: {problem}; see {first.log_file}"
    return text if not others else f"{text}; lost after it: {', '.join(host.name for host in others)}"


class JobHosts:
    """Hosts of a job, by role."""

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
        """GPUs of each proc of one host, for the roles that were spawned; all hosts of a role are alike."""
        self._watching: list[asyncio.Task[None]] = []

    @property
    def _all(self) -> list[JobHost]:
        return [host for hosts in self._hosts.values() for host in hosts]

    async def open(self, tell: Callable[[str], None]) -> None:
        """See ``Hosts``; waits for the scheduler, then for every host's agent.

        Raises:
            LaunchFailed: the job was refused or has ended, or waits too long.
            DeadlineExceeded: a host has no agent within ``timeouts.setup_s``.
        """
        state = await self._submission.start(tell)
        call = "waiting for the agents of all hosts"
        async with deadline(self._timeouts.setup_s, call=call, key="timeouts.setup_s"):
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
                # The first line of Monarch's error names the host, the others are a stack of its own.
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
            procs = self._spawn(host, f"agent-{role}-{index}")
            log_file = self._log_dir / f"host-{host_id}.log"
            agent = procs.spawn("agent", HostAgent, log_file, SILENCE_FACTOR * self._timeouts.host_s)
            hosts.append(JobHost(id=host_id, role=role, agent=agent, log_file=log_file))
        return hosts

    @property
    def _python(self) -> str | None:
        """The hosts' Python; None: the controller's."""
        match self._launcher:
            case SshLauncher() | SlurmLauncher():
                return self._launcher.python
            case KubernetesLauncher():
                # As the pods' own command.
                return "python"
            case ProcessLauncher():
                return None

    async def gpus(self, role: HostRole) -> Mapping[str, GpuFacts]:
        """See ``Hosts``."""
        hosts = self._hosts[role]
        call = f"looking at the GPUs of the hosts of {role}"
        async with deadline(self._timeouts.setup_s, call=call, key="timeouts.setup_s"):
            found = await asyncio.gather(*(host.agent.gpus.call_one() for host in hosts))
        return {host.id: facts for host, facts in zip(hosts, found, strict=True)}

    def limits(self, role: HostRole) -> Mapping[str, HostLimits]:
        """See ``Hosts``."""
        return {host.id: host.limits for host in self._hosts[role] if host.limits is not None}

    def spawn(self, role: HostRole, name: str, num_procs: int, *, gpus_per_proc: int) -> ProcMesh:
        """See ``Hosts``."""
        per_host = self._per_host(role, num_procs)
        if role not in self._gpus_of:
            self.allot(role, num_procs, gpus_per_proc=gpus_per_proc)
        gpus = self._gpus_of[role]
        assert len(gpus) == per_host, "as many procs as before"
        return self._spawn(self._meshes[role], name, gpus)

    def allot(self, role: HostRole, num_procs: int, *, gpus_per_proc: int) -> None:
        """See ``Hosts``."""
        per_host = self._per_host(role, num_procs)
        self._gpus_of[role] = [self._gpus[role].take(gpus_per_proc, role=role) for _ in range(per_host)]

    def allot_more(self, role: HostRole, *, gpus_per_proc: int) -> Host:
        """See ``Hosts``; what a job's hosts are for was decided when it was submitted."""
        num_procs = len(self._gpus_of[role]) * len(self._hosts[role])
        raise ValueError(
            f"the run has places for {num_procs} procs of {role} on hosts of launcher {self._launcher.kind}"
        )

    async def stop_one(self, mesh: ProcMesh) -> None:
        """See ``Hosts``."""
        await stop(mesh)

    def spawn_one(self, role: HostRole, name: str, rank: int) -> ProcMesh:
        """See ``Hosts``."""
        host, place = divmod(rank, len(self._gpus_of[role]))
        mesh = self._meshes[role].slice(hosts=host)
        return self._spawn(mesh, name, [self._gpus_of[role][place]])

    def _spawn(self, mesh: HostMesh, name: str, gpus: Sequence[list[int]] = ([],)) -> ProcMesh:
        """Spawn one proc for each element of ``gpus`` on every host of a mesh."""
        return spawn_role(mesh, name, num_procs=len(gpus), gpus_per_proc=list(gpus), python=self._python)

    def _per_host(self, role: HostRole, num_procs: int) -> int:
        num_hosts = len(self._hosts[role])
        assert num_procs % num_hosts == 0, f"{num_procs} procs on {num_hosts} hosts: checks let it pass"
        return num_procs // num_hosts

    def of_procs(self, role: HostRole, num_procs: int) -> Sequence[Host]:
        """See ``Hosts``."""
        per_host = self._per_host(role, num_procs)
        return [self._hosts[role][proc // per_host] for proc in range(num_procs)]

    def master_address_is_ip(self) -> bool:
        """See ``Hosts``: a pod's bare hostname means nothing to other pods."""
        return isinstance(self._launcher, KubernetesLauncher)

    async def watch(self) -> None:
        """See ``Hosts``."""
        # All go on until the hosts are closed: ending the run in order takes the hosts that are left, and
        # one that is not called any more ends itself.
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
            # A call to a process that ends meanwhile would only end by its deadline.
            while not beat.done() and problem is None:
                if isinstance(self._launcher, ProcessLauncher) and not _is_alive(host.worker_pid):
                    problem = "its process has ended"
                else:
                    await asyncio.wait([beat], timeout=LOOK_S)
            problem = problem or beat.result()
        finally:
            beat.cancel()
        if problem is not None:
            host.problem = problem
            raise HostLost(lost_words(self._all, await self._submission.why_gone()))

    async def _beat(self, host: JobHost) -> str | None:
        """Call the host's agent; returns what is wrong, or None."""
        try:
            call = "waiting for an answer"
            async with deadline(self._timeouts.host_s, call=call, key="timeouts.host_s"):
                await host.agent.beat.call_one()
        except DeadlineExceeded as late:
            return str(late)
        except (ActorError, SupervisionError) as error:
            return f"its agent cannot be reached ({str(error).strip().splitlines()[0]})"
        host.heard_s = time.monotonic()
        return None

    async def close(self) -> None:
        """See ``Hosts``.

        Raises:
            HostLost: one is, whatever the run has ended with: connections to it break before it is missed.
        """
        for watching in self._watching:
            watching.cancel()
        if self._is_open:
            await asyncio.gather(
                *(self._check(host) for host in self._all if not host.is_lost), return_exceptions=True
            )
        # Before the job is ended by this run.
        lost = None
        if any(host.is_lost for host in self._all):
            lost = HostLost(lost_words(self._all, await self._submission.why_gone()))
        await self._clean_up()
        if lost is not None:
            raise lost

    async def _clean_up(self) -> None:
        # A host whose agent has not answered yet has no folders, and ends with its mesh as soon as it is up.
        alive = [host for host in self._all if host.limits is not None and not host.is_lost]
        await asyncio.gather(
            *(_bounded(f"folders of {host.id}", host.agent.remove_folders.call_one()) for host in alive)
        )
        # All procs of a host end with it. Of a mesh with a lost host nothing would answer.
        whole = [role for role in self._meshes if not any(host.is_lost for host in self._hosts[role])]
        await asyncio.gather(
            *(_bounded(f"end of the hosts of {role}", self._meshes[role].shutdown()) for role in whole)
        )
        # The others of such a mesh end by themselves.
        await asyncio.gather(
            *(
                _bounded(f"end of {host.id}", host.agent.end_host.call_one())
                for host in alive
                if host.role not in whole
            )
        )
        await self._submission.end()
        if isinstance(self._launcher, ProcessLauncher):
            # A host that was killed has left its folder in what is this machine's shared memory.
            sweep_stale_folders()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def _bounded(what: str, work: Awaitable[object]) -> None:
    """Wait for a part of the end, but not for ever: the other parts come after it."""
    try:
        async with deadline(CLOSE_S, call=what, key="CLOSE_S in job_hosts.py"):
            await work
    except Exception as error:
        logger.warning("%s: %r", what, error)
