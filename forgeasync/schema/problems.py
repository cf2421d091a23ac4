"""Problems with a run's input, in words that a person can act on."""

from collections.abc import Iterable
from dataclasses import dataclass

EXIT_FAILED = 1

EXIT_REFUSED = 2
"""Exit code of a program whose input was refused before it started anything."""

EXIT_SIGNAL = 128
"""Exit code of a program that was stopped by a signal, less the signal's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing to fix: the dotted field, its value (None where it has none) and what would be right."""

    field: str
    value: object = None
    remedy: str

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.field}: {self.remedy}"
        shown = repr(self.value)
        if len(shown) > MAX_SHOWN_CHARACTERS:
            shown = shown[:MAX_SHOWN_CHARACTERS] + "..."
        return f"{self.field} = {shown}: {self.remedy}"


MAX_SHOWN_CHARACTERS = 160
"""Longer values are cut in messages, so that a whole section given by mistake does not fill the screen."""


class ConfigError(ValueError):
    """The input of a run is wrong; the error's text has one line per problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def raise_if_any(problems: Iterable[Problem]) -> None:
    """Raise ``ConfigError`` with all of ``problems``, if there are any."""
    found = tuple(problems)
    if found:
        raise ConfigError(found)
