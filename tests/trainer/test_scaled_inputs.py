"""Formulas on inputs far beyond N(0, 1), against float64: nothing overflows, and gradients are right.

Kernels of attention: test_attention.py.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from forgeasync.algorithms import (
    K1,
    K2,
    K3,
    MAX_LOG_RATIO,
    Cispo,
    DecoupledPpo,
    Gspo,
    Kimi15,
    KlEstimator,
    MaskedIs,
    Objective,
    OffPolicySequenceMask,
    PpoClip,
    RatioLevel,
    Reinforce,
    RowTokens,
    Topr,
    TruncatedIs,
    UnbiasedK3,
    product,
)
from forgeasync.trainer import StepSums, chunked_predictions, grouped_mm
from forgeasync.trainer import logprobs as logprobs_module
from tests.support.processes import run_ranks
from tests.support.references import (
    ALWAYS_GATHER,
    FACTS,
    NEVER_GATHER,
    make_case,
    make_moe,
    random_ids,
    reference,
)
from tests.support.tokens import make_tokens
from tests.support.trainers import make_row

SCALES = pytest.mark.parametrize("scale", [1.0, 6.0, 30.0])

OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "ppo_clip": PpoClip,
    "dual_clip": lambda: PpoClip(dual_clip=3.0),
    "cispo": lambda: Cispo(clip_low=0.2, clip_high=0.28),
    "gspo": Gspo,
    "reinforce": Reinforce,
    "topr": Topr,
    "kimi15": lambda: Kimi15(tau=0.1),
}

LOG_RATIOS_T = torch.tensor([-300.0, -90.0, -19.0, -0.1, 0.0, 0.1, 19.0, 21.0, 90.0, 300.0])
"""Beyond what exp() has in float32, on both sides."""


def _tokens(log_ratio: float, advantage: float, dtype: torch.dtype) -> RowTokens:
    """One sequence of two tokens of this log ratio, and a third that is masked out."""
    behavior_T = torch.tensor([-301.0, -301.0, torch.nan], dtype=dtype)
    return make_tokens(
        torch.full((3,), -301.0 + log_ratio, dtype=dtype).requires_grad_(),
        behavior_logprobs_T=behavior_T,
        advantages_T=torch.full((3,), advantage, dtype=dtype),
        mask_T=torch.tensor([True, True, False]),
    )


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("advantage", [-30.0, 0.0, 6.0])
def test_objectives_at_ratios_that_overflow(name: str, advantage: float) -> None:
    for log_ratio in LOG_RATIOS_T.tolist():
        results = []
        # The float64 reference has no need of the bound below: exp(300) is a number there.
        for dtype in (torch.float32, torch.float64):
            tokens = _tokens(log_ratio, advantage, dtype)
            losses_T, _ = OBJECTIVES[name]()(tokens)
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


@pytest.mark.parametrize("cap", [0.5, 5.0])
def test_decoupled_ppo_at_ratios_that_overflow(cap: float) -> None:
    for log_ratio in LOG_RATIOS_T.tolist():
        for to_proximal in (0.0, 0.5, 1.0):
            tokens = _tokens(log_ratio, -30.0, torch.float32)
            proximal_T = tokens.behavior_logprobs_T + to_proximal * log_ratio
            tokens = dataclasses.replace(tokens, proximal_logprobs_T=proximal_T)
            losses_T, _ = DecoupledPpo(clip=0.2, behavior_cap=cap)(tokens)
            (gradient_T,) = torch.autograd.grad(losses_T[:2].sum(), tokens.logprobs_T)
            assert losses_T[:2].isfinite().all() and gradient_T.isfinite().all()
            if to_proximal * log_ratio > 2:
                assert (losses_T[:2] == 0).all() and (gradient_T == 0).all(), "above the cap"


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
        tokens = _tokens(log_ratio, -30.0, torch.float32)
        both = [TruncatedIs(cap=5.0, level=level), OffPolicySequenceMask(threshold=1e3)]
        weights_T, metrics = product(both, tokens)
        total = log_ratio * (2 if level == "sequence" else 1)
        expected = min(torch.tensor(total).double().exp().item(), 5.0)
        assert weights_T[:2].tolist() == pytest.approx([expected] * 2, rel=1e-4, abs=1e-8)
        assert weights_T[2] == 0
        assert metrics["correction/truncated_share"] == (2 if expected == 5.0 else 0)
        masked_T, _ = MaskedIs(low=0.5, high=5.0, level=level)(tokens)
        assert masked_T.isfinite().all()


def _mismatch(differences: list[float]) -> dict[str, float]:
    num_tokens = len(differences)
    sums = StepSums(num_layers=1, device="cpu")
    is_trained_T = torch.ones(num_tokens, dtype=torch.bool)
    sums.add_mismatch(
        torch.tensor(differences), torch.zeros(num_tokens), is_trained_T, make_row([[0] * num_tokens])
    )
    sums.add_probe("with_replay", torch.tensor(differences))
    return sums.metrics(num_tokens, mesh=None)


def test_metrics_of_a_difference_that_overflows_are_finite() -> None:
    metrics = run_ranks(1, _mismatch, [300.0, -300.0, 0.0])[0]
    assert all(abs(value) < float("inf") for value in metrics.values()), metrics
    assert metrics["mismatch/logprob_abs_max"] == 300.0, "the difference itself is as it was"
    # By hand: k3 of the bound on one side, 300 - 1 on the other.
    by_hand = (torch.tensor(MAX_LOG_RATIO).exp().item() - 1 - MAX_LOG_RATIO + 299) / 3
    assert metrics["mismatch/kl"] == pytest.approx(by_hand, rel=1e-5)
    assert metrics["mismatch/with_replay_kl"] == pytest.approx(by_hand, rel=1e-5)


@SCALES
@pytest.mark.parametrize("cost", [ALWAYS_GATHER, NEVER_GATHER], ids=["read-row-by-row", "dense"])
def test_logprobs_of_large_logits(scale: float, cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding is that of the logits themselves: they are products in float32."""
    monkeypatch.setattr(logprobs_module, "GATHER_COST", cost)
    num_tokens, vocab_size, dim = 40, 64, 16
    generator = torch.Generator().manual_seed(0)
    _, tokens, offsets, ids = make_case(1, num_tokens, vocab_size, largest_set=vocab_size)
    hidden_TD = torch.randn(num_tokens, dim, generator=generator) * scale
    weight_VD = torch.randn(vocab_size, dim, generator=generator) * scale
    factors_T = torch.linspace(-1, 2, num_tokens)
    results = []
    for compute in (
        lambda hidden, weight: chunked_predictions(hidden, weight, tokens, offsets, ids, 0.7).logprobs_T,
        lambda hidden, weight: reference(hidden.double() @ weight.double().T, tokens, offsets, ids, 0.7),
    ):
        leaves = (hidden_TD.clone().requires_grad_(), weight_VD.clone().requires_grad_())
        logprobs_T = compute(*leaves)
        gradients = torch.autograd.grad((logprobs_T * factors_T).sum(), leaves)
        results.append([logprobs_T.detach().double(), *(g.double() for g in gradients)])
    rounding = 1e-6 * scale**2
    torch.testing.assert_close(results[0][0], results[1][0], atol=10 * rounding, rtol=1e-6)
    for ours, exact in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(ours, exact, atol=30 * rounding * scale, rtol=1e-5)


@SCALES
def test_grouped_products_of_large_inputs(scale: float) -> None:
    """An expert without tokens among them; compared with one product per expert in float64."""
    generator = torch.Generator().manual_seed(0)
    counts = [5, 0, 11, 1]
    x_RI = (torch.randn(sum(counts), 32, generator=generator) * scale).requires_grad_()
    weight_EIO = (torch.randn(len(counts), 32, 16, generator=generator) * scale).requires_grad_()
    grad_RO = torch.randn(sum(counts), 16, generator=generator) * scale
    out_RO = grouped_mm(x_RI, weight_EIO, torch.tensor(counts).cumsum(0, dtype=torch.int32))
    exact_RO = torch.cat(
        [part @ w for part, w in zip(x_RI.double().split(counts), weight_EIO.double(), strict=True)]
    )
    ours = (out_RO, *torch.autograd.grad(out_RO, (x_RI, weight_EIO), grad_RO))
    exact = (exact_RO, *torch.autograd.grad(exact_RO, (x_RI, weight_EIO), grad_RO.double()))
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=3e-5 * scale**2, rtol=0)


@SCALES
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
    weights = [moe.router.gate.weight, *moe.routed_experts.inner_experts.parameters()]
    ours = (out_BLD, *torch.autograd.grad(out_BLD, [x_BLD, *weights], grad_BLD))
    x, gate, *experts = (tensor.double() for tensor in (x_BLD, *weights))
    names = [name for name, _ in moe.routed_experts.inner_experts.named_parameters()]
    w1, w2, w3 = (experts[names.index(name)] for name in ("w1_EFD", "w2_EDF", "w3_EFD"))
    scores_BLK = (x @ gate.T).softmax(-1).gather(-1, ids_BLK)
    scores_BLK = scores_BLK / (scores_BLK.sum(-1, keepdim=True) + 1e-20)
    inner_BLEF = F.silu(torch.einsum("bld,efd->blef", x, w1)) * torch.einsum("bld,efd->blef", x, w3)
    outs_BLED = torch.einsum("blef,edf->bled", inner_BLEF, w2)
    chosen_BLKD = outs_BLED.gather(2, ids_BLK[..., None].expand(-1, -1, -1, FACTS.hidden_size))
    exact_BLD = (chosen_BLKD * scores_BLK[..., None]).sum(2)
    exact = (exact_BLD, *torch.autograd.grad(exact_BLD, [x_BLD, *weights], grad_BLD.double()))
    for one, other in zip(ours, exact, strict=True):
        largest = other.abs().max().item()
        torch.testing.assert_close(one.double(), other.double(), atol=1e-5 * scale * largest, rtol=0)
