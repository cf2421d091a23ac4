"""An agent that follows a script behind a real session, and clients that are the unmodified SDKs."""

import asyncio
import contextlib
import functools
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
from pydantic import BaseModel, TypeAdapter

from forgeasync.environments import (
    Message,
    Session,
    SessionServer,
    ToolCall,
    ToolSpec,
    Turn,
    checked_messages,
)
from forgeasync.rollouts import FinishReason

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


def say(text: str, **more: Any) -> Turn:
    """A turn of 7 tokens after 11."""
    return Turn(
        **{
            "text": text,
            "num_tokens": 7,
            "num_prompt_tokens": 11,
            "finish_reason": FinishReason.STOP,
            **more,
        }
    )


def call(call_id: str, name: str = "weather", **arguments: Any) -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


@dataclass(frozen=True, kw_only=True)
class Asking:
    """One call of ``respond``."""

    messages: Sequence[Message]
    tools: Sequence[ToolSpec] | None
    max_tokens: int | None
    stop: Sequence[str]
    number: int
    """From 1, in the order in which the agent was called."""


class ScriptedAgent:
    """Gives the turns of its script one after the other, or what ``answer`` makes of a call.

    While ``gate`` is closed no turn is given. An exception in the script is raised.
    """

    def __init__(
        self, script: Sequence[Turn | Exception] = (), *, answer: Callable[[Asking], Turn] | None = None
    ) -> None:
        self._script: Iterator[Turn | Exception] = iter(script)
        self._answer = answer
        self.calls: list[Asking] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_cancelled = 0
        self.most_at_once = 0
        self._num_at_once = 0

    async def respond(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        assert not isinstance(messages, str)
        checked_messages(messages)
        asking = Asking(
            messages=messages, tools=tools, max_tokens=max_tokens, stop=stop, number=len(self.calls) + 1
        )
        self.calls.append(asking)
        self._num_at_once += 1
        self.most_at_once = max(self.most_at_once, self._num_at_once)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self._num_at_once -= 1
        turn = self._answer(asking) if self._answer is not None else next(self._script)
        if isinstance(turn, Exception):
            raise turn
        return turn


@contextlib.asynccontextmanager
async def serving(agent: ScriptedAgent, **options: Any) -> AsyncIterator[tuple[SessionServer, Session]]:
    async with SessionServer(**options) as server:
        yield server, server.open(agent)


_TLS = ssl.create_default_context()
"""Is not used, and takes 20 ms to make for every client."""


def openai_client(session: Session, **options: Any) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=_TLS)
    given = {"base_url": session.base_url, "api_key": session.api_key, "http_client": http}
    return openai.AsyncOpenAI(**{**given, **options})


def anthropic_client(session: Session, **options: Any) -> anthropic.AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(verify=_TLS)
    given = {"base_url": session.anthropic_base_url, "api_key": session.api_key, "http_client": http}
    return anthropic.AsyncAnthropic(**{**given, **options})


def strictly(kind: Any, data: object, *, extra: Sequence[str] = ()) -> Any:
    """Validate data by an SDK's type, which by itself takes fields that it does not know."""
    model = _adapter(kind).validate_python(data)
    unknown = set(_unknown(model)) - set(extra)
    assert not unknown, unknown
    return model


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _unknown(value: object) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _unknown(one)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another task does; the test's own deadline bounds it."""
    while not condition():
        await asyncio.sleep(0.001)
