"""Evaluates the weights being served on problems that are not trained on."""

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence

from forgeasync.actors import GroupSampler, HeldOutRollout, Unscored
from forgeasync.config import SamplingSection
from forgeasync.controller.preparation import Prepared
from forgeasync.observability import HeldOutScores, part_means
from forgeasync.rollouts import Score, Task, spanned

logger = logging.getLogger(__name__)

OnEnded = Callable[[int, int, HeldOutRollout], None]
"""Called with the place of the problem, the number of the sample and what came of it."""


def num_responses(prepared: Prepared) -> int:
    """Return how many responses one evaluation samples."""
    return len(prepared.held_out) + sum(
        len(prepared.sets[one.name]) * one.num_samples for one in prepared.config.evaluation.sets
    )


async def evaluate_all(
    prepared: Prepared,
    groups: GroupSampler,
    *,
    on_answered: Callable[[], None],
    max_concurrent: int | None = None,
) -> HeldOutScores:
    """Score the held-out problems and every evaluation set.

    ``on_answered`` is called after every rollout. Without ``max_concurrent`` all rollouts of a set are
    sampled at once.
    """
    start_s = time.perf_counter()
    config, sets = prepared.config, prepared.sets
    scores = await evaluate(
        prepared.held_out,
        groups,
        sampling=config.sampling,
        on_answered=on_answered,
        max_concurrent=max_concurrent,
    )
    sets_scores = {
        one.name: await evaluate(
            sets[one.name],
            groups,
            sampling=one.sampling or config.sampling,
            num_samples=one.num_samples,
            on_answered=on_answered,
            max_concurrent=max_concurrent,
        )
        for one in config.evaluation.sets
    }
    return dataclasses.replace(scores, sets=sets_scores, wall_s=time.perf_counter() - start_s)


async def evaluate(
    tasks: Sequence[Task],
    groups: GroupSampler,
    *,
    sampling: SamplingSection,
    on_answered: Callable[[], None],
    num_samples: int = 1,
    max_concurrent: int | None = None,
) -> HeldOutScores:
    """Score ``num_samples`` rollouts of each problem; see ``sample_problems``."""
    rollouts = await sample_problems(
        tasks,
        groups,
        sampling=sampling,
        num_samples=num_samples,
        on_ended=lambda problem, sample, rollout: on_answered(),
        max_concurrent=max_concurrent,
    )
    return held_out_scores(rollouts)


async def sample_problems(
    tasks: Sequence[Task],
    groups: GroupSampler,
    *,
    sampling: SamplingSection,
    num_samples: int,
    on_ended: OnEnded,
    max_concurrent: int | None = None,
    keeps_record: bool = False,
) -> list[HeldOutRollout]:
    """Sample and score ``num_samples`` rollouts of each problem, each with a sampling seed of its own.

    The first rollout's seed is the problem's place in the list, so that more samples only add to fewer.
    ``on_ended`` is called after every rollout. Returns all rollouts of the first sample by problem, then
    those of the second, and so on.
    """
    places = contextlib.nullcontext() if max_concurrent is None else asyncio.Semaphore(max_concurrent)

    async def sample_one(problem: int, sample: int) -> HeldOutRollout:
        async with places:
            rollout = await groups.score(
                tasks[problem],
                sampling=sampling,
                seed=sample * len(tasks) + problem,
                keeps_record=keeps_record,
            )
        if isinstance(rollout.result, Unscored):
            logger.warning("%s", rollout.result.reason)
        on_ended(problem, sample, rollout)
        return rollout

    async with asyncio.TaskGroup() as all_tasks:
        answers = [
            all_tasks.create_task(sample_one(problem, sample))
            for sample in range(num_samples)
            for problem in range(len(tasks))
        ]
    return [answer.result() for answer in answers]


def held_out_scores(rollouts: Iterable[HeldOutRollout]) -> HeldOutScores:
    """Sum up rollouts. Those that could not be scored are left out of the accuracy and counted."""
    rollouts = list(rollouts)
    scores = [one.result for one in rollouts if isinstance(one.result, Score)]
    return HeldOutScores(
        num_correct=sum(one.is_correct for one in scores),
        score_sum=math.fsum(one.value for one in scores),
        parts=part_means(scores),
        num_scored=len(scores),
        num_unscored=len(rollouts) - len(scores),
        versions=spanned(one.versions for one in rollouts),
    )
