"""GRPO with rollouts and training side by side.

    python -m apps.grpo --config FILE [--config FILE ...] [key.path=value ...] [--dry-run]

Four loops share one replay buffer, and none waits for another beyond it:

    collect   has a generator sample a prompt whenever the buffer lets a group start         waits: bounds
    score     takes sampled groups, has the scorer reward them, completes them in the buffer waits: collect
    train     takes a batch, makes an optimizer step, stages the new weights                 waits: score
    serve     has a generator fetch and swap in the newest weights, so that groups may start waits: train

With max_off_policy_steps 0 the buffer lets a batch start only once its weights are served: the loops then run
one after the other. With k > 0 generation runs ahead by at most k versions.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from datetime import datetime

from rich.console import Console

from apps.cli import exit_code, parse_arguments
from apps.preparation import Prepared, check, prepare
from apps.recorder import RunRecorder, StepTimes
from forgeasync.actors.buffer import BufferActor
from forgeasync.actors.evaluation import evaluate
from forgeasync.actors.fleet import Fleet
from forgeasync.actors.generator import CancelledGroup, RefusedGroup
from forgeasync.actors.router import GeneratorRouter
from forgeasync.actors.scorer import ScorerActor
from forgeasync.actors.trainer_mesh import TrainerMesh
from forgeasync.buffer.replay_buffer import Batch, DropReason, Start
from forgeasync.config.load import dump_config, load_config
from forgeasync.config.model_facts import model_config_file
from forgeasync.config.schema import AgeOf, Interruption, RunConfig
from forgeasync.config.sizes import largest_group_payload_bytes
from forgeasync.data.order import TaskOrder
from forgeasync.data.rollout import Group
from forgeasync.observability.console import StepConsole
from forgeasync.observability.logs import configure_controller_logging, separate_native_output
from forgeasync.observability.run_dir import RunDir
from forgeasync.payload.async_budget import AsyncPayloadBudget
from forgeasync.payload.budget import PayloadBudget
from forgeasync.scoring.filtering import GroupFiltering
from forgeasync.trainer.batch import deal_items, training_items
from forgeasync.weights.board import WeightBoard
from forgeasync.weights.ledger import WeightLedger

MAX_FAILED_FETCHES = 5
"""In a row, of one generator; each has tried every bad block several times."""

REPORT_COLUMNS = 120
"""Width of the dry run's table, also in a pipe."""


class GrpoRun:
    """The four loops of one run and what they share."""

    def __init__(
        self,
        config: RunConfig,
        prepared: Prepared,
        *,
        trainer: TrainerMesh,
        generators: GeneratorRouter,
        scorer: ScorerActor,
        buffer: BufferActor,
        recorder: RunRecorder,
    ) -> None:
        self.config = config
        self.prepared = prepared
        self.trainer = trainer
        self.generators = generators
        self.scorer = scorer
        self.recorder = recorder
        self.order = TaskOrder(prepared.train, seed=config.seed)
        self.buffer = buffer
        self.filtering = GroupFiltering(config.algorithm, seed=config.seed)
        self.payloads = AsyncPayloadBudget(
            PayloadBudget(int(config.payload.capacity_gib * 2**30)),
            largest_group_bytes=largest_group_payload_bytes(config, prepared.facts),
        )
        # Bounded by the buffer: it never holds more than the groups in flight.
        self.sampled: asyncio.Queue[Group] = asyncio.Queue()
        self.weights = WeightBoard(WeightLedger(lease_timeout_s=config.weights.lease_timeout_s))
        self.served_versions = [0] * generators.num_replicas
        self.served = asyncio.Condition()

    async def run(self, fleet: Fleet) -> None:
        """Train for ``max_steps`` steps; the first failure of any loop or proc ends the run and is raised."""
        async with asyncio.TaskGroup() as loops:
            serving = [self.serve(replica) for replica in range(self.generators.num_replicas)]
            others = (fleet.watch(), *serving, self.catch_up(), self.collect(), self.score())
            background = [loops.create_task(loop) for loop in others]
            await self.train()
            for task in background:
                task.cancel()

    async def collect(self) -> None:
        """Start a group whenever the buffer lets one start and the payload store has room for it."""
        await self.submit(self.config.algorithm.groups_per_step)
        async with asyncio.TaskGroup() as groups:
            while True:
                start, num_wanted = await self.buffer.start.call_one()
                await self.submit(num_wanted)
                await self.payloads.reserve(start.group_id)
                groups.create_task(self.sample(start))

    async def submit(self, num_prompts: int) -> None:
        """Hand the next prompts of the data's order in."""
        await self.buffer.submit.call_one([self.order.next() for _ in range(num_prompts)])

    async def sample(self, start: Start) -> None:
        """Have a generator sample one group, and hand it to the scoring loop."""
        answer = await self.generators.sample_group(
            start.group_id,
            self.prepared.prompts.encode(start.task.prompt),
            num_samples=self.config.algorithm.group_size,
            sampling=self.config.sampling,
        )
        if isinstance(answer, RefusedGroup):
            self.recorder.warn(answer.problem)
            await self.give_up(start.group_id, DropReason.BAD_RECORD)
        elif isinstance(answer, CancelledGroup):
            await self.give_up(start.group_id, DropReason.CANCELLED)
        else:
            group = Group(group_id=start.group_id, task=start.task, rollouts=answer)
            await self.payloads.settle(group.group_id, group.num_payload_bytes)
            await self.buffer.finished.call_one(group)
            await self.sampled.put(group)

    async def give_up(self, group_id: int, reason: DropReason) -> None:
        """A group will not come: the buffer says what takes its place."""
        await self.payloads.release(group_id)
        await self.buffer.failed.call_one(group_id, reason)

    async def score(self) -> None:
        """Reward sampled groups, filter them and complete them in the buffer."""
        while True:
            group = await self.sampled.get()
            responses = [rollout.text for rollout in group.rollouts]
            async with asyncio.timeout(self.config.timeouts.score_s):
                rewards = await self.scorer.score.call_one(group.task, responses)
            self.recorder.record_scored(rewards)
            filtered = self.filtering.apply(group, rewards)
            if filtered.kept:
                lost = await self.buffer.scored.call_one(group.group_id, filtered.rewards, filtered.kept)
                await self.free(lost)
            else:
                await self.generators.free_payloads(group.rollouts)
                await self.give_up(group.group_id, DropReason.FILTERED)

    async def train(self) -> None:
        """Evaluate, then take a batch, step, publish, and record what happened, ``max_steps`` times."""
        config = self.config
        version = 0
        self.recorder.record_initial(*await self.evaluate(version), await self.generators.stats())
        for step in range(1, config.max_steps + 1):
            start_s = time.perf_counter()
            batch = await self.buffer.take.call_one()
            wait_s = time.perf_counter() - start_s

            rows = deal_items(
                training_items(batch.groups, batch.weights, config.algorithm),
                tokens_per_row=config.trainer.tokens_per_row,
                num_ranks=self.trainer.num_data_ranks,
            )
            train_start_s = time.perf_counter()
            result = await self.trainer.train_items(rows)
            train_s = time.perf_counter() - train_start_s
            await self.commit(batch, trainer_wait_share=wait_s / (wait_s + train_s))

            publish_start_s = time.perf_counter()
            version = result.policy_version
            await self.weights.publish(self.trainer.stage_weights)
            publish_s = time.perf_counter() - publish_start_s

            accuracy, eval_s = None, 0.0
            if step % config.evaluation.every_steps == 0 or step == config.max_steps:
                accuracy, eval_s = await self.evaluate(version)
            times = StepTimes(
                step_s=time.perf_counter() - start_s,
                wait_for_batch_s=wait_s,
                train_s=train_s,
                publish_weights_s=publish_s,
                eval_s=eval_s,
            )
            self.recorder.record(
                step,
                batch,
                result,
                times,
                engines=await self.generators.stats(),
                buffer=await self.buffer.report.call_one(),
                filtering=self.filtering,
                payloads=self.payloads,
                weights=self.weights.ledger,
                accuracy=accuracy,
            )

    async def commit(self, batch: Batch, *, trainer_wait_share: float) -> None:
        """A batch was trained on: free it, and let go of what is too old now."""
        await self.free(batch.groups)
        committed = await self.buffer.committed.call_one(trainer_wait_share)
        await self.free(committed.lost)
        if committed.cancelled and self.config.weights.interruption is Interruption.CANCEL_STALE:
            await self.generators.cancel_groups(committed.cancelled)

    async def free(self, groups: Sequence[Group]) -> None:
        """Free the arrays of groups whose step is done, or that were dropped."""
        await self.generators.free_payloads(rollout for group in groups for rollout in group.rollouts)
        for group in groups:
            await self.payloads.release(group.group_id)

    async def serve(self, replica: int) -> None:
        """Have one generator fetch the newest weights and swap them in, whenever there are newer ones."""
        num_failed = 0
        while num_failed < MAX_FAILED_FETCHES:
            async with self.weights.lease(replica, newer_than=self.served_versions[replica]) as manifest:
                fetched = await self.generators.begin_update(replica, manifest)
            # The generator has a copy of its own now: the trainer may write over the one it has read.
            self.recorder.record_fetch(fetched)
            num_failed = 0 if fetched.is_complete else num_failed + 1
            if fetched.is_complete:
                swap = await self.generators.finish_update(replica)
                self.recorder.record_swap(swap)
                # First: with it groups that run on become younger than their start says.
                await self.buffer.progressed.call_one(swap.progress)
                await self.set_served(replica, manifest.version)
        raise RuntimeError(
            f"generator {replica}: {num_failed} fetches in a row did not arrive as their manifests say; "
            "a lease that is too short (weights.lease_timeout_s) or faulty memory does this"
        )

    async def set_served(self, replica: int, version: int) -> None:
        """A generator samples under ``version`` from now on."""
        async with self.served:
            self.served_versions[replica] = version
            self.served.notify_all()
        await self.buffer.set_served_version.call_one(min(self.served_versions))

    async def catch_up(self) -> None:
        """Publish what had to be skipped while generators were reading both staging buffers."""
        while True:
            await self.weights.until_owed()
            await self.weights.publish(self.trainer.stage_weights)

    async def evaluate(self, version: int) -> tuple[float, float]:
        """Held-out accuracy of ``version``, and the seconds it took; training stands still meanwhile."""
        start_s = time.perf_counter()
        async with self.served:
            await self.served.wait_for(lambda: min(self.served_versions) == version)
        accuracy = await evaluate(
            self.prepared.held_out,
            generators=self.generators,
            scorer=self.scorer,
            prompts=self.prepared.prompts,
            config=self.config,
        )
        return accuracy, time.perf_counter() - start_s


async def start(config: RunConfig, prepared: Prepared, fleet: Fleet, recorder: RunRecorder) -> GrpoRun:
    """Start and set up the procs of all roles, side by side."""
    async with asyncio.TaskGroup() as starting:
        generators = starting.create_task(fleet.start_generators(config, prepared.facts, prepared.model_path))
        scorer = starting.create_task(fleet.start_scorer(config))
        buffer = starting.create_task(fleet.start_buffer(config))
        trainer = starting.create_task(
            fleet.start_trainer(
                config,
                config.trainer,
                prepared.facts,
                loss=config.algorithm,
                seed=config.seed,
                checkpoint=prepared.model_path,
                lora=config.lora,
                max_token_age=config.max_off_policy_steps if config.buffer.age_of is AgeOf.TOKEN else None,
            )
        )
    await trainer.result().connect(generators.result())
    await fleet.connect_weights(config, trainer.result(), generators.result())
    return GrpoRun(
        config,
        prepared,
        trainer=trainer.result(),
        generators=generators.result(),
        scorer=scorer.result(),
        buffer=buffer.result(),
        recorder=recorder,
    )


async def train(config: RunConfig, prepared: Prepared) -> None:
    """Start every proc, run the loops, export the trained model, stop every proc."""
    run_dir = RunDir.create(config, dump_config(config), datetime.now())
    separate_native_output(run_dir.log("controller"))
    configure_controller_logging(run_dir.log("controller"))
    with StepConsole(config.max_steps) as console, RunRecorder(config, run_dir, console) as recorder:
        num_trainer, num_generator = config.trainer.parallel.num_procs, config.generator.num_replicas
        console.message(f"run directory {run_dir.path}")
        console.message(
            f"starting {num_trainer} trainer procs, {num_generator} generators, 1 scorer, 1 buffer"
        )
        fleet = Fleet(run_dir.logs.resolve())
        try:
            run = await start(config, prepared, fleet, recorder)
            await run.run(fleet)
            final = run_dir.checkpoints.resolve() / "final"
            await run.trainer.save_hf(final, source=prepared.model_path)
            console.message(f"wrote {final}")
        finally:
            await fleet.close()


def show_plan(config: RunConfig) -> None:
    """Check the config and print what it would start; needs no GPU and starts nothing."""
    # Builds the model on the meta device, which only a dry run has to wait for.
    from forgeasync.planning.report import dry_run_report

    facts = check(config)
    report = dry_run_report(config, facts, shape_from=model_config_file(config.model.path))
    Console(width=REPORT_COLUMNS).print(report)


def main() -> int:
    """Run the command line; returns the exit code."""
    arguments = parse_arguments("Asynchronous GRPO.", dry_run=True)

    def run() -> None:
        config = load_config(arguments.config, arguments.overrides)
        if arguments.dry_run:
            show_plan(config)
        else:
            prepared = prepare(config)
            asyncio.run(train(prepared.config, prepared))

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
