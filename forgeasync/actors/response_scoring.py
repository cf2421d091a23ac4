"""All responses to one task, scored side by side, under a deadline from when the scorer begins with them."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from forgeasync.actors.deadline import deadline
from forgeasync.data.task import Task

ItemT = TypeVar("ItemT", contravariant=True)
ResultT = TypeVar("ResultT", covariant=True)


class Scorer(Protocol[ItemT, ResultT]):
    """Judges what belongs to a task: the text of a response, a response, or all of a group. Thread-safe."""

    def score(self, task: Task, response: ItemT, /) -> ResultT:
        """What ``response`` is worth. What it raises is no fault of the response."""
        ...


class ResponseScoring(Generic[ItemT, ResultT]):
    """A scorer's own queue: groups in the order in which they arrive, ``num_workers`` responses at once.

    A group waits here for the responses of groups before it. Its deadline starts with its first response, and
    by then all responses of those groups have begun: so queueing never counts, but for the last answers of
    the group before.
    """

    def __init__(self, scorer: Scorer[ItemT, ResultT], *, num_workers: int, limit_s: float) -> None:
        self._scorer = scorer
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="scoring")

    async def score(self, task: Task, responses: Sequence[ItemT]) -> tuple[ResultT, ...]:
        """The score of each response.

        Raises:
            DeadlineExceeded: it took longer than ``timeouts.score_s``; what has not begun is not scored any
            more. Whatever the scorer raises.
        """
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()

        def score_one(response: ItemT) -> ResultT:
            loop.call_soon_threadsafe(begun.set)
            return self._scorer.score(task, response)

        scores = [loop.run_in_executor(self._threads, score_one, response) for response in responses]
        try:
            if scores:
                await begun.wait()
            call = f"scoring {len(responses)} responses to task {task.task_id}"
            async with deadline(self._limit_s, call=call, key="timeouts.score_s"):
                return tuple(await asyncio.gather(*scores))
        finally:
            for one in scores:
                one.cancel()

    def close(self) -> None:
        """Begin nothing more, and wait for what has begun."""
        self._threads.shutdown(wait=True, cancel_futures=True)
