"""GRPO with rollouts and training side by side.

    python -m apps.grpo --config FILE [key.path=value ...] [--dry-run]

Four loops share one replay buffer, and none waits for another beyond it:

    collect   takes a prompt whenever the buffer admits a group, has a generator sample it   waits: admission
    score     takes sampled groups, has the scorer reward them, completes them in the buffer waits: collect
    train     takes a batch, makes an optimizer step, publishes the new weights              waits: score
    serve     has every generator swap in the newest weights, which admits further groups    waits: train

With max_off_policy_steps 0 the buffer admits a batch only once its weights are served: the loops then run one
after the other. With k > 0 generation runs ahead by at most k versions.
"""

import asyncio
import dataclasses
import sys
import time
from collections import deque
from datetime import datetime

from rich.console import Console

from apps.cli import exit_code, parse_arguments
from apps.preparation import Prepared, check, prepare
from apps.recorder import RunRecorder, StepTimes
from forgeasync.actors.evaluation import evaluate
from forgeasync.actors.fleet import Fleet
from forgeasync.actors.router import GeneratorRouter
from forgeasync.actors.scorer import ScorerActor
from forgeasync.actors.trainer_mesh import TrainerMesh
from forgeasync.buffer.async_buffer import AsyncReplayBuffer
from forgeasync.buffer.replay_buffer import ReplayBuffer
from forgeasync.config.load import dump_config, load_config
from forgeasync.config.model_facts import model_config_file
from forgeasync.config.schema import RunConfig
from forgeasync.data.order import TaskOrder
from forgeasync.data.rollout import Group
from forgeasync.data.task import Task
from forgeasync.observability.console import StepConsole
from forgeasync.observability.logs import configure_controller_logging, separate_native_output
from forgeasync.observability.run_dir import RunDir
from forgeasync.trainer.batch import training_sequences
from forgeasync.trainer.objectives import PpoClip
from forgeasync.trainer.packing import pack_rows
from forgeasync.weights import store

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
        recorder: RunRecorder,
    ) -> None:
        self.config = config
        self.prepared = prepared
        self.trainer = trainer
        self.generators = generators
        self.scorer = scorer
        self.recorder = recorder
        self.order = TaskOrder(prepared.train, seed=config.seed)
        self.reissued: deque[Task] = deque()
        self.buffer = AsyncReplayBuffer(
            ReplayBuffer(
                groups_per_step=config.algorithm.groups_per_step,
                max_off_policy_steps=config.max_off_policy_steps,
                stale_groups=config.buffer.stale_groups,
                max_groups=config.buffer.max_groups,
                num_groups_in_run=config.max_steps * config.algorithm.groups_per_step,
            )
        )
        # Bounded by the buffer's admission: it never holds more than the groups in flight.
        self.sampled: asyncio.Queue[Group] = asyncio.Queue()
        self.published: asyncio.Queue[int] = asyncio.Queue()
        self.served_version = 0
        self.served = asyncio.Condition()

    async def run(self, fleet: Fleet) -> None:
        """Train for ``max_steps`` steps; the first failure of any loop or proc ends the run and is raised."""
        async with asyncio.TaskGroup() as loops:
            others = (fleet.watch(), self.serve(), self.collect(), self.score())
            background = [loops.create_task(loop) for loop in others]
            await self.train()
            for task in background:
                task.cancel()

    async def collect(self) -> None:
        """Start a group whenever the buffer admits one."""
        async with asyncio.TaskGroup() as groups:
            while True:
                group_id = await self.buffer.admit()
                task = self.reissued.popleft() if self.reissued else self.order.next()
                groups.create_task(self.sample(group_id, task))

    async def sample(self, group_id: int, task: Task) -> None:
        """Have a generator sample one group, and hand it to the scoring loop."""
        rollouts = await self.generators.generate(
            self.prepared.prompts.encode(task.prompt),
            num_samples=self.config.algorithm.group_size,
            sampling=self.config.sampling,
        )
        await self.sampled.put(Group(group_id=group_id, task=task, rollouts=rollouts))

    async def score(self) -> None:
        """Reward sampled groups and complete them in the buffer."""
        while True:
            group = await self.sampled.get()
            async with asyncio.timeout(self.config.timeouts.score_s):
                rewards = await self.scorer.score.call_one(group)
            await self.buffer.add(dataclasses.replace(group, rewards=rewards))

    async def train(self) -> None:
        """Evaluate, then take a batch, step, publish, and record what happened, ``max_steps`` times."""
        config = self.config
        version = 0
        self.recorder.record_initial(*await self.evaluate(version), await self.generators.stats())
        for step in range(1, config.max_steps + 1):
            start_s = time.perf_counter()
            batch, stale = await self.buffer.take(version)
            self.reissued.extend(group.task for group in stale)
            wait_s = time.perf_counter() - start_s

            sequences = training_sequences(batch, config.algorithm.advantage, trained_version=version)
            rows = pack_rows(
                sequences,
                tokens_per_row=config.trainer.tokens_per_row,
                num_ranks=self.trainer.num_data_ranks,
            )
            train_start_s = time.perf_counter()
            result = await self.trainer.train_step(rows)
            train_s = time.perf_counter() - train_start_s

            publish_start_s = time.perf_counter()
            version = await self.trainer.publish(config.generator.dtype)
            self.published.put_nowait(version)
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
                num_dropped=self.buffer.state.num_dropped,
                accuracy=accuracy,
            )

    async def serve(self) -> None:
        """Have all generators swap in the newest published weights; free the versions before them."""
        kept: list[int] = []
        while True:
            versions = [await self.published.get()]
            while not self.published.empty():
                versions.append(self.published.get_nowait())
            kept += versions
            self.recorder.record_pauses(await self.generators.update_weights(versions[-1]))
            await self.buffer.set_served_version(versions[-1])
            async with self.served:
                self.served_version = versions[-1]
                self.served.notify_all()
            for version in kept[:-1]:
                await store.drop(version)
            del kept[:-1]

    async def evaluate(self, version: int) -> tuple[float, float]:
        """Held-out accuracy of ``version``, and the seconds it took; training stands still meanwhile."""
        start_s = time.perf_counter()
        async with self.served:
            await self.served.wait_for(lambda: self.served_version == version)
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
    objective = PpoClip(clip_low=config.algorithm.clip_low, clip_high=config.algorithm.clip_high)
    async with asyncio.TaskGroup() as starting:
        starting.create_task(fleet.start_weight_store())
        generators = starting.create_task(fleet.start_generators(config, prepared.model_path))
        scorer = starting.create_task(fleet.start_scorer(config))
        trainer = starting.create_task(
            fleet.start_trainer(
                config,
                config.trainer,
                prepared.facts,
                objective=objective,
                seed=config.seed,
                checkpoint=prepared.model_path,
            )
        )
    return GrpoRun(
        config,
        prepared,
        trainer=trainer.result(),
        generators=generators.result(),
        scorer=scorer.result(),
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
        console.message(f"starting {num_trainer} trainer procs, {num_generator} generators, 1 scorer")
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
            asyncio.run(train(config, prepare(config)))

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
