"""Log-probabilities that a teacher computed for the tokens of one response.

They are over the teacher's full vocabulary at temperature 1, whatever the sampling of the response.

Shape suffixes: T response tokens, K ids of each token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forgeasync.rollouts.token_records import KeptTokens

NO_ID = -1
"""Padding of rows that have fewer than K ids. vLLM and the loss ignore it."""

NOT_ASKED = -1
"""Version of tokens that the teacher did not score."""


class WrongTeacherRecord(ValueError):
    """A teacher's record does not fit the tokens of its request, or lacks finite numbers for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRecord:
    """A teacher's log-probabilities for one response.

    Ignore the values of given tokens, which are not targets, and of tokens whose version is ``NOT_ASKED``,
    whose log-probabilities are nan.
    """

    logprobs_T: np.ndarray
    """Log-probability of each token of the response, float32."""
    ids_TK: np.ndarray
    """Further ids at each token, int32; K may be 0.

    Either the teacher's K most likely ids, the likeliest first, or the ids that the policy could have drawn,
    padded with ``NO_ID`` (``student_ids``).
    """
    topk_TK: np.ndarray
    """Log-probabilities of ``ids_TK``, float32; nan for ``NO_ID``."""
    versions_T: np.ndarray
    """Version of the teacher's weights, int32, the same for all tokens of a response; or ``NOT_ASKED``."""

    @property
    def has_target_T(self) -> np.ndarray:
        """Whether the teacher scored each token, bool."""
        return self.versions_T != NOT_ASKED

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the record as arrays of a payload. ``teacher_record`` is the inverse."""
        return {
            "teacher_logprobs": self.logprobs_T,
            "teacher_ids": self.ids_TK,
            "teacher_topk": self.topk_TK,
            "teacher_versions": self.versions_T,
        }

    def take(self, is_taken_T: np.ndarray) -> "TeacherRecord":
        """Return the record of the tokens marked in ``is_taken_T`` (bool)."""
        return _record_of({name: array[is_taken_T] for name, array in self.arrays().items()})

    def slice(self, start: int, end: int) -> "TeacherRecord":
        """Return the record of tokens [start, end)."""
        return _record_of({name: array[start:end] for name, array in self.arrays().items()})


def _record_of(arrays: Mapping[str, np.ndarray]) -> TeacherRecord:
    return TeacherRecord(
        logprobs_T=arrays["teacher_logprobs"],
        ids_TK=arrays["teacher_ids"],
        topk_TK=arrays["teacher_topk"],
        versions_T=arrays["teacher_versions"],
    )


def teacher_record(arrays: Mapping[str, np.ndarray]) -> TeacherRecord | None:
    """Read a record from the arrays of a payload; None if they have none.

    Raises:
        WrongTeacherRecord: The record mixes versions of the teacher's weights.
    """
    if "teacher_logprobs" not in arrays:
        return None
    record = _record_of(arrays)
    _check_versions(record, num_tokens=len(record.logprobs_T), where="a stored record", lowest=NOT_ASKED)
    return record


def no_teacher_record(num_tokens: int, num_ids: int) -> TeacherRecord:
    """Return the record of a response that the teacher did not score. ``num_tokens`` may be 0."""
    return TeacherRecord(
        logprobs_T=np.full(num_tokens, np.nan, np.float32),
        ids_TK=np.zeros((num_tokens, num_ids), np.int32),
        topk_TK=np.full((num_tokens, num_ids), np.nan, np.float32),
        versions_T=np.full(num_tokens, NOT_ASKED, np.int32),
    )


def concatenate_teacher_records(records: Sequence[TeacherRecord]) -> TeacherRecord:
    """Concatenate the records of at least one response."""
    arrays = [one.arrays() for one in records]
    return _record_of({name: np.concatenate([one[name] for one in arrays]) for name in arrays[0]})


def check_teacher_record(
    record: TeacherRecord,
    *,
    num_tokens: int,
    num_ids: int,
    vocab_size: int,
    teacher: str,
    given_TK: np.ndarray | None = None,
) -> None:
    """Check a teacher's record of a response of ``num_tokens`` tokens.

    Args:
        record: The record.
        num_tokens: Number of tokens of the response.
        num_ids: Number of ids that were requested for each token (K).
        vocab_size: Size of the teacher's vocabulary.
        teacher: Name of the teacher, for error messages.
        given_TK: Ids of the request; None if the teacher's likeliest ids were requested.

    Raises:
        WrongTeacherRecord: A number is missing, not finite or above 0, an id is not in the vocabulary or not
            the requested one, or not all tokens were scored under one version.
    """
    where = f"teacher {teacher}"
    if record.logprobs_T.shape != (num_tokens,):
        raise WrongTeacherRecord(
            f"{where} gave log-probabilities of {len(record.logprobs_T)} tokens; must be {num_tokens}"
        )
    for name, array in (("ids", record.ids_TK), ("log-probabilities of ids", record.topk_TK)):
        if array.shape != (num_tokens, num_ids):
            raise WrongTeacherRecord(
                f"{where} gave {name} {list(array.shape)}; must be {[num_tokens, num_ids]}"
            )
    topk_TK = record.topk_TK
    if given_TK is not None:
        if not np.array_equal(record.ids_TK, given_TK):
            raise WrongTeacherRecord(f"{where} gave log-probabilities of ids that were not requested")
        topk_TK = topk_TK[given_TK != NO_ID]
    for name, values in (("a token", record.logprobs_T), ("a likely id", topk_TK)):
        # Rounding can make a log-probability slightly positive.
        is_wrong = ~np.isfinite(values) | (values > 1e-3)
        if is_wrong.any():
            place = int(np.argwhere(is_wrong)[0][0])
            raise WrongTeacherRecord(
                f"{where} gave the log-probability {values[is_wrong].flat[0]} of {name} at position {place}; "
                "must be finite and at most 0"
            )
    _check_versions(record, num_tokens=num_tokens, where=where, lowest=0)
    lowest = 0 if given_TK is None else NO_ID
    if num_tokens and num_ids and not lowest <= record.ids_TK.min() <= record.ids_TK.max() < vocab_size:
        raise WrongTeacherRecord(f"{where} gave an id outside of the vocabulary of {vocab_size}")


def _check_versions(record: TeacherRecord, *, num_tokens: int, where: str, lowest: int) -> None:
    if record.versions_T.shape != (num_tokens,):
        raise WrongTeacherRecord(
            f"{where} gave versions of {len(record.versions_T)} tokens; must be {num_tokens}"
        )
    if num_tokens and not lowest <= record.versions_T.min() == record.versions_T.max():
        found = sorted(set(record.versions_T.tolist()))
        raise WrongTeacherRecord(
            f"{where} gave scores of the versions {found}; must be one, at least {lowest}"
        )


def student_ids(kept: KeptTokens, ids_T: np.ndarray, is_sampled_T: np.ndarray, *, num_ids: int) -> np.ndarray:
    """Return the ids that the policy could have drawn at each token, for a request to a teacher.

    These are the kept ids of each sampled token in ascending order, padded with ``NO_ID``. With ``top_k``,
    they are the policy's own likeliest ids at any temperature. If ties at the last rank make a set larger
    than K, its highest ids are left out, except the sampled one. Tokens that were not sampled have no ids.

    Returns:
        Ids, int32 [T, K].

    Raises:
        ValueError: A sampled token has no kept set.
    """
    widths_T = np.diff(kept.offsets)
    if (is_without_T := is_sampled_T & (widths_T == 0)).any():
        place = int(is_without_T.argmax())
        raise ValueError(f"response token {place} was drawn from the whole vocabulary; must have a kept set")
    ids_TK = np.full((len(ids_T), num_ids), NO_ID, np.int32)
    # Sets of at most K ids are copied in one vectorized step, the few larger ones in a loop.
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
