"""Worked examples: problems of ``chain_sum`` with every running sum, for the supervised warm-up.

"47 + 38 - 6 =" is answered with "47+38=85;85-6=79#79": one step per operator, then the answer. Responses are
therefore as long as their problem: 8 to about 80 tokens.
"""

import random
import re

from forgeasync.data.task import Task

ANSWER_PREFIX = "#"
_SLIPS = (-3, -2, -1, 1, 2, 3)
_EXPRESSION = re.compile(r": (?P<expression>.*) =$")


def worked_example(task: Task, *, slip_rate: float = 0.0, rng: random.Random | None = None) -> str:
    """The response that works a ``chain_sum`` problem out.

    With a ``slip_rate`` (and an ``rng`` to draw from) that share of the running sums is off by up to three,
    and the rest of the response goes on from there.

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
        if rng is not None and rng.random() < slip_rate:
            result += rng.choice(_SLIPS)
        steps.append(f"{total}{operator}{operand}={result}")
        total = result
    return ";".join(steps) + f"{ANSWER_PREFIX}{total}"
