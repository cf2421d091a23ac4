"""Groups written once more: what the teacher read before each response, and what it was not asked."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from forgeasync.rollouts import (
    NO_ID,
    FinishReason,
    PayloadReader,
    PayloadWriter,
    Rollout,
    StoredRollout,
    TeacherRecord,
    TokenTrace,
    WithoutPrompt,
    create_run_folder,
    decode_rollout,
    remove_run_folder,
)
from forgeasync.runtime import RefusedGroup, SampledRollout, TaughtGroups, TeacherFailure, store_group
from tests.support.payloads import HOST, MIB
from tests.support.rollouts import FACTS, make_rollout

NUM_IDS = 2


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    folder = create_run_folder(MIB)
    yield folder
    remove_run_folder(folder)


def stored(folder: Path, rollouts: list[Rollout]) -> tuple[StoredRollout, ...]:
    sampled = [
        SampledRollout(branches=(one,), finish_reason=FinishReason.STOP, episode=index)
        for index, one in enumerate(rollouts)
    ]
    found = store_group(PayloadWriter(folder, HOST, MIB), sampled, group_id=7, generator_rank=0)
    assert not isinstance(found, RefusedGroup)
    return found


def trace_of(rollout: StoredRollout) -> TokenTrace:
    (branch,), reader = rollout.branches, PayloadReader(HOST)
    return decode_rollout(reader.read(branch.prompt), reader.read(branch.response))


def taught_groups(folder: Path, num_ids: int, *, needs_student_ids: bool) -> TaughtGroups:
    return TaughtGroups(
        teacher="t",
        folder=folder,
        host_id=HOST,
        capacity_bytes=MIB,
        num_ids=num_ids,
        needs_student_ids=needs_student_ids,
        vocab_size=FACTS.vocab_size,
    )


async def test_each_response_follows_what_the_teacher_reads_token_by_token(folder: Path) -> None:
    rollouts = [make_rollout(seed, 4, 5 + seed) for seed in range(3)]
    asked: list[tuple[list[int], int]] = []

    async def score(ids_S: np.ndarray, num_prompt: int, given_TK: np.ndarray | None) -> TeacherRecord:
        assert given_TK is None
        asked.append((ids_S.tolist(), num_prompt))
        num = len(ids_S) - num_prompt
        return TeacherRecord(
            logprobs_T=np.full(num, -1.0, np.float32),
            ids_TK=np.zeros((num, NUM_IDS), np.int32),
            topk_TK=np.full((num, NUM_IDS), -2.0, np.float32),
            versions_T=np.full(num, 3, np.int32),
        )

    groups = taught_groups(folder, NUM_IDS, needs_student_ids=False)
    shown = np.array([1, 0, 1, 1, 0, 2], np.int32)
    reads = (shown, WithoutPrompt.NOTHING, WithoutPrompt.POLICYS)
    taught = await groups.teach(stored(folder, rollouts), reads, score)
    assert not isinstance(taught, TeacherFailure)
    first, _, last = rollouts
    assert asked == [
        ([*shown.tolist(), *first.response_ids_T.tolist()], len(shown)),
        ([*last.prompt_ids_P.tolist(), *last.response_ids_T.tolist()], len(last.prompt_ids_P)),
    ]
    for rollout, one, is_asked in zip(rollouts, taught, (True, False, True), strict=True):
        trace = trace_of(one)
        np.testing.assert_array_equal(trace.prompt_ids_P, rollout.prompt_ids_P)
        np.testing.assert_array_equal(trace.response_ids_T, rollout.response_ids_T)
        np.testing.assert_array_equal(trace.logprobs_T, rollout.logprobs_T)
        assert trace.teacher is not None
        assert trace.teacher.has_target_T.tolist() == [is_asked] * rollout.num_response_tokens
        assert np.isfinite(trace.teacher.topk_TK).all() == is_asked


async def test_the_teacher_is_asked_about_what_the_policy_could_have_drawn(folder: Path) -> None:
    rollout = make_rollout(1, 4, 6)
    asked: list[np.ndarray | None] = []

    async def score(ids_S: np.ndarray, num_prompt: int, given_TK: np.ndarray | None) -> TeacherRecord:
        asked.append(given_TK)
        assert given_TK is not None
        return TeacherRecord(
            logprobs_T=np.full(len(given_TK), -1.0, np.float32),
            ids_TK=given_TK,
            topk_TK=np.where(given_TK == NO_ID, np.nan, -2.0).astype(np.float32),
            versions_T=np.zeros(len(given_TK), np.int32),
        )

    groups = taught_groups(folder, FACTS.vocab_size - 1, needs_student_ids=True)
    taught = await groups.teach(stored(folder, [rollout]), (WithoutPrompt.POLICYS,), score)
    kept = rollout.kept_tokens
    assert kept is not None and not isinstance(taught, TeacherFailure)
    (given_TK,) = asked
    assert given_TK is not None
    for token, row in enumerate(given_TK.tolist()):
        assert [one for one in row if one != NO_ID] == kept.row(token).tolist()
    record = trace_of(taught[0]).teacher
    assert record is not None
    np.testing.assert_array_equal(record.ids_TK, given_TK)
    np.testing.assert_array_equal(np.isnan(record.topk_TK), given_TK == NO_ID)
