"""Process that runs a user's own reward: one JSON request per line on stdin, one reply per line on stdout.

Started by ``forgeasync.scoring.reward_pool`` as ``python -m forgeasync.scoring.reward_worker``. The reward is
built once. Calls of a coroutine function run concurrently in this process's event loop, each within
``limit_s``. A call that blocks the loop cannot be cancelled there: the process reports which call it is, and
the parent kills the process.

    {"reward": {...}}                                  ->  {"is_async": true, "version": "..."}
                                                         or {"refused": "<reason>"}
    {"call": 7, "task": {...}, "responses": [...]}     ->  {"call": 7, "scores": [...]},
                                                         {"call": 7, "error": "<reason>"}
                                                         {"call": 7, "timeout": true}
                                                         or {"call": 7, "blocked": true}
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import inspect
import json
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import IO, Any

from forgeasync.config import PythonReward, ScoredUnit
from forgeasync.environments import Response
from forgeasync.isolation import open_channel, write_line
from forgeasync.rollouts import FinishReason, Score, Step, Task
from forgeasync.schema import build_code
from forgeasync.waiting import DeadlineExceeded, deadline

CORRECT_FROM = 1.0
"""Minimum value at which the response is correct if a reward returns a bare number."""

MAX_REASON_CHARS = 2000

BLOCKED_AFTER_S = 0.3
"""Seconds past a call's limit after which the event loop counts as blocked."""

_PARAMETERS = {ScoredUnit.RESPONSE: ("task", "response"), ScoredUnit.GROUP: ("task", "responses")}


def decode_score(value: dict[str, Any]) -> Score:
    """Decode the score of a reply; raises ValueError if ``Score`` refuses it."""
    return Score(**{**value, "steps": tuple(Step(**step) for step in value["steps"])})


def decode_response(value: dict[str, Any]) -> Response:
    """Decode a response of a request."""
    return Response(value["text"], value["num_tokens"], FinishReason(value["finish_reason"]))


def as_score(verdict: object) -> Score:
    """Convert a reward's result for one response; raises ValueError that says what is allowed."""
    if isinstance(verdict, Score):
        return verdict
    try:
        score = Score(verdict, False)  # type: ignore[arg-type]  # Score refuses what is no number
    except ValueError as error:
        raise ValueError(f"must return a float or a Score: {error}") from None
    return dataclasses.replace(score, is_correct=score.value >= CORRECT_FROM)


def as_scores(verdicts: object, num_responses: int) -> list[Score]:
    """Convert a reward's result for a group; raises ValueError that names the response."""
    if isinstance(verdicts, str | bytes | Score) or not isinstance(verdicts, Collection):
        raise ValueError(f"must return a list of {num_responses} floats or Scores, not {verdicts!r}"[:200])
    found = list(verdicts)
    if len(found) != num_responses:
        raise ValueError(f"must return {num_responses} floats or Scores, one a response, not {len(found)}")
    scores = []
    for index, verdict in enumerate(found):
        try:
            scores.append(as_score(verdict))
        except ValueError as error:
            raise ValueError(f"response {index} of the group: {error}") from None
    return scores


def _reason(error: BaseException) -> str:
    """Describe an exception in one line, with its place in the user's code."""
    frames = [] if error.__traceback__ is None else inspect.getinnerframes(error.__traceback__)
    of_user = [frame for frame in frames if frame.filename != __file__]
    place = f" ({of_user[-1].filename}:{of_user[-1].lineno})" if of_user else ""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}{place}"[:MAX_REASON_CHARS]


class _Calls:
    """Runs the calls of one reward on an event loop and writes their replies."""

    def __init__(
        self, section: PythonReward, reward: Callable[..., Any], requests: IO[bytes], replies: IO[bytes]
    ) -> None:
        self._section = section
        self._reward = reward
        self._requests = requests
        self._replies = replies
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._deadlines_s: dict[int, float] = {}

    async def serve(self) -> None:
        """Answer requests until stdin ends, which ends the process."""
        loop = asyncio.get_running_loop()
        for target in (self._read, self._watch):
            threading.Thread(target=target, args=[loop], daemon=True).start()
        await asyncio.Event().wait()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        def start(request: dict[str, Any]) -> None:
            self._tasks[request["call"]] = loop.create_task(self._run(request))

        for line in self._requests:
            request = json.loads(line)
            self._deadlines_s[request["call"]] = time.monotonic() + self._section.limit_s
            loop.call_soon_threadsafe(start, request)
        # Nothing waits for running calls, and they may never end.
        os._exit(0)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report the call that blocks the event loop, or one that cannot be cancelled."""
        while True:
            time.sleep(BLOCKED_AFTER_S / 3)
            overdue_s = time.monotonic() - BLOCKED_AFTER_S
            late = [call for call, deadline_s in list(self._deadlines_s.items()) if deadline_s < overdue_s]
            if late:
                current = asyncio.current_task(loop)
                busy = [call for call, task in list(self._tasks.items()) if task is current]
                write_line(self._replies, {"call": (busy or late)[0], "blocked": True})
                return

    async def _run(self, request: dict[str, Any]) -> None:
        """Run one call and write its reply, whatever the outcome."""
        reply: dict[str, Any] = {"call": request["call"]}
        try:
            async with deadline(self._section.limit_s, call="the reward", key="limit_s"):
                scores = await self._scores(request)
            reply["scores"] = [dataclasses.asdict(score) for score in scores]
        except DeadlineExceeded:
            reply["timeout"] = True
        except BaseException as error:  # SystemExit too: the user must see the reward's exception
            reply["error"] = _reason(error)
        del self._deadlines_s[request["call"]], self._tasks[request["call"]]
        write_line(self._replies, reply)

    async def _scores(self, request: dict[str, Any]) -> list[Score]:
        task = Task(**request["task"])
        responses = list(map(decode_response, request["responses"]))
        if self._section.scores is ScoredUnit.GROUP:
            return as_scores(await self._call(task, responses), len(responses))
        (response,) = responses
        return [as_score(await self._call(task, response))]

    async def _call(self, task: Task, what: object) -> object:
        result = self._reward(task, what)
        return await result if inspect.isawaitable(result) else result


def is_coroutine_function(reward: Callable[..., object]) -> bool:
    """Return whether calls of a reward can run concurrently on one event loop."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


def code_version(section: PythonReward, reward: Callable[..., object]) -> str:
    """Return a digest of the reward's file, or of its pickle if it was sent along, and of its options."""
    code = (section.pickled or "").encode()
    if section.pickled is None:
        try:
            file = inspect.getsourcefile(
                inspect.unwrap(reward) if inspect.isroutine(reward) else type(reward)
            )
        except TypeError:
            file = None  # built in, or compiled
        if file is not None:
            with contextlib.suppress(OSError), open(file, "rb") as source:
                code = source.read()
    options = json.dumps(section.options, sort_keys=True)
    return hashlib.sha256(code + options.encode()).hexdigest()[:12]


def serve() -> None:
    """Build the reward of the first request, and answer requests until stdin ends."""
    requests, replies = open_channel()
    section = PythonReward.model_validate(json.loads(requests.readline())["reward"])
    try:
        reward = build_code(section, _PARAMETERS[section.scores])
    except BaseException as error:  # a user's module can also exit while it is imported
        reason = str(error) if isinstance(error, ValueError) else f"raised {_reason(error)}"
        write_line(replies, {"refused": reason[:MAX_REASON_CHARS]})
        return
    write_line(replies, {"is_async": is_coroutine_function(reward), "version": code_version(section, reward)})
    asyncio.run(_Calls(section, reward, requests, replies).serve())


if __name__ == "__main__":
    serve()
