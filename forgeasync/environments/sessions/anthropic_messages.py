"""Anthropic's Messages: ``POST /v1/messages`` as anthropic 2.11 speaks it.

A user's message with tool results becomes a tool's message for each of them, and a user's message for the
text between and after them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from forgeasync.environments.environment import Turn
from forgeasync.environments.messages import ASSISTANT, TOOL, Message, ToolSpec
from forgeasync.environments.sessions.fields import (
    Fields,
    Json,
    checked_text,
    make_tool,
    may_call_tools,
    read_call,
    read_stops,
    read_tools,
    refuse_other_callers,
    wrong,
)
from forgeasync.environments.sessions.inference import InferenceRequest, InferenceResult, dumps, pieces, sse
from forgeasync.environments.sessions.problems import RequestError
from forgeasync.environments.sessions.shown_turns import shown
from forgeasync.rollouts import FinishReason

SIGNATURE = "unsigned"
"""Stands where the API signs what the model thought. What comes back is compared with what was shown."""

_NOT_HONOURED = ("temperature", "thinking", "top_k", "top_p")
_WITHOUT_EFFECT = (
    "billing_policy",
    "cache_control",
    "diagnostics",
    "fallback_credit_token",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
)
_REFUSED = (
    "compaction",
    "container",
    "context_management",
    "fallbacks",
    "mcp_servers",
    "output_format",
    "thread",
)
"""What would change the prompt, or what the answer is and contains."""
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

    def read(self, body: Mapping[str, Any]) -> InferenceRequest:
        """See ``Api``."""
        fields = Fields(body)
        checked_text("model", fields.required("model"))
        messages = fields.required_items("messages")
        tools, strict = read_tools(fields, _read_tool)
        may_call = _read_tool_choice(fields)
        max_tokens = fields.count("max_tokens")
        if max_tokens is None:
            raise RequestError("max_tokens is missing", param="max_tokens")
        system = fields.take("system")
        read: list[Message] = []
        if system is not None:
            read.append({"role": "system", "content": _read_text(fields, "system", system)})
        ignored = fields.given(_NOT_HONOURED) + strict + _read_output_config(fields)
        num_errors = 0
        for index, message in enumerate(messages):
            more, has_error = _read_message(fields.inner(f"messages[{index}]", message))
            read += more
            num_errors += has_error
        stop, is_streamed = read_stops(fields, "stop_sequences"), fields.flag("stream")
        fields.refuse(_REFUSED, why="a session cannot do what it asks for; leave it out")
        fields.given(_WITHOUT_EFFECT)
        fields.ignore_rest()
        return InferenceRequest(
            messages=tuple(read),
            tools=tools if may_call else (),
            max_tokens=max_tokens,
            stop=stop,
            is_streamed=is_streamed,
            ignored=ignored + ("tool_result.is_error",) * bool(num_errors),
            unknown=fields.unknown,
            body=body,
        )

    def whole(self, asked: InferenceRequest, reply: InferenceResult) -> Json:
        """See ``Api``."""
        turn = reply.turns[0]
        return {
            **_frame(reply),
            "content": _blocks(turn),
            **_stop(asked, turn),
            "usage": {"input_tokens": turn.num_prompt_tokens, "output_tokens": turn.num_tokens},
        }

    def events(self, asked: InferenceRequest, reply: InferenceResult) -> Iterator[bytes]:
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


def _read_tool_choice(fields: Fields) -> bool:
    """Whether the model may call tools."""
    value = fields.take("tool_choice")
    if value is None:
        return True
    choice = fields.inner("tool_choice", value)
    may_call = may_call_tools(choice.path("type"), choice.take("type"))
    choice.only("disable_parallel_tool_use", False, why="must be false: a turn may have several calls")
    choice.ignore_rest()
    return may_call


def _read_output_config(fields: Fields) -> tuple[str, ...]:
    value = fields.take("output_config")
    if value is None:
        return ()
    config = fields.inner("output_config", value)
    ignored = config.given(["effort"])
    config.refuse(["format"], why="must be absent: an answer is plain text")
    config.ignore_rest()
    return ignored


def _read_tool(fields: Fields) -> tuple[ToolSpec, bool]:
    """The tool, and whether it asks for arguments that are sure to follow the schema."""
    fields.only("type", "custom", why="must be 'custom': there are no built-in tools")
    made = make_tool(
        fields.where, fields.required("name"), fields.text("description"), fields.required("input_schema")
    )
    fields.given(["cache_control", "eager_input_streaming"])
    is_strict = fields.flag("strict")
    refuse_other_callers(fields)
    fields.refuse(["input_examples"], why="the model is not shown them; put them into the description")
    fields.ignore_rest()
    return made, is_strict


def _read_text(fields: Fields, name: str, value: object) -> str:
    """The text of a content: a string, or a list of blocks of text."""
    if not isinstance(value, list):
        return checked_text(fields.path(name), value)
    blocks = [fields.inner(f"{name}[{index}]", block) for index, block in enumerate(value)]
    return "".join(_read_text_block(block, block.take("type")) for block in blocks)


def _read_text_block(fields: Fields, kind: object) -> str:
    if kind != "text":
        remedy = "must be 'text': this model reads text only"
        raise wrong(fields.path("type"), kind, remedy, code="unsupported_value")
    text = checked_text(fields.path("text"), fields.required("text"))
    fields.given(["cache_control", "citations"])
    fields.ignore_rest()
    return text


def _read_message(fields: Fields) -> tuple[list[Message], bool]:
    """The messages that it becomes, and whether a tool's result is marked as an error."""
    role, content = fields.required("role"), fields.required("content")
    fields.ignore_rest()
    if not isinstance(content, str | list):
        raise wrong(fields.path("content"), content, "must be a string or a list of blocks")
    if role == "system":
        return [{"role": "system", "content": _read_text(fields, "content", content)}], False
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    blocks = [fields.inner(f"content[{index}]", block) for index, block in enumerate(content)]
    match role:
        case "assistant":
            return [_read_turn(blocks)], False
        case "user":
            return _read_user(blocks)
        case _:
            raise wrong(fields.path("role"), role, "must be 'user', 'assistant' or 'system'")


def _read_turn(blocks: list[Fields]) -> Message:
    text, thoughts, calls = "", [], []
    for block in blocks:
        match block.take("type"):
            case "text":
                text += _read_text_block(block, "text")
            case "thinking":
                thoughts.append(checked_text(block.path("thinking"), block.required("thinking")))
                block.take("signature")
                block.ignore_rest()
            case "tool_use":
                calls.append(read_call(block, id_name="id", arguments_name="input"))
                block.given(["cache_control", "caller"])
                block.ignore_rest()
            case kind:
                remedy = "must be 'text', 'thinking' or 'tool_use'"
                raise wrong(block.path("type"), kind, remedy, code="unsupported_value")
    message: Json = {"role": ASSISTANT, "content": text}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _read_user(blocks: list[Fields]) -> tuple[list[Message], bool]:
    messages: list[Message] = []
    has_error = False
    texts: list[str] = []
    for block in blocks:
        kind = block.take("type")
        if kind != "tool_result":
            texts.append(_read_text_block(block, kind))
            continue
        if texts:
            messages.append({"role": "user", "content": "".join(texts)})
            texts = []
        content = block.take("content")
        result = "" if content is None else _read_text(block, "content", content)
        call_id = checked_text(block.path("tool_use_id"), block.required("tool_use_id"))
        has_error |= block.flag("is_error")
        block.given(["cache_control", "toolset_name"])
        block.ignore_rest()
        messages.append({"role": TOOL, "tool_call_id": call_id, "content": result})
    if texts or not messages:
        messages.append({"role": "user", "content": "".join(texts)})
    return messages, has_error


def _frame(reply: InferenceResult) -> Json:
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


def _stop(asked: InferenceRequest, turn: Turn) -> Json:
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
