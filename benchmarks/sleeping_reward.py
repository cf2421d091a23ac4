"""The reward of benchmarks/scoring.py, in a module that the scorers' processes import."""

import asyncio

import forgeasync as fa


async def sleeping(task: fa.Task, response: fa.Response) -> float:
    """Take as long as the task says, as a server far away would."""
    await asyncio.sleep(task.record["sleep_s"])
    return float(len(response.text))
