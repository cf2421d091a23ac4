"""Results of user code: the input and output of group filters, and checks of everything that users return.

Checks that run for every row read no values of tensors, so that they do not wait for a device. Every check
returns its argument, or raises ``WrongResult`` with what was returned and what is expected.

Shape suffixes: T trained tokens of a row, G rollouts of a group (N of a batch).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class FilterReason(StrEnum):
    """Reason why filters drop a whole group."""

    ALL_EQUAL = "all_equal"
    """All rewards are equal, so all advantages are 0."""
    LOW_SPREAD = "low_spread"
    """The standard deviation of the rewards is below a threshold."""
    OVERLONG = "overlong"
    """Fewer than two rollouts were not truncated."""
    NONE_KEPT = "none_kept"
    """A user-defined filter kept no rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """Facts about a scored group, the input of filters.

        >>> facts = fa.GroupFacts(rewards=(1.0, 0.0), lengths=(5, 9), is_truncated=(False, True))
        >>> facts.keep([0]).num_dropped
        1

    Each tuple has one entry for each rollout.
    """

    rewards: tuple[float, ...]
    """Reward of each rollout."""
    lengths: tuple[int, ...]
    """Number of response tokens of each rollout."""
    is_truncated: tuple[bool, ...]
    """Whether each rollout was cut at its maximum length."""
    penalties: tuple[float, ...] | None = None
    """Penalties of each rollout outside the reward, at least 0, such as the share of failed tool calls.

    None means 0 for all.
    """

    def __post_init__(self) -> None:
        num = len(self.rewards)
        assert num > 0 and len(self.lengths) == len(self.is_truncated) == num
        assert self.penalties is None or (len(self.penalties) == num and min(self.penalties) >= 0.0)

    @property
    def size(self) -> int:
        """Number of rollouts in the group."""
        return len(self.rewards)

    def keep(self, kept: Sequence[int], rewards: Sequence[float] | None = None) -> Filtered:
        """Return the decision to keep the rollouts at the indices ``kept``.

        If ``kept`` is empty, the decision is to drop the group for ``FilterReason.NONE_KEPT``.

        Args:
            kept: Indices of rollouts, increasing.
            rewards: Rewards with which the kept rollouts train. None: their rewards in these facts.

        Raises:
            ValueError: The number of rewards is not that of the kept rollouts.
        """
        if len(kept) == 0:
            return self.drop(FilterReason.NONE_KEPT)
        return Filtered(
            kept=tuple(kept),
            rewards=tuple([self.rewards[index] for index in kept] if rewards is None else rewards),
            reason=None,
            num_dropped=self.size - len(kept),
        )

    def drop(self, reason: FilterReason) -> Filtered:
        """Return the decision to drop the whole group."""
        return Filtered(kept=(), rewards=(), reason=reason, num_dropped=self.size)

    def take(self, kept: Sequence[int], rewards: tuple[float, ...]) -> GroupFacts:
        """Return the facts of the rollouts at these indices, with other rewards."""
        return GroupFacts(
            rewards=rewards,
            lengths=tuple(self.lengths[index] for index in kept),
            is_truncated=tuple(self.is_truncated[index] for index in kept),
            penalties=None if self.penalties is None else tuple(self.penalties[index] for index in kept),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """Decision of a filter about a group.

    Raises:
        ValueError: The fields contradict each other.
    """

    kept: tuple[int, ...]
    """Indices of the rollouts to train on, increasing; empty if the whole group is dropped."""
    rewards: tuple[float, ...]
    """Rewards of the kept rollouts."""
    reason: FilterReason | None
    """Reason why the whole group is dropped; None if any rollout is kept."""
    num_dropped: int
    """Number of rollouts left out, all of them if the group is dropped."""

    def __post_init__(self) -> None:
        if len(self.kept) != len(self.rewards):
            raise ValueError(
                f"{len(self.rewards)} rewards for {len(self.kept)} kept rollouts; must be one each"
            )
        if (self.reason is None) != (len(self.kept) > 0):
            raise ValueError(
                f"{len(self.kept)} rollouts are kept, and the reason to drop the group is {self.reason}; a "
                "reason must be given exactly if none is kept"
            )


class WrongResult(ValueError):
    """User code returned something that cannot be used."""


LOSSES_EXPECTED = "must return (losses_T, sums): a loss for every token, and scalars by name"
WEIGHTS_EXPECTED = "must return (weights_T, sums): a weight for every token, and scalars by name"


def check_losses(result: object, *, like_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Check the losses and sums that an objective returned for the tokens of ``like_T`` [T]."""
    values, sums = _pair(result, LOSSES_EXPECTED)
    losses_T = _one_a_token(values, like_T, "losses", "loss", LOSSES_EXPECTED)
    return losses_T, _scalars(sums, LOSSES_EXPECTED)


def check_weights(result: object, *, like_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Check the weights and sums that a correction returned for the tokens of ``like_T`` [T]."""
    values, sums = _pair(result, WEIGHTS_EXPECTED)
    weights_T = _one_a_token(values, like_T, "weights", "weight", WEIGHTS_EXPECTED)
    if weights_T.requires_grad:
        raise WrongResult("its weights have a gradient; must be detached, as weights are not trained")
    return weights_T, _scalars(sums, WEIGHTS_EXPECTED)


def check_estimates(result: object, *, like_T: torch.Tensor) -> torch.Tensor:
    """Check the estimates that a KL estimator returned for the tokens of ``like_T`` [T]."""
    return _one_a_token(result, like_T, "estimates", "estimate", "must return kl_T, one estimate per token")


def check_scalar(result: object, method: str) -> torch.Tensor:
    """Check that a method of an aggregation returned a scalar tensor."""
    import torch

    if not isinstance(result, torch.Tensor):
        raise WrongResult(f"its {method} gave a {type(result).__name__}; must give a scalar tensor")
    if result.ndim:
        raise WrongResult(f"its {method} gave the shape {list(result.shape)}; must give a scalar tensor")
    return result


def check_advantages(result: object, *, rewards_G: torch.Tensor) -> torch.Tensor:
    """Check that the advantages have the shape of the rewards [G], and are finite floating-point numbers."""
    import torch

    if not isinstance(result, torch.Tensor):
        raise WrongResult(f"gave a {type(result).__name__}; must return a tensor, one advantage per reward")
    if result.shape != rewards_G.shape:
        raise WrongResult(
            f"gave advantages of shape {list(result.shape)} for {len(rewards_G)} rewards; must be "
            f"[{len(rewards_G)}]"
        )
    if not result.is_floating_point():
        raise WrongResult(f"gave advantages of {result.dtype}; must be floating-point numbers")
    if not bool(result.isfinite().all()):
        raise WrongResult(f"gave advantages {shown(result)} for rewards {shown(rewards_G)}; must be finite")
    return result


def check_filtered(result: object, *, facts: GroupFacts) -> Filtered:
    """Check the result of a filter for a group."""
    if not isinstance(result, Filtered):
        raise WrongResult(f"gave a {type(result).__name__}; must give what facts.keep or facts.drop does")
    if result.reason is not None and not isinstance(result.reason, FilterReason):
        raise WrongResult(
            f"drops a group for the reason {result.reason!r}; must be one of fa.FilterReason: "
            f"{', '.join(reason.name for reason in FilterReason)}"
        )
    kept = list(result.kept)
    if kept != sorted(set(kept)) or not all(0 <= index < facts.size for index in kept):
        raise WrongResult(
            f"keeps the rollouts {kept} of {facts.size}; must be different ones, in increasing order"
        )
    if not all(map(math.isfinite, result.rewards)):
        raise WrongResult(f"gives the rewards {list(result.rewards)}; must be finite")
    return result


def _pair(result: object, expected: str) -> tuple[object, object]:
    import torch

    if isinstance(result, tuple) and len(result) == 2:
        return result
    found = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
    if isinstance(result, torch.Tensor):
        found += f" of shape {list(result.shape)}"
    raise WrongResult(f"returned {found}; {expected}")


def _one_a_token(values: object, like_T: torch.Tensor, plural: str, one: str, expected: str) -> torch.Tensor:
    import torch

    if not isinstance(values, torch.Tensor):
        raise WrongResult(f"its {plural} are a {type(values).__name__}; {expected}")
    if values.shape != like_T.shape:
        # A scalar would be broadcast, and thus counted once for every token.
        raise WrongResult(
            f"its {plural} have shape {list(values.shape)} on {len(like_T)} tokens; must be "
            f"[{len(like_T)}], one {one} for every token: masking and averaging come after"
        )
    if not values.is_floating_point():
        raise WrongResult(f"its {plural} are {values.dtype}; must be floating-point numbers")
    return values


def _scalars(sums: object, expected: str) -> dict[str, torch.Tensor]:
    import torch

    if not isinstance(sums, Mapping):
        raise WrongResult(f"its sums are a {type(sums).__name__}; {expected}")
    for name, value in sums.items():
        if not isinstance(name, str):
            raise WrongResult(
                f"its sums have a key {name!r}; must be names of metrics, such as 'objective/gate'"
            )
        if isinstance(value, torch.Tensor) and value.ndim:
            raise WrongResult(
                f"its sum {name!r} has shape {list(value.shape)}; must be a scalar, summed over masked tokens"
            )
        if not isinstance(value, torch.Tensor | int | float):
            raise WrongResult(f"its sum {name!r} is a {type(value).__name__}; must be a scalar tensor")
    return dict(sums)


def shown(values: torch.Tensor) -> str:
    """Format the values with three digits, for messages."""
    return "[" + ", ".join(f"{value:.3g}" for value in values.detach().double().tolist()) + "]"
