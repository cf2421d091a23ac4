"""A run from its first process to its last: what starts before the loops, what they share, what ends after.

An app derives its loops from ``RunLoops``, as apps/grpo.py does, and hands the class to ``start_run``.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine, Sequence
from typing import TypeVar

from forgeasync.buffer import Batch
from forgeasync.checkpoints import FINAL
from forgeasync.config import LocalLauncher, RunConfig, named_sources
from forgeasync.controller.checkpoints import RunCheckpoints, export, save_newest_weights
from forgeasync.controller.cli import add_closing_message, run_main, telling
from forgeasync.controller.control import ControlServer, build_control_server
from forgeasync.controller.evaluation import EvaluationSchedule, waited_every_steps
from forgeasync.controller.groups import GroupLifecycle, payload_budget
from forgeasync.controller.hosts import open_hosts
from forgeasync.controller.preparation import Prepared, take_up
from forgeasync.controller.recorder import RunRecorder
from forgeasync.controller.resume import RunFiles, open_files
from forgeasync.controller.serving import WeightServing
from forgeasync.controller.stall_monitor import StallMonitor
from forgeasync.controller.starting import Roles, open_process_manager, start_roles
from forgeasync.environments import weighted_order
from forgeasync.isolation import sandbox_warning
from forgeasync.observability import (
    RunLog,
    State,
    StepConsole,
    StorageFaults,
    close_trace,
    closing_lines,
    configure_controller_logging,
    doing,
    open_trace,
    separate_native_output,
    started,
)
from forgeasync.rollouts import Group
from forgeasync.runtime import GroupEpisodes, Minibatches, ProcessManager
from forgeasync.scoring import GroupFiltering
from forgeasync.trainer import BadStepMonitor, assign_rows, split_by_groups, training_items

T = TypeVar("T")


class RunLoops(ABC):
    """The loops of a run, and what they share.

    trainer, generators, scorer, groups, buffer    the roles, which are other processes
    lifecycle      what becomes of a group, in the buffer, the payload store and the files of the run
    filtering      the filters of ``algorithm``
    payloads       the memory that groups reserve before they start
    serving        new weights on their way to the generators
    evaluations    when held-out problems are evaluated, and whether training waits for it
    checkpoints    written beside training
    recorder       metrics, rollouts and the console
    sampled        groups on their way from the collecting loop to the scoring loop
    storage        disks that refuse files which training waits for
    stalls         tells of a run that stands still
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
        """``files`` says where checkpoints and finished groups are written to."""
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
        """Optimizer steps that the policy has seen; ``first_version`` is what the run begins with."""
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
        )
        self.evaluations = EvaluationSchedule(
            prepared, self.groups, recorder.console, until_served=self.serving.until_served
        )
        self.sampled: asyncio.Queue[Group] = asyncio.Queue()
        """From the collecting loop to the scoring loop. The buffer bounds them: it bounds what is started."""
        self._trained: asyncio.Queue[tuple[int, Sequence[Group]]] = asyncio.Queue()
        """Steps whose arrays the trainer may still have to read again."""

    @abstractmethod
    async def run(self, manager: ProcessManager, control: ControlServer | None = None) -> None:
        """Train for ``max_steps`` steps; the first failure of any loop or process ends the run."""

    def helper_loops(
        self, manager: ProcessManager, control: ControlServer | None
    ) -> list[Coroutine[None, None, None]]:
        """Return the loops beside collecting, scoring and training; all run until the run ends.

        They serve weights, evaluate, keep finished groups on the disk, free what was trained on, answer
        requests, and watch processes, trainer and progress.
        """
        return [
            *(manager.watch(), self.stalls.loop(manager), self.trainer.watch()),
            *(*self.serving.loops(), self.evaluations.loop()),
            *(self._free_trained(), self.lifecycle.spiller.loop()),
            *(() if control is None else (control.loop(),)),
        ]

    async def submit(self, num_prompts: int) -> None:
        """Give the buffer the next prompts of the data's order."""
        await self.buffer.submit.call_one([self._order.next() for _ in range(num_prompts)])

    async def evaluate_first(self) -> None:
        """Evaluate the model that the run begins with, and record it.

        A run that goes on serves the weights of its checkpoint instead: that model was evaluated before.
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
        """Pack a batch into rows of at most ``trainer.tokens_per_row`` tokens.

        Every token gets its advantage from ``algorithm.advantage`` here. Returns items by minibatch, data
        rank, microbatch and row.
        """
        trainer = self.config.trainer
        recorded = self.recorder.picks(step, batch.groups)
        items = training_items(batch.groups, batch.weights, self.config.algorithm, recorded=recorded)
        return [
            assign_rows(of_step, tokens_per_row=trainer.tokens_per_row, num_ranks=self.trainer.num_data_ranks)
            for of_step in split_by_groups(items, batch.groups, trainer.steps_per_batch)
        ]

    def free_later(self, step: int, batch: Batch) -> None:
        """Free the arrays of a batch once no restart of the trainer can ask for them."""
        self._trained.put_nowait((step, batch.groups))

    async def _free_trained(self) -> None:
        while True:
            step, groups = await self._trained.get()
            await self.trainer.until_safe(step)
            await self.lifecycle.free(groups)

    async def with_ledger(self, call: Awaitable[T]) -> T:
        """Wait for a call of the buffer that waits for the ledger's disk; report a disk that refuses."""
        return await self.storage.while_waiting(call, lambda: self.buffer.refusal.call_one())

    def counters(self) -> dict[str, float]:
        """Return what was counted so far, by metric name."""
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
    """Make a run, or go on with the one that ``resume`` names; one that is done stays as it is.

    Raises:
        ConfigError: lists every problem, before any process starts.
        Exception: what has ended the run before its last step.
    """
    if (prepared := take_up(config, resume)) is not None:
        run_main(_train(prepared.config, prepared, loops))


async def _train(config: RunConfig, prepared: Prepared, loops: type[RunLoops]) -> None:
    """Start every process, run the loops, export the trained model, end every process.

    The newest weights of a run that fails are saved before its processes end.
    """
    files = open_files(config, prepared.resumed)
    run_dir = files.run_dir
    separate_native_output(run_dir.log("controller"))
    configure_controller_logging(run_dir.log("controller"))
    open_trace(run_dir.logs, "controller", idle=State.COMPUTING)
    resumed = None if prepared.resumed is None else prepared.resumed.state
    with (
        RunLog(run_dir.run_log) as log,
        StepConsole(config.max_steps, eval_every_steps=waited_every_steps(config), log=log.line) as console,
        RunRecorder(config, run_dir, console, resumed, prompts=prepared.prompts) as recorder,
        telling(lambda number: console.phase(f"stopping on {number.name}: waiting for what is under way")),
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
                final = run_dir.checkpoints.resolve() / FINAL
                console.phase(f"writing {final}")
                await export(run.trainer, final, prepared, run.storage)
                await run.with_ledger(run.buffer.end.call_one())
                await run.lifecycle.spiller.end()
            console.message(f"wrote {final}")
        except BaseException as error:
            if run is not None:
                console.phase("saving the newest weights")
                words = await save_newest_weights(run, run_dir, error)
                log.line(words)
                add_closing_message(words)
            raise
        finally:
            console.phase("ending all procs")
            await manager.close()
            close_trace()
        for line in (*recorder.verdict(), *closing_lines(run_dir)):
            console.message(line)
