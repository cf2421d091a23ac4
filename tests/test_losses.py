"""forgeasync.losses against float64 sums over the whole vocabulary and finite differences."""

import math

import pytest
import torch

import forgeasync as fa

T, V = 5, 11

KINDS = pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])


def distributions(scale: float, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits_TV = scale * torch.randn((T, V), generator=generator, dtype=torch.float64)
    return logits_TV.log_softmax(-1).to(dtype)


def full(student_TV: torch.Tensor, teacher_TV: torch.Tensor, kind: str) -> torch.Tensor:
    """Sums as they are written in textbooks."""
    p_TV, q_TV = teacher_TV.double().exp(), student_TV.double().exp()

    def kl(a_TV: torch.Tensor, b_TV: torch.Tensor) -> torch.Tensor:
        return (a_TV * (a_TV / b_TV).log()).sum(-1)

    mean_TV = (p_TV + q_TV) / 2
    return {
        "forward": kl(p_TV, q_TV),
        "reverse": kl(q_TV, p_TV),
        "jsd": (kl(p_TV, mean_TV) + kl(q_TV, mean_TV)) / 2,
    }[kind]


@KINDS
@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_all_ids_give_the_whole_divergence(kind: str, scale: float) -> None:
    student_TV, teacher_TV = distributions(scale), distributions(scale, seed=1)
    expected_T = full(student_TV, teacher_TV, kind)
    for tail in (True, False):
        found_T = fa.losses.topk_kl(student_TV, teacher_TV, kind=kind, tail=tail)
        assert found_T.shape == (T,) and found_T.dtype == torch.float64
        torch.testing.assert_close(found_T, expected_T, rtol=1e-9, atol=1e-12)
    found_T = fa.losses.topk_kl(student_TV.float(), teacher_TV.float(), kind=kind)
    torch.testing.assert_close(found_T.double(), expected_T, rtol=1e-4, atol=1e-5)


@KINDS
def test_other_ids_are_one_further_event(kind: str) -> None:
    student_TV, teacher_TV = distributions(2.0), distributions(2.0, seed=1)
    ids_TK = teacher_TV.topk(4).indices

    def merged(logprobs_TV: torch.Tensor) -> torch.Tensor:
        known_TK = logprobs_TV.exp().gather(1, ids_TK)
        return torch.cat([known_TK, 1.0 - known_TK.sum(-1, keepdim=True)], -1).log()

    expected_T = full(merged(student_TV), merged(teacher_TV), kind)
    student_TK, teacher_TK = student_TV.gather(1, ids_TK), teacher_TV.gather(1, ids_TK)
    found_T = fa.losses.topk_kl(student_TK, teacher_TK, kind=kind)
    torch.testing.assert_close(found_T, expected_T, rtol=1e-9, atol=1e-12)
    assert (found_T <= full(student_TV, teacher_TV, kind) + 1e-12).all(), "a lower bound"
    bare_T = fa.losses.topk_kl(student_TK, teacher_TK, kind=kind, tail=False)
    assert (bare_T - found_T).abs().min() > 1e-6


@KINDS
@pytest.mark.parametrize("tail", [True, False])
def test_gradients_are_those_of_finite_differences(kind: str, tail: bool) -> None:
    student_TK = distributions(2.0)[:, :4].clone().requires_grad_()
    teacher_TK = distributions(2.0, seed=1)[:, :4].clone().requires_grad_()
    fa.losses.topk_kl(student_TK, teacher_TK, kind=kind, tail=tail).sum().backward()
    assert teacher_TK.grad is None and student_TK.grad is not None
    assert torch.autograd.gradcheck(
        lambda one_TK: fa.losses.topk_kl(one_TK, teacher_TK.detach(), kind=kind, tail=tail), student_TK
    )


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_distributions_have_no_divergence_and_no_gradient(kind: str, dtype: torch.dtype) -> None:
    """Also at the ends: all of the vocabulary, one id that has everything, ids that have nothing."""
    whole_TV = distributions(30.0, dtype=dtype)
    one_TK = torch.tensor([[0.0, -math.inf], [-math.inf, math.log(0.5)]], dtype=dtype)
    for logprobs_TK in (whole_TV, whole_TV[:, :3], one_TK):
        student_TK = logprobs_TK.clone().requires_grad_()
        found_T = fa.losses.topk_kl(student_TK, logprobs_TK, kind=kind)
        assert (found_T.abs() < 1e-6).all()
        found_T.sum().backward()
        assert student_TK.grad is not None and student_TK.grad.isfinite().all()


def test_an_id_that_one_side_rules_out() -> None:
    ruled_out_TK = torch.tensor([[math.log(0.5), -math.inf]])
    other_TK = torch.tensor([[math.log(0.25), math.log(0.5)]])
    # KL(p || q) over the two ids and the tail: p = (1/2, 0, 1/2), q = (1/4, 1/2, 1/4).
    assert fa.losses.topk_kl(other_TK, ruled_out_TK, kind="forward").item() == pytest.approx(math.log(2.0))
    assert fa.losses.topk_kl(other_TK, ruled_out_TK, kind="reverse").item() == math.inf
    # JSD stays finite: mean (3/8, 1/4, 3/8).
    jsd = (math.log(4 / 3) + (0.5 * math.log(2 / 3) + 0.5 * math.log(2.0))) / 2
    assert fa.losses.topk_kl(other_TK, ruled_out_TK, kind="jsd").item() == pytest.approx(jsd)


def test_the_sampled_estimate_is_the_log_ratio_and_right_on_average() -> None:
    student_TV, teacher_TV = distributions(1.0), distributions(1.0, seed=1)
    expected_T = full(student_TV, teacher_TV, "reverse")
    # The expectation over all tokens that the student can draw.
    estimates_TV = torch.stack(
        [fa.losses.sampled_reverse_kl(student_TV[:, v], teacher_TV[:, v]) for v in range(V)], dim=-1
    )
    torch.testing.assert_close((student_TV.exp() * estimates_TV).sum(-1), expected_T)
    student_T = student_TV[:, 0].clone().requires_grad_()
    fa.losses.sampled_reverse_kl(student_T, teacher_TV[:, 0].requires_grad_()).sum().backward()
    assert student_T.grad is not None and (student_T.grad == 1.0).all()


def test_wrong_shapes_and_kinds_are_said() -> None:
    logprobs_TK = distributions(1.0)
    with pytest.raises(ValueError, match=r"student \[5, 11\] and teacher \[5, 3\] must both be \[T, K\]"):
        fa.losses.topk_kl(logprobs_TK, logprobs_TK[:, :3])
    with pytest.raises(ValueError, match=r"must both be \[T\]"):
        fa.losses.sampled_reverse_kl(logprobs_TK, logprobs_TK)
    with pytest.raises(ValueError, match="kind = 'backward'; must be 'forward', 'reverse' or 'jsd'"):
        fa.losses.topk_kl(logprobs_TK, logprobs_TK, kind="backward")  # type: ignore[arg-type]
