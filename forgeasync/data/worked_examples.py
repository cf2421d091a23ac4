"""Worked examples: problems of ``chain_sum`` with every running sum, for the supervised warm-up.

"47 + 38 - 6 =" is answered with "47+38=85;85-6=79#79": one step per operator, then the answer. Responses are
therefore as long as their problem: 8 to about 80 tokens.
"""

import re

from forgeasync.data.task import Task

ANSWER_PREFIX = "#"
_EXPRESSION = re.compile(r": (?P<expression>.*) =$")


def worked_example(task: Task) -> str:
    """The response that works a ``chain_sum`` problem out.

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
    return ";".join(steps) + f"{ANSWER_PREFIX}{total}"
