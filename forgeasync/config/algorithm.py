"""The ``algorithm`` section: how rewards become gradients, and rules on which parts can be combined.

The parts are classes of ``forgeasync.algorithms``. The main rule is that a token's loss contains the
importance ratio current / behavior at most once. A second factor is not a stronger correction but an error:
the expectation is then that of another policy.

Your own code is called on synthetic input, so that its errors show before a run starts.

Shape suffixes: T tokens, G rollouts of a group.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import model_validator

from forgeasync.algorithms import (
    K1,
    AnyAdvantage,
    AnyFilter,
    DynamicSampling,
    GroupFacts,
    GroupPassAtK,
    Grpo,
    Gspo,
    IcePop,
    KlPlace,
    Loss,
    MaskedIs,
    OverlongFilter,
    OverlongPenalty,
    PythonAdvantage,
    PythonAggregation,
    PythonCorrection,
    PythonFilter,
    PythonKlEstimator,
    PythonObjective,
    RefKl,
    ResampleOnCorrect,
    RowTokens,
    SequenceMeanOfTokenMean,
    StepCredit,
    Supervised,
    UnbiasedK3,
    WrongResult,
    shown,
)
from forgeasync.schema import Count, PythonCode, Refusal, build_code


class AlgorithmSection(Loss):
    """How rewards become gradients: filters, advantages and the loss."""

    advantage: AnyAdvantage = Grpo()
    """Formula that turns rewards into advantages. A kind without other keys can be given by its name
    alone."""
    step_credit: StepCredit = StepCredit.SUM_TO_GO
    """Rule that turns rewards of steps (``Score.steps``) into advantages of tokens."""
    pass_at_k: Count | None = None
    """k of ``advantage: group_pass_at_k``. Loading moves it into that section, and it is null here."""
    group_size: Count
    """Rollouts per prompt."""
    groups_per_step: Count
    """Prompts per batch."""
    filters: tuple[AnyFilter, ...] = ()
    """Filters for every scored group, applied in this order; dropped groups are counted."""
    max_filtered_in_a_row: Count = 512
    """Number of groups in a row that filters may drop; then the run ends with an error."""

    @model_validator(mode="before")
    @classmethod
    def _read_pass_at_k(cls, values: Any) -> Any:
        """Move ``pass_at_k`` beside ``advantage: group_pass_at_k`` into that section."""
        if not isinstance(values, dict):
            return values
        # After this validator, pydantic treats the values as Python objects, for which its strict mode
        # requires tuples instead of lists.
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        advantage = values.get("advantage")
        kind = advantage["kind"] if isinstance(advantage, dict) and "kind" in advantage else advantage
        if kind == GroupPassAtK.model_fields["kind"].default and values.get("pass_at_k") is not None:
            others = advantage if isinstance(advantage, dict) else {"kind": kind}
            values["advantage"] = others | {"pass_at_k": values.pop("pass_at_k")}
        return values

    def find_problems(self) -> Iterator[Refusal]:
        """Yield combinations that cannot work; your own code is called with synthetic input."""
        if isinstance(self.objective, Supervised):
            yield (
                "objective.kind",
                "ignores rewards: it would train on wrong answers as much as on right ones. Use 'reinforce' "
                "or another objective that weighs tokens by their advantage",
            )
        yield from self._check_corrections()
        if isinstance(self.objective, Gspo) and not isinstance(self.aggregation, SequenceMeanOfTokenMean):
            yield (
                "aggregation.kind",
                "must be 'sequence_mean_of_token_mean' with objective 'gspo': every token has the whole loss "
                "of its sequence, so any other aggregation would weigh sequences by their length",
            )
        yield from self._check_kl()
        yield from self._check_pass_at_k()
        if self.own_code():
            # Imported here because it needs torch, which other configs are checked without.
            from forgeasync.config.algorithm import check_own_code

            yield from check_own_code(self)

    def own_code(self) -> dict[str, PythonCode]:
        """Return the parts that are your own code, by dotted key."""
        parts: list[tuple[str, object]] = [
            ("objective", self.objective),
            *((f"corrections.{index}", one) for index, one in enumerate(self.corrections)),
            ("aggregation", self.aggregation),
            *((f"terms.{index}.aggregation", one.aggregation) for index, one in enumerate(self.terms)),
            *(
                (f"terms.{index}.estimator", one.estimator)
                for index, one in enumerate(self.terms)
                if isinstance(one, RefKl)
            ),
            ("kl.estimator", None if self.kl is None else self.kl.estimator),
            ("advantage", self.advantage),
            *((f"filters.{index}", one) for index, one in enumerate(self.filters)),
        ]
        return {key: part for key, part in parts if isinstance(part, PythonCode)}

    def _check_corrections(self) -> Iterator[Refusal]:
        objective, kinds = self.objective, [correction.kind for correction in self.corrections]
        first_ratio: str | None = None
        for index, correction in enumerate(self.corrections):
            field, kind = f"corrections.{index}", correction.kind
            if kind in kinds[:index] and not isinstance(correction, PythonCode):
                yield field, "is listed twice; must be listed once"
                continue
            if correction.ratio_level is None:
                continue
            if isinstance(correction, MaskedIs | IcePop) and correction.low >= correction.high:
                yield f"{field}.low", f"must be below high = {correction.high}"
            if objective.ratio_inside is not None:
                yield (
                    field,
                    f"would count the importance ratio twice: with objective {objective.kind!r} "
                    f"{objective.ratio_inside}. Use objective 'reinforce' with {kind!r}, or "
                    f"{objective.kind!r} with masks only ('off_policy_sequence_mask', 'age_weight')",
                )
            elif objective.looks_at_sequences and correction.ratio_level == "token":
                yield (
                    field,
                    f"weighs each token by itself, but objective {objective.kind!r} is defined on whole "
                    "sequences; use 'truncated_is' or 'masked_is' with level 'sequence' or 'geometric'",
                )
            elif first_ratio is not None:
                yield (
                    field,
                    f"would count the importance ratio twice: {first_ratio!r} is the same ratio with other "
                    "bounds; keep one of them",
                )
            first_ratio = first_ratio or kind

    def _check_kl(self) -> Iterator[Refusal]:
        kl = self.kl
        if kl is None:
            return
        if kl.where is KlPlace.LOSS and isinstance(kl.estimator, K1):
            yield (
                "kl.estimator",
                "has a gradient of mean zero: in the loss it adds noise and does not keep the policy near "
                "the reference. Use 'k2', 'k3' or 'unbiased_k3', or where: reward",
            )
        if kl.where is KlPlace.REWARD and isinstance(kl.estimator, UnbiasedK3):
            yield (
                "kl.estimator",
                "contains the importance ratio for the sake of its gradient; a reward has no gradient, and "
                "the objective would apply the ratio again. Use 'k1', 'k2' or 'k3', or where: loss",
            )
        if kl.where is KlPlace.REWARD and self.objective.looks_at_sequences:
            yield (
                "kl.where",
                f"gives every token its own advantage, but objective {self.objective.kind!r} takes one per "
                "sequence; use where: loss",
            )

    def _check_pass_at_k(self) -> Iterator[Refusal]:
        advantage = self.advantage
        if not isinstance(advantage, GroupPassAtK):
            if self.pass_at_k is not None:
                yield "pass_at_k", "needs algorithm.advantage = 'group_pass_at_k'"
            return
        # Filters can leave fewer rollouts in a group than were sampled.
        smallest = self.group_size
        for one in self.filters:
            if isinstance(one, PythonFilter):
                yield (
                    "advantage",
                    f"needs {advantage.pass_at_k} rollouts in every group, and a filter of your own may "
                    "leave fewer; use another advantage or built-in filters only",
                )
            elif isinstance(one, OverlongFilter):
                smallest = min(smallest, 2)
            elif isinstance(one, ResampleOnCorrect):
                smallest = min(smallest, one.num_kept)
        if advantage.pass_at_k > smallest:
            yield (
                "pass_at_k",
                f"must be from 1 to {smallest}, the fewest rollouts of a group that algorithm.group_size and "
                "algorithm.filters leave",
                advantage.pass_at_k,
            )


def check_filters(
    filters: Sequence[AnyFilter], *, field: str, group_size: int, max_response_tokens: int
) -> Iterator[Refusal]:
    """Yield filters that cannot work or have no effect; ``field`` is the dotted path of their list."""
    for index, one in enumerate(filters):
        match one:
            case OverlongPenalty() if one.max_length - one.buffer >= max_response_tokens:
                yield (
                    f"{field}.{index}.max_length",
                    f"the penalty would start after {one.max_length - one.buffer} tokens, but "
                    f"responses have at most {max_response_tokens} (sampling.max_response_tokens; with an "
                    "environment model.max_context_length); max_length * (1 - buffer_share) must be less "
                    "than that",
                )
            case DynamicSampling() | OverlongFilter() if group_size < 2:
                yield (
                    "algorithm.group_size",
                    f"must be at least 2 with the filter {one.kind!r} ({field}.{index}), which "
                    "drops every group of 1: the run would starve",
                )
            case ResampleOnCorrect() if one.num_kept >= group_size:
                yield (
                    f"{field}.{index}.num_kept",
                    f"must be less than algorithm.group_size = {group_size}; otherwise the filter "
                    "leaves nothing out",
                )


T = TypeVar("T")


def check_own_code(algorithm: AlgorithmSection) -> Iterator[Refusal]:
    """Yield problems of your own code that would end or silently spoil a run, at most one per part.

    Imports and runs the code. Every part is built with its options and called as in a run. Parts of a loss
    get 8 tokens of 4 sequences (ratios around 1, advantages of both signs, one masked token whose sampled
    values are nan) and an empty row, which some ranks get in a run. Advantages and filters get groups with
    different and with equal rewards. Keys are relative to the section.
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
