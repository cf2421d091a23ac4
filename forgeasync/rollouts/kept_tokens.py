"""Which tokens could have been drawn at each step: the record behind Keep Sampling Mask.

Shape suffixes: T response tokens, N kept ids of all of them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forgeasync.rollouts.routing import RecordError

NO_DISTRIBUTION = -1
"""The one "id" in the row of a token whose log-probabilities were not numbers. An empty row would say that
the whole vocabulary was kept; this one is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """The kept sets of a response, as CSR: row t is ``ids_N[offsets[t]:offsets[t + 1]]``, ascending.

    ``offsets``: int64 [T + 1]; ``ids_N``: int32. An empty row means that the whole vocabulary was kept.
    """

    offsets: np.ndarray
    ids_N: np.ndarray

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int] | np.ndarray], *, vocab_size: int) -> "KeptTokens":
        """Kept ids of each token, in any order; rows that keep all of ``vocab_size`` are stored empty."""
        widths_T = np.asarray([len(row) for row in rows], np.int64)
        ids_N = np.fromiter(itertools.chain.from_iterable(rows), np.int32, count=int(widths_T.sum()))
        return cls.from_widths(widths_T, ids_N, vocab_size=vocab_size)

    @classmethod
    def from_widths(cls, widths_T: np.ndarray, ids_N: np.ndarray, *, vocab_size: int) -> "KeptTokens":
        """The same from the ids of all tokens (int32) and how many each token has of them."""
        row_of_N = np.repeat(np.arange(len(widths_T)), widths_T)
        is_cut_T = widths_T < vocab_size
        is_stored_N = is_cut_T[row_of_N]
        ids_N, row_of_N = ids_N[is_stored_N], row_of_N[is_stored_N]
        ids_N = ids_N[np.lexsort((ids_N, row_of_N))]
        offsets = np.zeros(len(widths_T) + 1, np.int64)
        np.cumsum(np.where(is_cut_T, widths_T, 0), out=offsets[1:])
        return cls(offsets=offsets, ids_N=ids_N)

    @property
    def num_tokens(self) -> int:
        return len(self.offsets) - 1

    def slice(self, start: int, end: int) -> "KeptTokens":
        """The sets of tokens [start, end)."""
        first, last = self.offsets[start], self.offsets[end]
        return KeptTokens(offsets=self.offsets[start : end + 1] - first, ids_N=self.ids_N[first:last])

    def row(self, index: int) -> np.ndarray:
        """Kept ids of one token; empty for the whole vocabulary."""
        return self.ids_N[self.offsets[index] : self.offsets[index + 1]]

    def take(self, is_taken_T: np.ndarray) -> "KeptTokens":
        """The sets of the tokens that are marked (bool [T])."""
        widths_T = np.diff(self.offsets)
        offsets = np.zeros(int(is_taken_T.sum()) + 1, np.int64)
        np.cumsum(widths_T[is_taken_T], out=offsets[1:])
        return KeptTokens(offsets=offsets, ids_N=self.ids_N[np.repeat(is_taken_T, widths_T)])


def all_kept(num_tokens: int) -> KeptTokens:
    """The record of a response sampled from the whole vocabulary."""
    return KeptTokens(offsets=np.zeros(num_tokens + 1, np.int64), ids_N=np.empty(0, np.int32))


def concatenate_kept_tokens(parts: Sequence[KeptTokens]) -> KeptTokens:
    """The kept sets of several responses, one after the other."""
    offsets = np.zeros(1 + sum(part.num_tokens for part in parts), np.int64)
    np.cumsum(np.concatenate([np.diff(part.offsets) for part in parts] or [offsets[1:]]), out=offsets[1:])
    return KeptTokens(
        offsets=offsets, ids_N=np.concatenate([part.ids_N for part in parts] or [np.empty(0, np.int32)])
    )


def check_kept_tokens(kept: KeptTokens, response_ids_T: np.ndarray, *, vocab_size: int) -> None:
    """Check kept sets against the tokens that were drawn.

    Raises:
        RecordError: a wrong number of sets, a row of ``NO_DISTRIBUTION``, an id outside the vocabulary or
            twice in a row, or a set without its sampled token; names field, value and what would be right.
    """
    if kept.num_tokens != len(response_ids_T):
        raise RecordError(
            "kept_tokens",
            f"{kept.num_tokens} sets",
            f"must be {len(response_ids_T)}, one for each token of the response",
        )
    widths_T = np.diff(kept.offsets)
    if kept.offsets[0] != 0 or (widths_T < 0).any() or kept.offsets[-1] != len(kept.ids_N):
        raise RecordError(
            "kept_tokens", f"offsets up to {kept.offsets[-1]}", f"must rise from 0 to {len(kept.ids_N)}"
        )
    if kept.ids_N.size == 0:
        return
    row_of_N = np.repeat(np.arange(len(widths_T)), widths_T)
    is_unknown_N = kept.ids_N == NO_DISTRIBUTION
    if is_unknown_N.any():
        raise RecordError(
            "kept_tokens",
            f"no distribution at response token {int(row_of_N[np.argmax(is_unknown_N)])}",
            "the generator's log-probabilities must be numbers there",
        )
    lowest, highest = int(kept.ids_N.min()), int(kept.ids_N.max())
    if lowest < 0 or highest >= vocab_size:
        value = lowest if lowest < 0 else highest
        raise RecordError("kept_tokens", f"token id {value}", f"must lie in [0, {vocab_size})")
    is_repeated_N = (np.diff(kept.ids_N) <= 0) & (np.diff(row_of_N) == 0)
    if is_repeated_N.any():
        row = int(row_of_N[np.argmax(is_repeated_N)])
        raise RecordError(
            "kept_tokens", f"set of token {row} not strictly ascending", "a set must list an id once only"
        )
    has_sampled_T = widths_T == 0
    has_sampled_T[row_of_N[kept.ids_N == response_ids_T[row_of_N]]] = True
    if not has_sampled_T.all():
        row = int(np.argmin(has_sampled_T))
        raise RecordError(
            "kept_tokens",
            f"set of token {row} without the sampled id {int(response_ids_T[row])}",
            f"the sampled id must be among its {int(widths_T[row])} ids",
        )
