"""Starts the scorers."""

import functools
from collections.abc import Sequence

from monarch.actor import this_host

from forgeasync.actors.group_scoring import GroupScoring
from forgeasync.actors.process_manager import SCORER, ProcessManager
from forgeasync.actors.scorer import ScorerActor, ScorerReady
from forgeasync.actors.scorer_pool import ScorerPool
from forgeasync.actors.watched_scorer import SpawnedScorer, WatchedScorer, WatchedScorers
from forgeasync.config import (
    JudgeReward,
    NamedSource,
    PythonReward,
    RunConfig,
    ScoredUnit,
    named_sets,
    named_sources,
)
from forgeasync.launch import spawn_role, stop
from forgeasync.scoring import Judge, is_limited
from forgeasync.waiting import deadline


async def start_scorer(procs: ProcessManager, config: RunConfig) -> GroupScoring:
    """Start the scorers with their processes, and what has groups scored by them."""
    section = config.scorer
    sources = (*named_sources(config.data), *named_sets(config.evaluation))

    async def spawn(rank: int, number: int) -> SpawnedScorer:
        # A mesh of its own, which can be given back alone.
        mesh = spawn_role(this_host(), "scorer", num_procs=1)
        actor = mesh.spawn(f"{SCORER}-{rank}-{number}", ScorerActor, procs.log_dir, rank)
        try:
            async with deadline(config.timeouts.setup_s, call="setting up a scorer", key="timeouts.setup_s"):
                ready: ScorerReady = await actor.setup.call_one(
                    sources, section, config.timeouts.score_s, config.seed
                )
        except BaseException:
            await stop(mesh)
            raise
        return SpawnedScorer(
            actor=actor,
            pid=ready.pid,
            mark=ready.mark,
            isolation=ready.isolation,
            stop=lambda: stop(mesh),
        )

    def tell(rank: int, is_up: bool) -> None:
        pool.set_up(rank, is_up)

    pool: ScorerPool
    scorers = [
        WatchedScorer(
            functools.partial(spawn, rank),
            section,
            limit_s=_longest_call_s(sources, config),
            faults=procs.faults,
            listing=procs.listing,
            rank=rank,
            on_change=functools.partial(tell, rank),
        )
        for rank in range(section.num_replicas)
    ]
    procs.scorer = WatchedScorers(scorers)
    isolation = await procs.scorer.start()
    pool = ScorerPool([scorer.score for scorer in scorers], section, isolation=isolation)
    comparing = frozenset(source.name for source in sources if _compares(source))
    return GroupScoring(pool, section, compares=lambda task: task.source in comparing)


def _compares(source: NamedSource) -> bool:
    """Whether a reward of a source gets all responses of a group at once."""
    return any(isinstance(one, PythonReward) and one.scores is ScoredUnit.GROUP for one in source.rewards)


def _longest_call_s(sources: Sequence[NamedSource], config: RunConfig) -> float:
    """The longest time that a scorer takes for a response once it begins, waits for turns included."""
    score_s = config.timeouts.score_s
    longest_s = score_s
    for source in sources:
        for one in source.rewards:
            if isinstance(one, JudgeReward):
                longest_s = max(longest_s, Judge(one, num_replicas=config.scorer.num_replicas).longest_s)
            elif is_limited(one):
                longest_s = max(longest_s, 2 * one.max_attempts * score_s)
    return longest_s
