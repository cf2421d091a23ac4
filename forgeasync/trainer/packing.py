"""Packs sequences into rows and assigns rows to data-parallel ranks, with numpy arrays.

A sequence is a prompt followed by its response. Position t of a row predicts ``target_ids_L[t]``, the token
after it. Only positions whose target is a sampled token of a response are trained on. Text that an
environment inserted between two turns of the model is attended to like a prompt.

Shape suffixes: P prompt tokens, T response tokens (of a sequence, or of all in a row), L row length, M MoE
layers, K top-k.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
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

NO_SEQUENCE = -1
"""Sequence id of padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Branch that a sequence belongs to, in runs that report single tokens."""

    key: BranchKey
    is_recorded: bool
    """Whether the values of all its trained tokens are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSource:
    """Source with its place in a row: tokens [start, start + num_prompt_tokens + num_response_tokens)."""

    source: Source
    start: int
    num_prompt_tokens: int
    num_response_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    """One prompt and response with the inputs of the objective.

    Ids are int32. ``behavior_logprobs_T`` is float32. ``ages_T`` (int32) has the number of policy versions
    between sampling and this optimizer step. ``expert_ids_SMK`` (int16 [P + T, M, K]) has the experts to
    replay, with ``NO_RECORD`` where the trainer's router chooses; None: it always chooses. ``kept_tokens``
    None: all tokens were kept. ``is_sampled_T`` (bool) is False for response tokens that are not targets,
    whose values in the other arrays are ignored; None: all are targets.
    """

    prompt_ids_P: np.ndarray
    response_ids_T: np.ndarray
    behavior_logprobs_T: np.ndarray
    ages_T: np.ndarray
    advantage: float | np.ndarray
    """One number for all response tokens, or float32 [T]."""
    weight: float = 1.0
    """Weight of the sequence in the batch's loss."""
    expert_ids_SMK: np.ndarray | None = None
    kept_tokens: KeptTokens | None = None
    is_sampled_T: np.ndarray | None = None
    teacher: TeacherRecord | None = None
    source: Source | None = None
    """Source of the tokens in reports; None if single tokens are not reported."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids_P) + len(self.response_ids_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """Sequences laid end to end; ``positions_L`` restart at 0 with each of them.

    ``kept_tokens`` has one set per target, in the order of the row. ``teacher`` has one record per target; it
    is None for an empty row, and in runs without a teacher.
    """

    token_ids_L: np.ndarray
    positions_L: np.ndarray
    target_ids_L: np.ndarray
    mask_L: np.ndarray
    behavior_logprobs_L: np.ndarray
    advantages_L: np.ndarray
    sample_weights_L: np.ndarray
    ages_L: np.ndarray
    sequence_ids_L: np.ndarray
    expert_ids_LMK: np.ndarray | None
    kept_tokens: KeptTokens
    teacher: TeacherRecord | None = None
    sources: tuple[PlacedSource, ...] = ()
    """One source for each sequence, or none."""

    @property
    def num_targets(self) -> int:
        """Number of positions that are trained on."""
        return int(self.mask_L.sum())


def pack_row(sequences: Sequence[TrainingSequence]) -> PackedRow:
    """Lay sequences end to end and pad to ``padded_length``; an empty row is all padding."""
    used = sum(sequence.num_tokens for sequence in sequences)
    length = padded_length(used)
    row = PackedRow(
        token_ids_L=np.zeros(length, np.int64),
        positions_L=np.zeros(length, np.int64),
        target_ids_L=np.zeros(length, np.int64),
        mask_L=np.zeros(length, bool),
        behavior_logprobs_L=np.zeros(length, np.float32),
        advantages_L=np.zeros(length, np.float32),
        sample_weights_L=np.zeros(length, np.float32),
        ages_L=np.zeros(length, np.int32),
        sequence_ids_L=np.full(length, NO_SEQUENCE, np.int64),
        expert_ids_LMK=_empty_routing(sequences, length),
        kept_tokens=concatenate_kept_tokens([_kept_of_targets(sequence) for sequence in sequences]),
        teacher=_teacher_of_targets(sequences),
        sources=_placed_sources(sequences),
    )
    start = 0
    for index, sequence in enumerate(sequences):
        end = start + sequence.num_tokens
        ids = np.concatenate([sequence.prompt_ids_P, sequence.response_ids_T])
        row.token_ids_L[start:end] = ids
        row.positions_L[start:end] = np.arange(end - start)
        row.target_ids_L[start : end - 1] = ids[1:]
        row.sequence_ids_L[start:end] = index
        # The last prompt token predicts the first response token; the last response token predicts nothing.
        targets = np.arange(start + len(sequence.prompt_ids_P) - 1, end - 1)
        is_target_T = _is_target(sequence)
        targets = targets[is_target_T]
        row.mask_L[targets] = True
        row.behavior_logprobs_L[targets] = sequence.behavior_logprobs_T[is_target_T]
        row.advantages_L[targets] = sequence.advantage
        row.sample_weights_L[targets] = sequence.weight
        row.ages_L[targets] = sequence.ages_T[is_target_T]
        if row.expert_ids_LMK is not None and sequence.expert_ids_SMK is not None:
            row.expert_ids_LMK[start:end] = sequence.expert_ids_SMK
        start = end
    # Padding is one more sequence, which attends only to itself.
    row.positions_L[start:] = np.arange(length - start)
    return row


def _placed_sources(sequences: Sequence[TrainingSequence]) -> tuple[PlacedSource, ...]:
    placed, start = [], 0
    for sequence in sequences:
        if sequence.source is not None:
            placed.append(
                PlacedSource(
                    source=sequence.source,
                    start=start,
                    num_prompt_tokens=len(sequence.prompt_ids_P),
                    num_response_tokens=len(sequence.response_ids_T),
                )
            )
        start += sequence.num_tokens
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
    plan = plan_rows(
        [sequence.num_tokens for sequence in sequences], tokens_per_row=tokens_per_row, num_ranks=num_ranks
    )
    return [
        [pack_row([sequences[index] for index in microbatch[rank]]) for microbatch in plan]
        for rank in range(num_ranks)
    ]


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
