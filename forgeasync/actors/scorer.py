"""The scorer actor: a thin shell around the rewards of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import Actor, concurrent_endpoint, current_rank

from forgeasync.actors.reward_scoring import RunRewards
from forgeasync.config.data import NamedSource
from forgeasync.config.run import ScorerSection
from forgeasync.environments.reward import Response
from forgeasync.observability.logs import redirect_process_output
from forgeasync.process_memory import MemoryPeak, MemoryWatch
from forgeasync.rollouts.score import Score, VerifierCounts
from forgeasync.rollouts.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredResponses:
    """The scorer's reply."""

    scores: tuple[Score, ...]
    counts: VerifierCounts
    """Since the scorer began."""
    memory: MemoryPeak | None = None
    """Peak of the scorer's largest process so far; None where nobody has measured."""


class ScorerActor(Actor):
    """One scorer in one proc."""

    def __init__(self, log_dir: Path) -> None:
        redirect_process_output(log_dir / f"scorer-{current_rank().rank}.log")
        self._rewards: RunRewards | None = None
        self._memory = MemoryWatch(with_descendants=True)

    @concurrent_endpoint
    async def setup(
        self, sources: Sequence[NamedSource], section: ScorerSection, limit_s: float, seed: int
    ) -> str:
        """Start what scores; ``limit_s`` is for one group. Says what there is and what isolates verifiers."""
        self._rewards = RunRewards(sources, section, limit_s=limit_s, seed=seed)
        return self._rewards.start()

    @concurrent_endpoint
    async def score(self, task: Task, responses: Sequence[Response]) -> ScoredResponses:
        """The score of each response to one task."""
        assert self._rewards is not None
        scores = await self._rewards.score(task, responses)
        return ScoredResponses(scores=scores, counts=self._rewards.counts, memory=self._memory.peak())
