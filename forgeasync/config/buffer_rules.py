"""Rules between the replay buffer's policies: settings that can never fill a batch or have no effect."""

from collections.abc import Iterator

from forgeasync.config.buffer import (
    AccountingPolicy,
    AgeOf,
    BatchOrder,
    Replacement,
    StaleGroups,
)
from forgeasync.config.run import RunConfig
from forgeasync.config.weights import Interruption
from forgeasync.schema import Problem


def check_buffer(config: RunConfig) -> Iterator[Problem]:
    """Check depth, order and age."""
    buffer, num_per_step = config.buffer, config.algorithm.groups_per_step
    if buffer.max_groups is not None and buffer.max_groups < num_per_step:
        yield Problem(
            field="buffer.max_groups",
            value=buffer.max_groups,
            remedy=f"must be at least algorithm.groups_per_step = {num_per_step}, one batch",
        )
    if buffer.stale_groups is StaleGroups.WAIT and buffer.order is not BatchOrder.DEADLINE:
        yield Problem(
            field="buffer.order",
            value=buffer.order.value,
            remedy=f"needs buffer.stale_groups = {StaleGroups.DROP.value!r}: a trainer that waits for every "
            f"group must take the one with the earliest deadline first ({BatchOrder.DEADLINE.value!r})",
        )
    if config.weights.interruption is Interruption.CANCEL_STALE and buffer.age_of is not AgeOf.OLDEST_TOKEN:
        yield Problem(
            field="buffer.age_of",
            value=buffer.age_of.value,
            remedy=f"must be {AgeOf.OLDEST_TOKEN.value!r} with weights.interruption = "
            f"{Interruption.CANCEL_STALE.value!r}: measured otherwise, a group that is too old can still "
            "become young enough",
        )


def check_accounting(config: RunConfig) -> Iterator[Problem]:
    """Check windows and replacements."""
    accounting, num_per_step = config.accounting, config.algorithm.groups_per_step
    if accounting.policy is AccountingPolicy.WINDOWED_FIFO:
        yield from _check_window(config)
    elif accounting.window_groups is not None:
        yield Problem(
            field="accounting.window_groups",
            value=accounting.window_groups,
            remedy=f"needs accounting.policy = {AccountingPolicy.WINDOWED_FIFO.value!r}",
        )
    if (
        accounting.policy is AccountingPolicy.EXACT
        and accounting.replacement is Replacement.WEIGHT
        and config.weights.interruption is Interruption.CANCEL_STALE
    ):
        yield Problem(
            field="accounting.replacement",
            value=accounting.replacement.value,
            remedy=f"cannot be used with weights.interruption = {Interruption.CANCEL_STALE.value!r}: the "
            "lengths that cancelled responses would have had are unknown; use "
            f"{Replacement.REISSUE.value!r}",
        )
    if accounting.metric_groups < num_per_step:
        yield Problem(
            field="accounting.metric_groups",
            value=accounting.metric_groups,
            remedy=f"must be at least algorithm.groups_per_step = {num_per_step}, one batch",
        )


def _check_window(config: RunConfig) -> Iterator[Problem]:
    window, num_per_step = config.accounting.window_groups, config.algorithm.groups_per_step
    age_bound = (config.max_off_policy_steps + 1) * num_per_step
    bound = min(age_bound, config.buffer.max_groups or age_bound)
    if window is None or window < num_per_step:
        yield Problem(
            field="accounting.window_groups",
            value=window,
            remedy=f"must be at least algorithm.groups_per_step = {num_per_step}: a batch takes all its "
            "groups from the window",
        )
    elif window > bound:
        yield Problem(
            field="accounting.window_groups",
            value=window,
            remedy=f"must be at most {bound}, the most groups that are ever under way "
            f"((max_off_policy_steps + 1) * groups_per_step = {age_bound}, buffer.max_groups = "
            f"{config.buffer.max_groups}); a larger window never holds anything back",
        )
    if config.buffer.stale_groups is StaleGroups.WAIT and config.buffer.age_of is not AgeOf.OLDEST_TOKEN:
        yield Problem(
            field="buffer.age_of",
            value=config.buffer.age_of.value,
            remedy=f"must be {AgeOf.OLDEST_TOKEN.value!r} with accounting.policy = "
            f"{AccountingPolicy.WINDOWED_FIFO.value!r} and buffer.stale_groups = {StaleGroups.WAIT.value!r}: "
            "measured otherwise, a group outside the window can be the most urgent one",
        )
