"""Inputs of the trainer's formulas and layers, and what comes out of them by definition, in float64.

Shape suffixes: B rows, L row length, N heads, H head size.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from forgeasync.trainer import Targets, TrainingSequence, titan_config
from tests.support import config_samples


def make_case(
    seed: int, num_tokens: int, vocab_size: int, *, largest_set: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Wide random logits [T, V] in float64, tokens, and kept sets with the token in them; some are empty."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((num_tokens, vocab_size)) * 5
    tokens = rng.integers(0, vocab_size, num_tokens)
    offsets, ids = [0], []
    for token in tokens:
        width = int(rng.integers(0, min(largest_set, vocab_size) + 1))
        others = rng.permutation(np.delete(np.arange(vocab_size), token))[: max(0, width - 1)]
        ids += sorted([token, *others]) if width else []
        offsets.append(len(ids))
    return (
        torch.from_numpy(logits),
        torch.from_numpy(tokens),
        torch.tensor(offsets),
        torch.tensor(ids, dtype=torch.int32),
    )


def targets_of(tokens: torch.Tensor, offsets: torch.Tensor, ids: torch.Tensor) -> Targets:
    return Targets(token_ids_T=tokens, kept_offsets=offsets, kept_ids=ids)


def reference(
    logits: torch.Tensor, tokens: torch.Tensor, offsets: torch.Tensor, ids: torch.Tensor, temperature: float
) -> torch.Tensor:
    """One token at a time, in float64: the kept logits' log-softmax at the token."""
    logprobs = []
    for index, token in enumerate(tokens.tolist()):
        kept = ids[offsets[index] : offsets[index + 1]].tolist() or list(range(logits.shape[1]))
        scaled = logits[index, kept].double() / temperature
        logprobs.append(torch.log_softmax(scaled, 0)[kept.index(token)])
    return torch.stack(logprobs)


def reference_entropies(
    logits: torch.Tensor, offsets: torch.Tensor, ids: torch.Tensor, temperature: float
) -> torch.Tensor:
    """One token at a time, in float64: -sum p log p over its kept ids."""
    entropies = []
    for index in range(len(logits)):
        kept = ids[offsets[index] : offsets[index + 1]].tolist() or list(range(logits.shape[1]))
        logs = torch.log_softmax(logits[index, kept].double() / temperature, 0)
        entropies.append(-math.fsum((logs.exp() * logs).tolist()))
    return torch.tensor(entropies, dtype=torch.float64)


def reference_logits(model: torch.nn.Module, sequence: TrainingSequence) -> torch.Tensor:
    """Of a transformers (or peft) model at every token of a sequence's response, float64 [T, V]."""
    ids = torch.from_numpy(np.concatenate([sequence.prompt_ids_P, sequence.response_ids_T])).long()
    return model(ids[None]).logits[0, len(sequence.prompt_ids_P) - 1 : -1].double()


def reference_logprobs(model: torch.nn.Module, sequence: TrainingSequence) -> torch.Tensor:
    """The same of the tokens themselves, over the whole vocabulary at temperature 1: [T]."""
    ids_T = torch.from_numpy(sequence.response_ids_T).long()
    return reference_logits(model, sequence).log_softmax(-1).gather(-1, ids_T[:, None])[:, 0]


ALWAYS_GATHER, NEVER_GATHER = 0, 10**9
"""Costs of reading a logit that leave no choice."""


NUM_HEADS = 4

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def packed_positions(rows: list[list[int]]) -> torch.Tensor:
    """Of rows [B, L] of sequences of these lengths."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def random_inputs(
    positions_BL: torch.Tensor,
    *,
    num_kv_heads: int,
    head_size: int,
    value_size: int,
    scale: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensors:
    """Queries, keys and values ``scale`` times as large as N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)

    def random(num_heads: int, size: int) -> torch.Tensor:
        shape = (*positions_BL.shape, num_heads, size)
        return (scale * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()

    return random(NUM_HEADS, head_size), random(num_kv_heads, head_size), random(num_kv_heads, value_size)


def masked_attention(
    inputs: Sequence[torch.Tensor],
    positions_BL: torch.Tensor,
    *,
    visible_until_L: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Float64 [B, L, N, H]: a row at a time, everything but a token's own past masked.

    With ``visible_until_L`` the rows are trees; otherwise positions restart with each sequence. Of the past a
    token sees ``window`` tokens, itself included. A fourth input are sinks [N]: scores of a key that all
    tokens see and whose value is zero.
    """
    outs = []
    for row, positions_L in enumerate(positions_BL):
        sequence_L = (positions_L == 0).cumsum(0)
        is_seen_LL = (sequence_L[:, None] == sequence_L).tril()
        if visible_until_L is not None:
            is_seen_LL = (torch.arange(len(visible_until_L))[:, None] < visible_until_L).tril()
        if window is not None:
            is_seen_LL = is_seen_LL.triu(1 - window)
        q_NLH, k_NLH, v_NLH = (x[row].double().transpose(0, 1) for x in inputs[:3])
        if len(inputs) == 3:
            out_NLH = F.scaled_dot_product_attention(
                q_NLH, k_NLH, v_NLH, attn_mask=is_seen_LL, enable_gqa=True
            )
        else:
            k_NLH, v_NLH = (x.repeat_interleave(len(q_NLH) // len(x), dim=0) for x in (k_NLH, v_NLH))
            scores_NLL = q_NLH @ k_NLH.mT / q_NLH.shape[-1] ** 0.5
            sinks_NL1 = inputs[3].double()[:, None, None].expand(-1, scores_NLL.shape[1], 1)
            scores = torch.cat([scores_NLL.masked_fill(~is_seen_LL, -torch.inf), sinks_NL1], dim=-1)
            out_NLH = scores.softmax(-1)[..., :-1] @ v_NLH
        outs.append(out_NLH.transpose(0, 1))
    return torch.stack(outs)


FACTS = dataclasses.replace(
    config_samples.FACTS,
    hidden_size=32,
    num_heads=2,
    top_k=3,
    vocab_size=40,
    expert_hidden_size=48,
    max_position_embeddings=64,
)


def make_moe() -> torch.nn.Module:
    torch.manual_seed(0)
    moe = titan_config(FACTS).layers[0].moe.build()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.3)
    return moe


def moe_weights(moe: torch.nn.Module) -> list[torch.Tensor]:
    """Of the gate and of the experts, as ``exact_moe`` takes them."""
    experts = moe.routed_experts.inner_experts
    return [moe.router.gate.weight, experts.w1_EFD, experts.w2_EDF, experts.w3_EFD]


def exact_moe(
    x_LD: torch.Tensor,
    gate_ED: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    ids_LK: torch.Tensor,
) -> torch.Tensor:
    """What a layer computes with these experts for its tokens, by way of all experts."""
    scores_LK = (x_LD @ gate_ED.T).softmax(-1).gather(-1, ids_LK)
    scores_LK = scores_LK / (scores_LK.sum(-1, keepdim=True) + 1e-20)
    inner_LEF = F.silu(torch.einsum("ld,efd->lef", x_LD, w1_EFD)) * torch.einsum("ld,efd->lef", x_LD, w3_EFD)
    out_LED = torch.einsum("lef,edf->led", inner_LEF, w2_EDF)
    chosen_LKD = out_LED.gather(1, ids_LK[..., None].expand(-1, -1, x_LD.shape[1]))
    return (chosen_LKD * scores_LK[..., None]).sum(1)


def random_ids(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, FACTS.num_experts).argsort(-1)[..., : FACTS.top_k]
