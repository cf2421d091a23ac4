"""Calls your own code on synthetic input, so that its errors show before a run starts.

Shape suffixes: T tokens, G rollouts of a group.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from forgeasync.algorithms import (
    GroupFacts,
    PythonAdvantage,
    PythonAggregation,
    PythonCorrection,
    PythonFilter,
    PythonKlEstimator,
    PythonObjective,
    RowTokens,
    WrongResult,
    shown,
)
from forgeasync.config.algorithm import AlgorithmSection
from forgeasync.schema import PythonCode, Refusal, build_code

T = TypeVar("T")


def check_own_code(algorithm: AlgorithmSection) -> Iterator[Refusal]:
    """Yield problems of your own code that would end or silently spoil a run, at most one per part.

    Imports and runs the code. Every part is built with its options and called as in a run. Parts of a loss
    get 8 tokens of 4 sequences: ratios are around 1, advantages have both signs, and one token is masked with
    nan as its sampled values. They also get an empty row, as some ranks do in a run. Advantages and filters
    get groups with different and with equal rewards. Keys are relative to the section.
    """
    for key, part in algorithm.own_code().items():
        has_reference = algorithm.kl is not None or key.startswith("terms.")
        wrong = _what_is_wrong(part, group_size=algorithm.group_size, has_reference=has_reference)
        if wrong is not None:
            yield f"{key}.factory", wrong


def _what_is_wrong(part: PythonCode, *, group_size: int, has_reference: bool) -> str | None:
    try:
        _build(part)
        match part:
            case PythonObjective():
                _try_objective(part, has_reference=has_reference)
            case PythonCorrection():
                _try_correction(part, has_reference=has_reference)
            case PythonAggregation():
                _try_aggregation(part)
            case PythonKlEstimator():
                _try_estimator(part)
            case PythonAdvantage():
                _try_advantage(part, group_size)
            case PythonFilter():
                _try_filter(part, group_size)
    except ValueError as error:
        return str(error)
    return None


def _build(part: PythonCode) -> None:
    parameters = {
        PythonAggregation: ("values_T", "mask_T", "sequence_ids_T"),
        PythonAdvantage: ("rewards_G",),
        PythonFilter: ("facts", "rng"),
    }.get(type(part), ("row",))
    try:
        build_code(part, parameters)
    except ValueError:
        raise
    except Exception as error:
        # Any exception of the user's code is reported to the user.
        raise ValueError(
            f"raised {type(error).__name__}: {error} when it was called with {part.options}"
        ) from error


def _call(call: Callable[..., T], *arguments: object, where: str) -> T:
    """Call the user's code and convert any exception to a ValueError that names ``where``."""
    try:
        return call(*arguments)
    except WrongResult as error:
        raise ValueError(f"{error} (on {where})") from error
    except Exception as error:
        # Any exception of the user's code is reported to the user.
        raise ValueError(f"its function raised {type(error).__name__}: {error} on {where}") from error


def _rows(
    *, has_reference: bool, has_proximal: bool = False
) -> Iterator[tuple[RowTokens, torch.Tensor, str]]:
    """Yield rows like those of a run, each with the leaf that receives gradients and a description.

    Reference log-probabilities exist only if the run has a KL penalty. Proximal ones exist only for an
    objective that needs them, from the second optimizer step of a batch on.
    """
    behavior_T = torch.tensor([-0.7, -1.2, -0.1, -2.3, -0.9, -0.4, -1.6, torch.nan])
    # The first sequence has the ratio 1.
    drift_T = torch.tensor([0.0, 0.0, 0.02, -0.01, -0.03, 0.01, 0.05, 0.0])
    leaf_T = (behavior_T.nan_to_num(-3.0) + drift_T).requires_grad_()
    row = RowTokens(
        # In a run, log-probabilities are computed values, never leaves of the graph.
        logprobs_T=leaf_T * 1.0,
        behavior_logprobs_T=behavior_T,
        advantages_T=torch.tensor([1.0, 1.0, -0.5, -0.5, 0.8, 0.8, -1.3, -1.3]),
        mask_T=torch.tensor([True, True, True, True, True, True, True, False]),
        sequence_ids_T=torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
        ages_T=torch.tensor([0, 0, 1, 1, 0, 2, 0, 0], dtype=torch.int32),
        sample_weights_T=torch.tensor([1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]),
        ref_logprobs_T=leaf_T.detach() - 0.1 * drift_T.sign() - 0.05 if has_reference else None,
        proximal_logprobs_T=leaf_T.detach() + 0.01 if has_proximal else None,
    )
    yield row, leaf_T, "8 made-up tokens"
    columns = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    empty: dict[str, Any] = {name: None if column is None else column[:0] for name, column in columns.items()}
    yield RowTokens(**empty), leaf_T, "a row without tokens, which some ranks get"


def _try_objective(objective: PythonObjective, *, has_reference: bool) -> None:
    rows = list(_rows(has_reference=has_reference))
    if objective.needs_proximal:
        rows += _rows(has_reference=has_reference, has_proximal=True)
    for row, leaf_T, where in rows:
        losses_T, sums = _call(objective, row, where=where)
        _check_sums(sums, where)
        _check_finite(losses_T, row, "losses", where)
        if len(losses_T):
            _check_gradient(losses_T, leaf_T, row.mask_T, "losses")


def _try_correction(correction: PythonCorrection, *, has_reference: bool) -> None:
    for row, _, where in _rows(has_reference=has_reference):
        weights_T, sums = _call(correction, row, where=where)
        _check_sums(sums, where)
        if not bool(weights_T.isfinite().all() and (weights_T[~row.mask_T] == 0).all()):
            raise ValueError(
                f"its weights are {shown(weights_T)} on {where}; must be finite, and 0 where mask_T is false"
            )


def _try_estimator(estimator: PythonKlEstimator) -> None:
    for row, leaf_T, where in _rows(has_reference=True):
        kl_T = _call(estimator, row, where=where)
        _check_finite(kl_T, row, "estimates", where)
        if len(kl_T):
            _check_gradient(kl_T, leaf_T, row.mask_T, "estimates")


def _try_aggregation(aggregation: PythonAggregation) -> None:
    for row, leaf_T, where in _rows(has_reference=True):
        values_T = (leaf_T * 2.0)[: len(row.mask_T)]

        def aggregate(row: RowTokens = row, values_T: torch.Tensor = values_T) -> torch.Tensor:
            return aggregation(
                values_T=values_T,
                mask_T=row.mask_T,
                sequence_ids_T=row.sequence_ids_T,
                weights_T=row.sample_weights_T,
            )

        loss = _call(aggregate, where=where)
        if not bool(loss.isfinite()):
            raise ValueError(f"its loss is {float(loss.detach())} on {where}; must be finite")
        if len(row.mask_T):
            _check_gradient(loss, leaf_T, row.mask_T, "loss")


def _try_advantage(advantage: PythonAdvantage, group_size: int) -> None:
    # One group with distinct rewards, and one with equal rewards, whose advantages are zero.
    different_G = torch.arange(group_size, dtype=torch.float64) / max(1, group_size - 1)
    equal_G = torch.ones(group_size, dtype=torch.float64)
    where = f"groups of {group_size} rollouts, of different and of equal rewards"
    _call(advantage.of_batch, [different_G, equal_G], where=where)


def _try_filter(one: PythonFilter, group_size: int) -> None:
    equal = (1.0,) * group_size
    for rewards in (tuple(float(index % 2) for index in range(group_size)), equal):
        facts = GroupFacts(
            rewards=rewards,
            lengths=tuple(10 * (index + 1) for index in range(group_size)),
            is_truncated=tuple(index == group_size - 1 for index in range(group_size)),
            penalties=tuple(0.5 * (index % 3) for index in range(group_size)),
        )
        _call(one, facts, np.random.default_rng(0), where=f"a group with the rewards {list(rewards)}")


def _check_sums(sums: Mapping[str, torch.Tensor | float], where: str) -> None:
    for name, value in sums.items():
        number = float(value.detach()) if isinstance(value, torch.Tensor) else value
        if not math.isfinite(number):
            raise ValueError(f"its sum {name!r} is {number} on {where}; must be finite")


def _check_finite(values_T: torch.Tensor, row: RowTokens, plural: str, where: str) -> None:
    if not bool(values_T[row.mask_T].isfinite().all()):
        raise ValueError(
            f"its {plural} are {shown(values_T)} on {where}; must be finite where mask_T is true"
        )


def _check_gradient(values: torch.Tensor, leaf_T: torch.Tensor, mask_T: torch.Tensor, plural: str) -> None:
    gradient_T = None
    if values.requires_grad:
        total = values.where(mask_T, 0.0).sum() if values.ndim else values
        (gradient_T,) = torch.autograd.grad(total, leaf_T, allow_unused=True, retain_graph=True)
    if gradient_T is None:
        raise ValueError(
            f"no gradient reaches logprobs_T from its {plural}; they must be computed from logprobs_T, not "
            "detached"
        )
    if not bool(gradient_T.isfinite().all()):
        raise ValueError(f"the gradient of its {plural} by logprobs_T is {shown(gradient_T)}; must be finite")
    if not bool(gradient_T[mask_T].any()):
        raise ValueError(
            f"the gradient of its {plural} by logprobs_T is 0 for every token; nothing would be learned"
        )
