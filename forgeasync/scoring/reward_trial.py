"""Tries the user's own rewards before a run starts: what is wrong with them shows at once."""

from collections.abc import Iterator, Mapping, Sequence

from forgeasync.config.data import NamedSource, PythonReward, ScoredUnit
from forgeasync.environments.reward import Response
from forgeasync.rollouts.rollout import FinishReason
from forgeasync.rollouts.task import Task
from forgeasync.schema.problems import Problem
from forgeasync.scoring.reward_process import RewardFailure, RewardProcess

MADE_UP_TEXT = "0"
"""Text of the made-up response to a task without a reference; else the text is the reference."""


def try_rewards(sources: Sequence[NamedSource], first_tasks: Mapping[str, Task]) -> Iterator[Problem]:
    """Find what would fail for every response: at most one problem for each reward.

    Every reward of kind ``python`` is built, in a process of its own, and called once with a made-up response
    to a task of its source; where no task is known (a data set of the hub), it is only built.
    """
    refused: set[str] = set()
    for source in sources:
        for index, reward in enumerate(source.rewards):
            field = source.field_of_reward(index)
            # A reward of several sources is tried on each of them: their records differ.
            if isinstance(reward, PythonReward) and field not in refused:
                reason = _failure(reward, first_tasks.get(source.name))
                if reason is not None:
                    refused.add(field)
                    yield Problem(field=f"{field}.factory", value=reward.factory, remedy=reason)


def _failure(reward: PythonReward, task: Task | None) -> str | None:
    process = RewardProcess(reward)
    try:
        process.start()
        if task is not None:
            response = Response(task.answer or MADE_UP_TEXT, 1, FinishReason.STOP)
            num_responses = 2 if reward.scores is ScoredUnit.GROUP else 1
            process.call(task, [response] * num_responses)
    except ValueError as error:
        return str(error)
    except RewardFailure as error:
        if task is None:
            return str(error)
        return f"{error}; it was tried on a made-up response to task {task.task_id}"
    finally:
        process.stop()
    return None
