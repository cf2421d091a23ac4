"""An agent whose turns are sampled by a model behind an OpenAI-compatible endpoint."""

import asyncio
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forgeasync.config import SamplingSection
from forgeasync.environments.agent import EpisodeArtifacts, Participant
from forgeasync.environments.conversation import (
    ConversationTree,
    RecordedBranch,
    recorded_branches,
    turn_facts,
)
from forgeasync.environments.environment import (
    ContextFull,
    EpisodeInterrupted,
    Turn,
)
from forgeasync.environments.messages import (
    BrokenToolCall,
    Message,
    ToolCall,
    ToolSpec,
    checked_message,
    read_arguments,
)
from forgeasync.rollouts import FinishReason

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

NO_KEY = "none"
"""API key for endpoints that need none, because the SDK requires one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointModel:
    """A model behind an OpenAI-compatible endpoint."""

    base_url: str
    """URL up to ``/v1``, such as ``http://localhost:8000/v1``."""
    model: str
    """Name of the model at the endpoint."""
    api_key_variable: str | None = None
    """Environment variable with the key, read by the process that uses it; None if no key is needed."""
    max_retries: int = 5
    """Maximum number of retries by the SDK after a temporary failure, such as a rate limit."""

    def api_key(self) -> str:
        """Read the key.

        Raises:
            ValueError: The variable is not set.
        """
        if self.api_key_variable is None:
            return NO_KEY
        key = os.environ.get(self.api_key_variable)
        if not key:
            raise ValueError(f"environment variable {self.api_key_variable} is not set; must hold the key")
        return key


FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}

_CONTEXT_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})
"""Error codes of OpenAI and llama.cpp for a conversation that is too long."""

_CONTEXT_WORDS = re.compile(r"context (length|window|size)|context_length", re.IGNORECASE)
"""Error texts of other servers for this; vLLM: "This model's maximum context length is 160 tokens. ..."."""


def open_client(endpoint: EndpointModel, *, limit_s: float) -> "AsyncOpenAI":
    """Return a client of the SDK for one event loop. Creating it takes 20 ms.

    Raises:
        ValueError: The variable with the key is not set.
    """
    from openai import AsyncOpenAI

    return AsyncOpenAI(
        base_url=endpoint.base_url,
        api_key=endpoint.api_key(),
        max_retries=endpoint.max_retries,
        timeout=limit_s,
    )


class EndpointAgent(Participant):
    """An ``Agent`` over an endpoint, for one episode and its event loop."""

    def __init__(
        self,
        *,
        endpoint: EndpointModel,
        sampling: SamplingSection,
        limit_s: float,
        max_turns: int,
        tool_s: float = 60.0,
        name: str = "agent",
        artifacts: EpisodeArtifacts | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        taking_turn: Callable[[], AbstractContextManager[None]] = nullcontext,
        client: "AsyncOpenAI | None" = None,
    ) -> None:
        """``limit_s`` is the time limit for a turn with all its retries (``timeouts.generate_s``).

        ``taking_turn`` returns a context that is entered while the endpoint samples a turn. Agents of one
        event loop may share a ``client``. If it is None, the agent opens and closes its own.
        """
        super().__init__(name=name, artifacts=artifacts, waiting=waiting, max_turns=max_turns, tool_s=tool_s)
        self._endpoint = endpoint
        self._sampling = sampling
        self._limit_s = limit_s
        self._taking_turn = taking_turn
        self._client = client
        self._own_client: AsyncOpenAI | None = None
        # Stores the facts of each turn (``turn_facts``).
        self._tree: ConversationTree[dict[str, Any]] = ConversationTree()

    @property
    def num_turns(self) -> int:
        """See ``Participant``."""
        return self._tree.num_turns

    @property
    def base_url(self) -> str:
        """URL of the endpoint. Turns that are requested there are not counted or recorded."""
        self.has_given_url = True
        return self._endpoint.base_url

    @property
    def anthropic_base_url(self) -> str:
        """Raises ValueError, because endpoints are only known to have Chat Completions."""
        raise ValueError(
            f"{self._endpoint.base_url} is evaluated by Chat Completions; agents that speak Anthropic's API "
            "can be evaluated with --model, which starts generators with sessions"
        )

    @property
    def api_key(self) -> str:
        """Key of the endpoint."""
        return self._endpoint.api_key()

    def branches(self) -> list[RecordedBranch]:
        """See ``Participant``."""
        return recorded_branches(self._tree, lambda facts: facts)

    async def leave(self) -> None:
        """Close the connections."""
        client, self._own_client = self._own_client, None
        if client is not None:
            await client.close()

    async def respond(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """See ``Agent``.

        Reasoning of earlier turns is not sent back, because Chat Completions have no field for it.

        Raises:
            EpisodeInterrupted: After all retries, the endpoint was unreachable, refused, failed or took
                longer than ``timeouts.generate_s``; or its answer is not a turn.
            EpisodeOver: The episode has ended.
        """
        checked, specs = self._checked(messages, tools, max_tokens)
        self._check_turns()
        self._num_begun += 1
        bound = self._sampling.max_response_tokens
        texts = (*self._sampling.stop, *stop)
        request: dict[str, Any] = {
            "model": self._endpoint.model,
            "messages": [_sent(message) for message in checked],
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "max_tokens": bound if max_tokens is None else min(bound, max_tokens),
        }
        if texts:
            request["stop"] = list(texts)
        if specs:
            request["tools"] = [spec.message_form for spec in specs]
        turn = self._turn(await self._complete(request), texts)
        self._add(checked, specs, turn)
        return turn

    async def _complete(self, request: dict[str, Any]) -> "ChatCompletion":
        """Make a request, with the SDK's retries and their backoff."""
        from openai import APIError

        endpoint = self._endpoint
        client = self._client or self._own_client
        if client is None:
            client = self._own_client = open_client(endpoint, limit_s=self._limit_s)
        try:
            with self._taking_turn():
                async with asyncio.timeout(self._limit_s):
                    completion: ChatCompletion = await client.chat.completions.create(**request)
        except TimeoutError:
            raise EpisodeInterrupted(
                f"{endpoint.base_url} took longer than timeouts.generate_s = {self._limit_s:g} s"
            ) from None
        except APIError as error:
            if _is_context_full(error):
                self.has_hit_length = True
                raise ContextFull(f"{endpoint.base_url}: {error.message}"[:500]) from None
            words = f"{endpoint.base_url}: {type(error).__name__}: {error.message}"
            raise EpisodeInterrupted(words[:500]) from None
        return completion

    def _turn(self, completion: "ChatCompletion", stops: Sequence[str]) -> Turn:
        """Convert an answer, whose format is not guaranteed."""
        if not completion.choices or completion.usage is None:
            what = "choice" if not completion.choices else "usage, which says how many tokens it has"
            raise EpisodeInterrupted(f"{self._endpoint.base_url} answered without a {what}")
        choice = completion.choices[0]
        finish_reason = FINISH_REASONS.get(choice.finish_reason)
        if finish_reason is None:
            raise EpisodeInterrupted(
                f"{self._endpoint.base_url} ended a turn with finish_reason {choice.finish_reason!r}; must "
                f"be one of {', '.join(FINISH_REASONS)}"
            )
        calls: list[ToolCall] = []
        broken: list[BrokenToolCall] = []
        for number, call in enumerate(choice.message.tool_calls or ()):
            read = _read_call(call.model_dump(), f"call_{number}")
            if isinstance(read, ToolCall):
                calls.append(read)
            else:
                broken.append(read)
        self.counts["episode/num_faulty_tool_calls"] += len(broken)
        stop_text = (choice.model_extra or {}).get("stop_reason")
        more = choice.message.model_extra or {}
        reasoning = more.get("reasoning_content") or more.get("reasoning")
        return Turn(
            text=choice.message.content or "",
            num_prompt_tokens=completion.usage.prompt_tokens,
            num_tokens=completion.usage.completion_tokens,
            finish_reason=finish_reason,
            # Servers like vLLM report the text that ended the turn. Other servers may report something else.
            stop_text=stop_text if stop_text in stops else None,
            reasoning=reasoning if isinstance(reasoning, str) else None,
            tool_calls=tuple(calls),
            broken_tool_calls=tuple(broken),
        )

    def _add(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], turn: Turn) -> None:
        found = self._tree.find(messages, tools)
        self.counts["episode/num_rewritten_histories"] += found.is_rewritten
        answered = (*messages, checked_message("turn", turn.message))
        facts = turn_facts(versions=None, num_tokens=turn.num_tokens, finish_reason=turn.finish_reason)
        self._tree.add(answered, tools, facts, after=found.after)


def _sent(message: Message) -> dict[str, Any]:
    """Convert a checked message for the endpoint: no reasoning, and arguments of calls as text."""
    sent = {key: value for key, value in message.items() if key != "reasoning_content"}
    if "tool_calls" in sent:
        sent["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in sent["tool_calls"]
        ]
    return sent


def _read_call(call: dict[str, Any], default_id: str) -> ToolCall | BrokenToolCall:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        return BrokenToolCall(text=json.dumps(call)[:2000], problem="is not a call of a named function")
    name, written = function["name"], function.get("arguments")
    text = written if isinstance(written, str) else json.dumps(written)
    try:
        arguments = read_arguments(text)
    except ValueError as error:
        return BrokenToolCall(text=text, problem=f"arguments of {name} are {error}")
    return ToolCall(id=call.get("id") or default_id, name=name, arguments=arguments)


def _is_context_full(error: Any) -> bool:
    """Whether an APIError of the SDK says that the conversation is too long."""
    from openai import BadRequestError

    if not isinstance(error, BadRequestError):
        return False
    body = error.body if isinstance(error.body, dict) else {}
    codes = {str(error.code), str(error.type), str(body.get("code")), str(body.get("type"))}
    return bool(_CONTEXT_CODES & codes) or _CONTEXT_WORDS.search(error.message) is not None
