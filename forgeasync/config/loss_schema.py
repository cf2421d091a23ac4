"""The keys of the ``algorithm`` section that say what the loss is made of.

A kind is a factory of ``forgeasync.algorithms`` by name, and its other keys are the factory's arguments;
formulas and sources are in the docstrings there. ``forgeasync.config.loss_checks`` says what goes together.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from forgeasync.config.section import Count, Factor, Section

RatioLevel = Literal["token", "sequence", "geometric"]
"""What an importance ratio is taken of: a token, a sequence, or a sequence per token."""


class PpoClip(Section):
    """The clipped surrogate of PPO and GRPO."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    clip_high: Factor = 0.28
    dual_clip: float | None = Field(default=None, gt=1.0, le=1e30)
    """Bounds the loss of a token of negative advantage to this many times the advantage; null does not."""


class Cispo(Section):
    """The policy gradient of every token, weighted by its clipped ratio."""

    kind: Literal["cispo"]
    clip_low: float = Field(default=1.0, gt=0.0, le=1.0)
    """1 leaves small ratios as they are."""
    clip_high: Factor


class Gspo(Section):
    """The clipped surrogate over a sequence's ratio per token."""

    kind: Literal["gspo"]
    clip_low: float = Field(default=3e-4, gt=0.0, lt=1.0)
    clip_high: Factor = 4e-4


class Reinforce(Section):
    """The policy gradient without a ratio."""

    kind: Literal["reinforce"]


class DecoupledPpo(Section):
    """PPO around the policy at the start of the step, weighted by its ratio to the one that sampled."""

    kind: Literal["decoupled_ppo"]
    clip: float = Field(default=0.2, gt=0.0, lt=1.0)
    behavior_cap: Factor = 5.0
    """Tokens whose weight is above it are left out."""


class Topr(Section):
    """Tapered off-policy REINFORCE."""

    kind: Literal["topr"]


class Kimi15(Section):
    """The policy gradient and a square that holds sequences near the policy that sampled them."""

    kind: Literal["kimi15"]
    tau: Factor


class PythonObjective(Section):
    """A loss of your own: what a factory returns when it is called with the options as keywords."""

    kind: Literal["python"]
    factory: str
    """Where it is, such as ``package.module.name``; trainer procs import it too."""
    options: dict[str, int | float | bool | str] = Field(default_factory=dict)


ObjectiveSection = Annotated[
    PpoClip | Cispo | Gspo | Reinforce | DecoupledPpo | Topr | Kimi15 | PythonObjective,
    Field(discriminator="kind"),
]


class TruncatedIs(Section):
    """The ratio, cut at a cap."""

    kind: Literal["truncated_is"]
    cap: Factor = 2.0
    level: RatioLevel = "token"


class MaskedIs(Section):
    """The ratio between two bounds, 0 outside of them."""

    kind: Literal["masked_is"]
    low: float = Field(ge=0.0, le=1e30)
    high: Factor
    level: RatioLevel = "token"


class IcePop(Section):
    """A token's ratio between two bounds, 0 outside of them."""

    kind: Literal["icepop"]
    low: float = Field(default=0.5, ge=0.0, le=1e30)
    high: Factor = 5.0


class OffPolicySequenceMask(Section):
    """0 for sequences of negative advantage that have become much less likely since they were sampled."""

    kind: Literal["off_policy_sequence_mask"]
    threshold: Factor
    """In nats per token."""


class AgeWeight(Section):
    """Less weight for tokens of older policy versions."""

    kind: Literal["age_weight"]
    half_life: Factor
    """In policy versions."""


CorrectionSection = Annotated[
    TruncatedIs | MaskedIs | IcePop | OffPolicySequenceMask | AgeWeight, Field(discriminator="kind")
]


class TokenMean(Section):
    """Every token of the batch weighs the same."""

    kind: Literal["token_mean"] = "token_mean"


class SequenceMeanOfTokenMean(Section):
    """Every sequence weighs the same."""

    kind: Literal["sequence_mean_of_token_mean"]


class SequenceMeanOfTokenSum(Section):
    """The sum over a sequence's tokens, mean over sequences."""

    kind: Literal["sequence_mean_of_token_sum"]


class ConstantLength(Section):
    """The sum over a sequence's tokens divided by a constant, mean over sequences."""

    kind: Literal["constant_length"]
    length: Count
    """In tokens; usually sampling.max_response_tokens."""


AggregationSection = Annotated[
    TokenMean | SequenceMeanOfTokenMean | SequenceMeanOfTokenSum | ConstantLength,
    Field(discriminator="kind"),
]


class KlEstimator(StrEnum):
    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    UNBIASED_K3 = "unbiased_k3"


class KlPlace(StrEnum):
    LOSS = "loss"
    """Added to every token's loss, with its gradient."""
    REWARD = "reward"
    """Taken off the reward of every token: its advantage is less by what it and the tokens after it add up
    to."""


class KlSection(Section):
    """The penalty on moving away from the model that the run starts from."""

    estimator: KlEstimator
    coefficient: Factor
    where: KlPlace = KlPlace.LOSS


class LossSection(Section):
    """What a loss is made of: an objective per token, weighted by corrections, aggregated over the batch."""

    objective: ObjectiveSection = PpoClip()
    """The loss of a token."""
    corrections: tuple[CorrectionSection, ...] = ()
    """What it is multiplied by, for data that an older policy or another engine has sampled."""
    aggregation: AggregationSection = TokenMean()
    """How the losses of tokens become the loss of a batch."""
    kl: KlSection | None = None
    """With it the trainer holds the model that the run starts from, too."""
