"""A Verifiers environment for tests, which runs in the environment of requirements/verifiers.lock.

    PORT=5000 python verifiers_words.py [letters]

The model says words: it is asked ``turns`` times, and the reward is the share of turns that say the answer.
``behaviour`` of a task says what goes wrong instead. With ``letters`` the reward is the number of different
characters of all turns, so that a model that says anything has rewards to learn from.
"""

import asyncio
import logging
import os
import sys
import time

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.serve import serve_env
from verifiers.v1.utils.loaders import resolve_env_config


class WordData(vf.TaskData):
    answer: str = ""
    turns: int = 2
    behaviour: str = ""


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=2.0)
    async def says_it(self, trace: vf.Trace) -> float:
        if self.data.behaviour == "nan":
            return float("nan")
        if self.data.behaviour == "scoring fails":
            raise KeyError("no such answer")
        said = [message.content or "" for message in trace.assistant_messages]
        if "letters" in sys.argv:
            return float(len(set("".join(said))))
        return sum(one.strip() == self.data.answer for one in said) / (2.0 * len(said))

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
        if task.behaviour == "hang":
            await asyncio.sleep(600.0)
        if task.behaviour == "block":
            time.sleep(600.0)
        if task.behaviour == "die":
            os._exit(3)
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(task.turns):
                said = await client.chat.completions.create(model=ctx.model, messages=messages)
                message = said.choices[0].message
                messages += [
                    {"role": "assistant", "content": message.content},
                    {"role": "user", "content": "again"},
                ]
        if task.behaviour == "raise":
            raise RuntimeError("the harness has broken")
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["WordHarness", "WordTaskset"]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    config = resolve_env_config(
        {
            "taskset": {"id": "verifiers_words"},
            "agent": {"harness": {"id": "verifiers_words"}, "runtime": {"type": "subprocess"}},
        }
    )
    address = f"tcp://127.0.0.1:{os.environ['PORT']}"
    serve_env(max_workers=1, address=address, config=config, elastic=False)
