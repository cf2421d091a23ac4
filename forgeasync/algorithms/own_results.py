"""Checks of the results of user code.

Checks that run for every row read no values of tensors, so that they do not wait for a device. Every check
returns its argument, or raises ``WrongResult`` with what was returned and what is expected.

Shape suffixes: T trained tokens of a row, G rollouts of a group (N of a batch).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from forgeasync.algorithms.group_facts import Filtered, FilterReason, GroupFacts

if TYPE_CHECKING:
    import torch


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
    return _one_a_token(result, like_T, "estimates", "estimate", "must return kl_T, an estimate a token")


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
        raise WrongResult(f"gave a {type(result).__name__}; must give a tensor, one advantage a reward")
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
