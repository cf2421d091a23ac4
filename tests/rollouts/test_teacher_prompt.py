"""Prompts of teachers that know more than the policy."""

import pytest

from forgeasync.rollouts.task import Task
from forgeasync.rollouts.teacher_prompt import teacher_prompt

TASK = Task(
    task_id="t7",
    prompt="1+1 $x",
    answer="2",
    source_index=0,
    source="sums",
    record={"hint": "count {fingers}", "level": 3},
)


def test_what_the_task_has_is_filled_in_as_it_is() -> None:
    assert teacher_prompt("$hint ($level) $$ ${answer}: $prompt", TASK) == "count {fingers} (3) $ 2: 1+1 $x"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "$solution",
            r"has \$solution, which task t7 does not; .* \$prompt, \$answer, \$hint, \$level",
        ),
        ("5 $ each", r"is no template: .*; write \$\$ for a dollar sign"),
    ],
)
def test_what_it_does_not_have_is_said(template: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        teacher_prompt(template, TASK)
