"""Chat Completions: ``POST /v1/chat/completions`` as openai 3.52 speaks it.

Reasoning stands in ``reasoning_content``, where other servers of open models have it: the API has no field
for it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from forgeasync.environments.environment import Turn
from forgeasync.environments.messages import ASSISTANT, TOOL, Message, ToolSpec
from forgeasync.environments.sessions.fields import (
    Fields,
    Json,
    checked_arguments,
    checked_text,
    joined_text,
    make_tool,
    read_stops,
    read_tools,
    refuse_other_callers,
    wrong,
)
from forgeasync.environments.sessions.inference import (
    InferenceRequest,
    InferenceResult,
    openai_error,
    pieces,
    sse,
)
from forgeasync.environments.sessions.openai_fields import (
    check_common_fields,
    read_stream_options,
    read_tool_choice,
)
from forgeasync.environments.sessions.problems import RequestError
from forgeasync.environments.sessions.shown_turns import shown
from forgeasync.rollouts import FinishReason

MAX_TURNS = 128
"""Most turns of one request, ``n``; the API has the same bound."""

_NOT_HONOURED = (
    "frequency_penalty",
    "length_penalty",
    "logit_bias",
    "min_p",
    "presence_penalty",
    "reasoning_effort",
    "repetition_penalty",
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "verbosity",
)
_REFUSED = (
    "audio",
    "function_call",
    "functions",
    "moderation",
    "prediction",
    "web_search_options",
    # Of other servers of open models.
    "add_generation_prompt",
    "allowed_token_ids",
    "bad_words",
    "best_of",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "echo",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "stop_token_ids",
    "structured_outputs",
    "use_beam_search",
)
"""What would change the prompt, or what the answer is and contains."""
_OF_MESSAGES = (
    "audio",
    "function_call",
    "reasoning_content",
    "refusal",
    "tool_call_id",
    "tool_calls",
)
"""What the model would be shown of a message of the right role."""


class ChatCompletions:
    """The ``Api`` of Chat Completions."""

    def read(self, body: Mapping[str, Any]) -> InferenceRequest:
        """See ``Api``."""
        fields = Fields(body)
        checked_text("model", fields.required("model"))
        messages = fields.required_items("messages")
        tools, strict = read_tools(fields, _read_tool)
        may_call = read_tool_choice(fields)
        read = tuple(_read_message(fields.inner(f"messages[{i}]", one)) for i, one in enumerate(messages))
        max_tokens, stop = _read_max_tokens(fields), read_stops(fields, "stop")
        num_turns, is_streamed = fields.count("n", most=MAX_TURNS) or 1, fields.flag("stream")
        ignored = fields.given(_NOT_HONOURED) + strict
        read_stream_options(fields, "include_usage", "include_obfuscation")
        check_common_fields(fields)
        fields.only("response_format", {"type": "text"}, why="must be {'type': 'text'}")
        fields.only("logprobs", False, why="must be false: log-probabilities are not given out")
        fields.only("store", False, why="must be false: a session stores nothing for later reading")
        fields.only("modalities", ["text"], why="must be ['text']")
        fields.refuse(_REFUSED, why="a session cannot do what it asks for; leave it out")
        fields.given(["metadata"])
        fields.ignore_rest()
        return InferenceRequest(
            messages=read,
            tools=tools if may_call else (),
            max_tokens=max_tokens,
            stop=stop,
            num_turns=num_turns,
            is_streamed=is_streamed,
            ignored=ignored,
            unknown=fields.unknown,
            body=body,
        )

    def whole(self, asked: InferenceRequest, reply: InferenceResult) -> Json:
        """See ``Api``."""
        return {
            **_head(reply, "chat.completion"),
            "choices": [_choice(index, turn) for index, turn in enumerate(reply.turns)],
            "usage": _usage(reply),
        }

    def events(self, asked: InferenceRequest, reply: InferenceResult) -> Iterator[bytes]:
        """See ``Api``."""
        has_usage = bool((asked.body.get("stream_options") or {}).get("include_usage"))
        head = {**_head(reply, "chat.completion.chunk"), **({"usage": None} if has_usage else {})}
        for index, turn in enumerate(reply.turns):
            for delta in _deltas(turn):
                choice = {"index": index, "delta": delta, "finish_reason": None}
                yield sse({**head, "choices": [choice]})
            last = {"index": index, "delta": {}, "finish_reason": _finish_reason(turn)}
            yield sse({**head, "choices": [last]})
        if has_usage:
            yield sse({**head, "choices": [], "usage": _usage(reply)})
        yield b"data: [DONE]\n\n"

    def error(self, problem: RequestError) -> Json:
        """See ``Api``."""
        return openai_error(problem)

    def error_event(self, problem: RequestError) -> bytes:
        """See ``Api``."""
        return sse(openai_error(problem))


def _read_max_tokens(fields: Fields) -> int | None:
    old, new = fields.count("max_tokens"), fields.count("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise wrong("max_tokens", old, f"differs from max_completion_tokens = {new}; give one of them")
    return old if new is None else new


def _read_tool(fields: Fields) -> tuple[ToolSpec, bool]:
    """The tool, and whether it asks for arguments that are sure to follow the schema."""
    kind = fields.take("type")
    if kind != "function":
        raise wrong(fields.path("type"), kind, "must be 'function'", code="unsupported_value")
    function = fields.inner("function", fields.required("function"))
    made = make_tool(
        function.where, function.required("name"), function.text("description"), function.take("parameters")
    )
    is_strict = function.flag("strict")
    for one in (function, fields):
        refuse_other_callers(one)
        one.ignore_rest()
    return made, is_strict


def _read_message(fields: Fields) -> Message:
    role = fields.required("role")
    content = fields.take("content")
    message: Json = {"role": role}
    match role:
        case "assistant":
            message["content"] = "" if content is None else joined_text(fields, "content", content, ["text"])
            if (reasoning := fields.text("reasoning_content")) is not None:
                message["reasoning_content"] = reasoning
            calls = fields.items("tool_calls")
            if calls:
                message["tool_calls"] = [
                    _read_call(fields.inner(f"tool_calls[{index}]", call)) for index, call in enumerate(calls)
                ]
            fields.only("annotations", [], why="must be empty")
            fields.take("parsed")  # The SDK's ``parse`` and ``stream`` add it to what they return.
        case "user" | "system" | "developer" | "tool":
            if content is None:
                raise RequestError(f"{fields.path('content')} is missing", param=fields.path("content"))
            # The model's template knows no developer; the API calls the newer name of the same thing so.
            message["role"] = "system" if role == "developer" else role
            message["content"] = joined_text(fields, "content", content, ["text"])
            if role == TOOL and (call_id := fields.text("tool_call_id")) is not None:
                message["tool_call_id"] = call_id
        case _:
            remedy = "must be 'system', 'developer', 'user', 'assistant' or 'tool'"
            raise wrong(fields.path("role"), role, remedy)
    if (name := fields.text("name")) is not None:
        message["name"] = name
    fields.refuse(_OF_MESSAGES, why=f"a message of role {role!r} cannot have it here")
    fields.ignore_rest()
    return message


def _read_call(fields: Fields) -> Json:
    call: Json = {"type": fields.take("type") or "function"}
    if call["type"] != "function":
        raise wrong(fields.path("type"), call["type"], "must be 'function'")
    if (call_id := fields.text("id")) is not None:
        call["id"] = call_id
    fields.take("index")  # Loops that put a stream together by hand leave it there.
    function = fields.inner("function", fields.required("function"))
    call["function"] = {
        "name": checked_text(function.path("name"), function.required("name")),
        "arguments": checked_arguments(function.path("arguments"), function.take("arguments") or "{}"),
    }
    function.take("parsed_arguments")
    function.ignore_rest()
    fields.ignore_rest()
    return call


def _head(reply: InferenceResult, kind: str) -> Json:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created_s, "model": reply.model}


def _choice(index: int, turn: Turn) -> Json:
    seen = shown(turn)
    message: Json = {
        "role": ASSISTANT,
        "content": None if seen.tool_calls and not seen.text else seen.text,
        "refusal": None,
    }
    if seen.reasoning is not None:
        message["reasoning_content"] = seen.reasoning
    if seen.tool_calls:
        message["tool_calls"] = [call.message_form for call in seen.tool_calls]
    return {"index": index, "message": message, "logprobs": None, "finish_reason": _finish_reason(turn)}


def _deltas(turn: Turn) -> Iterator[Json]:
    seen = shown(turn)
    yield {"role": ASSISTANT, "content": None if seen.tool_calls and not seen.text else ""}
    for piece in pieces(seen.reasoning or ""):
        yield {"reasoning_content": piece}
    for piece in pieces(seen.text):
        yield {"content": piece}
    for index, call in enumerate(seen.tool_calls):
        form = call.message_form
        function = {"name": call.name, "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]}
        for piece in pieces(form["function"]["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _finish_reason(turn: Turn) -> str:
    if turn.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if shown(turn).tool_calls else "stop"


def _usage(reply: InferenceResult) -> Json:
    # All turns of a request answer the same prompt, which counts once.
    num_before = reply.turns[0].num_prompt_tokens
    num_sampled = sum(turn.num_tokens for turn in reply.turns)
    return {
        "prompt_tokens": num_before,
        "completion_tokens": num_sampled,
        "total_tokens": num_before + num_sampled,
    }
