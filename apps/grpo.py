"""GRPO with rollouts and training running concurrently.

    python -m apps.grpo --config FILE [--config FILE ...] [key.path=value ...]
        [--dry-run | --rehearse [--hosts] | [--resume latest] [--supervise]]

Four loops share one replay buffer and wait for each other only through it:

    collect   starts a group whenever the buffer allows one, and has a generator sample it   waits: bounds
    score     scores sampled groups and completes them in the buffer                         waits: collect
    train     makes an optimizer step on a batch and publishes the weights                   waits: score
    serve     stages the newest weights during the next step; generators fetch and swap
              them in, which allows more groups to start                                     waits: train

With an environment, the collecting loop runs episodes, which return scored, so the scoring loop is idle. With
max_off_policy_steps 0, a batch starts only when its weights are served, so the loops run one after the other.
With k > 0, generation runs ahead by at most k versions.

The first three loops are below. In forgeasync/controller, serving.py has the fourth loop, evaluation.py
schedules evaluations, resume.py resumes runs, and run.py has the code before and after the loops.
"""

import asyncio
from collections.abc import Sequence

from forgeasync.buffer import DropReason, ReplayBuffer, Start, Update
from forgeasync.config import RunConfig
from forgeasync.controller import (
    ControlServer,
    Part,
    RunLoops,
    StepRecord,
    StepTimes,
    run_training_app,
    start_run,
)
from forgeasync.environments import sampling_seed
from forgeasync.observability import exit_with
from forgeasync.rollouts import Group, Score
from forgeasync.runtime import ProcessManager, RefusedGroup, SampledGroup
from forgeasync.trainer import steps_problem


class GrpoRun(RunLoops):
    """The loops of one run: coroutines that run concurrently on one event loop."""

    async def run(self, manager: ProcessManager, control: ControlServer | None = None) -> None:
        """Train for ``max_steps`` steps; the first failure of any loop or process ends the run and is raised.

        ``helper_loops`` contains the loops that serve weights, and all loops besides the four.
        """
        async with asyncio.TaskGroup() as loops:
            others = (*self.helper_loops(manager, control), self.collect(), self.score())
            background = [loops.create_task(loop) for loop in others]
            await self.train()
            for task in background:
                task.cancel()

    async def collect(self) -> None:
        """Start a group whenever the buffer allows one and there is memory for its arrays.

        The buffer starts groups when the staleness bound and its size allow them. Only through this call does
        the loop wait for training and for served weights. Groups are sampled concurrently.
        """
        await self.serving.until_served(self.first_version)
        await self.serving.until_taught_by(self.first_version)
        await self.submit(self.lifecycle.num_first_prompts)
        await self.lifecycle.restore()
        async with asyncio.TaskGroup() as groups:
            while True:
                starts, num_wanted = await self.buffer.until(
                    ReplayBuffer.start_groups, max(1, self.payloads.num_free)
                )
                for start in starts:
                    # Waits until older groups have freed enough of the payload memory (payload.capacity_gib).
                    await self.payloads.reserve(start.group_id)
                    groups.create_task(self.sample(start))
                await self.submit(num_wanted)

    async def score(self) -> None:
        """Score the sampled groups from the collecting loop, concurrently."""
        async with asyncio.TaskGroup() as groups:
            while True:
                groups.create_task(self.complete(await self.sampled.get()))

    async def train(self) -> None:
        """Train on batches of complete groups, and publish the weights after each step, up to ``max_steps``.

        Taking a batch waits for the scoring loop, ``trainer.train_items`` for the optimizer step.
        ``serving.publish`` waits only until the trainer has begun to copy its weights; they are staged,
        fetched and swapped in during the next step. If ``evaluation.mode`` is ``pinned``, training waits for
        evaluations.
        """
        config = self.config
        await self.evaluate_first()
        for step in range(self.first_version + 1, config.max_steps + 1):
            times = StepTimes(step=step)
            with times.part(Part.WAIT):
                batch = await self.buffer.until(ReplayBuffer.take)
            with times.part(Part.ASSIGN):
                minibatches = self.pack(batch, step=step)
            with times.part(Part.TRAIN):
                # With generator.colocated: sleep, the engines leave their GPUs for the step.
                async with self.generators.asleep():
                    result = await self.trainer.train_items(minibatches, step=step)
            with times.part(Part.COMMIT):
                # Reports the new version to the buffer, which drops the groups that are too old for it.
                update = Update.MADE if result.skip_reason is None else Update.SKIPPED
                await self.lifecycle.commit(batch, trainer_wait_share=times.wait_share, update=update)
            self.free_later(step, batch)
            self.version += 1
            with times.part(Part.PUBLISH):
                await self.serving.publish()
            with times.part(Part.EVALUATE):
                ended = await self.evaluations.after_step(step)
            times.end(has_evaluated=self.evaluations.waits_after(step))
            waited_s = self.storage.waited_s
            with times.part(Part.RECORD):
                self.recorder.record(
                    StepRecord(
                        step=step,
                        batch=batch,
                        result=result,
                        times=times,
                        engines=tuple(await self.generators.stats()),
                        buffer=await self.with_ledger(self.buffer.report()),
                        counters=self.counters(),
                        held_out=ended,
                    )
                )
                self.bad_steps.count(step, result)
            times.move(self.storage.waited_s - waited_s, Part.RECORD, Part.DISK)
            with times.part(Part.DISK):
                await self.storage.until_written(self.recorder.files)
            await self.checkpoints.after_step(step, times)
        await self.checkpoints.finish_last(config.max_steps)

    # ---- life of one group

    async def sample(self, start: Start) -> None:
        """Sample a group, then keep it or give it up."""
        seed = sampling_seed(self.config.seed, start.draw_id)
        answer = await self.groups.sample(start.group_id, start.task, seed=seed)
        if isinstance(answer, RefusedGroup):
            self.recorder.record_episodes(answer.outcomes)
            await self.lifecycle.give_up(start.group_id, answer.reason, answer.problem)
        else:
            await self.keep(start, answer)

    async def keep(self, start: Start, sampled: SampledGroup) -> None:
        """Put a sampled group into the buffer; pass it to the scoring loop unless it is scored already."""
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
        await self.buffer.change(ReplayBuffer.finished, group)
        if scores is None:
            await self.sampled.put(group)
        else:
            self.recorder.record_episodes(sampled.outcomes)
            self.recorder.keep_records(group.group_id, sampled.outcomes)
            await self.accept(group, scores)

    async def complete(self, group: Group) -> None:
        """Score a group and, if that succeeds, accept it."""
        if (scores := await self.lifecycle.scored(group)) is not None:
            await self.accept(group, scores)

    async def accept(self, group: Group, scores: Sequence[Score]) -> None:
        """Filter a scored group and complete it in the buffer, so that a batch can take it; or drop it."""
        if (problem := steps_problem(group, scores, self.config.algorithm)) is not None:
            await self.lifecycle.drop(group, DropReason.UNSCORED, problem)
            return
        self.recorder.record_scored(scores, [rollout.num_sampled_tokens for rollout in group.rollouts])
        filtered = self.filtering.apply(group, scores)
        if filtered.kept:
            await self.lifecycle.complete(group, filtered, scores)
        else:
            await self.lifecycle.drop(group, DropReason.FILTERED)


def start(config: RunConfig, resume: str | None) -> None:
    """Start a run, or resume the one that ``resume`` names; do nothing if that run is done."""
    start_run(config, resume, GrpoRun)


def main() -> int:
    """Run the command line; return the exit code."""
    return run_training_app("Train a model with GRPO, while it samples.", start, can_rehearse=True)


if __name__ == "__main__":
    exit_with(main)
