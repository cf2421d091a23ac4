"""Rendering of messages as tokens: the protocol of renderers, and the choice of a run's renderer.

A renderer appends messages to a path of tokens, and reads the turns that a model writes. Sampled tokens are
never re-tokenized. This module has the renderer for models without a chat template; chat_formats.py has those
for models with one.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from forgeasync.config import RendererName
from forgeasync.environments.environment import Turn
from forgeasync.environments.messages import (
    ASSISTANT,
    TOOL,
    Message,
    ToolCall,
    ToolSpec,
    checked_message,
    show,
)
from forgeasync.rollouts import FinishReason, SampledTurn, text_of_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forgeasync.environments.chat_formats import FamilyRenderer, TemplateRenderer


class BridgeRefused(ValueError):
    """Messages cannot be appended to a path. Render the whole conversation instead (``rendered_anew``)."""


class NoCallOpening(ValueError):
    """The model's format does not let a turn be forced to begin with a tool call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages whose tokens are in a trajectory: one path from the root of its tree.

    The last message is the model's, unless there are no messages yet.
    """

    messages: tuple[Message, ...] = ()
    turns: Mapping[int, SampledTurn]
    """The model's turns by message index. Other assistant messages were not sampled, and their tokens were
    given."""
    token_ids: Sequence[int] = ()
    """All token ids of the path, including those of the last turn."""


class MessageRenderer(Protocol):
    """Renders messages as tokens to append to a path, and parses the tokens of a turn; for one tokenizer."""

    @property
    def reserved(self) -> Sequence[str]:
        """Texts that would become control tokens of a conversation; see ``without_reserved``."""
        ...

    def added_ids(
        self, conversation: Conversation, messages: tuple[Message, ...], tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        """Return the token ids, int32, to append to the path of ``conversation`` before the model answers.

        ``messages`` continue the conversation's messages. The tokens of the path do not change. ``tools`` are
        the same for all turns of a path.

        Raises:
            BridgeRefused: The messages can be rendered, but not after this path.
            ValueError: The messages cannot be rendered, for instance because the chat template fails or
                changes earlier text.
        """
        ...

    def answer_ids(
        self, messages: tuple[Message, ...], answer: Message, tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        """Return the token ids, int32, that a model would sample to say ``answer`` after ``messages``.

        They end with the token that ends a turn, if the format has one. Use this for answers that were not
        sampled.

        Raises:
            ValueError: The answer cannot be rendered.
        """
        ...

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of tokens without special tokens, like ``SampledTurn.text``."""
        ...

    def parse(self, before_ids: Sequence[int], turn: SampledTurn, tools: Sequence[ToolSpec] = ()) -> Turn:
        """Parse a turn that was sampled after ``before_ids``; never raises because of model output."""
        ...


def call_opening(renderer: MessageRenderer, tools: Sequence[ToolSpec]) -> np.ndarray:
    """Return the first token ids, int32, of a turn that begins with a call of one of ``tools``.

    They are the common beginning of such calls in the renderer's format: up to the name of the tool, or up to
    its arguments if there is one tool.

    Raises:
        NoCallOpening: The format has no tool calls, or other turns can have the same beginning.
    """

    def answer(name: str | None, **arguments: int) -> list[int]:
        message: dict[str, object] = {"role": ASSISTANT, "content": "x"}
        if name is not None:
            call = ToolCall(id="call_0", name=name, arguments=arguments)
            message |= {"content": "", "tool_calls": [call.message_form]}
        tool = ToolSpec(name=name or "x", description="", parameters={"type": "object", "properties": {}})
        return renderer.answer_ids(question, checked_message("a call", message), (tool,)).tolist()

    question = ({"role": "user", "content": "x"},)
    # With several tools the name stays open: calls with two different names share what precedes the name.
    names = [tools[0].name] if len(tools) == 1 else ["a", "b"]
    try:
        calls = [answer(name, **more) for name in names for more in ({}, {"x": 1})]
        others = [answer(None)] + [answer("x" + name) for name in names if len(tools) == 1]
    except ValueError as error:
        raise NoCallOpening(
            f"the model's format has no tool calls that a turn can begin with: {error}"
        ) from error
    alike = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*calls, strict=False))
    opening = [ids[0] for ids in alike]
    if any(other[: len(opening)] == opening for other in others):
        raise NoCallOpening(
            "a turn cannot be made to call a tool: the model's format writes its name too late"
        )
    return np.asarray(opening, np.int32)


def message_forms(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return mutable copies of checked messages, as plain JSON values."""
    return list(json.loads(json.dumps(messages)))


def tool_forms(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Return the tools in the format of chat endpoints, as plain JSON values."""
    return list(json.loads(json.dumps([tool.message_form for tool in tools])))


WORD_JOINER = "\u2060"
_FROM_OUTSIDE = frozenset({"user", TOOL})


def reserved_texts(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Return the texts of all added tokens, longest first, except white space and single characters."""
    texts = [text for text in tokenizer.get_added_vocab() if len(text) > 1 and not text.isspace()]
    return tuple(sorted(texts, key=lambda text: (-len(text), text)))


def without_reserved(messages: Sequence[Message], reserved: Sequence[str]) -> tuple[tuple[Message, ...], int]:
    """Break up reserved texts in messages of users and tools; return the messages and the number of texts.

    Tokenizers convert ``<|im_end|>`` to the token that ends a turn wherever it occurs, also in the output of
    a tool. There it could end the message and fake a turn of the model. Therefore, in messages of users and
    tools, the text of every added token gets an invisible word joiner (U+2060) after its first character.
    """
    changed, num_found = [], 0
    for message in messages:
        content = message["content"]
        if message["role"] in _FROM_OUTSIDE:
            for text in reserved:
                num_found += content.count(text)
                content = content.replace(text, text[0] + WORD_JOINER + text[1:])
        changed.append({**message, "content": content} if content != message["content"] else message)
    return tuple(changed), num_found


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedAnew:
    """All tokens of a conversation, up to where the model answers."""

    ids_S: np.ndarray
    """int32."""
    num_from_text: int
    """Number of assistant messages that were tokenized from text."""


class _FromText(Exception):
    """Message ``last`` must be tokenized from text and, unless ``only`` is true, so must all before it."""

    def __init__(self, *, last: int, only: bool) -> None:
        self.last = last
        self.only = only


def rendered_anew(
    renderer: MessageRenderer,
    messages: tuple[Message, ...],
    known_turns: Mapping[int, SampledTurn],
    tools: Sequence[ToolSpec] = (),
) -> RenderedAnew:
    """Render a whole conversation that does not continue another one.

    ``known_turns`` are the model's own unchanged turns by message index, whose sampled tokens are used.
    Everything else is tokenized from text, including a turn after which nothing can be appended
    (``BridgeRefused``).

    Raises:
        ValueError: The messages cannot be rendered.
    """
    known = dict(known_turns)
    while True:
        try:
            return _spliced(renderer, messages, known, tools)
        except _FromText as error:
            # Each pass has fewer known turns, so the loop ends.
            known = {
                index: turn
                for index, turn in known.items()
                if index != error.last and (error.only or index > error.last)
            }


def _spliced(
    renderer: MessageRenderer,
    messages: tuple[Message, ...],
    known: Mapping[int, SampledTurn],
    tools: Sequence[ToolSpec],
) -> RenderedAnew:
    answers = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
    first = min(known, default=len(messages))
    # Assistant messages before the model's first turn are part of its prompt.
    ours_or_later = [index for index in answers if index >= first]
    path: list[int] = []
    conversation = Conversation(turns={})
    for index in [*ours_or_later, len(messages)]:
        last = len(conversation.messages) - 1
        try:
            added = renderer.added_ids(conversation, messages[:index], tools)
        except BridgeRefused as error:
            assert last >= 0, "a first prompt is appended to nothing"
            raise _FromText(last=last, only=last in known) from error
        path += added.tolist()
        if index == len(messages):
            break
        turn = known.get(index)
        if turn is None:
            try:
                ids = renderer.answer_ids(messages[:index], messages[index], tools)
            except ValueError as error:
                raise _FromText(last=index, only=False) from error
            # The turn belongs to no tree, so nothing reads its number or version.
            turn = SampledTurn(
                turn=-1,
                ids_T=ids,
                text=messages[index]["content"],
                finish_reason=FinishReason.STOP,
                first_version=-1,
                version=-1,
            )
        path += turn.ids_T.tolist()
        conversation = Conversation(
            messages=messages[: index + 1],
            turns={**conversation.turns, index: turn},
            token_ids=tuple(path),
        )
    return RenderedAnew(ids_S=np.asarray(path, np.int32), num_from_text=len(answers) - len(known))


class PlainRenderer:
    """A ``MessageRenderer`` for models without a chat template. It concatenates the texts of messages.

    Roles are ignored. Each message after the first one starts with a newline, if the tokenizer has one.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._newline = "\n" if _has_newline(tokenizer) else ""

    @property
    def reserved(self) -> Sequence[str]:
        """Empty, because without a chat template there are no control tokens."""
        return ()

    def added_ids(
        self, conversation: Conversation, messages: tuple[Message, ...], tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        """Return the tokens of the messages that follow the conversation, with one line for each message."""
        _refuse(tools)
        ids: list[int] = []
        for index in range(len(conversation.messages), len(messages)):
            text = (self._newline if index else "") + messages[index]["content"]
            ids += self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.asarray(ids, np.int32)

    def answer_ids(
        self, messages: tuple[Message, ...], answer: Message, tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        """Return the tokens of an answer, with the end token if the tokenizer has one."""
        _refuse(tools)
        ids = self._tokenizer(answer["content"], add_special_tokens=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        return np.asarray(ids if end is None else [*ids, end], np.int32)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return text_of_ids(self._tokenizer, ids, skip_special_tokens=True)

    def parse(self, before_ids: Sequence[int], turn: SampledTurn, tools: Sequence[ToolSpec] = ()) -> Turn:
        """Return a turn with the sampled text as it is."""
        return Turn.of_sampled(turn, turn.text)


def _refuse(tools: Sequence[ToolSpec]) -> None:
    if tools:
        raise ValueError(
            f"tools: {tools[0].name!r} was given, but without a chat template nothing tells "
            "the model of it; set data.chat_template: true, or describe it in a message"
        )


def _has_newline(tokenizer: "PreTrainedTokenizerBase") -> bool:
    ids = tokenizer("\n", add_special_tokens=False)["input_ids"]
    return bool(ids) and tokenizer.unk_token_id not in ids and "\n" in tokenizer.decode(ids)


TemplateArguments = Mapping[str, int | float | bool | str]

_NOT_BY_ITSELF = frozenset(
    # deepseek-v4 has no chat template to compare with; gpt-oss downloads a vocabulary when it is built.
    {RendererName.AUTO, RendererName.TEMPLATE, RendererName.DEEPSEEK_V4, RendererName.GPT_OSS}
)
_NO_REASONING = re.compile(r"<think>\s*</think>\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRenderer:
    """The renderer of a run, and why it was chosen."""

    renderer: MessageRenderer
    name: str
    """``plain``, or a value of ``data.renderer``."""
    reason: str


def choose_renderer(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    chat_template: bool,
    name: RendererName = RendererName.AUTO,
    template_arguments: TemplateArguments | None = None,
) -> ChosenRenderer:
    """Choose the renderer for a tokenizer; the arguments are the keys of the section ``data``.

    Raises:
        ValueError: A template is needed and missing, the tokenizer does not fit the named renderer, or the
            renderer has no such argument. The error names the field.
    """
    if not chat_template:
        return ChosenRenderer(
            renderer=PlainRenderer(tokenizer), name="plain", reason="data.chat_template is false"
        )
    # The package ``renderers`` is slow to load.
    from forgeasync.environments.chat_formats import FamilyRenderer, TemplateRenderer

    arguments = template_arguments or {}
    if name is RendererName.AUTO:
        return _by_comparison(tokenizer, arguments)
    reason = f"data.renderer = {name.value}"
    if name is RendererName.TEMPLATE:
        return ChosenRenderer(renderer=TemplateRenderer(tokenizer, arguments), name=name.value, reason=reason)
    try:
        family = FamilyRenderer(tokenizer, name.value, arguments)
    except ValueError as error:
        raise ValueError(f"{reason}: {error}") from error
    return ChosenRenderer(renderer=family, name=name.value, reason=reason)


def _by_comparison(tokenizer: "PreTrainedTokenizerBase", arguments: TemplateArguments) -> ChosenRenderer:
    """Choose the first family that renders a few conversations as the tokenizer's own template does."""
    from forgeasync.environments.chat_formats import FamilyRenderer, TemplateRenderer

    template = TemplateRenderer(tokenizer, arguments)
    nearest = (-1, "")
    for name in RendererName:
        if name in _NOT_BY_ITSELF:
            continue
        for given in _variants(name, arguments):
            try:
                family = FamilyRenderer(tokenizer, name.value, given)
            except ValueError:
                # Most tokenizers lack what most families need.
                continue
            difference = first_difference(tokenizer, family, template)
            if difference is None:
                reason = "it renders as the chat template does"
                return ChosenRenderer(renderer=family, name=name.value, reason=reason)
            nearest = max(nearest, (difference[0], f"; {name.value} {difference[1]}"), key=lambda one: one[0])
    reason = f"no known family has this chat template{nearest[1]}"
    return ChosenRenderer(renderer=template, name=RendererName.TEMPLATE.value, reason=reason)


def _variants(name: RendererName, arguments: TemplateArguments) -> list[TemplateArguments]:
    """Return the arguments, and copies with those whose defaults differ between a family's templates."""
    from renderers import config_from_name

    fields = type(config_from_name(name.value)).template_field_names()
    variants = [arguments]
    if "date_string" in fields and "date_string" not in arguments:
        # transformers 5.19 (utils/chat_template_utils.py, strftime_now) takes the local date.
        variants.append({**arguments, "date_string": datetime.now().strftime("%d %b %Y")})
    if "enable_thinking" in fields and "enable_thinking" not in arguments:
        variants += [{**arguments, "enable_thinking": thinks} for thinks in (False, True)]
    return variants


def num_alike(some: Sequence[Any], others: Sequence[Any]) -> int:
    """Return the length of the longest common beginning of two sequences."""
    pairs = zip(some, others, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def from_difference(text: str, other: str) -> tuple[str, str]:
    """Return the ends of two texts from shortly before their first difference, for an error message."""
    start = max(0, num_alike(text, other) - 10)
    return show(text[start:]), show(other[start:])


def first_difference(
    tokenizer: "PreTrainedTokenizerBase", family: "FamilyRenderer", template: "TemplateRenderer"
) -> tuple[int, str] | None:
    """Compare how a family and a template render the fixed conversations.

    Returns the number of conversations before the first difference, and a description of that difference;
    None if there is none. An empty block of reasoning in earlier turns does not count, because families keep
    the block that the prompt of a turn has.
    """
    from forgeasync.environments.probes import fixed_dialogues

    for number, dialogue in enumerate(fixed_dialogues()):
        try:
            expected = template.rendered_ids(dialogue.messages, dialogue.tools)
        except ValueError:
            # The template cannot express this conversation, so there is nothing to compare.
            continue
        try:
            found = family.rendered_ids(dialogue.messages, dialogue.tools)
        except ValueError as error:
            return number, f"does not render {dialogue.name}, as the template does: {error}"
        if found == expected:
            continue
        ours, theirs = (text_of_ids(tokenizer, ids) for ids in (found, expected))
        has_answers = any(message["role"] == ASSISTANT for message in dialogue.messages)
        if has_answers and _NO_REASONING.sub("", ours) == _NO_REASONING.sub("", theirs):
            continue
        now, then = from_difference(ours, theirs)
        difference = f"renders {now} where the template has {then}"
        return number, f"{difference} ({dialogue.name})"
    return None
