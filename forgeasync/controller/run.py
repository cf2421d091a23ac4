"""Runs training: starts all processes, runs the loops, exports the model, and ends all processes.

An app subclasses ``RunLoops``, as apps/grpo.py does, and passes the class to ``start_run``.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from forgeasync.buffer import Batch, ReplayBuffer
from forgeasync.checkpoints import FINAL
from forgeasync.config import LocalLauncher, RunConfig, named_sources
from forgeasync.controller.checkpoints import RunCheckpoints, export, save_newest_weights
from forgeasync.controller.cli import add_closing_message, run_main, telling
from forgeasync.controller.control import ControlServer, build_control_server
from forgeasync.controller.evaluation import EvaluationSchedule
from forgeasync.controller.groups import GroupLifecycle, payload_budget
from forgeasync.controller.hosts import open_hosts
from forgeasync.controller.preparation import Prepared, prepare_run
from forgeasync.controller.recorder import RunRecorder
from forgeasync.controller.resume import RunFiles, open_files
from forgeasync.controller.serving import WeightServing
from forgeasync.controller.stall_monitor import StallMonitor
from forgeasync.controller.starting import Roles, open_process_manager, start_roles
from forgeasync.environments import weighted_order
from forgeasync.files import Refusal
from forgeasync.isolation import sandbox_warning
from forgeasync.observability import (
    RunLog,
    State,
    StepConsole,
    StorageFaults,
    close_trace,
    closing_lines,
    configure_controller_logging,
    describe_error,
    doing,
    open_trace,
    root_cause,
    separate_native_output,
    started,
)
from forgeasync.planning import pair_cost
from forgeasync.rollouts import Group, OperatorTrace
from forgeasync.runtime import GroupEpisodes, LiveReplica, Minibatches, ProcessManager
from forgeasync.scoring import GroupFiltering
from forgeasync.trainer import BadStepMonitor, assign_rows, split_by_groups, training_items
from forgeasync.waiting import deadline

T = TypeVar("T")


class RunLoops(ABC):
    """Base class of a run's loops, with the objects that they share.

    The attributes:

        trainer, generators, scorer, groups, buffer    the roles, in other processes
        lifecycle      applies each outcome of a group to the buffer, the payload store and the run's files
        filtering      filters of the section algorithm
        payloads       budget of the memory that groups reserve before they start
        serving        serves new weights to the generators
        evaluations    decides when to evaluate held-out problems, and whether training waits
        checkpoints    writes checkpoints while training continues
        recorder       writes metrics, rollouts and the console
        sampled        queue of groups from the collecting loop to the scoring loop
        storage        outages of disks with files that training waits for
        stalls         reports a run that makes no progress
    """

    def __init__(
        self,
        config: RunConfig,
        prepared: Prepared,
        roles: Roles,
        *,
        recorder: RunRecorder,
        files: RunFiles,
    ) -> None:
        """``files`` has the folders of checkpoints and of finished groups."""
        self.config = config
        self.prepared = prepared
        self.trainer = roles.trainer
        self.generators = roles.generators
        self.scorer = roles.scorer
        self.groups = roles.groups
        self.buffer = roles.buffer
        self.faults = roles.faults
        self.recorder = recorder
        self.storage = StorageFaults(self.faults)
        self._archive = StorageFaults(self.faults, "these versions cannot be exported; training goes on")
        self._versions = str(files.run_dir.versions)
        self.checkpoints = RunCheckpoints(
            files.checkpoints,
            prepared,
            trainer=self.trainer,
            buffer=self.buffer,
            recorder=recorder,
            storage=self.storage,
            faults=self.faults,
        )
        resumed = prepared.resumed
        self.version = self.first_version = 0 if resumed is None else resumed.state.step
        """Current policy version; ``first_version`` is the one that the run starts with."""
        self.bad_steps = BadStepMonitor(config.trainer.bad_steps.max_in_a_row)
        position = 0 if resumed is None else resumed.state.buffer.num_submitted
        weights = {source.name: source.weight for source in named_sources(config.data)}
        self._order = weighted_order(prepared.train, weights, seed=config.seed, position=position)
        self.filtering = GroupFiltering(config.algorithm, seed=config.seed)
        self.payloads = payload_budget(config, prepared.facts)
        self.lifecycle = GroupLifecycle(
            prepared,
            generators=self.generators,
            buffer=self.buffer,
            scorer=self.scorer,
            teaching=roles.teaching,
            payloads=self.payloads,
            recorder=recorder,
            files=files,
        )
        self.stalls = StallMonitor(config, roles, lambda: self.version, recorder.console)
        self.serving = WeightServing(
            config.weights,
            trainer=self.trainer,
            generators=self.generators,
            buffer=self.buffer,
            recorder=recorder,
            teachers=roles.teaching.moving,
            archive=self._report_archive,
        )
        self.evaluations = EvaluationSchedule(
            prepared, self.groups, recorder.console, until_served=self.serving.until_served
        )
        self.sampled: asyncio.Queue[Group] = asyncio.Queue()
        """Groups to score. The buffer limits groups in flight, so this queue needs no bound."""
        self._trained: asyncio.Queue[tuple[int, Sequence[Group]]] = asyncio.Queue()
        """Steps with the groups whose arrays a restarted trainer may read again."""

    @abstractmethod
    async def run(self, manager: ProcessManager, control: ControlServer | None = None) -> None:
        """Train for ``max_steps`` steps. The first failure of any loop or process ends the run."""

    def helper_loops(
        self, manager: ProcessManager, control: ControlServer | None
    ) -> list[Coroutine[None, None, None]]:
        """Return the loops other than collecting, scoring and training; all run until the run ends.

        They serve weights, evaluate, keep finished groups on the disk, free trained groups, answer control
        requests, and monitor the processes, the trainer and the run's progress.
        """
        return [
            *(manager.watch(), self.stalls.loop(manager), self.trainer.watch()),
            *(*self.serving.loops(), self.evaluations.loop()),
            *(self._free_trained(), self.lifecycle.spiller.loop()),
            *(() if control is None else (control.loop(),)),
        ]

    async def submit(self, num_prompts: int) -> None:
        """Submit the next prompts, in the data's order, to the buffer."""
        await self.buffer.change(ReplayBuffer.submit, [self._order.next() for _ in range(num_prompts)])

    async def evaluate_first(self) -> None:
        """Evaluate and record the initial model.

        A resumed run instead serves the weights of its checkpoint, and begins the evaluation that was due.
        """
        if self.first_version:
            await self.serving.publish()
            await self.serving.until_served(self.first_version)
            self.evaluations.resume(self.first_version)
            return
        start_s = time.perf_counter()
        with doing(State.EVALUATING):
            held_out = await self.evaluations.first()
        eval_s = time.perf_counter() - start_s
        self.recorder.record_initial(held_out, eval_s, await self.generators.stats())

    def pack(self, batch: Batch, *, step: int) -> Minibatches:
        """Pack a batch into rows of at most ``trainer.tokens_per_row`` tokens, with each token's advantage.

        Returns the items of each minibatch, data rank, microbatch and row.
        """
        trainer = self.config.trainer
        recorded = self.recorder.picks(step, batch.groups)
        items = training_items(batch.groups, batch.weights, self.config.algorithm, recorded=recorded)
        return [
            assign_rows(
                of_step,
                tokens_per_row=trainer.tokens_per_row,
                num_ranks=self.trainer.num_data_ranks,
                share_prefixes=trainer.shares_prefixes,
                routing_replay=trainer.routing_replay,
                pair_cost=pair_cost(self.prepared.facts),
            )
            for of_step in split_by_groups(items, batch.groups, trainer.steps_per_batch)
        ]

    def free_later(self, step: int, batch: Batch) -> None:
        """Free the arrays of a batch once no restarted trainer can need them."""
        self._trained.put_nowait((step, batch.groups))

    async def _free_trained(self) -> None:
        while True:
            step, groups = await self._trained.get()
            await self.trainer.until_safe(step)
            if self.config.record_execution:
                await self.lifecycle.spiller.until_written(groups)
            await self.lifecycle.free(groups)

    async def finish_archive(self) -> None:
        """Wait until the published versions are archived; report it if some are left out."""
        self._report_archive(await self.trainer.flush_archive())

    def _report_archive(self, refusal: str | None) -> None:
        if refusal is None:
            self._archive.accepted(self._versions)
        else:
            self._archive.refused(Refusal(path=self._versions, reason=refusal))

    async def with_ledger(self, call: Awaitable[T]) -> T:
        """Await a buffer call that waits for the ledger's disk; report the disk if it refuses writes."""
        return await self.storage.while_waiting(call, self.buffer.refusal)

    def counters(self) -> dict[str, float]:
        """Return the counts of all parts of the run, by metric name."""
        return {
            **self.filtering.metrics(),
            **self.scorer.metrics(),
            **self.payloads.metrics(),
            **self.serving.ledger.metrics(),
            **self.generators.metrics(),
            **self.evaluations.metrics(),
            **self.faults.metrics(),
            **self.storage.metrics(),
            **self.trainer.metrics(),
            **self.lifecycle.metrics(),
            **self.stalls.metrics(),
            **(self.groups.metrics() if isinstance(self.groups, GroupEpisodes) else {}),
        }


def start_run(config: RunConfig, resume: str | None, loops: type[RunLoops]) -> None:
    """Start a run, or resume the one that ``resume`` names; do nothing if that run is done.

    Raises:
        ConfigError: lists every problem, before any process starts.
        Exception: the error that ended the run before its last step.
    """
    if (prepared := prepare_run(config, resume)) is not None:
        run_main(_train(prepared.config, prepared, loops))


async def _train(config: RunConfig, prepared: Prepared, loops: type[RunLoops]) -> None:
    """Start all processes, run the loops, export the trained model, and end all processes.

    If the run fails, its newest weights are saved before its processes end.
    """
    files = open_files(config, prepared.resumed)
    run_dir = files.run_dir
    separate_native_output(run_dir.log("controller"))
    configure_controller_logging(run_dir.log("controller"))
    open_trace(run_dir.logs, "controller", idle=State.COMPUTING)
    resumed = None if prepared.resumed is None else prepared.resumed.state
    with (
        RunLog(run_dir.run_log) as log,
        StepConsole(config.max_steps, log=log.line) as console,
        RunRecorder(config, run_dir, console, resumed, prompts=prepared.prompts) as recorder,
        telling(lambda number: console.phase(f"stopping on {number.name}: waiting for work in flight")),
    ):
        warnings = [f"warning: {words}" for words in prepared.warnings]
        for message in (f"run directory {run_dir.path}", *files.messages, *warnings):
            console.message(message)
        if config.environment is not None and (alarm := sandbox_warning(config.sandbox)) is not None:
            console.alarm(alarm)
        manager = open_process_manager(config, run_dir, console)
        run: RunLoops | None = None
        try:
            async with manager.naming_deaths():
                if not isinstance(config.launcher, LocalLauncher):
                    console.phase(f"waiting for the hosts of launcher {config.launcher.kind}")
                await open_hosts(config, prepared.facts, manager, tell=console.message)
                roles = await start_roles(config, prepared, manager, console, run_dir)
                console.message(roles.scorer.isolation)
                run = loops(config, prepared, roles, recorder=recorder, files=files)
                control = build_control_server(
                    run_dir.control.resolve(), manager, roles.generators.pool, config
                )
                started()
                await run.run(manager, control)
                console.phase(f"writing {run_dir.checkpoints / FINAL}")
                await export(run.trainer, run_dir.checkpoints.resolve() / FINAL, prepared, run.storage)
                await run.finish_archive()
                await run.with_ledger(run.buffer.end())
                await run.lifecycle.spiller.end()
        except BaseException as error:
            if run is not None:
                console.phase("saving the newest weights")
                words = [await save_newest_weights(run, run_dir, error)]
                file = OperatorTrace.file(run_dir.bad_steps.resolve(), run.version)
                if "MismatchTooLarge" in str(root_cause(error)) and file.exists():
                    limit_s = config.timeouts.generate_s
                    words.append(
                        await first_different_operator(run.generators.pool.replicas, file, limit_s=limit_s)
                    )
                for line in words:
                    log.line(line)
                    add_closing_message(line)
            raise
        finally:
            console.phase("ending all processes")
            await manager.close()
            close_trace()
        weights, measured = run_dir.checkpoints / FINAL, recorder.measured()
        has_profile = config.environment is None and not config.teachers
        for line in closing_lines(run_dir, weights, measured, has_profile=has_profile):
            console.message(line)


async def first_different_operator(replicas: Iterable[LiveReplica], file: Path, *, limit_s: float) -> str:
    """Have a generator compare its operators with those in the trainer's trace; return what it found.

    Does not raise an ``Exception``. Generators with other weights refuse. If one does not answer within
    ``limit_s``, the next one is asked.
    """
    problem = "there is none"
    for replica in replicas:
        compare = replica.actor.first_different_operator.call_one
        try:
            async with deadline(limit_s, call="comparing operators", key="timeouts.generate_s"):
                return await replica.call(partial(compare, file))
        except Exception as error:
            problem = describe_error(error)
    return f"no generator could say which operator differs ({problem}); the trainer's are in {file}"
