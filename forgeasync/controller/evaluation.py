"""Evaluates a policy version on problems that are not trained on."""

import asyncio
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence

from forgeasync.actors.group_sampling import GroupSampler
from forgeasync.actors.group_scoring import Unscored
from forgeasync.config.generator import SamplingSection
from forgeasync.controller.preparation import Prepared
from forgeasync.observability.console import StepConsole
from forgeasync.observability.scored_groups import HeldOutScores, part_means
from forgeasync.rollouts.score import Score
from forgeasync.rollouts.task import Task

logger = logging.getLogger(__name__)


async def evaluate_all(
    prepared: Prepared, groups: GroupSampler, console: StepConsole, *, version: int
) -> HeldOutScores:
    """Score the held-out problems and every evaluation set, under the weights being served.

    ``version`` is the version of these weights, for the console.
    """
    config, held_out, sets = prepared.config, prepared.held_out, prepared.sets
    num_problems = len(held_out) + sum(map(len, sets.values()))
    num_responses = len(held_out) + sum(
        len(sets[one.name]) * one.num_samples for one in config.evaluation.sets
    )
    what = f"{num_problems} problems"
    if num_responses > num_problems:
        what += f", with {num_responses} responses"
    console.phase(f"evaluating version {version} on {what}", num_parts=num_responses)
    scores = await evaluate(held_out, groups, sampling=config.sampling, on_answered=console.part_done)
    sets_scores = {
        one.name: await evaluate(
            sets[one.name],
            groups,
            sampling=one.sampling or config.sampling,
            num_samples=one.num_samples,
            on_answered=console.part_done,
        )
        for one in config.evaluation.sets
    }
    console.end_phase()
    return dataclasses.replace(scores, sets=sets_scores)


async def evaluate(
    tasks: Sequence[Task],
    groups: GroupSampler,
    *,
    sampling: SamplingSection,
    on_answered: Callable[[], None],
    num_samples: int = 1,
) -> HeldOutScores:
    """Score ``num_samples`` rollouts of each problem, each with a sampling seed of its own.

    The first rollout's seed is the problem's place in the list, so that more samples only add to fewer.
    ``on_answered`` is called after every rollout. Rollouts that cannot be scored are left out of the accuracy
    and counted.
    """
    async with asyncio.TaskGroup() as all_tasks:
        answers = [
            all_tasks.create_task(groups.score(task, sampling=sampling, seed=sample * len(tasks) + index))
            for sample in range(num_samples)
            for index, task in enumerate(tasks)
        ]
        for answer in answers:
            answer.add_done_callback(lambda _: on_answered())
    results = [answer.result() for answer in answers]
    scores = [one for one in results if isinstance(one, Score)]
    for one in results:
        if isinstance(one, Unscored):
            logger.warning("%s", one.reason)
    return HeldOutScores(
        num_correct=sum(one.is_correct for one in scores),
        score_sum=math.fsum(one.value for one in scores),
        parts=part_means(scores),
        num_scored=len(scores),
        num_unscored=len(results) - len(scores),
    )
