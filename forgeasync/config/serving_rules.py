"""Rules on runs that serve people: what their environment, data, algorithm and buffer must be."""

from collections.abc import Iterator

from forgeasync.config.buffer import AgeOf, StaleGroups
from forgeasync.config.data import named_sources
from forgeasync.config.evaluation import named_sets
from forgeasync.config.run import RunConfig, is_served
from forgeasync.config.serving import (
    JUDGE,
    POLICY,
    WILDCARDS,
    ScoreSource,
    ServedEnvironment,
    ServedSource,
    is_loopback,
)
from forgeasync.schema import Problem, PythonCode


def check_serving(config: RunConfig) -> Iterator[Problem]:
    """Check that a run either serves people in all its sections or in none."""
    yield from _check_pair(config)
    if not is_served(config):
        if not config.evaluation.num_problems:
            yield Problem(
                field="evaluation.num_problems",
                value=0,
                remedy="must be at least 1; only a run that serves people (data.source.kind = 'served') has "
                "no held-out problems",
            )
        return
    yield from _check_address(config)
    yield from _check_evaluation(config)
    yield from _check_algorithm(config)
    yield from _check_judge(config)
    if config.episodes.num_workers != 1:
        yield Problem(
            field="episodes.num_workers",
            value=config.episodes.num_workers,
            remedy="must be 1 with data.source.kind = 'served': clients have one address, which one process "
            "listens on",
        )


def _check_pair(config: RunConfig) -> Iterator[Problem]:
    served = isinstance(config.environment, ServedEnvironment)
    if served and not is_served(config):
        given = named_sources(config.data)[0].source.kind if config.data.sources is None else "sources"
        yield Problem(
            field="data.source.kind",
            value=given,
            remedy="must be 'served', as the only source, with environment.kind = 'served': people bring the "
            "tasks",
        )
    if is_served(config) and not (served or isinstance(config.environment, PythonCode)):
        yield Problem(
            field="environment.kind",
            value=None if config.environment is None else config.environment.kind,
            remedy="must be 'served' with data.source.kind = 'served', or 'python' with a class derived from "
            "ServedSessions",
        )
    for source in (
        *(named_sources(config.data) if config.data.sources else ()),
        *named_sets(config.evaluation),
    ):
        if isinstance(source.source, ServedSource):
            yield Problem(
                field=f"{source.field}.kind",
                value=source.source.kind,
                remedy="must be the run's only source, as data.source",
            )


def _check_address(config: RunConfig) -> Iterator[Problem]:
    serving = config.serving
    if not is_loopback(serving.host) and serving.token_env is None:
        yield Problem(
            field="serving.token_env",
            value=None,
            remedy=f"must name an environment variable with a token: serving.host = {serving.host!r} can be "
            "reached from other machines",
        )
    if serving.host in WILDCARDS and serving.public_host is None:
        yield Problem(
            field="serving.public_host",
            value=None,
            remedy="must be the name or the address by which clients reach this machine: serving.host = "
            f"{serving.host!r} stands for all its addresses",
        )
    if serving.idle_session_s > serving.session_s:
        yield Problem(
            field="serving.idle_session_s",
            value=serving.idle_session_s,
            remedy=f"must be at most serving.session_s = {serving.session_s:g}, which ends every session",
        )


def _check_evaluation(config: RunConfig) -> Iterator[Problem]:
    why = "with data.source.kind = 'served': nobody asks held-out problems"
    if config.data.num_held_out:
        yield Problem(field="data.num_held_out", value=config.data.num_held_out, remedy=f"must be 0 {why}")
    if config.evaluation.sets:
        yield Problem(
            field="evaluation.sets",
            value=", ".join(one.name for one in config.evaluation.sets),
            remedy=f"must be left out {why}; evaluate the exported model with apps.evaluate",
        )


def _check_algorithm(config: RunConfig) -> Iterator[Problem]:
    algorithm, buffer = config.algorithm, config.buffer
    if algorithm.group_size != 1:
        yield Problem(
            field="algorithm.group_size",
            value=algorithm.group_size,
            remedy="must be 1 with data.source.kind = 'served': no two people have the same conversation",
        )
    if algorithm.advantage.smallest_group > 1:
        yield Problem(
            field="algorithm.advantage",
            value=algorithm.advantage.kind,
            remedy="compares the rollouts of a group, and a served session has a group of its own: must be "
            "'reinforce_pp', which compares with the whole batch",
        )
    if buffer.stale_groups is not StaleGroups.DROP:
        yield Problem(
            field="buffer.stale_groups",
            value=buffer.stale_groups.value,
            remedy=f"must be {StaleGroups.DROP.value!r} with data.source.kind = 'served': otherwise training "
            "waits for people who take long over their sessions",
        )
    if buffer.age_of is not AgeOf.TOKEN:
        yield Problem(
            field="buffer.age_of",
            value=buffer.age_of.value,
            remedy=f"must be {AgeOf.TOKEN.value!r} with data.source.kind = 'served': a session is as young "
            "as its newest tokens, however long it has waited for its client",
        )


def _check_judge(config: RunConfig) -> Iterator[Problem]:
    agents, needs_judge = config.agents, ScoreSource.JUDGE in config.serving.score_from
    if not needs_judge:
        if agents is not None:
            yield Problem(
                field="agents",
                value=", ".join(agents),
                remedy="must be left out, or serving.score_from must have 'judge': nobody else asks them",
            )
    elif (
        agents is None
        or agents.keys() != {POLICY, JUDGE}
        or not agents[POLICY].trainable
        or agents[JUDGE].trainable
    ):
        yield Problem(
            field="agents",
            value=None if agents is None else ", ".join(agents),
            remedy=f"must be {{{POLICY}: {{}}, {JUDGE}: {{trainable: false}}}} with 'judge' in "
            "serving.score_from",
        )
    if ScoreSource.ENVIRONMENT in config.serving.score_from and isinstance(
        config.environment, ServedEnvironment
    ):
        yield Problem(
            field="serving.score_from",
            value=ScoreSource.ENVIRONMENT.value,
            remedy="needs an environment of your own with a verdict: environment.kind = 'python' and a class "
            "derived from ServedSessions",
        )
