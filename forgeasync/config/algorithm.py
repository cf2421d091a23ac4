"""The ``algorithm`` section: how rewards become gradients, and rules on which parts can be combined.

The parts are classes of ``forgeasync.algorithms``. The main rule is that a token's loss contains the
importance ratio current / behavior at most once. A second factor is not a stronger correction but an error:
the expectation is then that of another policy.
"""

from collections.abc import Iterator, Sequence

from forgeasync.algorithms import (
    K1,
    AnyAdvantage,
    AnyFilter,
    DynamicSampling,
    GroupPassAtK,
    Grpo,
    Gspo,
    IcePop,
    KlPlace,
    Loss,
    MaskedIs,
    OverlongFilter,
    OverlongPenalty,
    PythonFilter,
    RefKl,
    ResampleOnCorrect,
    SequenceMeanOfTokenMean,
    StepCredit,
    Supervised,
    UnbiasedK3,
)
from forgeasync.schema import Count, PythonCode, Refusal


class AlgorithmSection(Loss):
    """How rewards become gradients: filters, advantages and the loss."""

    advantage: AnyAdvantage = Grpo()
    """Formula that turns rewards into advantages. A kind without other keys can be given by its name
    alone."""
    step_credit: StepCredit = StepCredit.SUM_TO_GO
    """Rule that turns rewards of steps (``Score.steps``) into advantages of tokens."""
    group_size: Count
    """Rollouts per prompt."""
    groups_per_step: Count
    """Prompts per batch."""
    filters: tuple[AnyFilter, ...] = ()
    """Filters for every scored group, applied in this order; dropped groups are counted."""
    max_filtered_in_a_row: Count = 512
    """Number of groups in a row that filters may drop; then the run ends with an error."""

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
            from forgeasync.config.trial_call import check_own_code

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
                "advantage.pass_at_k",
                f"must be from 1 to {smallest}, the fewest rollouts of a group that algorithm.group_size and "
                "algorithm.filters leave",
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
