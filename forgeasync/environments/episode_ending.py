"""How an episode has ended, and what it scored: rules about what its environment returned or raised."""

import logging
from collections.abc import Mapping, Sequence

from forgeasync.config import Ending
from forgeasync.environments.environment import (
    ContextFull,
    EpisodeInterrupted,
    NoScore,
    ParseError,
    ToolError,
    TooManyTurns,
)
from forgeasync.environments.participant import AgentRole, Participant
from forgeasync.observability import last_words
from forgeasync.rollouts import Score

logger = logging.getLogger(__name__)


def has_failed(agents: Sequence[Participant]) -> bool:
    """Whether a turn was given up or could not be sampled, which ends the episode whatever it does."""
    return any(agent.is_cancelled or agent.failure is not None for agent in agents)


def judge_ending(
    agents: Sequence[Participant],
    roles: Sequence[AgentRole],
    result: object,
    overdue: str | None,
    where: str,
    *,
    has_one_agent: bool,
) -> tuple[Ending, dict[str, Score], str | None]:
    """Return how an episode ended, the scores by agent, and what went wrong.

    ``result`` is what the environment's method returned or raised, ``overdue`` the deadline that has passed,
    and ``where`` begins what is said of a problem.
    """
    if overdue is not None:
        return Ending.TIMEOUT, {}, f"{where}: took longer than {overdue}"
    if isinstance(result, BaseException):
        return *_ending_of(result, agents), f"{where}: {type(result).__name__}: {last_words(result)}"
    num_turns = sum(agent.num_turns for agent in agents)
    if not num_turns and not any(agent.has_given_url for agent in agents):
        problem = "ended without a turn of the model; must await agent.respond(...) at least once"
        return Ending.ENVIRONMENT_CRASH, {}, f"{where}: {problem}"
    try:
        scores = _scores(result, roles, has_one_agent=has_one_agent)
    except ValueError as error:
        return Ending.ENVIRONMENT_CRASH, {}, f"{where}: {error}"
    if any(agent.has_hit_length for agent in agents):
        return Ending.LENGTH, scores, None
    if any(agent.has_hit_max_turns for agent in agents):
        return Ending.MAX_TURNS, scores, None
    return Ending.COMPLETED, scores, None


def _scores(result: object, roles: Sequence[AgentRole], *, has_one_agent: bool) -> dict[str, Score]:
    names = [role.name for role in roles]
    if isinstance(result, Score):
        return dict.fromkeys(names, result)
    if isinstance(result, Mapping) and not has_one_agent:
        needed = {role.name for role in roles if role.is_trainable}
        scores = dict(result)
        if not needed <= scores.keys() <= set(names):
            raise ValueError(
                f"rollout returned scores of {sorted(map(str, scores))}; must have one for each of "
                f"{sorted(needed)}"
            )
        if all(isinstance(score, Score) for score in scores.values()):
            return scores
    what = "a Score" if has_one_agent else "a Score, or a mapping from agents' names to Scores"
    raise ValueError(f"rollout returned {str(result)[:80]!r}; must return {what}")


def _ending_of(error: BaseException, agents: Sequence[Participant]) -> tuple[Ending, dict[str, Score]]:
    match error:
        case ContextFull() if any(agent.num_turns for agent in agents):
            return Ending.LENGTH, {}
        case TooManyTurns():
            return Ending.MAX_TURNS, {}
        case ParseError():
            return Ending.PARSE_ERROR, {}
        case ToolError():
            return Ending.TOOL_ERROR, {}
        case NoScore():
            return Ending.NO_SCORE, {}
        case EpisodeInterrupted():
            return Ending.INFRASTRUCTURE, {}
        case _:
            # Whatever the user's code raises is for the user to see, with its traceback in the log.
            logger.warning("an episode failed", exc_info=error)
            return Ending.ENVIRONMENT_CRASH, {}
