"""A process reward: every step of a worked sum is looked at, not only its answer.

    make demo-process

The model works "7 + 8 - 3 =" out as "7+8=15;15-3=12#12". What is right at every step follows from the
problem. Each step that has ended (with ``;``, or with ``#`` before the answer) gets 1 if its text is right,
else 0; so does the answer. A last step that was cut off gets nothing: its tokens have advantage 0. Nothing
that the model wrote is evaluated.
"""

import forgeasync as fa
from forgeasync.environments.worked_examples import ANSWER_PREFIX, worked_example

MAX_STEPS = 64
"""More than any problem has; steps behind them have no reward of their own."""


def running_sum(task: fa.Task, response: fa.Response) -> fa.Score:
    """1 for a right answer, with the reward of every step beside it; ``right_steps`` is their share."""
    *right, right_answer = worked_example(task).replace(ANSWER_PREFIX, ";").split(";")
    worked, has_answer, answer = response.text.partition(ANSWER_PREFIX)
    is_right = bool(has_answer) and answer == right_answer
    steps: list[fa.Step] = []
    end = 0
    for place, text in enumerate(worked.split(";")[:MAX_STEPS]):
        if end + len(text) < len(response.text):
            end += len(text) + 1
            steps.append(fa.Step(end=end, value=float(place < len(right) and text == right[place])))
    is_cut = response.finish_reason is fa.FinishReason.LENGTH
    # Every response with a text needs a step, also one that was cut in its first.
    if end < len(response.text) and not (is_cut and steps):
        steps.append(fa.Step(end=len(response.text), value=float(is_right)))
    share = sum(step.value for step in steps) / max(len(right) + 1, len(steps))
    return fa.Score(
        float(is_right),
        is_right,
        parts={"right_steps": share},
        steps=tuple(steps),
        has_answer=bool(has_answer),
    )
