"""Tries rewards before a run starts, so that problems beyond the config are reported early."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from forgeasync.config import (
    JudgeReward,
    MathReward,
    NamedSource,
    ProcessRewardModel,
    PythonReward,
    ReasoningGymReward,
    RewardSection,
    ScoredUnit,
    ScorerSection,
)
from forgeasync.environments import Response, run_apart
from forgeasync.isolation import find_bubblewrap
from forgeasync.rollouts import FinishReason, Task
from forgeasync.schema import Problem
from forgeasync.scoring.endpoints import EndpointClient, EndpointRefuses, RewardUnavailable
from forgeasync.scoring.judge import MalformedVerdict, messages, request_verdict
from forgeasync.scoring.process_rewards import problem_of_model
from forgeasync.scoring.reward_pool import RewardFailure, RewardProcess
from forgeasync.scoring.verifier_pool import check_isolation

TRIAL_TEXT = "0"
"""Text of the made-up response to a task without a reference; otherwise the text is the reference."""


def check_verifiers(sources: Sequence[NamedSource], section: ScorerSection) -> Iterator[Problem]:
    """Yield a problem if a built-in verifier would run with weaker isolation than the config accepts.

    If there is a built-in verifier, starts Python in bubblewrap, once per process.
    """
    rewards = (reward for source in sources for reward in source.rewards)
    if any(isinstance(one, MathReward | ReasoningGymReward) for one in rewards):
        yield from check_isolation(section, find_bubblewrap())


def try_rewards(sources: Sequence[NamedSource], first_tasks: Mapping[str, Task]) -> Iterator[Problem]:
    """Yield problems that would fail every response, at most one for each reward.

    Every reward of kind ``python`` is built in a separate process, and called once with a made-up response to
    a task of its source. If no task is known (a data set of the hub), it is only built. Every judge must
    return one verdict. Of a process reward model everything but the weights is checked.
    """
    refused: set[str] = set()
    for source in sources:
        for index, reward in enumerate(source.rewards):
            field = source.field_of_reward(index)
            # A reward of several sources is tried on each of them, because their records differ.
            if field not in refused:
                problem = _problem_of(reward, first_tasks.get(source.name), field)
                if problem is not None:
                    refused.add(field)
                    yield problem


def _problem_of(reward: RewardSection, task: Task | None, field: str) -> Problem | None:
    match reward:
        case PythonReward():
            return _problem_of_python(reward, task, field)
        case JudgeReward():
            return _problem_of_judge(reward, task, field)
        case ProcessRewardModel():
            return problem_of_model(reward, task, field)
    return None


def _problem_of_python(reward: PythonReward, task: Task | None, field: str) -> Problem | None:
    reason = None
    process = RewardProcess(reward)
    try:
        process.start()
        if task is not None:
            response = Response(task.answer or TRIAL_TEXT, 1, FinishReason.STOP)
            num_responses = 2 if reward.scores is ScoredUnit.GROUP else 1
            process.call(task, [response] * num_responses)
    except ValueError as error:
        reason = str(error)
    except RewardFailure as error:
        reason = str(error)
        if task is not None:
            reason += f"; it was tried on a made-up response to task {task.task_id}"
    finally:
        process.stop()
    return None if reason is None else Problem(field=f"{field}.factory", value=reward.factory, remedy=reason)


def _problem_of_judge(reward: JudgeReward, task: Task | None, field: str) -> Problem | None:
    if task is None:
        task = Task(task_id="made up", prompt="1 + 1 = ?", answer="2", source_index=0, source="made up")
    text = task.answer or TRIAL_TEXT

    async def ask() -> None:
        async with contextlib.aclosing(EndpointClient(reward)) as client:
            await request_verdict(client, reward, messages(reward, task, text))

    try:
        run_apart(ask)
    except RewardUnavailable as error:
        # The error has the URL and the model, so the value would say them again.
        remedy = f"must be the URL of a server that answers: {error}"
        return Problem(field=f"{field}.base_url", remedy=remedy)
    except MalformedVerdict as error:
        remedy = f"must be a model that answers with the JSON asked for; its verdict {error}"
        return Problem(field=f"{field}.model", value=reward.model, remedy=remedy)
    except ValueError as error:
        # Without a status, the variable of the key is not set.
        if isinstance(error, EndpointRefuses) and error.status not in (401, 403):
            return Problem(field=f"{field}.model", remedy=f"was refused: {error}")
        return Problem(field=f"{field}.api_key_env", value=reward.api_key_env, remedy=str(error))
    return None
