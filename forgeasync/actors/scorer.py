"""The scorer actor: a thin shell around a scorer.

Consumes groups from the scoring loop, produces their rewards. Scoring runs in a thread, so that one slow
verification does not hold up the messages of other groups.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from monarch.actor import Actor, concurrent_endpoint, current_rank

from forgeasync.config.schema import DataSection
from forgeasync.data.task import Task
from forgeasync.observability.logs import redirect_process_output
from forgeasync.scoring.scorer import Scorer, build_scorer


class ScorerActor(Actor):
    """One scorer in one proc."""

    def __init__(self, log_dir: Path) -> None:
        redirect_process_output(log_dir / f"scorer-{current_rank().rank}.log")
        self._scorer: Scorer | None = None

    @concurrent_endpoint
    async def setup(self, data: DataSection, seed: int) -> None:
        self._scorer = build_scorer(data, seed=seed)

    @concurrent_endpoint
    async def score(self, task: Task, responses: Sequence[str]) -> tuple[float, ...]:
        """The reward of each response to one task."""
        assert self._scorer is not None
        scorer = self._scorer
        return tuple([await asyncio.to_thread(scorer.score, task, response) for response in responses])
