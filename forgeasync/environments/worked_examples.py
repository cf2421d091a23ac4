"""Worked examples: problems of ``chain_sum`` with every running sum, for the supervised warm-up.

"7 + 8 - 3 =" is answered with "7+8=15;15-3=12#12": one step per operator, then the answer. Responses are
therefore as long as their problem: 8 to about 70 tokens.
"""

import re

from forgeasync.rollouts.task import Task

ANSWER_PREFIX = "#"

_EXPRESSION = re.compile(r": (?P<expression>.*) =$")


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
