"""Examples for the supervised warm-up: ``chain_sum`` problems with a step-by-step solution or with a guess.

Without a tool, the solution of "7 + 8 - 3 =" is "7+8=15;15-3=12#12": one step per operator, then the answer.
With the tool of ``kind: python_tool``, each step is a call, whose result the tool writes: "[7+8]", "15;",
"[15-3]", "12;", "#12". The length of a solution therefore grows with the problem.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from forgeasync.config import PlainCalls, WarmupSection
from forgeasync.rollouts import Task, teacher_prompt

ANSWER_PREFIX = "#"
"""Text before the answer of a worked example."""

_EXPRESSION = re.compile(r": (?P<expression>.*) =$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a response."""

    text: str
    is_given: bool = False
    """Whether the environment writes the text. The model attends to it, but is not trained to write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A response to imitate, with its relative weight in the step."""

    task: Task
    pieces: tuple[Piece, ...]
    weight: float

    @property
    def response(self) -> str:
        """The text of all pieces."""
        return "".join(piece.text for piece in self.pieces)


def mixed_examples(
    tasks: Sequence[Task],
    warmup: WarmupSection,
    rng: random.Random,
    *,
    calls: PlainCalls | None = None,
    shown: str | None = None,
) -> Iterator[Example]:
    """Yield the examples of a step: guesses for the first ``num_guesses_per_step`` tasks, then solutions.

    All guesses together have the share ``direct_share`` of the step's weight, whatever their number is. With
    ``calls``, solutions consist of tool calls in this format. The last ``shown_per_step`` tasks get solutions
    after the prompt ``shown``, a teacher's template with ``$sibling``. They are not part of the step's
    shares.

    Raises:
        ValueError: A task is not a ``chain_sum`` problem.
    """
    num_guesses = warmup.num_guesses_per_step
    num_plain = len(tasks) - warmup.shown_per_step
    weight = 1.0
    if num_guesses:
        odds = warmup.direct_share / (1.0 - warmup.direct_share)
        weight = odds * (num_plain - num_guesses) / num_guesses
    for task in tasks[:num_guesses]:
        error = rng.randint(-warmup.guess_error, warmup.guess_error)
        yield Example(task=task, pieces=(Piece(text=guess(task, error=error)),), weight=weight)
    for task in tasks[num_plain:]:
        assert shown is not None, "as the rules of a config have checked"
        yield _shown_example(task, shown, rng)
    for task in tasks[num_guesses:num_plain]:
        if calls is None:
            worked = worked_example(task, slip=lambda: _slip(warmup, rng))
            pieces: tuple[Piece, ...] = (Piece(text=worked),)
        else:
            pieces = tool_example(task, calls)
        yield Example(task=task, pieces=pieces, weight=1.0)


def _shown_example(task: Task, template: str, rng: random.Random) -> Example:
    """Return the solution of a problem after a prompt with a correct response, which may be a guess."""
    worked = worked_example(task)
    sibling = rng.choice([worked, guess(task, error=0)])
    prompt = teacher_prompt(template, task, sibling=sibling)
    return Example(task=replace(task, prompt=prompt), pieces=(Piece(text=worked),), weight=1.0)


def _slip(warmup: WarmupSection, rng: random.Random) -> int:
    """Return the error of a step, with probability ``wrong_step_share`` of not being 0."""
    if not warmup.wrong_step_share or rng.random() >= warmup.wrong_step_share:
        return 0
    return rng.choice((-1, 1)) * rng.randint(1, warmup.guess_error)


def worked_example(task: Task, *, slip: Callable[[], int] = lambda: 0) -> str:
    """Return the step-by-step solution of a ``chain_sum`` problem; ``slip`` returns the error of each step.

    Raises:
        ValueError: The task is not a ``chain_sum`` problem.
    """
    steps = _steps(task, slip)
    worked = ";".join(f"{expression}={result}" for expression, result in steps)
    return f"{worked}{ANSWER_PREFIX}{steps[-1][1] if steps else task.answer}"


def tool_example(task: Task, calls: PlainCalls) -> tuple[Piece, ...]:
    """Return the turns that solve a ``chain_sum`` problem with a tool that runs Python, and its results.

    Raises:
        ValueError: The task is not a ``chain_sum`` problem.
    """
    pieces = []
    for expression, result in _steps(task):
        pieces += [
            Piece(text=calls.call(expression)),
            Piece(text=calls.result(str(result)), is_given=True),
        ]
    return (*pieces, Piece(text=guess(task, error=0)))


def guess(task: Task, *, error: int) -> str:
    """Return a response that has only an answer, which is wrong by ``error``."""
    return f"{ANSWER_PREFIX}{int(task.answer) + error}"


def _steps(task: Task, slip: Callable[[], int] = lambda: 0) -> list[tuple[str, int]]:
    """Return the additions and subtractions of a problem, each with its result."""
    match = _EXPRESSION.search(task.prompt)
    if match is None:
        raise ValueError(f"task {task.task_id!r} is not a chain_sum problem: {task.prompt!r}")
    first, *rest = match["expression"].split(" ")
    total = int(first)
    steps = []
    for operator, operand in zip(rest[::2], rest[1::2], strict=True):
        expression = f"{total}{operator}{operand}"
        total += (int(operand) if operator == "+" else -int(operand)) + slip()
        steps.append((expression, total))
    return steps
