"""The scorer actor: a thin shell around a scorer. Scores the responses of a group side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import Actor, concurrent_endpoint, current_rank

from forgeasync.actors.response_scoring import ResponseScoring
from forgeasync.config.schema import DataSection
from forgeasync.config.scorer_schema import ScorerSection
from forgeasync.data.task import Task
from forgeasync.observability.logs import redirect_process_output
from forgeasync.scoring.score import Score, VerifierCounts
from forgeasync.scoring.scorer import VerifiedScorer, build_scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredResponses:
    """What the scorer answers."""

    scores: tuple[Score, ...]
    counts: VerifierCounts
    """Since the scorer began."""


class ScorerActor(Actor):
    """One scorer in one proc."""

    def __init__(self, log_dir: Path) -> None:
        redirect_process_output(log_dir / f"scorer-{current_rank().rank}.log")
        self._scorer: VerifiedScorer | None = None
        self._scoring: ResponseScoring | None = None

    @concurrent_endpoint
    async def setup(self, data: DataSection, section: ScorerSection, limit_s: float, seed: int) -> str:
        """Start what scores; ``limit_s`` is for one group. Returns a sentence on what isolates verifiers."""
        self._scorer = build_scorer(data, section, seed=seed)
        self._scoring = ResponseScoring(self._scorer, num_workers=section.num_workers, limit_s=limit_s)
        return self._scorer.start()

    @concurrent_endpoint
    async def score(self, task: Task, responses: Sequence[str]) -> ScoredResponses:
        """The score of each response to one task."""
        assert self._scoring is not None and self._scorer is not None
        scores = await self._scoring.score(task, responses)
        return ScoredResponses(scores=scores, counts=self._scorer.counts)
