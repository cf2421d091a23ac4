"""Responses: ``POST /v1/responses`` as openai 3.52 speaks it.

A turn is up to three kinds of items: reasoning, a message, and a function call for each tool call. Such items
in a row become one assistant's message again.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from forgeasync.environments.messages import ASSISTANT, TOOL, Message, ToolCall, ToolSpec
from forgeasync.environments.sessions.fields import (
    Fields,
    Json,
    check_size,
    checked_text,
    joined_text,
    make_tool,
    read_call,
    read_tools,
    refuse_other_callers,
    wrong,
)
from forgeasync.environments.sessions.inference import InferenceRequest, InferenceResult, openai_error, sse
from forgeasync.environments.sessions.openai_fields import (
    check_common_fields,
    read_stream_options,
    read_tool_choice,
)
from forgeasync.environments.sessions.problems import RequestError
from forgeasync.environments.sessions.response_events import item_events
from forgeasync.environments.sessions.shown_turns import shown
from forgeasync.rollouts import FinishReason

_NOT_HONOURED = ("reasoning", "temperature", "top_p")
_WITHOUT_EFFECT = ("access_programs", "image")
_REFUSED = ("context_management", "conversation", "max_tool_calls", "moderation", "prompt")
"""What would change the prompt, or what the answer is and contains."""
_TEXT_PARTS = ("input_text", "output_text", "text")


class Responses:
    """The ``Api`` of Responses."""

    def read(self, body: Mapping[str, Any]) -> InferenceRequest:
        """See ``Api``."""
        fields = Fields(body)
        checked_text("model", fields.required("model"))
        tools, strict = read_tools(fields, _read_tool)
        may_call = read_tool_choice(fields)
        ignored = fields.given(_NOT_HONOURED) + strict
        ignored += _read_text(fields) + _read_include(fields.items("include"))
        if (metadata := fields.take("metadata")) is not None:
            Fields(metadata, "metadata")
            check_size("metadata", metadata)
        store = fields.take("store")
        if store is not None and not isinstance(store, bool):
            raise wrong("store", store, "must be true or false")
        messages = _read_input(fields, fields.required("input"))
        instructions, previous_id = fields.text("instructions"), fields.text("previous_response_id")
        max_tokens, is_streamed = fields.count("max_output_tokens"), fields.flag("stream")
        read_stream_options(fields, "include_obfuscation")
        check_common_fields(fields)
        fields.only("background", False, why="must be false: a response is answered or streamed")
        fields.only("truncation", "disabled", why="must be 'disabled': nothing is removed from a history")
        fields.refuse(_REFUSED, why="a session cannot do what it asks for; leave it out")
        fields.given(_WITHOUT_EFFECT)
        fields.ignore_rest()
        return InferenceRequest(
            messages=messages,
            instructions=instructions,
            previous_id=previous_id,
            tools=tools if may_call else (),
            max_tokens=max_tokens,
            is_streamed=is_streamed,
            keeps_response=store is not False,
            ignored=ignored,
            unknown=fields.unknown,
            body=body,
        )

    def whole(self, asked: InferenceRequest, reply: InferenceResult) -> Json:
        """See ``Api``."""
        turn = reply.turns[0]
        is_cut = turn.finish_reason is FinishReason.LENGTH
        return {
            **_frame(asked, reply),
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

    def events(self, asked: InferenceRequest, reply: InferenceResult) -> Iterator[bytes]:
        """See ``Api``."""
        number = 0
        begun = {**_frame(asked, reply), "status": "in_progress", "output": []}
        whole = self.whole(asked, reply)
        all_events: list[tuple[str, Json]] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
        ]
        for index, item in enumerate(whole["output"]):
            all_events += item_events(index, item)
        all_events.append((f"response.{whole['status']}", {"response": whole}))
        for number, (kind, data) in enumerate(all_events):
            yield sse({"type": kind, "sequence_number": number, **data}, kind)

    def error(self, problem: RequestError) -> Json:
        """See ``Api``."""
        return openai_error(problem)

    def error_event(self, problem: RequestError) -> bytes:
        """See ``Api``."""
        data = {"code": problem.code, "message": str(problem), "param": problem.param}
        return sse({"type": "error", "sequence_number": 0, **data}, "error")


def _read_text(fields: Fields) -> tuple[str, ...]:
    value = fields.take("text")
    if value is None:
        return ()
    text = fields.inner("text", value)
    text.only("format", {"type": "text"}, why="must be {'type': 'text'}")
    ignored = text.given(["verbosity"])
    text.ignore_rest()
    return ignored


def _read_include(include: list[Any]) -> tuple[str, ...]:
    for index, one in enumerate(include):
        # Reasoning is in its item as it is, so that nothing encrypted is missed.
        if one != "reasoning.encrypted_content":
            raise wrong(
                f"include[{index}]", one, "must be 'reasoning.encrypted_content'", code="unsupported_value"
            )
    return ("include",) * bool(include)


def _read_tool(fields: Fields) -> tuple[ToolSpec, bool]:
    """The tool, and whether it asks for arguments that are sure to follow the schema."""
    kind = fields.take("type")
    if kind != "function":
        remedy = "must be 'function': there are no built-in tools"
        raise wrong(fields.path("type"), kind, remedy, code="unsupported_value")
    made = make_tool(
        fields.where, fields.required("name"), fields.text("description"), fields.take("parameters")
    )
    is_strict = fields.flag("strict")
    refuse_other_callers(fields)
    fields.only("async", False, why="must be false: a turn waits for its calls")
    fields.refuse(["output_schema"], why="the model is not shown it; say it in the description")
    fields.ignore_rest()
    return made, is_strict


def _read_input(fields: Fields, value: object) -> tuple[Message, ...]:
    if isinstance(value, str):
        return ({"role": "user", "content": checked_text("input", value)},)
    if not isinstance(value, list):
        raise wrong("input", value, "must be a string or a list of items")
    messages: list[Json] = []
    turn: Json | None = None
    """The assistant's message that is being put together."""
    for index, item in enumerate(value):
        part = _read_item(fields.inner(f"input[{index}]", item))
        if part["role"] != ASSISTANT:
            turn = None
            messages.append(part)
            continue
        # A turn is shown as reasoning, text, calls: what would go back in this order begins the next turn.
        if turn is None or (
            "tool_calls" not in part
            and ("content" in turn or "tool_calls" in turn or "reasoning_content" in part)
        ):
            turn = {"role": ASSISTANT}
            messages.append(turn)
        calls = turn.get("tool_calls", []) + part.pop("tool_calls", [])
        turn |= part | ({"tool_calls": calls} if calls else {})
    return tuple({"content": "", **message} for message in messages)


def _read_item(fields: Fields) -> Json:
    """One item as a message, or as the part of an assistant's message that it is."""
    kind = fields.take("type") or "message"
    fields.given(["id", "status"])
    match kind:
        case "message":
            part = _read_message(fields)
        case "reasoning":
            thoughts = fields.items("content")
            fields.given(["summary", "encrypted_content"])
            part = {"role": ASSISTANT}
            if thoughts:
                part["reasoning_content"] = joined_text(fields, "content", thoughts, ["reasoning_text"])
        case "function_call":
            call = read_call(fields, id_name="call_id", arguments_name="arguments")
            fields.only("async", False, why="must be false: a turn waits for its calls")
            # The SDK's ``parse`` and ``stream`` add ``parsed_arguments`` to what they return.
            fields.given(["caller", "parsed_arguments"])
            part = {"role": ASSISTANT, "tool_calls": [call]}
        case "function_call_output":
            call_id = checked_text(fields.path("call_id"), fields.required("call_id"))
            output = joined_text(fields, "output", fields.required("output"), _TEXT_PARTS)
            fields.given(["caller", "name", "namespace"])
            part = {"role": TOOL, "tool_call_id": call_id, "content": output}
        case _:
            raise wrong(
                fields.path("type"),
                kind,
                "must be 'message', 'reasoning', 'function_call' or 'function_call_output'",
                code="unsupported_value",
            )
    fields.ignore_rest()
    return part


def _read_message(fields: Fields) -> Json:
    role, content = fields.required("role"), fields.required("content")
    if role not in ("user", "system", "developer", "assistant"):
        raise wrong(fields.path("role"), role, "must be 'user', 'system', 'developer' or 'assistant'")
    fields.take("phase")
    text = joined_text(fields, "content", content, _TEXT_PARTS)
    return {"role": "system" if role == "developer" else role, "content": text}


def _frame(asked: InferenceRequest, reply: InferenceResult) -> Json:
    """What a response has before anything is sampled."""
    tools = [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": False,
        }
        for tool in asked.tools
    ]
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created_s,
        "model": reply.model,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_tokens,
        "metadata": asked.body.get("metadata"),
        "parallel_tool_calls": True,
        "previous_response_id": asked.previous_id,
        "text": {"format": {"type": "text"}},
        "tool_choice": asked.body.get("tool_choice") or "auto",
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
        part = {"type": "output_text", "text": seen.text, "annotations": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{reply.id}",
                "role": ASSISTANT,
                "status": status,
                "content": [part],
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
