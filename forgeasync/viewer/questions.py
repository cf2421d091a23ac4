"""The questions that an address can ask: which answer, and what is right in its parameters."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import TypeVar

from forgeasync.buffer import DropReason
from forgeasync.viewer.answers import MAX_GROUPS, Answer, Answers, NotThere
from forgeasync.viewer.group_lives import Fate

MAX_KEYS = 100
MAX_WIDTH = 4096

_MAX_NUMBER = 10**17

Question = Callable[[Answers], Answer]

E = TypeVar("E", bound=Enum)


class BadQuestion(ValueError):
    """A parameter is missing or wrong; the text names it, its value and what would be right."""


class Parameters:
    """The parameters of one address: each name with all of its values."""

    def __init__(self, values: Mapping[str, list[str]]) -> None:
        self._values = values

    def all(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def _one(self, name: str) -> str | None:
        found = self.all(name)
        if len(found) > 1:
            raise BadQuestion(f"{name} is given {len(found)} times; must be given once")
        return found[0] if found and found[0] != "" else None

    def number(self, name: str, *, default: int | None, below: int = _MAX_NUMBER) -> int | None:
        """A whole number from 0."""
        text = self._one(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) < 18 and int(text) < below):
            raise BadQuestion(f"{name} = {text[:40]!r}; must be a whole number from 0 to {below - 1}")
        return int(text)

    def required(self, name: str, *, below: int = _MAX_NUMBER) -> int:
        """A whole number from 0 that has to be there."""
        found = self.number(name, default=None, below=below)
        if found is None:
            raise BadQuestion(f"{name} is missing; must be a whole number from 0 to {below - 1}")
        return found

    def choice(self, name: str, choices: Mapping[str, E]) -> E | None:
        """One of a closed set of words."""
        text = self._one(name)
        if text is not None and text not in choices:
            raise BadQuestion(f"{name} = {text[:40]!r}; must be one of {', '.join(choices)}")
        return None if text is None else choices[text]

    def flag(self, name: str) -> bool:
        return bool(self.number(name, default=0, below=2))


def question_of(name: str, parameters: Parameters) -> Question:
    """Return the question of an address such as ``/api/groups?run=0``, whose name is ``groups``.

    Raises:
        NotThere: there is no such address.
        BadQuestion: a parameter is wrong, whatever the runs are.
    """
    if name not in _QUESTIONS:
        raise NotThere(f"there is no /api/{name[:40]}; there are {', '.join(_QUESTIONS)}")
    return _QUESTIONS[name](parameters)


def _curves(given: Parameters) -> Question:
    keys = given.all("key")
    if not 0 < len(keys) <= MAX_KEYS:
        raise BadQuestion(f"key is given {len(keys)} times; must be given 1 to {MAX_KEYS} times")
    width = given.number("width", default=400, below=MAX_WIDTH + 1)
    assert width is not None
    over_time, bands = given.flag("time"), given.flag("bands")
    return lambda answers: answers.curves(keys, width=max(width, 1), over_time=over_time, bands=bands)


def _groups(given: Parameters) -> Question:
    fate = given.choice("fate", {one.word: one for one in Fate})
    reason = given.choice("reason", {one.value: one for one in DropReason})
    step = given.number("step", default=None)
    skip = given.number("skip", default=0)
    limit = given.number("limit", default=50, below=MAX_GROUPS + 1)
    assert skip is not None and limit is not None
    return lambda answers: answers.groups(
        _run(given, answers), fate=fate, reason=reason, step=step, skip=skip, limit=limit
    )


def _group(given: Parameters) -> Question:
    group = given.required("group")
    return lambda answers: answers.group(_run(given, answers), group)


def _rollouts(given: Parameters) -> Question:
    step = given.required("step")
    return lambda answers: answers.rollouts(_run(given, answers), step)


def _rollout(given: Parameters) -> Question:
    number = given.required("number")
    return lambda answers: answers.rollout(_run(given, answers), number)


def _tokens(given: Parameters) -> Question:
    number = given.required("number")
    branch, skip = given.number("branch", default=0), given.number("skip", default=0)
    assert branch is not None and skip is not None
    return lambda answers: answers.tokens(_run(given, answers), number, branch=branch, skip=skip)


def _worst(given: Parameters) -> Question:
    step = given.required("step")
    return lambda answers: answers.worst(_run(given, answers), step)


def _lanes(given: Parameters) -> Question:
    width = given.number("width", default=400, below=MAX_WIDTH + 1)
    assert width is not None
    first, last = given.number("first", default=None), given.number("last", default=None)
    return lambda answers: answers.lanes(
        _run(given, answers), first_step=first, last_step=last, width=max(width, 1)
    )


def _run(given: Parameters, answers: Answers) -> int:
    found = given.number("run", default=0, below=answers.num_runs)
    assert found is not None
    return found


_QUESTIONS: dict[str, Callable[[Parameters], Question]] = {
    "runs": lambda given: Answers.runs,
    "metrics": lambda given: Answers.metrics,
    "glossary": lambda given: Answers.glossary,
    "curves": _curves,
    "groups": _groups,
    "group": _group,
    "rollouts": _rollouts,
    "rollout": _rollout,
    "tokens": _tokens,
    "worst": _worst,
    "lanes": _lanes,
    "faults": lambda given: lambda answers: answers.faults(_run(given, answers)),
    "settings": lambda given: Answers.settings,
}
