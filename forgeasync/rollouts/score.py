"""Tasks, and scores of responses.

Processes that verify answers import this module alone, so it must not import numpy.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Any

from forgeasync.config import PART_NAME_RULE, is_part_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem, with its prompt and reference answer.

        task = fa.Task(task_id="0", prompt="1 + 3 =", answer="4", source_index=0, source="sums")

    A data source makes tasks; make one yourself to test a reward or an environment.
    """

    task_id: str
    """Identifier of the task, unique within its source and stable across runs."""
    prompt: str
    """Text of the prompt, without a chat template."""
    answer: str
    """Reference answer."""
    source_index: int
    """Index of the task in its source."""
    source: str
    """Name of the data source."""
    record: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """All columns of the task's record that JSON can represent (``json_values``)."""


LARGEST = 1e30
"""Largest absolute value of a reward. Numbers computed from rewards of a batch must fit into float32."""


MAX_PARTS = 64
"""Maximum number of parts of a score, and of penalties. Each part becomes a metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Reward of one step of a response, for ``Score.steps``.

    Raises:
        ValueError: ``end`` is not a positive integer, or ``value`` is not a finite number up to ``LARGEST``.
    """

    end: int
    """Index of the character of the response's text before which the step ends."""
    value: float
    """Reward of the step."""

    def __post_init__(self) -> None:
        if isinstance(self.end, bool) or not isinstance(self.end, int) or self.end < 1:
            raise ValueError(f"end of a step must be a whole number of at least 1, not {self.end!r}")
        object.__setattr__(self, "value", _number(self.value, "the value of a step"))


MAX_SCORER_CHARS = 200
"""Maximum length of ``Score.scorer`` and ``Score.scorer_version``, in characters."""

MAX_FEEDBACK_CHARS = 4000
"""Maximum length of ``Score.feedback``, in characters."""


def as_feedback(text: str) -> str:
    """Turn any text into valid feedback for a ``Score``.

    Replaces the middle of a text longer than ``MAX_FEEDBACK_CHARS`` by a note with the number of characters
    left out. The beginning and the end stay, because messages begin with their subject, and the output of
    failed code ends with the error. Replaces each lone surrogate, which no tokenizer accepts, by a question
    mark.
    """
    text = text.encode(errors="replace").decode()
    if len(text) <= MAX_FEEDBACK_CHARS:
        return text
    # The note takes at most 100 characters.
    half = (MAX_FEEDBACK_CHARS - 100) // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


class ScoreStatus(StrEnum):
    """How a score was determined."""

    SCORED = "scored"
    """The response was verified or judged."""
    # With the others, the score is 0 because the response itself made its verification fail.
    TIMEOUT = "timeout"
    CRASH = "crash"
    ERROR = "error"
    OVERSIZED = "oversized"


@dataclass(frozen=True, slots=True)
class Score:
    """Reward of one response, and whether the response solves its task.

    Correctness is a separate field because rewards may have any scale up to ``LARGEST``.

        fa.Score(1.0, True)
        fa.Score(0.7, False, parts={"format": 0.2, "tests": 0.5}, has_answer=False)

    Raises:
        ValueError: A number is not finite or too large; a flag is not a bool; a part's name cannot be part of
            a metric's name; a penalty is negative; the ends of steps do not increase; or the feedback is too
            long or not valid Unicode. The message names the field and its value.
    """

    value: float
    """Reward with which the response trains."""
    is_correct: bool
    """Whether the response solves its task. Evaluations report the share of correct responses."""
    _: KW_ONLY
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Parts of the value by name. They are logged as ``reward/<name>`` and have no other effect."""
    steps: tuple[Step, ...] = ()
    """Rewards of the response's steps, with increasing ends. If empty, all tokens share the value."""
    penalties: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Penalties by name, at least 0, such as the share of failed tool calls. They do not change the reward;
    the filter ``resample_on_correct`` prefers responses with low penalties."""
    has_answer: bool = True
    """Whether the response states an answer. ``response/no_answer_share`` counts those that do not."""
    # The fields below do not affect equality.
    feedback: str = field(default="", compare=False)
    """Feedback on the response for a teacher's prompt (``$feedback``), up to ``MAX_FEEDBACK_CHARS``.

    For example a judge's reason, or the error message of executed code. Nothing else uses it.
    """
    status: ScoreStatus = field(default=ScoreStatus.SCORED, compare=False)
    """How the score was determined. Set by the scorer."""
    scorer: str = field(default="", compare=False)
    """Name of the reward that gave the score, several joined with ``+``. The scorer sets it if empty."""
    scorer_version: str = field(default="", compare=False)
    """Version of that reward, such as a package's version or a digest of code. Set by the scorer if empty."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _number(self.value, "a score"))
        for name, flag in (("is_correct", self.is_correct), ("has_answer", self.has_answer)):
            if not isinstance(flag, bool):
                raise ValueError(f"{name} of a score must be true or false, not {flag!r}")
        object.__setattr__(self, "status", ScoreStatus(self.status))
        for name, text in (("scorer", self.scorer), ("scorer_version", self.scorer_version)):
            if not isinstance(text, str) or len(text) > MAX_SCORER_CHARS:
                raise ValueError(
                    f"{name} of a score must be text of up to {MAX_SCORER_CHARS} characters, not {text!r}"[
                        :300
                    ]
                )
        _check_feedback(self.feedback)
        object.__setattr__(self, "parts", _numbers_by_name(self.parts, "parts"))
        penalties = _numbers_by_name(self.penalties, "penalties")
        for name, penalty in penalties.items():
            if penalty < 0.0:
                raise ValueError(f"penalties of a score must be at least 0; {name!r} is {penalty:g}")
        object.__setattr__(self, "penalties", penalties)
        steps = tuple(self.steps)
        if not all(isinstance(step, Step) for step in steps):
            raise ValueError(f"steps of a score must be a list of Step, not {self.steps!r}"[:200])
        ends = [step.end for step in steps]
        if any(one >= other for one, other in itertools.pairwise(ends)):
            raise ValueError(f"steps of a score must have increasing ends, not {ends}"[:200])
        object.__setattr__(self, "steps", steps)


def _check_feedback(feedback: object) -> None:
    if not isinstance(feedback, str):
        raise ValueError(f"feedback of a score must be text, not {feedback!r}"[:200])
    if len(feedback) > MAX_FEEDBACK_CHARS:
        raise ValueError(
            f"feedback of a score must have at most {MAX_FEEDBACK_CHARS} characters, not {len(feedback)}; "
            "fa.as_feedback leaves out the middle of a longer one"
        )
    if not feedback.isascii():
        try:
            feedback.encode()
        except UnicodeEncodeError as error:
            what = "must be text that UTF-8 can encode; fa.as_feedback converts any text"
            raise ValueError(f"feedback of a score {what}: {error}"[:300]) from None


def _number(value: object, what: str) -> float:
    """Return a finite real number as a float, since other types of numbers are not serialized as numbers."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{what} must be a number, not {value!r}"[:200])
    if not value <= LARGEST or value < -LARGEST:
        raise ValueError(f"{what} must be finite, at most {LARGEST:g}, not {str(value)[:40]}")
    return float(value)


def _numbers_by_name(numbers: object, what: str) -> dict[str, float]:
    if not isinstance(numbers, Mapping):
        raise ValueError(f"{what} of a score must be numbers by name, not {numbers!r}"[:200])
    if len(numbers) > MAX_PARTS:
        raise ValueError(f"{what} of a score must be at most {MAX_PARTS}, not {len(numbers)}")
    for name in numbers:
        if not is_part_name(name):
            raise ValueError(
                f"{what} of a score must have names of {PART_NAME_RULE}; not {str(name)[:110]!r}"
            )
    return {name: _number(value, f"{name!r} in {what} of a score") for name, value in numbers.items()}


NO_SCORE = Score(0.0, False)
"""Score of a response whose verification did not finish."""


NO_ANSWER = Score(0.0, False, has_answer=False)
"""Score of a response that states no answer."""


def steps_of(scores: Sequence[Score]) -> tuple[tuple[Step, ...], ...] | None:
    """Return the rewards of each rollout's steps; None if no rollout has any."""
    steps = tuple(score.steps for score in scores)
    return steps if any(steps) else None
