"""The experts of a layer against loops over tokens in float64, and what they keep for the backward pass."""

import pytest
import torch
import torch.nn.functional as F

from forgeasync.trainer import TrainingDtypeExperts

DIM, HIDDEN, NUM_EXPERTS = 32, 48, 4

COUNTS = [[5, 0, 9, 2], [0, 0, 16, 0], [0, 0, 0, 0]]
"""Tokens of each expert: some, one, and all have none."""


def make_experts() -> TrainingDtypeExperts:
    torch.manual_seed(0)
    experts = TrainingDtypeExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=NUM_EXPERTS).build()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.3)
    return experts


def by_loops(experts: TrainingDtypeExperts, x_RD: torch.Tensor, counts: list[int]) -> torch.Tensor:
    outputs = []
    for expert, x in enumerate(x_RD.split(counts)):
        gate = x @ experts.w1_EFD[expert].T
        up = x @ experts.w3_EFD[expert].T
        outputs.append((F.silu(gate) * up) @ experts.w2_EDF[expert].T)
    return torch.cat(outputs)


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_output_and_gradients(counts: list[int], scale: float) -> None:
    experts, doubles = make_experts(), make_experts().double()
    x = (scale * torch.randn(sum(counts), DIM)).requires_grad_()
    grad = torch.randn(sum(counts), DIM)
    output = experts(x, torch.tensor(counts))
    x64 = x.detach().double().requires_grad_()
    reference = by_loops(doubles, x64, counts)
    wanted = torch.autograd.grad(
        reference, [x64, *doubles.parameters()], grad.double(), materialize_grads=True
    )
    found = torch.autograd.grad(output, [x, *experts.parameters()], grad)
    for one, right in zip([output, *found], [reference, *wanted], strict=True):
        torch.testing.assert_close(one.double(), right, rtol=1e-4, atol=1e-5 * scale**3)


def test_frozen_experts_have_a_gradient_for_their_input() -> None:
    experts, counts = make_experts(), torch.tensor([5, 0, 9, 2])
    x = torch.randn(16, DIM, requires_grad=True)
    grad = torch.randn(16, DIM)
    (wanted,) = torch.autograd.grad(experts(x, counts), x, grad)
    experts.requires_grad_(False)
    (found,) = torch.autograd.grad(experts(x, counts), x, grad)
    assert torch.equal(found, wanted)


def test_what_can_be_computed_again_is_not_kept() -> None:
    experts, num_tokens = make_experts(), 400
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.shape[-1] if tensor.shape[:1] == (num_tokens,) else 0
        return tensor

    x = torch.randn(num_tokens, DIM, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        experts(x, torch.full((NUM_EXPERTS,), num_tokens // NUM_EXPERTS))
    # The input, gate and up; neither silu(gate) nor its product with up.
    assert sum(kept.values()) == DIM + 2 * HIDDEN
