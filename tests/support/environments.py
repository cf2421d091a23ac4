"""Environments of runs in tests, importable by every process of them."""

from forgeasync.environments.environment import Agent, Environment
from forgeasync.rollouts.score import Score
from forgeasync.rollouts.task import Task


class TryAgain(Environment):
    """Two turns for everybody; the score is the number of different characters, so that groups differ.

    One in ten tasks, by the last digit of its answer, fails after its turns.
    """

    def __init__(self, hint: str, failing_digit: int) -> None:
        self.hint = hint
        self.failing_digit = str(failing_digit)

    async def rollout(self, task: Task, agent: Agent) -> Score:
        messages = [{"role": "user", "content": task.prompt}]
        turn = await agent.respond(messages)
        messages += [turn.message, {"role": "user", "content": self.hint}]
        last = await agent.respond(messages)
        if task.answer.endswith(self.failing_digit):
            raise KeyError("no tool of this name")
        return Score(value=float(len(set(turn.text + last.text))), is_correct=last.text == task.answer)
