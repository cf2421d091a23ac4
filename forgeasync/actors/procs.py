"""All procs of a run: spawned, set up, watched, and stopped."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, MeshFailure, ProcMesh, this_host
from monarch.spmd import setup_torch_elastic_env_async
from monarch.tools.network import AddrType

from forgeasync.actors.buffer import BufferActor
from forgeasync.actors.deaths import (
    BETTER_REPORT_S,
    END_S,
    REPORT_S,
    WATCH_S,
    ActorDied,
    Proc,
    first_ended,
    read_report,
)
from forgeasync.actors.environment import EnvironmentActor, EnvironmentSetup
from forgeasync.actors.generator import GeneratorActor, GeneratorSetup
from forgeasync.actors.group_sampling import GroupEpisodes
from forgeasync.actors.group_scoring import GroupScoring
from forgeasync.actors.router import GeneratorRouter
from forgeasync.actors.scorer import ScorerActor
from forgeasync.actors.trainer import TrainerActor
from forgeasync.actors.trainer_mesh import TrainerMesh
from forgeasync.buffer.decisions import BufferSnapshot
from forgeasync.config.data import named_sources
from forgeasync.config.evaluation import named_sets
from forgeasync.config.model import Dtype
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.run import RunConfig, TimeoutSection
from forgeasync.config.trainer import RoutingReplay
from forgeasync.launch.hosts import Host, HostLost, Hosts, LocalHosts, stop
from forgeasync.launch.jobs import HostRole
from forgeasync.launch.placement import spawn_role
from forgeasync.observability.failures import real_errors
from forgeasync.rollouts.records import Records
from forgeasync.trainer.setup import TrainerSetup
from forgeasync.waiting import deadline
from forgeasync.weights.staging import NUM_SLOTS
from forgeasync.weights.transports.build import build_transport, require_reach

logger = logging.getLogger(__name__)

MONARCH_OWN_ACTORS = ("logger", "setup")
"""Names of the actors that Monarch puts into every proc."""


@dataclass(slots=True)
class Procs:
    """The meshes that a run has spawned so far; ``close`` stops them in any state."""

    log_dir: Path
    hosts: Hosts = field(default_factory=LocalHosts)
    payload_folders: list[Path] = field(default_factory=list)
    """Payload folder of each generator, on its own host; by generator."""
    _peers: list[Proc] = field(default_factory=list)
    """Procs whose death shows as an error of others."""
    _own_meshes: list[ProcMesh] = field(default_factory=list)
    _failure: asyncio.Future[None] = field(init=False)
    _watching: asyncio.Task[None] | None = None
    _closing: bool = False

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._failure = loop.create_future()

        def on_fault(failure: MeshFailure) -> None:
            # Monarch's default ends the process from here; the loops are to end it in their own order. A dead
            # proc is reported once for each of its actors: those that Monarch itself put there say nothing
            # about the role.
            if not self._closing and not failure.mesh_name.startswith(MONARCH_OWN_ACTORS):
                loop.call_soon_threadsafe(self._on_report, str(failure.report()))

        monarch.actor.unhandled_fault_hook = on_fault

    def _on_report(self, report: str) -> None:
        logger.error("%s", report)
        death = read_report(report, self.log_dir)
        # Some say no more than that an actor does not answer: a better one may follow.
        delay_s = 0.0 if death.has_signal else BETTER_REPORT_S
        asyncio.get_running_loop().call_later(delay_s, self._fail, ActorDied(death.text))

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def open(self, tell: Callable[[str], None]) -> None:
        """Start the hosts; needed if they are other machines than this one. See ``Hosts.open``."""
        await self.hosts.open(tell)
        self._watching = asyncio.create_task(self._watch_hosts())

    async def _watch_hosts(self) -> None:
        try:
            await self.hosts.watch()
        except* HostLost as lost:
            self._fail(lost.exceptions[0])

    async def watch(self) -> None:
        """Wait until something dies.

        Raises:
            ActorDied: with Monarch's report, or
            HostLost: always one of them.
        """
        peers = asyncio.create_task(self._watch_peers())
        try:
            await asyncio.shield(self._failure)
        finally:
            peers.cancel()

    async def _watch_peers(self) -> None:
        """Check ranks that may wait in a collective for a dead one, which Monarch can report late (30 s)."""
        while (ended := await first_ended(self._peers, within_s=0.0)) is None:
            await asyncio.sleep(WATCH_S)
        self._fail(await self._death_of(ended))

    @asynccontextmanager
    async def naming_deaths(self) -> AsyncIterator[None]:
        """Replace errors of the body that a proc's death caused by an error that names the death.

        Raises:
            ActorDied: a proc has died; raised from the body's own error.
        """
        try:
            yield
        except Exception as error:
            causes = real_errors(error)
            if isinstance(error, ActorDied | HostLost):
                raise
            for cause in causes:
                if isinstance(cause, ActorDied | HostLost):
                    raise cause from error
            for cause in causes:
                if isinstance(cause, SupervisionError):
                    raise ActorDied(read_report(str(cause), self.log_dir).text) from error
            # A collective fails, or hangs, if one of its ranks is gone.
            if any(isinstance(cause, ActorError | TimeoutError) for cause in causes):
                if (ended := await first_ended(self._peers, within_s=END_S)) is not None:
                    raise await self._death_of(ended) from error
            raise

    async def _death_of(self, ended: Proc) -> Exception:
        """Return what Monarch reports within a bounded time, else what is known without its report."""
        await asyncio.wait([self._failure], timeout=REPORT_S)
        if self._failure.done() and (reported := self._failure.exception()) is not None:
            assert isinstance(reported, Exception)
            return reported
        log = self.log_dir / f"{ended.role}-{ended.rank}.log"
        return ActorDied(f"{ended.role} rank {ended.rank} (process {ended.pid}) has ended; see {log}")

    def _spawn_here(self, name: str) -> ProcMesh:
        """Start one proc on the controller's own machine, without a GPU."""
        mesh = spawn_role(this_host(), name, num_procs=1)
        self._own_meshes.append(mesh)
        return mesh

    async def connect_weights(
        self, config: RunConfig, trainer: TrainerMesh, generators: GeneratorRouter
    ) -> list[str]:
        """Allocate the trainer's staging buffers, and let every generator plan how it reads them.

        Returns in words how engines take versions.

        Raises:
            ValueError: trainer and engines do not have the same tensors, the transport asked for cannot work,
                or a host has not enough shared memory.
        """
        trainer_hosts = self.hosts.of_procs(HostRole.TRAINER, trainer.num_procs)
        generator_hosts = self.hosts.of_procs(HostRole.GENERATORS, generators.num_replicas)
        choice = config.weights.transport
        transport = build_transport(choice)
        require_reach(transport, choice, (host.id for host in (*trainer_hosts, *generator_hosts)))
        await transport.start(self._spawn_here)
        # Adapters are small, and merged in float32.
        dtype = config.generator.dtype if config.lora is None else Dtype.FLOAT32
        layout = await trainer.lay_out_weights(dtype)
        staged = [NUM_SLOTS * rank.num_bytes for rank in layout.ranks]
        receive_buffer = sum(rank.num_bytes for rank in layout.ranks)
        # The generators of a host share one.
        first_of_hosts = {replicas[0] for replicas in generators.hosts}
        received = [receive_buffer * (rank in first_of_hosts) for rank in range(generators.num_replicas)]
        folders = await _make_folders([*trainer_hosts, *generator_hosts], [*staged, *received])
        sources = await trainer.open_staging(
            folders[: trainer.num_procs],
            choice,
            generator_hosts=frozenset(host.id for host in generator_hosts),
        )
        return await generators.connect_weights(layout, sources, folders[trainer.num_procs :])

    async def start_trainer(self, setup: TrainerSetup, timeouts: TimeoutSection) -> TrainerMesh:
        """Start the trainer mesh, with its process group and its model."""
        num_procs = setup.section.parallel.num_procs
        mesh = self.hosts.spawn(HostRole.TRAINER, "trainer", num_procs, gpus_per_proc=1)
        by_ip = self.hosts.master_address_is_ip()
        await setup_torch_elastic_env_async(mesh, use_ipaddr=AddrType.IPv4 if by_ip else None)
        actors = mesh.spawn("trainer", TrainerActor, self.log_dir).flatten("procs")
        trainer = TrainerMesh(actors, num_procs, timeouts)
        hosts = self.hosts.of_procs(HostRole.TRAINER, num_procs)
        self._peers = [
            Proc(role="trainer", rank=rank, pid=pid, host=host)
            for rank, (pid, host) in enumerate(zip(await trainer.pids(), hosts, strict=True))
        ]
        await trainer.setup(setup, host_ids=[host.id for host in hosts])
        return trainer

    async def start_generators(
        self, config: RunConfig, facts: ModelFacts, model_path: Path
    ) -> GeneratorRouter:
        """Start the generator mesh, with its engines loaded, behind a router."""
        section = config.generator
        mesh = self.hosts.spawn(
            HostRole.GENERATORS, "generator", section.num_replicas, gpus_per_proc=section.tensor_parallel
        )
        actors = mesh.spawn("generator", GeneratorActor, self.log_dir).flatten("procs")
        capacity_bytes = int(config.payload.capacity_gib * 2**30)
        hosts = self.hosts.of_procs(HostRole.GENERATORS, section.num_replicas)
        # All generators together hold no more than that: on every host it is asked for once.
        ids = [host.id for host in hosts]
        sizes = [capacity_bytes if ids.index(name) == index else 0 for index, name in enumerate(ids)]
        self.payload_folders = await _make_folders(hosts, sizes)
        generators = GeneratorRouter(actors, ids, config.timeouts)
        setup = GeneratorSetup(
            model_path=model_path,
            facts=facts,
            section=section,
            max_context_length=config.model.max_context_length,
            seed=config.seed,
            records=Records(
                routing=config.trainer.routing_replay is not RoutingReplay.OFF,
                kept_tokens=config.trainer.keep_sampling_mask and config.sampling.cuts_vocabulary,
                num_dense_layers=facts.num_dense_layers,
            ),
            weights=config.weights,
            lora=config.lora,
            payload_capacity_bytes=capacity_bytes,
        )
        await generators.setup(setup, self.payload_folders)
        return generators

    async def start_scorer(self, config: RunConfig) -> GroupScoring:
        """Start the scorer with its processes, and the queue that scores groups concurrently."""
        actor = self._spawn_here("scorer").spawn("scorer", ScorerActor, self.log_dir)
        limit_s = config.timeouts.score_s
        async with deadline(config.timeouts.setup_s, call="setting up the scorer", key="timeouts.setup_s"):
            sources = (*named_sources(config.data), *named_sets(config.evaluation))
            isolation = await actor.setup.call_one(sources, config.scorer, limit_s, config.seed)
        return GroupScoring(actor.score.call_one, config.scorer, limit_s=limit_s, isolation=isolation)

    async def start_environment(self, config: RunConfig, model_path: Path) -> EnvironmentActor | None:
        """Start the environment in its own proc; None if the run has none."""
        if config.environment is None:
            return None
        actor = self._spawn_here("environment").spawn("environment", EnvironmentActor, self.log_dir)
        setup = EnvironmentSetup(
            environment=config.environment,
            model_path=model_path,
            chat_template=config.data.chat_template,
            sampling=config.sampling,
            max_context_length=config.model.max_context_length,
            timeouts=config.timeouts,
        )
        async with deadline(
            config.timeouts.setup_s, call="setting up the environment", key="timeouts.setup_s"
        ):
            await actor.setup.call_one(setup)
        return actor

    async def connect_environment(
        self, config: RunConfig, actor: EnvironmentActor, generators: GeneratorRouter
    ) -> GroupEpisodes:
        """Connect the environment to the generators; returns the object that runs its groups."""
        call = "connecting the environment to the generators"
        async with deadline(config.timeouts.setup_s, call=call, key="timeouts.setup_s"):
            await actor.connect.call_one(generators.actors)
        return GroupEpisodes(
            actor, generators, group_size=config.algorithm.group_size, timeouts=config.timeouts
        )

    async def start_buffer(self, config: RunConfig, resumed: BufferSnapshot | None = None) -> BufferActor:
        """Start the replay buffer, empty or restored; its endpoints are called with ``call_one``."""
        actor = self._spawn_here("buffer").spawn("buffer", BufferActor, self.log_dir)
        async with deadline(
            config.timeouts.setup_s, call="setting up the replay buffer", key="timeouts.setup_s"
        ):
            await actor.setup.call_one(config, resumed)
        return actor

    async def close(self) -> None:
        """Stop every proc. Procs that are gone already are no error; cancellation does not interrupt this."""
        closing = asyncio.create_task(self._close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

    async def _close(self) -> None:
        self._closing = True
        # Callbacks run in reverse order, and all of them run even if one fails.
        async with contextlib.AsyncExitStack() as ending:
            ending.push_async_callback(self.hosts.close)
            if self._watching is not None:
                # Keep polling until now: a host that is not polled shuts itself down.
                ending.callback(self._watching.cancel)
            ending.push_async_callback(_stop_all, self._own_meshes)
        if self._failure.done() and not self._failure.cancelled():
            self._failure.exception()
        else:
            self._failure.cancel()


async def _stop_all(meshes: Sequence[ProcMesh]) -> None:
    await asyncio.gather(*(stop(mesh) for mesh in meshes))


async def _make_folders(hosts: Sequence[Host], sizes: Sequence[int]) -> list[Path]:
    """Make a folder on each host, large enough for all its sizes; return the folder of each entry."""
    totals: dict[str, int] = {}
    by_id = {host.id: host for host in hosts}
    for host, size in zip(hosts, sizes, strict=True):
        totals[host.id] = totals.get(host.id, 0) + size
    made = await asyncio.gather(*(by_id[name].make_folder(total) for name, total in totals.items()))
    folders = dict(zip(totals, made, strict=True))
    return [folders[host.id] for host in hosts]
