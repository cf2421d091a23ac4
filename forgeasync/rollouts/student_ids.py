"""The ids that a policy could have drawn at each token of a response, for a teacher to be asked about.

They come from the kept sets, which are recorded when a token is sampled: with ``top_k`` they are the policy's
own likeliest ids, at any temperature.

Shape suffixes: T response tokens, K ids of each token.
"""

import numpy as np

from forgeasync.rollouts.kept_tokens import KeptTokens

NO_ID = -1
"""Fills rows up that have fewer than K ids: vLLM and the loss know it as no id at all."""


def student_ids(kept: KeptTokens, ids_T: np.ndarray, is_sampled_T: np.ndarray, *, num_ids: int) -> np.ndarray:
    """The kept ids of each sampled token, int32 [T, K], ascending, with ``NO_ID`` behind them.

    A set of more than K ids, as ties at the last rank make it, loses its highest ids, but never the sampled
    one. Tokens that were not sampled have no ids.

    Raises:
        ValueError: a sampled token has no kept set.
    """
    widths_T = np.diff(kept.offsets)
    if (is_without_T := is_sampled_T & (widths_T == 0)).any():
        place = int(is_without_T.argmax())
        raise ValueError(f"response token {place} was drawn from the whole vocabulary; must have a kept set")
    ids_TK = np.full((len(ids_T), num_ids), NO_ID, np.int32)
    # Where a set has room all of it goes in at once; the few others one by one.
    has_room_T = is_sampled_T & (widths_T <= num_ids)
    row_of_N = np.repeat(np.arange(len(ids_T)), widths_T)
    place_of_N = np.arange(len(row_of_N)) - kept.offsets[row_of_N]
    is_put_N = has_room_T[row_of_N]
    ids_TK[row_of_N[is_put_N], place_of_N[is_put_N]] = kept.ids_N[is_put_N]
    for token in np.flatnonzero(is_sampled_T & (widths_T > num_ids)).tolist():
        others = kept.row(token)
        others = others[others != ids_T[token]][: num_ids - 1]
        ids_TK[token] = np.sort(np.append(others, ids_T[token]))
    return ids_TK
