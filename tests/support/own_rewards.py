"""Rewards and sources as a user would write them, good and bad ones."""

import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence

from forgeasync.environments import Response, Reward
from forgeasync.rollouts import Score, Step, Task, as_feedback


def length(task: Task, response: Response) -> float:
    return float(response.num_tokens)


def odd_length(task: Task, response: Response) -> float:
    """Correct where the number of tokens is odd: nobody has to be able to do anything."""
    return float(response.num_tokens % 2)


def strange(task: Task, response: Response) -> object:
    """Does what the response says."""
    match response.text:
        case "raise":
            return task.record["no such column"]
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "bool":
            return True
        case "none":
            return None
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(7)
        case "hang":
            while True:
                pass
        case "print":
            print('{"call": 0, "scores": []}', flush=True)
    return 0.5


async def slow(task: Task, response: Response) -> float:
    """Waits for ever, or until so many wait, where the response says so; or keeps everybody waiting."""
    if response.text == "hang":
        await asyncio.Event().wait()
    if response.text == "block":
        time.sleep(3600)
    if response.text == "own timeout":
        raise TimeoutError("the judge did not answer")
    how, _, num_others = response.text.partition(" ")
    if how == "meet":
        _waiting.append(response.text)
        while len(_waiting) < int(num_others):
            await asyncio.sleep(0.001)
    return 1.0


_waiting: list[str] = []


async def crowd(task: Task, response: Response) -> float:
    """The number of calls that run at once, this one included."""
    _inside.append(response.text)
    await asyncio.sleep(0.02)
    num_inside = len(_inside)
    _inside.remove(response.text)
    return float(num_inside)


_inside: list[str] = []


class Judge(Reward):
    """Compares with a column of the record, and remembers how often it was asked."""

    def __init__(self, column: str, bonus: float = 0.0) -> None:
        self._column = column
        self._bonus = bonus
        self._num_calls = 0

    async def __call__(self, task: Task, response: Response) -> Score:
        self._num_calls += 1
        is_right = response.text == str(task.record[self._column])
        parts = {"right": float(is_right), "num_calls": self._num_calls}
        return Score(is_right + self._bonus, is_right, parts=parts, has_answer=bool(response.text))


def ranks(task: Task, responses: Sequence[Response], scale: float = 1.0) -> Sequence[float | Score]:
    """The shortest is best; one too few where a response says so."""
    if any(response.text == "lose one" for response in responses):
        return [0.0] * (len(responses) - 1)
    if any(response.text == "nan" for response in responses):
        return [0.0, float("nan"), 0.0]
    order = sorted(range(len(responses)), key=lambda index: responses[index].num_tokens)
    return [Score(scale * -order.index(index), not order.index(index)) for index in range(len(responses))]


def steps(task: Task, response: Response) -> Score:
    return Score(1.0, True, steps=(Step(end=1, value=1.0),), penalties={"tools": 0.5})


def fails_at_once(task: Task, response: Response) -> float:
    return 1.0 / task.source_index * 0.0 + task.record["difficulty"]


def exits_at_import(task: Task) -> float:
    return 0.0


def counting(split: str, seed: int, first: int = 0) -> Iterator[dict[str, object]]:
    """Endless sums; training and held-out problems overlap in every tenth."""
    number = first
    while True:
        number += 1
        shared = number % 10 == 0
        text = f"{number} + 1 =" if shared else f"{split} {seed}: {number} + 1 ="
        yield {"question": text, "answer": number + 1, "difficulty": number / 2, "picture": b"bytes"}


def three(split: str, seed: int) -> list[dict[str, object]]:
    return [{"question": f"{split} {index}", "answer": str(index)} for index in range(3)]


def broken(split: str, seed: int) -> Iterator[dict[str, object]]:
    yield {"question": "1", "answer": "1"}
    raise KeyError("column")


def wordless(split: str, seed: int) -> list[dict[str, object]]:
    return [{"question": "1"}]


async def slow_value(task: Task, response: Response) -> float:
    """Reads the value out of the response, in a while."""
    await asyncio.sleep(0.1)
    return float(response.text)


def explains(task: Task, response: Response) -> Score:
    """Says what is wrong, in as many words as the response has; of a wrong one only."""
    is_right = response.text == task.answer
    feedback = "" if is_right else as_feedback(f"not {response.text}")
    return Score(float(is_right), is_right, feedback=feedback)
