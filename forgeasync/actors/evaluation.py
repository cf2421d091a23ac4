"""Accuracy on held-out problems, sampled once each with the training distribution."""

import asyncio
from collections.abc import Callable, Sequence

from forgeasync.actors.router import GeneratorRouter
from forgeasync.actors.scorer import ScorerActor
from forgeasync.config.schema import RunConfig
from forgeasync.data.prompts import PromptEncoder
from forgeasync.data.task import Task

SOLVED = 1.0
"""What a scorer gives a full solution."""


async def evaluate(
    tasks: Sequence[Task],
    *,
    generators: GeneratorRouter,
    scorer: ScorerActor,
    prompts: PromptEncoder,
    config: RunConfig,
    on_answered: Callable[[], None],
) -> float:
    """The share of problems solved by one response each; a problem's sampling seed is its place in the list.

    ``on_answered`` is called for every problem that is done.
    Partial credit is no solution: only a reward of ``SOLVED`` counts.
    """

    async def reward(index: int, task: Task) -> float:
        responses = await generators.respond(
            prompts.encode(task.prompt), num_samples=1, sampling=config.sampling, seed=index
        )
        async with asyncio.timeout(config.timeouts.score_s):
            return (await scorer.score.call_one(task, responses))[0]

    async with asyncio.TaskGroup() as all_tasks:
        rewards = [all_tasks.create_task(reward(index, task)) for index, task in enumerate(tasks)]
        for answer in rewards:
            answer.add_done_callback(lambda _: on_answered())
    return sum(task.result() >= SOLVED for task in rewards) / len(rewards)
