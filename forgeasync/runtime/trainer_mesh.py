"""The trainer mesh: every call goes to all ranks, and each rank gets only its own rows."""

import asyncio
import dataclasses
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from monarch.actor import ProcMesh
from monarch.spmd import setup_torch_elastic_env_async
from monarch.tools.network import AddrType

from forgeasync.config import Delta, Dtype, RunConfig, TimeoutSection, TransportChoice
from forgeasync.models import published_dtype
from forgeasync.processes import largest
from forgeasync.rollouts import merged_reports
from forgeasync.runtime.job_hosts import Host
from forgeasync.runtime.jobs import HostRole
from forgeasync.runtime.process_manager import ProcessManager, make_folders
from forgeasync.runtime.router import GeneratorRouter
from forgeasync.runtime.supervised import Proc, call_limit
from forgeasync.runtime.trainer import TrainerActor
from forgeasync.trainer import PackedRow, StepResult, TrainerSetup, TrainingItem
from forgeasync.weights import (
    NUM_SLOTS,
    TORCH_DTYPES,
    ArchivePlan,
    Manifest,
    StagedWeights,
    StagingSource,
    WeightLayout,
    WeightSet,
    build_transport,
)

if TYPE_CHECKING:
    from forgeasync.runtime.teachers import TeacherEngines

T = TypeVar("T")

PEERS_S = 5.0
"""Time limit for other ranks to end their call after one rank has failed in it, in seconds."""


class TrainerMesh:
    """The ranks of the trainer, with deadlines for their calls.

    A rank processes one call after another. Calls wait for their turn here, so that their deadlines start
    when the ranks are free: waiting for a long training step does not use up the time for staging weights.
    Staging keeps its turn until its copies have begun; the rest runs concurrently with the calls that follow.

    Every call raises ``DeadlineExceeded`` if the ranks take longer than the config allows.
    """

    def __init__(self, actors: TrainerActor, num_procs: int, timeouts: TimeoutSection) -> None:
        self._ranks = [actors.slice(procs=rank) for rank in range(num_procs)]
        self._timeouts = timeouts
        self._data_ranks: list[int] = []
        self._turn = asyncio.Lock()
        self._stuck_by: Exception | None = None
        """Error of a rank that others wait for in a collective."""
        self._staged = "the initial weights"
        self._layout: WeightLayout | None = None
        self._sources: list[StagingSource] = []
        self._published_as: tuple[Dtype, bool] | None = None
        self._staging: tuple[Sequence[Path], TransportChoice, frozenset[str], ArchivePlan | None] | None = (
            None
        )
        """Arguments of the open staging buffers: folders, transport and hosts of generators."""
        self.members: tuple[Proc, ...] = ()
        """Process of each rank."""

    @property
    def is_stuck(self) -> bool:
        """Whether some ranks wait in a collective for one that has failed, and answer no more calls."""
        return self._stuck_by is not None

    async def _on_every_rank(
        self, make: Callable[[TrainerActor, int], Awaitable[T]], call: str, key: str
    ) -> list[T]:
        """Return the ranks' replies by rank, once earlier calls have ended.

        ``make`` calls one rank, given its actor and number. ``key`` is the call's limit in ``timeouts``, and
        ``call`` names it in messages.

        Raises:
            Exception: a rank's own error, or that of an earlier call that has left other ranks in a
                collective: gloo ends ranks that meet in the collectives of two calls.
        """
        await self._turn.acquire()
        if self._stuck_by is not None:
            self._turn.release()
            raise self._stuck_by

        async def answers() -> list[T]:
            async with self._deadline(call, key):
                return await self._together(make)

        # Ranks continue if the caller is cancelled; the next call gets its turn when they are done.
        work = asyncio.create_task(answers())
        work.add_done_callback(self._end_turn)
        return await asyncio.shield(work)

    def _deadline(self, call: str, key: str) -> AbstractAsyncContextManager[None]:
        return call_limit(self._timeouts, key, f"the trainer {call}")

    async def _together(self, make: Callable[[TrainerActor, int], Awaitable[T]]) -> list[T]:
        """Return all replies, or raise the first error once the other ranks have ended too or are stuck."""
        answers = [asyncio.ensure_future(make(actor, rank)) for rank, actor in enumerate(self._ranks)]
        try:
            return list(await asyncio.gather(*answers))
        except Exception as error:
            _, pending = await asyncio.wait(answers, timeout=PEERS_S)
            if pending and self._stuck_by is None:
                self._stuck_by = error
            raise

    def _end_turn(self, work: asyncio.Task[object]) -> None:
        self._turn.release()
        if not work.cancelled():
            # If the caller was cancelled, nothing else retrieves the error.
            work.exception()

    async def setup(self, setup: TrainerSetup, *, host_ids: Sequence[str]) -> None:
        """Build the model on every rank; ``host_ids`` has the host of each rank."""
        self._data_ranks = await self._on_every_rank(
            lambda actor, rank: actor.setup.call_one(setup, host_ids[rank]), "building its model", "setup_s"
        )

    async def pids(self) -> list[int]:
        """Return the process id of each rank on its host, by rank."""
        return await self._on_every_rank(
            lambda actor, _: actor.pid.call_one(), "starting its processes", "setup_s"
        )

    @property
    def num_procs(self) -> int:
        """Number of trainer ranks."""
        return len(self._ranks)

    @property
    def weight_layout(self) -> WeightLayout:
        """The layout that ``lay_out_weights`` has returned."""
        assert self._layout is not None
        return self._layout

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks with different rows; tensor-parallel ranks share theirs."""
        return max(self._data_ranks) + 1

    async def connect(self, generators: GeneratorRouter) -> None:
        """Let every rank read payloads on the generators' hosts."""
        limit_s = self._timeouts.weights_s
        await self._on_every_rank(
            lambda actor, _: actor.connect.call_one(generators.actors, limit_s),
            "connecting to the generators",
            "setup_s",
        )

    async def generators_changed(self, generators: GeneratorRouter) -> None:
        """Send the live generators to every rank, including ranks that wait for a payload."""
        limit_s = self._timeouts.weights_s
        async with call_limit(self._timeouts, "weights_s", "telling the trainer of generators"):
            await asyncio.gather(*(rank.connect.call_one(generators.actors, limit_s) for rank in self._ranks))

    async def train_rows(self, rows_by_data_rank: list[list[PackedRow]], *, step: int) -> StepResult:
        """Make one optimizer step, with the same number of rows for every data rank."""
        return await self._make_step(
            lambda rank, data_rank: rank.train_rows.call_one(rows_by_data_rank[data_rank]), step
        )

    async def train_items(
        self, minibatches: list[list[list[list[TrainingItem]]]], *, step: int
    ) -> StepResult:
        """Make an optimizer step on each minibatch of a batch, which has items by data rank and row.

        A rank reads the arrays of its rows only.
        """
        return await self._make_step(
            lambda rank, data_rank: rank.train_items.call_one([rows[data_rank] for rows in minibatches]),
            step,
        )

    async def _make_step(
        self, train: Callable[[TrainerActor, int], Awaitable[StepResult]], step: int
    ) -> StepResult:
        """Let every rank train on the data of its data rank."""
        results = await self._on_every_rank(
            lambda actor, rank: train(actor, self._data_ranks[rank]), f"making step {step}", "train_step_s"
        )
        self._staged = f"the weights of step {step}"
        # Everything else is equal on all ranks, or that of the first one.
        return dataclasses.replace(
            results[0],
            memory=largest(result.memory for result in results),
            tokens=merged_reports([result.tokens for result in results]),
            not_kept=next((one.not_kept for one in results if one.not_kept is not None), None),
        )

    async def beat(self, rank: int) -> None:
        """Return once the event loop of a rank has answered; without a deadline or a turn."""
        await self._ranks[rank].beat.call_one()

    async def snapshot_bytes(self) -> list[int]:
        """Return the shared memory that each rank's snapshots need, by rank."""
        return await self._on_every_rank(
            lambda actor, _: actor.snapshot_bytes.call_one(), "measuring its state", "setup_s"
        )

    async def open_snapshots(self, folders: Sequence[Path], *, every_steps: int, at_most: int) -> int:
        """Continue from the newest snapshot in the ranks' folders, and take snapshots there.

        Returns the snapshot's version, which is at most ``at_most``.
        """
        versions = await self._on_every_rank(
            lambda actor, rank: actor.open_snapshots.call_one(folders[rank], every_steps, at_most),
            "reading its snapshots",
            "setup_s",
        )
        assert len(set(versions)) == 1, "ranks are at different versions"
        return versions[0]

    async def finish_snapshot(self) -> int | None:
        """Wait until every rank has written the last snapshot that was begun; runs beside other calls.

        Returns the newest version that all ranks have completely, or None.
        """
        async with self._deadline("finishing its snapshot", "train_step_s"):
            versions = await self._together(lambda actor, _: actor.finish_snapshot.call_one())
        written = [version for version in versions if version is not None]
        return min(written) if len(written) == len(versions) else None

    async def reopen_staging(self, before: "TrainerMesh") -> list[StagingSource]:
        """Lay out the weights and open staging buffers with the settings of the trainer before this one.

        Raises:
            RuntimeError: this trainer lays out its weights differently.
        """
        assert before._staging is not None and before._published_as is not None
        folders, transport, generator_hosts, archive = before._staging
        layout = await self.lay_out_weights(*before._published_as)
        if layout.digest != before.weight_layout.digest:
            raise RuntimeError(
                f"the trainer that was started again lays out its weights as {layout.digest}; must be "
                f"{before.weight_layout.digest}, as generators know them"
            )
        return await self.open_staging(folders, transport, generator_hosts=generator_hosts, archive=archive)

    async def lay_out_weights(self, dtype: Dtype, has_patches: bool = False) -> WeightLayout:
        """Assign shards to the ranks that publish them, and lay out their staging buffers."""
        ranks = await self._on_every_rank(
            lambda actor, _: actor.lay_out_weights.call_one(dtype, has_patches),
            "laying out its weights",
            "setup_s",
        )
        layout = self._layout = WeightLayout(dtype=TORCH_DTYPES[dtype], ranks=tuple(ranks))
        self._published_as = dtype, has_patches
        return layout

    async def open_staging(
        self,
        folders: Sequence[Path],
        transport: TransportChoice,
        *,
        generator_hosts: frozenset[str],
        archive: ArchivePlan | None = None,
    ) -> list[StagingSource]:
        """Let every rank allocate its staging buffers in its host's folder; return their sources, by rank."""
        self._staging = folders, transport, generator_hosts, archive
        if archive is not None:
            archive = dataclasses.replace(archive, start=secrets.token_hex(8))
        self._sources = await self._on_every_rank(
            lambda actor, rank: actor.open_staging.call_one(
                folders[rank], transport, generator_hosts, archive
            ),
            "allocating its staging buffers",
            "setup_s",
        )
        return self._sources

    def staged(self, manifest: Manifest) -> StagedWeights:
        """Return a published version, with the way to reach it without the trainer's ranks."""
        layout = self.weight_layout.of(WeightSet.POLICY)
        return StagedWeights(manifest=manifest, layout=layout, sources=tuple(self._sources))

    async def stage_weights(self, slot: int, *, when_begun: Callable[[], None] = lambda: None) -> Manifest:
        """Copy the current weights into a slot of every rank's staging buffers.

        Calls ``when_begun`` as soon as every rank has started copying. The next call may then follow: a
        training step waits for the copies only when it changes the weights.

        Raises:
            NonFiniteWeights: the weights have nan or inf; ``when_begun`` is not called.
        """
        what, key = f"staging {self._staged}", "weights_s"
        await self._on_every_rank(lambda actor, _: actor.begin_staging.call_one(slot), what, key)
        when_begun()
        async with self._deadline(what, key):
            shards = await self._together(lambda actor, _: actor.finish_staging.call_one(slot))
        assert len({shard.version for shard in shards}) == 1, "ranks are at different versions"
        return Manifest(
            version=shards[0].version,
            slot=slot,
            layout_digest=self.weight_layout.digest,
            checksums=tuple(shard.checksums for shard in shards),
            patches=tuple(shard.patches for shard in shards),
            archive_refusal=next(filter(None, (shard.archive_refusal for shard in shards)), None),
        )

    async def begin_checkpoint(self, folder: Path, *, run_state: bytes, keep: int) -> None:
        """Start writing a checkpoint while training continues; waits for the previous one."""
        await self._on_every_rank(
            lambda actor, _: actor.begin_checkpoint.call_one(folder, run_state, keep),
            f"beginning checkpoint {folder.name}",
            "train_step_s",
        )

    async def finish_checkpoint(self) -> None:
        """Wait until the last checkpoint that was begun is on disk."""
        await self._on_every_rank(
            lambda actor, _: actor.finish_checkpoint.call_one(), "finishing its checkpoint", "train_step_s"
        )

    async def is_writing_checkpoint(self) -> bool:
        """Return whether a rank is still writing the last checkpoint that was begun."""
        return any(
            await self._on_every_rank(
                lambda actor, _: actor.is_writing_checkpoint.call_one(),
                "telling whether it writes a checkpoint",
                "train_step_s",
            )
        )

    async def policy_version(self) -> int:
        """Return the version of the ranks' weights, once earlier calls have ended."""
        versions = await self._on_every_rank(
            lambda actor, _: actor.policy_version.call_one(), "telling its version", "train_step_s"
        )
        assert len(set(versions)) == 1, "ranks are at different versions"
        return versions[0]

    async def flush_archive(self) -> str | None:
        """Wait until the archive has all versions; return why a rank leaves out some, if so."""
        refusals = await self._on_every_rank(
            lambda actor, _: actor.flush_archive.call_one(), "writing the archive", "train_step_s"
        )
        return next(filter(None, refusals), None)

    async def save_hf(self, folder: Path, *, source: Path) -> int:
        """Write the weights as a Hugging Face folder; return their version."""
        versions = await self._on_every_rank(
            lambda actor, _: actor.save_hf.call_one(folder, source), f"writing {folder}", "train_step_s"
        )
        return versions[0]


OWN_ACTORS = ("trainer", "_SPMDActor")
"""Prefixes of the names of the trainer's actors; ranks find each other through the second, Monarch's."""


async def start_trainer(
    processes: ProcessManager, setup: TrainerSetup, timeouts: TimeoutSection
) -> TrainerMesh:
    """Start the trainer mesh with its process group and model; the run ends when a rank does."""
    trainer = await spawn_trainer(processes, setup.section.parallel.num_procs, timeouts)
    processes.peers = list(trainer.members)
    await set_up_trainer(trainer, setup)
    return trainer


async def spawn_trainer(
    processes: ProcessManager, num_procs: int, timeouts: TimeoutSection, *, number: int = 0
) -> TrainerMesh:
    """Spawn the processes of the trainer, on the hosts and GPUs of the previous one.

    ``number`` counts the trainers of the run. The processes have no model until ``set_up_trainer``.
    """
    name = "trainer" if number == 0 else f"trainer-{number}"
    mesh: ProcMesh = processes.hosts.spawn(HostRole.TRAINER, name, num_procs, gpus_per_proc=1)
    by_ip = processes.hosts.master_address_is_ip()
    await setup_torch_elastic_env_async(mesh, use_ipaddr=AddrType.IPv4 if by_ip else None)
    actors = mesh.spawn(name, TrainerActor, processes.log_dir).flatten("procs")
    trainer = TrainerMesh(actors, num_procs, timeouts)
    hosts: Sequence[Host] = processes.hosts.hosts_for(HostRole.TRAINER, num_procs)
    trainer.members = tuple(
        Proc(role="trainer", rank=rank, pid=pid, host=host)
        for rank, (pid, host) in enumerate(zip(await trainer.pids(), hosts, strict=True))
    )
    for one in trainer.members:
        processes.listing.put(one.role, one.rank, pid=one.pid, host=one.host.id)
    return trainer


async def set_up_trainer(trainer: TrainerMesh, setup: TrainerSetup) -> None:
    """Let all ranks join their process group and build the model."""
    await trainer.setup(setup, host_ids=[one.host.id for one in trainer.members])


async def kill_trainer(trainer: TrainerMesh) -> None:
    """Kill all ranks: survivors wait in collectives for a dead rank, and answer no calls."""
    await asyncio.gather(*(one.host.kill(one.pid) for one in trainer.members))


async def connect_weights(
    processes: ProcessManager,
    config: RunConfig,
    trainer: TrainerMesh,
    generators: GeneratorRouter,
    teachers: "Sequence[TeacherEngines]" = (),
    versions: Path | None = None,
) -> list[str]:
    """Allocate the trainer's staging buffers, and let every generator plan how it reads them.

    ``teachers`` are those that load versions; each has its own receive buffer. ``versions`` is the folder of
    ``weights.archive``. Returns descriptions of how engines load versions.

    Raises:
        ValueError: trainer and engines have different tensors, the chosen transport cannot work, or a host
            has too little shared memory.
    """
    trainer_hosts = processes.hosts.hosts_for(HostRole.TRAINER, trainer.num_procs)
    generator_hosts = processes.hosts.hosts_for(HostRole.GENERATORS, config.generator.num_replicas)
    choice = config.weights.transport
    transport = build_transport(choice)
    teacher_hosts = [host for one in teachers for host in one.pool.hosts]
    readers = (*generator_hosts, *teacher_hosts)
    await transport.start(processes.spawn_here)
    layout = await trainer.lay_out_weights(published_dtype(config), config.weights.delta is Delta.EXACT)
    staged = [NUM_SLOTS * rank.buffer_bytes for rank in layout.ranks]
    patch_bytes = sum(rank.patch_bytes for rank in layout.ranks)
    receive_buffer = layout.of(WeightSet.POLICY).num_bytes + patch_bytes
    # The generators of a host share one receive buffer.
    received = [
        receive_buffer * (generators.pool.rank_on_host(rank) == 0) for rank in range(len(generator_hosts))
    ]
    folders = await make_folders([*trainer_hosts, *generator_hosts], [*staged, *received])
    sources = await trainer.open_staging(
        folders[: trainer.num_procs],
        choice,
        generator_hosts=frozenset(host.id for host in readers),
        archive=_archive_plan(config, trainer.num_procs, versions),
    )
    policy = layout.of(WeightSet.POLICY)
    of_generators = folders[trainer.num_procs :]
    routes = dict.fromkeys(await generators.connect_weights(policy, sources, of_generators))
    for one in teachers:
        # Teachers on a host have their own receive buffer, in another folder than its generators.
        room = layout.of(one.weights).num_bytes + patch_bytes
        (folder,) = await make_folders(one.pool.hosts, [room])
        of_engines = [folder] * len(one.pool.replicas)
        of_teacher = await one.connect_weights(layout.of(one.weights), sources, of_engines)
        routes |= dict.fromkeys(of_teacher)
    return list(routes)


def _archive_plan(config: RunConfig, num_ranks: int, versions: Path | None) -> ArchivePlan | None:
    if versions is None or not config.weights.archive:
        return None
    every, keep = config.checkpoint.every_steps, config.checkpoint.keep
    return ArchivePlan(
        folder=versions,
        every_steps=every,
        num_kept=None if every is None else keep * every,
        num_ranks=num_ranks,
    )
