"""Answers of a model compared with the task's, without evaluating anything."""

import dataclasses
import time
from typing import Any

import pytest

from forgeasync.config import AnswerCheck
from forgeasync.environments import AnswerChecker
from forgeasync.environments.tool_environments import MAX_READ_CHARACTERS
from forgeasync.rollouts import NO_ANSWER
from tests.support.buffer_world import make_task


def value(text: str, answer: str, **section: Any) -> float | None:
    """The score of a text; None where it states no answer."""
    task = dataclasses.replace(make_task(3), answer=answer)
    score = AnswerChecker(AnswerCheck.model_validate(section)).score(task, text)
    assert score.is_correct == (score.value == 1.0)
    return None if score == NO_ANSWER else score.value


@pytest.mark.parametrize(
    ("text", "answer", "section", "worth"),
    [
        (" 15\n", "15", {}, 1.0),
        ("15.0", "15", {}, 0.0),
        ("#1 no, #15", "15", {"prefix": "#"}, 1.0),
        ("15", "15", {"prefix": "#"}, None),
        ("It is 15.", "15", {}, 0.0),
        ("It is 15.", "15", {"part": "last_number"}, 1.0),
        ("It is 1,234,567.", "1234567", {"part": "last_number"}, 1.0),
        ("no idea", "15", {"part": "last_number"}, None),
        ("15.00", "15", {"match": "number"}, 1.0),
        ("1,200.50", "1200.5", {"match": "number"}, 1.0),
        ("-0", "0", {"match": "number"}, 1.0),
        (".5", "0.5", {"match": "number"}, 1.0),
        ("0.1000000000000000000001", "0.1", {"match": "number"}, 0.0),
        ("2**64", "2", {"match": "number"}, 0.0),
        ("1e3", "1000", {"match": "number"}, 0.0),
        ("nan", "1", {"match": "number"}, 0.0),
        ("10**10**10", "1", {"match": "number"}, 0.0),
        ("", "1", {"match": "number"}, 0.0),
        ("١٥", "15", {"match": "number"}, 0.0),
        ("so 7 + 8 = 15.0", "15", {"match": "number", "part": "last_number"}, 1.0),
        ("x" * MAX_READ_CHARACTERS + "#15", "15", {"prefix": "#"}, 1.0),
        ("#15" + "x" * MAX_READ_CHARACTERS, "15", {"prefix": "#"}, None),
    ],
)
def test_answers(text: str, answer: str, section: dict[str, Any], worth: float | None) -> None:
    assert value(text, answer, **section) == worth


def test_a_task_without_a_number_cannot_be_compared_by_numbers() -> None:
    with pytest.raises(ValueError, match="answer 'Paris', which is no number"):
        value("1", "Paris", match="number")


@pytest.mark.parametrize("piece", ["1", "1,", "-", "1,111", ".", " -1"])
def test_hostile_texts_take_time_in_proportion(piece: str) -> None:
    text = piece * (2 * MAX_READ_CHARACTERS)
    start_s = time.process_time()
    value(text, "15", match="number", part="last_number")
    # A quadratic search would take minutes.
    assert time.process_time() - start_s < 5.0
