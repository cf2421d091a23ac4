"""Terms of a loss on single rows, and how they add up."""

import dataclasses

import pytest
import torch

from forgeasync.algorithms import RowLoss, RowTokens, TeacherTokens, means_of_taught
from tests.support.tokens import make_tokens, section

T, V = 6, 9


def make_row(*, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, RowTokens]:
    """A row with a teacher, and the student's logits [T, V] that it comes from."""
    generator = torch.Generator().manual_seed(0)
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


def apply(row: RowTokens, **keys: object) -> RowLoss:
    """The loss with these keys on a batch of this row; without an objective of its own."""
    loss = section(**{"objective": {"kind": "none"}} | keys)
    counted = (row.sequence_ids_T, row.sample_weights_T)
    total = loss.count(row.mask_T, *counted)
    return loss.with_terms(
        row, total=total, term_totals=loss.term_counts(row.mask_T, row.teacher.has_target_T, *counted)
    )


def taught(row: RowTokens, **changes: torch.Tensor) -> RowTokens:
    """The row with another teacher."""
    return dataclasses.replace(row, teacher=dataclasses.replace(row.teacher, **changes))


SAMPLED = {"kind": "sampled_reverse_kl"}


def test_the_sampled_term_is_a_policy_gradient_with_minus_the_gap_as_advantage() -> None:
    logits_TV, row = make_row()
    result = apply(row, terms=[SAMPLED | {"weight": 0.5}])
    gap_T = (row.full_logprobs_T - row.teacher.logprobs_T).detach()
    replaced = dataclasses.replace(row, advantages_T=-0.5 * gap_T)
    expected = apply(replaced, objective={"kind": "reinforce"})
    found_TV, expected_TV = (
        torch.autograd.grad(one.loss, logits_TV, retain_graph=True)[0] for one in (result, expected)
    )
    torch.testing.assert_close(found_TV, expected_TV)
    assert float(result.sums["teacher/gap_abs_mean"]) == pytest.approx(
        float(gap_T.abs()[row.mask_T].sum()), rel=1e-6
    )
    assert float(result.sums["teacher/version"]) == 4.0 + 5.0 + 7.0 + 8.0 + 9.0, "of the trained tokens"


def test_gaps_are_capped_and_counted() -> None:
    _, row = make_row()
    far = taught(row, logprobs_T=row.teacher.logprobs_T - 100.0)
    result = apply(far, terms=[SAMPLED | {"max_gap": 2.0}])
    assert float(result.sums["teacher/capped_share"]) == 5.0
    torch.testing.assert_close(result.loss, 2.0 * row.logprobs_T[row.mask_T].mean())


def test_a_term_leaves_the_gradients_of_the_others_as_they_are_to_the_last_bit() -> None:
    """Each has a denominator of its own."""

    def gradients(**keys: object) -> tuple[torch.Tensor, ...]:
        """By what the row says of each token: how these depend on weights is no matter of a loss."""
        _, row = make_row(dtype=torch.float32)
        leaves = (row.logprobs_T, row.full_logprobs_T, row.teacher.student_topk_TK)
        return torch.autograd.grad(apply(row, **keys).loss, leaves, allow_unused=True, materialize_grads=True)

    clip, topk = {"kind": "ppo_clip"}, {"kind": "topk_kl", "top_k": 4}
    entropy = {"kind": "cross_entropy", "aggregation": {"kind": "sequence_mean_of_token_sum"}}
    found = gradients(objective=clip, terms=[SAMPLED, topk, entropy])
    # The sampled term and the objective meet in one leaf, the others have one each.
    assert torch.equal(found[0], gradients(objective=clip)[0] + gradients(terms=[SAMPLED])[0])
    assert torch.equal(found[1], gradients(terms=[entropy])[1])
    assert torch.equal(found[2], gradients(terms=[topk])[2])


def test_a_row_without_tokens_adds_nothing() -> None:
    """Ranks get such rows that have less to do than others."""
    _, row = make_row()
    none = {
        one.name: value[:0]
        for one in dataclasses.fields(row)
        if isinstance(value := getattr(row, one.name), torch.Tensor)
    }
    of_teacher = {one.name: getattr(row.teacher, one.name)[:0] for one in dataclasses.fields(row.teacher)}
    empty = dataclasses.replace(row, **none, teacher=TeacherTokens(**of_teacher))
    loss = section(terms=[SAMPLED, {"kind": "topk_kl", "top_k": 4}, {"kind": "cross_entropy"}])
    result = loss.with_terms(empty, total=1.0, term_totals=(1.0, 1.0, 1.0))
    assert float(result.loss) == 0.0 and result.loss.requires_grad


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_of_token_mean", "sequence_mean_of_token_sum"]
)
def test_tokens_that_the_teacher_was_not_asked_about_count_in_no_term_that_needs_it(aggregation: str) -> None:
    """As if they were not trained on; in the others they count."""
    how = {"aggregation": {"kind": aggregation}}
    terms = [SAMPLED | how, {"kind": "topk_kl", "top_k": 4} | how, {"kind": "ref_kl"} | how]
    asked_T = torch.tensor([True, True, True, False, True, False])
    logits_TV, row = make_row()
    masked, unasked = dataclasses.replace(row, mask_T=row.mask_T & asked_T), taught(row, has_target_T=asked_T)
    found = []
    for one in (masked, unasked):
        result = apply(one, terms=terms)
        gradient_TV = torch.autograd.grad(result.loss, logits_TV, retain_graph=True)[0]
        assert (gradient_TV.abs().sum(-1) > 0).tolist() == (row.mask_T & asked_T).tolist()
        found.append((result.loss, gradient_TV, result.sums))
    torch.testing.assert_close(found[0], found[1])
    assert float(found[1][2]["teacher/taught_share"]) == 3.0
    others = {"objective": {"kind": "reinforce"}, "terms": [{"kind": "cross_entropy"}]}
    torch.testing.assert_close(apply(row, **others).loss, apply(unasked, **others).loss)


def test_means_of_what_teachers_say_are_over_what_they_were_asked() -> None:
    asked = {"loss": 3.0, "teacher/taught_share": 0.25, "teacher/gap_mean": 0.5}
    assert means_of_taught(asked) == asked | {"teacher/gap_mean": 2.0}
    none = {"teacher/taught_share": 0.0}
    assert means_of_taught(none | {"teacher/gap_mean": 0.0}) == none


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_reference_as_a_teacher_is_the_penalty_of_the_run(estimator: str) -> None:
    """Where nothing is cut and the temperature is 1: value and gradient."""
    logits_TV, row = make_row()
    row = dataclasses.replace(row, logprobs_T=row.full_logprobs_T, ref_logprobs_T=row.teacher.logprobs_T)
    term = {"kind": "ref_kl", "estimator": estimator, "weight": 0.3}
    penalty = {"estimator": estimator, "coefficient": 0.3, "where": "loss"}
    losses = [
        apply(row, objective={"kind": "reinforce"}, **one).loss
        for one in ({"terms": [term]}, {"kl": penalty})
    ]
    gradients = [torch.autograd.grad(loss, logits_TV, retain_graph=True)[0] for loss in losses]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)
