"""Rules across the fields of filters, and between them and the rest of a run."""

from collections.abc import Iterator, Sequence

from forgeasync.config.filter_schema import (
    DynamicSamplingSection,
    FilterSection,
    OverlongFilterSection,
    OverlongPenaltySection,
    ResampleOnCorrectSection,
)
from forgeasync.config.problems import Problem


def check_filters(
    sections: Sequence[FilterSection], *, field: str, group_size: int, max_response_tokens: int
) -> Iterator[Problem]:
    """Filters that cannot work or never do anything; ``field`` is where their list stands in the config."""
    for index, section in enumerate(sections):
        match section:
            case OverlongPenaltySection():
                yield from _check_penalty(section, f"{field}.{index}", max_response_tokens)
            case DynamicSamplingSection() | OverlongFilterSection() if group_size < 2:
                yield Problem(
                    field="algorithm.group_size",
                    value=group_size,
                    remedy=f"must be at least 2 with the filter {section.kind!r} ({field}.{index}), which "
                    "drops every group of 1: the run would starve",
                )
            case ResampleOnCorrectSection() if section.num_kept >= group_size:
                yield Problem(
                    field=f"{field}.{index}.num_kept",
                    value=section.num_kept,
                    remedy=f"must be less than algorithm.group_size ({group_size}), or nothing is left out",
                )


def _check_penalty(
    section: OverlongPenaltySection, field: str, max_response_tokens: int
) -> Iterator[Problem]:
    start = section.max_length - section.buffer
    if start < 0:
        yield Problem(
            field=f"{field}.buffer",
            value=section.buffer,
            remedy=f"must be at most max_length ({section.max_length})",
        )
    elif start >= max_response_tokens:
        yield Problem(
            field=f"{field}.max_length",
            value=section.max_length,
            remedy=f"the penalty starts after {start} tokens, but responses are cut at "
            f"sampling.max_response_tokens = {max_response_tokens}; max_length - buffer must be less",
        )
