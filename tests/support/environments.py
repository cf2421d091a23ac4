"""Environments of runs in tests, importable by every process of them."""

import os
import time
from pathlib import Path

from forgeasync.environments import Agent, Environment
from forgeasync.rollouts import Score, Task


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
        agent.keep("last.txt", last.text)
        if task.answer.endswith(self.failing_digit):
            raise KeyError("no tool of this name")
        return Score(value=float(len(set(turn.text + last.text))), is_correct=last.text == task.answer)


class SlowSteps(Environment):
    """Two turns with a pause between them. Appends the worker's process id to a file in each episode."""

    def __init__(self, pids: str, pause_s: float) -> None:
        self.pids = Path(pids)
        self.pause_s = pause_s

    async def rollout(self, task: Task, agent: Agent) -> Score:
        with self.pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        messages = [{"role": "user", "content": task.prompt}]
        turn = await agent.respond(messages)
        # Blocks this episode's thread and no other.
        time.sleep(self.pause_s)
        last = await agent.respond([*messages, turn.message, {"role": "user", "content": "4 - 5 ="}])
        return Score(value=float(len(set(turn.text + last.text))), is_correct=last.text == task.answer)


class KeepsAndFails(Environment):
    """Two turns, the first of which is kept as a file. The number of the problem is in the first message."""

    def __init__(self, refused: int) -> None:
        self.refused = refused

    async def rollout(self, task: Task, agent: Agent) -> Score:
        number = task.source_index % 6
        messages = [{"role": "user", "content": f"{task.prompt} = {number}"}]
        turn = await agent.respond(messages)
        agent.keep("said.txt", turn.text)
        messages += [turn.message, {"role": "user", "content": "4 - 5 ="}]
        last = await agent.respond(messages)
        return Score(value=1.0, is_correct=last.text == "right")
