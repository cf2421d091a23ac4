"""Records of teachers: there and back through a payload, parts of them, and what is refused."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.rollouts import (
    NO_ID,
    NOT_ASKED,
    KeptTokens,
    TeacherRecord,
    WrongTeacherRecord,
    check_teacher_record,
    concatenate_teacher_records,
    no_teacher_record,
    student_ids,
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
    with pytest.raises(WrongTeacherRecord, match="of other ids than it was asked about"):
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
def responses(draw: st.DrawFn) -> tuple[list[set[int]], list[int], list[bool]]:
    """Kept sets with their sampled ids; none for tokens that were given."""
    is_sampled = draw(st.lists(st.booleans(), max_size=8))
    sets = [
        draw(st.sets(st.integers(0, V - 1), min_size=1, max_size=9)) if one else set() for one in is_sampled
    ]
    ids = [draw(st.sampled_from(sorted(one))) if one else draw(st.integers(0, V - 1)) for one in sets]
    return sets, ids, is_sampled


@given(response=responses(), num_ids=st.integers(1, 9))
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
