"""Prompts of teachers that know more than the policy."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.config import TeacherSection
from forgeasync.models import TURN_END, character_tokenizer
from forgeasync.rollouts import PromptEncoder, Response, Task, TeacherPrompts, WithoutPrompt, teacher_prompt

TASK = Task(
    task_id="t7",
    prompt="1+1 $x",
    answer="2",
    source_index=0,
    source="sums",
    record={"hint": "count {fingers}", "level": 3},
)


def test_what_the_task_has_is_filled_in_as_it_is() -> None:
    assert teacher_prompt("$hint ($level) $$ ${answer}: $prompt", TASK) == "count {fingers} (3) $ 2: 1+1 $x"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("$solution", r"\$solution, which task t7 does not; .* \$answer, \$sibling, \$feedback, \$hint"),
        ("5 $ each", r"is no template: .*; write \$\$ for a dollar sign"),
    ],
)
def test_what_it_does_not_have_is_said(template: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        teacher_prompt(template, TASK)


def test_a_template_says_whether_it_shows_a_sibling() -> None:
    for prompt in (None, "$prompt", "$$sibling $prompt"):
        assert not TeacherSection(model_path="x", prompt=prompt).shows_sibling
    assert TeacherSection(model_path="x", prompt="${sibling}: $prompt").shows_sibling


TOKENIZER = character_tokenizer(chat_template=True)
ENCODER = PromptEncoder(TOKENIZER, chat_template=False)
SIBLING = TeacherSection(model_path="x", prompt="$sibling|$prompt")


def responses(*texts: str, correct: str) -> list[Response]:
    """A token for every character; "1" in ``correct`` is a response that is correct."""
    return [
        Response(text=text, num_tokens=len(text), is_correct=mark == "1")
        for text, mark in zip(texts, correct, strict=True)
    ]


def read(
    group: list[Response],
    *,
    max_tokens: int = 1000,
    encoder: PromptEncoder = ENCODER,
    section: TeacherSection = SIBLING,
) -> list[str | None]:
    """What the teacher reads before each response, as text; None: it is not asked."""
    prompts = TeacherPrompts(encoder=encoder, max_tokens=max_tokens)
    return [
        None if one is WithoutPrompt.NOTHING else TOKENIZER.decode(one)
        for one in prompts.of_group(section, TASK, group)
    ]


def test_each_response_is_shown_the_next_correct_one() -> None:
    shown = read(responses("a", "b", "c", "d", correct="0101"))
    assert shown == [f"{sibling}|1+1 $x" for sibling in "bddb"]


def test_a_sibling_that_leaves_no_room_gives_its_place_to_the_next() -> None:
    """The prompt is 6 tokens, the mark between them one."""
    group = responses("a" * 5, "b" * 4, "c", "d" * 3, correct="0110")
    assert read(group, max_tokens=4 + 1 + 6 + 5) == ["bbbb|1+1 $x", "c|1+1 $x", "bbbb|1+1 $x", "bbbb|1+1 $x"]
    assert read(group, max_tokens=1 + 1 + 6 + 5) == ["c|1+1 $x", "c|1+1 $x", "bbbb|1+1 $x", "c|1+1 $x"]
    assert read(group, max_tokens=3 + 1 + 6) == [None, None, None, None]


def test_a_sibling_cannot_end_its_own_quotation() -> None:
    """A model can write the mark of a turn's end character by character; read again, it is that mark."""
    written = f"2{TURN_END}{TURN_END}"
    group = responses("a", written, "2", correct="011")
    assert read(group) == ["2|1+1 $x", "2|1+1 $x", None]
    marks = PromptEncoder(TOKENIZER, chat_template=True)
    in_turn = read(group, encoder=marks)
    assert in_turn[0] is not None and in_turn[0].count(TURN_END) == 1


@given(
    st.lists(st.tuples(st.text("ab", max_size=6), st.booleans()), min_size=1, max_size=6), st.integers(0, 30)
)
def test_what_is_shown_is_correct_of_another_and_fits(group: list[tuple[str, bool]], max_tokens: int) -> None:
    made = [Response(text=text, num_tokens=len(text), is_correct=correct) for text, correct in group]
    for index, shown in enumerate(read(made, max_tokens=max_tokens)):
        room = max_tokens - made[index].num_tokens - len(TASK.prompt) - 1
        siblings = [*made[:index], *made[index + 1 :]]
        others = [one.text for one in siblings if one.is_correct and one.num_tokens <= room]
        assert (shown is None) == (not others)
        assert shown is None or shown.removesuffix(f"|{TASK.prompt}") in others


FEEDBACK = TeacherSection(model_path="x", prompt="$feedback|$prompt")
BOTH = TeacherSection(model_path="x", prompt="$feedback|$sibling|$prompt")


def told(*feedbacks: str, correct: str = "000") -> list[Response]:
    """Responses of one token, "a", "b" ..., and what the reward has said about each."""
    made = responses(*"abc"[: len(feedbacks)], correct=correct[: len(feedbacks)])
    return [replace(one, feedback=feedback) for one, feedback in zip(made, feedbacks, strict=True)]


def test_each_response_is_shown_what_was_said_about_itself() -> None:
    """Nothing that the words contain is filled in, by no template."""
    group = told("too low", "", "$answer ${hint} $$ {{ 7*7 }} {% raw %} %s {0}")
    shown = ["too low|1+1 $x", None, "$answer ${hint} $$ {{ 7*7 }} {% raw %} %s {0}|1+1 $x"]
    assert read(group, section=FEEDBACK) == shown
    in_turn = read(group, encoder=PromptEncoder(TOKENIZER, chat_template=True), section=FEEDBACK)
    assert in_turn[2] is not None and str(shown[2]) in in_turn[2] and "49" not in in_turn[2]


def test_a_feedback_cannot_end_its_own_quotation_and_has_to_leave_room() -> None:
    group = told(f"2{TURN_END}", "abcd")
    assert read(group, section=FEEDBACK) == [None, "abcd|1+1 $x"]
    assert read(group, max_tokens=4 + 1 + 6 + 1, section=FEEDBACK) == [None, "abcd|1+1 $x"]
    assert read(group, max_tokens=4 + 1 + 6, section=FEEDBACK) == [None, None]


def test_a_feedback_and_a_sibling_are_both_needed() -> None:
    group = told("one", "two", "", correct="010")
    assert read(group, section=BOTH) == ["one|b|1+1 $x", None, None]
    assert BOTH.shows_sibling and BOTH.needs_scores and not BOTH.shows_only_sibling
    assert FEEDBACK.needs_scores and not FEEDBACK.shows_sibling and SIBLING.shows_only_sibling


def test_a_prompt_without_a_sibling_is_the_same_for_all() -> None:
    prompts = TeacherPrompts(encoder=ENCODER, max_tokens=10)
    assert prompts.of_task(None, TASK) is WithoutPrompt.POLICYS
    np.testing.assert_array_equal(prompts.of_task("$answer", TASK), ENCODER.encode("2"))
