"""GRPO with rollouts and training running concurrently.

    python -m apps.grpo --config FILE [--config FILE ...] [key.path=value ...]
        [--dry-run | --rehearse [--hosts] | [--resume latest] [--supervise]]

Four loops share one replay buffer, and wait for each other only through it:

    collect   has a generator sample a prompt whenever the buffer lets a group start         waits: bounds
    score     takes sampled groups, has scorers reward them, completes them in the buffer    waits: collect
    train     takes a batch, makes an optimizer step, has the copies of its weights begin    waits: score
    serve     has the trainer stage the newest weights beside its next step, and a generator
              fetch and swap them in, so that groups may start                               waits: train

With an environment the collecting loop runs episodes, which return sampled and scored: the scoring loop then
has nothing to do. The serving loops are in forgeasync/controller/serving.py; resuming is in resume.py there.
Held-out problems are evaluated beside the loops, or while training waits: evaluation_schedule.py there.
With max_off_policy_steps 0 the buffer lets a batch start only once its weights are served: the loops then run
one after the other. With k > 0 generation runs ahead by at most k versions.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from forgeasync.actors import CancelledGroup, GroupEpisodes, ProcessManager, RefusedGroup, SampledGroup
from forgeasync.buffer import Batch, DropReason, Start, Update
from forgeasync.checkpoint import FINAL
from forgeasync.config import LocalLauncher, RunConfig, load_config, named_sources
from forgeasync.controller import (
    ControlDesk,
    EvaluationSchedule,
    GroupLifecycle,
    Part,
    Prepared,
    Roles,
    RunCheckpoints,
    RunFiles,
    RunRecorder,
    StallWatch,
    StepClock,
    StepRecord,
    WeightServing,
    add_closing_words,
    become_supervisor,
    control_desk,
    exit_code,
    export,
    open_files,
    open_hosts,
    open_procs,
    parse_arguments,
    payload_budget,
    rehearse,
    run_main,
    save_newest_weights,
    show_plan,
    start_roles,
    take_up,
    telling,
    waited_every_steps,
)
from forgeasync.environments import sampling_seed, weighted_order
from forgeasync.faults import StorageFaults
from forgeasync.isolation import sandbox_warning
from forgeasync.observability import (
    RunLog,
    StepConsole,
    closing_lines,
    configure_controller_logging,
    separate_native_output,
)
from forgeasync.rollouts import Group, Score
from forgeasync.scoring import GroupFiltering
from forgeasync.tracing import State, close_trace, doing, open_trace, started
from forgeasync.trainer import BadStepWatch, assign_rows, split_by_groups, steps_problem, training_items

T = TypeVar("T")


class GrpoRun:
    """The four loops of one run and what they share."""

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
        self.bad_steps = BadStepWatch(config.trainer.bad_steps.max_in_a_row)
        position = 0 if resumed is None else resumed.state.buffer.num_submitted
        weights = {source.name: source.weight for source in named_sources(config.data)}
        self.order = weighted_order(prepared.train, weights, seed=config.seed, position=position)
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
        # Bounded by the buffer: it never holds more than the groups in flight.
        self.sampled: asyncio.Queue[Group] = asyncio.Queue()
        self.trained: asyncio.Queue[tuple[int, Batch]] = asyncio.Queue()
        """Steps whose arrays the trainer may still have to read again."""
        self.stalls = StallWatch(config, roles, lambda: self.version, recorder.console)
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

    async def run(self, manager: ProcessManager, control: ControlDesk | None = None) -> None:
        """Train for ``max_steps`` steps; the first failure of any loop or proc ends the run and is raised."""
        async with asyncio.TaskGroup() as loops:
            serving = self.serving.loops()
            others = (
                *(manager.watch(), self.stalls.loop(manager), self.trainer.watch()),
                *(*serving, self.evaluations.loop()),
                *(self.collect(), self.score(), self.free_trained(), self.lifecycle.spiller.loop()),
                *(() if control is None else (control.loop(),)),
            )
            background = [loops.create_task(loop) for loop in others]
            await self.train()
            for task in background:
                task.cancel()

    async def collect(self) -> None:
        """Start groups when the buffer lets them and there is room for them; without it one waits."""
        await self.serving.until_served(self.first_version)
        await self.serving.until_taught_by(self.first_version)
        await self.submit(self.lifecycle.num_first_prompts)
        await self.lifecycle.restore()
        async with asyncio.TaskGroup() as groups:
            while True:
                starts, num_wanted = await self.buffer.start.call_one(max(1, self.payloads.num_free))
                for start in starts:
                    await self.payloads.reserve(start.group_id)
                    groups.create_task(self.sample(start))
                await self.submit(num_wanted)

    async def submit(self, num_prompts: int) -> None:
        """Submit the next prompts of the data's order."""
        await self.buffer.submit.call_one([self.order.next() for _ in range(num_prompts)])

    async def sample(self, start: Start) -> None:
        """Have a group sampled; keep it, or give it up."""
        seed = sampling_seed(self.config.seed, start.draw_id)
        answer = await self.groups.sample(start.group_id, start.task, seed=seed)
        match answer:
            case SampledGroup():
                await self.keep(start, answer)
            case RefusedGroup():
                self.recorder.record_episodes(answer.outcomes)
                await self.lifecycle.give_up(start.group_id, answer.reason, answer.problem)
            case CancelledGroup():
                await self.lifecycle.give_up(start.group_id, DropReason.CANCELLED)

    async def keep(self, start: Start, sampled: SampledGroup) -> None:
        """Put a sampled group into the buffer, for the scoring loop unless it has been scored."""
        whole = Group(
            group_id=start.group_id,
            draw_id=start.draw_id,
            task=start.task,
            rollouts=sampled.rollouts,
            durations_ms=sampled.durations_ms,
        )
        if (settled := await self.lifecycle.settled(whole, sampled.scores)) is None:
            return
        group, scores = settled
        await self.buffer.finished.call_one(group)
        if scores is None:
            await self.sampled.put(group)
        else:
            self.recorder.record_episodes(sampled.outcomes)
            self.recorder.keep_records(group.group_id, sampled.outcomes)
            await self.accept(group, scores)

    async def score(self) -> None:
        """Have sampled groups scored concurrently; the buffer bounds how many there are."""
        async with asyncio.TaskGroup() as groups:
            while True:
                groups.create_task(self.complete(await self.sampled.get()))

    async def complete(self, group: Group) -> None:
        """Have the scorer score a group, and accept it."""
        if (scores := await self.lifecycle.scored(group)) is not None:
            await self.accept(group, scores)

    async def accept(self, group: Group, scores: Sequence[Score]) -> None:
        """Filter a scored group and complete it in the buffer."""
        if (problem := steps_problem(group, scores, self.config.algorithm)) is not None:
            await self.lifecycle.drop(group, DropReason.UNSCORED, problem)
            return
        self.recorder.record_scored(scores, [rollout.num_sampled_tokens for rollout in group.rollouts])
        filtered = self.filtering.apply(group, scores)
        if filtered.kept:
            await self.lifecycle.complete(group, filtered, scores)
        else:
            await self.lifecycle.drop(group, DropReason.FILTERED)

    async def train(self) -> None:
        """Evaluate, then take a batch, step, publish, and record what happened, up to ``max_steps``."""
        config = self.config
        if self.first_version:
            await self.serving.publish()
            await self.serving.until_served(self.first_version)
            self.evaluations.resume(self.first_version)
        else:
            start_s = time.perf_counter()
            with doing(State.EVALUATING):
                held_out = await self.evaluations.first()
            eval_s = time.perf_counter() - start_s
            self.recorder.record_initial(held_out, eval_s, await self.generators.stats())
        for step in range(self.first_version + 1, config.max_steps + 1):
            clock = StepClock(step)
            with clock.part(Part.WAIT):
                batch = await self.buffer.take.call_one()
            with clock.part(Part.ASSIGN):
                recorded = self.recorder.picks(step, batch.groups)
                items = training_items(batch.groups, batch.weights, config.algorithm, recorded=recorded)
                minibatches = [
                    assign_rows(
                        of_step,
                        tokens_per_row=config.trainer.tokens_per_row,
                        num_ranks=self.trainer.num_data_ranks,
                    )
                    for of_step in split_by_groups(items, batch.groups, config.trainer.steps_per_batch)
                ]
            with clock.part(Part.TRAIN):
                result = await self.trainer.train_items(minibatches, step=step)
            with clock.part(Part.COMMIT):
                update = Update.MADE if result.skip_reason is None else Update.SKIPPED
                await self.lifecycle.commit(batch, trainer_wait_share=clock.wait_share, update=update)
            self.trained.put_nowait((step, batch))
            self.version += 1
            with clock.part(Part.PUBLISH):
                await self.serving.publish()
            with clock.part(Part.EVALUATE):
                ended = await self.evaluations.after_step(step)
            times = clock.times(has_evaluated=self.evaluations.waits_after(step))
            waited_s = self.storage.waited_s
            with clock.part(Part.RECORD):
                self.recorder.record(
                    StepRecord(
                        step=step,
                        batch=batch,
                        result=result,
                        times=times,
                        engines=tuple(await self.generators.stats()),
                        buffer=await self.with_ledger(self.buffer.report.call_one()),
                        counters=self.counters(),
                        held_out=ended,
                    )
                )
                self.bad_steps.count(step, result)
            clock.move(self.storage.waited_s - waited_s, Part.RECORD, Part.DISK)
            with clock.part(Part.DISK):
                await self.storage.until_written(self.recorder.files)
            await self.checkpoints.after_step(step, clock)
            self.recorder.record_between(clock.times_between())
        await self.checkpoints.finish_last(config.max_steps)

    async def with_ledger(self, call: Awaitable[T]) -> T:
        """Wait for a call that waits for the ledger; tell if its disk refuses."""
        return await self.storage.while_waiting(call, lambda: self.buffer.refusal.call_one())

    async def free_trained(self) -> None:
        """Free the arrays of every batch once no restart of the trainer can ask for them."""
        while True:
            step, batch = await self.trained.get()
            await self.trainer.until_safe(step)
            await self.lifecycle.free(batch.groups)

    def counters(self) -> dict[str, float]:
        """Return what the loops have counted so far, by metric name."""
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


async def train(config: RunConfig, prepared: Prepared) -> None:
    """Start every proc, run the loops, export the trained model, stop every proc."""
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
        manager = open_procs(config, run_dir, console)
        run: GrpoRun | None = None
        try:
            async with manager.naming_deaths():
                if not isinstance(config.launcher, LocalLauncher):
                    console.phase(f"waiting for the hosts of launcher {config.launcher.kind}")
                await open_hosts(config, prepared.facts, manager, tell=console.message)
                roles = await start_roles(config, prepared, manager, console, run_dir)
                console.message(roles.scorer.isolation)
                run = GrpoRun(config, prepared, roles, recorder=recorder, files=files)
                desk = control_desk(run_dir.control.resolve(), manager, roles.generators.pool, config)
                started()
                await run.run(manager, desk)
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
                add_closing_words(words)
            raise
        finally:
            console.phase("ending all procs")
            await manager.close()
            close_trace()
        for line in (*recorder.verdict(), *closing_lines(run_dir)):
            console.message(line)


def start(config: RunConfig, resume: str | None = None) -> None:
    """Make a run, or go on with the one that ``resume`` names; one that is done stays as it is."""
    if (prepared := take_up(config, resume)) is not None:
        run_main(train(prepared.config, prepared))


def main() -> int:
    """Run the command line; returns the exit code."""
    arguments = parse_arguments(
        "Asynchronous GRPO.", dry_run=True, resume=True, rehearse=True, supervise=True
    )
    if arguments.supervise:
        become_supervisor(arguments.config, arguments.overrides, arguments.resume)

    def run() -> None:
        config = load_config(arguments.config, arguments.overrides)
        if arguments.dry_run:
            show_plan(config, gpu_gib=arguments.gpu_gib)
        elif arguments.rehearse:
            rehearse(config, start, on_hosts=arguments.hosts)
        else:
            start(config, arguments.resume)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
