"""A task, the score of a response to it, and counts of responses that could not be verified.

Processes that verify answers import this module alone: it needs no numpy.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import StrEnum
from numbers import Real
from typing import Any

from forgeasync.config import PART_NAME_RULE, is_part_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem.

    ``task_id`` is unique within a source and stable across runs; ``prompt`` is the text before any
    chat template; ``answer`` is the reference; ``source_index`` finds the problem again in its source, whose
    name is ``source``; ``record`` has all columns of its record that JSON can hold (``json_values``).
    """

    task_id: str
    prompt: str
    answer: str
    source_index: int
    source: str
    record: Mapping[str, Any] = field(default_factory=dict, hash=False)


LARGEST = 1e30
"""Largest reward: numbers that groups and batches compute from rewards must fit into float32."""


MAX_PARTS = 64
"""Most parts and most penalties of a score: every part is a metric, and every penalty is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The reward of one step of a response, which ends before character ``end`` of its text.

    Raises ValueError, naming the value, where ``end`` is no whole number above 0 or ``value`` is no finite
    number up to ``LARGEST``.
    """

    end: int
    value: float

    def __post_init__(self) -> None:
        if isinstance(self.end, bool) or not isinstance(self.end, int) or self.end < 1:
            raise ValueError(f"end of a step must be a whole number of at least 1, not {self.end!r}")
        object.__setattr__(self, "value", _number(self.value, "the value of a step"))


MAX_SCORER_CHARS = 200
"""Longest name or version of what has scored."""

MAX_FEEDBACK_CHARS = 4000
"""Longest feedback of a score."""


def as_feedback(text: str) -> str:
    """Make any text a feedback: what is too long loses its middle, and says how much.

    A message has what it is about at its beginning, and output of code that failed has the error at its end.
    Half of a surrogate pair, which no tokenizer takes, becomes a question mark.
    """
    text = text.encode(errors="replace").decode()
    if len(text) <= MAX_FEEDBACK_CHARS:
        return text
    # The mark itself takes 100 characters at most.
    half = (MAX_FEEDBACK_CHARS - 100) // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


class ScoreStatus(StrEnum):
    """How a score came about."""

    SCORED = "scored"
    """The response was read and judged."""
    # The others score 0 because the response could not be verified, which is the response's doing.
    TIMEOUT = "timeout"
    CRASH = "crash"
    ERROR = "error"
    OVERSIZED = "oversized"


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one response, and whether the response solves its task.

    A score says for itself whether it is correct: rewards may have any scale up to ``LARGEST``.

        Score(1.0, True)
        Score(0.7, False, parts={"format": 0.2, "tests": 0.5}, has_answer=False)

    Raises ValueError, naming the field and its value, where a number is not finite or too large, a flag is no
    bool, a part's name cannot be a metric's, a penalty is negative, steps do not follow each other, or the
    feedback is too long or no Unicode.
    """

    value: float
    """The reward that the response is trained with."""
    is_correct: bool
    """Whether the response solves its task; evaluations count this."""
    _: KW_ONLY
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Parts of the value by name: logged as ``reward/<name>`` and used for nothing else."""
    steps: tuple[Step, ...] = ()
    """Rewards of the response's steps, with increasing ends; if empty, the value counts for all tokens alike.
    """
    penalties: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Penalties by name, at least 0, such as the share of tool calls that failed. They change no reward;
    filter ``resample_on_correct`` prefers responses with low ones."""
    has_answer: bool = True
    """False if the response never states an answer; counted in ``response/no_answer_share``."""
    # Scores are equal whoever has given them, and in whatever words.
    feedback: str = field(default="", compare=False)
    """What the reward has to say about the response, such as a judge's reason or the error of code that was
    run; up to ``MAX_FEEDBACK_CHARS`` characters. A teacher can read it (``$feedback``), nothing else does."""
    status: ScoreStatus = field(default=ScoreStatus.SCORED, compare=False)
    """How the score came about; the scorer sets it."""
    scorer: str = field(default="", compare=False)
    """Name of the reward that has scored, of several with ``+`` between them; the scorer sets it where a
    reward leaves it empty."""
    scorer_version: str = field(default="", compare=False)
    """Version of what has scored, such as that of a package or a digest of code, as for ``scorer``."""

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
            what = "must be text that UTF-8 can encode; fa.as_feedback makes any text such"
            raise ValueError(f"feedback of a score {what}: {error}"[:300]) from None


def _number(value: object, what: str) -> float:
    """``value`` as a float: other kinds of numbers are not written to files as such."""
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
"""The score of a response whose verification was cut off."""


NO_ANSWER = Score(0.0, False, has_answer=False)
"""The score of a response that states no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierCounts:
    """Answers since the scorer began that scored 0 because they could not be verified."""

    num_timeouts: int = 0
    """Verifications that were cut off at ``scorer.answer_limit_s``."""
    num_crashes: int = 0
    """The process that verified them died, for instance of ``scorer.answer_memory_mib``."""
    num_errors: int = 0
    """Their verifier raised an exception, or gave no finite number from -1 to 1."""
    num_oversized: int = 0
    """Longer than what scores them is given to read."""
    num_killed_rewards: int = 0
    """Processes of a user's own rewards and of process reward models that were killed because a call did not
    end."""
    num_judge_requests: int = 0
    num_judge_cached: int = 0
    """Responses whose verdicts were there already."""
    num_judge_malformed: int = 0
    """Replies of judges that were no verdicts."""
    num_judge_down: int = 0
    """Requests to judges that had no answer, or status 429 or 5xx."""

    def __add__(self, other: "VerifierCounts") -> "VerifierCounts":
        """The counts of two scorers."""
        return VerifierCounts(
            **{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)}
        )

    def merged(self, other: "VerifierCounts") -> "VerifierCounts":
        """The later of two states of the same counts: they only rise."""
        return VerifierCounts(
            **{one.name: max(getattr(self, one.name), getattr(other, one.name)) for one in fields(self)}
        )

    def metrics(self) -> dict[str, float]:
        """Return metrics under their names in metrics.jsonl."""
        return {f"scoring/{one.name}": getattr(self, one.name) for one in fields(self)}


def steps_of(scores: Sequence[Score]) -> tuple[tuple[Step, ...], ...] | None:
    """Return the rewards of steps of every rollout; None where no rollout has any."""
    steps = tuple(score.steps for score in scores)
    return steps if any(steps) else None
