"""Adapters of experts in bfloat16, at every rank.

Grouped products of bfloat16 want rows that start at multiples of 16 bytes, on GPUs as on torch's meta device,
which has no data but the same rules (``torch/_meta_registrations.py`` of torch 2.13).
"""

import pytest
import torch

from forgeasync.trainer import GroupedAdapter, lora

NUM_EXPERTS, NUM_INPUTS, NUM_OUTPUTS, NUM_TOKENS = 4, 64, 32, 40


def forward_and_backward(rank: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the output and of the gradients of input, A and B."""
    with torch.device("meta"):
        adapter = GroupedAdapter.Config(
            num_experts=NUM_EXPERTS,
            in_features=NUM_INPUTS,
            out_features=NUM_OUTPUTS,
            rank=rank,
            param_init={},
        ).build()
        adapter = adapter.to(torch.bfloat16)
        x_RI = torch.empty(NUM_TOKENS, NUM_INPUTS, dtype=torch.bfloat16, requires_grad=True)
        y_RO = adapter(x_RI, torch.empty(NUM_EXPERTS, dtype=torch.int32))
        y_RO.backward(torch.empty_like(y_RO))
    tensors = (y_RO, x_RI.grad, adapter.lora_a_ErI.grad, adapter.lora_b_EOr.grad)
    return tuple(tuple(tensor.shape) for tensor in tensors)


@pytest.mark.parametrize("rank", [1, 3, 8, 12, 511])
def test_every_rank_is_computed(rank: int) -> None:
    assert forward_and_backward(rank) == (
        (NUM_TOKENS, NUM_OUTPUTS),
        (NUM_TOKENS, NUM_INPUTS),
        (NUM_EXPERTS, rank, NUM_INPUTS),
        (NUM_EXPERTS, NUM_OUTPUTS, rank),
    )


@pytest.mark.parametrize("rank", [1, 3, 12])
def test_without_padding_these_ranks_are_refused(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "_GROUPED_STRIDE_BYTES", 2)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        forward_and_backward(rank)
