"""Restarts the trainer when one of its ranks has died, was stopped, or is stuck in a collective.

Loops of the run call the trainer through ``TrainerRecovery`` and do not notice a restart. If the trainer is
lost during a call, a new one first restores the state from before the call: the newest snapshot that all
ranks have (``forgeasync.trainer.run_checkpoint``), and the later steps (``forgeasync.trainer.step``). Then
the call is repeated. Generators continue meanwhile.

A trainer is lost (``RunningTrainer``) if the process of a rank has ended; if a rank does not answer
heartbeats, which its event loop answers while its thread computes; or if a call has failed in a collective or
exceeded its deadline. All ranks are lost together, since they wait for each other.
"""

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from monarch.actor import ActorError

from forgeasync.checkpoints import CheckpointLost, is_whole, remove_partial
from forgeasync.config import TimeoutSection
from forgeasync.observability import Fault, Role
from forgeasync.runtime.process_manager import ProcessManager, make_folders
from forgeasync.runtime.router import GeneratorRouter
from forgeasync.runtime.supervised import (
    LOOK_S,
    PEER_END_S,
    ActorDied,
    BackgroundTasks,
    Heartbeat,
    Proc,
    RestartBudget,
    diagnose_hang,
    first_ended,
    unless_lost,
)
from forgeasync.runtime.trainer_mesh import (
    OWN_ACTORS,
    TrainerMesh,
    kill_trainer,
    set_up_trainer,
    spawn_trainer,
)
from forgeasync.trainer import StepMemory, StepResult, TrainerSetup, TrainingItem
from forgeasync.waiting import DeadlineExceeded, Monitor, happens_within
from forgeasync.weights import Manifest, StagedWeights

T = TypeVar("T")

COLLECTIVE_ERRORS = ("gloo", "NCCL", "ProcessGroup", "c10d")
"""Words in errors of collectives; the rank that reports the error need not have caused it."""


class RunningTrainer:
    """A trainer mesh from its start to its loss."""

    def __init__(self, mesh: TrainerMesh, processes: ProcessManager, *, heartbeat_s: float) -> None:
        """Faults are reported to those of ``processes``; a silence of ``heartbeat_s`` is a fault."""
        self.mesh = mesh
        self.lost = asyncio.Event()
        self.error: Exception | None = None
        """Reason for the loss."""
        self.faults: list[Fault] = []
        self._processes = processes
        self._heartbeat_s = heartbeat_s

    async def until_lost(self, *, asks: bool = True) -> None:
        """Check the processes, and with ``asks`` send heartbeats to every rank, until the trainer is lost."""
        key = "trainer.recovery.heartbeat_s"
        heartbeats = [
            Heartbeat(functools.partial(self.mesh.beat, one.rank), limit_s=self._heartbeat_s, key=key)
            for one in self.mesh.members
        ]
        try:
            while not self.lost.is_set():
                await self._look_at_processes()
                for one, heartbeat in zip(self.mesh.members, heartbeats, strict=True) if asks else ():
                    if not self.lost.is_set() and (what := heartbeat.look()) is not None:
                        evidence = await diagnose_hang(one)
                        if not self.lost.is_set():
                            self._lose(_name(one), what, ActorDied(f"{_name(one)} {what}"), evidence)
                await happens_within(LOOK_S, self.lost.wait())
        finally:
            for heartbeat in heartbeats:
                heartbeat.stop()

    async def while_living(self, work: Awaitable[T]) -> T:
        """Return the result of ``work``, unless the trainer is lost during its setup.

        Raises:
            Exception: a rank's process has ended, so ``work`` would never be answered.
        """
        return await unless_lost(work, self.until_lost(asks=False), self.lost_error)

    def lost_error(self) -> Exception:
        """Return the reason for the loss."""
        assert self.error is not None
        return self.error

    async def is_lost_with(self, error: BaseException) -> bool:
        """Return whether a call has failed with ``error`` because the trainer is lost."""
        if await first_ended(self.mesh.members, within_s=PEER_END_S) is not None:
            await self._look_at_processes()
        if self.lost.is_set():
            return True
        if isinstance(error, DeadlineExceeded):
            evidence = await diagnose_hang(*self.mesh.members)
            if not self.lost.is_set():
                self._lose("the trainer", f"is stuck: {error}", error, evidence)
        elif isinstance(error, ActorError) and _is_of_collective(error.exception):
            self._lose("the trainer", f"has failed in a collective ({error.exception})", error)
        return self.lost.is_set()

    async def _look_at_processes(self) -> None:
        """Report a fault for every rank that has ended."""
        ended = await asyncio.gather(*(one.has_ended() for one in self.mesh.members))
        if self.lost.is_set():
            return
        for one, has_ended in zip(self.mesh.members, ended, strict=True):
            if has_ended:
                log = self._processes.log_dir / f"trainer-{one.rank}.log"
                self._lose(_name(one), "has died", ActorDied(f"{_name(one)} has ended; see {log}"))

    def _lose(self, who: str, what: str, error: Exception, evidence: str | None = None) -> None:
        self.faults.append(self._processes.faults.detected(Role.TRAINER, who, what, evidence=evidence))
        self.error = self.error or error
        self.lost.set()


class _Lost(Exception):
    """The trainer of a call is lost."""


def _name(one: Proc) -> str:
    return f"trainer rank {one.rank} (process {one.pid})"


def _is_of_collective(error: BaseException) -> bool:
    """Return whether a rank's error comes from a collective, which another rank may have broken."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in COLLECTIVE_ERRORS)


logger = logging.getLogger(__name__)

Minibatches = list[list[list[list[TrainingItem]]]]
"""Items of a batch, by minibatch, data rank and row."""


class TrainerRecovery:
    """The trainer mesh for the loops of a run, with restarts; ``start`` begins its supervision."""

    def __init__(
        self,
        processes: ProcessManager,
        setup: TrainerSetup,
        timeouts: TimeoutSection,
        *,
        trainer: TrainerMesh,
        generators: GeneratorRouter,
        first_version: int,
        tell: Callable[[str], None],
        teachers: Sequence[GeneratorRouter] = (),
    ) -> None:
        """``trainer`` is the first mesh, set up and connected; ``first_version`` is its version.

        ``teachers`` load versions as ``generators`` do.
        """
        self._processes = processes
        self._setup = setup
        self._section = setup.section.recovery
        self._timeouts = timeouts
        self._generators = generators
        self._teachers = teachers
        self._tell = tell
        self._life = Monitor(self._begin_life(trainer))
        self._steps: Monitor[StepMemory[Minibatches]] = Monitor(StepMemory(first_version=first_version))
        self._budget = RestartBudget(self._section.max_restarts)
        self._snapshot_folders: list[Path] = []
        self._checkpoint: Path | None = None
        """Folder of the checkpoint that was begun last, until it is finished."""
        self._first_error: Exception | None = None
        """Reason for the first loss since the last complete step."""
        self._num_started = 1
        self._num_trained_again = 0
        self._on_new_buffers: list[Callable[[], None]] = []
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._background = BackgroundTasks("the trainer's recovery")

    async def start(self) -> None:
        """Start snapshots and supervision of the ranks; does nothing if the config has no snapshots.

        Raises:
            ValueError: a host has too little shared memory for the snapshots.
        """
        self._generators.pool.add_listener(self._tell_generators)
        if self._section.snapshot_every_steps is None:
            return
        trainer = self._life.state.mesh
        hosts = [one.host for one in trainer.members]
        self._snapshot_folders = await make_folders(hosts, await trainer.snapshot_bytes())
        await self._open_snapshots(trainer)
        # This object handles the ranks' deaths from here on.
        self._processes.peers = []
        self._processes.owned.update(OWN_ACTORS)
        self._processes.closing.append(self.close)
        self._background.start(self._look_after())

    async def _tell_generators(self) -> None:
        """Send the live generators to the ranks; a new trainer gets them when it starts."""
        await self._call(lambda mesh: mesh.generators_changed(self._generators))

    def _begin_life(self, trainer: TrainerMesh) -> RunningTrainer:
        return RunningTrainer(trainer, self._processes, heartbeat_s=self._section.heartbeat_s)

    async def _open_snapshots(self, trainer: TrainerMesh) -> int:
        every_steps = self._section.snapshot_every_steps
        assert every_steps is not None
        return await trainer.open_snapshots(
            self._snapshot_folders, every_steps=every_steps, at_most=self._steps.state.completed
        )

    async def watch(self) -> None:
        """Wait until the trainer cannot be restarted, and raise the reason.

        Raises:
            Exception: the reason for the first loss, always.
        """
        await asyncio.shield(self._failure)

    async def close(self) -> None:
        """End the supervision."""
        await self._background.close()
        if self._failure.done() and not self._failure.cancelled():
            self._failure.exception()
        else:
            self._failure.cancel()

    def when_buffers_are_new(self, act: Callable[[], None]) -> None:
        """Call ``act`` whenever the staging buffers are replaced by empty ones."""
        self._on_new_buffers.append(act)

    def metrics(self) -> dict[str, float]:
        """Return counts since the command started, by their names in metrics.jsonl."""
        return {"trainer/num_steps_made_again": self._num_trained_again}

    # ---- calls of the loops of a run

    @property
    def num_data_ranks(self) -> int:
        """See ``TrainerMesh``."""
        return self._life.state.mesh.num_data_ranks

    @property
    def members(self) -> Sequence[Proc]:
        """Process of each rank."""
        return self._life.state.mesh.members

    @property
    def is_stuck(self) -> bool:
        """Whether the trainer does not answer calls."""
        return self._life.state.mesh.is_stuck or self._life.state.lost.is_set()

    def staged(self, manifest: Manifest) -> StagedWeights:
        """See ``TrainerMesh``."""
        return self._life.state.mesh.staged(manifest)

    async def train_items(self, minibatches: Minibatches, *, step: int) -> StepResult:
        """See ``TrainerMesh``."""
        if self._section.snapshot_every_steps is None:
            return await self._call(lambda mesh: mesh.train_items(minibatches, step=step))
        self._steps.state.begin(step, minibatches)
        result = await self._call(lambda mesh: mesh.train_items(minibatches, step=step))
        self._steps.state.complete(step)
        self._budget.reset()
        if step % self._section.snapshot_every_steps == 0:
            self._background.start(self._confirm())
        return result

    async def until_safe(self, step: int) -> None:
        """Wait until the rollouts of a complete step will not be read again."""
        if self._section.snapshot_every_steps is not None:
            await self._steps.until(lambda steps: steps.safe_version >= step)

    async def _confirm(self) -> None:
        version = await self._call(lambda mesh: mesh.finish_snapshot())
        if version is not None:
            self._steps.change(lambda steps: steps.save(version))

    async def stage_weights(self, slot: int, *, when_begun: Callable[[], None] = lambda: None) -> Manifest:
        """See ``TrainerMesh``; ``when_begun`` can be called more than once."""
        return await self._call(lambda mesh: mesh.stage_weights(slot, when_begun=when_begun))

    async def begin_checkpoint(self, folder: Path, *, run_state: bytes, keep: int) -> None:
        """See ``TrainerMesh``."""

        async def begin(mesh: TrainerMesh) -> None:
            if not is_whole(folder):
                # A lost trainer may have begun it. Other checkpoints stay: one of them may be in progress.
                remove_partial(folder)
                await mesh.begin_checkpoint(folder, run_state=run_state, keep=keep)

        await self._call(begin)
        self._checkpoint = folder

    async def finish_checkpoint(self) -> None:
        """See ``TrainerMesh``.

        Raises:
            CheckpointLost: the trainer was lost while it wrote it; raised once.
        """
        folder, self._checkpoint = self._checkpoint, None
        await self._call(lambda mesh: mesh.finish_checkpoint())
        if folder is not None and not is_whole(folder):
            remove_partial(folder)
            words = f"checkpoint {folder.name} was not finished: the trainer was lost as it wrote it"
            self._tell(words)
            raise CheckpointLost(words)

    async def is_writing_checkpoint(self) -> bool:
        """See ``TrainerMesh``."""
        return await self._call(lambda mesh: mesh.is_writing_checkpoint())

    async def policy_version(self) -> int:
        """See ``TrainerMesh``."""
        return await self._call(lambda mesh: mesh.policy_version())

    async def flush_archive(self) -> str | None:
        """See ``TrainerMesh``."""
        return await self._call(lambda mesh: mesh.flush_archive())

    async def save_hf(self, folder: Path, *, source: Path) -> int:
        """See ``TrainerMesh``."""
        was_there = folder.exists()

        async def save(mesh: TrainerMesh) -> int:
            # A folder gets its name last, so a trainer that was lost after that has written all of it.
            if folder.exists() and not was_there:
                return await mesh.policy_version()
            return await mesh.save_hf(folder, source=source)

        return await self._call(save)

    async def _call(self, make: Callable[[TrainerMesh], Awaitable[T]]) -> T:
        """Make a call, and repeat it on the next trainer whenever the trainer is lost."""
        while True:
            life = await self._living()
            try:
                answer = await unless_lost(make(life.mesh), life.lost.wait(), _Lost)
                # An answer does not count if the trainer was also lost: the next trainer may lack its effect.
                if not life.lost.is_set():
                    return answer
            except _Lost:
                continue
            except Exception as error:
                is_watched = self._section.snapshot_every_steps is not None
                if not is_watched or not await life.is_lost_with(error):
                    raise

    async def _living(self) -> RunningTrainer:
        """Wait for a trainer that is not lost.

        Raises:
            Exception: no trainer is started again.
        """
        living = self._life.until(lambda life: None if life.lost.is_set() else life)
        return await unless_lost(living, asyncio.shield(self._failure), _Lost)

    # ---- restart of the trainer

    async def _look_after(self) -> None:
        try:
            while True:
                life = self._life.state
                await life.until_lost()
                await self._replace(life)
        except Exception as error:
            if not self._failure.done():
                self._failure.set_exception(error)

    async def _replace(self, lost: RunningTrainer) -> None:
        """Start trainers until one has the state of the lost one.

        Raises:
            Exception: the reason for the first loss, if too many in a row are lost.
        """
        before, faults, life = lost.mesh, list(lost.faults), lost
        if self._budget.num_in_a_row == 0:
            self._first_error = lost.error
        while self._budget.take():
            await kill_trainer(life.mesh)
            try:
                number, self._num_started = self._num_started, self._num_started + 1
                mesh = await spawn_trainer(self._processes, before.num_procs, self._timeouts, number=number)
                life = self._begin_life(mesh)
                version = await life.while_living(self._bring_up(life.mesh, before))
            except Exception as error:
                logger.warning("the trainer could not be started again", exc_info=True)
                self._tell(f"the trainer could not be started again ({error})")
                faults += life.faults if life is not lost else []
                continue
            self._life.state = life
            self._life.wake()
            for fault in faults:
                self._processes.faults.recovered(
                    fault, f"was replaced; the trainer continues after step {version}"
                )
            return
        await kill_trainer(life.mesh)
        assert self._first_error is not None
        raise self._first_error

    async def _bring_up(self, trainer: TrainerMesh, before: TrainerMesh) -> int:
        """Bring a new trainer to the state of the previous one; return the version of the last step."""
        await set_up_trainer(trainer, self._setup_now())
        await trainer.connect(self._generators)
        version = await self._open_snapshots(trainer)
        for step, minibatches in self._steps.state.after(version):
            await trainer.train_items(minibatches, step=step)
            self._num_trained_again += 1
            version = step
        sources = await trainer.reopen_staging(before)
        for act in self._on_new_buffers:
            act()
        for readers in (self._generators, *self._teachers):
            await readers.reconnect_weights(trainer.weight_layout, sources)
        return version

    def _setup_now(self) -> TrainerSetup:
        """Return the arguments of a trainer's setup, without the run's first checkpoint once that was
        replaced.

        Snapshots contain everything that was in it, and ``StepMemory`` refuses a trainer with an older
        version.
        """
        folder = self._setup.resume_from
        if folder is None or is_whole(folder):
            return self._setup
        return dataclasses.replace(self._setup, resume_from=None)
