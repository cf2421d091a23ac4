"""The composed loss against float64 references. In the trainer: test_loss_in_trainer.py."""

import dataclasses
import pickle
from collections.abc import Callable

import pytest
import torch
from pydantic import Field

from forgeasync.algorithms import (
    Loss,
    Objective,
    RowTokens,
    Supervised,
    TeacherTokens,
    TokenMean,
)
from tests.algorithms.rows import Exact, exact, random_row
from tests.support.tokens import K3, make_tokens, section

COMPOSED = {
    "loss": section(
        objective={"kind": "reinforce"},
        corrections=[{"kind": "truncated_is", "cap": 1.1}, {"kind": "age_weight", "half_life": 2.0}],
        aggregation={"kind": "sequence_mean_of_token_mean"},
        kl=K3,
    ),
    "reward": section(
        objective={"kind": "reinforce"},
        corrections=[{"kind": "icepop", "low": 0.7, "high": 1.4}],
        aggregation={"kind": "sequence_mean_of_token_mean"},
        kl={"estimator": "k1", "coefficient": 0.3, "where": "reward"},
    ),
}


def by_hand(e: Exact, case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of tokens, and estimates of their KL."""
    ratios, log = e.ratios().detach(), e.ref - e.x
    if case == "loss":
        kl = log.exp() - 1 - log
        weights = ratios.clamp(max=1.1) * 0.5 ** (e.ages / 2.0)
        return -e.a * e.x * weights + 0.3 * kl, kl
    to_go = (e.own.triu() @ -log).detach()
    weights = ratios.where((ratios >= 0.7) & (ratios <= 1.4), 0.0)
    return -(e.a - 0.3 * to_go) * e.x * weights, -log


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", COMPOSED)
def test_a_composed_loss_and_its_gradient(case: str, seed: int) -> None:
    """Of a batch of two rows."""
    loss, rows = COMPOSED[case], [random_row(seed, is_weighted=True), random_row(seed + 10, is_weighted=True)]
    total = sum(loss.count(row.mask_T, row.sequence_ids_T, row.sample_weights_T) for row in rows)
    results = [loss(row, total=total) for row in rows]
    exacts = [exact(row) for row in rows]
    # Every sequence counts by its weight, and its tokens are its mean.
    shares = [e.weights / e.own.sum(1) for e in exacts]
    sums = [(share * by_hand(e, case)[0]).sum() for share, e in zip(shares, exacts, strict=True)]
    expected = sum(sums) / sum(share.sum() for share in shares)
    found = sum(float(result.loss.detach()) for result in results)
    assert found == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
    expected.backward()
    for row, result, e in zip(rows, results, exacts, strict=True):
        (gradient,) = torch.autograd.grad(result.loss, row.logprobs_T)
        torch.testing.assert_close(gradient[row.mask_T].double(), e.x.grad, rtol=1e-3, atol=1e-5)
        assert not gradient[~row.mask_T].any()
    assert results[0].weights_T is not None and not results[0].weights_T.requires_grad
    estimate, share = ("k3", "truncated") if case == "loss" else ("k1", "masked")
    assert f"correction/{share}_share" in results[0].sums
    _, kl = by_hand(exacts[0], case)
    assert float(results[0].sums[f"kl/{estimate}"]) == pytest.approx(float(kl.sum()), rel=1e-5)
    assert loss.needs_reference and not section().needs_reference


def own_objective(scale: float) -> Callable[[RowTokens], tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """As a user might write one: the log-probability itself, scaled."""
    return lambda row: (scale * row.logprobs_T, {})


class OwnObjective(Objective):
    """The same as a class."""

    scale: float = Field(gt=0.0)

    @property
    def needs_proximal(self) -> bool:
        return self.scale > 2.0

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.scale * row.logprobs_T, {}


def own_estimator(row: RowTokens) -> torch.Tensor:
    return row.masked(row.logprobs_T - row.ref_logprobs_T).abs()


class OwnAggregation(TokenMean):
    """Twice the mean."""

    def summed(
        self, values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor
    ) -> torch.Tensor:
        return 2.0 * super().summed(values_T, mask_T, sequence_ids_T)


@pytest.mark.parametrize("factory", ["own_objective", "OwnObjective"])
def test_an_objective_of_ones_own(factory: str) -> None:
    row = random_row(0)
    keys = {"kind": "python", "factory": f"tests.algorithms.test_loss.{factory}", "options": {"scale": 3.0}}
    loss = section(objective=keys)
    expected = torch.where(row.mask_T, 3.0 * row.logprobs_T, 0.0).sum() / 4.0
    torch.testing.assert_close(loss(row, total=4.0).loss, expected)
    assert loss.needs_proximal == (factory == "OwnObjective")
    assert pickle.loads(pickle.dumps(loss)) == loss, "it travels to the trainer's processes"


def test_an_estimator_and_an_aggregation_of_ones_own() -> None:
    row = random_row(0)
    estimator = {"kind": "python", "factory": "tests.algorithms.test_loss.own_estimator"}
    loss = section(
        objective={"kind": "reinforce"},
        kl={"estimator": estimator, "coefficient": 0.5},
        aggregation={"kind": "python", "factory": "tests.algorithms.test_loss.OwnAggregation"},
    )
    kl_T = (row.logprobs_T - row.ref_logprobs_T).abs()
    losses_T = -row.advantages_T * row.logprobs_T + 0.5 * kl_T
    found = loss(row, total=4.0)
    torch.testing.assert_close(found.loss, 2.0 * torch.where(row.mask_T, losses_T, 0.0).sum() / 4.0)
    torch.testing.assert_close(found.sums["kl/python"], kl_T[row.mask_T].detach().sum())
    ones_T = row.sample_weights_T
    assert loss.count(row.mask_T, row.sequence_ids_T, ones_T) == row.mask_T.sum()


def test_supervised_is_the_negative_log_likelihood_of_all_tokens() -> None:
    row = random_row(0)
    loss = Loss(objective=Supervised())
    assert not loss.needs_reference
    total = loss.count(row.mask_T, row.sequence_ids_T, row.sample_weights_T)
    assert float(total) == int(row.mask_T.sum())
    torch.testing.assert_close(loss(row, total=total).loss, -row.logprobs_T[row.mask_T].mean())


def test_decoupled_ppo_around_the_current_policy() -> None:
    """Its gradient is that of -A * logprob, weighted by current / behavior, 0 above the cap."""
    row = dataclasses.replace(random_row(0), proximal_logprobs_T=None)
    loss = section(objective={"kind": "decoupled_ppo", "clip": 0.2, "behavior_cap": 1.2})
    loss(row, total=1.0).loss.backward()
    ratio_T = (row.logprobs_T.detach() - row.behavior_logprobs_T).exp()
    weights_T = torch.where(row.mask_T & (ratio_T <= 1.2), ratio_T, 0.0)
    assert row.logprobs_T.grad is not None
    torch.testing.assert_close(row.logprobs_T.grad, -row.advantages_T * weights_T)


def test_corrections_see_the_advantage_of_the_sequence_itself() -> None:
    """A penalty in the reward changes the objective's advantages from token to token, not theirs."""
    loss = section(
        corrections=[{"kind": "off_policy_sequence_mask", "threshold": 0.1}],
        objective={"kind": "reinforce"},
        kl={"coefficient": 0.5, "estimator": "k1", "where": "reward"},
    )
    tokens = make_tokens(
        torch.tensor([-1.0, -2.0], requires_grad=True),
        behavior_logprobs_T=torch.zeros(2),
        advantages_T=torch.tensor([0.25, 0.25]),
        ref_logprobs_T=torch.tensor([-3.0, -3.0]),
    )
    found = loss(tokens, total=2.0)
    assert found.advantages_T.tolist() == [0.25 - 0.5 * (2.0 + 1.0), 0.25 - 0.5 * 1.0]
    assert found.weights_T is not None and found.weights_T.tolist() == [1.0, 1.0], "only bad ones are masked"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("aggregation", "count", "divisor"),
    [
        ({"kind": "token_mean"}, 1000, 1),
        ({"kind": "sequence_mean_of_token_mean"}, 500, 2),
        ({"kind": "sequence_mean_of_token_sum"}, 500, 1),
        ({"kind": "constant_length", "length": 8}, 500, 8),
    ],
    ids=["token_mean", "token means", "token sums", "constant_length"],
)
def test_in_a_row_without_sample_weights_each_sequence_counts_once(
    aggregation: dict[str, object], count: int, divisor: int, dtype: torch.dtype
) -> None:
    """As a user builds it for a test of an own loss. 500 sequences of 2 tokens: bfloat16 counts to 256."""
    generator = torch.Generator().manual_seed(0)
    logprobs_T = -torch.rand(1000, generator=generator, dtype=torch.float64)
    advantages_T = torch.randn(1000, generator=generator, dtype=torch.float64).to(dtype)
    row = make_tokens(
        logprobs_T.to(dtype).requires_grad_(),
        advantages_T=advantages_T,
        sequence_ids_T=torch.arange(1000) // 2,
    )
    assert row.sample_weights_T.dtype == torch.float32
    assert row.sample_weights_T.tolist() == [1.0] * 1000
    loss = section(objective={"kind": "reinforce"}, aggregation=aggregation)
    total = loss.count(row.mask_T, row.sequence_ids_T, row.sample_weights_T)
    assert float(total) == count
    # Of a token the objective is minus advantage times log-probability; a sequence has 2 tokens.
    expected = -float((advantages_T.double() * row.logprobs_T.double()).sum()) / divisor / count
    error = {torch.bfloat16: 0.02, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert float(loss(row, total=total).loss) == pytest.approx(expected, rel=error, abs=error)
    (gradient_T,) = torch.autograd.grad(loss(row, total=total).loss, row.logprobs_T)
    torch.testing.assert_close(
        gradient_T.double(), -advantages_T.double() / divisor / count, rtol=0.01, atol=0.0
    )


def test_what_a_teacher_says_of_a_token_is_asked_for_unless_it_is_said_otherwise() -> None:
    logprobs_T = torch.tensor([-1.0, -2.0, -3.0])
    none_TK = torch.zeros(3, 0)
    teacher = TeacherTokens(logprobs_T=logprobs_T, topk_TK=none_TK, student_topk_TK=none_TK)
    assert teacher.has_target_T.tolist() == [True] * 3
    assert teacher.has_target_T.dtype == torch.bool
    assert (teacher.versions_T.tolist(), teacher.versions_T.dtype) == ([0.0] * 3, torch.float32)
