"""The operators with which an engine computes (``generator.batch_invariant``), for ``GeneratorForward``.

Each method calls the function that a module of vLLM 0.32 calls, so that both compute with one kernel:

    method     CPUs, float32                 GPUs, bfloat16, VLLM_BATCH_INVARIANT

    linear     torch, in blocks of rows      linear_batch_invariant (Triton)
    norm       formula of RMSNorm            rms_norm_batch_invariant (Triton)
    sum_norm   formula of RMSNorm            fused_add_rms_norm (CUDA)
    rotate     rotary_embedding              rotary_embedding (CUDA)
    attend     cpu_attention_with_kv_cache   unified_attention (Triton; TRITON_ATTN)
    gated      formula of SiluAndMul         silu_and_mul (CUDA)
    route      formula of CPURouter          topk_softmax (CUDA)
    experts    cpu_fused_moe                 fused_moe_kernel (Triton) and moe_sum (CUDA)
    scale      torch                         _temperature_kernel (Triton)
    logprobs   torch, over whole rows        _topk_log_softmax_kernel (Triton)

``gpu_operators`` has those of GPUs. vLLM's mode also replaces operators of torch, in the engine's process
alone: what replaces ``linear`` has no backward pass.

Shape suffixes: see ``generator_forward``.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import vllm._custom_ops as ops

from forgeasync.config import ModelFacts
from forgeasync.models import linear_by_blocks

ALIGNMENT = 32
"""The CPU build pads the inner dim of experts to a multiple of this."""


class PagedKeys(NamedTuple):
    """Where keys and values of a row's segments are in a KV cache. Each segment is a request."""

    places_P: torch.Tensor
    """Place in the row of each key of each segment."""
    slots_P: torch.Tensor
    """Slot in the cache of the same."""
    num_blocks: int
    block_table: torch.Tensor
    """Blocks of each segment, int32. Entries after a segment's last block are not read."""
    query_starts: torch.Tensor
    num_keys_S: torch.Tensor
    max_queries: int
    max_keys: int


class Operators:
    """Operators of the CPU build."""

    block_tokens = 128
    """Tokens of a block of the KV cache."""

    def __init__(self, facts: ModelFacts) -> None:
        self._top_k = facts.top_k
        self._isa = "vec" if facts.head_dim % 32 == 0 else "vec16"

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear_by_blocks(x, weight, bias)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        mean = x.pow(2).mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(mean + eps) * weight

    def sum_norm(
        self, x_LD: torch.Tensor, residual_LD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of the sum, and the sum."""
        sum_LD = x_LD + residual_LD
        return self.norm(sum_LD, weight_D, eps), sum_LD

    def rotate(
        self, positions_L: torch.Tensor, q_LNH: torch.Tensor, k_LNH: torch.Tensor, cache: torch.Tensor
    ) -> None:
        """Rotate queries and keys in place."""
        ops.rotary_embedding(positions_L, q_LNH.flatten(1), k_LNH.flatten(1), q_LNH.shape[-1], cache, True)

    def attend(
        self, q_LNH: torch.Tensor, k_LNH: torch.Tensor, v_LNH: torch.Tensor, keys: PagedKeys
    ) -> torch.Tensor:
        """Return [L, N, H]."""
        _, num_kv_heads, head_dim = k_LNH.shape
        cache = k_LNH.new_zeros(keys.num_blocks, num_kv_heads, 2 * self.block_tokens, head_dim)
        key_cache, value_cache = cache.chunk(2, dim=2)
        k_PNH, v_PNH = k_LNH[keys.places_P], v_LNH[keys.places_P]
        ops.cpu_attn_reshape_and_cache(k_PNH, v_PNH, key_cache, value_cache, keys.slots_P, self._isa)
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(keys.num_keys_S),
            num_heads=q_LNH.shape[1],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            seq_lens=keys.num_keys_S,
            dtype=q_LNH.dtype,
            query_start_loc=keys.query_starts,
            causal=True,
            sliding_window_size=-1,
            isa=self._isa,
            enable_kv_split=False,
            dynamic_causal=None,
            kv_cache_dtype="auto",
        )
        out_LNH = torch.empty_like(q_LNH)
        ops.cpu_attention_with_kv_cache(
            query=q_LNH,
            key_cache=key_cache,
            value_cache=value_cache,
            output=out_LNH,
            query_start_loc=keys.query_starts,
            seq_lens=keys.num_keys_S,
            scale=head_dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=keys.block_table,
            softcap=0.0,
            scheduler_metadata=schedule,
            s_aux=None,
            dynamic_causal=None,
        )
        return out_LNH

    def gated(self, merged_LF: torch.Tensor) -> torch.Tensor:
        """Return the product of the second half with ``silu`` of the first."""
        gate_LF, up_LF = merged_LF.chunk(2, dim=-1)
        return F.silu(gate_LF) * up_LF

    def route(self, x_LD: torch.Tensor, logits_LE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and ids of the chosen experts, [L, K] each."""
        top = logits_LE.topk(self._top_k, dim=-1, sorted=False)
        return top.values.softmax(dim=-1), top.indices

    def experts(
        self,
        x_LD: torch.Tensor,
        w1_EFD: torch.Tensor,
        w3_EFD: torch.Tensor,
        w2_EDF: torch.Tensor,
        scores_LK: torch.Tensor,
        ids_LK: torch.Tensor,
    ) -> torch.Tensor:
        padding = -w1_EFD.shape[1] % ALIGNMENT
        w1_EFD, w3_EFD = (F.pad(one, (0, 0, 0, padding)) for one in (w1_EFD, w3_EFD))
        out_LD = torch.empty_like(x_LD)
        ops.cpu_fused_moe(
            out_LD,
            x_LD,
            ops.cpu_prepack_moe_weight(torch.cat([w1_EFD, w3_EFD], dim=1), "vec"),
            ops.cpu_prepack_moe_weight(F.pad(w2_EDF, (0, padding)).contiguous(), "vec"),
            None,
            None,
            scores_LK,
            ids_LK.int(),
            "silu",
            "vec",
        )
        return out_LD

    def scale(self, logits_TV: torch.Tensor, temperature: float) -> torch.Tensor:
        """Return logits divided by the temperature, float32."""
        return logits_TV / torch.tensor(temperature, dtype=torch.float32)

    def logprobs(self, scaled_TV: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        return scaled_TV.log_softmax(dim=-1).gather(-1, ids_T[:, None])[:, 0]
