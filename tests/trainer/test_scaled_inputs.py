"""Formulas on inputs far beyond N(0, 1), against float64: nothing overflows, and gradients are right.

Kernels of attention: test_attention.py.
"""

import math
from typing import get_args

import pytest
import torch

from forgeasync.algorithms import (
    K1,
    K2,
    K3,
    MAX_LOG_RATIO,
    KlEstimator,
    MaskedIs,
    OffPolicySequenceMask,
    RatioLevel,
    RowTokens,
    TruncatedIs,
    UnbiasedK3,
    product,
)
from tests.algorithms.test_objectives import OBJECTIVES
from tests.support.references import FACTS, make_moe, random_ids
from tests.support.tokens import make_tokens
from tests.trainer.test_low_precision_gradients import exact_moe

LOG_RATIOS_T = torch.tensor([-300.0, -90.0, -19.0, -0.1, 0.0, 0.1, 19.0, 21.0, 90.0, 300.0])
"""Beyond what exp() has in float32, on both sides."""


def _tokens(
    log_ratio: float, advantage: float, dtype: torch.dtype = torch.float32, to_proximal: float = 0.0
) -> RowTokens:
    """One sequence of two tokens of this log ratio, and a third that is masked out.

    The proximal policy is this share of the way from the behavior to the current one.
    """
    behavior_T = torch.tensor([-301.0, -301.0, torch.nan], dtype=dtype)
    return make_tokens(
        torch.full((3,), -301.0 + log_ratio, dtype=dtype).requires_grad_(),
        behavior_logprobs_T=behavior_T,
        advantages_T=torch.full((3,), advantage, dtype=dtype),
        mask_T=torch.tensor([True, True, False]),
        proximal_logprobs_T=behavior_T + to_proximal * log_ratio,
    )


@pytest.mark.parametrize(
    ("name", "to_proximal"),
    [*((name, 0.0) for name in OBJECTIVES), *(("decoupled_ppo", x) for x in (0.5, 1.0))],
)
@pytest.mark.parametrize("advantage", [-30.0, 0.0, 6.0])
def test_objectives_at_ratios_that_overflow(name: str, to_proximal: float, advantage: float) -> None:
    for log_ratio in LOG_RATIOS_T.tolist():
        results = []
        # The float64 reference has no need of the bound below: exp(300) is a number there.
        for dtype in (torch.float32, torch.float64):
            tokens = _tokens(log_ratio, advantage, dtype, to_proximal)
            losses_T, _ = OBJECTIVES[name][0](tokens)
            loss = losses_T[tokens.mask_T].sum()
            (gradient_T,) = torch.autograd.grad(loss, tokens.logprobs_T)
            assert loss.isfinite() and gradient_T.isfinite().all(), log_ratio
            results.append((loss.double(), gradient_T.double()))
        torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)
        loss, gradient_T = results[0]
        if name == "ppo_clip" and abs(log_ratio) > 1 and log_ratio * advantage > 0:
            assert (gradient_T == 0).all(), "held back by the clip"
        elif name == "ppo_clip" and advantage < 0 and log_ratio > 0:
            # Away from the token, as strongly as the largest ratio allows.
            capped = torch.tensor(min(log_ratio, MAX_LOG_RATIO)).double().exp()
            torch.testing.assert_close(gradient_T[:2], -advantage * capped.repeat(2), atol=0, rtol=1e-4)
        elif name == "decoupled_ppo" and to_proximal * log_ratio > 2:
            assert loss == 0 and (gradient_T == 0).all(), "above the cap"


@pytest.mark.parametrize("kind", [K1, K2, K3, UnbiasedK3])
def test_kl_at_differences_that_overflow(kind: type[KlEstimator]) -> None:
    """Values and gradients by hand; more than the bound counts as the bound."""
    for log_ratio in LOG_RATIOS_T.tolist():
        current_T = torch.zeros(1, requires_grad=True)
        # Current over behavior has the same ratio as reference over current.
        row = make_tokens(
            current_T,
            behavior_logprobs_T=torch.tensor([-log_ratio]),
            ref_logprobs_T=torch.tensor([log_ratio]),
        )
        values_T = kind()(row)
        (gradient_T,) = torch.autograd.grad(values_T.sum(), current_T)
        x = min(log_ratio, MAX_LOG_RATIO)
        r = math.exp(x)
        k3 = math.expm1(x) - x
        expected = {
            K1: (-log_ratio, 1.0),
            K2: (log_ratio**2 / 2, -log_ratio),
            K3: (k3, -math.expm1(x)),
            UnbiasedK3: (r * k3, r * k3 - r * math.expm1(x)),
        }[kind]
        found = (values_T.item(), gradient_T.item())
        # The gradient of the last is a small difference of large numbers: r * (k3 + 1 - r) = -r * log r.
        atol = 1e-6 * max(1.0, r * r) if kind is UnbiasedK3 else 1e-6
        assert found == pytest.approx(expected, rel=1e-5, abs=atol), log_ratio


@pytest.mark.parametrize("level", get_args(RatioLevel))
def test_corrections_at_ratios_that_overflow(level: RatioLevel) -> None:
    for log_ratio in LOG_RATIOS_T.tolist():
        tokens = _tokens(log_ratio, -30.0)
        both = [TruncatedIs(cap=5.0, level=level), OffPolicySequenceMask(threshold=1e3)]
        weights_T, metrics = product(both, tokens)
        total = log_ratio * (2 if level == "sequence" else 1)
        expected = min(torch.tensor(total).double().exp().item(), 5.0)
        assert weights_T[:2].tolist() == pytest.approx([expected] * 2, rel=1e-4, abs=1e-8)
        assert weights_T[2] == 0
        assert metrics["correction/truncated_share"] == (2 if expected == 5.0 else 0)
        masked_T, _ = MaskedIs(low=0.5, high=5.0, level=level)(tokens)
        assert masked_T.isfinite().all()


@pytest.mark.parametrize("scale", [1.0, 6.0, 30.0])
@pytest.mark.parametrize("own_choice", [True, False], ids=["own", "other"])
def test_an_moe_layer_with_replay_on_large_inputs(scale: float, own_choice: bool) -> None:
    """Other experts than the router's own can have scores of exactly 0 in float32."""
    moe = make_moe()
    torch.manual_seed(1)
    x_BLD = (torch.randn(1, 40, FACTS.hidden_size) * scale).requires_grad_()
    ids_BLK = random_ids(1, 40)
    if own_choice:
        ids_BLK = moe.router(x_BLD)[1]
    with moe.router.replay(ids_BLK):
        out_BLD = moe(x_BLD)
    grad_BLD = torch.randn(out_BLD.shape)
    experts = moe.routed_experts.inner_experts
    leaves = [x_BLD, moe.router.gate.weight, experts.w1_EFD, experts.w2_EDF, experts.w3_EFD]
    ours = (out_BLD, *torch.autograd.grad(out_BLD, leaves, grad_BLD))
    exact_BLD = exact_moe(leaves[0][0].double(), *(one.double() for one in leaves[1:]), ids_BLK[0])[None]
    exact = (exact_BLD, *torch.autograd.grad(exact_BLD, leaves, grad_BLD.double()))
    for one, other in zip(ours, exact, strict=True):
        largest = other.abs().max().item()
        torch.testing.assert_close(one.double(), other.double(), atol=1e-5 * scale * largest, rtol=0)
