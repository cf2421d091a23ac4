"""Where the sequences of a context-parallel rank's part of packed rows begin and end, for varlen attention.

A rank has the queries of one part of every row, and keys and values of whole rows. The queries of a sequence
attend to its keys from its first token to the end of the part, so that keys and queries of every sequence end
at the same token: the causal mask of varlen attention is aligned there (bottom-right), and no query sees a
key behind it. Keys before the first overlapping sequence and after the part are left out.

Shape suffixes: B rows, L row length, S sequences that overlap the part, of all rows.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOffsets:
    """Sequences of a part, in the order of rows; offsets count from the first kept token."""

    cu_seq_q: np.ndarray
    """int32 [S + 1]: where each sequence's queries begin among the part's queries of all rows, end to end."""
    cu_seq_k: np.ndarray
    """int32 [S + 1]: the same of the kept keys, those of a row from ``key_starts_B`` to ``key_stop``."""
    max_q: int
    max_k: int
    key_starts_B: tuple[int, ...]
    key_stop: int


def part_offsets(positions_BL: np.ndarray, *, start: int, stop: int) -> PartOffsets:
    """Find the sequences of whole rows that overlap the positions from ``start`` to ``stop``.

    ``positions_BL`` are integers [B, L] that restart at 0 with every sequence (padding is a sequence too).
    """
    length = positions_BL.shape[1]
    assert 0 <= start < stop <= length, f"a part {start}:{stop} of rows of {length} tokens"
    num_queries, num_keys, key_starts = [], [], []
    for positions_L in positions_BL:
        assert positions_L[0] == 0, "a row begins with a sequence"
        firsts = np.flatnonzero(positions_L == 0)
        ends = np.append(firsts[1:], length)
        is_here = (firsts < stop) & (ends > start)
        firsts, ends = firsts[is_here], np.minimum(ends[is_here], stop)
        num_queries.append(ends - np.maximum(firsts, start))
        num_keys.append(ends - firsts)
        key_starts.append(int(firsts[0]))
    num_queries_S, num_keys_S = np.concatenate(num_queries), np.concatenate(num_keys)
    return PartOffsets(
        cu_seq_q=_cumulative(num_queries_S),
        cu_seq_k=_cumulative(num_keys_S),
        max_q=int(num_queries_S.max()),
        max_k=int(num_keys_S.max()),
        key_starts_B=tuple(key_starts),
        key_stop=stop,
    )


def _cumulative(lengths_S: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int32)
