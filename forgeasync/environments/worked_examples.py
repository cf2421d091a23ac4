"""Examples for the supervised warm-up: problems of ``chain_sum`` worked out, or with a guess for an answer.

"7 + 8 - 3 =" is answered with "7+8=15;15-3=12#12": one step per operator, then the answer. Responses are
therefore as long as their problem: 8 to about 70 tokens.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forgeasync.config.run import WarmupSection
from forgeasync.rollouts.task import Task

ANSWER_PREFIX = "#"

_EXPRESSION = re.compile(r": (?P<expression>.*) =$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A response to imitate; ``weight`` says how often it counts."""

    task: Task
    response: str
    weight: float


def mixed_examples(tasks: Sequence[Task], warmup: WarmupSection, rng: random.Random) -> Iterator[Example]:
    """The examples of a step: guesses for the first ``num_guesses_per_step`` tasks, the rest worked out.

    All guesses together weigh ``direct_share`` of the step, however few they are.

    Raises:
        ValueError: a task is not a ``chain_sum`` problem.
    """
    num_guesses = warmup.num_guesses_per_step
    weight = 1.0
    if num_guesses:
        odds = warmup.direct_share / (1.0 - warmup.direct_share)
        weight = odds * (len(tasks) - num_guesses) / num_guesses
    for task in tasks[:num_guesses]:
        error = rng.randint(-warmup.guess_error, warmup.guess_error)
        yield Example(task=task, response=guess(task, error=error), weight=weight)
    for task in tasks[num_guesses:]:
        yield Example(task=task, response=worked_example(task), weight=1.0)


def worked_example(task: Task) -> str:
    """Write the response that works out a ``chain_sum`` problem.

    Raises:
        ValueError: the task is not a ``chain_sum`` problem.
    """
    match = _EXPRESSION.search(task.prompt)
    if match is None:
        raise ValueError(f"task {task.task_id!r} is no chain_sum problem: {task.prompt!r}")
    first, *rest = match["expression"].split(" ")
    total = int(first)
    steps = []
    for operator, operand in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(operand) if operator == "+" else total - int(operand)
        steps.append(f"{total}{operator}{operand}={result}")
        total = result
    return ";".join(steps) + guess(task, error=0)


def guess(task: Task, *, error: int) -> str:
    """Write the response that states an answer without working it out; it is off by ``error``."""
    return f"{ANSWER_PREFIX}{int(task.answer) + error}"
