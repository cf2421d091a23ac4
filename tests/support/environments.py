"""Environments of runs in tests, importable by every process of them."""

import asyncio

from forgeasync.data.task import Task
from forgeasync.environments.environment import Agent, Environment, Turn
from forgeasync.scoring.score import Score


class TryAgain(Environment):
    """Two turns for everybody; the score is the number of different characters, so that groups differ."""

    def __init__(self, hint: str = "4 + 5 =") -> None:
        self.hint = hint

    async def rollout(self, task: Task, agent: Agent) -> Score:
        messages = [{"role": "user", "content": task.prompt}]
        turn = await agent.respond(messages)
        messages += [turn.message, {"role": "user", "content": self.hint}]
        last = await agent.respond(messages)
        return Score(value=float(len(set(turn.text + last.text))), is_correct=last.text == task.answer)


class FailsSometimes(TryAgain):
    """Raises, or never ends, in every episode of tasks whose answer ends with these digits."""

    def __init__(self, raises: str, hangs: str) -> None:
        super().__init__()
        self.raises, self.hangs = raises, hangs

    async def rollout(self, task: Task, agent: Agent) -> Score:
        score = await super().rollout(task, agent)
        if task.answer.endswith(self.raises):
            raise KeyError("no tool of this name")
        if task.answer.endswith(self.hangs):
            await asyncio.sleep(10_000.0)
        return score


class UntilFull(Environment):
    """Talks on until there is no room."""

    async def rollout(self, task: Task, agent: Agent) -> Score:
        messages = [{"role": "user", "content": task.prompt}]
        while True:
            turn: Turn = await agent.respond(messages)
            messages += [turn.message, {"role": "user", "content": "4"}]
