"""Objectives, corrections, KL estimates and aggregations against float64 references over trained tokens.

At ratios far beyond what float32 holds nothing overflows, and gradients are right.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import pytest
import torch

from forgeasync.algorithms import (
    K1,
    K2,
    K3,
    MAX_LOG_RATIO,
    AgeWeight,
    Cispo,
    ConstantLength,
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
    SequenceMeanOfTokenMean,
    SequenceMeanOfTokenSum,
    TokenMean,
    Topr,
    TruncatedIs,
    UnbiasedK3,
    product,
)
from tests.algorithms.rows import Exact, exact, random_row
from tests.support.tokens import make_tokens

Reference = Callable[[Exact], torch.Tensor]


def surrogate(ratio: torch.Tensor, a: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def _dual(e: Exact) -> torch.Tensor:
    plain = surrogate(e.ratios(), e.a, 0.2, 0.28)
    return torch.where(e.a < 0, plain.minimum(1.3 * e.a.abs()), plain)


def _topr(e: Exact) -> torch.Tensor:
    whole = (e.own @ (e.x - e.behavior)).exp().detach()
    return -torch.where(e.a < 0, whole.clamp(max=1.0), 1.0) * e.a * e.x


def _kimi(e: Exact) -> torch.Tensor:
    logs = e.x - e.behavior
    return -e.a * e.x + 0.15 * logs * (e.own @ logs)


def _decoupled(e: Exact) -> torch.Tensor:
    weights = (e.proximal - e.behavior).exp()
    losses = surrogate((e.x - e.proximal).exp(), e.a, 0.2, 0.2)
    return torch.where(weights > 1.2, 0.0, weights * losses)


OBJECTIVES: dict[str, tuple[Objective, Reference]] = {
    "ppo_clip": (PpoClip(), lambda e: surrogate(e.ratios(), e.a, 0.2, 0.28)),
    "dual_clip": (PpoClip(dual_clip=1.3), _dual),
    "cispo": (
        Cispo(clip_low=0.2, clip_high=0.28),
        lambda e: -e.ratios().detach().clamp(0.8, 1.28) * e.a * e.x,
    ),
    "gspo": (
        Gspo(clip_low=0.05, clip_high=0.1),
        lambda e: surrogate(e.means(e.x - e.behavior).exp(), e.a, 0.05, 0.1),
    ),
    "reinforce": (Reinforce(), lambda e: -e.a * e.x),
    "topr": (Topr(), _topr),
    "kimi15": (Kimi15(tau=0.3), _kimi),
    "decoupled_ppo": (DecoupledPpo(clip=0.2, behavior_cap=1.2), _decoupled),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_and_their_gradients(name: str, seed: int) -> None:
    objective, reference = OBJECTIVES[name]
    row = random_row(seed)
    losses_T, sums = objective(row)
    e = exact(row)
    expected = reference(e)
    torch.testing.assert_close(losses_T[row.mask_T].double(), expected, rtol=1e-4, atol=1e-5)
    (found,) = torch.autograd.grad(losses_T[row.mask_T].sum(), row.logprobs_T)
    (gradient,) = torch.autograd.grad(expected.sum(), e.x)
    torch.testing.assert_close(found[row.mask_T].double(), gradient, rtol=1e-3, atol=1e-4)
    assert not found[~row.mask_T].any()
    assert all(0 <= float(value) <= len(e.x) for value in sums.values())


def one_sequence(ratios: Sequence[float], advantages: Sequence[float]) -> RowTokens:
    """Tokens of one sequence with these ratios and advantages; one more of ratio 100 that is masked out."""
    num = len(ratios) + 1
    logprobs_T = torch.full((num,), -1.0)
    return make_tokens(
        logprobs_T,
        behavior_logprobs_T=logprobs_T - torch.tensor([*ratios, 100.0]).log(),
        advantages_T=torch.tensor([*advantages, -1.0]),
        mask_T=torch.arange(num) < num - 1,
    )


SIX = [0.5, 1.0, 1.25, 0.75, 1.2, 2.0]


@pytest.mark.parametrize(
    ("part", "ratios", "advantages", "name", "expected"),
    [
        (PpoClip(clip_low=0.2, clip_high=0.28), SIX, [1, 1, 1, -1, -1, 1], "objective/clipped", 2),
        (PpoClip(dual_clip=1.5), SIX, [0, 0, 0.5, -0.5, -2, -1], "objective/dual_clipped", 1),
        (Cispo(clip_low=0.2, clip_high=0.28), SIX, [1, -1, 1, 1, 1, 1], "objective/clipped", 3),
        (DecoupledPpo(behavior_cap=1.22), SIX, [1, 1, 1, -1, 1, -1], "objective/behavior_capped", 2),
        # Of whole sequences: the first became likelier.
        (Topr(), SIX, [-1, -1, 0, 1, 1, -1], "objective/tapered", 0),
        (Topr(), [0.5, 0.5, 1.0], [-1, -1, -1], "objective/tapered", 3),
        # A ratio at the cap or at a bound stays as it is.
        (TruncatedIs(cap=2.0), [0.5, 1.0, 2.0, 3.0], [1, -1, 1, -1], "correction/truncated", 1),
        (MaskedIs(low=0.75, high=2.5), [0.5, 1.0, 2.0, 3.0], [1, -1, 1, -1], "correction/masked", 2),
        (MaskedIs(low=1.0, high=2.5), [1.0], [1], "correction/masked", 0),
    ],
)
def test_shares_count_the_tokens_they_name(
    part: Objective | TruncatedIs | MaskedIs,
    ratios: list[float],
    advantages: list[float],
    name: str,
    expected: int,
) -> None:
    """A masked token of ratio 100 beside them counts nowhere."""
    _, sums = part(one_sequence(ratios, advantages))
    assert int(sums[f"{name}_share"]) == expected


def test_a_sequence_at_the_threshold_stays() -> None:
    tokens = dataclasses.replace(
        one_sequence([1.0, 1.0], [-1.0, -1.0]),
        logprobs_T=torch.tensor([-1.5, -1.5, -1.0]),
        behavior_logprobs_T=torch.tensor([-1.0, -1.0, -1.0]),
    )
    assert OffPolicySequenceMask(threshold=0.5)(tokens)[0].tolist() == [1.0, 1.0, 0.0]
    assert OffPolicySequenceMask(threshold=0.49)(tokens)[0].tolist() == [0.0, 0.0, 0.0]
    without_advantage = one_sequence([0.1, 0.1], [0.0, 0.0])
    assert OffPolicySequenceMask(threshold=0.5)(without_advantage)[0].tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("level", get_args(RatioLevel))
@pytest.mark.parametrize("seed", range(3))
def test_importance_weights(level: RatioLevel, seed: int) -> None:
    row = random_row(seed)
    truncate, cut = TruncatedIs(cap=1.1, level=level), MaskedIs(low=0.8, high=1.25, level=level)
    (truncated_T, _), (masked_T, _) = truncate(row), cut(row)
    both_T, sums = product([truncate, cut], row)
    assert not truncated_T.requires_grad
    assert not truncated_T[~row.mask_T].any() and not masked_T[~row.mask_T].any()
    e = exact(row)
    logs = (e.x - e.behavior).detach()
    ratios = {"token": logs, "sequence": e.own @ logs, "geometric": e.means(logs)}[level].exp()
    torch.testing.assert_close(truncated_T[row.mask_T].double(), ratios.clamp(max=1.1), rtol=1e-4, atol=0)
    kept = ratios.where((ratios >= 0.8) & (ratios <= 1.25), 0.0)
    torch.testing.assert_close(masked_T[row.mask_T].double(), kept, rtol=1e-4, atol=0)
    torch.testing.assert_close(both_T, truncated_T * masked_T)
    assert set(sums) == {"correction/truncated_share", "correction/masked_share"}


@pytest.mark.parametrize("seed", range(3))
def test_off_policy_sequences_are_masked(seed: int) -> None:
    row = random_row(seed)
    weights_T, sums = OffPolicySequenceMask(threshold=0.05)(row)
    e = exact(row)
    is_dropped = (e.a < 0) & (e.means(e.behavior - e.x) > 0.05)
    assert torch.equal(weights_T[row.mask_T] == 0.0, is_dropped)
    assert torch.equal(weights_T[row.mask_T] == 1.0, ~is_dropped)
    assert int(sums["correction/off_policy_masked_share"]) == is_dropped.sum()


def test_kl_estimates() -> None:
    """Over all tokens of a small vocabulary: their expectations are the KL, also when others sampled."""
    generator = torch.Generator().manual_seed(0)
    current, reference, behavior = (
        torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), 0) for _ in range(3)
    )
    exact = float((current.exp() * (current - reference)).sum())
    row = make_tokens(current, behavior_logprobs_T=behavior, ref_logprobs_T=reference)
    assert float((current.exp() * K1()(row)).sum()) == pytest.approx(exact)
    assert float((current.exp() * K3()(row)).sum()) == pytest.approx(exact)
    assert (K3()(row) >= 0).all()
    torch.testing.assert_close(K2()(row), (current - reference) ** 2 / 2)
    assert float((behavior.exp() * UnbiasedK3()(row)).sum()) == pytest.approx(exact)


@pytest.mark.parametrize("estimator", [K1(), K2(), K3(), UnbiasedK3()])
def test_estimates_of_tokens_masked_out_are_0(estimator: KlEstimator) -> None:
    """Behavior and reference may be nan there, and no gradient comes from there."""
    logprobs_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    given_T = torch.tensor([-1.5, torch.nan])
    mask_T = torch.tensor([True, False])
    row = make_tokens(logprobs_T, behavior_logprobs_T=given_T, ref_logprobs_T=given_T, mask_T=mask_T)
    kl_T = estimator(row)
    kl_T.sum().backward()
    assert kl_T[0] != 0 and kl_T[1] == 0
    assert logprobs_T.grad is not None and logprobs_T.grad[0] != 0 and logprobs_T.grad[1] == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_weighted", [False, True])
def test_aggregations_of_a_batch_and_of_its_pieces(is_weighted: bool, seed: int) -> None:
    """Sequences count by their weights, and what is masked out may be nan."""
    row = random_row(seed, is_weighted=is_weighted)
    values_T = torch.from_numpy(np.random.default_rng(seed).normal(size=len(row.mask_T))).float()
    values_T = values_T.where(row.mask_T, torch.nan).requires_grad_()
    fields = {"mask_T": row.mask_T, "sequence_ids_T": row.sequence_ids_T}
    fields |= {"weights_T": row.sample_weights_T} if is_weighted else {}
    e, values = exact(row), values_T.detach()[row.mask_T].double()
    total, num_sequences = (e.weights * values).sum(), (e.weights / e.own.sum(1)).sum()
    expected = {
        TokenMean(): total / e.weights.sum(),
        SequenceMeanOfTokenMean(): (e.weights * values / e.own.sum(1)).sum() / num_sequences,
        SequenceMeanOfTokenSum(): total / num_sequences,
        ConstantLength(length=50): total / 50 / num_sequences,
    }
    # Pieces of whole sequences, uneven, one of them empty.
    parts = [torch.isin(row.sequence_ids_T, torch.tensor(ids)) for ids in ([0, 7], [14, 21, 28], [35], [99])]
    pieces = [{name: field_T[part] for name, field_T in fields.items()} for part in parts]
    for aggregate, number in expected.items():
        whole = aggregate(values_T=values_T, **fields)
        assert float(whole) == pytest.approx(float(number), rel=1e-5, abs=1e-6)
        (gradient_T,) = torch.autograd.grad(whole, values_T)
        assert gradient_T[row.mask_T].all() and not gradient_T[~row.mask_T].any()
        count = sum(aggregate.count(*piece.values()) for piece in pieces)
        found = sum(
            float(aggregate(values_T=values_T[part], total=count, **piece))
            for part, piece in zip(parts, pieces, strict=True)
        )
        assert found == pytest.approx(float(number), rel=1e-5, abs=1e-6)


def test_importance_ratios_are_those_of_the_objective() -> None:
    row = make_tokens(
        torch.tensor([-1.0, -2.0, -0.5, -4.0]),
        behavior_logprobs_T=torch.tensor([-1.5, -1.0, -0.5, -50.0]),
        advantages_T=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        sequence_ids_T=torch.tensor([0, 0, 1, 1]),
    )
    for objective, logs in (
        (PpoClip(), [0.5, -1.0, 0.0, MAX_LOG_RATIO]),
        (Gspo(), [-0.25, -0.25, MAX_LOG_RATIO, MAX_LOG_RATIO]),
        (Topr(), [-0.5, -0.5, 0.0, 0.0]),
    ):
        expected = [math.exp(one) for one in logs]
        assert objective.importance_ratios(row).tolist() == pytest.approx(expected, rel=1e-5)
    unmasked = dataclasses.replace(row, mask_T=torch.zeros(4, dtype=torch.bool))
    assert PpoClip().importance_ratios(unmasked).tolist() == [1.0] * 4


# Ratios that overflow


LOG_RATIOS = (-300.0, -90.0, -19.0, -0.1, 0.0, 0.1, 19.0, 21.0, 90.0, 300.0)
"""Beyond what exp() has in float32, on both sides."""


def far_tokens(log_ratio: float, advantage: float, dtype: torch.dtype = torch.float32) -> RowTokens:
    """One sequence of two tokens of this log ratio, and a third that is masked out."""
    return make_tokens(
        torch.full((3,), -301.0 + log_ratio, dtype=dtype).requires_grad_(),
        behavior_logprobs_T=torch.tensor([-301.0, -301.0, torch.nan], dtype=dtype),
        advantages_T=torch.full((3,), advantage, dtype=dtype),
        mask_T=torch.tensor([True, True, False]),
    )


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("advantage", [-30.0, 0.0, 6.0])
def test_objectives_at_ratios_that_overflow(name: str, advantage: float) -> None:
    for log_ratio in LOG_RATIOS:
        results = []
        # In float64 exp(300) is a number: it has no need of a bound.
        for dtype in (torch.float32, torch.float64):
            tokens = far_tokens(log_ratio, advantage, dtype)
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
            strength = -advantage * math.exp(min(log_ratio, MAX_LOG_RATIO))
            assert gradient_T[:2].tolist() == pytest.approx([strength] * 2, rel=1e-4)


@pytest.mark.parametrize("cap", [0.5, 5.0])
def test_decoupled_ppo_at_ratios_that_overflow(cap: float) -> None:
    for log_ratio in LOG_RATIOS:
        for to_proximal in (0.0, 0.5, 1.0):
            tokens = far_tokens(log_ratio, -30.0)
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
    for log_ratio in LOG_RATIOS:
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
        r, k3 = math.exp(x), math.expm1(x) - x
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
    for log_ratio in LOG_RATIOS:
        tokens = far_tokens(log_ratio, -30.0)
        both = [TruncatedIs(cap=5.0, level=level), OffPolicySequenceMask(threshold=1e3)]
        weights_T, metrics = product(both, tokens)
        total = log_ratio * (2 if level == "sequence" else 1)
        expected = min(math.exp(total), 5.0)
        assert weights_T.tolist() == pytest.approx([expected, expected, 0.0], rel=1e-4, abs=1e-8)
        assert metrics["correction/truncated_share"] == (2 if expected == 5.0 else 0)
        masked_T, _ = MaskedIs(low=0.5, high=5.0, level=level)(tokens)
        assert masked_T.isfinite().all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TruncatedIs(cap=0.0), "cap\n.*greater than or equal"),
        (lambda: TruncatedIs(cap=2.0, level="group"), "level\n.*'token', 'sequence' or 'geometric'"),
        (lambda: PpoClip(dual_clip=0.9), "dual_clip\n.*greater than 1"),
        (lambda: PpoClip(clip_high=math.nan), "clip_high\n.*"),
        (lambda: AgeWeight(half_life=0), "half_life\n.*greater than or equal"),
        (lambda: ConstantLength(length=0), "length\n.*greater than 0"),
        (lambda: Cispo(), "clip_high\n.*required"),
    ],
)
def test_bad_parameters_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
