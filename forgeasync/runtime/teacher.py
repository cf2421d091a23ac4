"""The teacher actor: a generator that does not sample, but scores tokens that others have sampled.

It loads versions of weights like a generator. For the collecting loop, it rewrites groups with the teacher's
log-probabilities beside the generator's records, to a new file in the same host's shared memory. The caller
frees the previous file. ``TeacherRecorder`` also does this for a teacher that is a server.

Engine processes import this module, so it imports little: vLLM inspects everything that is imported there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from monarch.actor import concurrent_endpoint

from forgeasync.observability import State
from forgeasync.rollouts import (
    Arrays,
    PayloadReader,
    PayloadStoreFull,
    PayloadWriter,
    StoredRollout,
    TeacherReads,
    TeacherRecord,
    WithoutPrompt,
    check_teacher_record,
    decode_rollout,
    no_teacher_record,
    student_ids,
)
from forgeasync.runtime.generator import GeneratorActor

ScoreTokens = Callable[[np.ndarray, int, np.ndarray | None], Awaitable[TeacherRecord]]
"""Teacher's record of token ids [S] after the given number of them, and of given ids [T, K] at their
positions, or of its likeliest ids (None). Raises ValueError if the teacher cannot compute it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherFailure:
    """A group that a teacher could not score."""

    problem: str
    is_full: bool = False
    """Whether the payload store has no space, so that another attempt would fail too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRecorder:
    """Storage of groups, and what the teacher computes for their tokens."""

    teacher: str
    folder: Path
    """Payload folder of this host."""
    host_id: str
    capacity_bytes: int
    num_ids: int
    """Number of ids that the teacher scores at each token."""
    needs_student_ids: bool
    """Whether these are ids that the policy could have drawn, instead of the teacher's likeliest."""
    vocab_size: int
    """Size of the policy's vocabulary."""

    async def teach(
        self, rollouts: Sequence[StoredRollout], reads: Sequence[TeacherReads], score: ScoreTokens
    ) -> tuple[StoredRollout, ...] | TeacherFailure:
        """Return the rollouts of a group with references to a new file, which adds the teacher's records.

        ``reads`` is what the teacher reads before each rollout's response.
        """
        reader = PayloadReader(self.host_id)
        branches = [branch for rollout in rollouts for branch in rollout.branches]
        reads_of_branches = [
            read for rollout, read in zip(rollouts, reads, strict=True) for _ in rollout.branches
        ]
        prompts: dict[str, tuple[int, Arrays]] = {}
        for branch in branches:
            if branch.prompt.payload_id not in prompts:
                prompts[branch.prompt.payload_id] = (len(prompts), reader.read(branch.prompt))
        responses = [reader.read(branch.response) for branch in branches]
        scorings = [
            asyncio.ensure_future(self._record(read, prompts[branch.prompt.payload_id][1], response, score))
            for branch, read, response in zip(branches, reads_of_branches, responses, strict=True)
        ]
        try:
            records = await asyncio.gather(*scorings)
        except ValueError as error:
            # A WrongTeacherRecord, or a refusal of the tokens: too many, or not in the teacher's vocabulary.
            return TeacherFailure(problem=str(error))
        finally:
            for one in scorings:
                one.cancel()
        payloads = [
            *(arrays for _, arrays in prompts.values()),
            *(response | record.arrays() for response, record in zip(responses, records, strict=True)),
        ]
        # This writer is for one file only: another process frees it, and the controller's budget counts its
        # bytes.
        writer = PayloadWriter(self.folder, self.host_id, self.capacity_bytes)
        try:
            refs = await asyncio.to_thread(writer.write_group, payloads)
        except PayloadStoreFull as error:
            return TeacherFailure(problem=str(error), is_full=True)
        new_prompts = {name: refs[index] for name, (index, _) in prompts.items()}
        new_responses = iter(refs[len(prompts) :])
        return tuple(
            replace(
                rollout,
                branches=tuple(
                    replace(
                        branch, prompt=new_prompts[branch.prompt.payload_id], response=next(new_responses)
                    )
                    for branch in rollout.branches
                ),
            )
            for rollout in rollouts
        )

    async def _record(
        self,
        read: TeacherReads,
        prompt: Arrays,
        response: Arrays,
        score: ScoreTokens,
    ) -> TeacherRecord:
        response_ids_T = response["ids"]
        if read is WithoutPrompt.NOTHING:
            return no_teacher_record(len(response_ids_T), self.num_ids)
        prompt_ids_P = prompt["ids"] if isinstance(read, WithoutPrompt) else read
        given_TK = self._given(prompt, response) if self.needs_student_ids else None
        record = await score(np.concatenate([prompt_ids_P, response_ids_T]), len(prompt_ids_P), given_TK)
        check_teacher_record(
            record,
            num_tokens=len(response_ids_T),
            num_ids=self.num_ids,
            vocab_size=self.vocab_size,
            teacher=self.teacher,
            given_TK=given_TK,
        )
        return record

    def _given(self, prompt: Arrays, response: Arrays) -> np.ndarray:
        trace = decode_rollout(prompt, response)
        assert trace.kept_tokens is not None, "the config's rules want kept sets for this"
        ids_T, is_sampled_T = trace.response_ids_T, trace.is_sampled_T
        if is_sampled_T is None:
            is_sampled_T = np.ones(len(ids_T), bool)
        return student_ids(trace.kept_tokens, ids_T, is_sampled_T, num_ids=self.num_ids)


class TeacherActor(GeneratorActor):
    """One engine of one teacher in one process."""

    def __init__(self, log_dir: Path, rank: int, name: str) -> None:
        """``rank`` is its place among the engines of the teacher ``name``."""
        super().__init__(log_dir, rank, f"teacher-{name}", State.WAITING_FOR_BATCH)

    @concurrent_endpoint
    async def open(self, groups: TeacherRecorder) -> None:
        """Set the storage of groups and what to compute, and check the engine; follows ``setup``."""
        self._groups = groups
        if groups.needs_student_ids:
            await self._score(np.zeros(2, np.int32), 1, np.zeros((1, groups.num_ids), np.int32))

    @concurrent_endpoint
    async def teach(
        self, rollouts: Sequence[StoredRollout], reads: Sequence[TeacherReads]
    ) -> tuple[StoredRollout, ...] | TeacherFailure:
        """See ``TeacherRecorder.teach``."""
        return await self._groups.teach(rollouts, reads, self._score)

    async def _score(self, ids_S: np.ndarray, num_prompt: int, given_TK: np.ndarray | None) -> TeacherRecord:
        # vLLM takes 10 s to import, so only processes that have an engine import it.
        from forgeasync.generator import score_given_ids, score_tokens

        if given_TK is not None:
            return await score_given_ids(self._engine, ids_S, given_TK, num_prompt=num_prompt)
        return await score_tokens(self._engine, ids_S, num_prompt=num_prompt, num_ids=self._groups.num_ids)
