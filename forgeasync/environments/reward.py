"""The base class of rewards of your own, with their arguments and results."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from forgeasync.rollouts import FinishReason, Rollout, Score, StoredRollout, Task


@dataclass(frozen=True, slots=True)
class Response:
    """A response as a reward gets it. Never evaluate the text: a model wrote it."""

    text: str
    num_tokens: int
    finish_reason: FinishReason
    """``LENGTH`` if the response was cut at ``sampling.max_response_tokens``."""


def response_of(rollout: Rollout | StoredRollout) -> Response:
    """Return the part of a rollout that a reward gets."""
    return Response(rollout.text, rollout.num_response_tokens, rollout.finish_reason)


Verdict = float | Score
"""A reward's result for one response. A float is a ``Score`` without parts that is correct from 1.0 on."""


class Reward(ABC):
    """A reward of your own. A function ``(task, response) -> float | Score`` works as well.

    A function, in ``my_rewards.py`` in a folder of PYTHONPATH:

        def brevity(task, response):
            return 1.0 if response.num_tokens < 100 else 0.0

    A class, whose keywords are ``options``, and whose coroutine may wait for a server: up to 64 of its calls
    run concurrently in a process.

        class Judge(Reward):
            def __init__(self, url, best=5.0):
                self.client, self.best = httpx.AsyncClient(base_url=url), best

            async def __call__(self, task, response):
                reply = await self.client.post("/judge", json={
                    "question": task.prompt, "reference": task.record["solution"], "answer": response.text})
                points = reply.json()["points"]
                return Score(points / self.best, points == self.best, parts={"points": points})

    In the YAML, alone or as one of a list with weights:

        data:
          reward:
            - {kind: math}
            - {kind: python, factory: my_rewards.brevity, weight: 0.1}
            - {kind: python, factory: my_rewards.Judge, options: {url: "http://judge:8000"}, limit_s: 50}

    With ``scores: group`` a call gets all responses to a prompt at once and returns as many verdicts:

        def shortest_right(task, responses):
            right = [task.answer in response.text for response in responses]
            least = min((r.num_tokens for r, ok in zip(responses, right) if ok), default=0)
            return [Score(float(r.num_tokens == least), ok) if ok else 0.0 for r, ok in zip(responses, right)]

    A reward runs in its own processes, each of which builds it once; it may use files and the network. If it
    raises, returns no finite number or takes longer than ``limit_s``, it has not scored: its group is tried
    again and then given up, never scored 0. See docs/rewards.md.
    """

    @abstractmethod
    def __call__(
        self, task: Task, response: Response
    ) -> Verdict | Awaitable[Verdict] | Sequence[Verdict] | Awaitable[Sequence[Verdict]]:
        """Score ``response`` to ``task``; with ``scores: group`` it takes a list and returns a list."""
