"""Part of gpu_probe.py that compares varlen attention on packed rows, whole and in parts, with a reference.

Shape suffixes: L packed row length, Q queries of a part of it, N heads, J heads of keys and values, H head
size.
"""

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from gpu_probe_common import TOLERANCE, Device, Report, relative_error

Kernel = Callable[..., torch.Tensor]
"""Function with the signature of ``torch.nn.attention.varlen.varlen_attn``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Heads, and packed rows given by the lengths of their sequences; each row is cut into ``num_parts``."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    rows: tuple[tuple[int, ...], ...]
    num_parts: int
    timed_rows: tuple[tuple[int, ...], ...]


ATTENTION = {
    # Heads of Qwen3-30B-A3B. In the second row a sequence ends where a part does, in the third one fills all
    # parts, in the fourth parts have many short ones.
    "cuda": AttentionSizes(
        num_heads=32,
        num_kv_heads=4,
        head_size=128,
        rows=((1, 63, 700, 1, 1100, 37, 146), (512, 512, 600, 424), (2048,), (7,) * 292 + (4,)),
        num_parts=4,
        timed_rows=((4096,) * 8, (32768,)),
    ),
    "cpu": AttentionSizes(
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        rows=((1, 5, 17, 1, 8), (8, 8, 12, 4), (32,), (3,) * 10 + (2,)),
        num_parts=4,
        timed_rows=((16, 16),),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Positions ``start`` to ``stop`` of a row, with the numbers of queries and keys of each sequence.

    Keys are those from ``key_start``, where the first sequence that overlaps the part begins, to ``stop``.
    """

    start: int
    stop: int
    key_start: int
    num_queries: tuple[int, ...]
    num_keys: tuple[int, ...]


def part_of(lengths: Sequence[int], *, start: int, stop: int) -> Part:
    """Return a part of a row, which is given by the lengths of its sequences."""
    num_queries, num_keys, firsts = [], [], []
    first = 0
    for length in lengths:
        end = first + length
        if first < stop and end > start:
            firsts.append(first)
            num_queries.append(min(end, stop) - max(first, start))
            num_keys.append(min(end, stop) - first)
        first = end
    return Part(
        start=start,
        stop=stop,
        key_start=firsts[0],
        num_queries=tuple(num_queries),
        num_keys=tuple(num_keys),
    )


def attend(
    kernel: Kernel, part: Part, q_QNH: torch.Tensor, k_LJH: torch.Tensor, v_LJH: torch.Tensor
) -> torch.Tensor:
    """Return the causal attention of a part's queries to the keys and values of whole rows, [Q, N, H]."""

    def cumulative(lengths: Sequence[int]) -> torch.Tensor:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return ends.to(q_QNH.device)

    keys = (0, part.key_start, part.stop - part.key_start)
    return kernel(
        q_QNH,
        k_LJH.narrow(*keys),
        v_LJH.narrow(*keys),
        cumulative(part.num_queries),
        cumulative(part.num_keys),
        max(part.num_queries),
        max(part.num_keys),
        **causal_arguments(kernel),
    )


def causal_arguments(kernel: Kernel) -> dict[str, object]:
    """Return torch's keyword arguments for causal attention with fewer key heads, by its release."""
    known = inspect.signature(kernel).parameters
    arguments: dict[str, object] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        arguments["enable_gqa"] = True
    if "num_splits" in known:
        arguments["num_splits"] = 1  # as TorchTitan 0.3.0 asks FlashAttention 2
    return arguments


def reference(
    lengths: Sequence[int], q_LNH: torch.Tensor, k_LJH: torch.Tensor, v_LJH: torch.Tensor
) -> torch.Tensor:
    """Return the attention of a whole row in float32, with a mask over all pairs of tokens."""
    q, k, v = (x.float().transpose(0, 1) for x in (q_LNH, k_LJH, v_LJH))
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
    sequence_L = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(q.device)
    place_L = torch.arange(q.shape[1], device=q.device)
    is_seen_LL = (sequence_L[:, None] == sequence_L) & (place_L[:, None] >= place_L)
    scores_NLL = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
    weights_NLL = scores_NLL.masked_fill(~is_seen_LL, -torch.inf).softmax(-1)
    return (weights_NLL @ v).transpose(0, 1)


def stand_in(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return the attention of each sequence without a GPU, aligned bottom-right as the kernel's should be."""
    assert window_size == (-1, 0)
    outputs = []
    ends_q, ends_k = cu_seq_q.tolist(), cu_seq_k.tolist()
    for index in range(len(ends_q) - 1):
        q = query[ends_q[index] : ends_q[index + 1]].float().transpose(0, 1)
        k, v = (x[ends_k[index] : ends_k[index + 1]].float().transpose(0, 1) for x in (key, value))
        assert q.shape[1] <= max_q and k.shape[1] <= max_k
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        is_seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
        outputs.append((scores.masked_fill(~is_seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs).to(query.dtype)


def find_kernel(device: Device, report: Report) -> Kernel:
    """Return torch's varlen attention on a GPU, and the stand-in elsewhere."""
    if not device.is_gpu:
        report.put(kernel="a stand-in: there is no GPU")
        return stand_in
    import torch.nn.attention as attention
    from torch.nn.attention.varlen import varlen_attn

    # As with the trainer's models: unless FlashAttention 3 or 4 is activated, it is 2.
    active = attention.current_flash_attention_impl() if hasattr(attention, _CURRENT_IMPL) else "not known"
    report.put(
        kernel=f"varlen_attn{inspect.signature(varlen_attn)}",
        active_flash_attention=str(active),
        has_flash_attention_3=importlib.util.find_spec("flash_attn_interface") is not None,
    )
    return varlen_attn


_CURRENT_IMPL = "current_flash_attention_impl"


def varlen_attention(device: Device, report: Report) -> None:
    """Test packed rows, whole and in contiguous parts as on context-parallel ranks."""
    sizes = ATTENTION[device.kind]
    kernel = find_kernel(device, report)
    with report.case("alignment"):
        _find_alignment(device, report, kernel)
    for number, lengths in enumerate(sizes.rows):
        for scale in (1.0, 6.0):
            with report.case(f"row_{number}_scale_{scale:g}"):
                _hold_against_reference(device, report, kernel, sizes, lengths, number, scale)
    for lengths in sizes.timed_rows:
        with report.case(f"time_{len(lengths)}x{lengths[0]}"):
            _time_attention(device, report, kernel, sizes, lengths)


def _find_alignment(device: Device, report: Report, kernel: Kernel) -> None:
    """Find which of seven keys each of three queries attends to."""
    q = torch.randn(3, 4, 64, dtype=torch.bfloat16, device=device.kind)
    k, v = (torch.randn(7, 2, 64, dtype=torch.bfloat16, device=device.kind) for _ in range(2))
    part = Part(start=4, stop=7, key_start=0, num_queries=(3,), num_keys=(7,))
    found = attend(kernel, part, q, k, v).float()
    padding = torch.zeros(4, 4, 64, dtype=torch.bfloat16, device=device.kind)
    bottom_right = relative_error(found, reference([7], torch.cat([padding, q]), k, v)[4:])
    top_left = relative_error(found, reference([3], q, k[:3], v[:3]))
    names = {"bottom-right": bottom_right, "top-left": top_left}
    report.put(
        causal_mask_is_aligned=next((name for name, error in names.items() if error < TOLERANCE), "neither")
    )
    report.check("causal_mask_is_aligned_bottom_right", bottom_right < TOLERANCE < top_left)


def _leaves(
    device: Device, sizes: AttentionSizes, length: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random queries, keys and values; a larger ``scale`` sharpens the distribution over keys."""
    shapes = [(length, heads, sizes.head_size) for heads in (sizes.num_heads, *[sizes.num_kv_heads] * 2)]
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device.kind) for shape in shapes)
    q *= scale
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def _hold_against_reference(
    device: Device,
    report: Report,
    kernel: Kernel,
    sizes: AttentionSizes,
    lengths: Sequence[int],
    number: int,
    scale: float,
) -> None:
    """Compare outputs and all three gradients of the whole row and of its concatenated parts."""
    length = sum(lengths)
    assert length % sizes.num_parts == 0
    leaves = _leaves(device, sizes, length, scale)
    q, k, v = leaves
    grad = torch.randn_like(q)
    expected = reference(lengths, q, k, v)
    expected_grads = torch.autograd.grad(expected, leaves, grad.float())
    for kind, num_parts in (("packed", 1), ("parts", sizes.num_parts)):
        width = length // num_parts
        outputs = []
        for start in range(0, length, width):
            part = part_of(lengths, start=start, stop=start + width)
            outputs.append(attend(kernel, part, q[start : start + width], k, v))
        found = torch.cat(outputs)
        grads = torch.autograd.grad(found, leaves, grad)
        pairs = zip("oqkv", (found, *grads), (expected, *expected_grads), strict=True)
        errors = {name: relative_error(one, other) for name, one, other in pairs}
        report.put(**{f"{kind}_{number}_scale_{scale:g}_relative_errors": errors})
        report.check(f"{kind}_{number}_scale_{scale:g}", max(errors.values()) < TOLERANCE)


def _time_attention(
    device: Device, report: Report, kernel: Kernel, sizes: AttentionSizes, lengths: Sequence[int]
) -> None:
    """Time forward and backward pass of the row and of its last part, which has the most pairs."""
    length = sum(lengths)
    leaves = _leaves(device, sizes, length, 1.0)
    q, k, v = leaves
    grad = torch.randn_like(q)
    for kind, start in (("row", 0), ("last_part", length - length // sizes.num_parts)):
        part = part_of(lengths, start=start, stop=length)

        def forward(part: Part = part) -> torch.Tensor:
            return attend(kernel, part, q[part.start : part.stop], k, v)

        def both(part: Part = part) -> None:
            torch.autograd.grad(forward(part), leaves, grad[part.start : part.stop])

        name = f"{kind}_{len(lengths)}x{lengths[0]}"
        report.put(**{f"{name}_forward_ms": 1e3 * device.time_s(forward)})
        both_s = device.time_s(both)
        # Two products of the scores forward, five backward, over pairs of a query and a key that it sees.
        pairs = sum(
            queries * (keys - queries) + queries * (queries + 1) / 2
            for queries, keys in zip(part.num_queries, part.num_keys, strict=True)
        )
        flops = 3.5 * 4 * sizes.num_heads * sizes.head_size * pairs
        report.put(**{f"{name}_both_ms": 1e3 * both_s, f"{name}_both_tflops": flops / both_s / 1e12})
