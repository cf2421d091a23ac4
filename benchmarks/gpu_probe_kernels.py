"""Parts of gpu_probe.py about kernels against references in float32: varlen attention, grouped products, the
output layer.

Shape suffixes: L packed row length, Q queries of a part of it, N heads, J heads of keys and values, H head
size; T tokens, D model dimensions, V vocabulary; R tokens sorted by group, G groups, I and O the sizes of a
matrix.
"""

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from gpu_probe_common import TOLERANCE, Device, Report, open_trainer_package, relative_error
from torch import Tensor

Kernel = Callable[..., Tensor]
"""Has the signature of ``torch.nn.attention.varlen.varlen_attn``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Heads, by default those of Qwen3-30B-A3B, and packed rows by the lengths of their sequences.

    Each row is cut into ``num_parts``. In the second row a sequence ends where a part does, in the third one
    sequence fills all parts, in the fourth parts have many short sequences.
    """

    num_heads: int = 32
    num_kv_heads: int = 4
    head_size: int = 128
    rows: tuple[tuple[int, ...], ...] = (
        (1, 63, 700, 1, 1100, 37, 146),
        (512, 512, 600, 424),
        (2048,),
        (7,) * 292 + (4,),
    )
    num_parts: int = 4


ATTENTION = {
    "cuda": AttentionSizes(),
    "cpu": AttentionSizes(
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        rows=((1, 5, 17, 1, 8), (8, 8, 12, 4), (32,), (3,) * 10 + (2,)),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a row: the numbers of queries and keys of each sequence in it.

    Its keys begin at ``key_start``, where its first sequence does.
    """

    key_start: int
    num_queries: tuple[int, ...]
    num_keys: tuple[int, ...]


def part_of(lengths: Sequence[int], *, start: int, stop: int) -> Part:
    """Find the sequences of a row, given by their lengths, that overlap a part of it."""
    ends = itertools.pairwise(itertools.accumulate(lengths, initial=0))
    found = [(first, min(end, stop)) for first, end in ends if first < stop and end > start]
    return Part(
        key_start=found[0][0],
        num_queries=tuple(end - max(first, start) for first, end in found),
        num_keys=tuple(end - first for first, end in found),
    )


def attend(kernel: Kernel, part: Part, q_QNH: Tensor, k_LJH: Tensor, v_LJH: Tensor) -> Tensor:
    """Return the causal attention of a part's queries to the keys and values of a whole row: [Q, N, H]."""

    def cumulative(lengths: Sequence[int]) -> Tensor:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return ends.to(q_QNH.device)

    keys = (0, part.key_start, sum(part.num_keys))
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
    """Return the keywords for causal attention with fewer heads of keys, which depend on torch's release."""
    known = inspect.signature(kernel).parameters
    arguments: dict[str, object] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        arguments["enable_gqa"] = True
    if "num_splits" in known:
        arguments["num_splits"] = 1  # as TorchTitan 0.3.0 calls FlashAttention 2
    return arguments


def masked_attention(q_QNH: Tensor, k_LJH: Tensor, v_LJH: Tensor, is_seen_QL: Tensor) -> Tensor:
    """Return the attention in float32 of each query to the keys that it sees: [Q, N, H]."""
    q, k, v = (x.float().transpose(0, 1) for x in (q_QNH, k_LJH, v_LJH))
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
    scores_NQL = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
    return (scores_NQL.masked_fill(~is_seen_QL, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def causal_mask(num_queries: Sequence[int], num_keys: Sequence[int]) -> Tensor:
    """Return which keys each query sees, given both numbers of each sequence, aligned bottom-right."""
    pairs = zip(num_queries, num_keys, strict=True)
    return torch.block_diag(*(torch.ones(q, k).tril(k - q) for q, k in pairs)).bool()


def reference(lengths: Sequence[int], q_LNH: Tensor, k_LJH: Tensor, v_LJH: Tensor) -> Tensor:
    """Return the causal attention of a whole row, by a mask over all pairs of its tokens."""
    return masked_attention(q_LNH, k_LJH, v_LJH, causal_mask(lengths, lengths).to(q_LNH.device))


def stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Replace the kernel without a GPU."""
    assert window_size == (-1, 0)
    is_seen_QL = causal_mask(cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist())
    return masked_attention(query, key, value, is_seen_QL).to(query.dtype)


def find_kernel(device: Device, report: Report) -> Kernel:
    """Return torch's varlen attention on a GPU, and the stand-in elsewhere."""
    if not device.is_gpu:
        report.put(kernel="a stand-in: there is no GPU")
        return stand_in
    import torch.nn.attention as attention
    from torch.nn.attention.varlen import varlen_attn

    # As for the trainer's models: FlashAttention 2, unless 3 or 4 is activated.
    current = getattr(attention, "current_flash_attention_impl", lambda: "not known")
    report.put(kernel=f"varlen_attn{inspect.signature(varlen_attn)}", active_flash_attention=str(current()))
    return varlen_attn


def varlen_attention(device: Device, report: Report) -> None:
    """Check packed rows as a whole, and in the contiguous parts that context-parallel ranks have."""
    kernel = find_kernel(device, report)
    with report.case("alignment"):
        _find_alignment(device, report, kernel)
    for number, lengths in enumerate(ATTENTION[device.kind].rows):
        for scale in (1.0, 6.0):
            with report.case(f"row_{number}_scale_{scale:g}"):
                _hold_against_reference(device, report, kernel, lengths, number, scale)


def _find_alignment(device: Device, report: Report, kernel: Kernel) -> None:
    """Find which of seven keys each of three queries sees."""
    q, k, v = device.randn(3, 4, 64), device.randn(7, 2, 64), device.randn(7, 2, 64)
    part = part_of([7], start=4, stop=7)
    found = attend(kernel, part, q, k, v).float()
    bottom_right = relative_error(found, reference([7], torch.cat([device.randn(4, 4, 64), q]), k, v)[4:])
    top_left = relative_error(found, reference([3], q, k[:3], v[:3]))
    names = {"bottom-right": bottom_right, "top-left": top_left, "neither": 0.0}
    aligned = next(name for name, error in names.items() if error < TOLERANCE)
    report.put(causal_mask_is_aligned=aligned)
    report.check("causal_mask_is_aligned_bottom_right", bottom_right < TOLERANCE < top_left)


def _hold_against_reference(
    device: Device, report: Report, kernel: Kernel, lengths: Sequence[int], number: int, scale: float
) -> None:
    """Compare outputs and all three gradients, of the whole row and of its parts together.

    A ``scale`` of queries makes the distribution over keys sharper.
    """
    sizes, length = ATTENTION[device.kind], sum(lengths)
    assert length % sizes.num_parts == 0
    heads = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    q, k, v = leaves = [device.randn(length, num, sizes.head_size) for num in heads]
    q *= scale
    for leaf in leaves:
        leaf.requires_grad_()
    grad = torch.randn_like(q)
    expected = reference(lengths, q, k, v)
    expected_grads = torch.autograd.grad(expected, leaves, grad.float())
    for kind, num_parts in (("packed", 1), ("parts", sizes.num_parts)):
        width = length // num_parts
        outputs = []
        for start in range(0, length, width):
            part = part_of(lengths, start=start, stop=start + width)
            outputs.append(attend(kernel, part, q[start : start + width], k, v))
        found = (output := torch.cat(outputs), *torch.autograd.grad(output, leaves, grad))
        report.compare(f"{kind}_{number}_scale_{scale:g}", "oqkv", found, (expected, *expected_grads))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSizes:
    """Groups of tokens, each multiplied by its own matrix.

    The timed tokens are those that a row of 8,192 brings to the experts of Qwen3-30B-A3B.
    """

    inner: int = 2048
    outer: int = 768
    largest: tuple[tuple[int, ...], ...] = ((4096,) * 4, (4096, 0, 1, 3, 7, 0, 4096, 1))
    timed_groups: int = 128
    timed_tokens: int = 8 * 8192

    @property
    def cases(self) -> list[tuple[int, ...]]:
        return [*((size,) * 4 for size in (0, 1, 3, 7)), *self.largest, (0, 0, 5, 0), (5, 0, 0, 0)]


GROUPED = {
    "cuda": GroupedSizes(),
    "cpu": GroupedSizes(inner=64, outer=48, largest=((40, 0, 1, 3, 7, 0),), timed_groups=4, timed_tokens=64),
}


def grouped_products(device: Device, report: Report) -> None:
    """Compare ``torch._grouped_mm`` in bfloat16, as experts call it, with a loop of products in float32."""
    sizes = GROUPED[device.kind]
    for groups in sizes.cases:
        name = "groups_" + "_".join(map(str, groups))
        with report.case(name):
            _hold_against_loop(device, report, sizes, groups, name)
    with report.case("time"):
        _time_grouped(device, report, sizes)


def _grouped(x_RI: Tensor, weight_GOI: Tensor, groups: Sequence[int]) -> Tensor:
    """Return products [R, O], with layouts as in forgeasync/trainer/workarounds/experts.py."""
    offsets = torch.tensor(groups).cumsum(0).to(x_RI.device, torch.int32)
    return torch._grouped_mm(x_RI, weight_GOI.transpose(-2, -1), offs=offsets)


def _loop(x_RI: Tensor, weight_GOI: Tensor, groups: Sequence[int]) -> Tensor:
    parts = x_RI.split(list(groups))
    return torch.cat([part @ weight.T for part, weight in zip(parts, weight_GOI, strict=True)])


def _hold_against_loop(
    device: Device, report: Report, sizes: GroupedSizes, groups: Sequence[int], name: str
) -> None:
    x = device.randn(sum(groups), sizes.inner).requires_grad_()
    weight = device.randn(len(groups), sizes.outer, sizes.inner).mul_(sizes.inner**-0.5).requires_grad_()
    expected = _loop(x.float(), weight.float(), groups)
    grad = device.randn(*expected.shape)
    expected_grads = torch.autograd.grad(expected, (x, weight), grad.float())
    found = _grouped(x, weight, groups)
    report.compare(f"{name}_forward", ["out"], [found], [expected])
    grads = torch.autograd.grad(found, (x, weight), grad)
    report.compare(f"{name}_backward", ("x", "weight"), grads, expected_grads)
    is_empty = torch.tensor([size == 0 for size in groups])
    # The kernel has to zero memory to which no token writes.
    report.check(f"{name}_gradient_is_zero_without_tokens", not bool(grads[1].cpu()[is_empty].any()))


def _time_grouped(device: Device, report: Report, sizes: GroupedSizes) -> None:
    """Time products of groups of unequal sizes."""
    shares = torch.rand(sizes.timed_groups) ** 2
    groups = (shares / shares.sum() * sizes.timed_tokens).long().tolist()
    groups[0] += sizes.timed_tokens - sum(groups)
    x = device.randn(sizes.timed_tokens, sizes.inner).requires_grad_()
    weight = device.randn(sizes.timed_groups, sizes.outer, sizes.inner).requires_grad_()
    grad = device.randn(sizes.timed_tokens, sizes.outer)
    flops = 2 * sizes.timed_tokens * sizes.inner * sizes.outer
    report.put(num_groups=sizes.timed_groups, num_tokens=sizes.timed_tokens, largest_group=max(groups))
    forward = partial(_grouped, x, weight, groups)
    forward_s = device.time_s(forward)
    both_s = device.time_s(lambda: torch.autograd.grad(forward(), (x, weight), grad))
    report.put(forward_ms=1e3 * forward_s, forward_tflops=flops / forward_s / 1e12)
    # Two products backward for each one forward.
    report.put(both_ms=1e3 * both_s, both_tflops=3 * flops / both_s / 1e12)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobSizes:
    """Tokens of a row, and the sizes of kept sets; 0 keeps the whole vocabulary."""

    num_tokens: int = 8192
    dim: int = 2048
    vocab_size: int = 151_936
    widths: tuple[int, ...] = (0, 20, 2000, 20_000)
    num_checked: int = 64


LOGPROBS = {
    "cuda": LogprobSizes(),
    "cpu": LogprobSizes(num_tokens=24, dim=32, vocab_size=300, widths=(0, 3, 100), num_checked=24),
}
LOGPROB_TOLERANCE = 0.05
"""In nats: more than the last digit of a logit of about 4 in bfloat16."""


def kept_logprobs(device: Device, report: Report) -> None:
    """Measure peak memory and time of the output layer with kept sets, and check some log-probabilities."""
    open_trainer_package(device, report)
    from forgeasync.trainer import Targets, chunked_predictions

    sizes = LOGPROBS[device.kind]

    def predict(hidden: Tensor, weight: Tensor, tokens: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
        targets = Targets(token_ids_T=tokens, kept_offsets=offsets, kept_ids=ids)
        return chunked_predictions(hidden, weight, targets, with_entropies=True).logprobs_T

    hidden = device.randn(sizes.num_tokens, sizes.dim)
    weight = device.randn(sizes.vocab_size, sizes.dim) * 0.02
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    for width in sizes.widths:
        with report.case(f"kept_{width}"):
            sets = tokens, offsets, ids = _kept_sets(device, sizes, width)

            def both(sets: tuple[Tensor, ...] = sets) -> None:
                torch.autograd.grad(predict(*leaves, *sets).sum(), leaves)

            both_s = device.time_s(both, repeats=3)
            report.put(f"kept_{width}", both_ms=1e3 * both_s, peak_gib=device.measure_peak(both))
            num = sizes.num_checked
            ids = ids[: int(offsets[num])]
            with torch.no_grad():
                found = predict(hidden[:num], weight, tokens[:num], offsets[: num + 1], ids)
                expected = _reference_logprobs(hidden[:num], weight, tokens[:num], ids, width)
            error = float((found - expected).abs().max())
            report.put(f"kept_{width}", error_nats=error)
            report.check(f"kept_{width}_logprobs", error < LOGPROB_TOLERANCE)


def _kept_sets(device: Device, sizes: LogprobSizes, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make tokens [T], and for each a set of ``width`` ids that contains it."""
    tokens_T = torch.randint(sizes.vocab_size, (sizes.num_tokens,), device=device.kind)
    offsets = torch.arange(sizes.num_tokens + 1, device=device.kind) * width
    if width == 0:
        return tokens_T, offsets, torch.empty(0, dtype=torch.int32, device=device.kind)
    steps = torch.arange(width, device=device.kind) * (sizes.vocab_size // width)
    ids = ((tokens_T[:, None] + steps) % sizes.vocab_size).sort(-1).values
    return tokens_T, offsets, ids.flatten().int()


def _reference_logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, tokens_T: Tensor, ids: Tensor, width: int
) -> Tensor:
    logits_TV = hidden_TD.float() @ weight_VD.float().T
    if width:
        is_kept_TV = torch.zeros_like(logits_TV, dtype=torch.bool)
        is_kept_TV.scatter_(-1, ids.view(-1, width).long(), True)
        logits_TV = logits_TV.masked_fill(~is_kept_TV, -torch.inf)
    return logits_TV.log_softmax(-1).gather(-1, tokens_T[:, None]).squeeze(-1)
