"""A Verifiers environment for tests, which runs in the environment of requirements/verifiers.lock.

The model says words: it is asked ``turns`` times, and the reward is the share of turns that say the answer.
``behavior`` of a task says what goes wrong instead. With the environment variable LETTERS the reward is the
number of different characters of all turns, so that a model that says anything has rewards to learn from.
"""

import asyncio
import os
import time

import verifiers.v1 as vf
from openai import AsyncOpenAI


class WordData(vf.TaskData):
    answer: str = ""
    turns: int = 2
    behavior: str = ""


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=2.0)
    async def says_it(self, trace: vf.Trace) -> float:
        if self.data.behavior == "nan":
            return float("nan")
        if self.data.behavior == "scoring fails":
            raise KeyError("no such answer")
        said = [message.content or "" for message in trace.assistant_messages]
        if "LETTERS" in os.environ:
            return float(len(set("".join(said))))
        return sum(one.strip() == self.data.answer for one in said) / (2.0 * len(said))

    @vf.metric
    async def mean(self, trace: vf.Trace) -> float:
        """No part of a score can have this name."""
        return 0.5

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        return float(sum(len((one.content or "").split()) for one in trace.assistant_messages))


class WordTaskset(vf.Taskset[WordTask]):
    def load(self) -> list[WordTask]:
        return [WordTask(WordData(prompt="say it", answer="it"))]


class WordHarnessConfig(vf.HarnessConfig):
    pass


class WordHarness(vf.Harness[WordHarnessConfig]):
    """Runs its loop in the server's process, as ``Harness.launch`` allows."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        task = trace.task.data
        if task.behavior == "block":
            time.sleep(600.0)
        if task.behavior == "hang":
            try:
                await asyncio.sleep(600.0)
            finally:
                print("given up", flush=True)
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(task.turns):
                said = await client.chat.completions.create(model=ctx.model, messages=messages)
                message = said.choices[0].message
                messages += [
                    {"role": "assistant", "content": message.content},
                    {"role": "user", "content": "again"},
                ]
        if task.behavior == "raise":
            raise RuntimeError("the harness has broken")
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["WordHarness", "WordTaskset"]
