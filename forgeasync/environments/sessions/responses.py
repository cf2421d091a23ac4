"""The Responses API: ``POST /v1/responses``, as the client openai 3.52 uses it.

A turn has up to three kinds of items: reasoning, a message, and a function call for each tool call. In a
request, consecutive items of a turn become one assistant message.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from forgeasync.environments.messages import ASSISTANT, TOOL, Message, ToolCall
from forgeasync.environments.sessions.dialect import (
    ONLY_THE_MODEL_CALLS,
    Arguments,
    Count,
    Fields,
    InferenceRequest,
    InferenceResult,
    Json,
    JsonObject,
    OpenAIBody,
    OpenAIErrors,
    RequestError,
    ToolName,
    call_message_form,
    chosen_tools,
    joined_text,
    names,
    read_body,
    refusals,
    shown,
    sse,
    tool_spec,
)
from forgeasync.rollouts import FinishReason

_NOT_ASYNC = {"async": (False, "a turn waits for its calls")}
_ONE_NAME = refusals("namespace toolset_name", "tools have one name here")


class _Text(Fields):
    type: Literal["input_text", "output_text", "text"]
    text: str

    # The SDK's ``parse`` adds ``parsed`` to what it returns.
    without_effect = names("parsed prompt_cache_breakpoint")
    only: ClassVar = {
        "annotations": ([], "this model writes none"),
        "logprobs": ([], "log-probabilities are not given out"),
    }


class _Thought(Fields):
    type: Literal["reasoning_text"]
    text: str


class _Item(Fields, tag_field="type"):
    without_effect = names("id status")


class _MessageItem(_Item, tag="message"):
    role: Literal["user", "system", "developer", "assistant"]
    content: str | list[_Text]

    without_effect = _Item.without_effect | {"phase"}


class _Reasoning(_Item, tag="reasoning"):
    content: list[_Thought] | None = None

    without_effect = _Item.without_effect | {"summary", "encrypted_content"}


class _FunctionCall(_Item, tag="function_call"):
    call_id: str
    name: str
    arguments: Arguments

    # The SDK's ``parse`` and ``stream`` add ``parsed_arguments`` to what they return.
    without_effect = _Item.without_effect | {"caller", "parsed_arguments"}
    only = _NOT_ASYNC
    refused = _ONE_NAME


class _FunctionCallOutput(_Item, tag="function_call_output"):
    call_id: str
    output: str | list[_Text]

    without_effect = _Item.without_effect | {"caller", "name", "namespace"}


class _Tool(Fields):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None

    not_honoured = names("strict")
    only: ClassVar = {**ONLY_THE_MODEL_CALLS, **_NOT_ASYNC}
    refused = refusals("output_schema", "the model is not shown it; say it in the description")


class _NamedTool(Fields):
    type: Literal["function"]
    name: str


class _AnswerText(Fields):
    not_honoured = names("verbosity")
    only: ClassVar = {"format": ({"type": "text"}, "an answer is plain text")}


_Items = list[_MessageItem | _Reasoning | _FunctionCall | _FunctionCallOutput]


class _Body(OpenAIBody):
    input: str | _Items
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedTool | None = None
    max_output_tokens: Count | None = None
    text: _AnswerText | None = None
    # Not needed, because reasoning items are not encrypted.
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    metadata: JsonObject | None = None
    store: bool | None = None

    not_honoured = names("include reasoning temperature top_p")
    without_effect = OpenAIBody.without_effect | {"access_programs", "image"}
    only: ClassVar = {
        **OpenAIBody.only,
        "background": (False, "a response is answered or streamed"),
        "truncation": ("disabled", "nothing is removed from a history"),
    }
    refused = refusals("context_management conversation max_tool_calls moderation prompt")


class Responses(OpenAIErrors):
    """The ``Dialect`` of Responses."""

    def read(self, body: Mapping[str, Any]) -> InferenceRequest:
        """See ``Dialect``."""
        read, named = read_body(_with_kinds(body), _Body)
        choice = read.tool_choice
        return InferenceRequest(
            messages=_messages(read.input),
            instructions=read.instructions,
            previous_id=read.previous_response_id,
            **chosen_tools(
                (tool_spec(one.name, one.description, one.parameters) for one in read.tools or ()),
                choice,
                choice.name if isinstance(choice, _NamedTool) else None,
            ),
            max_tokens=read.max_output_tokens,
            is_streamed=bool(read.stream),
            keeps_response=read.store is not False,
            **named,
        )

    def whole(self, request: InferenceRequest, reply: InferenceResult) -> Json:
        """See ``Dialect``."""
        turn = reply.turns[0]
        is_cut = turn.finish_reason is FinishReason.LENGTH
        return {
            **_frame(request, reply),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _items(reply),
            "usage": {
                "input_tokens": turn.num_prompt_tokens,
                # The API requires these details; a session does not count them apart.
                "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0},
                "output_tokens": turn.num_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": turn.num_prompt_tokens + turn.num_tokens,
            },
        }

    def events(self, request: InferenceRequest, reply: InferenceResult) -> Iterator[bytes]:
        """See ``Dialect``."""
        begun = {**_frame(request, reply), "status": "in_progress", "output": []}
        whole = self.whole(request, reply)
        all_events: list[tuple[str, Json]] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
        ]
        for index, item in enumerate(whole["output"]):
            all_events += _item_events(index, item)
        all_events.append((f"response.{whole['status']}", {"response": whole}))
        for number, (kind, data) in enumerate(all_events):
            yield sse({"type": kind, "sequence_number": number, **data}, kind)

    def error_event(self, problem: RequestError) -> bytes:
        """See ``Dialect``."""
        data = {"code": problem.code, "message": str(problem), "param": problem.param}
        return sse({"type": "error", "sequence_number": 0, **data}, "error")


def _with_kinds(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body with type ``message`` for items without a type, which is the API's default."""
    items = body.get("input")
    if not isinstance(items, list):
        return body
    typed = [{**one, "type": one.get("type") or "message"} if isinstance(one, dict) else one for one in items]
    return {**body, "input": typed}


def _messages(given: str | _Items) -> tuple[Message, ...]:
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    messages: list[Json] = []
    turn: Json | None = None
    """The assistant message to which following items are added."""
    for item in given:
        part = _part(item)
        if part["role"] != ASSISTANT:
            turn = None
            messages.append(part)
            continue
        # A turn has the order reasoning, text, calls. An item that breaks this order begins the next turn.
        if turn is None or (
            "tool_calls" not in part
            and ("content" in turn or "tool_calls" in turn or "reasoning_content" in part)
        ):
            turn = {"role": ASSISTANT}
            messages.append(turn)
        calls = turn.get("tool_calls", []) + part.pop("tool_calls", [])
        turn |= part | ({"tool_calls": calls} if calls else {})
    return tuple({"content": "", **message} for message in messages)


def _part(item: _Item) -> Json:
    """Return an item as a message, or as part of an assistant message."""
    match item:
        case _MessageItem():
            role = "system" if item.role == "developer" else item.role
            return {"role": role, "content": joined_text(item.content)}
        case _Reasoning():
            thoughts = {"reasoning_content": joined_text(item.content)} if item.content else {}
            return {"role": ASSISTANT, **thoughts}
        case _FunctionCall():
            call = call_message_form(item.name, item.arguments, call_id=item.call_id)
            return {"role": ASSISTANT, "tool_calls": [call]}
        case _FunctionCallOutput():
            return {"role": TOOL, "tool_call_id": item.call_id, "content": joined_text(item.output)}
    raise AssertionError(item)


def _frame(request: InferenceRequest, reply: InferenceResult) -> Json:
    """Return the fields of a response that do not depend on the sampled turn."""
    tools = [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": False,
        }
        for tool in request.tools
    ]
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created_s,
        "model": reply.model,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_tokens,
        "metadata": request.body.get("metadata"),
        "parallel_tool_calls": True,
        "previous_response_id": request.previous_id,
        "text": {"format": {"type": "text"}},
        "tool_choice": request.body.get("tool_choice") or "auto",
        "tools": tools,
        "truncation": "disabled",
        "usage": None,
    }


def _items(reply: InferenceResult) -> list[Json]:
    turn = reply.turns[0]
    seen = shown(turn)
    status = "incomplete" if turn.finish_reason is FinishReason.LENGTH else "completed"
    items: list[Json] = []
    if seen.reasoning:
        part = {"type": "reasoning_text", "text": seen.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": [part]})
    if seen.text or not seen.tool_calls:
        said: Json = {"type": "output_text", "text": seen.text, "annotations": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{reply.id}",
                "role": ASSISTANT,
                "status": status,
                "content": [said],
            }
        )
    return items + [_call_item(f"fc_{reply.id}_{index}", call) for index, call in enumerate(seen.tool_calls)]


def _call_item(item_id: str, call: ToolCall) -> Json:
    return {
        "type": "function_call",
        "id": item_id,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.message_form["function"]["arguments"],
        "status": "completed",
    }


def _item_events(index: int, item: Json) -> Iterator[tuple[str, Json]]:
    """Yield type and data of the events for the item at this index of the output."""
    place = {"output_index": index}
    kind = item["type"]
    if kind == "function_call":
        bare = {**item, "arguments": "", "status": "in_progress"}
    elif kind == "message":
        bare = {**item, "content": [], "status": "in_progress"}
    else:
        bare = {**item, "content": []}
    yield "response.output_item.added", {**place, "item": bare}
    if kind == "function_call":
        of_call = {**place, "item_id": item["id"]}
        yield "response.function_call_arguments.delta", {**of_call, "delta": item["arguments"]}
        yield "response.function_call_arguments.done", {**of_call, "arguments": item["arguments"]}
    else:
        for number, part in enumerate(item["content"]):
            yield from _part_events({**place, "item_id": item["id"], "content_index": number}, part)
    yield "response.output_item.done", {**place, "item": item}


def _part_events(place: Json, part: Json) -> Iterator[tuple[str, Json]]:
    # Events are named after the type of the part: response.output_text.delta.
    kind = f"response.{part['type']}"
    extra: Json = {"logprobs": []} if part["type"] == "output_text" else {}
    yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
    if part["text"]:
        yield f"{kind}.delta", {**place, "delta": part["text"], **extra}
    yield f"{kind}.done", {**place, "text": part["text"], **extra}
    yield "response.content_part.done", {**place, "part": part}
