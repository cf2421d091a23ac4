"""Objectives, corrections, KL estimates and aggregations against float64 references, sequence by sequence.

The references take the log-probabilities twice: ``x`` is what a gradient flows through, ``x0`` the same
numbers where the formula stops it. Gradients are compared with central differences of the references in
``x``.
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
from tests.support.tokens import make_tokens

Sequences = list[list[int]]
"""Masked positions of every sequence."""
Reference = Callable[[Sequence[float], Sequence[float], "Batch"], list[float]]


class Batch:
    """Random packed tokens of uneven sequences, some masked out, one sequence wholly."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 9, size=6)
        ids = np.repeat(rng.permutation(len(lengths)) * 7, lengths)
        num = len(ids)
        self.ids = torch.from_numpy(ids)
        mask = rng.random(num) < 0.8
        mask[ids == 0] = False
        mask[ids == 7] = True
        self.mask = torch.from_numpy(mask)
        self.logprobs = rng.uniform(-4, -0.1, num).astype(np.float32)
        shift = rng.normal(0, 0.4, num).astype(np.float32)
        self.behavior = (self.logprobs - shift).astype(np.float32)
        self.behavior[~mask] = np.nan  # nothing sampled these
        self.proximal = (self.logprobs - 0.5 * shift).astype(np.float32)
        by_sequence = dict(zip(np.unique(ids).tolist(), rng.normal(0, 1, len(lengths)), strict=True))
        self.advantages = np.asarray([by_sequence[i] for i in ids.tolist()], np.float32)
        self.sequences: Sequences = [
            [t for t in range(num) if ids[t] == i and mask[t]] for i in np.unique(ids)
        ]

    def of(self, token: int) -> list[int]:
        return next(s for s in self.sequences if token in s)

    @property
    def tokens(self) -> list[int]:
        return [t for s in self.sequences for t in s]

    def row(self, logprobs_T: torch.Tensor) -> RowTokens:
        return make_tokens(
            logprobs_T,
            behavior_logprobs_T=torch.from_numpy(self.behavior),
            advantages_T=torch.from_numpy(self.advantages),
            mask_T=self.mask,
            sequence_ids_T=self.ids,
            proximal_logprobs_T=torch.from_numpy(self.proximal),
        )


def ratio(x: Sequence[float], batch: Batch, t: int) -> float:
    return math.exp(x[t] - float(batch.behavior[t]))


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def surrogate(r: float, a: float, low: float, high: float) -> float:
    return -min(r * a, clip(r, 1 - low, 1 + high) * a)


def _ppo(x: Sequence[float], x0: Sequence[float], b: Batch) -> list[float]:
    return [surrogate(ratio(x, b, t), float(b.advantages[t]), 0.2, 0.28) for t in b.tokens]


def _dual(x: Sequence[float], x0: Sequence[float], b: Batch) -> list[float]:
    tokens = zip(_ppo(x, x0, b), b.advantages[b.tokens].tolist(), strict=True)
    return [min(loss, 1.3 * abs(a)) if a < 0 else loss for loss, a in tokens]


def _cispo(x: Sequence[float], x0: Sequence[float], b: Batch) -> list[float]:
    return [-clip(ratio(x0, b, t), 0.8, 1.28) * float(b.advantages[t]) * x[t] for t in b.tokens]


def _gspo(x: Sequence[float], x0: Sequence[float], b: Batch) -> list[float]:
    losses = []
    for t in b.tokens:
        logs = [x[u] - float(b.behavior[u]) for u in b.of(t)]
        losses.append(surrogate(math.exp(sum(logs) / len(logs)), float(b.advantages[t]), 0.05, 0.1))
    return losses


def _reinforce(x: Sequence[float], x0: Sequence[float], b: Batch) -> list[float]:
    return [-float(b.advantages[t]) * x[t] for t in b.tokens]


def _topr(x: Sequence[float], x0: Sequence[float], b: Batch) -> list[float]:
    losses = []
    for t in b.tokens:
        a = float(b.advantages[t])
        whole = math.exp(sum(x0[u] - float(b.behavior[u]) for u in b.of(t)))
        losses.append(-(1.0 if a >= 0 else clip(whole, 0, 1)) * a * x[t])
    return losses


def _kimi(x: Sequence[float], x0: Sequence[float], b: Batch) -> list[float]:
    losses = []
    for t in b.tokens:
        whole = sum(x[u] - float(b.behavior[u]) for u in b.of(t))
        losses.append(-float(b.advantages[t]) * x[t] + 0.15 * (x[t] - float(b.behavior[t])) * whole)
    return losses


def _decoupled(x: Sequence[float], x0: Sequence[float], b: Batch) -> list[float]:
    losses = []
    for t in b.tokens:
        weight = math.exp(float(b.proximal[t]) - float(b.behavior[t]))
        loss = surrogate(math.exp(x[t] - float(b.proximal[t])), float(b.advantages[t]), 0.2, 0.2)
        losses.append(0.0 if weight > 1.2 else weight * loss)
    return losses


OBJECTIVES: dict[str, tuple[Objective, Reference]] = {
    "ppo_clip": (PpoClip(), _ppo),
    "dual_clip": (PpoClip(dual_clip=1.3), _dual),
    "cispo": (Cispo(clip_low=0.2, clip_high=0.28), _cispo),
    "gspo": (Gspo(clip_low=0.05, clip_high=0.1), _gspo),
    "reinforce": (Reinforce(), _reinforce),
    "topr": (Topr(), _topr),
    "kimi15": (Kimi15(tau=0.3), _kimi),
    "decoupled_ppo": (DecoupledPpo(clip=0.2, behavior_cap=1.2), _decoupled),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_and_their_gradients(name: str, seed: int) -> None:
    objective, reference = OBJECTIVES[name]
    batch = Batch(seed)
    logprobs_T = torch.from_numpy(batch.logprobs).clone().requires_grad_()
    losses_T, sums = objective(batch.row(logprobs_T))
    x0 = [float(v) for v in batch.logprobs]
    found = losses_T[batch.tokens]
    np.testing.assert_allclose(
        found.detach().double().numpy(), reference(x0, x0, batch), rtol=1e-4, atol=1e-5
    )
    found.sum().backward()
    assert logprobs_T.grad is not None and torch.isfinite(logprobs_T.grad).all()
    step = 1e-6
    for t in range(len(x0)):
        up, down = [*x0], [*x0]
        up[t] += step
        down[t] -= step
        slope = (sum(reference(up, x0, batch)) - sum(reference(down, x0, batch))) / (2 * step)
        assert float(logprobs_T.grad[t]) == pytest.approx(slope, rel=2e-3, abs=2e-3), t
    assert all(0 <= float(value) <= len(batch.tokens) for value in sums.values())


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
    ("objective", "ratios", "advantages", "name", "expected"),
    [
        (PpoClip(clip_low=0.2, clip_high=0.28), SIX, [1, 1, 1, -1, -1, 1], "clipped_share", 2),
        (PpoClip(dual_clip=1.5), SIX, [0, 0, 0.5, -0.5, -2, -1], "dual_clipped_share", 1),
        (Cispo(clip_low=0.2, clip_high=0.28), SIX, [1, -1, 1, 1, 1, 1], "clipped_share", 3),
        (DecoupledPpo(behavior_cap=1.22), SIX, [1, 1, 1, -1, 1, -1], "behavior_capped_share", 2),
        # Of whole sequences: the first became likelier.
        (Topr(), SIX, [-1, -1, 0, 1, 1, -1], "tapered_share", 0),
        (Topr(), [0.5, 0.5, 1.0], [-1, -1, -1], "tapered_share", 3),
    ],
)
def test_shares_count_the_tokens_they_name(
    objective: Objective, ratios: list[float], advantages: list[float], name: str, expected: int
) -> None:
    """A masked token of ratio 100 beside them counts nowhere."""
    _, sums = objective(one_sequence(ratios, advantages))
    assert int(sums[f"objective/{name}"]) == expected


def test_corrections_count_what_they_change() -> None:
    tokens = one_sequence([0.5, 1.0, 2.0, 3.0], [1.0, -1.0, 1.0, -1.0])
    weights_T, sums = TruncatedIs(cap=2.0)(tokens)
    assert weights_T.tolist() == pytest.approx([0.5, 1.0, 2.0, 2.0, 0.0])
    assert int(sums["correction/truncated_share"]) == 1
    weights_T, sums = MaskedIs(low=0.75, high=2.5)(tokens)
    assert weights_T.tolist() == pytest.approx([0.0, 1.0, 2.0, 0.0, 0.0])
    assert int(sums["correction/masked_share"]) == 2
    weights_T, _ = MaskedIs(low=1.0, high=2.5)(one_sequence([1.0], [1.0]))
    assert weights_T.tolist() == [1.0, 0.0], "the bounds are inside"
    assert TruncatedIs(cap=0.5)(one_sequence([1.0], [1.0]))[0].tolist() == [0.5, 0.0]


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


def _level_ratio(batch: Batch, t: int, level: RatioLevel) -> float:
    logs = [float(batch.logprobs[u]) - float(batch.behavior[u]) for u in batch.of(t)]
    match level:
        case "token":
            return ratio([float(v) for v in batch.logprobs], batch, t)
        case "sequence":
            return math.exp(sum(logs))
        case "geometric":
            return math.exp(sum(logs) / len(logs))


@pytest.mark.parametrize("level", get_args(RatioLevel))
@pytest.mark.parametrize("seed", range(3))
def test_importance_weights(level: RatioLevel, seed: int) -> None:
    batch = Batch(seed)
    row = batch.row(torch.from_numpy(batch.logprobs).clone().requires_grad_())
    truncate, cut = TruncatedIs(cap=1.1, level=level), MaskedIs(low=0.8, high=1.25, level=level)
    (truncated_T, _), (masked_T, _) = truncate(row), cut(row)
    both_T, sums = product([truncate, cut], row)
    assert not truncated_T.requires_grad
    assert not truncated_T[~batch.mask].any() and not masked_T[~batch.mask].any()
    for t in batch.tokens:
        r = _level_ratio(batch, t, level)
        assert float(truncated_T[t]) == pytest.approx(min(r, 1.1), rel=1e-4)
        assert float(masked_T[t]) == pytest.approx(r if 0.8 <= r <= 1.25 else 0.0, rel=1e-4)
    torch.testing.assert_close(both_T, truncated_T * masked_T)
    assert set(sums) == {"correction/truncated_share", "correction/masked_share"}


@pytest.mark.parametrize("seed", range(3))
def test_off_policy_sequences_are_masked(seed: int) -> None:
    batch = Batch(seed)
    weights_T, sums = OffPolicySequenceMask(threshold=0.05)(batch.row(torch.from_numpy(batch.logprobs)))
    dropped = 0
    for sequence in batch.sequences:
        gaps = [float(batch.behavior[t]) - float(batch.logprobs[t]) for t in sequence]
        is_dropped = (
            bool(sequence) and float(batch.advantages[sequence[0]]) < 0 and sum(gaps) / len(gaps) > 0.05
        )
        dropped += len(sequence) * is_dropped
        assert all(float(weights_T[t]) == 1.0 - is_dropped for t in sequence)
    assert int(sums["correction/off_policy_masked_share"]) == dropped


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
def test_aggregations_of_a_batch_and_of_its_pieces(seed: int) -> None:
    batch = Batch(seed)
    values = torch.from_numpy(np.random.default_rng(seed).normal(size=len(batch.ids)).astype(np.float32))
    counted = [s for s in batch.sequences if s]
    sums = [sum(float(values[t]) for t in s) for s in counted]
    means = [total / len(s) for total, s in zip(sums, counted, strict=True)]
    expected = {
        TokenMean(): sum(sums) / len(batch.tokens),
        SequenceMeanOfTokenMean(): sum(means) / len(means),
        SequenceMeanOfTokenSum(): sum(sums) / len(sums),
        ConstantLength(length=50): sum(sums) / 50 / len(sums),
    }
    # Pieces of whole sequences, uneven, one of them empty.
    parts = [torch.isin(batch.ids, torch.tensor(ids)) for ids in ([0, 7], [14, 21, 28], [35], [99])]
    for aggregate, number in expected.items():
        whole = aggregate(values_T=values, mask_T=batch.mask, sequence_ids_T=batch.ids)
        assert float(whole) == pytest.approx(number, rel=1e-5, abs=1e-6)
        rows = [{"mask_T": batch.mask[part], "sequence_ids_T": batch.ids[part]} for part in parts]
        total = sum(aggregate.count(*row.values()) for row in rows)
        pieces = [
            float(aggregate(values_T=values[part], total=total, **row))
            for part, row in zip(parts, rows, strict=True)
        ]
        assert sum(pieces) == pytest.approx(number, rel=1e-6, abs=1e-6)


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
