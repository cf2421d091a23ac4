"""When a run evaluates, and whether training waits for it.

With ``evaluation.mode: pinned`` training waits for every evaluation. With ``beside`` it waits only

    before the first step   the model that the run began with is evaluated under version 0
    before the last step    until the evaluation under way has ended, so that the last line is free
    after the last step     the last version is served, then evaluated

At most one evaluation is under way. One that is due meanwhile is skipped and counted: later it would be an
evaluation of other versions, close to the next one. So a line of metrics has at most one evaluation, and
every evaluation that has begun is on a line.
"""

import asyncio
from collections.abc import Awaitable, Callable

from forgeasync.actors import GroupSampler
from forgeasync.config import EvaluationMode, RunConfig
from forgeasync.controller.evaluation import evaluate_all, num_responses
from forgeasync.controller.preparation import Prepared
from forgeasync.observability import HeldOutScores, StepConsole

SHARE_BESIDE = 4
"""Beside training, evaluation takes one in so many of the sequences that the generators decode at once: with
all of its requests at once in the engines' queues, training would wait for them after all."""


def max_beside(config: RunConfig) -> int:
    """Return how many rollouts are evaluated at once beside training."""
    generator = config.generator
    return max(1, generator.max_num_seqs * generator.num_replicas // SHARE_BESIDE)


def waited_every_steps(config: RunConfig) -> int:
    """Return the number of steps between two evaluations that training waits for."""
    pinned = config.evaluation.mode is EvaluationMode.PINNED
    return config.evaluation.every_steps if pinned else config.max_steps


class EvaluationSchedule:
    """The evaluations of a run."""

    def __init__(
        self,
        prepared: Prepared,
        groups: GroupSampler,
        console: StepConsole,
        *,
        until_served: Callable[[int], Awaitable[None]],
    ) -> None:
        """``until_served`` waits until every generator samples under a version."""
        self._prepared = prepared
        self._groups = groups
        self._console = console
        self._until_served = until_served
        self._section = prepared.config.evaluation
        self._max_steps = prepared.config.max_steps
        self._wanted: asyncio.Queue[int] = asyncio.Queue()
        self._is_under_way = False
        self._ended: HeldOutScores | None = None
        self._num_skipped = 0

    def waits_after(self, step: int) -> bool:
        """Whether training waits after this step, if an evaluation is due or under way."""
        if step == self._max_steps:
            return True
        if self._section.mode is EvaluationMode.PINNED:
            return self._is_due(step)
        return step == self._max_steps - 1

    async def first(self) -> HeldOutScores:
        """Evaluate version 0."""
        return await self._pinned(0)

    def resume(self, step: int) -> None:
        """Begin again what was due after the step that a run goes on from: the run that made the checkpoint
        had only just begun it."""
        if self._section.mode is EvaluationMode.BESIDE and self._is_due(step) and step < self._max_steps - 1:
            self._begin(step)

    async def after_step(self, step: int) -> HeldOutScores | None:
        """Evaluate, or begin to, if that is due; return the evaluation that has ended, if any.

        The version that step ``step`` has made is ``step``.
        """
        if step == self._max_steps:
            return await self._pinned(step)
        if self._section.mode is EvaluationMode.PINNED:
            return await self._pinned(step) if self._is_due(step) else None
        is_last_but_one = step == self._max_steps - 1
        if is_last_but_one:
            await self._wanted.join()
        ended, self._ended = self._ended, None
        if self._is_due(step):
            if is_last_but_one or self._is_under_way:
                self._num_skipped += 1
            else:
                self._begin(step)
        return ended

    async def loop(self) -> None:
        """Carry out evaluations beside training, one at a time, until cancelled."""
        while True:
            version = await self._wanted.get()
            num_rollouts = num_responses(self._prepared)
            self._console.message(f"evaluating with {num_rollouts} responses beside training")
            scores = await evaluate_all(
                self._prepared,
                self._groups,
                on_answered=lambda: None,
                max_concurrent=max_beside(self._prepared.config),
            )
            self._console.message(f"evaluation begun after step {version}: {scores}")
            self._ended = scores
            self._is_under_way = False
            self._wanted.task_done()

    def metrics(self) -> dict[str, float]:
        """Return counts since the run began, under their names in metrics.jsonl."""
        if self._section.mode is EvaluationMode.PINNED:
            return {}
        return {"eval/num_skipped": self._num_skipped}

    def _is_due(self, step: int) -> bool:
        return step > 0 and step % self._section.every_steps == 0

    def _begin(self, version: int) -> None:
        self._is_under_way = True
        self._wanted.put_nowait(version)

    async def _pinned(self, version: int) -> HeldOutScores:
        """Evaluate while training waits, once every generator samples under ``version``."""
        await self._until_served(version)
        prepared, console = self._prepared, self._console
        num_problems = len(prepared.held_out) + sum(map(len, prepared.sets.values()))
        num_rollouts = num_responses(prepared)
        what = f"{num_problems} problems"
        if num_rollouts > num_problems:
            what += f", with {num_rollouts} responses"
        console.phase(f"evaluating version {version} on {what}", num_parts=num_rollouts)
        scores = await evaluate_all(prepared, self._groups, on_answered=console.part_done)
        console.end_phase()
        return scores
