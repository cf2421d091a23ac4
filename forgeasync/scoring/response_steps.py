"""The steps of a response: its text, divided at a separator. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenStep:
    """One step of a response."""

    text: str
    """Its text, without the separator."""
    end: int
    """Number of characters up to its end in the response, the separators behind it included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSteps:
    """What a response consists of."""

    whole: tuple[WrittenStep, ...]
    """Steps that have ended, each with a text that is not blank."""
    has_cut_step: bool
    """Whether another step follows them that was cut off."""


def written_steps(text: str, separator: str, *, is_cut: bool) -> WrittenSteps:
    """Divide a response into its steps.

    A step ends where a separator begins; the last one ends with the response, unless the response was cut off
    inside it. Separators in a row, and pieces of white space between them, make no step: they belong to the
    step before, those at the beginning to the first step.
    """
    pieces = text.split(separator)
    whole: list[WrittenStep] = []
    end = 0
    for index, piece in enumerate(pieces):
        is_last = index == len(pieces) - 1
        end += len(piece) + (0 if is_last else len(separator))
        if not piece.strip():
            if whole and not (is_last and is_cut):
                whole[-1] = WrittenStep(text=whole[-1].text, end=end)
        elif is_last and is_cut:
            return WrittenSteps(whole=tuple(whole), has_cut_step=True)
        else:
            whole.append(WrittenStep(text=piece, end=end))
    return WrittenSteps(whole=tuple(whole), has_cut_step=False)
