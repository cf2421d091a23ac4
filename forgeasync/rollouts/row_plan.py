"""Packs the sequences of a batch into rows, and assigns rows to data-parallel ranks. Pure."""

import heapq
from collections.abc import Sequence

from forgeasync.config import ROW_ALIGNMENT


def padded_length(num_tokens: int) -> int:
    """Return the length of a row of ``num_tokens`` tokens, padded to a multiple of ``ROW_ALIGNMENT``."""
    return max(1, -(-num_tokens // ROW_ALIGNMENT)) * ROW_ALIGNMENT


def plan_rows(lengths: Sequence[int], *, tokens_per_row: int, num_ranks: int) -> list[list[list[int]]]:
    """Assign sequences to rows and rows to ranks. ``plan[microbatch][rank]`` lists indices of sequences.

    Puts the longest sequences first, each into the row with the fewest tokens. The number of rows is the
    smallest multiple of ``num_ranks`` with which this succeeds. Ranks get nearly equal work, and every rank
    gets the same number of microbatches. Deterministic, and depends on lengths alone.

    Raises:
        ValueError: A sequence is longer than a row.
    """
    for index, length in enumerate(lengths):
        if length > tokens_per_row:
            raise ValueError(
                f"sequence {index} has {length} tokens, more than trainer.tokens_per_row = {tokens_per_row}"
            )
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    num_microbatches = max(1, -(-sum(lengths) // (tokens_per_row * num_ranks)))
    while (rows := _fill(order, lengths, tokens_per_row, num_microbatches * num_ranks)) is None:
        num_microbatches += 1
    return [rows[i * num_ranks : (i + 1) * num_ranks] for i in range(num_microbatches)]


def _fill(
    order: Sequence[int], lengths: Sequence[int], tokens_per_row: int, num_rows: int
) -> list[list[int]] | None:
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    # Heap of (number of tokens, index) of each row; the emptiest row comes first.
    emptiest = [(0, row) for row in range(num_rows)]
    for index in order:
        used, row = emptiest[0]
        if used + lengths[index] > tokens_per_row:
            return None
        rows[row].append(index)
        heapq.heapreplace(emptiest, (used + lengths[index], row))
    return rows
