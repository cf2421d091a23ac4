"""The controller's side of scoring: groups, whose responses are scored as soon as each is finished."""

import asyncio
from collections.abc import Callable, Sequence

from forgeasync.actors.scorer_pool import ScorerPool
from forgeasync.actors.scorer_pool import Unscored as Unscored
from forgeasync.config import ScorerSection
from forgeasync.environments import Response
from forgeasync.rollouts import Score, Task

Scoring = asyncio.Future[tuple[Score, ...] | Unscored]


class GroupScoring:
    """Scores groups, up to ``scorer.max_concurrent`` finished ones at once, response by response.

    ``finished`` begins to score a response while others of its group are still sampled; ``score_group`` then
    only waits for it. The score counts only if the group ends with the very same response: one whose
    generator was lost can be sampled again.
    """

    def __init__(
        self,
        pool: ScorerPool,
        section: ScorerSection,
        *,
        compares: Callable[[Task], bool] = lambda task: False,
    ) -> None:
        """``compares`` says whether a reward of the task compares the responses of a group: they are then
        scored together, once all are there."""
        self._pool = pool
        self._places = asyncio.Semaphore(section.max_concurrent)
        self._compares = compares
        self._early: dict[int, dict[int, tuple[Response, Scoring]]] = {}
        """Responses of groups that are still being sampled, by group and place in it."""
        self._num_early = 0

    @property
    def isolation(self) -> str:
        """What isolates verifiers, in words."""
        return self._pool.isolation

    def finished(self, group_id: int, task: Task, index: int, response: Response) -> None:
        """Begin to score a response of a group that is still being sampled, if there is room for it.

        ``score_group`` or ``forget`` has to follow.
        """
        if self._compares(task):
            return
        name = f"response {index} of group {group_id}"
        scoring = self._pool.try_score(name, task, [response], first=index)
        if scoring is not None:
            before = self._early.setdefault(group_id, {})
            if index in before:
                before[index][1].cancel()
            before[index] = response, scoring

    def forget(self, group_id: int) -> None:
        """A group will not be scored; what was begun is withdrawn."""
        for _, scoring in self._early.pop(group_id, {}).values():
            scoring.cancel()

    async def score_group(
        self, group_id: int, task: Task, responses: Sequence[Response]
    ) -> tuple[Score, ...] | Unscored:
        """Return one score per response of a group, or why there are none."""
        early = self._early.pop(group_id, {})
        begun: dict[int, Scoring] = {}
        for index, (response, scoring) in early.items():
            if index < len(responses) and responses[index] == response:
                begun[index] = scoring
            else:
                scoring.cancel()
        self._num_early += len(begun)
        return await self._score(f"group {group_id}", task, responses, begun)

    async def score(
        self, name: str, task: Task, responses: Sequence[Response]
    ) -> tuple[Score, ...] | Unscored:
        """Return one score per response, or why there are none; ``name`` is the group's name in messages."""
        return await self._score(name, task, responses, {})

    def metrics(self) -> dict[str, float]:
        """Return counts since the run began and the scorers' memory, under their names in metrics.jsonl."""
        return self._pool.metrics() | {"score/num_early": self._num_early}

    async def _score(
        self, name: str, task: Task, responses: Sequence[Response], begun: dict[int, Scoring]
    ) -> tuple[Score, ...] | Unscored:
        try:
            async with self._places:
                if self._compares(task):
                    return await self._pool.score(name, task, responses)
                rest = [index for index in range(len(responses)) if index not in begun]
                for index in rest:
                    one = f"response {index} of {name}" if len(responses) > 1 else name
                    scored = self._pool.score(one, task, [responses[index]], first=index)
                    begun[index] = asyncio.ensure_future(scored)
                # The first that has no score decides: the others would be scored for nothing.
                for scoring in asyncio.as_completed([begun[index] for index in range(len(responses))]):
                    result = await scoring
                    if isinstance(result, Unscored):
                        return result
                return tuple(score for index in range(len(responses)) for score in _scores(begun[index]))
        finally:
            for scoring in begun.values():
                scoring.cancel()


def _scores(scoring: Scoring) -> tuple[Score, ...]:
    result = scoring.result()
    assert not isinstance(result, Unscored)
    return result
