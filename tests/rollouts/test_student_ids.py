"""The policy's own likely ids of each token, from kept sets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.rollouts import NO_ID, KeptTokens, student_ids

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
