"""Anthropic's Messages: ``POST /v1/messages`` as anthropic 2.11 speaks it.

A user's message with tool results becomes a tool's message for each of them, and a user's message for the
text between and after them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from forgeasync.environments.environment import Turn
from forgeasync.environments.messages import ASSISTANT, TOOL, Message, ToolSpec
from forgeasync.environments.sessions.asked import Asked, Reply, dumps, pieces, sse
from forgeasync.environments.sessions.fields import (
    Fields,
    Json,
    checked_text,
    make_tool,
    may_call_tools,
    read_call,
    read_stops,
    read_tools,
    wrong,
)
from forgeasync.environments.sessions.problems import RequestError
from forgeasync.environments.sessions.shown_turns import shown
from forgeasync.rollouts.rollout import FinishReason

SIGNATURE = "unsigned"
"""Stands where the API signs what the model thought. What comes back is compared with what was shown."""

_NOT_HONOURED = ("temperature", "thinking", "top_k", "top_p")
_WITHOUT_EFFECT = (
    "cache_control",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
)
_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


class AnthropicMessages:
    """The ``Api`` of Anthropic's Messages."""

    def read(self, body: Mapping[str, Any]) -> Asked:
        """See ``Api``."""
        fields = Fields(body)
        checked_text("model", fields.required("model"))
        messages = fields.required_items("messages")
        tools, strict = read_tools(fields, _read_tool)
        may_call = _read_tool_choice(fields.take("tool_choice"))
        max_tokens = fields.count("max_tokens")
        if max_tokens is None:
            raise RequestError("max_tokens is missing", param="max_tokens")
        system = fields.take("system")
        read: list[Message] = []
        if system is not None:
            read.append({"role": "system", "content": _read_text("system", system)})
        ignored = fields.given(_NOT_HONOURED) + strict
        ignored += _read_output_config(fields.take("output_config"))
        num_errors = 0
        for index, message in enumerate(messages):
            more, has_error = _read_message(f"messages[{index}]", message)
            read += more
            num_errors += has_error
        asked = Asked(
            messages=tuple(read),
            tools=tools if may_call else (),
            max_tokens=max_tokens,
            stop=read_stops(fields, "stop_sequences"),
            is_streamed=fields.flag("stream"),
            ignored=ignored + ("tool_result.is_error",) * bool(num_errors),
            body=body,
        )
        fields.given(_WITHOUT_EFFECT)
        fields.done()
        return asked

    def whole(self, asked: Asked, reply: Reply) -> Json:
        """See ``Api``."""
        turn = reply.turns[0]
        return {
            **_frame(reply),
            "content": _blocks(turn),
            **_stop(asked, turn),
            "usage": {"input_tokens": turn.num_prompt_tokens, "output_tokens": turn.num_tokens},
        }

    def events(self, asked: Asked, reply: Reply) -> Iterator[bytes]:
        """See ``Api``."""
        turn = reply.turns[0]
        usage = {"input_tokens": turn.num_prompt_tokens, "output_tokens": 0}
        yield _event("message_start", message={**_frame(reply), "usage": usage})
        for index, block in enumerate(_blocks(turn)):
            yield _event("content_block_start", index=index, content_block=_begun(block))
            for delta in _deltas(block):
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event(
            "message_delta",
            delta=_stop(asked, turn),
            usage={"output_tokens": turn.num_tokens},
        )
        yield _event("message_stop")

    def error(self, problem: RequestError) -> Json:
        """See ``Api``."""
        kind = _ERRORS.get(problem.status, "api_error" if problem.status >= 500 else "invalid_request_error")
        message = str(problem)
        if problem.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"
        return {"type": "error", "error": {"type": kind, "message": message}}

    def error_event(self, problem: RequestError) -> bytes:
        """See ``Api``."""
        return sse(self.error(problem), "error")


def _read_tool_choice(value: object) -> bool:
    """Whether the model may call tools."""
    if value is None:
        return True
    fields = Fields(value, "tool_choice")
    may_call = may_call_tools("tool_choice.type", fields.take("type"))
    fields.only("disable_parallel_tool_use", False, why="must be false: a turn may have several calls")
    fields.done()
    return may_call


def _read_output_config(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    fields = Fields(value, "output_config")
    ignored = fields.given(["effort"])
    fields.done()
    return ignored


def _read_tool(where: str, tool: object) -> tuple[ToolSpec, bool]:
    """The tool, and whether it asks for arguments that are sure to follow the schema."""
    fields = Fields(tool, where)
    fields.only("type", "custom", why="must be 'custom': there are no built-in tools")
    made = make_tool(
        where, fields.required("name"), fields.text("description"), fields.required("input_schema")
    )
    fields.given(["cache_control", "eager_input_streaming"])
    is_strict = fields.flag("strict")
    fields.done()
    return made, is_strict


def _read_text(where: str, value: object) -> str:
    if isinstance(value, list):
        return "".join(
            _read_text_block(f"{where}[{index}]", Fields(block, f"{where}[{index}]"))
            for index, block in enumerate(value)
        )
    return checked_text(where, value)


def _read_text_block(where: str, fields: Fields, *, kind: str | None = None) -> str:
    kind = fields.take("type") if kind is None else kind
    if kind != "text":
        raise wrong(
            f"{where}.type", kind, "must be 'text': this model reads text only", code="unsupported_value"
        )
    text = checked_text(fields.path("text"), fields.required("text"))
    fields.given(["cache_control", "citations"])
    fields.done()
    return text


def _read_message(where: str, value: object) -> tuple[list[Message], bool]:
    """The messages that it becomes, and whether a tool's result is marked as an error."""
    fields = Fields(value, where)
    role, content = fields.required("role"), fields.required("content")
    fields.done()
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wrong(f"{where}.content", content, "must be a string or a list of blocks")
    match role:
        case "assistant":
            return [_read_turn(f"{where}.content", content)], False
        case "user":
            return _read_user(f"{where}.content", content)
        case "system":
            return [{"role": "system", "content": _read_text(f"{where}.content", content)}], False
        case _:
            raise wrong(f"{where}.role", role, "must be 'user', 'assistant' or 'system'")


def _read_turn(where: str, blocks: list[Any]) -> Message:
    text, thoughts, calls = "", [], []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        fields = Fields(block, at)
        match fields.take("type"):
            case "text":
                text += _read_text_block(at, fields, kind="text")
            case "thinking":
                thoughts.append(checked_text(f"{at}.thinking", fields.required("thinking")))
                fields.take("signature")
                fields.done()
            case "tool_use":
                calls.append(read_call(at, fields, id_name="id", arguments_name="input"))
                fields.given(["cache_control", "caller"])
                fields.done()
            case kind:
                raise wrong(
                    f"{at}.type", kind, "must be 'text', 'thinking' or 'tool_use'", code="unsupported_value"
                )
    message: Json = {"role": ASSISTANT, "content": text}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _read_user(where: str, blocks: list[Any]) -> tuple[list[Message], bool]:
    messages: list[Message] = []
    has_error = False
    texts: list[str] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        fields = Fields(block, at)
        kind = fields.take("type")
        if kind != "tool_result":
            texts.append(_read_text_block(at, fields, kind=str(kind)))
            continue
        if texts:
            messages.append({"role": "user", "content": "".join(texts)})
            texts = []
        content = fields.take("content")
        result = "" if content is None else _read_text(f"{at}.content", content)
        call_id = checked_text(f"{at}.tool_use_id", fields.required("tool_use_id"))
        has_error |= fields.flag("is_error")
        fields.given(["cache_control"])
        fields.done()
        messages.append({"role": TOOL, "tool_call_id": call_id, "content": result})
    if texts or not messages:
        messages.append({"role": "user", "content": "".join(texts)})
    return messages, has_error


def _frame(reply: Reply) -> Json:
    """What a message has before anything is sampled."""
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": ASSISTANT,
        "model": reply.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _blocks(turn: Turn) -> list[Json]:
    seen = shown(turn)
    blocks: list[Json] = []
    if seen.reasoning:
        blocks.append({"type": "thinking", "thinking": seen.reasoning, "signature": SIGNATURE})
    if seen.text or not seen.tool_calls:
        blocks.append({"type": "text", "text": seen.text})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
        for call in seen.tool_calls
    ]


def _begun(block: Json) -> Json:
    """A block before its deltas."""
    match block["type"]:
        case "thinking":
            return {**block, "thinking": "", "signature": ""}
        case "text":
            return {**block, "text": ""}
    return {**block, "input": {}}


def _deltas(block: Json) -> Iterator[Json]:
    match block["type"]:
        case "thinking":
            for piece in pieces(block["thinking"]):
                yield {"type": "thinking_delta", "thinking": piece}
            yield {"type": "signature_delta", "signature": block["signature"]}
        case "text":
            for piece in pieces(block["text"]):
                yield {"type": "text_delta", "text": piece}
        case "tool_use":
            for piece in pieces(dumps(block["input"])):
                yield {"type": "input_json_delta", "partial_json": piece}


def _stop(asked: Asked, turn: Turn) -> Json:
    """Why a turn ended, and which of the request's own texts ended it."""
    if turn.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if shown(turn).tool_calls:
        # Clients answer calls only where this is the reason, whatever came after the last of them.
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if turn.stop_text in asked.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": turn.stop_text}
    # A text of the run's own ``sampling.stop`` is not one that the client has asked for.
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _event(kind: str, **data: Any) -> bytes:
    return sse({"type": kind, **data}, kind)
