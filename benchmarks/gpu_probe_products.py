"""Parts of gpu_probe.py on grouped products and on log-probabilities, against references.

Shape suffixes: T tokens, D model dim, V vocabulary, R tokens sorted by group, G groups, I and O the sizes of
a matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from gpu_probe_common import TOLERANCE, Device, Report, open_trainer_package, relative_error


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSizes:
    """Sizes of a grouped product: groups of tokens, each multiplied by its own matrix."""

    inner: int
    outer: int
    cases: tuple[tuple[int, ...], ...]
    timed_groups: int
    timed_tokens: int


_GROUPS = tuple((size,) * 4 for size in (0, 1, 3, 7, 4096))

GROUPED = {
    "cuda": GroupedSizes(
        inner=2048,
        outer=768,
        cases=(*_GROUPS, (4096, 0, 1, 3, 7, 0, 4096, 1), (0, 0, 5, 0), (5, 0, 0, 0)),
        timed_groups=128,
        timed_tokens=8 * 8192,
    ),
    "cpu": GroupedSizes(
        inner=64,
        outer=48,
        cases=(*_GROUPS[:-1], (40, 0, 1, 3, 7, 0), (0, 0, 5, 0), (5, 0, 0, 0)),
        timed_groups=4,
        timed_tokens=64,
    ),
}


def grouped_products(device: Device, report: Report) -> None:
    """Compare ``torch._grouped_mm`` in bfloat16, as the experts call it, with a loop of float32 products."""
    sizes = GROUPED[device.kind]
    for groups in sizes.cases:
        name = "groups_" + "_".join(map(str, groups))
        with report.case(name):
            _hold_against_loop(device, report, sizes, groups, name)
    with report.case("time"):
        _time_grouped(device, report, sizes)


def _grouped(x_RI: torch.Tensor, weight_GOI: torch.Tensor, groups: Sequence[int]) -> torch.Tensor:
    """Return the grouped product [R, O], laid out as in forgeasync/trainer/workarounds/experts.py."""
    offsets = torch.tensor(groups).cumsum(0).to(x_RI.device, torch.int32)
    return torch._grouped_mm(x_RI, weight_GOI.transpose(-2, -1), offs=offsets)


def _loop(x_RI: torch.Tensor, weight_GOI: torch.Tensor, groups: Sequence[int]) -> torch.Tensor:
    parts = x_RI.split(list(groups))
    return torch.cat([part @ weight.T for part, weight in zip(parts, weight_GOI, strict=True)])


def _hold_against_loop(
    device: Device, report: Report, sizes: GroupedSizes, groups: Sequence[int], name: str
) -> None:
    x = torch.randn(sum(groups), sizes.inner, dtype=torch.bfloat16, device=device.kind, requires_grad=True)
    shape = (len(groups), sizes.outer, sizes.inner)
    weight = torch.randn(shape, dtype=torch.bfloat16, device=device.kind)
    weight = (weight * sizes.inner**-0.5).requires_grad_()
    expected = _loop(x.float(), weight.float(), groups)
    grad = torch.randn(expected.shape, dtype=torch.bfloat16, device=device.kind)
    expected_grads = torch.autograd.grad(expected, (x, weight), grad.float())
    found = _grouped(x, weight, groups)
    report.check(f"{name}_forward", relative_error(found, expected) < TOLERANCE)
    grads = torch.autograd.grad(found, (x, weight), grad)
    pairs = zip(("out", "x", "weight"), (found, *grads), (expected, *expected_grads), strict=True)
    errors = {key: relative_error(one, other) for key, one, other in pairs}
    report.put(**{f"{name}_relative_errors": errors})
    report.check(f"{name}_backward", max(errors.values()) < TOLERANCE)
    is_empty = torch.tensor([size == 0 for size in groups])
    # Memory that no token wrote to has to be zeroed.
    report.check(f"{name}_gradient_is_zero_without_tokens", not bool(grads[1].cpu()[is_empty].any()))


def _time_grouped(device: Device, report: Report, sizes: GroupedSizes) -> None:
    """Time the tokens that a row of 8,192 sends to the experts of Qwen3-30B-A3B, with uneven loads."""
    shares = torch.rand(sizes.timed_groups) ** 2
    groups = (shares / shares.sum() * sizes.timed_tokens).long().tolist()
    groups[0] += sizes.timed_tokens - sum(groups)
    x = torch.randn(sizes.timed_tokens, sizes.inner, dtype=torch.bfloat16, device=device.kind)
    shape = (sizes.timed_groups, sizes.outer, sizes.inner)
    weight = torch.randn(shape, dtype=torch.bfloat16, device=device.kind)
    x.requires_grad_()
    weight.requires_grad_()
    grad = torch.randn(sizes.timed_tokens, sizes.outer, dtype=torch.bfloat16, device=device.kind)
    flops = 2 * sizes.timed_tokens * sizes.inner * sizes.outer
    report.put(num_groups=sizes.timed_groups, num_tokens=sizes.timed_tokens, largest_group=max(groups))
    for name, product in (("grouped", _grouped), ("loop", _loop)):
        with report.case(name):

            def forward(product: Callable[..., torch.Tensor] = product) -> torch.Tensor:
                return product(x, weight, groups)

            def both(forward: Callable[[], torch.Tensor] = forward) -> None:
                torch.autograd.grad(forward(), (x, weight), grad)

            forward_s, both_s = device.time_s(forward), device.time_s(both)
            report.put(
                **{f"{name}_forward_ms": 1e3 * forward_s, f"{name}_forward_tflops": flops / forward_s / 1e12},
                **{f"{name}_both_ms": 1e3 * both_s, f"{name}_both_tflops": 3 * flops / both_s / 1e12},
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobSizes:
    """Number of targets of a row, and sizes of kept sets to test."""

    num_tokens: int
    dim: int
    vocab_size: int
    widths: tuple[int, ...]
    num_checked: int


LOGPROBS = {
    "cuda": LogprobSizes(
        num_tokens=8192, dim=2048, vocab_size=151_936, widths=(0, 20, 2000, 20_000), num_checked=64
    ),
    "cpu": LogprobSizes(num_tokens=24, dim=32, vocab_size=300, widths=(0, 3, 100), num_checked=24),
}
LOGPROB_TOLERANCE = 0.05
"""Tolerance in nats: slightly more than bfloat16's resolution of a logit of about 4."""


def kept_logprobs(device: Device, report: Report) -> None:
    """Measure memory and time of log-probabilities over kept sets, and compare some with a reference.

    Width 0 stands for the whole vocabulary.
    """
    open_trainer_package(device, report)
    from forgeasync.trainer import chunked_predictions

    sizes = LOGPROBS[device.kind]
    hidden = torch.randn(sizes.num_tokens, sizes.dim, dtype=torch.bfloat16, device=device.kind)
    weight = torch.randn(sizes.vocab_size, sizes.dim, dtype=torch.bfloat16, device=device.kind) * 0.02
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    report.put(whole_logits_float32_gib=4 * sizes.num_tokens * sizes.vocab_size / 2**30)
    for width in sizes.widths:
        with report.case(f"kept_{width}"):
            tokens, offsets, ids = _kept_sets(device, sizes, width)

            def both(
                tokens: torch.Tensor = tokens, offsets: torch.Tensor = offsets, ids: torch.Tensor = ids
            ) -> None:
                found = chunked_predictions(*leaves, tokens, offsets, ids, with_entropies=True)
                torch.autograd.grad(found.logprobs_T.sum(), leaves)

            both_s = device.time_s(both, repeats=3)
            report.put(
                **{f"kept_{width}_both_ms": 1e3 * both_s},
                **{f"kept_{width}_peak_gib": device.measure_peak(both)},
            )
            num = sizes.num_checked
            last = int(offsets[num])
            with torch.no_grad():
                found = chunked_predictions(
                    hidden[:num], weight, tokens[:num], offsets[: num + 1], ids[:last], with_entropies=True
                )
                expected = _reference_logprobs(hidden[:num], weight, tokens[:num], ids[:last], width)
            error = float((found.logprobs_T - expected).abs().max())
            report.put(**{f"kept_{width}_error_nats": error})
            report.check(f"kept_{width}_logprobs", error < LOGPROB_TOLERANCE)
    with report.case("all_logits_at_once"):
        tokens = _kept_sets(device, sizes, 0)[0]

        def at_once() -> None:
            logprobs = (hidden @ weight.T).float().log_softmax(-1).gather(-1, tokens.long()[:, None])
            torch.autograd.grad(logprobs.sum(), leaves)

        at_once_s = device.time_s(at_once, repeats=1)
        report.put(at_once_both_ms=1e3 * at_once_s, at_once_peak_gib=device.measure_peak(at_once))


def _kept_sets(
    device: Device, sizes: LogprobSizes, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens [T], and for each one a set of ``width`` ids that contains it."""
    tokens_T = torch.randint(sizes.vocab_size, (sizes.num_tokens,), device=device.kind)
    offsets = torch.arange(sizes.num_tokens + 1, device=device.kind) * width
    if width == 0:
        return tokens_T, offsets, torch.empty(0, dtype=torch.int32, device=device.kind)
    steps = torch.arange(width, device=device.kind) * (sizes.vocab_size // width)
    ids = ((tokens_T[:, None] + steps) % sizes.vocab_size).sort(-1).values
    return tokens_T, offsets, ids.flatten().int()


def _reference_logprobs(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, tokens_T: torch.Tensor, ids: torch.Tensor, width: int
) -> torch.Tensor:
    logits_TV = hidden_TD.float() @ weight_VD.float().T
    if width:
        is_kept_TV = torch.zeros_like(logits_TV, dtype=torch.bool)
        is_kept_TV.scatter_(-1, ids.view(-1, width).long(), True)
        logits_TV = logits_TV.masked_fill(~is_kept_TV, -torch.inf)
    return logits_TV.log_softmax(-1).gather(-1, tokens_T[:, None]).squeeze(-1)
