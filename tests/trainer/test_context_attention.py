"""The GPU's attention over packed rows, whole and in context-parallel parts, against masks in float64.

The kernel is a stand-in for FlashAttention's (tests/support/varlen_kernel.py). Gathering keys and values over
ranks is part of tests/trainer/test_layouts.py.
"""

import functools
import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchtitan.models.common.attention import create_varlen_metadata_for_document

from forgeasync.trainer import ContextAttention, WholeRowAttention, part_metadata
from tests.support.references import (
    NUM_HEADS,
    Tensors,
    masked_attention,
    packed_positions,
    random_inputs,
)

importlib.import_module("tests.support.varlen_kernel")

HEAD_SIZE = 16


def gradients(out: torch.Tensor, inputs: Tensors) -> Tensors:
    """Another gradient for every token: none may reach another sequence or another part."""
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return torch.autograd.grad(out, inputs, grad)


inputs_of = functools.partial(random_inputs, num_kv_heads=2, head_size=HEAD_SIZE, value_size=HEAD_SIZE)


def in_parts(inputs: Tensors, positions_BL: torch.Tensor, num_parts: int) -> torch.Tensor:
    """What all context-parallel ranks compute, each from its queries and all keys and values."""
    attention = ContextAttention(ContextAttention.Config())
    q_BLNH, k_BLNH, v_BLNH = inputs
    width = positions_BL.shape[1] // num_parts
    is_gqa, outs = k_BLNH.shape[2] != NUM_HEADS, []
    for start, q_part in zip(range(0, positions_BL.shape[1], width), q_BLNH.split(width, 1), strict=True):
        masks = part_metadata(positions_BL.numpy(), start=start, stop=start + width, device="cpu")
        outs.append(attention(q_part, k_BLNH, v_BLNH, attention_masks=masks, enable_gqa=is_gqa))
    return torch.cat(outs, dim=1)


def check(rows: list[list[int]], *, num_parts: int, scale: float = 1.0, **options: int) -> None:
    positions_BL = packed_positions(rows)
    inputs = inputs_of(positions_BL, scale=scale, dtype=torch.float64, **options)
    out, reference = in_parts(inputs, positions_BL, num_parts), masked_attention(inputs, positions_BL)
    torch.testing.assert_close(out, reference, atol=1e-9 * scale**2, rtol=0)
    ours, theirs = gradients(out, inputs), gradients(reference, inputs)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, atol=1e-9 * scale**3, rtol=0)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.sampled_from([1, 2, 4]))
def test_sequences_of_any_lengths(lengths: list[int], num_parts: int) -> None:
    # The last sequence is padding up to a multiple of the parts.
    check([[*lengths, num_parts - sum(lengths) % num_parts]], num_parts=num_parts)


@pytest.mark.parametrize(
    "rows",
    [[[64]], [[16, 16, 16, 16]], [[20, 3, 41], [64], [1, 31, 16, 16]], [[10, 54]], [[1] * 64]],
    ids=["one sequence", "borders of parts", "several rows", "mostly padding", "single tokens"],
)
@pytest.mark.parametrize("num_kv_heads", [1, 2, NUM_HEADS])
def test_parts(rows: list[list[int]], num_kv_heads: int) -> None:
    check(rows, num_parts=4, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("scale", [6.0, 30.0])
def test_large_scores(scale: float) -> None:
    check([[30, 33, 31, 33, 1]], num_parts=4, scale=scale)


def test_values_with_smaller_heads() -> None:
    """Latent attention has them; the kernel takes one head size."""
    check([[20, 3, 41], [64]], num_parts=4, num_kv_heads=NUM_HEADS, value_size=10)


@pytest.mark.parametrize("value_size", [HEAD_SIZE, 10])
def test_whole_rows(value_size: int) -> None:
    """TorchTitan's own attention, on the same kernel: it computes in bfloat16."""
    positions_BL = packed_positions([[20, 3, 41], [64], [1, 31, 16, 16]])
    inputs = inputs_of(positions_BL, dtype=torch.bfloat16, value_size=value_size)
    out = WholeRowAttention(WholeRowAttention.Config())(
        *inputs, attention_masks=create_varlen_metadata_for_document(positions_BL), enable_gqa=True
    )
    reference = masked_attention(inputs, positions_BL)
    torch.testing.assert_close(out.double(), reference, atol=2e-2, rtol=1e-2)
    for our, their in zip(gradients(out, inputs), gradients(reference, inputs), strict=True):
        torch.testing.assert_close(our.double(), their.double(), atol=5e-2, rtol=2e-2)


def test_nothing_is_cast() -> None:
    """FlashAttention refuses float32; attention in another dtype than the model's would go unnoticed."""
    positions_BL = packed_positions([[20, 44]])
    for dtype in (torch.float32, torch.bfloat16):
        assert in_parts(inputs_of(positions_BL, dtype=dtype), positions_BL, 2).dtype == dtype
