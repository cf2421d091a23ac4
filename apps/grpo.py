"""GRPO with rollouts and training running concurrently.

    python -m apps.grpo --config FILE [--config FILE ...] [key.path=value ...]
        [--dry-run | --rehearse [--hosts] | --resume latest]

Four loops share one replay buffer, and wait for each other only through it:

    collect   has a generator sample a prompt whenever the buffer lets a group start         waits: bounds
    score     takes sampled groups, has the scorer reward them, completes them in the buffer waits: collect
    train     takes a batch, makes an optimizer step, has the copies of its weights begin    waits: score
    serve     has the trainer stage the newest weights beside its next step, and a generator
              fetch and swap them in, so that groups may start                               waits: train

With an environment the collecting loop runs episodes, which return sampled and scored: the scoring loop then
has nothing to do. The serving loops are in forgeasync/controller/serving.py; resuming is in resume.py there.
With max_off_policy_steps 0 the buffer lets a batch start only once its weights are served: the loops then run
one after the other. With k > 0 generation runs ahead by at most k versions.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from forgeasync.actors.environment import SampledGroup
from forgeasync.actors.generator import CancelledGroup, RefusedGroup
from forgeasync.actors.group_scoring import Unscored
from forgeasync.actors.procs import Procs
from forgeasync.buffer.decisions import Batch, DropReason, Start
from forgeasync.buffer.starvation import StarvationWatch
from forgeasync.checkpoint.folders import FINAL
from forgeasync.config.data import named_sources
from forgeasync.config.launcher import LocalLauncher
from forgeasync.config.load import load_config
from forgeasync.config.run import RunConfig
from forgeasync.config.weights import Interruption
from forgeasync.controller.checkpointing import RunCheckpoints
from forgeasync.controller.cli import add_closing_words, exit_code, parse_arguments, show_plan
from forgeasync.controller.evaluation import evaluate_all
from forgeasync.controller.host_checks import open_hosts
from forgeasync.controller.preparation import Prepared, prepare
from forgeasync.controller.recorder import RunRecorder, StepRecord, StepTimes
from forgeasync.controller.rehearsing import rehearse
from forgeasync.controller.rescue import save_newest_weights
from forgeasync.controller.resume import open_files
from forgeasync.controller.serving import WeightServing
from forgeasync.controller.starting import Roles, start_roles
from forgeasync.controller.stopping import run_main, telling
from forgeasync.environments.order import sampling_seed, weighted_order
from forgeasync.environments.reward import response_of
from forgeasync.launch.job_hosts import build_hosts
from forgeasync.models.sizes import largest_group_payload_bytes
from forgeasync.observability.console import StepConsole
from forgeasync.observability.logs import configure_controller_logging, separate_native_output
from forgeasync.observability.run_log import RunLog
from forgeasync.observability.scored_groups import HeldOutScores
from forgeasync.observability.summary import closing_lines
from forgeasync.rollouts.payload_budget import AsyncPayloadBudget, PayloadBudget, largest_excess
from forgeasync.rollouts.rollout import Group
from forgeasync.rollouts.score import Score
from forgeasync.scoring.filtering import GroupFiltering
from forgeasync.trainer.advantage_spans import steps_problem
from forgeasync.trainer.batch import assign_rows, split_by_groups, training_items
from forgeasync.trainer.step_result import SkipWatch


class GrpoRun:
    """The four loops of one run and what they share."""

    def __init__(
        self,
        config: RunConfig,
        prepared: Prepared,
        roles: Roles,
        *,
        recorder: RunRecorder,
        checkpoints: Path,
    ) -> None:
        """``checkpoints`` is the folder that checkpoints are written to."""
        self.config = config
        self.prepared = prepared
        self.trainer = roles.trainer
        self.generators = roles.generators
        self.scorer = roles.scorer
        self.groups = roles.groups
        self.buffer = roles.buffer
        self.recorder = recorder
        self.checkpoints = RunCheckpoints(
            checkpoints, prepared, trainer=self.trainer, buffer=self.buffer, recorder=recorder
        )
        resumed = prepared.resumed
        self.first_version = 0 if resumed is None else resumed.state.step
        self.version = self.first_version
        self.skips = SkipWatch(config.trainer.max_skipped_steps)
        position = 0 if resumed is None else resumed.state.buffer.num_submitted
        weights = {source.name: source.weight for source in named_sources(config.data)}
        self.order = weighted_order(prepared.train, weights, seed=config.seed, position=position)
        self.filtering = GroupFiltering(config.algorithm, seed=config.seed)
        self.starvation = StarvationWatch(config.buffer.max_given_up_in_a_row)
        capacity = int(config.payload.capacity_gib * 2**30)
        largest_group = largest_group_payload_bytes(config, prepared.facts)
        excess = largest_excess(capacity, config.algorithm.groups_per_step, largest_group)
        self.payloads = AsyncPayloadBudget(
            PayloadBudget(capacity, excess_bytes=excess), largest_group_bytes=largest_group
        )
        # Bounded by the buffer: it never holds more than the groups in flight.
        self.sampled: asyncio.Queue[Group] = asyncio.Queue()
        self.serving = WeightServing(
            config.weights,
            trainer=self.trainer,
            generators=self.generators,
            buffer=self.buffer,
            recorder=recorder,
        )

    async def run(self, fleet: Procs) -> None:
        """Train for ``max_steps`` steps; the first failure of any loop or proc ends the run and is raised."""
        async with asyncio.TaskGroup() as loops:
            others = (fleet.watch(), *self.serving.loops(), self.collect(), self.score())
            background = [loops.create_task(loop) for loop in others]
            await self.train()
            for task in background:
                task.cancel()

    async def collect(self) -> None:
        """Start a group whenever the buffer lets one start and the payload store has room for it."""
        await self.serving.until_served(self.first_version)
        await self.submit(self.config.algorithm.groups_per_step)
        async with asyncio.TaskGroup() as groups:
            while True:
                start, num_wanted = await self.buffer.start.call_one()
                await self.submit(num_wanted)
                await self.payloads.reserve(start.group_id)
                groups.create_task(self.sample(start))

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
                await self.give_up(start.group_id, answer.reason, answer.problem)
            case CancelledGroup():
                await self.give_up(start.group_id, DropReason.CANCELLED)

    async def keep(self, start: Start, sampled: SampledGroup) -> None:
        """Put a sampled group into the buffer, for the scoring loop unless an environment has scored it."""
        group = Group(
            group_id=start.group_id, draw_id=start.draw_id, task=start.task, rollouts=sampled.rollouts
        )
        if not await self.payloads.settle(group.group_id, group.num_payload_bytes):
            problem = (
                f"group {group.group_id} takes {group.num_payload_bytes:,} bytes, more than its reservation "
                "and the rest of the shared excess; must be less, or payload.capacity_gib larger"
            )
            await self.drop(group, DropReason.OVERSIZED, problem)
            return
        await self.buffer.finished.call_one(group)
        if sampled.results is None:
            await self.sampled.put(group)
        else:
            self.recorder.record_episodes(sampled.results)
            await self.accept(group, [result.score for result in sampled.results])

    async def give_up(self, group_id: int, reason: DropReason, problem: str | None = None) -> None:
        """Give up a group; the buffer decides what takes its place. ``problem`` says what was wrong with it.

        Raises:
            NothingTrains: too many groups in a row were given up.
        """
        if problem is not None:
            self.recorder.warn(problem)
            self.starvation.given_up(reason, problem)
        await self.payloads.release(group_id)
        await self.buffer.failed.call_one(group_id, reason)

    async def drop(self, group: Group, reason: DropReason, problem: str | None = None) -> None:
        """Give up a group that was sampled, and free its arrays."""
        await self.generators.free_payloads(group.rollouts)
        await self.give_up(group.group_id, reason, problem)

    async def score(self) -> None:
        """Have sampled groups scored concurrently; the buffer bounds how many there are."""
        async with asyncio.TaskGroup() as groups:
            while True:
                groups.create_task(self.complete(await self.sampled.get()))

    async def complete(self, group: Group) -> None:
        """Have the scorer score a group, and accept it."""
        scores = await self.scorer.score(
            f"group {group.group_id}", group.task, [response_of(rollout) for rollout in group.rollouts]
        )
        if isinstance(scores, Unscored):
            await self.drop(group, DropReason.UNSCORED, scores.reason)
        else:
            await self.accept(group, scores)

    async def accept(self, group: Group, scores: Sequence[Score]) -> None:
        """Filter a scored group and complete it in the buffer."""
        if (problem := steps_problem(group, scores, self.config.algorithm)) is not None:
            await self.drop(group, DropReason.UNSCORED, problem)
            return
        self.recorder.record_scored(scores, [rollout.num_sampled_tokens for rollout in group.rollouts])
        filtered = self.filtering.apply(group, scores)
        if filtered.kept:
            self.starvation.came_through()
            kept_scores = [scores[index] for index in filtered.kept]
            lost = await self.buffer.scored.call_one(
                group.group_id, filtered.rewards, filtered.kept, kept_scores
            )
            await self.free(lost)
        else:
            await self.drop(group, DropReason.FILTERED)

    async def train(self) -> None:
        """Evaluate, then take a batch, step, publish, and record what happened, up to ``max_steps``."""
        config = self.config
        if self.first_version:
            await self.serving.publish()
        else:
            self.recorder.record_initial(*await self.evaluate(0), await self.generators.stats())
        for step in range(self.first_version + 1, config.max_steps + 1):
            start_s = time.perf_counter()
            batch = await self.buffer.take.call_one()
            wait_s = time.perf_counter() - start_s

            items = training_items(batch.groups, batch.weights, config.algorithm)
            minibatches = [
                assign_rows(
                    of_step,
                    tokens_per_row=config.trainer.tokens_per_row,
                    num_ranks=self.trainer.num_data_ranks,
                )
                for of_step in split_by_groups(items, batch.groups, config.trainer.steps_per_batch)
            ]
            train_start_s = time.perf_counter()
            result = await self.trainer.train_items(minibatches, step=step)
            train_s = time.perf_counter() - train_start_s
            await self.commit(batch, trainer_wait_share=wait_s / (wait_s + train_s))

            publish_start_s = time.perf_counter()
            version = result.policy_version
            await self.serving.publish()
            publish_s = time.perf_counter() - publish_start_s

            held_out, eval_s = None, 0.0
            if step % config.evaluation.every_steps == 0 or step == config.max_steps:
                held_out, eval_s = await self.evaluate(version)
            times = StepTimes(
                step_s=time.perf_counter() - start_s,
                wait_for_batch_s=wait_s,
                train_s=train_s,
                publish_weights_s=publish_s,
                eval_s=eval_s,
            )
            self.recorder.record(
                StepRecord(
                    step=step,
                    batch=batch,
                    result=result,
                    times=times,
                    engines=tuple(await self.generators.stats()),
                    buffer=await self.buffer.report.call_one(),
                    counters=self.counters(),
                    held_out=held_out,
                )
            )
            self.skips.count(step, result)
            if config.checkpoint.every_steps is not None and step % config.checkpoint.every_steps == 0:
                checkpoint_start_s = time.perf_counter()
                await self.checkpoints.begin(step)
                self.recorder.record_checkpoint(time.perf_counter() - checkpoint_start_s)
        await self.checkpoints.finish()

    def counters(self) -> dict[str, float]:
        """Return what the loops have counted so far, by metric name."""
        counted = (self.filtering, self.scorer, self.payloads, self.serving.ledger)
        return {name: value for one in counted for name, value in one.metrics().items()}

    async def commit(self, batch: Batch, *, trainer_wait_share: float) -> None:
        """Free a batch that was trained on, and the groups that are too old now."""
        await self.free(batch.groups)
        committed = await self.buffer.committed.call_one(trainer_wait_share)
        self.version += 1
        await self.free(committed.lost)
        if committed.cancelled and self.config.weights.interruption is Interruption.CANCEL_STALE:
            await self.generators.cancel_groups(committed.cancelled)

    async def free(self, groups: Sequence[Group]) -> None:
        """Free the arrays of groups whose step is done, or that were dropped."""
        await self.generators.free_payloads(rollout for group in groups for rollout in group.rollouts)
        for group in groups:
            await self.payloads.release(group.group_id)

    async def evaluate(self, version: int) -> tuple[HeldOutScores, float]:
        """Score ``version`` on problems that are not trained on; also return the seconds it took.

        Training waits meanwhile.
        """
        start_s = time.perf_counter()
        await self.serving.until_served(version)
        scores = await evaluate_all(self.prepared, self.groups, self.recorder.console, version=version)
        return scores, time.perf_counter() - start_s


async def train(config: RunConfig, prepared: Prepared) -> None:
    """Start every proc, run the loops, export the trained model, stop every proc."""
    files = open_files(config, prepared.resumed)
    run_dir = files.run_dir
    separate_native_output(run_dir.log("controller"))
    configure_controller_logging(run_dir.log("controller"))
    resumed = None if prepared.resumed is None else prepared.resumed.state
    with (
        RunLog(run_dir.run_log) as log,
        StepConsole(
            config.max_steps, eval_every_steps=config.evaluation.every_steps, log=log.line
        ) as console,
        RunRecorder(config, run_dir, console, resumed) as recorder,
        telling(lambda number: console.phase(f"stopping on {number.name}: waiting for what is under way")),
    ):
        warnings = [f"warning: {words}" for words in prepared.warnings]
        for message in (f"run directory {run_dir.path}", *files.messages, *warnings):
            console.message(message)
        fleet = Procs(run_dir.logs.resolve(), build_hosts(config, run_dir.logs.resolve()))
        run: GrpoRun | None = None
        try:
            async with fleet.naming_deaths():
                if not isinstance(config.launcher, LocalLauncher):
                    console.phase(f"waiting for the hosts of launcher {config.launcher.kind}")
                await open_hosts(config, prepared.facts, fleet, tell=console.message)
                roles = await start_roles(config, prepared, fleet, console)
                console.message(roles.scorer.isolation)
                run = GrpoRun(config, prepared, roles, recorder=recorder, checkpoints=files.checkpoints)
                await run.run(fleet)
                final = run_dir.checkpoints.resolve() / FINAL
                console.phase(f"writing {final}")
                await run.trainer.save_hf(final, source=prepared.model_path)
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
            await fleet.close()
        for line in closing_lines(run_dir):
            console.message(line)


def main() -> int:
    """Run the command line; returns the exit code."""
    arguments = parse_arguments("Asynchronous GRPO.", dry_run=True, resume=True, rehearse=True)

    def start(config: RunConfig) -> None:
        prepared = prepare(config, arguments.resume)
        run_main(train(prepared.config, prepared))

    def run() -> None:
        config = load_config(arguments.config, arguments.overrides)
        if arguments.dry_run:
            show_plan(config, gpu_gib=arguments.gpu_gib)
        elif arguments.rehearse:
            rehearse(config, start, on_hosts=arguments.hosts)
        else:
            start(config)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
