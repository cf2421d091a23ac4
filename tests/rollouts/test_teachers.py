"""Teachers: records of what they said and what of them is refused, and prompts of those that know more."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.config import TeacherSection
from forgeasync.models import TURN_END, character_tokenizer
from forgeasync.rollouts import (
    NO_ID,
    NOT_ASKED,
    KeptTokens,
    PromptEncoder,
    Response,
    Task,
    TeacherPrompts,
    TeacherRecord,
    WithoutPrompt,
    WrongTeacherRecord,
    check_teacher_record,
    concatenate_teacher_records,
    no_teacher_record,
    student_ids,
    teacher_prompt,
    teacher_record,
)


def record(num_tokens: int = 4, num_ids: int = 2) -> TeacherRecord:
    rng = np.random.default_rng(num_tokens)
    return TeacherRecord(
        logprobs_T=-rng.random(num_tokens).astype(np.float32),
        ids_TK=rng.integers(0, 7, (num_tokens, num_ids)).astype(np.int32),
        topk_TK=-rng.random((num_tokens, num_ids)).astype(np.float32),
        versions_T=np.full(num_tokens, 5, np.int32),
    )


def same(one: TeacherRecord, other: TeacherRecord) -> bool:
    return all(np.array_equal(array, other.arrays()[name]) for name, array in one.arrays().items())


def test_a_record_comes_back_and_falls_into_parts() -> None:
    whole = record(6)
    found = teacher_record(whole.arrays())
    assert found is not None and same(found, whole)
    assert teacher_record({"ids": np.zeros(3)}) is None
    assert same(concatenate_teacher_records([whole.slice(0, 2), whole.slice(2, 6)]), whole)
    taken = whole.take(np.array([True, False, False, True, False, True]))
    assert taken.ids_TK.tolist() == whole.ids_TK[[0, 3, 5]].tolist()
    assert same(concatenate_teacher_records([no_teacher_record(0, 2), whole]), whole)


def test_a_record_says_where_the_teacher_was_not_asked() -> None:
    found = teacher_record(no_teacher_record(3, 2).arrays())
    assert found is not None and np.isnan(found.logprobs_T).all() and np.isnan(found.topk_TK).all()
    both = concatenate_teacher_records([found, record(2)])
    assert both.has_target_T.tolist() == [False, False, False, True, True]


check = partial(check_teacher_record, num_tokens=4, num_ids=2, vocab_size=7, teacher="t")


def changed(**arrays: np.ndarray) -> TeacherRecord:
    return replace(record(), **arrays)


def spoiled(name: str, value: float, whole: TeacherRecord | None = None) -> TeacherRecord:
    """One value of one array is another one."""
    array = getattr(whole or record(), name).copy()
    array.flat[1] = value
    return replace(whole or record(), **{name: array})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (changed(logprobs_T=record(3).logprobs_T), "of 3 tokens; must be 4"),
        (changed(ids_TK=record(4, 3).ids_TK), r"ids \[4, 3\]; must be \[4, 2\]"),
        (changed(topk_TK=record(3).topk_TK), r"log-probabilities of ids \[3, 2\]; must be \[4, 2\]"),
        (spoiled("logprobs_T", np.nan), "nan of a token at position 1"),
        (spoiled("logprobs_T", -np.inf), "-inf of a token at position 1"),
        (spoiled("topk_TK", 0.5), "0.5 of a likely id at position 0"),
        (spoiled("ids_TK", 7), "an id outside of the vocabulary of 7"),
        (spoiled("ids_TK", -1), "an id outside of the vocabulary of 7"),
        (changed(versions_T=record(3).versions_T), "versions of 3 tokens; must be 4"),
        (spoiled("versions_T", 6), r"of the versions \[5, 6\]; must be one"),
        (changed(versions_T=np.full(4, -1, np.int32)), r"of the versions \[-1\]; must be one, at least 0"),
    ],
)
def test_what_is_missing_or_no_log_probability_is_refused(wrong: TeacherRecord, said: str) -> None:
    check(record())
    check(no_teacher_record(0, 2), num_tokens=0)
    with pytest.raises(WrongTeacherRecord, match=f"teacher t gave .*{said}"):
        check(wrong)


def test_a_record_about_given_ids_says_nothing_where_there_is_none() -> None:
    given_TK = np.array([[0, 5], [3, NO_ID], [2, 6], [1, NO_ID]], np.int32)
    topk_TK = np.where(given_TK == NO_ID, np.nan, -1.5).astype(np.float32)
    right = changed(ids_TK=given_TK, topk_TK=topk_TK)
    check(right, given_TK=given_TK)
    with pytest.raises(WrongTeacherRecord, match="nan of a likely id"):
        check(right)
    missing = spoiled("topk_TK", np.nan, right)
    with pytest.raises(WrongTeacherRecord, match="nan of a likely id"):
        check(missing, given_TK=given_TK)
    with pytest.raises(WrongTeacherRecord, match="of ids that were not requested"):
        check(right, given_TK=given_TK[:, ::-1])
    with pytest.raises(WrongTeacherRecord, match="an id outside of the vocabulary of 6"):
        check(right, vocab_size=6, given_TK=given_TK)


def test_a_stored_record_that_mixes_versions_is_refused() -> None:
    for other in (6, NOT_ASKED):
        mixed = spoiled("versions_T", other)
        with pytest.raises(WrongTeacherRecord, match="a stored record gave scores of the versions"):
            teacher_record(mixed.arrays())


V = 30


@st.composite
def kept_responses(draw: st.DrawFn) -> tuple[list[set[int]], list[int], list[bool]]:
    """Kept sets with their sampled ids; none for tokens that were given."""
    is_sampled = draw(st.lists(st.booleans(), max_size=8))
    sets = [
        draw(st.sets(st.integers(0, V - 1), min_size=1, max_size=9)) if one else set() for one in is_sampled
    ]
    ids = [draw(st.sampled_from(sorted(one))) if one else draw(st.integers(0, V - 1)) for one in sets]
    return sets, ids, is_sampled


@given(response=kept_responses(), num_ids=st.integers(1, 9))
def test_rows_are_the_kept_sets_as_far_as_there_is_room(
    response: tuple[list[set[int]], list[int], list[bool]], num_ids: int
) -> None:
    sets, ids, is_sampled = response
    widths_T = np.array([len(one) for one in sets], np.int64)
    kept = KeptTokens(
        offsets=np.concatenate([[0], np.cumsum(widths_T)]).astype(np.int64),
        ids_N=np.array([token for one in sets for token in sorted(one)], np.int32),
    )
    found_TK = student_ids(kept, np.array(ids, np.int32), np.array(is_sampled, bool), num_ids=num_ids)
    assert found_TK.shape == (len(ids), num_ids) and found_TK.dtype == np.int32
    for row, one, token, was_sampled in zip(found_TK.tolist(), sets, ids, is_sampled, strict=True):
        known = [found for found in row if found != NO_ID]
        assert row == known + [NO_ID] * (num_ids - len(known)) and known == sorted(set(known))
        assert len(known) == min(num_ids, len(one)) and set(known) <= one
        assert (token in known) == was_sampled


def test_a_sampled_token_without_a_set_is_refused() -> None:
    kept = KeptTokens(offsets=np.array([0, 1, 1]), ids_N=np.array([4], np.int32))
    ids_T = np.array([4, 5], np.int32)
    assert student_ids(kept, ids_T, np.array([True, False]), num_ids=2).tolist() == [[4, NO_ID], [NO_ID] * 2]
    with pytest.raises(ValueError, match="token 1 was drawn from the whole vocabulary"):
        student_ids(kept, ids_T, np.array([True, True]), num_ids=2)


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
        ("5 $ each", r"is not a template: .*; write \$\$ for a dollar sign"),
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
def test_each_response_is_shown_the_next_correct_one_that_leaves_room(
    group: list[tuple[str, bool]], max_tokens: int
) -> None:
    """After the last one comes the first. A mark of one token is between the prompts."""
    made = [Response(text=text, num_tokens=len(text), is_correct=correct) for text, correct in group]
    for index, shown in enumerate(read(made, max_tokens=max_tokens)):
        room = max_tokens - made[index].num_tokens - len(TASK.prompt) - 1
        siblings = [*made[index + 1 :], *made[:index]]
        fitting = [one.text for one in siblings if one.is_correct and one.num_tokens <= room]
        assert shown == (f"{fitting[0]}|{TASK.prompt}" if fitting else None)


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
