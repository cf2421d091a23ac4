"""The smallest environment: one prompt, one turn, one score."""

import inspect
from collections.abc import Awaitable, Callable

from forgeasync.environments.environment import Agent, Environment, Turn
from forgeasync.rollouts import Score, Task

TurnReward = Callable[[Task, Turn], Score | Awaitable[Score]]
"""Scores the only turn of an episode."""


class SingleTurn(Environment):
    """Prompts the model with the task and scores its answer; samples the same tokens as a run without an
    environment."""

    def __init__(self, reward: TurnReward) -> None:
        self._reward = reward

    async def rollout(self, task: Task, agent: Agent) -> Score:
        score = self._reward(task, await agent.respond(task.prompt))
        return await score if inspect.isawaitable(score) else score
