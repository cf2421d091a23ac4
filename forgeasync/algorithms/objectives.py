"""Policy objectives: losses of tokens, computed from log-probabilities and advantages.

Ratios and their gradients are at most e^20 (``forgeasync.algorithms.row_tokens``).

Shape suffix: T trained tokens of a row.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from forgeasync.algorithms.own_results import check_losses
from forgeasync.algorithms.row_tokens import RowTokens, capped
from forgeasync.schema import OWN_INSTANCE, Factor, PythonCode, Section, build_code

if TYPE_CHECKING:
    import torch


class Objective(Section):
    """Base class of objectives, which compute a loss for each token.

    To define your own loss, write a class like those below. Its fields are its options, with their bounds,
    and ``__call__`` is the formula.

        import forgeasync as fa
        import torch


        class SoftGate(fa.Objective):
            '''A clip without an edge (Gao et al., "Soft Adaptive Policy Optimization", 2025).'''

            temperature: float = 1.0

            def __call__(self, row):
                ratio_T = row.log_ratios().exp()
                gate_T = 4.0 / self.temperature * torch.sigmoid(self.temperature * (ratio_T - 1.0))
                sums = {"objective/gate": row.masked(gate_T.detach()).sum()}
                return -gate_T * row.advantages_T, sums

    To train with it, set ``objective: {kind: python, factory: my_losses.SoftGate, options: {temperature:
    2.0}}``. A function of ``row``, or a function that returns one, works as well.
    """

    ratio_inside: ClassVar[str | None] = None
    """Description of where the formula contains the importance ratio current / behavior; None if nowhere.

    If it does, a correction by the ratio would count it twice. The error that refuses one quotes this text.
    """
    looks_at_sequences: ClassVar[bool] = False
    """Whether a token's loss depends on its whole sequence."""

    @property
    def needs_proximal(self) -> bool:
        """Whether rows need ``proximal_logprobs_T`` if a batch has several optimizer steps."""
        return False

    def importance_ratios(self, row: RowTokens) -> torch.Tensor:
        """Return the importance ratio of each token [T] as the formula uses it; 1 where masked out.

        By default, and for formulas without a ratio, it is each token's ratio of current to behavior policy.
        """
        return capped(row.log_ratios()).exp()

    @abstractmethod
    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the losses of tokens, and sums for metrics.

        Returns:
            Losses [T], floating point, differentiable in ``row.logprobs_T``, which the caller weights, masks
            and aggregates; and sums over the trained tokens by metric name. A metric is its sum divided by
            the number of trained tokens.
        """


def _clipped_surrogate(
    ratio_T: torch.Tensor, row: RowTokens, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -min(ratio * A, clip(ratio) * A), and whether each trained token is clipped; both [T]."""
    plain_T = ratio_T * row.advantages_T
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * row.advantages_T
    return -plain_T.minimum(clipped_T), row.mask_T & (clipped_T < plain_T)


class PpoClip(Objective):
    """Clipped surrogate of PPO and GRPO: -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    The ratio is current over behavior policy. With ``dual_clip`` c, the loss of a token with negative
    advantage is at most c * abs(A). Source: Schulman et al., "Proximal Policy Optimization", 2017, equation
    7; separate bounds from Yu et al., "DAPO", 2025, equation 8; dual clip from Ye et al., "Mastering Complex
    Control in MOBA Games", 2020, equation 5.
    """

    ratio_inside: ClassVar[str | None] = "its loss already contains the ratio current / behavior"

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Lower clip: ratios are clipped at 1 - clip_low."""
    clip_high: Factor = 0.28
    """Upper clip: ratios are clipped at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1.0, le=1e30)
    """Bound on the loss of a token with negative advantage, as a multiple of abs(A). null: no bound."""

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ratio_T = self.importance_ratios(row)
        losses_T, is_clipped_T = _clipped_surrogate(ratio_T, row, self.clip_low, self.clip_high)
        sums = {"objective/clipped_share": is_clipped_T.sum()}
        if self.dual_clip is not None:
            bound_T = -self.dual_clip * row.advantages_T
            is_bounded_T = row.mask_T & (row.advantages_T < 0) & (losses_T > bound_T)
            losses_T = bound_T.where(is_bounded_T, losses_T)
            sums["objective/dual_clipped_share"] = is_bounded_T.sum()
        return losses_T, sums


class Cispo(Objective):
    """-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprob. Clipped tokens keep their gradient.

    Source: MiniMax, "MiniMax-M1", 2025, equations 4 and 5; sg stops the gradient.
    """

    ratio_inside: ClassVar[str | None] = "its loss already contains the ratio current / behavior"

    kind: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, gt=0.0, le=1.0)
    """Lower clip: ratios below 1 - clip_low are raised to it. 1 leaves small ratios unchanged."""
    clip_high: Factor
    """Upper clip: ratios are clipped at 1 + clip_high."""

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ratio_T = self.importance_ratios(row).detach()
        clipped_T = ratio_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        is_clipped_T = row.mask_T & (clipped_T != ratio_T)
        return -clipped_T * row.advantages_T * row.logprobs_T, {"objective/clipped_share": is_clipped_T.sum()}


class Gspo(Objective):
    """Clipped surrogate with the sequence's ratio per token, exp(mean of its tokens' log ratios).

    Every token has the loss of its whole sequence, so the aggregation must be
    ``sequence_mean_of_token_mean``. Source: Zheng et al., "Group Sequence Policy Optimization", 2025,
    equations 5 and 7.
    """

    ratio_inside: ClassVar[str | None] = "its loss already contains the sequence's ratio"
    looks_at_sequences: ClassVar[bool] = True

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0.0, lt=1.0)
    """Lower clip: ratios are clipped at 1 - clip_low."""
    clip_high: Factor = 4e-4
    """Upper clip: ratios are clipped at 1 + clip_high."""

    def importance_ratios(self, row: RowTokens) -> torch.Tensor:
        return capped(row.sequence_means(row.log_ratios())).exp()

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ratio_T = self.importance_ratios(row)
        losses_T, is_clipped_T = _clipped_surrogate(ratio_T, row, self.clip_low, self.clip_high)
        return losses_T, {"objective/clipped_share": is_clipped_T.sum()}


class Reinforce(Objective):
    """-A * logprob, the policy gradient without a ratio.

    Source: Williams, "Simple Statistical Gradient-Following Algorithms", 1992.
    """

    kind: Literal["reinforce"] = "reinforce"

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -row.advantages_T * row.logprobs_T, {}


class DecoupledPpo(Objective):
    """PPO clipped around a proximal policy, weighted by proximal / behavior up to a cap.

    Tokens with a larger weight than the cap have loss 0. The proximal policy is the policy at the start of
    the batch. In the first step of a batch, and thus always with ``trainer.steps_per_batch: 1``, it is the
    current policy. Source: Fu et al., "AReaL", 2025, equation 5; the cap is that of its implementation.
    """

    ratio_inside: ClassVar[str | None] = "its behavior weight is that ratio already (behavior_cap bounds it)"

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    clip: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Ratios to the proximal policy are clipped at 1 - clip and 1 + clip."""
    behavior_cap: Factor = 5.0
    """Cap on proximal / behavior. Tokens with a larger weight are left out."""

    @property
    def needs_proximal(self) -> bool:
        return True

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        current = row.logprobs_T if row.proximal_logprobs_T is None else row.proximal_logprobs_T
        proximal_T = current.detach()
        weights_T = capped(row.masked(proximal_T - row.behavior_logprobs_T)).exp()
        is_capped_T = row.mask_T & (weights_T > self.behavior_cap)
        ratio_T = capped(row.masked(row.logprobs_T - proximal_T)).exp()
        losses_T, is_clipped_T = _clipped_surrogate(ratio_T, row, self.clip, self.clip)
        return weights_T.where(~is_capped_T, 0.0) * losses_T, {
            "objective/clipped_share": is_clipped_T.sum(),
            "objective/behavior_capped_share": is_capped_T.sum(),
        }


class Topr(Objective):
    """Tapered off-policy REINFORCE: -weight * A * logprob, with weight min(ratio, 1) if A < 0, otherwise 1.

    The ratio is that of the sequence (product over its tokens), without a gradient. Source: Le Roux et al.,
    "Tapered Off-Policy REINFORCE", 2025, equation 7.
    """

    ratio_inside: ClassVar[str | None] = "its loss already contains the sequence's ratio"
    looks_at_sequences: ClassVar[bool] = True

    kind: Literal["topr"] = "topr"

    def importance_ratios(self, row: RowTokens) -> torch.Tensor:
        return row.sequence_sums(row.log_ratios().detach()).clamp(max=0.0).exp()

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ratio_T = self.importance_ratios(row)
        weights_T = ratio_T.where(row.advantages_T < 0, 1.0)
        is_tapered_T = row.mask_T & (weights_T < 1.0)
        return -weights_T * row.advantages_T * row.logprobs_T, {"objective/tapered_share": is_tapered_T.sum()}


class Kimi15(Objective):
    """-A * logprob + tau / 2 * (log ratio)^2 of whole sequences. The square keeps the policy near behavior.

    A token's share of the square is its own log ratio times that of its sequence, so the shares of a sequence
    add up to the square. Source: Kimi Team, "Kimi k1.5", 2025, section 2.3.2, gradient of the surrogate loss.
    """

    looks_at_sequences: ClassVar[bool] = True

    kind: Literal["kimi15"] = "kimi15"
    tau: Factor
    """Factor of the square."""

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_ratio_T = row.log_ratios()
        square_T = log_ratio_T * row.sequence_sums(log_ratio_T)
        return -row.advantages_T * row.logprobs_T + self.tau / 2 * square_T, {}


class Supervised(Objective):
    """Negative log-likelihood of the tokens. Advantages and behavior policy are ignored."""

    kind: Literal["supervised"] = "supervised"

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -row.logprobs_T, {}


class PythonObjective(PythonCode, Objective):
    """Your own loss, ``(row: RowTokens) -> (losses_T, sums)``. ``Objective`` has an example.

    A call raises ValueError if your code returns anything else.
    """

    @property
    def needs_proximal(self) -> bool:
        own = build_code(self, ("row",))
        return isinstance(own, Objective) and own.needs_proximal

    def importance_ratios(self, row: RowTokens) -> torch.Tensor:
        own = build_code(self, ("row",))
        return own.importance_ratios(row) if isinstance(own, Objective) else super().importance_ratios(row)

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        # Checked at every call, because the shape can depend on the tokens.
        return check_losses(build_code(self, ("row",))(row), like_T=row.logprobs_T)


class NoObjective(Objective):
    """Loss 0: rewards have no effect, and only ``algorithm.terms`` train."""

    kind: Literal["none"] = "none"

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return row.logprobs_T * 0.0, {}


AnyObjective = Annotated[
    PpoClip
    | Cispo
    | Gspo
    | Reinforce
    | DecoupledPpo
    | Topr
    | Kimi15
    | Supervised
    | NoObjective
    | PythonObjective,
    Field(discriminator="kind"),
    OWN_INSTANCE,
]
