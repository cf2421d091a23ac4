"""The process reward that comes as an example: which steps are right, and what a cut one gets."""

import pytest

import forgeasync as fa
from examples.step_reward import MAX_STEPS, running_sum

TASK = fa.Task(
    task_id="t",
    prompt="State the final answer to the following arithmetic problem: 7 + 8 - 3 =",
    answer="12",
    source_index=0,
    source="chain_sum",
)
LONG = "9" * 5000
STOP, LENGTH = fa.FinishReason.STOP, fa.FinishReason.LENGTH


def scored(text: str, finish_reason: fa.FinishReason = STOP) -> fa.Score:
    return running_sum(TASK, fa.Response(text, max(1, len(text)), finish_reason))


@pytest.mark.parametrize(
    ("text", "finish_reason", "steps", "is_correct"),
    [
        ("7+8=15;15-3=12#12", STOP, [(7, 1.0), (15, 1.0), (17, 1.0)], True),
        # What follows a wrong step is looked at by itself.
        ("7+8=14;14-3=11#11", STOP, [(7, 0.0), (15, 1.0), (17, 1.0)], False),
        ("7+8=15;14-3=11#11", STOP, [(7, 1.0), (15, 0.0), (17, 1.0)], False),
        ("#12", STOP, [(1, 0.0), (3, 0.0)], True),
        ("7+8=15;15-3=12;12+0=12#12", STOP, [(7, 1.0), (15, 1.0), (23, 0.0), (25, 0.0)], True),
        # No number of ours, and one that is too long to be read.
        ("7+8=1e3;1e3-3=997#997", STOP, [(8, 0.0), (18, 0.0), (21, 1.0)], False),
        (f"7+8={LONG};{LONG}-3={LONG[1:]}6#6", STOP, [(5005, 0.0), (15009, 0.0), (15010, 0.0)], False),
        # Cut: the last step has no reward; where it is the only one, the response has one of 0.
        ("7+8=15;15-", LENGTH, [(7, 1.0)], False),
        ("7+8=1", LENGTH, [(5, 0.0)], False),
        # It ended without an answer.
        ("7+8=15", STOP, [(6, 0.0)], False),
        ("", STOP, [], False),
    ],
)
def test_every_step_that_has_ended_is_looked_at(
    text: str, finish_reason: fa.FinishReason, steps: list[tuple[int, float]], is_correct: bool
) -> None:
    score = scored(text, finish_reason)
    assert [(step.end, step.value) for step in score.steps] == steps
    assert score.is_correct is is_correct and score.value == float(is_correct)


def test_the_share_of_right_steps_and_the_bound_on_steps() -> None:
    assert scored("7+8=15;15-3=12#12").parts == {"right_steps": 1.0}
    assert scored("7+8=15;15-3=11#11").parts == {"right_steps": pytest.approx(2 / 3)}
    many = scored(";" * 10_000 + "#12")
    assert len(many.steps) == MAX_STEPS + 1 and many.is_correct
    assert many.parts["right_steps"] == 0.0
