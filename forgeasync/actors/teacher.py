"""The teacher actor: a generator that does not sample. It says how likely its model finds what others did.

Produces, for the collecting loop, groups whose payloads have the teacher's log-probabilities beside what the
generator recorded: one new file in the same host's shared memory. Whoever asked frees the file of before.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from monarch.actor import concurrent_endpoint

from forgeasync.actors.generator import GeneratorActor
from forgeasync.actors.generator_setup import GeneratorSetup
from forgeasync.observability.logs import redirect_process_output
from forgeasync.process_memory import MemoryWatch
from forgeasync.rollouts.group_payload import Arrays
from forgeasync.rollouts.payload_store import PayloadReader, PayloadStoreFull, PayloadWriter
from forgeasync.rollouts.rollout import StoredRollout
from forgeasync.rollouts.teacher_record import TeacherRecord, check_teacher_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Untaught:
    """A group that a teacher could not say anything of."""

    problem: str
    is_full: bool = False
    """Whether the payload store had no room: another attempt changes nothing."""


class TeacherActor(GeneratorActor):
    """One engine of one teacher in one proc."""

    def __init__(self, log_dir: Path, rank: int, name: str) -> None:
        """``rank`` is its place among the engines of the teacher ``name``."""
        self._rank, self._name = rank, name
        redirect_process_output(log_dir / f"teacher-{name}-{rank}.log")
        self._engine = None
        self._memory = MemoryWatch(with_descendants=True)

    @concurrent_endpoint
    async def open(self, setup: GeneratorSetup, payload_folder: Path, vocab_size: int) -> None:
        """Know where payloads are; ``vocab_size`` is the policy's. Follows ``setup``."""
        self._num_ids = setup.num_scored_ids
        self._folder = payload_folder
        self._vocab_size = vocab_size
        self._reader = PayloadReader(self._host_id)

    @concurrent_endpoint
    async def teach(
        self, rollouts: Sequence[StoredRollout], prompt_ids_P: np.ndarray | None
    ) -> tuple[StoredRollout, ...] | Untaught:
        """The rollouts of a group, with new references: to a file that has the teacher's record too.

        ``prompt_ids_P`` is what the teacher reads before each response; None: what the policy read.
        """
        branches = [branch for rollout in rollouts for branch in rollout.branches]
        prompts: dict[str, tuple[int, Arrays]] = {}
        for branch in branches:
            if branch.prompt.payload_id not in prompts:
                prompts[branch.prompt.payload_id] = (len(prompts), self._reader.read(branch.prompt))
        responses = [self._reader.read(branch.response) for branch in branches]
        try:
            records = await asyncio.gather(
                *(
                    self._score(
                        prompts[branch.prompt.payload_id][1]["ids"] if prompt_ids_P is None else prompt_ids_P,
                        response["ids"],
                    )
                    for branch, response in zip(branches, responses, strict=True)
                )
            )
        except ValueError as error:
            # WrongTeacherRecord, or vLLM refuses the tokens: too many, or not of its vocabulary.
            return Untaught(problem=str(error))
        payloads = [
            *(arrays for _, arrays in prompts.values()),
            *(response | record.arrays() for response, record in zip(responses, records, strict=True)),
        ]
        # A writer for this file alone: whoever frees it is another process, and the controller's budget
        # counts its bytes.
        writer = PayloadWriter(self._folder, self._host_id, self._setup.payload_capacity_bytes)
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

    async def _score(self, prompt_ids_P: np.ndarray, response_ids_T: np.ndarray) -> TeacherRecord:
        # vLLM takes 10 s to import, so only the procs that have an engine import it.
        from forgeasync.generator.token_scores import score_tokens

        assert self._engine is not None
        record = await score_tokens(
            self._engine,
            np.concatenate([prompt_ids_P, response_ids_T]),
            num_prompt=len(prompt_ids_P),
            num_ids=self._num_ids,
        )
        check_teacher_record(
            record,
            num_tokens=len(response_ids_T),
            num_ids=self._num_ids,
            vocab_size=self._vocab_size,
            teacher=self._name,
        )
        return record
