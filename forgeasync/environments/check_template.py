"""Checks that a model's renderer turns conversations into tokens consistently.

    python -m forgeasync.environments.check_template --model PATH [--renderer NAME]

Renders fixed and random conversations with the renderer of the model, and prints a table of the checks. If a
check fails, it also prints the first contradiction and exits with status 1. A run with an environment refuses
such a model.
"""

import argparse
import bisect
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from forgeasync.config import DataSection, RendererName
from forgeasync.environments.messages import ASSISTANT, Message, ToolSpec, checked_message
from forgeasync.environments.probes import (
    TEXTS,
    TOOLS,
    ConversationPath,
    Dialogue,
    TemplateFeatures,
    assistant,
    call,
    fixed_dialogues,
    other_tokens,
    random_dialogue,
    rendered_at_once,
    result,
    sampled,
    user,
    walk,
)
from forgeasync.environments.rendering import (
    BridgeRefused,
    ChosenRenderer,
    Conversation,
    MessageRenderer,
    PlainRenderer,
    choose_renderer,
    num_alike,
)
from forgeasync.models import load_tokenizer
from forgeasync.observability import exit_with
from forgeasync.rollouts import FinishReason, text_of_ids
from forgeasync.schema import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_OPENING = 8
"""Maximum number of tokens at the end of a prompt that open reasoning."""

_MARKS = r"(?:\s|</?think>)*"
"""Pattern of reasoning marks and white space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference of two sequences of tokens."""

    index: int
    """Message index of the turn in which, or after which, the sequences differ."""
    path_ids: Sequence[int]
    anew_ids: Sequence[int]


def compare(
    tokenizer: "PreTrainedTokenizerBase",
    walked: ConversationPath,
    messages: Sequence[Message],
    anew_ids: Sequence[int],
) -> Difference | None:
    """Compare a path with ``anew_ids``, the tokens of the whole conversation rendered at once.

    They may differ in two ways only:

    - Inside a turn of the model, whose sampled tokens can differ from the tokenization of its text.
    - At the beginning of a turn, because formats leave out the reasoning of earlier turns or write an empty
      block. There the path has reasoning marks, the message's reasoning and white space, and ``anew_ids`` has
      only marks and white space.

    Returns the first difference that is not allowed, or None.
    """
    position = 0
    for step in walked.steps:
        given, turn = step.given_ids.tolist(), step.turn.ids_T.tolist()
        num_tokens = _find_turn(tokenizer, given, turn, messages[step.index], list(anew_ids[position:]))
        if num_tokens is None:
            return Difference(index=step.index, path_ids=[*given, *turn], anew_ids=anew_ids[position:])
        position += num_tokens
    last = walked.last_given_ids.tolist()
    if list(anew_ids[position:]) != last:
        index = walked.steps[-1].index if walked.steps else 0
        return Difference(index=index, path_ids=last, anew_ids=anew_ids[position:])
    return None


def _find_turn(
    tokenizer: "PreTrainedTokenizerBase", given: list[int], turn: list[int], message: Message, anew: list[int]
) -> int | None:
    """Return the number of tokens at the start of ``anew`` that given tokens and a turn match, or None."""
    both = [*given, *turn]
    if anew[: len(both)] == both:
        return len(both)
    num_given = num_alike(given, anew)
    if num_given < len(given) - _MAX_OPENING:
        return None
    path = text_of_ids(tokenizer, both[num_given:])
    rest = anew[num_given:]
    text = text_of_ids(tokenizer, rest)
    num_characters = len(path)
    if not text.startswith(path):
        reasoning = re.escape(message.get("reasoning_content", "").strip())
        marks = re.match(rf"{_MARKS}(?:{reasoning})?{_MARKS}", path)
        assert marks is not None, "it may be empty"
        found = re.match(_MARKS + re.escape(path[marks.end() :]), text)
        if found is None or "think>" not in marks[0] + found[0]:
            return None
        num_characters = found.end()
    ends = range(len(rest) + 1)
    num_tokens = bisect.bisect_left(ends, num_characters, key=lambda n: len(text_of_ids(tokenizer, rest[:n])))
    is_whole = text_of_ids(tokenizer, rest[:num_tokens]) == text[:num_characters]
    return num_given + num_tokens if is_whole else None


NUM_RANDOM = 12
"""Number of random conversations in the check before a run."""
_MAX_CLOSING = 8
"""Maximum number of tokens that close a turn that was cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """Result of one check over all conversations."""

    name: str
    num_cases: int
    contradiction: str | None = None
    """The first contradiction, with messages, tokens and texts; None if the check passed."""


class _Contradiction(Exception):
    pass


def check_renderer(
    tokenizer: "PreTrainedTokenizerBase",
    renderer: MessageRenderer,
    *,
    num_random: int = NUM_RANDOM,
    seed: int = 0,
) -> tuple[CheckRow, ...]:
    """Check ``renderer`` with the fixed and with ``num_random`` random conversations."""
    checker = _Checker(tokenizer, renderer, seed=seed)
    try:
        features = checker.find_features()
    except (ValueError, _Contradiction) as error:
        return (CheckRow(name="a prompt is rendered", num_cases=1, contradiction=str(error)),)
    dialogues = list(checker.dialogues(features, num_random))
    checks: tuple[tuple[str, Callable[[Dialogue], None]], ...] = (
        ("messages are only appended", checker.check_appended),
        ("appending equals rendering from the start", checker.check_anew),
        ("turns survive being written and read", checker.check_read),
        ("a turn that was cut is continued", checker.check_cut),
        ("every text of a model is parsed", checker.check_hostile),
    )
    rows = []
    for name, check in checks:
        contradiction = None
        num_cases = 0
        for dialogue in dialogues:
            num_cases += 1
            try:
                check(dialogue)
            except _Contradiction as error:
                contradiction = f"{dialogue.name}: {error}"
                break
            except ValueError as error:
                contradiction = f"{dialogue.name}: {error}; messages {list(dialogue.messages)!r}"
                break
        rows.append(CheckRow(name=name, num_cases=num_cases, contradiction=contradiction))
    return tuple(rows)


class _Checker:
    def __init__(self, tokenizer: "PreTrainedTokenizerBase", renderer: MessageRenderer, *, seed: int) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._seed = seed
        self._other_tokens = other_tokens(tokenizer, random.Random(seed))
        self._rng = random.Random(seed)
        self._texts = tuple(filter(self._keeps, TEXTS)) or self._texts_of_vocabulary()

    def _keeps(self, text: str) -> bool:
        """Whether tokenizing keeps a text. Small vocabularies lack most characters."""
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._decoded(ids) == text

    def _texts_of_vocabulary(self) -> tuple[str, ...]:
        decoded = (self._decoded([token]) for token in range(len(self._tokenizer)))
        marks = {*self._tokenizer.get_added_vocab(), *self._tokenizer.all_special_tokens}
        words = [text for text in decoded if text.strip() == text != "" and text not in marks]
        return tuple(
            filter(self._keeps, ["".join(words[start : start + 3]) for start in range(0, len(words), 3)])
        )

    def find_features(self) -> TemplateFeatures:
        """Return what the format can express.

        Raises:
            ValueError: It cannot render even a plain prompt.
        """
        prompt = (user("2 + 2 ="),)
        rendered_at_once(self._renderer, prompt, ())
        if not self._texts:
            raise _Contradiction("the tokenizer changes every text that was tried")
        thought = "zq"
        ping = call("functions.ping:0", "ping")
        both = (ping, call("functions.set_value:1", "set_value", name=thought))
        tools = TOOLS if self._says(prompt, assistant("", ping), "ping", TOOLS) else ()
        # Some formats have tool calls, but cannot describe tools to the model. If a format describes tools,
        # its calls must be readable; otherwise they may be.
        calls = bool(tools) or self._reads_call(prompt, assistant("", ping))
        return TemplateFeatures(
            system=self._renders(({"role": "system", "content": "ok"}, *prompt)),
            reasoning=self._says(prompt, assistant("ok", reasoning=thought), thought),
            must_reason=self._decoded(rendered_at_once(self._renderer, prompt, ()))
            .rstrip()
            .endswith("<think>"),
            tools=tools,
            calls=calls,
            parallel_calls=calls and self._says(prompt, assistant("", *both), thought, tools),
            text_beside_calls=calls and self._says(prompt, assistant(thought, ping), thought, tools),
        )

    def dialogues(self, features: TemplateFeatures, num_random: int) -> Iterator[Dialogue]:
        """Yield the conversations that the format can express."""
        one, two = self._texts[0], self._texts[-1]
        yield Dialogue(name="one turn", messages=(user(one), assistant(two), user(one)))
        for dialogue in fixed_dialogues():
            has_turn = any(message["role"] == ASSISTANT for message in dialogue.messages)
            if has_turn and _fits(dialogue, features) and all(map(self._keeps, _texts_of(dialogue))):
                yield replace(dialogue, tools=features.tools if dialogue.tools else ())
        for _ in range(num_random):
            yield random_dialogue(self._rng, features, self._texts)

    def check_appended(self, dialogue: Dialogue) -> None:
        """Check that the tokens after a turn do not depend on how the turn was tokenized."""
        usual = walk(self._renderer, self._tokenizer, dialogue)
        other = walk(self._renderer, self._tokenizer, dialogue, self._other_tokens)
        given = [*(step.given_ids for step in usual.steps), usual.last_given_ids]
        given_then = [*(step.given_ids for step in other.steps), other.last_given_ids]
        for number, (ours, theirs) in enumerate(zip(given, given_then, strict=True)):
            if ours.tolist() != theirs.tolist():
                raise self._contradiction(
                    f"what is appended after {number} turns depends on how the last one was tokenized",
                    dialogue,
                    ours.tolist(),
                    theirs.tolist(),
                )

    def check_anew(self, dialogue: Dialogue) -> None:
        """Check by ``compare`` that the path equals the whole conversation rendered at once."""
        if isinstance(self._renderer, PlainRenderer):
            # Without a template roles are ignored, and a turn rendered from text starts with a newline.
            return
        walked = walk(self._renderer, self._tokenizer, dialogue)
        anew = rendered_at_once(self._renderer, dialogue.messages, dialogue.tools)
        found = compare(self._tokenizer, walked, dialogue.messages, anew)
        if found is not None:
            raise self._contradiction(
                f"from messages[{found.index}] on, rendering from the start gives other tokens",
                dialogue,
                found.path_ids,
                found.anew_ids,
            )

    def check_read(self, dialogue: Dialogue) -> None:
        """Check that text, reasoning and tool calls are parsed as written, with any tokenization."""
        usual = walk(self._renderer, self._tokenizer, dialogue)
        other = walk(self._renderer, self._tokenizer, dialogue, self._other_tokens)
        for walked in (usual, other):
            before: list[int] = []
            for step in walked.steps:
                before += step.given_ids.tolist()
                parsed = self._renderer.parse(before, step.turn, dialogue.tools)
                said, read = dialogue.messages[step.index], checked_message("a turn", parsed.message)
                problem = None
                if parsed.broken_tool_calls:
                    broken = parsed.broken_tool_calls[0].problem
                    problem = f"the tool call in messages[{step.index}] is not read: {broken}"
                elif _content(said) != _content(read):
                    problem = f"messages[{step.index}] is read as {read!r}"
                if problem is not None:
                    raise self._contradiction(problem, dialogue, step.turn.ids_T.tolist(), [])
                before += step.turn.ids_T.tolist()

    def check_cut(self, dialogue: Dialogue) -> None:
        """Check that a cut turn is closed, and that the same tokens follow as after the whole turn."""
        first = walk(self._renderer, self._tokenizer, _first_turn(dialogue))
        step = first.steps[0]
        follows = user("go on")
        end = step.turn.last_id
        # The first turn and the message after it, as the format renders them.
        written = rendered_at_once(
            self._renderer, (*dialogue.messages[: step.index + 1], follows), dialogue.tools
        )
        has_end = end in written[len(step.given_ids) :]
        messages = (*first.conversation.messages, follows)
        whole = self._renderer.added_ids(first.conversation, messages, dialogue.tools).tolist()
        for _ in range(3):
            num_kept = self._rng.randint(1, step.turn.num_tokens)
            ids = step.turn.ids_T[:num_kept]
            is_whole = num_kept == step.turn.num_tokens
            turn = sampled(
                self._tokenizer,
                ids,
                number=0,
                finish_reason=FinishReason.STOP if is_whole else FinishReason.LENGTH,
            )
            before = step.given_ids.tolist()
            read = self._renderer.parse(before, turn, dialogue.tools).message
            messages = (*dialogue.messages[: step.index], checked_message("a turn", read))
            conversation = Conversation(
                messages=messages, turns={step.index: turn}, token_ids=[*before, *ids.tolist()]
            )
            added = self._renderer.added_ids(conversation, (*messages, follows), dialogue.tools).tolist()
            num_closing = len(added) - len(whole)
            closing = added[: max(num_closing, 0)]
            is_closed = is_whole or not has_end or end in closing
            if added[len(closing) :] != whole or not 0 <= num_closing <= _MAX_CLOSING or not is_closed:
                raise self._contradiction(
                    f"after messages[{step.index}], cut to {num_kept} tokens, other tokens follow than after "
                    "the whole turn",
                    dialogue,
                    added,
                    whole,
                )

    def check_hostile(self, dialogue: Dialogue) -> None:
        """Check that parsing any tokens raises nothing, and appending raises at most ``BridgeRefused``."""
        first = walk(self._renderer, self._tokenizer, _first_turn(dialogue))
        step = first.steps[0]
        before = step.given_ids.tolist()
        marks = [*self._tokenizer.get_added_vocab().values(), *self._tokenizer.all_special_ids]
        ids = step.turn.ids_T.tolist()
        for _ in range(self._rng.randint(1, 4)):
            ids.insert(self._rng.randint(0, len(ids)), self._rng.choice(marks or ids))
        turn = sampled(self._tokenizer, np.asarray(ids, np.int32), number=0)
        read = self._renderer.parse(before, turn, dialogue.tools).message
        messages = (*dialogue.messages[: step.index], checked_message("a turn", read))
        conversation = Conversation(messages=messages, turns={step.index: turn}, token_ids=[*before, *ids])
        with suppress(BridgeRefused):
            self._renderer.added_ids(conversation, (*messages, user("go on")), dialogue.tools)

    def _decoded(self, ids: Sequence[int]) -> str:
        return text_of_ids(self._tokenizer, ids)

    def _renders(self, messages: tuple[Message, ...]) -> bool:
        try:
            rendered_at_once(self._renderer, messages, ())
        except ValueError:
            return False
        return True

    def _reads_call(self, messages: tuple[Message, ...], answer: Message) -> bool:
        """Whether a tool call can be parsed if the prompt describes no tools."""
        try:
            ids = self._renderer.answer_ids(messages, answer)
        except ValueError:
            return False
        before = rendered_at_once(self._renderer, messages, ())
        parsed = self._renderer.parse(before, sampled(self._tokenizer, ids, number=0))
        return len(parsed.tool_calls) == 1

    def _says(
        self, messages: tuple[Message, ...], answer: Message, word: str, tools: Sequence[ToolSpec] = ()
    ) -> bool:
        """Whether the rendered answer contains ``word``, which only one part of the answer has."""
        try:
            ids = self._renderer.answer_ids(messages, answer, tools)
        except ValueError:
            return False
        return word in self._decoded(ids.tolist())

    def _contradiction(
        self, what: str, dialogue: Dialogue, ids: Sequence[int], others: Sequence[int]
    ) -> _Contradiction:
        start = max(0, num_alike(ids, others) - 3)
        shown = [
            f"{list(some[start : start + 24])} {self._decoded(some[start : start + 24])!r}"
            for some in (ids, others)
            if len(some)
        ]
        return _Contradiction(f"{what}; {' against '.join(shown)}; messages {list(dialogue.messages)!r}")


def _first_turn(dialogue: Dialogue) -> Dialogue:
    """Return the conversation up to the model's first turn, and results of its calls or a user message."""
    index = next(i for i, message in enumerate(dialogue.messages) if message["role"] == ASSISTANT)
    messages = list(dialogue.messages[: index + 1])
    calls = messages[index].get("tool_calls", ())
    messages += [result(one["id"], "done") for one in calls] or [user("go on")]
    return Dialogue(name=dialogue.name, messages=tuple(messages), tools=dialogue.tools)


def _texts_of(dialogue: Dialogue) -> Iterator[str]:
    for message in dialogue.messages:
        yield message["content"]
        yield message.get("reasoning_content", "")
        for one in message.get("tool_calls", ()):
            yield json.dumps(one["function"], ensure_ascii=False)


def _fits(dialogue: Dialogue, features: TemplateFeatures) -> bool:
    calls = [message.get("tool_calls", ()) for message in dialogue.messages]
    thoughts = ["reasoning_content" in m for m in dialogue.messages if m["role"] == ASSISTANT]
    return (
        (features.calls or not any(calls))
        and (features.parallel_calls or all(len(some) < 2 for some in calls))
        and (features.reasoning or not any(thoughts))
        and (not features.must_reason or all(thoughts))
        and (
            features.text_beside_calls
            or not any(m["content"] and m.get("tool_calls") for m in dialogue.messages)
        )
    )


def _content(message: Message) -> tuple[object, ...]:
    """Return the parts of a message that every format keeps: no call ids, no white space at the edges."""
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
    return message["content"].strip(), (message.get("reasoning_content") or "").strip(), calls


NUM_RANDOM_OF_COMMAND = 200
"""Default number of random conversations of the command."""


def check_template(tokenizer: "PreTrainedTokenizerBase", data: DataSection) -> list[Problem]:
    """Return the problems of the renderer that a run with an environment and this section would use."""
    try:
        chosen = choose_renderer(
            tokenizer,
            chat_template=data.chat_template,
            name=data.renderer,
            template_arguments=data.template_arguments,
        )
    except ValueError as error:
        return [Problem(field="data", remedy=str(error))]
    rows = check_renderer(tokenizer, chosen.renderer)
    first = next((row for row in rows if row.contradiction is not None), None)
    if first is None:
        return []
    remedy = f"{_named(chosen)} fails the check {first.name!r}: {first.contradiction}"
    field, value = ("renderer", data.renderer.value) if data.chat_template else ("chat_template", False)
    return [Problem(field=f"data.{field}", value=value, remedy=remedy)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status, which is 0 if all checks pass."""
    parser = argparse.ArgumentParser(
        prog="python -m forgeasync.environments.check_template",
        description="Proves how a model's conversations become tokens.",
    )
    parser.add_argument("--model", type=Path, required=True, help="folder with the model's tokenizer")
    parser.add_argument(
        "--renderer",
        type=RendererName,
        choices=list(RendererName),
        default=RendererName.AUTO,
        metavar="NAME",
        help="as data.renderer: auto, template or a family's name",
    )
    parser.add_argument(
        "--conversations", type=int, default=NUM_RANDOM_OF_COMMAND, metavar="N", help="random conversations"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random conversations")
    options = parser.parse_args(arguments)
    if not options.model.is_dir():
        parser.error(f"--model {options.model}: no such folder")

    try:
        tokenizer = load_tokenizer(options.model)
        chosen = choose_renderer(
            tokenizer, chat_template=tokenizer.chat_template is not None, name=options.renderer
        )
    except ValueError as error:
        print(f"--model {options.model}: {error}", file=sys.stderr)
        return 1
    rows = check_renderer(tokenizer, chosen.renderer, num_random=options.conversations, seed=options.seed)
    return _print(chosen, rows)


def _named(chosen: ChosenRenderer) -> str:
    return f"the renderer {chosen.name!r} ({chosen.reason})"


def _print(chosen: ChosenRenderer, rows: Sequence[CheckRow]) -> int:
    console = Console(highlight=False, markup=False)
    table = Table("check", "conversations", "result", title=_named(chosen), title_justify="left")
    for row in rows:
        verdict = "ok" if row.contradiction is None else "CONTRADICTION"
        table.add_row(row.name, str(row.num_cases), verdict)
    console.print(table)
    first = next((row for row in rows if row.contradiction is not None), None)
    if first is None:
        return 0
    console.print(f"{first.name}: {first.contradiction}", soft_wrap=True)
    return 1


if __name__ == "__main__":
    exit_with(main)
