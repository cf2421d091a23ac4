"""Conversations for checks and comparisons of renderers, and the paths of tokens through them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from forgeasync.environments.messages import ASSISTANT, Message, ToolSpec, checked_message
from forgeasync.environments.rendering import Conversation, MessageRenderer
from forgeasync.rollouts import FinishReason, SampledTurn, text_of_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOLS = (
    ToolSpec(
        name="set_value",
        description="Keep a value under a name.",
        parameters={
            "type": "object",
            "properties": {
                "name": {"type": "string", "description": "the name"},
                "count": {"type": "integer"},
                "ratio": {"type": "number"},
                "final": {"type": "boolean"},
                "items": {"type": "array", "items": {"type": "integer"}},
                "options": {"type": "object"},
            },
            "required": ["name"],
        },
    ),
    ToolSpec(name="ping", description="Takes nothing.", parameters={"type": "object", "properties": {}}),
)
"""Tools of the conversations that probe a chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A conversation that ends where the model answers."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFeatures:
    """What a format can express in conversations."""

    system: bool
    reasoning: bool
    must_reason: bool
    """Whether the prompt of a turn opens reasoning."""
    tools: tuple[ToolSpec, ...]
    """The tools for the model; empty if the format cannot describe tools."""
    calls: bool
    parallel_calls: bool
    text_beside_calls: bool


def user(content: str) -> Message:
    """Return a message of the user."""
    return {"role": "user", "content": content}


def assistant(content: str, *calls: Message, reasoning: str | None = None) -> Message:
    """Return a message of the model, with tool calls and reasoning if given."""
    message = {"content": content, "reasoning_content": reasoning, "tool_calls": calls}
    return checked_message("a probe", {"role": ASSISTANT, **message})


def call(identity: str, tool: str, /, **arguments: object) -> Message:
    """Return a tool call as it stands in a message."""
    return {"id": identity, "type": "function", "function": {"name": tool, "arguments": arguments}}


def result(identity: str, content: str) -> Message:
    """Return a message with the result of the tool call ``identity``."""
    return {"role": "tool", "tool_call_id": identity, "content": content}


def fixed_dialogues() -> tuple[Dialogue, ...]:
    """Return the conversations that distinguish formats."""
    system: Message = {"role": "system", "content": "Be brief."}
    one = call("functions.set_value:0", "set_value", name="größe 5 €", count=3)
    two = call("functions.ping:1", "ping")
    every = call(
        "functions.set_value:0",
        "set_value",
        name='a "b"\n<c>',
        count=-7,
        ratio=0.5,
        final=True,
        items=[1, 2],
        options={"x": {"y": [True, None, "z"]}},
    )
    done, pong = result("functions.set_value:0", "done"), result("functions.ping:1", "pong")
    plain: dict[str, tuple[Message, ...]] = {
        "a prompt": (user("2 + 2 ="),),
        "a system message": (system, user("2 + 2 =")),
        "an earlier answer": (
            user("1"),
            assistant("one"),
            user("2"),
            assistant("two\n\nlines"),
            user("3"),
        ),
        "earlier reasoning": (user("1"), assistant("one", reasoning="hm"), user("2")),
    }
    with_tools: dict[str, tuple[Message, ...]] = {
        "a prompt with tools": (user("2 + 2 ="),),
        "a system message with tools": (system, user("x")),
        "a tool call": (user("1"), assistant("", one), done),
        "a tool call after reasoning and text": (
            user("1"),
            assistant("I set it.", one, reasoning="set it"),
            done,
        ),
        "a tool call with arguments of every type": (user("1"), assistant("", every), done, user("2")),
        "two tool calls": (user("1"), assistant("", one, two), done, pong),
    }
    return (
        *(Dialogue(name=name, messages=messages) for name, messages in plain.items()),
        *(Dialogue(name=name, messages=messages, tools=TOOLS) for name, messages in with_tools.items()),
    )


TEXTS = (
    "ok",
    "12 + 30 = 42",
    "The answer is 7.",
    "a\nb\n\nc",
    "def f(x):\n    return x  # ok",
    "größer als 5 €",
    "日本語 and 한국어",
    "👩‍🚀🚀 ñ é",
    '{"a": [1, 2]}',
    "x < y > z & 'q' \"p\"",
    "tab\tand  two  blanks",
    "true",
    "3.50",
)
"""Texts of the messages that probe a chat template."""


def random_dialogue(rng: random.Random, features: TemplateFeatures, texts: Sequence[str]) -> Dialogue:
    """Return a random conversation within ``features``, of one to four turns of the model."""
    has_calls = features.calls and rng.random() < 0.7
    messages: list[Message] = []
    if features.system and rng.random() < 0.5:
        messages.append({"role": "system", "content": rng.choice(texts)})
    messages.append(user(rng.choice(texts)))
    num_calls = 0
    for _ in range(rng.randint(1, 4)):
        thinks = features.must_reason or (features.reasoning and rng.random() < 0.6)
        reasoning = rng.choice(texts) if thinks else None
        if not has_calls or rng.random() < 0.4:
            messages += [assistant(rng.choice(texts), reasoning=reasoning), user(rng.choice(texts))]
            continue
        calls = []
        for _ in range(rng.randint(1, 3 if features.parallel_calls else 1)):
            calls.append(_random_call(rng, num_calls, texts))
            num_calls += 1
        content = rng.choice(texts) if features.text_beside_calls and rng.random() < 0.5 else ""
        messages.append(assistant(content, *calls, reasoning=reasoning))
        messages += [result(one["id"], rng.choice(texts)) for one in calls]
        if rng.random() < 0.3:
            messages.append(user(rng.choice(texts)))
    tools = features.tools if has_calls else ()
    return Dialogue(name="a random conversation", messages=tuple(messages), tools=tools)


def _random_call(rng: random.Random, index: int, texts: Sequence[str]) -> Message:
    if rng.random() < 0.25:
        return call(f"functions.ping:{index}", "ping")
    values: dict[str, Any] = {
        "name": rng.choice(texts),
        "count": rng.randint(-(10**12), 10**12),
        "ratio": rng.choice([0.5, -1.25, 1e-7, 3.0]),
        "final": rng.random() < 0.5,
        "items": [rng.randint(0, 9) for _ in range(rng.randint(0, 3))],
        "options": rng.choice([{}, {"a": True, "b": None}, {"c": {"d": [1, "e", {}]}}]),
    }
    names = ["name", *rng.sample(sorted(set(values) - {"name"}), rng.randint(0, 3))]
    return call(f"functions.set_value:{index}", "set_value", **{name: values[name] for name in names})


Retokenized = Callable[[np.ndarray], np.ndarray]
"""Returns other token ids for the same text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One turn of the model, and the tokens given before it."""

    index: int
    """Index of the turn's message."""
    given_ids: np.ndarray
    turn: SampledTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationPath:
    """A path of tokens through a conversation, up to where the model answers its last message."""

    steps: tuple[Step, ...]
    last_given_ids: np.ndarray
    conversation: Conversation
    """The conversation up to the last turn."""

    @property
    def ids(self) -> list[int]:
        return [*self.conversation.token_ids, *self.last_given_ids.tolist()]


def walk(
    renderer: MessageRenderer,
    tokenizer: "PreTrainedTokenizerBase",
    dialogue: Dialogue,
    retokenized: Retokenized = lambda ids: ids,
) -> ConversationPath:
    """Build the path of ``dialogue``: each assistant's message is a sampled turn in the renderer's format.

    Raises:
        ValueError: The renderer refuses a message.
    """
    steps: list[Step] = []
    conversation = Conversation(turns={})
    messages = dialogue.messages
    for index, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        given = renderer.added_ids(conversation, messages[:index], dialogue.tools)
        ids = retokenized(renderer.answer_ids(messages[:index], message, dialogue.tools))
        turn = sampled(tokenizer, ids, number=len(steps))
        steps.append(Step(index=index, given_ids=given, turn=turn))
        conversation = Conversation(
            messages=messages[: index + 1],
            turns={**conversation.turns, index: turn},
            token_ids=[*conversation.token_ids, *given.tolist(), *ids.tolist()],
        )
    last = renderer.added_ids(conversation, messages, dialogue.tools)
    return ConversationPath(steps=tuple(steps), last_given_ids=last, conversation=conversation)


def sampled(
    tokenizer: "PreTrainedTokenizerBase",
    ids: np.ndarray,
    *,
    number: int,
    finish_reason: FinishReason = FinishReason.STOP,
) -> SampledTurn:
    """Return a turn as a generator reports it."""
    text = text_of_ids(tokenizer, ids.tolist(), skip_special_tokens=True)
    return SampledTurn(
        turn=number, ids_T=ids, text=text, finish_reason=finish_reason, first_version=0, version=0
    )


def other_tokens(tokenizer: "PreTrainedTokenizerBase", rng: random.Random) -> Retokenized:
    """Return a function that returns other tokens for the same text, as a model can sample them."""
    whole = frozenset(tokenizer.get_added_vocab().values()) | frozenset(tokenizer.all_special_ids)

    def retokenized(ids: np.ndarray) -> np.ndarray:
        made: list[int] = []
        run: list[int] = []
        for token in [*ids.tolist(), None]:
            if token is None or token in whole:
                made += _split(tokenizer, run, rng)
                made += [] if token is None else [token]
                run = []
            else:
                run.append(token)
        return np.asarray(made, np.int32)

    return retokenized


def _split(tokenizer: "PreTrainedTokenizerBase", ids: list[int], rng: random.Random) -> list[int]:
    """Tokenize the text of ``ids`` in random pieces; return ``ids`` if that changes the text."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    pieces: list[int] = []
    start = 0
    while start < len(text):
        end = start + rng.randint(1, 6)
        pieces += tokenizer(text[start:end], add_special_tokens=False)["input_ids"]
        start = end
    same = tokenizer.decode(pieces, skip_special_tokens=False) == text
    return pieces if same else ids


def rendered_at_once(
    renderer: MessageRenderer, messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> list[int]:
    """Return the tokens of all messages, rendered at once."""
    return renderer.added_ids(Conversation(turns={}), tuple(messages), tools).tolist()
