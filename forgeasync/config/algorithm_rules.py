"""Rules of the ``algorithm`` section: which of its parts can be combined, with each other and with the run.

The main rule is that a token's loss contains the importance ratio current / behavior at most once. A second
factor is no stronger correction but an error: the expectation is then that of another policy.
"""

from collections.abc import Iterator, Sequence

from forgeasync.algorithms import (
    K1,
    AnyFilter,
    ConstantLength,
    DynamicSampling,
    GroupPassAtK,
    Gspo,
    IcePop,
    KlPlace,
    MaskedIs,
    OverlongFilter,
    OverlongPenalty,
    PythonFilter,
    RefKl,
    ResampleOnCorrect,
    SequenceMeanOfTokenMean,
    Supervised,
    UnbiasedK3,
)
from forgeasync.config.algorithm import AlgorithmSection
from forgeasync.config.run import RunConfig, is_served, longest_response
from forgeasync.schema import Problem, PythonCode


def check_algorithm(config: RunConfig) -> Iterator[Problem]:
    """Find every combination that cannot work; the user's own code is tried on made-up input."""
    algorithm = config.algorithm
    yield from _check_objective(algorithm)
    yield from _check_corrections(algorithm)
    yield from _check_aggregation(config)
    yield from _check_kl(algorithm)
    yield from _check_advantage(algorithm, is_served=is_served(config))
    yield from check_filters(
        algorithm.filters,
        field="algorithm.filters",
        group_size=algorithm.group_size,
        max_response_tokens=longest_response(config),
    )
    if _has_own_code(algorithm):
        # Imported here because it needs torch; configs without the user's own code are checked without it.
        from forgeasync.config.trial_call import check_own_code

        yield from check_own_code(algorithm)


def _has_own_code(algorithm: AlgorithmSection) -> bool:
    estimators = [] if algorithm.kl is None else [algorithm.kl.estimator]
    one_each = (algorithm.objective, algorithm.aggregation, algorithm.advantage)
    of_terms = [term.aggregation for term in algorithm.terms]
    estimators += [term.estimator for term in algorithm.terms if isinstance(term, RefKl)]
    parts = (*one_each, *algorithm.corrections, *algorithm.filters, *estimators, *of_terms)
    return any(isinstance(part, PythonCode) for part in parts)


def _check_objective(algorithm: AlgorithmSection) -> Iterator[Problem]:
    if isinstance(algorithm.objective, Supervised):
        yield Problem(
            field="algorithm.objective.kind",
            value=algorithm.objective.kind,
            remedy="ignores rewards: it would train on wrong answers as much as on right ones. Use "
            "'reinforce' or another objective that weighs tokens by their advantage",
        )


def _check_corrections(algorithm: AlgorithmSection) -> Iterator[Problem]:
    objective, corrections = algorithm.objective, algorithm.corrections
    kinds = [correction.kind for correction in corrections]
    first_ratio: str | None = None
    for index, correction in enumerate(corrections):
        field, kind = f"algorithm.corrections.{index}", correction.kind
        if kind in kinds[:index] and not isinstance(correction, PythonCode):
            yield Problem(field=field, value=kind, remedy="is listed twice; must be listed once")
            continue
        if correction.ratio_level is None:
            continue
        if isinstance(correction, MaskedIs | IcePop) and correction.low >= correction.high:
            remedy = f"must be below high = {correction.high}"
            yield Problem(field=f"{field}.low", value=correction.low, remedy=remedy)
        if objective.ratio_inside is not None:
            yield Problem(
                field=field,
                value=kind,
                remedy=f"would count the importance ratio twice: with objective {objective.kind!r} "
                f"{objective.ratio_inside}. Use objective 'reinforce' with {kind!r}, or {objective.kind!r} "
                "with masks only ('off_policy_sequence_mask', 'age_weight')",
            )
        elif objective.looks_at_sequences and correction.ratio_level == "token":
            yield Problem(
                field=field,
                value=kind,
                remedy=f"weighs each token by itself, but objective {objective.kind!r} is defined on whole "
                "sequences; use 'truncated_is' or 'masked_is' with level 'sequence' or 'geometric'",
            )
        elif first_ratio is not None:
            yield Problem(
                field=field,
                value=kind,
                remedy=f"would count the importance ratio twice: {first_ratio!r} is the same ratio with "
                "other bounds; keep one of them",
            )
        first_ratio = first_ratio or kind


def _check_aggregation(config: RunConfig) -> Iterator[Problem]:
    algorithm, longest = config.algorithm, longest_response(config)
    aggregation = algorithm.aggregation
    if isinstance(algorithm.objective, Gspo) and not isinstance(aggregation, SequenceMeanOfTokenMean):
        yield Problem(
            field="algorithm.aggregation.kind",
            value=aggregation.kind,
            remedy="must be 'sequence_mean_of_token_mean' with objective 'gspo': every token has the whole "
            "loss of its sequence, so any other aggregation would weigh sequences by their length",
        )
    if isinstance(aggregation, ConstantLength) and aggregation.length < longest:
        is_single_turn = config.environment is None
        bound = "sampling.max_response_tokens" if is_single_turn else "model.max_context_length"
        yield Problem(
            field="algorithm.aggregation.length",
            value=aggregation.length,
            remedy=f"must be at least {bound} = {longest}: no response is longer",
        )


def _check_kl(algorithm: AlgorithmSection) -> Iterator[Problem]:
    kl, objective = algorithm.kl, algorithm.objective
    if kl is None:
        return
    if kl.where is KlPlace.LOSS and isinstance(kl.estimator, K1):
        yield Problem(
            field="algorithm.kl.estimator",
            value=kl.estimator.kind,
            remedy="has a gradient of mean zero: in the loss it adds noise and does not keep the policy near "
            "the reference. Use 'k2', 'k3' or 'unbiased_k3', or where: reward",
        )
    if kl.where is KlPlace.REWARD and isinstance(kl.estimator, UnbiasedK3):
        yield Problem(
            field="algorithm.kl.estimator",
            value=kl.estimator.kind,
            remedy="contains the importance ratio for the sake of its gradient; a reward has no gradient, "
            "and the objective would apply the ratio again. Use 'k1', 'k2' or 'k3', or where: loss",
        )
    if kl.where is KlPlace.REWARD and objective.looks_at_sequences:
        yield Problem(
            field="algorithm.kl.where",
            value=kl.where.value,
            remedy=f"gives every token its own advantage, but objective {objective.kind!r} takes one per "
            "sequence; use where: loss",
        )


def _check_advantage(algorithm: AlgorithmSection, *, is_served: bool) -> Iterator[Problem]:
    advantage = algorithm.advantage
    # Groups of people who are served are of one: the plug-in serve says which advantages take them.
    if algorithm.group_size < advantage.smallest_group and not is_served:
        yield Problem(
            field="algorithm.group_size",
            value=algorithm.group_size,
            remedy=f"must be at least {advantage.smallest_group}: advantage {advantage.kind!r} compares the "
            "rollouts of a group",
        )
    if not isinstance(advantage, GroupPassAtK):
        if algorithm.pass_at_k is not None:
            yield Problem(
                field="algorithm.pass_at_k",
                value=algorithm.pass_at_k,
                remedy=f"needs algorithm.advantage = {GroupPassAtK.model_fields['kind'].default!r}",
            )
        return
    # Filters leave a group with fewer rollouts than were sampled.
    smallest = algorithm.group_size
    for one in algorithm.filters:
        if isinstance(one, PythonFilter):
            yield Problem(
                field="algorithm.advantage",
                value=advantage.kind,
                remedy=f"needs {advantage.pass_at_k} rollouts in every group, and a filter of your own may "
                "leave fewer; use another advantage or built-in filters only",
            )
        elif isinstance(one, OverlongFilter):
            smallest = min(smallest, 2)
        elif isinstance(one, ResampleOnCorrect):
            smallest = min(smallest, one.num_kept)
    if advantage.pass_at_k > smallest:
        yield Problem(
            field="algorithm.pass_at_k",
            value=advantage.pass_at_k,
            remedy=f"must be from 1 to {smallest}, the fewest rollouts of a group that algorithm.group_size "
            "and algorithm.filters leave",
        )


def check_filters(
    filters: Sequence[AnyFilter], *, field: str, group_size: int, max_response_tokens: int
) -> Iterator[Problem]:
    """Find filters that cannot work or never do anything; ``field`` is the dotted path of their list."""
    for index, one in enumerate(filters):
        match one:
            case OverlongPenalty():
                yield from _check_penalty(one, f"{field}.{index}", max_response_tokens)
            case DynamicSampling() | OverlongFilter() if group_size < 2:
                yield Problem(
                    field="algorithm.group_size",
                    value=group_size,
                    remedy=f"must be at least 2 with the filter {one.kind!r} ({field}.{index}), which "
                    "drops every group of 1: the run would starve",
                )
            case ResampleOnCorrect() if one.num_kept >= group_size:
                yield Problem(
                    field=f"{field}.{index}.num_kept",
                    value=one.num_kept,
                    remedy=f"must be less than algorithm.group_size = {group_size}; otherwise the filter "
                    "leaves nothing out",
                )


def _check_penalty(penalty: OverlongPenalty, field: str, max_response_tokens: int) -> Iterator[Problem]:
    start = penalty.max_length - penalty.buffer
    if start >= max_response_tokens:
        yield Problem(
            field=f"{field}.max_length",
            value=penalty.max_length,
            remedy=f"the penalty would start after {start} tokens, but responses have at most "
            f"{max_response_tokens} (sampling.max_response_tokens; with an environment "
            "model.max_context_length); max_length * (1 - buffer_share) must be less than that",
        )
