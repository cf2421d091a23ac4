"""Rules of what a loss is made of: which objectives, corrections, aggregations and penalties go together.

The first question is how often the importance ratio current / behavior is in the product. Twice is an error,
not a stronger correction: the expectation is then that of another policy.
"""

import inspect
from collections.abc import Iterator

from forgeasync.config.loss_schema import (
    ConstantLength,
    Gspo,
    IcePop,
    KlEstimator,
    KlPlace,
    MaskedIs,
    PythonObjective,
    TruncatedIs,
)
from forgeasync.config.problems import Problem
from forgeasync.config.python_factory import load_factory
from forgeasync.config.schema import RunConfig
from forgeasync.config.sizes import longest_response

RATIO_INSIDE = {
    "ppo_clip": "its loss has the ratio current / behavior in it already",
    "cispo": "its loss has the ratio current / behavior in it already",
    "gspo": "its loss has the sequence's ratio in it already",
    "topr": "its loss has the sequence's ratio in it already",
    "decoupled_ppo": "its behavior weight is that ratio already (behavior_cap bounds it)",
}
"""Objectives that contain the importance ratio, and where."""

SEQUENCE_LEVEL = ("gspo", "topr", "kimi15")
"""Objectives that look at sequences whole."""


def check_loss(config: RunConfig) -> Iterator[Problem]:
    """What of the loss cannot go together."""
    yield from _check_corrections(config)
    yield from _check_aggregation(config)
    yield from _check_kl(config)
    yield from _check_factory(config)


def _check_corrections(config: RunConfig) -> Iterator[Problem]:
    objective, corrections = config.algorithm.objective.kind, config.algorithm.corrections
    kinds = [correction.kind for correction in corrections]
    first_ratio: str | None = None
    for index, correction in enumerate(corrections):
        field, kind = f"algorithm.corrections.{index}", correction.kind
        if kind in kinds[:index]:
            yield Problem(field=field, value=kind, remedy="is there twice; must be there once")
            continue
        if not isinstance(correction, TruncatedIs | MaskedIs | IcePop):
            continue
        level = "token" if isinstance(correction, IcePop) else correction.level
        if isinstance(correction, MaskedIs | IcePop) and correction.low >= correction.high:
            remedy = f"must be below high = {correction.high}"
            yield Problem(field=f"{field}.low", value=correction.low, remedy=remedy)
        if objective in RATIO_INSIDE:
            yield Problem(
                field=field,
                value=kind,
                remedy=f"would count the importance ratio twice: with objective {objective!r} "
                f"{RATIO_INSIDE[objective]}. Use objective 'reinforce' with {kind!r}, or {objective!r} with "
                "masks only ('off_policy_sequence_mask', 'age_weight')",
            )
        elif objective in SEQUENCE_LEVEL and level == "token":
            yield Problem(
                field=field,
                value=kind,
                remedy=f"weighs each token by itself, but objective {objective!r} looks at sequences whole; "
                "use 'truncated_is' or 'masked_is' with level 'sequence' or 'geometric'",
            )
        elif first_ratio is not None:
            yield Problem(
                field=field,
                value=kind,
                remedy=f"would count the importance ratio twice: {first_ratio!r} is the same ratio, "
                "bounded in another way; keep one of them",
            )
        first_ratio = first_ratio or kind


def _check_aggregation(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if isinstance(algorithm.objective, Gspo) and algorithm.aggregation.kind != "sequence_mean_of_token_mean":
        yield Problem(
            field="algorithm.aggregation.kind",
            value=algorithm.aggregation.kind,
            remedy="with objective 'gspo' must be 'sequence_mean_of_token_mean': every token has its "
            "sequence's whole loss, so that any other would weigh sequences by their length",
        )
    longest = longest_response(config)
    if isinstance(algorithm.aggregation, ConstantLength) and algorithm.aggregation.length < longest:
        yield Problem(
            field="algorithm.aggregation.length",
            value=algorithm.aggregation.length,
            remedy=f"must be at least sampling.max_response_tokens = {longest}"
            if config.environment is None
            else f"must be at least model.max_context_length = {longest}: an episode can fill it",
        )


def _check_kl(config: RunConfig) -> Iterator[Problem]:
    kl, objective = config.algorithm.kl, config.algorithm.objective.kind
    if kl is None:
        return
    if kl.where is KlPlace.LOSS and kl.estimator is KlEstimator.K1:
        yield Problem(
            field="algorithm.kl.estimator",
            value=kl.estimator.value,
            remedy="has a gradient of mean zero: in the loss it adds noise and no pull to the reference. "
            "Use 'k2', 'k3' or 'unbiased_k3', or where: reward",
        )
    if kl.where is KlPlace.REWARD and kl.estimator is KlEstimator.UNBIASED_K3:
        yield Problem(
            field="algorithm.kl.estimator",
            value=kl.estimator.value,
            remedy="carries the importance ratio for its own gradient; a reward has none, and the objective "
            "weighs by the ratio again. Use 'k1', 'k2' or 'k3', or where: loss",
        )
    if kl.where is KlPlace.REWARD and objective in SEQUENCE_LEVEL:
        yield Problem(
            field="algorithm.kl.where",
            value=kl.where.value,
            remedy=f"gives every token an advantage of its own, but objective {objective!r} has one a "
            "sequence; use where: loss",
        )


def _check_factory(config: RunConfig) -> Iterator[Problem]:
    objective = config.algorithm.objective
    if not isinstance(objective, PythonObjective):
        return
    field = "algorithm.objective.factory"
    try:
        signature = inspect.signature(load_factory(objective.factory))
    except ValueError as error:
        yield Problem(field=field, value=objective.factory, remedy=str(error))
        return
    try:
        signature.bind(**objective.options)
    except TypeError as error:
        yield Problem(
            field="algorithm.objective.options",
            value=objective.options,
            remedy=f"{error}; {objective.factory} takes {signature}",
        )
