"""Compares a path of tokens with the same conversation rendered anew.

They may differ in two ways, and in no other:

- Inside a turn of the model, where its tokens need not be those that its text would become.
- At the beginning of a turn, where a format leaves out the reasoning of earlier turns when it renders them
  anew, or writes an empty block in its place. What the path has there is then nothing but marks of reasoning,
  the message's own reasoning and white space, and what the other has is marks and white space.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from forgeasync.environments.messages import Message
from forgeasync.environments.rendering.walks import Walk
from forgeasync.rollouts import text_of_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_OPENING = 8
"""Most tokens at the end of a prompt that open reasoning."""


class Likeness(StrEnum):
    """How a turn of a path is found in the conversation rendered anew."""

    SAME = "same tokens"
    RETOKENIZED = "same text, other tokens inside a turn"
    WITHOUT_REASONING = "without reasoning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where two sequences of tokens part."""

    index: int
    """Of the turn's message at which, or after which, they do."""
    path_ids: Sequence[int]
    anew_ids: Sequence[int]


def compare(
    tokenizer: "PreTrainedTokenizerBase", walked: Walk, messages: Sequence[Message], anew_ids: Sequence[int]
) -> frozenset[Likeness] | Difference:
    """Return in which ways the turns of a path are found in ``anew_ids``, or the first difference."""
    likenesses: set[Likeness] = set()
    position = 0
    for step in walked.steps:
        given, turn = step.given_ids.tolist(), step.turn.ids_T.tolist()
        found = _find_turn(tokenizer, given, turn, messages[step.index], anew_ids[position:])
        if found is None:
            return Difference(index=step.index, path_ids=[*given, *turn], anew_ids=anew_ids[position:])
        likeness, num_tokens = found
        likenesses.add(likeness)
        position += num_tokens
    last = walked.last_given_ids.tolist()
    if list(anew_ids[position:]) != last:
        index = walked.steps[-1].index if walked.steps else 0
        return Difference(index=index, path_ids=last, anew_ids=anew_ids[position:])
    return frozenset(likenesses)


def _find_turn(
    tokenizer: "PreTrainedTokenizerBase",
    given: list[int],
    turn: list[int],
    message: Message,
    anew: Sequence[int],
) -> tuple[Likeness, int] | None:
    """How given tokens and the turn after them begin ``anew``, and how many of its tokens they are."""
    both = [*given, *turn]
    if list(anew[: len(both)]) == both:
        return Likeness.SAME, len(both)
    num_opening = min(_MAX_OPENING, len(given))
    for num_given in range(len(given), len(given) - num_opening - 1, -1):
        if list(anew[:num_given]) != given[:num_given]:
            continue
        rest = list(anew[num_given:])
        num_same = _same_text(tokenizer, [*given[num_given:], *turn], rest)
        if num_same is not None:
            return Likeness.RETOKENIZED, num_given + num_same
        num_other = _without_reasoning(tokenizer, given[num_given:], turn, message, rest)
        if num_other is not None:
            return Likeness.WITHOUT_REASONING, num_given + num_other
    return None


def _without_reasoning(
    tokenizer: "PreTrainedTokenizerBase",
    opening: list[int],
    turn: list[int],
    message: Message,
    rest: list[int],
) -> int | None:
    """How many tokens of ``rest`` are the turn without its reasoning; None if they are something else."""
    reasoning = message.get("reasoning_content", "").strip()
    for num_empty in range(min(_MAX_OPENING, len(rest))):
        written = text_of_ids(tokenizer, rest[:num_empty])
        for num_dropped in range(len(turn)):
            kept = turn[num_dropped:]
            if rest[num_empty : num_empty + len(kept)] != kept:
                continue
            dropped = text_of_ids(tokenizer, [*opening, *turn[:num_dropped]])
            others = written + dropped.replace(reasoning, "", 1)
            if "think>" in others and not others.replace("<think>", "").replace("</think>", "").strip():
                return num_empty + len(kept)
    return None


def _same_text(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], anew: Sequence[int]) -> int | None:
    """How many of the tokens ``anew`` have the text of ``ids``; None if there is no such number."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    low, high = 0, len(anew)
    while low < high:
        middle = (low + high) // 2
        if len(tokenizer.decode(list(anew[:middle]), skip_special_tokens=False)) < len(text):
            low = middle + 1
        else:
            high = middle
    found = tokenizer.decode(list(anew[:low]), skip_special_tokens=False)
    return low if found == text else None
