"""An agent that brings its own loop: written with the openai SDK alone, as somebody else's would be."""

import asyncio

import openai

from forgeasync.environments import Agent, Environment
from forgeasync.rollouts import Score, Task


async def solve(base_url: str, api_key: str, question: str, hint: str) -> tuple[list[str], str]:
    """Two drafts side by side, of which the first is continued; nothing here knows of training."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=1) as client:
        messages = [{"role": "user", "content": question}]
        drafts = await client.chat.completions.create(model="any", messages=messages, n=2, temperature=0.3)
        texts = [choice.message.content or "" for choice in drafts.choices]
        messages += [{"role": "assistant", "content": texts[0]}, {"role": "user", "content": hint}]
        stream = await client.chat.completions.create(model="any", messages=messages, stream=True)
        last = ""
        async for chunk in stream:
            last += chunk.choices[0].delta.content or "" if chunk.choices else ""
        return texts, last


class OwnLoop(Environment):
    """Hands the session to an agent of its own; the score is the number of different characters."""

    async def rollout(self, task: Task, agent: Agent) -> Score:
        drafts, last = await asyncio.wait_for(
            solve(agent.base_url, agent.api_key, task.prompt, "4 - 5 ="), 60
        )
        return Score(value=float(len(set("".join(drafts) + last))), is_correct=last == task.answer)
