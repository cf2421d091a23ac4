"""The environment of ``kind: remote``: an agent program at a URL, in any language (docs/remote.md)."""

import asyncio
import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec

from forgeasync.config import Ending, RemoteEnvironment, SandboxSection
from forgeasync.environments.environment import Agent, EpisodeInterrupted, SectionEnvironment, run_apart
from forgeasync.environments.episodes import ENDINGS
from forgeasync.rollouts import Score, Task
from forgeasync.schema import Problem

MAX_REPLY_BYTES = 2**20
"""Maximum bytes of a reply. A longer one fails the episode."""

MAX_QUOTED_CHARACTERS = 300

CANCEL_S = 5.0
"""Seconds for the server to accept the cancellation of an episode."""


class EpisodeFailed(RuntimeError):
    """The server reports that an episode has failed, or its reply is malformed."""


class ServerLost(Exception):
    """The server cannot be reached, or fails its health check."""


class EpisodeReply(msgspec.Struct, frozen=True):
    """The answer to ``POST /episodes``. Unknown fields are ignored."""

    score: float | None = None
    """Score; required if ``ending`` is ``completed``."""
    is_correct: bool | None = None
    """Whether the result is correct; None to compare the score with ``environment.correct_at``."""
    parts: dict[str, float] = {}
    ending: str = Ending.COMPLETED
    feedback: str = ""
    problem: str = ""
    """Description of a failure, for people."""


class RemoteAgent(SectionEnvironment):
    """An environment whose episodes run on a server, which samples through the session of the episode."""

    def __init__(self, section: RemoteEnvironment, sandbox: SandboxSection) -> None:
        self._section = section

    @classmethod
    def check(cls, section: RemoteEnvironment, sandbox: SandboxSection) -> Iterator[Problem]:
        """Check the server's health once; blocks for at most ``health_s``."""

        async def ask() -> None:
            async with _client(section) as client:
                await _check_health(client, section)

        try:
            run_apart(ask)
        except ServerLost as error:
            yield Problem(
                field="environment.url",
                value=section.url,
                remedy=f"cannot be used: {error}; start the server of the environment there first",
            )

    async def rollout(self, task: Task, agent: Agent) -> Score:
        section = self._section
        request = {
            "episode": uuid.uuid4().hex,
            "task": _task_fields(task, section),
            "base_url": agent.base_url,
            "anthropic_base_url": _anthropic_base_url(agent),
            "api_key": agent.api_key,
            "model": section.model,
        }
        try:
            async with _client(section) as client:
                reply = await _run(client, section, request)
        except ServerLost as error:
            raise EpisodeInterrupted(f"the server of the environment is lost: {error}") from error
        return _score(reply, section)


def _task_fields(task: Task, section: RemoteEnvironment) -> dict[str, Any]:
    """Return the fields of a task that are sent to the server.

    Raises:
        ValueError: The task's record lacks a column.
    """
    if section.task_fields is None:
        return dict(task.record)
    values: dict[str, Any] = {
        "task_id": task.task_id,
        "prompt": task.prompt,
        "answer": task.answer,
        "index": task.source_index,
    }
    values |= {f"record.{name}": value for name, value in task.record.items()}
    for name, column in section.task_fields.items():
        if column not in values:
            known = ", ".join(sorted(task.record)) or "none"
            raise ValueError(
                f"environment.task_fields.{name} = {column!r}, but the record of task {task.task_id} has no "
                f"such column; it has {known}"
            )
    return {name: values[column] for name, column in section.task_fields.items()}


def _anthropic_base_url(agent: Agent) -> str | None:
    """Return the URL, or None for an evaluated endpoint, which may only have Chat Completions."""
    try:
        return agent.anthropic_base_url
    except ValueError:
        return None


def _client(section: RemoteEnvironment) -> aiohttp.ClientSession:
    # No total timeout, because an episode may take hours. The deadlines of the episode apply.
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=section.health_s))


async def _run(
    client: aiohttp.ClientSession, section: RemoteEnvironment, request: dict[str, Any]
) -> EpisodeReply:
    """Run an episode on the server, and check the server's health during the episode.

    If this is cancelled, for instance by a deadline, the server is requested to cancel the episode.

    Raises:
        ServerLost: The server is gone.
        EpisodeFailed: The server has refused the episode, or its reply cannot be parsed.
    """
    url = f"{section.url}/episodes"
    call = asyncio.ensure_future(_post(client, url, request))
    try:
        while not call.done():
            await asyncio.wait([call], timeout=section.health_s)
            if not call.done():
                await _check_health(client, section)
        return call.result()
    finally:
        if not call.done():
            call.cancel()
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(CANCEL_S):
                    await client.delete(f"{url}/{request['episode']}")


async def _post(client: aiohttp.ClientSession, url: str, request: dict[str, Any]) -> EpisodeReply:
    try:
        async with client.post(url, json=request) as response:
            body = await _read(response)
            status = response.status
    except (aiohttp.ClientError, OSError) as error:
        raise ServerLost(f"{url}: {type(error).__name__}: {error}") from error
    if status in (502, 503, 504):
        raise ServerLost(f"{url}: status {status}: {_quoted(body)}")
    if status != 200:
        raise EpisodeFailed(f"the server has refused the episode: status {status}: {_quoted(body)}")
    try:
        return msgspec.json.decode(body, type=EpisodeReply)
    except (msgspec.DecodeError, RecursionError) as error:
        raise EpisodeFailed(f"the server's reply is not an episode: {error}: {_quoted(body)}") from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_REPLY_BYTES:
            raise EpisodeFailed(f"the server's reply has more than {MAX_REPLY_BYTES:,} bytes")
    return bytes(body)


async def _check_health(client: aiohttp.ClientSession, section: RemoteEnvironment) -> None:
    url = f"{section.url}/health"
    try:
        async with asyncio.timeout(section.health_s), client.get(url) as response:
            if response.status != 200:
                raise ServerLost(f"{url}: status {response.status}")
    except TimeoutError:
        raise ServerLost(f"{url}: no answer within health_s = {section.health_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ServerLost(f"{url}: {type(error).__name__}: {error}") from error


def _score(reply: EpisodeReply, section: RemoteEnvironment) -> Score:
    """Return the score of a reply, or raise the exception of its ending."""
    problem = reply.problem[:MAX_QUOTED_CHARACTERS] or "the server does not say why"
    raised = {ending.value: kind for kind, ending in ENDINGS.items()}
    if (kind := raised.get(reply.ending)) is not None:
        raise kind(problem)
    if reply.ending in (Ending.ENVIRONMENT_CRASH, Ending.TIMEOUT):
        raise EpisodeFailed(f"the server's episode has failed: {problem}")
    if reply.ending != Ending.COMPLETED:
        ending = reply.ending[:MAX_QUOTED_CHARACTERS]
        raise EpisodeFailed(f"ending = {ending!r}; must be one of {', '.join(Ending)}")
    if reply.score is None:
        raise EpisodeFailed("a completed episode needs a score")
    is_correct = reply.score >= section.correct_at if reply.is_correct is None else reply.is_correct
    return Score(reply.score, is_correct, parts=reply.parts, feedback=reply.feedback)


def _quoted(body: bytes) -> str:
    return repr(body[:MAX_QUOTED_CHARACTERS].decode("utf-8", errors="replace"))
