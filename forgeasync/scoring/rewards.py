"""The interface of a reward, and the weighted sum of several rewards."""

import asyncio
import dataclasses
import math
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from forgeasync.config import RewardSection, name_of
from forgeasync.environments import Response
from forgeasync.rollouts import MAX_SCORER_CHARS, Score, ScoreStatus, Task, as_feedback

T = TypeVar("T")


REWARD_COUNTS = (
    "scoring/num_timeouts",
    "scoring/num_crashes",
    "scoring/num_errors",
    "scoring/num_oversized",
    "scoring/num_killed_rewards",
    "scoring/num_judge_requests",
    "scoring/num_judge_cached",
    "scoring/num_judge_malformed",
    "scoring/num_judge_down",
)
"""Names in metrics.jsonl of the counts of rewards."""


class OneReward(Protocol):
    """One reward with its processes or connections; for one event loop."""

    def start(self) -> str:
        """Start the reward; return a description of it and of its isolation."""
        ...

    async def score(self, task: Task, responses: Sequence[Response], first: int) -> tuple[Score, ...]:
        """Return the score of each response; ``first`` is the index of the first one within its group."""
        ...

    @property
    def version(self) -> str:
        """Version that distinguishes rewards of equal name; available after ``start``."""
        ...

    @property
    def counts(self) -> Counter[str]:
        """Counts since the reward was created, of ``REWARD_COUNTS``."""
        ...

    def close(self) -> None:
        """Stop everything that ``start`` started."""
        ...


async def gather_or_cancel(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all calls; the first error cancels the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def weighted_score(rewards: Sequence[RewardSection], scores: Sequence[Score]) -> Score:
    """Combine the scores of several rewards for one response.

    The value is the weighted sum of their values. Parts are their values by name, without the weights, and
    their own parts as ``<name>/<part>``; penalties of the same name are added. The first reward decides
    whether the response is correct and has an answer. Feedback is concatenated, each with the name of its
    reward. A single reward keeps its parts, steps and feedback.

    Raises:
        ValueError: One of several rewards scores steps, or the sum is too large.
    """
    if len(rewards) == 1:
        ((reward, score),) = zip(rewards, scores, strict=True)
        return score if reward.weight == 1.0 else _scaled(score, reward.weight)
    parts: dict[str, float] = {}
    penalties: dict[str, float] = {}
    for reward, score in zip(rewards, scores, strict=True):
        name = name_of(reward)
        if score.steps:
            raise ValueError(
                f"reward {name!r} scores the steps of a response, which only a reward without others can: "
                "advantages of steps would leave the others out"
            )
        parts |= {name: score.value} | {f"{name}/{part}": value for part, value in score.parts.items()}
        for fault, penalty in score.penalties.items():
            penalties[fault] = penalties.get(fault, 0.0) + penalty
    return Score(
        math.fsum(reward.weight * score.value for reward, score in zip(rewards, scores, strict=True)),
        scores[0].is_correct,
        parts=parts,
        penalties=penalties,
        has_answer=scores[0].has_answer,
        feedback=as_feedback(
            "\n".join(
                f"{name_of(reward)}: {score.feedback}"
                for reward, score in zip(rewards, scores, strict=True)
                if score.feedback
            )
        ),
        status=next((one.status for one in scores if one.status is not ScoreStatus.SCORED), scores[0].status),
        scorer="+".join(one.scorer for one in scores)[:MAX_SCORER_CHARS],
        scorer_version="+".join(one.scorer_version for one in scores)[:MAX_SCORER_CHARS],
    )


def _scaled(score: Score, weight: float) -> Score:
    steps = tuple(dataclasses.replace(step, value=step.value * weight) for step in score.steps)
    return dataclasses.replace(score, value=score.value * weight, steps=steps)
