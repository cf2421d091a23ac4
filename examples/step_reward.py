"""A process reward: scores every step of a worked sum, not only its answer.

    make demo-process

The model works out "7 + 8 - 3 =" as "7+8=15;15-3=12#12". A step ends with ``;``, or with ``#`` before the
answer. It gets 1 if it applies the problem's next number to the previous result correctly, otherwise 0. So a
correct step after a wrong one is still rewarded. The answer gets 1 if it equals the last result. A last step
that was cut off gets no reward, and its tokens have advantage 0. The outcome depends only on the answer of
the whole problem. The model's text is never executed: only numbers of up to nine digits are parsed.
"""

import re

import forgeasync as fa
from forgeasync.environments import ANSWER_PREFIX, worked_example

MAX_STEPS = 64
"""Maximum number of scored steps, which is more than any problem has."""

_RIGHT_STEP = re.compile(r"(?P<before>-?\d+)(?P<operator>[+-])(?P<operand>\d+)=(?P<result>-?\d+)")
_NUMBER = re.compile(r"-?[0-9]{1,9}")


def running_sum(task: fa.Task, response: fa.Response) -> fa.Score:
    """Return 1 for a right answer, and a reward per step; ``right_steps`` is the share of right steps."""
    right, _, right_answer = worked_example(task).partition(ANSWER_PREFIX)
    operations = [_RIGHT_STEP.fullmatch(step) for step in right.split(";")]
    worked, has_answer, answer = response.text.partition(ANSWER_PREFIX)
    is_right = bool(has_answer) and answer == right_answer
    steps: list[fa.Step] = []
    end, before = 0, operations[0]["before"] if operations[0] else ""
    for place, text in enumerate(worked.split(";")[:MAX_STEPS]):
        if end + len(text) >= len(response.text):
            break
        end += len(text) + 1
        operation = operations[place] if place < len(operations) else None
        is_sound = operation is not None and text == _sound_step(before, operation)
        steps.append(fa.Step(end=end, value=float(is_sound)))
        before = text.rpartition("=")[2]
    is_cut = response.finish_reason is fa.FinishReason.LENGTH
    # Every response with text needs a step, also one that was cut off in its first step.
    if end < len(response.text) and not (is_cut and steps):
        is_whole = len(steps) == len(operations)
        steps.append(fa.Step(end=len(response.text), value=float(is_whole and answer == before)))
    share = sum(step.value for step in steps) / max(len(operations) + 1, len(steps))
    return fa.Score(
        float(is_right),
        is_right,
        parts={"right_steps": share},
        steps=tuple(steps),
        has_answer=bool(has_answer),
    )


def _sound_step(before: str, operation: re.Match[str]) -> str | None:
    """Return the step that applies an operation to a result; None if the result is not a number."""
    if _NUMBER.fullmatch(before) is None:
        return None
    operand = int(operation["operand"])
    result = int(before) + (operand if operation["operator"] == "+" else -operand)
    return f"{before}{operation['operator']}{operation['operand']}={result}"
