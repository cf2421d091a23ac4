"""Terms of a loss on single rows, and how they add up."""

import dataclasses

import pytest
import torch

from forgeasync.algorithms import Loss, RowTokens, TeacherTokens, means_of_taught
from tests.support.tokens import make_tokens, section

T, V = 6, 9


def make_row(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, RowTokens]:
    """A row with a teacher, and the student's logits [T, V] that it comes from."""
    generator = torch.Generator().manual_seed(seed)
    logits_TV = torch.randn((T, V), generator=generator, dtype=dtype).requires_grad_()
    teacher_TV = torch.randn((T, V), generator=generator, dtype=dtype).log_softmax(-1)
    ids_T1 = torch.randint(0, V, (T, 1), generator=generator)
    full_TV = logits_TV.log_softmax(-1)
    top = teacher_TV.topk(4)
    row = make_tokens(
        (logits_TV / 0.7).log_softmax(-1).gather(1, ids_T1)[:, 0],
        behavior_logprobs_T=torch.full((T,), -2.0, dtype=dtype),
        advantages_T=torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0, -3.0], dtype=dtype),
        mask_T=torch.tensor([True, True, False, True, True, True]),
    )
    return logits_TV, dataclasses.replace(
        row,
        full_logprobs_T=full_TV.gather(1, ids_T1)[:, 0],
        teacher=TeacherTokens(
            logprobs_T=teacher_TV.gather(1, ids_T1)[:, 0],
            topk_TK=top.values,
            student_topk_TK=full_TV.gather(1, top.indices),
            versions_T=torch.arange(T) + 4.0,
            has_target_T=torch.ones(T, dtype=torch.bool),
        ),
    )


def totals(loss: Loss, row: RowTokens) -> dict[str, object]:
    counted = (row.sequence_ids_T, row.sample_weights_T)
    has_target_T = row.mask_T if row.teacher is None else row.teacher.has_target_T
    return {
        "total": loss.count(row.mask_T, *counted),
        "term_totals": loss.term_counts(row.mask_T, has_target_T, *counted),
    }


SAMPLED = {"kind": "sampled_reverse_kl"}


def test_the_sampled_term_is_a_policy_gradient_with_minus_the_gap_as_advantage() -> None:
    logits_TV, row = make_row()
    loss = section(objective={"kind": "none"}, terms=[SAMPLED | {"weight": 0.5}])
    result = loss.with_terms(row, **totals(loss, row))
    (found_TV,) = torch.autograd.grad(result.loss, logits_TV)
    other_logits_TV, other = make_row()
    assert other.full_logprobs_T is not None and other.teacher is not None
    gap_T = (other.full_logprobs_T - other.teacher.logprobs_T).detach()
    reinforce = section(objective={"kind": "reinforce"})
    replaced = dataclasses.replace(other, advantages_T=-0.5 * gap_T)
    expected = reinforce(
        replaced, total=reinforce.count(row.mask_T, row.sequence_ids_T, row.sample_weights_T)
    )
    (expected_TV,) = torch.autograd.grad(expected.loss, other_logits_TV)
    torch.testing.assert_close(found_TV, expected_TV)
    assert float(result.sums["teacher/gap_abs_mean"]) == pytest.approx(
        float(gap_T.abs()[row.mask_T].sum()), rel=1e-6
    )
    assert float(result.sums["teacher/version"]) == 4.0 + 5.0 + 7.0 + 8.0 + 9.0, "of the trained tokens"


def test_gaps_are_capped_and_counted() -> None:
    _, row = make_row()
    assert row.teacher is not None
    far = dataclasses.replace(row.teacher, logprobs_T=row.teacher.logprobs_T - 100.0)
    row = dataclasses.replace(row, teacher=far)
    loss = section(objective={"kind": "none"}, terms=[SAMPLED | {"max_gap": 2.0}])
    result = loss.with_terms(row, **totals(loss, row))
    assert float(result.sums["teacher/capped_share"]) == 5.0
    expected = 2.0 * row.logprobs_T[row.mask_T].mean()
    torch.testing.assert_close(result.loss, expected)


def test_a_term_leaves_the_gradients_of_the_others_as_they_are_to_the_last_bit() -> None:
    """Each has a denominator of its own."""
    parts = {
        "rl": {"objective": {"kind": "ppo_clip"}, "terms": []},
        "sampled": {"objective": {"kind": "none"}, "terms": [SAMPLED]},
        "topk": {"objective": {"kind": "none"}, "terms": [{"kind": "topk_kl", "top_k": 4}]},
        "ce": {
            "objective": {"kind": "none"},
            "terms": [{"kind": "cross_entropy", "aggregation": {"kind": "sequence_mean_of_token_sum"}}],
        },
    }
    alone = {}
    for name, keys in parts.items():
        _, row = make_row(dtype=torch.float32)
        loss = section(**keys)
        # The gradient by what the row says of each token: how these depend on weights is no matter of a loss.
        leaves = (row.logprobs_T, row.full_logprobs_T, row.teacher.student_topk_TK)  # type: ignore[union-attr]
        found = torch.autograd.grad(
            loss.with_terms(row, **totals(loss, row)).loss, leaves, allow_unused=True, materialize_grads=True
        )
        alone[name] = found
    _, row = make_row(dtype=torch.float32)
    together = section(
        objective=parts["rl"]["objective"],
        terms=[term for keys in parts.values() for term in keys["terms"]],
    )
    leaves = (row.logprobs_T, row.full_logprobs_T, row.teacher.student_topk_TK)  # type: ignore[union-attr]
    found = torch.autograd.grad(together.with_terms(row, **totals(together, row)).loss, leaves)
    # The sampled term and the objective meet in one leaf, the others have one each.
    assert torch.equal(found[0], alone["rl"][0] + alone["sampled"][0])
    assert torch.equal(found[1], alone["ce"][1])
    assert torch.equal(found[2], alone["topk"][2])


def test_a_row_without_tokens_adds_nothing() -> None:
    """Ranks get such rows that have less to do than others."""
    empty = torch.empty(0)
    row = dataclasses.replace(
        make_tokens(empty.clone().requires_grad_()),
        full_logprobs_T=empty.clone().requires_grad_(),
        teacher=TeacherTokens(
            logprobs_T=empty,
            topk_TK=torch.empty(0, 4),
            student_topk_TK=torch.empty(0, 4).requires_grad_(),
            versions_T=empty,
            has_target_T=empty.bool(),
        ),
    )
    terms = [SAMPLED, {"kind": "topk_kl", "top_k": 4}, {"kind": "cross_entropy"}]
    loss = section(terms=terms)
    result = loss.with_terms(row, total=1.0, term_totals=(1.0, 1.0, 1.0))
    assert float(result.loss) == 0.0 and result.loss.requires_grad


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_of_token_mean", "sequence_mean_of_token_sum"]
)
def test_tokens_that_the_teacher_was_not_asked_about_count_in_no_term_that_needs_it(aggregation: str) -> None:
    """As if they were not trained on; in the others they count."""
    how = {"aggregation": {"kind": aggregation}}
    terms = [SAMPLED | how, {"kind": "topk_kl", "top_k": 4} | how, {"kind": "ref_kl"} | how]
    asked_T = torch.tensor([True, True, True, False, True, False])
    found = []
    for as_mask in (True, False):
        logits_TV, row = make_row()
        assert row.teacher is not None
        if as_mask:
            row = dataclasses.replace(row, mask_T=row.mask_T & asked_T)
        else:
            row = dataclasses.replace(row, teacher=dataclasses.replace(row.teacher, has_target_T=asked_T))
        loss = section(objective={"kind": "none"}, terms=terms)
        result = loss.with_terms(row, **totals(loss, row))
        gradient_TV = torch.autograd.grad(result.loss, logits_TV)[0]
        assert (gradient_TV.abs().sum(-1) > 0).tolist() == (row.mask_T & asked_T).tolist()
        found.append((result.loss, gradient_TV, result.sums))
    torch.testing.assert_close(found[0], found[1])
    assert float(found[1][2]["teacher/taught_share"]) == 3.0
    other = section(objective={"kind": "reinforce"}, terms=[{"kind": "cross_entropy"}])
    parts = [other.with_terms(row, **totals(other, row)).loss for row in (make_row()[1], row)]
    torch.testing.assert_close(*parts)


def test_means_of_what_teachers_say_are_over_what_they_were_asked() -> None:
    asked = {"loss": 3.0, "teacher/taught_share": 0.25, "teacher/gap_mean": 0.5}
    assert means_of_taught(asked) == asked | {"teacher/gap_mean": 2.0}
    none = {"teacher/taught_share": 0.0}
    assert means_of_taught(none | {"teacher/gap_mean": 0.0}) == none


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_reference_as_a_teacher_is_the_penalty_of_the_run(estimator: str) -> None:
    """Where nothing is cut and the temperature is 1: value and gradient."""
    found = []
    for as_term in (True, False):
        logits_TV, row = make_row()
        assert row.full_logprobs_T is not None and row.teacher is not None
        row = dataclasses.replace(row, logprobs_T=row.full_logprobs_T, ref_logprobs_T=row.teacher.logprobs_T)
        if as_term:
            terms = [{"kind": "ref_kl", "estimator": estimator, "weight": 0.3}]
            loss = section(objective={"kind": "reinforce"}, terms=terms)
        else:
            penalty = {"estimator": estimator, "coefficient": 0.3, "where": "loss"}
            loss = section(objective={"kind": "reinforce"}, kl=penalty)
        result = loss.with_terms(row, **totals(loss, row))
        found.append((result.loss, torch.autograd.grad(result.loss, logits_TV)[0]))
    torch.testing.assert_close(found[0], found[1])
