"""A session's three APIs, each by its unmodified SDK, and turns of every shape that a client can be shown."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import aiohttp
import openai
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from forgeasync.environments import (
    AnthropicMessages,
    BrokenToolCall,
    ChatCompletions,
    Dialect,
    Responses,
    Session,
)
from forgeasync.rollouts import FinishReason
from tests.support.sessions import WEATHER, anthropic_client, call, openai_client, say, strictly

HEADER = "x-forgeasync-ignored"
USER: Any = {"role": "user", "content": "What is the weather in Oslo?"}
FUNCTION: Any = {"name": "weather", "description": "Says how the weather is.", "parameters": WEATHER}


class ApiOfSession:
    """How a client of one API asks for a turn, and what it reads of an answer."""

    dialect: Dialect
    path = ""
    messages_field = "messages"
    needed: Mapping[str, Any] = MappingProxyType({"model": "m"})

    def body(self, messages: list[Any], /, **more: Any) -> dict[str, Any]:
        return {**self.needed, self.messages_field: messages, **more}

    async def post(self, session: Session, body: Any) -> tuple[Any, aiohttp.ClientResponse]:
        """Send a body without an SDK: the answer's JSON, or None if it has another type, and the answer."""
        async with (
            aiohttp.ClientSession(headers={"x-api-key": session.api_key}) as client,
            client.post(session.base_url + self.path, data=json.dumps(body)) as answer,
        ):
            content = await answer.read()
            return json.loads(content) if answer.content_type == "application/json" else None, answer


class Chat(ApiOfSession):
    dialect = ChatCompletions()
    path = "/chat/completions"

    def tool(self, **more: Any) -> dict[str, Any]:
        return {"type": "function", "function": {**FUNCTION, **more}}

    async def ask(
        self, session: Session, messages: list[Any], *, stream: bool = False, **more: Any
    ) -> ChatCompletion:
        """The answer as the SDK has it, checked field by field as it came over the wire.

        A streamed one is put together by the SDK.
        """
        given = self.body(messages, **more)
        async with openai_client(session) as client:
            if not stream:
                raw = await client.chat.completions.with_raw_response.create(**given)
                strictly(ChatCompletion, json.loads(raw.content), extra=["reasoning_content"])
                return raw.parse()
            usage = {"include_usage": True}
            async with client.chat.completions.stream(**given, stream_options=usage) as events:
                async for event in events:
                    if event.type == "chunk":
                        strictly(ChatCompletionChunk, event.chunk.to_dict(), extra=["reasoning_content"])
                try:
                    return await events.get_final_completion()
                except openai.LengthFinishReasonError as error:
                    # The SDK's helper takes a turn that was cut for an error, and has it all the same.
                    return error.completion

    def said(self, answer: ChatCompletion) -> list[Any]:
        """What a client hands back of an answer, as the SDK has it."""
        return [answer.choices[0].message]

    def forcing(self, name: str | None) -> dict[str, Any]:
        """The choice of tools by which a call is made, of any tool or of one of this name."""
        named = {"type": "function", "function": {"name": name}}
        return {"tool_choice": "required" if name is None else named}

    def calls(self, answer: ChatCompletion) -> list[tuple[str, Any]]:
        found = answer.choices[0].message.tool_calls
        assert found is None or found, "an empty list is no form of the API"
        return [(one.function.name, json.loads(one.function.arguments)) for one in found or ()]

    def reasoning(self, answer: ChatCompletion) -> str:
        return (answer.choices[0].message.model_extra or {}).get("reasoning_content") or ""

    def ending(self, answer: ChatCompletion) -> str:
        return answer.choices[0].finish_reason

    def answering(self, answer: ChatCompletion, text: str) -> list[Any]:
        """Results of all calls of an answer, and then what the user says."""
        calls = answer.choices[0].message.tool_calls or ()
        results = [{"role": "tool", "tool_call_id": one.id, "content": "rain"} for one in calls]
        return [*results, {"role": "user", "content": text}]

    def text(self, answer: ChatCompletion) -> str:
        return answer.choices[0].message.content or ""

    def usage(self, answer: ChatCompletion) -> tuple[int, int]:
        """Number of tokens before a turn, and of it."""
        usage = answer.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        return usage.prompt_tokens, usage.completion_tokens


class ResponsesApi(ApiOfSession):
    dialect = Responses()
    path = "/responses"
    messages_field = "input"

    def tool(self, **more: Any) -> dict[str, Any]:
        return {"type": "function", **FUNCTION, **more}

    async def ask(self, session: Session, messages: Any, *, stream: bool = False, **more: Any) -> Response:
        """The events of a streamed one build what the last of them has."""
        given = self.body(messages, **more)
        async with openai_client(session) as client:
            if not stream:
                raw = await client.responses.with_raw_response.create(**given)
                strictly(Response, json.loads(raw.content))
                return raw.parse()
            events = []
            async for event in await client.responses.create(**given, stream=True):
                strictly(ResponseStreamEvent, event.to_dict())
                events.append(event)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        final = events[-1].response
        assert [one.item for one in events if one.type == "response.output_item.done"] == final.output
        deltas = {}
        for kind in ("output_text", "reasoning_text", "function_call_arguments"):
            deltas[kind] = "".join(one.delta for one in events if one.type == f"response.{kind}.delta")
            field = "arguments" if kind == "function_call_arguments" else "text"
            ends = [getattr(one, field) for one in events if one.type == f"response.{kind}.done"]
            assert deltas[kind] == "".join(ends)
        assert final.output_text == deltas["output_text"]
        return final

    def said(self, answer: Response) -> list[Any]:
        return list(answer.output)

    def forcing(self, name: str | None) -> dict[str, Any]:
        return {"tool_choice": "required" if name is None else {"type": "function", "name": name}}

    def calls(self, answer: Response) -> list[tuple[str, Any]]:
        found = [item for item in answer.output if item.type == "function_call"]
        return [(one.name, json.loads(one.arguments)) for one in found]

    def reasoning(self, answer: Response) -> str:
        items = [item for item in answer.output if item.type == "reasoning"]
        return "".join(part.text for item in items for part in item.content)

    def ending(self, answer: Response) -> str:
        """Why it is incomplete, or that it is not."""
        assert (answer.status == "incomplete") == (answer.incomplete_details is not None)
        return answer.status if answer.incomplete_details is None else answer.incomplete_details.reason

    def answering(self, answer: Response, text: str) -> list[Any]:
        calls = [item for item in answer.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": one.call_id, "output": "rain"} for one in calls
        ]
        return [*results, {"role": "user", "content": text}]

    def text(self, answer: Response) -> str:
        return answer.output_text

    def usage(self, answer: Response) -> tuple[int, int]:
        usage = answer.usage
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        return usage.input_tokens, usage.output_tokens


class MessagesApi(ApiOfSession):
    dialect = AnthropicMessages()
    path = "/messages"
    needed = MappingProxyType({"model": "m", "max_tokens": 100})

    def tool(self, **more: Any) -> dict[str, Any]:
        given = {**FUNCTION, **more}
        return {"input_schema": given.pop("parameters"), **given}

    async def ask(
        self, session: Session, messages: list[Any], *, stream: bool = False, **more: Any
    ) -> Message:
        given = self.body(messages, **more)
        async with anthropic_client(session) as client:
            if not stream:
                raw = await client.messages.with_raw_response.create(**given)
                strictly(Message, json.loads(raw.http_response.content))
                return await raw.parse()
            async with client.messages.stream(**given) as events:
                async for event in events:
                    if event.type in ("message_start", "message_delta", "content_block_start"):
                        strictly(RawMessageStreamEvent, event.to_dict(), extra=["parsed_output"])
                return await events.get_final_message()

    def said(self, answer: Message) -> list[Any]:
        return [{"role": "assistant", "content": answer.content}]

    def forcing(self, name: str | None) -> dict[str, Any]:
        return {"tool_choice": {"type": "any"} if name is None else {"type": "tool", "name": name}}

    def calls(self, answer: Message) -> list[tuple[str, Any]]:
        return [(block.name, block.input) for block in answer.content if block.type == "tool_use"]

    def reasoning(self, answer: Message) -> str:
        return "".join(block.thinking for block in answer.content if block.type == "thinking")

    def ending(self, answer: Message) -> str:
        return answer.stop_reason

    def answering(self, answer: Message, text: str) -> list[Any]:
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": one.id, "content": "rain"} for one in calls]
        return [{"role": "user", "content": [*results, {"type": "text", "text": text}]}]

    def text(self, answer: Message) -> str:
        return "".join(block.text for block in answer.content if block.type == "text")

    def usage(self, answer: Message) -> tuple[int, int]:
        return answer.usage.input_tokens, answer.usage.output_tokens


Api = Chat | ResponsesApi | MessagesApi
CHAT, RESPONSES, MESSAGES = Chat(), ResponsesApi(), MessagesApi()
APIS: dict[str, Api] = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}

BROKEN = BrokenToolCall(text='<tool_call>{"na', problem="cut off")

RICH = say(
    "Let me look.",
    reasoning="The user wants weather. 天気?",
    tool_calls=(call("call_a", city="Oslo"), call("call_b", city="Bergen ☔", days=[1, {"x": None}])),
)

TURNS = {
    "text": say("It rains. ☔"),
    "empty": say(""),
    "space": say("  \n"),
    "long": say("word " * 3000),
    "cut": say("It ra", finish_reason=FinishReason.LENGTH),
    "thought only": say("", reasoning="I should say nothing."),
    "rich": RICH,
    "call only": say("", tool_calls=(call("c", city="Oslo"),)),
    "no arguments": say("", tool_calls=(call("c"),)),
    "broken": say("Hm.", broken_tool_calls=(BROKEN,)),
    "only broken": say("", broken_tool_calls=(BROKEN, BROKEN)),
    "broken and whole": say(
        "Hm.", reasoning="r", tool_calls=(call("c", city="Oslo"),), broken_tool_calls=(BROKEN,)
    ),
    "no JSON": say("", tool_calls=(call("c", city=float("nan")),)),
}
