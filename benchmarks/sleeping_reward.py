"""Rewards that take a known time, in a module that the scorers' processes import."""

import asyncio
import time

import forgeasync as fa


async def sleeping(task: fa.Task, response: fa.Response) -> float:
    """Take as long as the task says, as a server far away would (benchmarks/scoring.py)."""
    await asyncio.sleep(task.record["sleep_s"])
    return float(len(response.text))


class Slow:
    """Takes the same time for every response, one after the other in each of its processes."""

    def __init__(self, sleep_s: float) -> None:
        self._sleep_s = sleep_s

    def __call__(self, task: fa.Task, response: fa.Response) -> float:
        """Return 1 for an even number of characters."""
        time.sleep(self._sleep_s)
        return float(len(response.text) % 2 == 0)


class Far(Slow):
    """The same, many at once."""

    async def __call__(self, task: fa.Task, response: fa.Response) -> float:
        """Return 1 for an even number of characters."""
        await asyncio.sleep(self._sleep_s)
        return float(len(response.text) % 2 == 0)
