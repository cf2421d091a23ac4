"""The gated delta rule and its convolution, against one token at a time in float64, with all gradients."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from forgeasync.models import causal_convolution, gated_delta_rule

CHUNK = 64
"""As in the paper's kernels, and here."""

NUM_KEY_HEADS, NUM_HEADS, KEY_SIZE, VALUE_SIZE, WIDTH = 2, 6, 24, 40, 4

LENGTHS = {
    "one token": [1],
    "several of one token": [1, 1, 1],
    "a chunk": [CHUNK],
    "borders of chunks": [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1],
    "several": [5, 150, 1, 33, 70, 3, 70],
}

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(num_tokens: int, dtype: torch.dtype) -> Inputs:
    """Queries, keys, values, log decays and betas; some decays are so fast that they underflow."""
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, dtype=torch.float64)

    decays = -F.softplus(random(NUM_HEADS)) * torch.tensor([0.01, 0.1, 1.0, 4.0, 30.0, 0.3])
    tensors = (
        random(NUM_KEY_HEADS, KEY_SIZE),
        random(NUM_KEY_HEADS, KEY_SIZE),
        random(NUM_HEADS, VALUE_SIZE),
        decays,
        random(NUM_HEADS).sigmoid(),
    )
    q, k, v, g, beta = (x.to(dtype).requires_grad_() for x in tensors)
    return q, k, v, g, beta


def _one_at_a_time(
    inputs: Inputs, starts: list[int], states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equation 10 of the paper, with S as [values, keys]."""
    q, k, v, g, beta = (x.double() for x in inputs)
    repeats = NUM_HEADS // NUM_KEY_HEADS
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = q.repeat_interleave(repeats, 1) / KEY_SIZE**0.5, k.repeat_interleave(repeats, 1)
    outs, finals = [], []
    for (start, end), before in zip(pairwise(starts), states.double(), strict=True):
        state = before.mT
        for t in range(start, end):
            erased = state - beta[t, :, None, None] * (state @ k[t, :, :, None]) @ k[t, :, None, :]
            added = beta[t, :, None, None] * v[t, :, :, None] @ k[t, :, None, :]
            state = g[t].exp()[:, None, None] * erased + added
            outs.append((state @ q[t, :, :, None]).squeeze(-1))
        finals.append(state.mT)
    return torch.stack(outs), torch.stack(finals)


def _starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:index]) for index in range(len(lengths) + 1)]


BOUNDS = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 0.012}
"""Of a difference, relative to the largest value: bfloat16 rounds results once, to 2^-8."""


def _assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert (found.double() - expected).abs().max() <= BOUNDS[dtype] * expected.abs().max().clamp(min=1e-9)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", LENGTHS)
def test_rule_is_that_of_single_tokens(name: str, dtype: torch.dtype) -> None:
    starts = _starts(LENGTHS[name])
    inputs = _inputs(starts[-1], dtype)
    states = torch.randn(
        len(starts) - 1, NUM_HEADS, KEY_SIZE, VALUE_SIZE, dtype=torch.float64
    ).requires_grad_()
    found, final = gated_delta_rule(*inputs, starts, states)
    assert found.dtype == dtype
    weights, of_final = torch.randn_like(found), torch.randn_like(final)
    grads = torch.autograd.grad((found, final), (*inputs, states), (weights, of_final))
    expected, expected_final = _one_at_a_time(inputs, starts, states)
    wanted = torch.autograd.grad(
        (expected, expected_final), (*inputs, states), (weights.double(), of_final.double())
    )
    _assert_close(found, expected, dtype)
    _assert_close(final, expected_final, dtype)
    for one, other in zip(grads, wanted, strict=True):
        _assert_close(one, other.double(), dtype)


def test_a_sequence_can_be_computed_in_parts() -> None:
    starts = [0, 100]
    inputs = _inputs(100, torch.float64)
    whole, final = gated_delta_rule(*inputs, starts)
    q, k, v, g, beta = (x[:37] for x in inputs)
    first, state = gated_delta_rule(q, k, v, g, beta, [0, 37])
    q, k, v, g, beta = (x[37:] for x in inputs)
    second, after = gated_delta_rule(q, k, v, g, beta, [0, 63], state)
    torch.testing.assert_close(torch.cat([first, second]), whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(after, final, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", LENGTHS)
def test_convolution_begins_again_with_each_sequence(name: str, dtype: torch.dtype) -> None:
    lengths = LENGTHS[name]
    starts = _starts(lengths)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(starts[-1], 5, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(5, 1, WIDTH, generator=generator).to(dtype).requires_grad_()
    before = torch.randn(len(lengths), WIDTH - 1, 5, generator=generator).to(dtype)
    for history in (None, before):
        found, after = causal_convolution(x, weight, starts, history)
        weights = torch.randn(found.shape, generator=generator).to(dtype)
        grads = torch.autograd.grad(found, (x, weight), weights)
        wide, kernel = (one.detach().double().requires_grad_() for one in (x, weight))
        parts = []
        for index, (start, end) in enumerate(pairwise(starts)):
            padding = torch.zeros(WIDTH - 1, 5) if history is None else history[index]
            padded = torch.cat([padding.double(), wide[start:end]])
            parts.append(F.silu(F.conv1d(padded.T[None], kernel, groups=5))[0].T)
            assert torch.equal(after[index], padded[-(WIDTH - 1) :].to(dtype))
        expected = torch.cat(parts)
        wanted = torch.autograd.grad(expected, (wide, kernel), weights.double())
        _assert_close(found, expected, dtype)
        for one, other in zip(grads, wanted, strict=True):
            _assert_close(one, other, dtype)
