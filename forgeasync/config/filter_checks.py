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
from forgeasync.config.schema import AdvantageName, RunConfig
from forgeasync.config.sizes import longest_response


def check_groups(config: RunConfig) -> Iterator[Problem]:
    """What becomes of a scored group: its filters, and an advantage that needs so many rollouts of it."""
    yield from check_filters(
        config.algorithm.filters,
        field="algorithm.filters",
        group_size=config.algorithm.group_size,
        max_response_tokens=longest_response(config),
    )
    yield from _check_pass_at_k(config)


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
    if start >= max_response_tokens:
        yield Problem(
            field=f"{field}.max_length",
            value=section.max_length,
            remedy=f"the penalty starts after {start} tokens, but responses have at most "
            f"{max_response_tokens} (sampling.max_response_tokens; with an environment "
            "model.max_context_length); max_length * (1 - buffer_share) must be less",
        )


def _check_pass_at_k(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.advantage is not AdvantageName.GROUP_PASS_AT_K:
        if algorithm.pass_at_k is not None:
            yield Problem(
                field="algorithm.pass_at_k",
                value=algorithm.pass_at_k,
                remedy=f"needs algorithm.advantage = {AdvantageName.GROUP_PASS_AT_K.value!r}",
            )
        return
    # Filters leave a group with fewer rollouts than were sampled.
    smallest = algorithm.group_size
    for section in algorithm.filters:
        if isinstance(section, OverlongFilterSection):
            smallest = min(smallest, 2)
        elif isinstance(section, ResampleOnCorrectSection):
            smallest = min(smallest, section.num_kept)
    if algorithm.pass_at_k is None or algorithm.pass_at_k > smallest:
        yield Problem(
            field="algorithm.pass_at_k",
            value=algorithm.pass_at_k,
            remedy=f"must be from 1 to {smallest}, the fewest rollouts of a group that algorithm.group_size "
            "and algorithm.filters leave",
        )
