"""Which queries and keys a context-parallel rank gives to attention, against masks."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.trainer import part_offsets


def positions(rows: list[list[int]]) -> np.ndarray:
    """Of rows [B, L] of sequences of these lengths."""
    return np.stack([np.concatenate([np.arange(length) for length in row]) for row in rows])


@st.composite
def divided_rows(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Rows of equal length, cut into sequences anywhere, and a number of parts that divides them."""
    num_parts = draw(st.sampled_from([1, 2, 4, 8]))
    length = num_parts * draw(st.integers(1, 12))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        borders = sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=10)) | {0, length})
        rows.append([end - start for start, end in pairwise(borders)])
    return positions(rows), num_parts


def seen(positions_L: np.ndarray) -> np.ndarray:
    """Bool [L, L]: a token sees its sequence up to itself."""
    sequence_L = np.cumsum(positions_L == 0)
    return np.tril(sequence_L[:, None] == sequence_L[None])


def told(positions_BL: np.ndarray, *, start: int, stop: int) -> np.ndarray:
    """Bool [B * part, B * L]: what queries see by the offsets and a causal mask aligned bottom-right."""
    found = part_offsets(positions_BL, start=start, stop=stop)
    num_rows, length = positions_BL.shape
    kept = [row * length + np.arange(first, found.key_stop) for row, first in enumerate(found.key_starts_B)]
    kept_K = np.concatenate(kept)
    assert found.cu_seq_q.dtype == found.cu_seq_k.dtype == np.int32
    assert found.cu_seq_q[-1] == num_rows * (stop - start) and found.cu_seq_k[-1] == len(kept_K)
    num_q, num_k = np.diff(found.cu_seq_q), np.diff(found.cu_seq_k)
    assert num_q.min() > 0 and found.max_q == num_q.max() and found.max_k == num_k.max()
    sees = np.zeros((num_rows * (stop - start), num_rows * length), bool)
    for sequence in range(len(num_q)):
        first_q, first_k = found.cu_seq_q[sequence], found.cu_seq_k[sequence]
        for query in range(num_q[sequence]):
            visible = query + num_k[sequence] - num_q[sequence] + 1
            sees[first_q + query, kept_K[first_k : first_k + visible]] = True
    return sees


@given(divided_rows())
def test_parts_see_together_what_whole_rows_see(rows: tuple[np.ndarray, int]) -> None:
    positions_BL, num_parts = rows
    num_rows, length = positions_BL.shape
    width = length // num_parts
    for start in range(0, length, width):
        part = slice(start, start + width)
        expected = np.zeros((num_rows * width, num_rows * length), bool)
        for row, positions_L in enumerate(positions_BL):
            of_row = slice(row * length, (row + 1) * length)
            expected[row * width : (row + 1) * width, of_row] = seen(positions_L)[part]
        np.testing.assert_array_equal(told(positions_BL, start=part.start, stop=part.stop), expected)


@given(divided_rows())
def test_no_key_is_kept_that_no_query_sees(rows: tuple[np.ndarray, int]) -> None:
    positions_BL, num_parts = rows
    width = positions_BL.shape[1] // num_parts
    for start in range(0, positions_BL.shape[1], width):
        found = part_offsets(positions_BL, start=start, stop=start + width)
        sees = told(positions_BL, start=start, stop=start + width)
        assert sees.any(0).sum() == found.cu_seq_k[-1]


@pytest.mark.parametrize(
    ("part", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "first"),
    [
        # Sequences of 6, 9 and 1 tokens: all of the first, and two tokens of the second.
        ((0, 8), [0, 6, 8], [0, 6, 8], 6, 6, 0),
        # The last 7 of the second with all of its 9 keys; and the third, which begins here.
        ((8, 16), [0, 7, 8], [0, 9, 10], 7, 9, 6),
        # From the middle to the middle of one sequence.
        ((8, 12), [0, 4], [0, 6], 4, 6, 6),
    ],
)
def test_by_hand(
    part: tuple[int, int], cu_seq_q: list[int], cu_seq_k: list[int], max_q: int, max_k: int, first: int
) -> None:
    found = part_offsets(positions([[6, 9, 1]]), start=part[0], stop=part[1])
    assert found.cu_seq_q.tolist() == cu_seq_q
    assert found.cu_seq_k.tolist() == cu_seq_k
    assert (found.max_q, found.max_k, found.key_starts_B, found.key_stop) == (max_q, max_k, (first,), part[1])


def test_a_row_must_begin_with_a_sequence() -> None:
    with pytest.raises(AssertionError, match="begins with a sequence"):
        part_offsets(np.arange(1, 9)[None], start=0, stop=4)
