"""The config sections of runs that serve people, and the checks of the other sections of such runs."""

from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING, ClassVar, Literal

from forgeasync.config import (
    WILDCARDS,
    AgeOf,
    InstalledEnvironment,
    InstalledSource,
    RunConfig,
    SandboxSection,
    ScoreSource,
    StaleGroups,
    is_loopback,
    is_served,
)
from forgeasync.rollouts import Task
from forgeasync.schema import Problem, PythonCode, Refusal, refuse

if TYPE_CHECKING:
    from forgeasync.plugins.serve.environment import ServedSessions

POLICY = "policy"
"""Name of the agent that people talk to, in runs with a judge."""

JUDGE = "judge"
"""Name of the judge."""


class ServedEnvironment(InstalledEnvironment):
    """People talk to the policy over HTTP, and their sessions become trajectories. The section ``serving``
    says where and how."""

    kind: Literal["served"]

    def check(self, config: RunConfig) -> Iterator[Problem]:
        """Check that the task source is ``served``."""
        if not is_served(config):
            remedy = "as the only source, with environment.kind = 'served': people bring the tasks"
            given = "sources" if config.data.source is None else config.data.source.kind
            yield refuse(config, "data.source.kind", f"must be 'served', {remedy}", given)

    def build(self, sandbox: SandboxSection) -> "ServedSessions":
        """Build the environment, which needs no sandbox."""
        from forgeasync.plugins.serve.environment import ServedSessions

        return ServedSessions()


class ServedSource(InstalledSource):
    """No problems: people bring their own. Needs ``environment: {kind: served}``, or one of your own that is
    derived from ``ServedSessions``."""

    kind: Literal["served"]

    serves_people: ClassVar[bool] = True

    def check(self, config: RunConfig, field: str) -> Iterator[Problem]:
        """Check the other sections of a run that serves people."""
        return (refuse(config, *refusal) for refusal in _check_run(config, field))

    def problems(self, *, num_train: int, num_held_out: int, seed: int) -> "ServedProblems":
        """Return tasks without content, one for each session."""
        assert not num_held_out, "checked by the rules on served runs"
        return ServedProblems(num_train)


class ServedProblems:
    """Tasks without content; there is nothing to hold out."""

    def __init__(self, num_train: int) -> None:
        self._num_train = num_train

    def held_out(self) -> list[Task]:
        """Return nothing."""
        return []

    def train(self, never: Set[str]) -> Sequence[Task]:
        """Return ``data.num_train`` tasks without content."""
        return [
            Task(task_id=f"served/{index}", prompt="", answer="", source_index=index, source="served")
            for index in range(self._num_train)
        ]


def _check_run(config: RunConfig, field: str) -> Iterator[Refusal]:
    if field != "data.source":
        yield f"{field}.kind", "must be the run's only source, as data.source"
        return
    environment = config.environment
    if not isinstance(environment, ServedEnvironment | PythonCode):
        yield (
            "environment.kind",
            "must be 'served' with data.source.kind = 'served', or 'python' with a class derived from "
            "ServedSessions",
            None if environment is None else environment.kind,
        )
    yield from _check_address(config)
    yield from _check_evaluation(config)
    yield from _check_algorithm(config)
    yield from _check_judge(config)
    if config.episodes.num_workers != 1:
        yield (
            "episodes.num_workers",
            "must be 1 with data.source.kind = 'served': clients have one address, which one process "
            "listens on",
        )


def _check_address(config: RunConfig) -> Iterator[Refusal]:
    serving = config.serving
    if not is_loopback(serving.host) and serving.token_env is None:
        yield (
            "serving.token_env",
            f"must name an environment variable with a token: serving.host = {serving.host!r} can be "
            "reached from other machines",
        )
    if serving.host in WILDCARDS and serving.public_host is None:
        yield (
            "serving.public_host",
            "must be the name or the address by which clients reach this machine: serving.host = "
            f"{serving.host!r} stands for all its addresses",
        )
    if serving.idle_session_s > serving.session_s:
        yield (
            "serving.idle_session_s",
            f"must be at most serving.session_s = {serving.session_s:g}, which ends every session",
        )


def _check_evaluation(config: RunConfig) -> Iterator[Refusal]:
    why = "with data.source.kind = 'served': held-out problems have no client"
    if config.data.num_held_out:
        yield "data.num_held_out", f"must be 0 {why}"
    if config.evaluation.sets:
        yield (
            "evaluation.sets",
            f"must be left out {why}; evaluate the exported model with apps.evaluate",
            ", ".join(one.name for one in config.evaluation.sets),
        )


def _check_algorithm(config: RunConfig) -> Iterator[Refusal]:
    algorithm, buffer = config.algorithm, config.buffer
    if algorithm.group_size != 1:
        yield (
            "algorithm.group_size",
            "must be 1 with data.source.kind = 'served': no two people have the same conversation",
        )
    if algorithm.advantage.smallest_group > 1:
        yield (
            "algorithm.advantage",
            "compares the rollouts of a group, and each served session is its own group: must be "
            "'reinforce_pp', which compares with the whole batch",
        )
    if buffer.stale_groups is not StaleGroups.DROP:
        yield (
            "buffer.stale_groups",
            f"must be {StaleGroups.DROP.value!r} with data.source.kind = 'served': otherwise training "
            "waits for people who take long over their sessions",
        )
    if buffer.age_of is not AgeOf.TOKEN:
        yield (
            "buffer.age_of",
            f"must be {AgeOf.TOKEN.value!r} with data.source.kind = 'served': a session is as young "
            "as its newest tokens, however long it has waited for its client",
        )


def _check_judge(config: RunConfig) -> Iterator[Refusal]:
    agents, needs_judge = config.agents, ScoreSource.JUDGE in config.serving.score_from
    if not needs_judge:
        if agents is not None:
            yield (
                "agents",
                "must be left out, or serving.score_from must have 'judge': only it uses them",
                ", ".join(agents),
            )
    elif (
        agents is None
        or agents.keys() != {POLICY, JUDGE}
        or not agents[POLICY].trainable
        or agents[JUDGE].trainable
    ):
        yield (
            "agents",
            f"must be {{{POLICY}: {{}}, {JUDGE}: {{trainable: false}}}} with 'judge' in serving.score_from",
            None if agents is None else ", ".join(agents),
        )
    if ScoreSource.ENVIRONMENT in config.serving.score_from and isinstance(
        config.environment, ServedEnvironment
    ):
        yield (
            "serving.score_from",
            "needs an environment of your own with a verdict: environment.kind = 'python' and a class "
            "derived from ServedSessions",
            ScoreSource.ENVIRONMENT.value,
        )
