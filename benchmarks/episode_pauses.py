"""The environment of benchmarks/environments.py, in a module that its workers import."""

import asyncio
import math
import random

import forgeasync as fa


class Pauses(fa.Environment):
    """Three turns with pauses between them, as tools make them."""

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self.shortest_s = shortest_s
        self.longest_s = longest_s

    async def rollout(self, task: fa.Task, agent: fa.Agent) -> fa.Score:
        rng = random.Random()
        messages = [{"role": "user", "content": task.prompt}]
        for _ in range(2):
            turn = await agent.respond(messages, max_tokens=16)
            if self.longest_s:
                spread = math.log(self.longest_s / self.shortest_s)
                await asyncio.sleep(self.shortest_s * math.exp(rng.random() * spread))
            messages += [turn.message, {"role": "user", "content": task.prompt}]
        turn = await agent.respond(messages, max_tokens=16)
        return fa.Score(float(len(turn.text)), is_correct=False)
