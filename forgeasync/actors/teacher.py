"""The teacher actor: a generator that does not sample. It says how likely its model finds what others did.

It takes versions of weights as generators do.

Produces, for the collecting loop, groups whose payloads have the teacher's log-probabilities beside what the
generator recorded: one new file in the same host's shared memory. Whoever asked frees the file of before.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from monarch.actor import concurrent_endpoint

from forgeasync.actors.generator import GeneratorActor
from forgeasync.actors.taught_groups import TaughtGroups, TeacherFailure
from forgeasync.observability import redirect_process_output
from forgeasync.process_memory import MemoryWatch
from forgeasync.rollouts import StoredRollout, TeacherReads, TeacherRecord
from forgeasync.tracing import State, open_trace


class TeacherActor(GeneratorActor):
    """One engine of one teacher in one proc."""

    def __init__(self, log_dir: Path, rank: int, name: str) -> None:
        """``rank`` is its place among the engines of the teacher ``name``."""
        self._rank, self._name = rank, f"teacher-{name}-{rank}"
        redirect_process_output(log_dir / f"{self._name}.log")
        open_trace(log_dir, self._name, idle=State.WAITING_FOR_BATCH)
        self._engine = None
        self._memory = MemoryWatch(with_descendants=True)

    @concurrent_endpoint
    async def open(self, groups: TaughtGroups) -> None:
        """Know where groups are and what is asked of them, and find out if the engine can. Follows
        ``setup``."""
        self._groups = groups
        if groups.asks_student_ids:
            await self._score(np.zeros(2, np.int32), 1, np.zeros((1, groups.num_ids), np.int32))

    @concurrent_endpoint
    async def teach(
        self, rollouts: Sequence[StoredRollout], reads: Sequence[TeacherReads]
    ) -> tuple[StoredRollout, ...] | TeacherFailure:
        """See ``TaughtGroups.teach``."""
        return await self._groups.teach(rollouts, reads, self._score)

    async def _score(self, ids_S: np.ndarray, num_prompt: int, given_TK: np.ndarray | None) -> TeacherRecord:
        # vLLM takes 10 s to import, so only the procs that have an engine import it.
        from forgeasync.generator import score_given_ids, score_tokens

        assert self._engine is not None
        if given_TK is not None:
            return await score_given_ids(self._engine, ids_S, given_TK, num_prompt=num_prompt)
        return await score_tokens(self._engine, ids_S, num_prompt=num_prompt, num_ids=self._groups.num_ids)
