"""Attention over packed rows against masked attention in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.trainer import PackedAttention, attend, packed_sequences
from tests.support.references import NUM_HEADS, masked_attention, packed_positions, random_inputs


def _check(
    rows: list[list[int]],
    *,
    num_kv_heads: int = 2,
    sizes: tuple[int, int] = (16, 16),
    scale: float = 1.0,
    seed: int = 0,
) -> None:
    """``sizes`` are those of heads and of values."""
    positions_BL, (head_size, value_size) = packed_positions(rows), sizes
    inputs = random_inputs(
        positions_BL,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        value_size=value_size,
        scale=scale,
        seed=seed,
    )
    attention = PackedAttention(PackedAttention.Config())
    out = attention(*inputs, attention_masks=packed_sequences(positions_BL))
    reference = masked_attention(inputs, positions_BL)
    torch.testing.assert_close(out.double(), reference, atol=2e-5 * scale**2, rtol=0)
    # Other gradients for every token: none may reach another sequence, or be counted for padding.
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad(out, inputs, grad)
    theirs = torch.autograd.grad(reference, inputs, grad.double())
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.double(), their.double(), atol=3e-5 * scale**3, rtol=0)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_sequences_of_any_lengths(lengths: list[int]) -> None:
    _check([lengths])


@pytest.mark.parametrize("scale", [1.0, 6.0, 30.0])
def test_large_scores(scale: float) -> None:
    """Scores up to several thousand: nothing of a sequence beside it may reach exp() through the padding.

    What float32 can give is judged by float32 attention without packing: the softmax is then close to a
    maximum, and where two scores nearly tie its gradients are differences of large numbers.
    """
    for seed in range(20):
        _check([[30, 33, 31, 32, 1]], sizes=(64, 64), scale=scale, seed=seed)


def test_sequences_of_several_rows_share_groups() -> None:
    _check([[30, 2, 32], [64], [1, 31, 16, 16]])


@pytest.mark.parametrize("sizes", [(24, 16), (16, 24)], ids=["smaller", "larger"])
def test_values_of_another_head_size(sizes: tuple[int, int]) -> None:
    _check([[5, 40, 19]], num_kv_heads=NUM_HEADS, sizes=sizes)


def test_a_context_parallel_rank_has_part_of_the_queries() -> None:
    positions_BL = packed_positions([[20, 3, 41], [64]])
    inputs = random_inputs(positions_BL, num_kv_heads=2, head_size=16, value_size=16)
    q_BLNH, k_BLNH, v_BLNH = inputs
    attention = PackedAttention(PackedAttention.Config())
    whole = masked_attention(inputs, positions_BL)
    for part in (slice(0, 32), slice(32, 64)):
        masks = packed_sequences(positions_BL, query_start=part.start)
        out = attention(q_BLNH[:, part], k_BLNH, v_BLNH, attention_masks=masks)
        torch.testing.assert_close(out.double(), whole[:, part], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_is_what_compilers_are_told(dtype: torch.dtype) -> None:
    positions_BL = packed_positions([[5, 40, 19]])
    inputs = random_inputs(positions_BL, num_kv_heads=2, head_size=16, value_size=16)
    flat = [x[0].detach().to(dtype).requires_grad_() for x in inputs]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.library.opcheck(attend, (*flat, *packed_sequences(positions_BL)[:2], 0.25), atol=tolerance, rtol=0)
