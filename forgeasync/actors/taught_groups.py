"""Writes groups once more, with what a teacher says of them, be it an engine of the run or a server."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from forgeasync.rollouts.group_payload import Arrays
from forgeasync.rollouts.payload_store import PayloadReader, PayloadStoreFull, PayloadWriter
from forgeasync.rollouts.rollout import StoredRollout
from forgeasync.rollouts.teacher_prompt import Instead, TeacherReads
from forgeasync.rollouts.teacher_record import TeacherRecord, check_teacher_record, not_asked

ScoreTokens = Callable[[np.ndarray, int], Awaitable[TeacherRecord]]
"""What a teacher says of token ids [S] behind the first so many; raises ValueError where it cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Untaught:
    """A group that a teacher could not say anything of."""

    problem: str
    is_full: bool = False
    """Whether the payload store had no room: another attempt changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtGroups:
    """Where groups lie and what is asked of their tokens."""

    teacher: str
    folder: Path
    """Payload folder of this host."""
    host_id: str
    capacity_bytes: int
    num_ids: int
    """Ids that the teacher is asked for at each token."""
    vocab_size: int
    """Size of the policy's vocabulary."""

    async def teach(
        self, rollouts: Sequence[StoredRollout], reads: Sequence[TeacherReads], score: ScoreTokens
    ) -> tuple[StoredRollout, ...] | Untaught:
        """The rollouts of a group, with new references: to a file that has the teacher's record too.

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
        asked = [
            asyncio.ensure_future(
                self._record(read, prompts[branch.prompt.payload_id][1]["ids"], response["ids"], score)
            )
            for branch, read, response in zip(branches, reads_of_branches, responses, strict=True)
        ]
        try:
            records = await asyncio.gather(*asked)
        except ValueError as error:
            # WrongTeacherRecord, or the teacher refuses the tokens: too many, or not of its vocabulary.
            return Untaught(problem=str(error))
        finally:
            for one in asked:
                one.cancel()
        payloads = [
            *(arrays for _, arrays in prompts.values()),
            *(response | record.arrays() for response, record in zip(responses, records, strict=True)),
        ]
        # A writer for this file alone: whoever frees it is another process, and the controller's budget
        # counts its bytes.
        writer = PayloadWriter(self.folder, self.host_id, self.capacity_bytes)
        try:
            refs = await asyncio.to_thread(writer.write_group, payloads)
        except PayloadStoreFull as error:
            return Untaught(problem=str(error), is_full=True)
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
        policys_ids_P: np.ndarray,
        response_ids_T: np.ndarray,
        score: ScoreTokens,
    ) -> TeacherRecord:
        if read is Instead.NOTHING:
            return not_asked(len(response_ids_T), self.num_ids)
        prompt_ids_P = policys_ids_P if isinstance(read, Instead) else read
        record = await score(np.concatenate([prompt_ids_P, response_ids_T]), len(prompt_ids_P))
        check_teacher_record(
            record,
            num_tokens=len(response_ids_T),
            num_ids=self.num_ids,
            vocab_size=self.vocab_size,
            teacher=self.teacher,
        )
        return record
