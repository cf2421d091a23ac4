"""The reward of kind ``judge``: verdicts of a model behind an endpoint, votes, cache, and waiting for it.

What fails, and what becomes of the response:

    the endpoint is down, slow, or says 429 or 5xx   it waits and is scored later; no reward is invented
    the endpoint refuses the request (400, 401 ...)  the attempt has failed
    the verdict is malformed                         it is asked for again, then the attempt has failed

Verdicts that there are already are kept meanwhile: only what is missing is asked for again.
"""

import asyncio
import dataclasses
import hashlib
import json
import logging
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from forgeasync.config import JudgeReward, Votes, name_of
from forgeasync.environments import Response
from forgeasync.rollouts import (
    MAX_SCORER_CHARS,
    NO_SCORE,
    Score,
    ScoreStatus,
    Task,
    VerifierCounts,
    as_feedback,
)
from forgeasync.scoring.breaker import Breaker
from forgeasync.scoring.endpoint_client import EndpointDown, EndpointRefuses
from forgeasync.scoring.judge_endpoint import JudgeEndpoint
from forgeasync.scoring.judge_prompt import JudgeVerdict, MalformedVerdict, messages, read_rubric
from forgeasync.scoring.limited import CallLimits
from forgeasync.scoring.reward_pool import RewardFailure
from forgeasync.scoring.unavailable import RewardUnavailable

logger = logging.getLogger(__name__)

DEFAULT_CONCURRENT = 64
"""Requests at once where ``max_concurrent`` is not given."""

RETRY_WAIT_S = 0.5
"""Seconds before a verdict is asked for again; the wait doubles with every further one."""

LONGEST_WAIT_HERE_S = 5.0
"""What has to wait longer gives its place in the scorer away."""


class Judge:
    """One judge in one scorer; for one event loop."""

    def __init__(
        self,
        section: JudgeReward,
        *,
        num_replicas: int = 1,
        retry_wait_s: float = RETRY_WAIT_S,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing. The scorers share the limits of the section evenly."""
        self._section = section
        self._name = name_of(section)
        self._limits = CallLimits(
            section,
            num_replicas=num_replicas,
            name=self._name,
            longest_wait_s=LONGEST_WAIT_HERE_S,
            default_concurrent=DEFAULT_CONCURRENT,
            clock=clock,
        )
        self._breaker = Breaker() if breaker is None else breaker
        self._retry_wait_s = retry_wait_s
        self._clock = clock
        self._endpoint: JudgeEndpoint | None = None
        self._rubric = ""
        self._verdicts: OrderedDict[bytes, tuple[JudgeVerdict, ...]] = OrderedDict()
        """The verdicts so far, by content; the least recently used come first."""
        self._num_requests = self._num_cached = self._num_malformed = self._num_down = 0
        self._num_oversized = 0

    @property
    def longest_s(self) -> float:
        """Longest time of a call of ``score`` for one response, in seconds."""
        section = self._section
        waits_s = 2 * LONGEST_WAIT_HERE_S + section.limit_s
        rounds = -(-section.num_votes // DEFAULT_CONCURRENT)
        return section.max_attempts * waits_s * rounds

    def start(self) -> str:
        """Read the rubric and the key; returns what judges, in words.

        Raises:
            ValueError: the rubric cannot be read, or the variable with the key is not set.
        """
        self._rubric = read_rubric(self._section)
        self._endpoint = JudgeEndpoint(self._section)
        return f"{self._section.model} at {self._section.base_url} judges as reward {self._name!r}"

    async def score(self, task: Task, responses: Sequence[Response], first: int) -> tuple[Score, ...]:
        """The score of each response.

        Raises:
            RewardUnavailable: the endpoint does not answer now, or its limit of requests is used up.
            RewardFailure: it refuses, or its verdicts are malformed.
        """
        scores = []
        for index, response in enumerate(responses, first):
            try:
                scores.append(await self._score(task, response))
            except (EndpointRefuses, MalformedVerdict) as error:
                reason = error.reason if isinstance(error, EndpointRefuses) else f"the verdict {error}"
                raise RewardFailure(
                    f"reward {self._name!r} ({self._section.model} at {self._section.base_url}) on task "
                    f"{task.task_id}, rollout {index}: {reason}"
                ) from None
        return tuple(scores)

    @property
    def counts(self) -> VerifierCounts:
        """Counts since it began."""
        return VerifierCounts(
            num_oversized=self._num_oversized,
            num_judge_requests=self._num_requests,
            num_judge_cached=self._num_cached,
            num_judge_malformed=self._num_malformed,
            num_judge_down=self._num_down,
        )

    @property
    def version(self) -> str:
        """The model, with a digest of what else decides its verdicts; of a judge that was started."""
        section = self._section
        decides = [self._rubric, section.lowest, section.highest, section.temperature, section.num_votes]
        digest = hashlib.sha256(json.dumps([*decides, section.votes.value]).encode()).hexdigest()
        return f"{section.model[: MAX_SCORER_CHARS // 2]} {digest[:12]}"

    async def aclose(self) -> None:
        """Close the connections."""
        if self._endpoint is not None:
            await self._endpoint.close()

    def close(self) -> None:
        """Forget the connections, which end with the process."""
        self._endpoint = None

    async def _score(self, task: Task, response: Response) -> Score:
        section = self._section
        if len(response.text) > section.max_response_chars:
            self._num_oversized += 1
            return dataclasses.replace(NO_SCORE, status=ScoreStatus.OVERSIZED)
        key = self._key(task, response)
        known = self._verdicts.get(key, ())
        num_missing = section.num_votes - len(known)
        if num_missing == 0:
            self._num_cached += 1
            self._verdicts.move_to_end(key)
        else:
            known = await self._complete(key, known, num_missing, task, response)
        votes = [verdict.points for verdict in known]
        points = statistics.fmean(votes) if section.votes is Votes.MEAN else statistics.median(votes)
        value = (points - section.lowest) / (section.highest - section.lowest)
        parts = {"points": points}
        if section.num_votes > 1:
            parts["spread"] = max(votes) - min(votes)
        feedback = as_feedback("\n".join(verdict.reason for verdict in known))
        return Score(value, value >= section.correct_from, parts=parts, feedback=feedback)

    async def _complete(
        self, key: bytes, known: tuple[JudgeVerdict, ...], num_missing: int, task: Task, response: Response
    ) -> tuple[JudgeVerdict, ...]:
        """Ask for the verdicts that are missing; those that come are kept whatever becomes of the others."""
        votes = [asyncio.ensure_future(self._vote(task, response)) for _ in range(num_missing)]
        try:
            results = await asyncio.gather(*votes, return_exceptions=True)
        finally:
            for vote in votes:
                vote.cancel()
        known += tuple(one for one in results if isinstance(one, JudgeVerdict))
        self._remember(key, known)
        # What waits is retried as a whole: a failure beside it may pass too.
        for kind in (RewardUnavailable, BaseException):
            for one in results:
                if isinstance(one, kind):
                    raise one
        return known

    async def _vote(self, task: Task, response: Response) -> JudgeVerdict:
        """One verdict."""
        assert self._endpoint is not None, "started"
        last: Exception | None = None
        for attempt in range(self._section.max_attempts):
            if attempt:
                await asyncio.sleep(min(LONGEST_WAIT_HERE_S, self._retry_wait_s * 2 ** (attempt - 1)))
            async with self._limits.inside():
                wait_s = self._breaker.begin(self._clock())
                if wait_s is not None:
                    raise RewardUnavailable(self._down("it has not answered before"), wait_s)
                self._num_requests += 1
                try:
                    verdict = await self._endpoint.ask(
                        messages(self._section, self._rubric, task, response.text)
                    )
                except EndpointDown as error:
                    self._num_down += 1
                    self._breaker.failed(self._clock(), retry_after_s=error.retry_after_s)
                    last = RewardUnavailable(
                        self._down(error.reason), max(error.retry_after_s, self._retry_wait_s)
                    )
                    continue
                except MalformedVerdict as error:
                    self._num_malformed += 1
                    self._breaker.succeeded()
                    last = error
                    continue
                except EndpointRefuses:
                    self._breaker.succeeded()
                    raise
                except BaseException:
                    self._breaker.abandoned()
                    raise
                self._breaker.succeeded()
                return verdict
        assert last is not None
        raise last

    def _down(self, reason: str) -> str:
        return f"the judge {self._section.model} at {self._section.base_url} does not answer: {reason}"

    def _remember(self, key: bytes, verdicts: tuple[JudgeVerdict, ...]) -> None:
        if not self._section.cache_size:
            return
        self._verdicts[key] = verdicts
        self._verdicts.move_to_end(key)
        while len(self._verdicts) > self._section.cache_size:
            self._verdicts.popitem(last=False)

    def _key(self, task: Task, response: Response) -> bytes:
        """A digest of all that decides a verdict; not of where the response comes from."""
        section = self._section
        decides = [
            section.base_url,
            section.model,
            self._rubric,
            section.lowest,
            section.highest,
            section.temperature,
            section.max_reply_tokens,
            task.prompt,
            task.answer,
            response.text,
        ]
        return hashlib.sha256(json.dumps(decides).encode()).digest()
