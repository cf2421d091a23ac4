"""Starts the scorer."""

from monarch.actor import this_host

from forgeasync.actors.group_scoring import GroupScoring
from forgeasync.actors.procs import SCORER, Procs
from forgeasync.actors.scorer import ScorerActor, ScorerReady
from forgeasync.actors.watched_scorer import SpawnedScorer, WatchedScorer
from forgeasync.config.data import named_sources
from forgeasync.config.evaluation import named_sets
from forgeasync.config.run import RunConfig
from forgeasync.launch.hosts import stop
from forgeasync.launch.placement import spawn_role
from forgeasync.waiting import deadline


async def start_scorer(procs: Procs, config: RunConfig) -> GroupScoring:
    """Start the scorer with its processes, and the queue that scores groups concurrently."""
    limit_s = config.timeouts.score_s
    sources = (*named_sources(config.data), *named_sets(config.evaluation))

    async def spawn(number: int) -> SpawnedScorer:
        # A mesh of its own, which can be given back alone.
        mesh = spawn_role(this_host(), "scorer", num_procs=1)
        actor = mesh.spawn(f"{SCORER}-{number}", ScorerActor, procs.log_dir)
        try:
            async with deadline(
                config.timeouts.setup_s, call="setting up the scorer", key="timeouts.setup_s"
            ):
                ready: ScorerReady = await actor.setup.call_one(sources, config.scorer, limit_s, config.seed)
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

    scorer = WatchedScorer(spawn, config.scorer, limit_s=limit_s, faults=procs.faults, listing=procs.listing)
    procs.scorer = scorer
    isolation = await scorer.start()
    return GroupScoring(scorer.score, config.scorer, isolation=isolation)
