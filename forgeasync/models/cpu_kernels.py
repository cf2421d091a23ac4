"""Computations that trainer and generator share on CPUs: batch-invariant linear layers, and linear attention.

torch's linear layers choose their kernel by the number of rows, so a token's bits depend on what else is in
the batch. Blocks of one size always use the same kernel. Can go when torch has batch-invariant layers.

Linear attention is the gated delta rule with a causal convolution before it, for rows of sequences:

S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464.
Each head has a state S, which token t decays by a = exp(g) and corrects at its key (equation 10):

    S_t = S_{t-1} a_t (I - b_t k_t k_t^T) + b_t v_t k_t^T,    o_t = S_t q_t

Tokens are computed in chunks (section 3.3). Let d_i be the product of a chunk's decays up to token i, and
D_ij = d_i / d_j for j <= i. Let L be the part of diag(b) (D * K K^T) below the diagonal. The corrections of
the chunk are

    U = (I + L)^-1 diag(b) (V - diag(d) K S^T)

and its outputs and the state after it, with c its last token:

    O = diag(d) Q S^T + (D * Q K^T) U,    S' = d_c S + U^T diag(d_c / d) K

Chunks never cross a border of sequences, where the state and the convolution start again. Padding has zero
keys and no decay, so it changes no state. Everything is computed in at least float32.

TorchTitan 0.3.0 imports flash-linear-attention for its Qwen3.5, which has Triton kernels only. On CPUs,
``fla_for_cpus`` puts these functions in its place. Can go when TorchTitan has a path for CPUs.

Shape suffixes: L tokens of a row; Q its sequences; C tokens of a chunk; G chunks; N heads; K size of a head
of keys; V of values; D channels; W width of the convolution.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType

import torch
import torch.nn.functional as F
import xxhash

CHUNK = 64
"""Maximum number of tokens of a chunk."""

NORM_EPS = 1e-6
"""Epsilon of the norms of queries and keys, as in transformers."""


ROWS = 32
"""Number of rows that a linear layer computes at a time, padded with zeros."""


def linear_by_blocks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``torch.nn.functional.linear(x, weight, bias)``, computed in blocks of ``ROWS`` rows."""
    rows = x.reshape(-1, x.shape[-1])
    filled = F.pad(rows, (0, 0, 0, -len(rows) % ROWS))
    blocks = [F.linear(block, weight, bias) for block in filled.split(ROWS)]
    return torch.cat(blocks)[: len(rows)].view(*x.shape[:-1], -1)


def gated_delta_rule(
    q_LNK: torch.Tensor,
    k_LNK: torch.Tensor,
    v_LNV: torch.Tensor,
    g_LN: torch.Tensor,
    beta_LN: torch.Tensor,
    starts: list[int],
    states_QNKV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [L, N, V] in the dtype of values, and the states after each sequence [Q, N, K, V].

    Source: Yang et al., "Gated Delta Networks", 2024, equation 10 and section 3.3.

    Args:
        q_LNK: Queries, which are normalized here. There may be fewer heads of them than of values.
        k_LNK: Keys, like queries.
        v_LNV: Values.
        g_LN: Logarithm of the decay, at most 0.
        beta_LN: Strength of the correction at each token's key.
        starts: First position of each sequence, and the end of the last one.
        states_QNKV: State before each sequence; None: zeros.
    """
    dtype = torch.promote_types(v_LNV.dtype, torch.float32)
    num_heads, value_size = v_LNV.shape[1:]
    repeats, key_size = num_heads // k_LNK.shape[1], k_LNK.shape[2]
    q_LNK, k_LNK = (_normalized(x.to(dtype)).repeat_interleave(repeats, dim=1) for x in (q_LNK, k_LNK))
    places_GC, order, widths = _chunks(starts)
    places_GC, order = places_GC.to(v_LNV.device), order.to(v_LNV.device)
    inputs = (q_LNK * key_size**-0.5, k_LNK, v_LNV.to(dtype), g_LN.to(dtype), beta_LN.to(dtype))
    q, k, v, g, beta = (_take(x, places_GC) for x in inputs)
    sums_GNC = g.cumsum(-1)
    is_earlier_CC = torch.ones(*places_GC.shape[1:] * 2, dtype=torch.bool, device=v.device).tril()
    # The exponent above the diagonal could overflow, so it is masked first.
    exponents = (sums_GNC[..., :, None] - sums_GNC[..., None, :]).masked_fill(~is_earlier_CC, -torch.inf)
    decays_GNCC, decay_GNC1 = exponents.exp(), sums_GNC.exp()[..., None]
    lower_GNCC = (beta[..., None] * (decays_GNCC * (k @ k.mT))).tril(-1)
    identity_CC = torch.eye(len(is_earlier_CC), dtype=dtype, device=v.device)
    right = torch.cat([beta[..., None] * v, beta[..., None] * decay_GNC1 * k], dim=-1)
    solved = torch.linalg.solve_triangular(lower_GNCC + identity_CC, right, upper=False, unitriangular=True)
    u_GNCV, w_GNCK = solved.split([value_size, key_size], dim=-1)
    scores_GNCC = decays_GNCC * (q @ k.mT)
    q, last_GN11 = q * decay_GNC1, sums_GNC[..., -1:, None]
    k, last_GN11 = k * (last_GN11 - sums_GNC[..., None]).exp(), last_GN11.exp()
    if states_QNKV is None:
        state = v.new_zeros(len(order), num_heads, key_size, value_size)
    else:
        state = states_QNKV.to(dtype)[order]
    outs, ended, start = [], [], 0
    for num in widths:
        # The next chunk of every sequence that has one; those that ended are the last ones.
        ended.append(state[num:])
        now, start, state = slice(start, start + num), start + num, state[:num]
        update = u_GNCV[now] - w_GNCK[now] @ state
        outs.append(q[now] @ state + scores_GNCC[now] @ update)
        state = last_GN11[now] * state + k[now].mT @ update
    final = torch.cat([state, *reversed(ended)])
    out_LNV = torch.cat(outs).transpose(1, 2).flatten(0, 1)
    is_real = places_GC.flatten() < starts[-1]
    back = places_GC.flatten()[is_real].argsort()
    return out_LNV[is_real][back].to(v_LNV.dtype), final[order.argsort()]


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def _chunks(starts: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return the positions of chunks [G, C], the order of sequences, and how many have a chunk each time.

    First come the first chunks of all sequences, the longest first, then their second ones. Padding is the
    row's length.
    """
    bounds = torch.tensor(starts)
    lengths = bounds.diff()
    size = max(1, min(CHUNK, int(lengths.max())))
    order = lengths.argsort(descending=True, stable=True)
    firsts, lasts = bounds[:-1][order], bounds[1:][order]
    places, widths = [], []
    for offset in range(0, int(lengths.max()), size):
        num = int((lasts - firsts > offset).sum())
        places_QC = firsts[:num, None] + offset + torch.arange(size)
        places.append(places_QC.where(places_QC < lasts[:num, None], starts[-1]))
        widths.append(num)
    return torch.cat(places), order, widths


def _take(x_LN: torch.Tensor, places_GC: torch.Tensor) -> torch.Tensor:
    """Return [G, N, C, ...] of [L, N, ...], with zeros as padding."""
    padded = torch.cat([x_LN, x_LN.new_zeros(1, *x_LN.shape[1:])])
    chunks = padded.index_select(0, places_GC.flatten())
    return chunks.view(*places_GC.shape, *x_LN.shape[1:]).transpose(1, 2)


def causal_convolution(
    x_LD: torch.Tensor, weight_D1W: torch.Tensor, starts: list[int], before_QWD: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return SiLU of a depthwise convolution over each token and the W - 1 before it in its sequence.

    Args:
        x_LD: Inputs of all sequences, one after the other.
        weight_D1W: Weights of the convolution.
        starts: First position of each sequence, and the end of the last one.
        before_QWD: Inputs before each sequence [Q, W - 1, D]; None: zeros.

    Returns:
        Outputs [L, D], and the last W - 1 inputs of each sequence, which a continuation takes as
        ``before_QWD``.
    """
    dtype, width = torch.promote_types(x_LD.dtype, torch.float32), weight_D1W.shape[2]
    num = len(starts) - 1
    if before_QWD is None:
        before_QWD = x_LD.new_zeros(num, width - 1, x_LD.shape[1])
    # Each sequence with the inputs before it: W - 1 more rows for it and for each of those before it.
    shifts = [(width - 1) * (index + 1) for index in range(num)]
    own = x_LD.split([end - start for start, end in pairwise(starts)])
    rows_XD = torch.cat([part for pair in zip(before_QWD.to(x_LD.dtype), own, strict=True) for part in pair])
    lengths = torch.tensor(starts).diff()
    at_L = (torch.arange(starts[-1]) + torch.tensor(shifts).repeat_interleave(lengths)).to(x_LD.device)
    wide_XD, weight_DW = rows_XD.to(dtype), weight_D1W.squeeze(1).to(dtype)
    taps = (wide_XD.index_select(0, at_L - (width - 1 - tap)) * weight_DW[:, tap] for tap in range(width))
    out_LD = torch.stack(list(taps)).sum(0)
    ends = torch.tensor(starts[1:]) + torch.tensor(shifts)
    after = rows_XD[(ends[:, None] - torch.arange(width - 1, 0, -1)).to(x_LD.device)]
    return F.silu(out_LD).to(x_LD.dtype), after


def _fla_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """Stand in for fla's ``chunk_gated_delta_rule``, for one row of sequences."""
    assert use_qk_l2norm_in_kernel and cu_seqlens_cpu is not None
    starts = cu_seqlens_cpu.tolist()
    out, _ = gated_delta_rule(q.squeeze(0), k.squeeze(0), v.squeeze(0), g.squeeze(0), beta.squeeze(0), starts)
    return out[None], None


@contextmanager
def fla_for_cpus() -> Iterator[None]:
    """Make TorchTitan's Qwen3.5 importable on CPUs in this context, with kernels of this module."""
    unused = type("Unused", (torch.autograd.Function,), {})
    contents: dict[str, dict[str, object]] = {
        "fla": {},
        "fla.modules": {},
        "fla.modules.conv": {},
        "fla.modules.conv.triton": {},
        "fla.modules.conv.triton.ops": {"CausalConv1dFunction": unused},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {
            "chunk_gated_delta_rule": _fla_rule,
            "fused_recurrent_gated_delta_rule": _fla_rule,
        },
        "fla.ops.gated_delta_rule.chunk": {"ChunkGatedDeltaRuleFunction": unused},
        "fla.ops.gated_delta_rule.fused_recurrent": {"FusedRecurrentFunction": unused},
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        module.__path__ = []
        module.__dict__.update(attributes)
        sys.modules[name] = module
    try:
        yield
    finally:
        # Other packages look for fla, and must not find this.
        for name in contents:
            del sys.modules[name]


@torch.no_grad()
def kernel_digest() -> str:
    """Return a digest of the bits that this machine's kernels compute in a short float32 forward pass.

    Machines with other digests round differently: torch chooses kernels by the processor.
    """
    generator = torch.Generator().manual_seed(0)
    x_TD, weight_VD = (torch.randn(rows, 256, generator=generator) for rows in (3 * ROWS, 512))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(3):
            hidden_TF = F.silu(linear_by_blocks(x_TD, weight_VD))
            x_TD = x_TD + linear_by_blocks(hidden_TF, weight_VD.T)
            x_TD = x_TD * torch.rsqrt(x_TD.pow(2).mean(dim=-1, keepdim=True))
            scores_TT = F.softmax(x_TD @ x_TD.T, dim=-1)
            x_TD = x_TD + scores_TT @ x_TD
        logprobs_TV = F.log_softmax(linear_by_blocks(x_TD, weight_VD), dim=-1)
    finally:
        torch.set_num_threads(num_threads)
    return xxhash.xxh3_64_hexdigest(logprobs_TV.numpy().tobytes())
