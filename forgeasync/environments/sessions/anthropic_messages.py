"""Anthropic's Messages API: ``POST /v1/messages``, as the client anthropic 2.11 uses it.

A user message with tool results becomes one tool message per result, and one user message for each run of
text before, between or after them.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from forgeasync.environments.environment import Turn
from forgeasync.environments.messages import ASSISTANT, TOOL, Message
from forgeasync.environments.sessions.dialect import (
    ONLY_THE_MODEL_CALLS,
    Arguments,
    Count,
    Fields,
    InferenceRequest,
    InferenceResult,
    Json,
    JsonObject,
    RequestError,
    StopTexts,
    ToolName,
    call_message_form,
    chosen_tools,
    dumps,
    joined_text,
    names,
    read_body,
    refusals,
    shown,
    sse,
    stop_texts,
    tool_spec,
)
from forgeasync.rollouts import FinishReason

SIGNATURE = "unsigned"
"""Placeholder for the API's signature of reasoning. Returned reasoning is compared with the original."""

_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


class _Block(Fields, tag_field="type"):
    without_effect = names("cache_control")


class _Text(_Block, tag="text"):
    text: str

    without_effect = _Block.without_effect | {"citations"}


class _Thinking(_Block, tag="thinking"):
    thinking: str

    without_effect = names("signature")


class _ToolUse(_Block, tag="tool_use"):
    id: str
    name: str
    input: Arguments

    without_effect = _Block.without_effect | {"caller"}
    refused = refusals("namespace toolset_name", "tools have one name here")


class _ToolResult(_Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text] | None = None
    is_error: bool | None = None

    not_honoured = names("is_error")
    without_effect = _Block.without_effect | {"toolset_name"}


class _System(Fields, tag_field="role", tag="system"):
    content: str | list[_Text]


class _User(Fields, tag_field="role", tag="user"):
    content: str | list[_Text | _ToolResult]


class _Assistant(Fields, tag_field="role", tag="assistant"):
    content: str | list[_Text | _Thinking | _ToolUse]


class _Tool(Fields):
    name: ToolName
    input_schema: JsonObject
    description: str | None = None
    type: Literal["custom"] | None = None

    not_honoured = names("strict")
    without_effect = names("cache_control eager_input_streaming")
    only = ONLY_THE_MODEL_CALLS
    refused = refusals("input_examples", "the model is not shown them; put them into the description")


class _ToolChoice(Fields):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None

    only: ClassVar = {"disable_parallel_tool_use": (False, "a turn may have several calls")}


class _OutputConfig(Fields):
    not_honoured = names("effort")
    refused = refusals("format", "must be absent: an answer is plain text")


class _Prompt(Fields, kw_only=True):
    """The body of a ``count_tokens`` request."""

    model: str
    messages: list[_System | _User | _Assistant]
    system: str | list[_Text] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    output_config: _OutputConfig | None = None

    not_honoured = names("temperature thinking top_k top_p")
    without_effect = names(
        "billing_policy cache_control diagnostics fallback_credit_token inference_geo metadata service_tier "
        "speed user_profile_id workspace_id"
    )
    refused = refusals("compaction container context_management fallbacks mcp_servers output_format thread")


class _Body(_Prompt):
    max_tokens: Count
    stop_sequences: StopTexts | None = None
    stream: bool | None = None


class AnthropicMessages:
    """The ``Dialect`` of Anthropic's Messages."""

    def read(self, body: Mapping[str, Any]) -> InferenceRequest:
        """See ``Dialect``."""
        read, named = read_body(body, _Body)
        return InferenceRequest(
            **_prompt(read),
            max_tokens=read.max_tokens,
            stop=stop_texts(read.stop_sequences),
            is_streamed=bool(read.stream),
            **named,
        )

    def read_prompt(self, body: Mapping[str, Any]) -> InferenceRequest:
        """Return the request in a ``count_tokens`` body.

        Raises:
            RequestError: See ``read``.
        """
        read, named = read_body(body, _Prompt)
        return InferenceRequest(**_prompt(read), **named)

    def whole(self, request: InferenceRequest, reply: InferenceResult) -> Json:
        """See ``Dialect``."""
        turn = reply.turns[0]
        return {
            **_frame(reply),
            "content": _blocks(turn),
            **_stop(request, turn),
            "usage": {"input_tokens": turn.num_prompt_tokens, "output_tokens": turn.num_tokens},
        }

    def events(self, request: InferenceRequest, reply: InferenceResult) -> Iterator[bytes]:
        """See ``Dialect``."""
        turn = reply.turns[0]
        usage = {"input_tokens": turn.num_prompt_tokens, "output_tokens": 0}
        yield _event("message_start", message={**_frame(reply), "usage": usage})
        for index, block in enumerate(_blocks(turn)):
            begun, deltas = _parts(block)
            yield _event("content_block_start", index=index, content_block=begun)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event(
            "message_delta",
            delta=_stop(request, turn),
            usage={"output_tokens": turn.num_tokens},
        )
        yield _event("message_stop")

    def error(self, problem: RequestError) -> Json:
        """See ``Dialect``."""
        kind = _ERRORS.get(problem.status, "api_error" if problem.status >= 500 else "invalid_request_error")
        message = str(problem)
        if problem.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"
        return {"type": "error", "error": {"type": kind, "message": message}}

    def error_event(self, problem: RequestError) -> bytes:
        """See ``Dialect``."""
        return sse(self.error(problem), "error")


def _prompt(read: _Prompt) -> dict[str, Any]:
    """Return the ``InferenceRequest`` fields that both kinds of requests have."""
    messages: list[Message] = []
    if read.system is not None:
        messages.append({"role": "system", "content": joined_text(read.system)})
    for message in read.messages:
        messages += _messages(message)
    choice = read.tool_choice or _ToolChoice(type="auto")
    if choice.type == "tool" and choice.name is None:
        raise RequestError("tool_choice.name is missing", param="tool_choice.name", code="missing_field")
    tools = (tool_spec(one.name, one.description, one.input_schema) for one in read.tools or ())
    name = choice.name if choice.type == "tool" else None
    return {"messages": tuple(messages), **chosen_tools(tools, choice.type, name)}


def _messages(read: _System | _User | _Assistant) -> list[Message]:
    """Convert one message of the API to messages of Chat Completions."""
    if isinstance(read, _System):
        return [{"role": "system", "content": joined_text(read.content)}]
    blocks: Sequence[_Block] = [_Text(text=read.content)] if isinstance(read.content, str) else read.content
    if isinstance(read, _Assistant):
        return [_turn(blocks)]
    messages: list[Message] = []
    for is_text, some in itertools.groupby(blocks, key=lambda block: isinstance(block, _Text)):
        if is_text:
            messages.append({"role": "user", "content": _text(list(some))})
            continue
        for one in some:
            assert isinstance(one, _ToolResult), "a user's blocks are texts and results"
            content = joined_text(one.content)
            messages.append({"role": TOOL, "tool_call_id": one.tool_use_id, "content": content})
    return messages or [{"role": "user", "content": ""}]


def _turn(blocks: Sequence[_Block]) -> Message:
    message: Json = {"role": ASSISTANT, "content": _text(blocks)}
    if thoughts := [block.thinking for block in blocks if isinstance(block, _Thinking)]:
        message["reasoning_content"] = "".join(thoughts)
    if uses := [block for block in blocks if isinstance(block, _ToolUse)]:
        message["tool_calls"] = [call_message_form(use.name, use.input, call_id=use.id) for use in uses]
    return message


def _text(blocks: Sequence[_Block]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, _Text))


def _frame(reply: InferenceResult) -> Json:
    """Return the fields of a message that do not depend on the sampled turn."""
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


def _parts(block: Json) -> tuple[Json, list[Json]]:
    """Return a block without its content, and the deltas with its content."""
    match block["type"]:
        case "thinking":
            thinking = {"type": "thinking_delta", "thinking": block["thinking"]}
            signature = {"type": "signature_delta", "signature": block["signature"]}
            return {**block, "thinking": "", "signature": ""}, [thinking, signature]
        case "text":
            text = {"type": "text_delta", "text": block["text"]}
            return {**block, "text": ""}, [text] if block["text"] else []
    json_delta = {"type": "input_json_delta", "partial_json": dumps(block["input"])}
    return {**block, "input": {}}, [json_delta]


def _stop(request: InferenceRequest, turn: Turn) -> Json:
    """Return why a turn ended, and the request's stop text that ended it, if one did."""
    # A text of the run's ``sampling.stop`` is not reported, because the client has not requested it.
    reason, text = "end_turn", None
    if turn.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif shown(turn).tool_calls:
        # Clients run tool calls only for this reason, even if text follows the last call.
        reason = "tool_use"
    elif turn.stop_text in request.stop:
        reason, text = "stop_sequence", turn.stop_text
    return {"stop_reason": reason, "stop_sequence": text}


def _event(kind: str, **data: Any) -> bytes:
    return sse({"type": kind, **data}, kind)
