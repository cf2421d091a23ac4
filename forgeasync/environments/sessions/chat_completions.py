"""The Chat Completions API: ``POST /v1/chat/completions``, as the client openai 3.52 uses it.

Reasoning is in ``reasoning_content``, as with other servers of open models. The API has no field for it.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from forgeasync.environments.environment import Turn
from forgeasync.environments.messages import ASSISTANT, Message
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
    StopText,
    StopTexts,
    ToolName,
    call_message_form,
    chosen_tools,
    joined_text,
    names,
    read_body,
    refusals,
    shown,
    sse,
    stop_texts,
    tool_spec,
    wrong,
)
from forgeasync.rollouts import FinishReason


class _Text(Fields):
    type: Literal["text"]
    text: str

    # The SDK's ``parse`` adds ``parsed`` to what it returns.
    without_effect = names("parsed prompt_cache_breakpoint")


class _Called(Fields):
    name: str
    arguments: Arguments | None = None

    without_effect = names("parsed_arguments")


class _Call(Fields):
    function: _Called
    id: str | None = None
    type: Literal["function"] | None = None

    # Clients that assemble a stream themselves leave ``index`` there.
    without_effect = names("index")


class _Message(Fields, kw_only=True, tag_field="role"):
    name: str | None = None

    refused = refusals(
        "audio function_call reasoning_content refusal tool_call_id tool_calls",
        "a message of this role cannot have it here",
    )


class _System(_Message, tag="system"):
    content: str | list[_Text]


class _Developer(_Message, tag="developer"):
    content: str | list[_Text]


class _User(_Message, tag="user"):
    content: str | list[_Text]


class _Tool(_Message, tag="tool"):
    content: str | list[_Text]
    tool_call_id: str | None = None


class _Assistant(_Message, tag="assistant"):
    content: str | list[_Text] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None

    # The SDK's ``parse`` and ``stream`` add ``parsed`` to what they return.
    without_effect = names("parsed")
    only: ClassVar = {"annotations": ([], "this model writes none")}


class _Function(Fields):
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None

    not_honoured = names("strict")
    only = ONLY_THE_MODEL_CALLS


class _FunctionTool(Fields):
    type: Literal["function"]
    function: _Function

    only = ONLY_THE_MODEL_CALLS


class _NamedFunction(Fields):
    name: str


class _NamedTool(Fields):
    type: Literal["function"]
    function: _NamedFunction


class _Body(OpenAIBody):
    messages: list[_System | _Developer | _User | _Assistant | _Tool]
    tools: list[_FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedTool | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: StopText | StopTexts | None = None

    not_honoured = names(
        "frequency_penalty length_penalty logit_bias min_p presence_penalty reasoning_effort "
        "repetition_penalty seed temperature top_k top_p verbosity"
    )
    without_effect = OpenAIBody.without_effect | {"metadata"}
    only: ClassVar = {
        **OpenAIBody.only,
        "response_format": ({"type": "text"}, "an answer is plain text"),
        "logprobs": (False, "log-probabilities are not given out"),
        "store": (False, "a session stores nothing for later reading"),
        "modalities": (["text"], "this model writes text only"),
    }
    refused = refusals(
        "audio function_call functions moderation prediction web_search_options "
        # Fields of other servers of open models.
        "add_generation_prompt allowed_token_ids bad_words best_of chat_template chat_template_kwargs "
        "continue_final_message documents echo guided_choice guided_grammar guided_json guided_regex "
        "ignore_eos min_tokens prompt_logprobs stop_token_ids structured_outputs use_beam_search"
    )


class ChatCompletions(OpenAIErrors):
    """The ``Dialect`` of Chat Completions."""

    def read(self, body: Mapping[str, Any]) -> InferenceRequest:
        """See ``Dialect``."""
        read, named = read_body(body, _Body)
        functions = [one.function for one in read.tools or ()]
        choice = read.tool_choice
        return InferenceRequest(
            messages=tuple(_message(one) for one in read.messages),
            **chosen_tools(
                (tool_spec(one.name, one.description, one.parameters) for one in functions),
                choice,
                choice.function.name if isinstance(choice, _NamedTool) else None,
            ),
            max_tokens=_max_tokens(read),
            stop=stop_texts(read.stop),
            num_turns=read.n or 1,
            is_streamed=bool(read.stream),
            **named,
        )

    def whole(self, request: InferenceRequest, reply: InferenceResult) -> Json:
        """See ``Dialect``."""
        return {
            **_head(reply, "chat.completion"),
            "choices": [_choice(index, turn) for index, turn in enumerate(reply.turns)],
            "usage": _usage(reply),
        }

    def events(self, request: InferenceRequest, reply: InferenceResult) -> Iterator[bytes]:
        """See ``Dialect``."""
        has_usage = bool((request.body.get("stream_options") or {}).get("include_usage"))
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


def _message(read: _System | _Developer | _User | _Assistant | _Tool) -> Message:
    # ``developer`` is the API's newer name of the system role. Chat templates do not know it.
    role = "system" if isinstance(read, _Developer) else read.__struct_config__.tag
    message: Json = {"role": role, "content": joined_text(read.content), "name": read.name}
    if isinstance(read, _Tool):
        message["tool_call_id"] = read.tool_call_id
    if isinstance(read, _Assistant):
        message["reasoning_content"] = read.reasoning_content
        message["tool_calls"] = [
            call_message_form(call.function.name, call.function.arguments, call_id=call.id)
            for call in read.tool_calls or ()
        ] or None
    return {key: value for key, value in message.items() if value is not None}


def _max_tokens(body: _Body) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise wrong("max_tokens", old, f"differs from max_completion_tokens = {new}; give one of them")
    return old if new is None else new


def _head(reply: InferenceResult, kind: str) -> Json:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created_s, "model": reply.model}


def _choice(index: int, turn: Turn) -> Json:
    seen = shown(turn)
    message = seen.message | {"refusal": None}
    if seen.tool_calls and not seen.text:
        message["content"] = None
    return {"index": index, "message": message, "logprobs": None, "finish_reason": _finish_reason(turn)}


def _deltas(turn: Turn) -> Iterator[Json]:
    seen = shown(turn)
    yield {"role": ASSISTANT, "content": None if seen.tool_calls and not seen.text else ""}
    if seen.reasoning:
        yield {"reasoning_content": seen.reasoning}
    if seen.text:
        yield {"content": seen.text}
    for index, call in enumerate(seen.tool_calls):
        yield {"tool_calls": [{"index": index, **call.message_form}]}


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
