"""Scores on problems that are not trained on, sampled once each."""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from forgeasync.actors.group_episodes import GroupEpisodes
from forgeasync.actors.group_scoring import GroupScoring, Unscored
from forgeasync.actors.router import GeneratorRouter
from forgeasync.config.generator import SamplingSection
from forgeasync.observability.scored_groups import HeldOutScores, part_means
from forgeasync.rollouts.prompts import PromptEncoder
from forgeasync.rollouts.score import Score
from forgeasync.rollouts.task import Task

logger = logging.getLogger(__name__)


async def evaluate(
    tasks: Sequence[Task],
    *,
    generators: GeneratorRouter,
    scorer: GroupScoring,
    prompts: PromptEncoder,
    sampling: SamplingSection,
    on_answered: Callable[[], None],
    episodes: GroupEpisodes | None = None,
) -> HeldOutScores:
    """One response to each problem, scored; a problem's sampling seed is its place in the list.

    With ``episodes``, one episode of each problem; one that fails counts as not scored.
    ``on_answered`` is called for every problem that is done. Responses that cannot be scored are left out,
    and counted.
    """

    async def score(index: int, task: Task) -> Score | Unscored:
        if episodes is not None:
            return await episodes.score(task, seed=index)
        responses = await generators.respond(
            prompts.encode(task.prompt), num_samples=1, sampling=sampling, seed=index
        )
        scores = await scorer.score(f"held-out problem {task.task_id}", task, responses)
        return scores if isinstance(scores, Unscored) else scores[0]

    async with asyncio.TaskGroup() as all_tasks:
        answers = [all_tasks.create_task(score(index, task)) for index, task in enumerate(tasks)]
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
