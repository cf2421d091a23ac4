"""Rules on agents and endings of episodes."""

from collections.abc import Iterator

from forgeasync.config.buffer import AgeOf
from forgeasync.config.episodes import EndingPolicy
from forgeasync.config.run import RunConfig
from forgeasync.schema import Problem

NEVER_A_SCORE = (EndingPolicy.RUN_AGAIN, EndingPolicy.MASK)


def check_episodes(config: RunConfig) -> Iterator[Problem]:
    """Check the sections ``agents`` and ``episodes``."""
    endings = config.episodes.endings
    for name, policy, what in (
        ("infrastructure", endings.infrastructure, "what a lost worker or server has done"),
        ("no_score", endings.no_score, "that nobody has judged an episode"),
    ):
        if policy not in NEVER_A_SCORE:
            yield Problem(
                field=f"episodes.endings.{name}",
                value=policy.value,
                remedy=f"must be one of {', '.join(NEVER_A_SCORE)}: {what} says nothing about the model, so "
                "it is never a score",
            )
    if config.agents is None:
        return
    names = ", ".join(config.agents)
    if config.environment is None:
        yield Problem(field="agents", value=names, remedy="needs an environment, which asks them")
    if not any(agent.trainable for agent in config.agents.values()):
        yield Problem(
            field="agents",
            value=names or "none",
            remedy="must have at least one agent with trainable: true, or be left out",
        )
    if config.buffer.age_of is AgeOf.NEWEST_TOKEN:
        yield Problem(
            field="buffer.age_of",
            value=config.buffer.age_of.value,
            remedy=f"must be {AgeOf.TOKEN.value!r} or {AgeOf.OLDEST_TOKEN.value!r} with agents: one of them "
            "can have taken its last turn while another goes on",
        )
