"""Log-probabilities over kept sets against a float64 reference written from the definition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forgeasync.models import GATHER_COST
from forgeasync.trainer import Predictions, chunked_predictions, head_weight, kept_logprobs
from forgeasync.trainer import logprobs as logprobs_module
from tests.support.live_tensors import LiveTensors
from tests.support.processes import run_ranks
from tests.support.references import ALWAYS_GATHER, NEVER_GATHER, make_case, reference, targets_of
from tests.support.trainers import whole


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(1, 12),
    vocab_size=st.integers(1, 40),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
)
def test_value_and_gradient_are_the_definitions(
    seed: int, num_tokens: int, vocab_size: int, temperature: float
) -> None:
    logits, tokens, offsets, ids = make_case(seed, num_tokens, vocab_size, largest_set=vocab_size)
    weights = torch.linspace(-1, 2, num_tokens, dtype=torch.float64)
    exact_logits = logits.clone().requires_grad_()
    expected = reference(exact_logits, tokens, offsets, ids, temperature)
    (expected * weights).sum().backward()
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        ours = logits.clone().to(dtype).detach().requires_grad_()
        logprobs = kept_logprobs(ours, tokens, offsets, ids, temperature)
        assert logprobs.dtype is dtype
        (logprobs * weights).sum().backward()
        torch.testing.assert_close(logprobs.double(), expected.detach(), atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(ours.grad.double(), exact_logits.grad, atol=tolerance, rtol=tolerance)
        # Exactly nothing outside of the kept sets.
        for index in range(num_tokens):
            kept = ids[offsets[index] : offsets[index + 1]].long()
            if len(kept):
                outside = torch.ones(vocab_size, dtype=torch.bool)
                outside[kept] = False
                assert (ours.grad[index, outside] == 0).all()


def test_a_token_outside_of_its_set_is_impossible() -> None:
    logprobs = kept_logprobs(
        torch.zeros(2, 4), torch.tensor([3, 1]), torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1])
    )
    assert logprobs.tolist() == [-torch.inf, 0.0]


def test_no_tokens_at_all_still_have_gradients() -> None:
    hidden = torch.zeros(0, 8, requires_grad=True)
    weight = torch.randn(16, 8, requires_grad=True)
    empty = torch.empty(0, dtype=torch.int64)
    logprobs = chunked_predictions(
        hidden, weight, targets_of(empty, torch.zeros(1, dtype=torch.int64), empty)
    ).logprobs_T
    logprobs.sum().backward()
    assert logprobs.shape == (0,) and (weight.grad == 0).all()


COSTS = pytest.mark.parametrize("cost", [ALWAYS_GATHER, NEVER_GATHER], ids=["read-row-by-row", "dense"])


@COSTS
def test_a_single_kept_token_has_logprob_and_gradient_exactly_zero(
    cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "GATHER_COST", cost)
    tokens, offsets = torch.tensor([4, 0, 10]), torch.arange(4)
    sizes, dtypes = ((3, 11), (3, 8), (11, 8)), (torch.float32, torch.bfloat16, torch.bfloat16)
    logits, hidden, weight = (
        (torch.randn(size) * 30).to(dtype).requires_grad_() for size, dtype in zip(sizes, dtypes, strict=True)
    )
    whole = kept_logprobs(logits, tokens, offsets, tokens.int(), 0.7)
    chunked = chunked_predictions(
        hidden, weight, targets_of(tokens, offsets, tokens.int()), 0.7, chunk_tokens=2
    )
    for logprobs, inputs in ((whole, [logits]), (chunked.logprobs_T, [hidden, weight])):
        gradients = torch.autograd.grad(logprobs.sum(), inputs)
        assert not any(one.any() for one in (logprobs, *gradients))


@COSTS
@pytest.mark.parametrize("largest_set", [3, 64])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float64, 1.0), (torch.float32, 1.0), (torch.float32, 6.0), (torch.float32, 30.0)],
)
def test_chunks_change_nothing(
    dtype: torch.dtype,
    scale: float,
    cost: int,
    largest_set: int,
    chunk_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float32 rounding is that of the logits themselves, however large: they are products in float32."""
    num_tokens, vocab_size, dim = 23, 64, 16
    monkeypatch.setattr(logprobs_module, "GATHER_COST", cost)
    # 3 pairs of rows at once: sets lie across the borders of blocks.
    monkeypatch.setattr(head_weight, "GATHER_BLOCK_BYTES", 3 * 2 * dtype.itemsize * dim)
    _, tokens, offsets, ids = make_case(3, num_tokens, vocab_size, largest_set=largest_set)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        (scale * torch.randn(num, dim, dtype=dtype, generator=generator)).requires_grad_()
        for num in (num_tokens, vocab_size)
    ]
    factors = torch.linspace(-1, 1, num_tokens, dtype=dtype)

    hidden, weight = inputs
    expected = reference(hidden.double() @ weight.double().T, tokens, offsets, ids, 0.8)
    expected_gradients = torch.autograd.grad((expected * factors).sum(), inputs)
    ours = chunked_predictions(
        *inputs, targets_of(tokens, offsets, ids), 0.8, chunk_tokens=chunk_tokens
    ).logprobs_T
    gradients = torch.autograd.grad((ours * factors).sum(), inputs)
    rounding = 1e-6 * scale**2
    is_exact = dtype == torch.float64
    atol, rtol = (1e-12, 1e-12) if is_exact else (10 * rounding, 1e-6)
    torch.testing.assert_close(ours.double(), expected, atol=atol, rtol=rtol)
    atol, rtol = (1e-12, 1e-12) if is_exact else (30 * rounding * scale, 1e-5)
    for gradient, exact in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, exact, atol=atol, rtol=rtol)


class Calls(TorchDispatchMode):
    """Counts operators, forward and backward."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **kwargs or {})


def test_a_gpu_gets_the_same_few_operators_whatever_the_sets_and_is_never_waited_for() -> None:
    """On "meta", as on every device but the CPU; reading a value raises there."""
    num_tokens, vocab_size = 3000, 50_000
    numbers = []
    for width in (1, 20, 500, vocab_size):
        hidden = torch.empty(num_tokens, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        weight = torch.empty(vocab_size, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        tokens = torch.empty(num_tokens, dtype=torch.int64, device="meta")
        ids = torch.empty(num_tokens * width, dtype=torch.int32, device="meta")
        with Calls() as calls:
            found = chunked_predictions(
                hidden,
                weight,
                targets_of(tokens, torch.arange(num_tokens + 1) * width, ids),
                0.8,
                with_entropies=True,
            )
            torch.autograd.grad(found.logprobs_T.sum(), (hidden, weight))
        numbers.append(calls.num)
    assert numbers == numbers[:1] * 4 and numbers[0] <= 3 * 200, "for three chunks"


@pytest.mark.parametrize("num_uncut", [0, 40])
def test_memory_is_bounded_however_wide_the_sets_are(num_uncut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the memory plan counts (``forgeasync.planning.trainer_memory``), on both sides of the choice."""
    num_tokens, vocab_size, dim, block_bytes = 128, 4096, 64, 2**18
    monkeypatch.setattr(head_weight, "GATHER_BLOCK_BYTES", block_bytes)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, dim, generator=generator, requires_grad=True)
    weight = torch.randn(vocab_size, dim, generator=generator, requires_grad=True)
    logits_bytes = 4 * num_tokens * vocab_size
    boundary = vocab_size // GATHER_COST
    for width in (1, boundary - 1, boundary, vocab_size // 16 - 1, vocab_size // 2, vocab_size - 1):
        ids = torch.arange(width, dtype=torch.int32).repeat(num_tokens - num_uncut)
        widths = torch.tensor([width] * (num_tokens - num_uncut) + [0] * num_uncut)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), widths.cumsum(0)])
        tokens = torch.zeros(num_tokens, dtype=torch.int64)
        with torch.autograd.set_multithreading_enabled(False):
            with LiveTensors([hidden, weight, tokens, offsets, ids]) as live:
                ours = chunked_predictions(
                    hidden, weight, targets_of(tokens, offsets, ids), with_entropies=True
                ).logprobs_T
                gradients = torch.autograd.grad(ours.sum(), (hidden, weight))
        logits = 4.25 * logits_bytes if width >= boundary else 4 * logits_bytes * num_uncut / num_tokens
        lists = logits_bytes / 4
        spare = 4 * hidden.nbytes
        assert live.peak_bytes <= logits + lists + weight.nbytes + block_bytes + spare, width
        expected = kept_logprobs(hidden.double() @ weight.double().T, tokens, offsets, ids)
        torch.testing.assert_close(ours.double(), expected, atol=2e-5, rtol=1e-5)
        for one, exact in zip(gradients, torch.autograd.grad(expected.sum(), (hidden, weight)), strict=True):
            torch.testing.assert_close(one, exact, atol=1e-4, rtol=1e-4)


def test_the_logits_of_a_whole_row_never_exist_together() -> None:
    num_tokens, vocab_size = 512, 512
    _, tokens, _, _ = make_case(0, num_tokens, vocab_size, largest_set=0)
    offsets, ids = torch.zeros(num_tokens + 1, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    inputs = [torch.randn(num, 4, requires_grad=True) for num in (num_tokens, vocab_size)]
    with torch.autograd.set_multithreading_enabled(False):
        with LiveTensors([*inputs, tokens, offsets, ids]) as live:
            found = chunked_predictions(
                *inputs, targets_of(tokens, offsets, ids), with_entropies=True, chunk_tokens=8
            )
            torch.autograd.grad(found.logprobs_T.sum(), inputs)
    assert live.peak_bytes < 4 * num_tokens * vocab_size / 5


def _sharded(vocab_size: int, cost: int) -> None:
    """Values and gradients with the vocabulary split over two ranks, and whole."""
    logprobs_module.GATHER_COST = cost
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits_TV, tokens, offsets, ids = make_case(5, 17, vocab_size, largest_set=8)
    generator = torch.Generator().manual_seed(5)
    hidden_TD, weight_VD = (
        torch.randn(num, 6, dtype=torch.float64, generator=generator) for num in (17, vocab_size)
    )
    split_VD = distribute_tensor(weight_VD, mesh, [Shard(0)])

    def kept(logits_TV: torch.Tensor) -> torch.Tensor:
        return kept_logprobs(logits_TV, tokens, offsets, ids, 0.6)

    def chunked(hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> Predictions:
        options = {"with_entropies": True, "chunk_tokens": 5}
        return chunked_predictions(hidden_TD, weight_VD, targets_of(tokens, offsets, ids), 0.6, **options)

    def with_gradients(compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
        leaves = [one.detach().requires_grad_() for one in inputs]
        values_T = compute(*leaves)
        factors_T = torch.linspace(-1, 1, 17, dtype=torch.float64)
        gradients = torch.autograd.grad((values_T * factors_T).sum(), leaves)
        return [whole(one) for one in (values_T, *gradients)]

    expected = with_gradients(kept, logits_TV)
    for placement in (Shard(1), Replicate()):
        found = with_gradients(kept, distribute_tensor(logits_TV, mesh, [placement]))
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    found = with_gradients(lambda *inputs: chunked(*inputs).logprobs_T, hidden_TD, split_VD)
    expected = with_gradients(
        lambda hidden_TD, weight_VD: kept(hidden_TD @ weight_VD.T), hidden_TD, weight_VD
    )
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    entropies = (chunked(hidden_TD, weight).entropies_T for weight in (split_VD, weight_VD))
    torch.testing.assert_close(*entropies, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("vocab_size", "cost"), [(40, ALWAYS_GATHER), (33, ALWAYS_GATHER), (33, NEVER_GATHER)]
)
def test_a_vocabulary_over_two_ranks_gives_the_same(vocab_size: int, cost: int) -> None:
    run_ranks(2, _sharded, vocab_size, cost)
