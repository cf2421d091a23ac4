"""Packs sequences into rows and assigns rows to data-parallel ranks, with numpy arrays.

A sequence is a prompt followed by its response. A row has the tokens of its sequences once each: with shared
prefixes, sequences that begin alike have the tokens of their common beginning together. So a row is a forest
of token trees, laid out depth-first: token k is seen by itself and by the tokens after it, before
``visible_until_L[k]``. Without shared prefixes every sequence is a tree without branches.

A target is a sampled token of a response, which is predicted at the place of the token before it. Several
targets can have one place. Text that an environment inserted between two turns of the model is attended to
like a prompt.

Shape suffixes: P prompt tokens, T response tokens (of a sequence, or targets of a row), S all tokens of a
sequence, L row length, M MoE layers, K top-k.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from forgeasync.rollouts import (
    NO_RECORD,
    BranchKey,
    KeptTokens,
    TeacherRecord,
    all_kept,
    concatenate_kept_tokens,
    concatenate_teacher_records,
    padded_length,
    plan_rows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Branch that a sequence belongs to, in runs that report single tokens."""

    key: BranchKey
    is_recorded: bool
    """Whether the values of all its trained tokens are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSource:
    """Source with the places of its prompt and response in a row."""

    source: Source
    places_S: np.ndarray
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    """One prompt and response with the inputs of the objective."""

    prompt_ids_P: np.ndarray
    """Token ids of the prompt, int32."""
    response_ids_T: np.ndarray
    """Token ids of the response, int32."""
    behavior_logprobs_T: np.ndarray
    """Log-probabilities under the policy that sampled the tokens, float32."""
    ages_T: np.ndarray
    """Policy versions between the sampling of each token and this optimizer step, int32."""
    advantage: float | np.ndarray
    """One number for all response tokens, or float32 [T]."""
    weight: float = 1.0
    """Weight of the sequence in the batch's loss."""
    expert_ids_SMK: np.ndarray | None = None
    """Experts to replay, int16; ``NO_RECORD`` where the trainer's router chooses. None: it always does."""
    kept_tokens: KeptTokens | None = None
    """Kept set of each response token. None: all tokens were kept."""
    is_sampled_T: np.ndarray | None = None
    """Whether each response token is a target, bool. None: all are.

    Values of the others in the arrays above are ignored.
    """
    teacher: TeacherRecord | None = None
    """The teacher's scores of the targets; None without a teacher."""
    source: Source | None = None
    """Source of the tokens in reports; None if single tokens are not reported."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and response."""
        return len(self.prompt_ids_P) + len(self.response_ids_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """Sequences as a forest of tokens, with the targets of each sequence in turn."""

    token_ids_L: np.ndarray
    """Ids of the tokens, with padding at the end."""
    positions_L: np.ndarray
    """Depth of each token in its tree, which is its position in its sequences."""
    visible_until_L: np.ndarray
    """Position in the row before which later tokens attend to each token."""
    num_uses_L: np.ndarray
    """Number of sequences that each token belongs to; 0 for padding."""
    expert_ids_LMK: np.ndarray | None
    """Experts to replay, with ``NO_RECORD`` where the trainer's router chooses. None: it always does."""
    places_T: np.ndarray
    """Position in the row at which each target is predicted."""
    target_ids_T: np.ndarray
    """Ids of the targets."""
    behavior_logprobs_T: np.ndarray
    """Log-probabilities of the targets under the policy that sampled them."""
    advantages_T: np.ndarray
    """Advantage of each target."""
    sample_weights_T: np.ndarray
    """Weight of each target's sequence in the batch's loss."""
    ages_T: np.ndarray
    """Policy versions between the sampling of each target and this optimizer step."""
    sequence_ids_T: np.ndarray
    """Index of each target's sequence in the row."""
    kept_tokens: KeptTokens
    """Kept set of each target."""
    num_sequences: int
    """Number of sequences in the row."""
    num_prefix_splits: int = 0
    """Number of common beginnings that end where recorded experts differ, not tokens."""
    teacher: TeacherRecord | None = None
    """The teacher's scores of the targets; None for an empty row, and in runs without a teacher."""
    sources: tuple[PlacedSource, ...] = ()
    """One source for each sequence, or none."""

    @property
    def num_targets(self) -> int:
        """Number of trained tokens T."""
        return len(self.places_T)


def pack_row(sequences: Sequence[TrainingSequence], *, share_prefixes: bool = False) -> PackedRow:
    """Lay sequences out and pad to ``padded_length``; an empty row is all padding.

    With ``share_prefixes``, tokens of a common beginning are shared if their ids and their recorded experts
    are equal in every layer; otherwise the tree splits at the first token that differs.
    """
    shared_S, num_prefix_splits = [0] * len(sequences), 0
    if share_prefixes:
        sequences, shared_S, num_prefix_splits = _depth_first(sequences)
    used = sum(one.num_tokens - shared for one, shared in zip(sequences, shared_S, strict=True))
    length = padded_length(used)
    token_ids_L, positions_L = np.zeros(length, np.int64), np.zeros(length, np.int64)
    # Padding is one more tree, which sees only itself.
    visible_until_L, num_uses_L = np.full(length, length, np.int64), np.zeros(length, np.int64)
    positions_L[used:] = np.arange(length - used)
    expert_ids_LMK = _empty_routing(sequences, length)
    places_of, start = [], 0
    before_S = np.zeros(0, np.int64)
    for sequence, shared in zip(sequences, shared_S, strict=True):
        end = start + sequence.num_tokens - shared
        places_S = np.concatenate([before_S[:shared], np.arange(start, end)])
        token_ids_L[start:end] = _ids(sequence)[shared:]
        positions_L[start:end] = np.arange(shared, sequence.num_tokens)
        visible_until_L[places_S] = end
        num_uses_L[places_S] += 1
        if expert_ids_LMK is not None and sequence.expert_ids_SMK is not None:
            expert_ids_LMK[start:end] = sequence.expert_ids_SMK[shared:]
        places_of.append(places_S)
        before_S, start = places_S, end
    targets = [
        # The last prompt token predicts the first response token; the last response token predicts nothing.
        _Targets(one, _is_target(one), places_S[len(one.prompt_ids_P) - 1 : -1], index)
        for index, (one, places_S) in enumerate(zip(sequences, places_of, strict=True))
    ]
    return PackedRow(
        token_ids_L=token_ids_L,
        positions_L=positions_L,
        visible_until_L=visible_until_L,
        num_uses_L=num_uses_L,
        expert_ids_LMK=expert_ids_LMK,
        places_T=_joined([one.places_T[one.is_target_T] for one in targets], np.int64),
        target_ids_T=_joined([one.of.response_ids_T[one.is_target_T] for one in targets], np.int64),
        behavior_logprobs_T=_joined(
            [one.of.behavior_logprobs_T[one.is_target_T] for one in targets], np.float32
        ),
        advantages_T=_joined([one.spread(one.of.advantage) for one in targets], np.float32),
        sample_weights_T=_joined([one.spread(one.of.weight) for one in targets], np.float32),
        ages_T=_joined([one.of.ages_T[one.is_target_T] for one in targets], np.int32),
        sequence_ids_T=_joined([one.spread(one.index) for one in targets], np.int64),
        kept_tokens=concatenate_kept_tokens([_kept_of_targets(one) for one in sequences]),
        num_sequences=len(sequences),
        num_prefix_splits=num_prefix_splits,
        teacher=_teacher_of_targets(sequences),
        sources=_placed_sources(sequences, places_of),
    )


@dataclass(frozen=True, slots=True)
class _Targets:
    """Response tokens of a sequence, of which those in ``is_target_T`` are targets."""

    of: TrainingSequence
    is_target_T: np.ndarray
    places_T: np.ndarray
    index: int

    def spread(self, value: float | np.ndarray) -> np.ndarray:
        """Return a value of the sequence, or of each response token, at its targets."""
        return np.broadcast_to(value, self.is_target_T.shape)[self.is_target_T]


def _joined(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


def _ids(sequence: TrainingSequence) -> np.ndarray:
    return np.concatenate([sequence.prompt_ids_P, sequence.response_ids_T])


def _depth_first(sequences: Sequence[TrainingSequence]) -> tuple[list[TrainingSequence], list[int], int]:
    """Order sequences depth-first; return them, and the number of tokens that each shares with the last one.

    The third result is ``PackedRow.num_prefix_splits``.

    Ordering by the bytes of tokens puts sequences next to those with the longest common beginning.
    """
    routing = _empty_routing(sequences, 0)
    keys = []
    for sequence in sequences:
        parts = [_ids(sequence).astype(np.int32)[:, None].view(np.uint8)]
        if routing is not None:
            experts_SMK = sequence.expert_ids_SMK
            if experts_SMK is None:
                experts_SMK = np.full((sequence.num_tokens, *routing.shape[1:]), NO_RECORD)
            flat = experts_SMK.astype(np.int16).reshape(sequence.num_tokens, -1)
            parts.append(np.ascontiguousarray(flat).view(np.uint8))
        keys.append(np.concatenate(parts, axis=1))
    order = sorted(range(len(sequences)), key=lambda index: (keys[index].tobytes(), index))
    shared_S, num_splits = [0] * min(1, len(order)), 0
    for last, this in pairwise(order):
        num = min(len(keys[last]), len(keys[this]))
        differs = (keys[last][:num] != keys[this][:num]).any(axis=1)
        shared = int(differs.argmax()) if differs.any() else num
        if shared < num:
            num_splits += int(_ids(sequences[last])[shared] == _ids(sequences[this])[shared])
        shared_S.append(shared)
    return [sequences[index] for index in order], shared_S, num_splits


def _placed_sources(
    sequences: Sequence[TrainingSequence], places_of: Sequence[np.ndarray]
) -> tuple[PlacedSource, ...]:
    placed = [
        PlacedSource(source=sequence.source, places_S=places_S, num_prompt_tokens=len(sequence.prompt_ids_P))
        for sequence, places_S in zip(sequences, places_of, strict=True)
        if sequence.source is not None
    ]
    assert len(placed) in (0, len(sequences)), "all sequences of a batch have a source, or none"
    return tuple(placed)


def _is_target(sequence: TrainingSequence) -> np.ndarray:
    """Return which response tokens are trained on: bool [T]."""
    if sequence.is_sampled_T is None:
        return np.ones(len(sequence.response_ids_T), bool)
    return sequence.is_sampled_T


def _kept_of_targets(sequence: TrainingSequence) -> KeptTokens:
    is_target_T = _is_target(sequence)
    if sequence.kept_tokens is None:
        return all_kept(int(is_target_T.sum()))
    return sequence.kept_tokens.take(is_target_T)


def _teacher_of_targets(sequences: Sequence[TrainingSequence]) -> TeacherRecord | None:
    records = [one.teacher.take(_is_target(one)) for one in sequences if one.teacher is not None]
    assert len(records) in (0, len(sequences)), "a teacher sees all rollouts of a run or none"
    return concatenate_teacher_records(records) if records else None


def _empty_routing(sequences: Sequence[TrainingSequence], length: int) -> np.ndarray | None:
    """Return empty records for a row in which at least one sequence has records; otherwise None."""
    shapes = {s.expert_ids_SMK.shape[1:] for s in sequences if s.expert_ids_SMK is not None}
    assert len(shapes) <= 1, "records of one model"
    return np.full((length, *shapes.pop()), NO_RECORD, np.int16) if shapes else None


def pack_rows(
    sequences: Sequence[TrainingSequence], *, tokens_per_row: int, num_ranks: int
) -> list[list[PackedRow]]:
    """Pack sequences into rows ``[rank][microbatch]``, with the same number of microbatches per rank."""
    lengths = [one.num_tokens for one in sequences]
    plan = plan_rows(lengths, tokens_per_row=tokens_per_row, num_ranks=num_ranks)
    return [[pack_row([sequences[i] for i in rows[rank]]) for rows in plan] for rank in range(num_ranks)]


def write_rows(folder: Path, rows: Sequence[PackedRow], *, rank: int, reason: str) -> None:
    """Write ``rank-<rank>.npz``, which ``numpy.load`` reads.

    It has ``reason``, every array of each ``PackedRow`` as ``row<i>.<name>``, the kept sets as
    ``row<i>.kept_offsets`` and ``row<i>.kept_ids``, and the teacher's record as ``row<i>.teacher_<name>``.

    Raises:
        OSError: The disk is full or fails.
    """
    arrays: dict[str, np.ndarray] = {"reason": np.asarray(reason)}
    for index, row in enumerate(rows):
        for field in dataclasses.fields(row):
            value = getattr(row, field.name)
            if isinstance(value, np.ndarray):
                arrays[f"row{index}.{field.name}"] = value
        arrays[f"row{index}.kept_offsets"] = row.kept_tokens.offsets
        arrays[f"row{index}.kept_ids"] = row.kept_tokens.ids_N
        if row.teacher is not None:
            arrays |= {f"row{index}.{name}": array for name, array in row.teacher.arrays().items()}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"rank-{rank}.npz", allow_pickle=False, **arrays)
