"""Attention over packed rows against masked attention in float64: that of CPUs, and that of GPUs.

The GPU's kernel is a stand-in for FlashAttention's (tests/support/varlen_kernel.py). Gathering keys and
values over ranks is part of tests/trainer/test_layouts.py.
"""

import functools
import importlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchtitan.models.common.attention import create_varlen_metadata_for_document
from torchtitan.protocols.module import Module

from forgeasync.trainer import (
    GatheredKeysAttention,
    PackedAttention,
    PackedRow,
    WholeRowAttention,
    attend,
    inner_attention,
    pack_row,
    packed_sequences,
    part_metadata,
    tree_metadata,
)
from tests.support.references import (
    NUM_HEADS,
    Tensors,
    masked_attention,
    packed_positions,
    random_inputs,
)
from tests.trainer.test_packing import make_sequence

importlib.import_module("tests.support.varlen_kernel")

SEVERAL_ROWS = [[20, 3, 41], [64], [1, 31, 16, 16]]

TOLERANCES = {
    torch.float64: ((1e-9, 0.0), (1e-9, 0.0)),
    torch.float32: ((2e-5, 0.0), (3e-5, 0.0)),
    torch.bfloat16: ((2e-2, 1e-2), (5e-2, 2e-2)),
}
"""Of outputs and of gradients, absolute and relative, by the dtype of the inputs."""


def visible_until(positions_BL: torch.Tensor) -> torch.Tensor:
    """Of sequences without common prefixes, in rows end to end: where each token's sequence ends."""
    positions_L = positions_BL.flatten()
    starts = (positions_L == 0).nonzero()[:, 0]
    ends = torch.cat([starts[1:], torch.tensor([len(positions_L)])])
    return ends.repeat_interleave(ends - starts)


def on_cpu(inputs: Tensors, positions_BL: torch.Tensor, num_parts: int = 1) -> torch.Tensor:
    """What all context-parallel ranks compute, each from its queries and all keys and values."""
    attention = PackedAttention(PackedAttention.Config())
    q_BLNH, k_BLNH, v_BLNH = inputs
    width, outs = positions_BL.shape[1] // num_parts, []
    for start, q_part in zip(range(0, positions_BL.shape[1], width), q_BLNH.split(width, 1), strict=True):
        masks = packed_sequences(visible_until(positions_BL), query_start=start)
        outs.append(attention(q_part, k_BLNH, v_BLNH, attention_masks=masks))
    return torch.cat(outs, dim=1)


def in_parts(inputs: Tensors, positions_BL: torch.Tensor, num_parts: int = 4) -> torch.Tensor:
    """The same on GPUs."""
    attention = GatheredKeysAttention(GatheredKeysAttention.Config())
    q_BLNH, k_BLNH, v_BLNH = inputs
    width = positions_BL.shape[1] // num_parts
    is_gqa, outs = k_BLNH.shape[2] != NUM_HEADS, []
    for start, q_part in zip(range(0, positions_BL.shape[1], width), q_BLNH.split(width, 1), strict=True):
        masks = part_metadata(positions_BL.numpy(), start=start, stop=start + width)
        outs.append(attention(q_part, k_BLNH, v_BLNH, attention_masks=masks, enable_gqa=is_gqa))
    return torch.cat(outs, dim=1)


def whole_rows(inputs: Tensors, positions_BL: torch.Tensor) -> torch.Tensor:
    """TorchTitan's own attention on GPUs: it computes in bfloat16."""
    masks = create_varlen_metadata_for_document(positions_BL)
    return WholeRowAttention(WholeRowAttention.Config())(*inputs, attention_masks=masks, enable_gqa=True)


def check(
    attention: Callable[[Tensors, torch.Tensor], torch.Tensor],
    rows: list[list[int]] | torch.Tensor,
    *,
    reference: Callable[[Tensors, torch.Tensor], torch.Tensor] = masked_attention,
    dtype: torch.dtype,
    num_kv_heads: int = 2,
    sizes: tuple[int, int] = (16, 16),
    scale: float = 1.0,
    seed: int = 0,
    num_sinks: int = 0,
) -> None:
    """``rows`` have lengths of sequences, or positions; ``sizes`` are those of heads and of values."""
    positions_BL, (head_size, value_size) = rows, sizes
    if not isinstance(rows, torch.Tensor):
        positions_BL = packed_positions(rows)
    inputs = random_inputs(
        positions_BL,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        value_size=value_size,
        scale=scale,
        seed=seed,
        dtype=dtype,
    )
    if num_sinks:
        inputs = (*inputs, torch.linspace(-2.0, 3.0, num_sinks).to(dtype).requires_grad_())
    out, expected = attention(inputs, positions_BL), reference(inputs, positions_BL)
    assert out.dtype == dtype
    of_outputs, of_gradients = TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), expected, atol=of_outputs[0] * scale**2, rtol=of_outputs[1])
    # Other gradients for every token: none may reach another sequence or part, or be counted for padding.
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = torch.autograd.grad(out, inputs, grad)
    theirs = torch.autograd.grad(expected, inputs, grad.double())
    atol, rtol = of_gradients
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.double(), their.double(), atol=atol * scale**3, rtol=rtol)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_sequences_of_any_lengths_on_cpus(lengths: list[int]) -> None:
    check(on_cpu, [lengths], dtype=torch.float32)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.sampled_from([1, 2, 4]))
def test_sequences_of_any_lengths_in_parts(lengths: list[int], num_parts: int) -> None:
    # The last sequence is padding up to a multiple of the parts.
    rows = [[*lengths, num_parts - sum(lengths) % num_parts]]
    check(lambda *inputs: in_parts(*inputs, num_parts), rows, dtype=torch.float64)


def check_trees(
    row: PackedRow, dtype: torch.dtype, *, is_cpu: bool = True, scale: float = 1.0, value_size: int = 16
) -> None:
    positions_BL, visible_until_L = map(torch.from_numpy, (row.positions_L[None], row.visible_until_L))
    kind = PackedAttention if is_cpu else GatheredKeysAttention
    masks = packed_sequences(visible_until_L) if is_cpu else tree_metadata(row.visible_until_L)
    options = {} if is_cpu else {"enable_gqa": True}
    check(
        lambda inputs, _: kind(kind.Config())(*inputs, attention_masks=masks, **options),
        positions_BL,
        dtype=dtype,
        scale=scale,
        sizes=(16, value_size),
        reference=functools.partial(masked_attention, visible_until_L=visible_until_L),
    )


@given(st.lists(st.lists(st.integers(1, 2), min_size=2, max_size=40), min_size=1, max_size=12))
def test_trees(sequences: list[list[int]]) -> None:
    """Of two token ids: sequences have long common beginnings, and branch many times."""
    row = pack_row([make_sequence(one[:1], one[1:]) for one in sequences], share_prefixes=True)
    for is_cpu in (True, False):
        check_trees(row, torch.float64, is_cpu=is_cpu)


@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_size", [16, 10])
def test_groups_of_responses_to_a_prompt(dtype: torch.dtype, value_size: int, is_cpu: bool) -> None:
    prompts = [[number] * length for number, length in ((1, 70), (2, 3))]
    sequences = [make_sequence(one, [3 + i] * (5 + 7 * i)) for one in prompts for i in range(4)]
    check_trees(pack_row(sequences, share_prefixes=True), dtype, is_cpu=is_cpu, value_size=value_size)


def test_large_scores_of_trees_on_cpus() -> None:
    """Nothing of the tokens that a query does not see may reach exp()."""
    sequences = [make_sequence([1] * 30, [2 + i] * (20 + i)) for i in range(3)]
    check_trees(pack_row(sequences, share_prefixes=True), torch.float64, scale=30.0)


@pytest.mark.parametrize("scale", [1.0, 6.0, 30.0])
def test_large_scores_on_cpus(scale: float) -> None:
    """Scores up to several thousand: nothing of a sequence beside it may reach exp() through the padding.

    What float32 can give is judged by float32 attention without packing: the softmax is then close to a
    maximum, and where two scores nearly tie its gradients are differences of large numbers.
    """
    for seed in range(20):
        check(on_cpu, [[30, 33, 31, 32, 1]], dtype=torch.float32, sizes=(64, 64), scale=scale, seed=seed)


@pytest.mark.parametrize("scale", [6.0, 30.0])
def test_large_scores_in_parts(scale: float) -> None:
    check(in_parts, [[30, 33, 31, 33, 1]], dtype=torch.float64, scale=scale)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_sequences_of_several_rows_share_groups(num_parts: int) -> None:
    check(lambda *inputs: on_cpu(*inputs, num_parts), SEVERAL_ROWS, dtype=torch.float32)


@pytest.mark.parametrize(
    "rows",
    [[[64]], [[16, 16, 16, 16]], SEVERAL_ROWS, [[10, 54]], [[1] * 64]],
    ids=["one sequence", "borders of parts", "several rows", "mostly padding", "single tokens"],
)
@pytest.mark.parametrize("num_kv_heads", [1, 2, NUM_HEADS])
def test_parts(rows: list[list[int]], num_kv_heads: int) -> None:
    check(in_parts, rows, dtype=torch.float64, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize(
    ("attention", "dtype", "sizes"),
    [
        pytest.param(on_cpu, torch.float32, (24, 16), id="cpu-smaller"),
        pytest.param(on_cpu, torch.float32, (16, 24), id="cpu-larger"),
        # The GPU's kernel takes one head size.
        pytest.param(in_parts, torch.float64, (16, 10), id="parts-smaller"),
    ],
)
def test_values_of_another_head_size(
    attention: Callable[..., torch.Tensor], dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    """Latent attention has them."""
    check(attention, [[20, 3, 41], [64]], dtype=dtype, num_kv_heads=NUM_HEADS, sizes=sizes)


@pytest.mark.parametrize("value_size", [16, 10])
def test_whole_rows(value_size: int) -> None:
    check(whole_rows, SEVERAL_ROWS, dtype=torch.bfloat16, sizes=(16, value_size))


def windowed(kind: str, inputs: Tensors, positions_BL: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention with sinks and a window: on CPUs, of whole rows or in parts, and on GPUs."""
    *inputs, sinks_N = inputs
    num_parts, length = 4 if kind.endswith("parts") else 1, positions_BL.shape[1]
    size = {} if window is None else {"window_size": (window - 1, 0)}
    layer = inner_attention("cuda" if kind.startswith("gpu") else "cpu", has_whole_rows=kind == "gpu", **size)
    assert isinstance(layer, Module.Config)
    attention, outs = layer.build(), []
    for start in range(0, length, length // num_parts):
        stop = start + length // num_parts
        masks = (
            create_varlen_metadata_for_document(positions_BL)
            if kind == "gpu"
            else part_metadata(positions_BL.numpy(), start=start, stop=stop)
            if kind == "gpu parts"
            else packed_sequences(visible_until(positions_BL), query_start=start)
        )
        q_BLNH = inputs[0][:, start:stop]
        outs.append(attention(q_BLNH, *inputs[1:], attention_masks=masks, sinks_N=sinks_N))
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize("kind", ["cpu", "cpu parts", "gpu", "gpu parts"])
@pytest.mark.parametrize("window", [None, 1, 5, 200])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_windows_and_sinks(kind: str, window: int | None, dtype: torch.dtype) -> None:
    """No window reaches a neighbor, and sinks have gradients."""
    check(
        lambda inputs, positions_BL: windowed(kind, inputs, positions_BL, window),
        [[20, 3, 41], [64], [1, 31, 16, 16]],
        dtype=dtype,
        num_sinks=NUM_HEADS,
        reference=functools.partial(masked_attention, window=window),
    )


def test_windows_of_long_sequences_on_cpus() -> None:
    """The kernel takes keys in blocks, of which a window sees few."""
    check(
        lambda inputs, positions_BL: windowed("cpu", inputs, positions_BL, 70),
        [[1300, 700]],
        dtype=torch.float32,
        num_sinks=NUM_HEADS,
        reference=functools.partial(masked_attention, window=70),
    )


def test_trees_with_windows_are_refused() -> None:
    row = pack_row([make_sequence([1] * 30, [2 + i] * 20) for i in range(3)], share_prefixes=True)
    masks = packed_sequences(torch.from_numpy(row.visible_until_L))
    inputs = random_inputs(
        torch.from_numpy(row.positions_L[None]), num_kv_heads=2, head_size=16, value_size=16
    )
    attention = PackedAttention(PackedAttention.Config(window_size=(4, 0)))
    with pytest.raises(AssertionError, match="trees have no windows"):
        attention(*inputs, attention_masks=masks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_cast(dtype: torch.dtype) -> None:
    """FlashAttention refuses float32; attention in another dtype than the model's would go unnoticed."""
    check(in_parts, [[20, 44]], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_is_what_compilers_are_told(dtype: torch.dtype) -> None:
    positions_BL = packed_positions([[5, 40, 19]])
    inputs = random_inputs(positions_BL, num_kv_heads=2, head_size=16, value_size=16)
    flat = [x[0].detach().to(dtype).requires_grad_() for x in inputs]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.library.opcheck(
        attend, (*flat, *packed_sequences(visible_until(positions_BL))[:2], 0.25), atol=tolerance, rtol=0
    )
