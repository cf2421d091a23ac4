"""The operators with which an engine computes on GPUs (``generator_operators`` has the table). For vLLM 0.32.

Shape suffixes: see ``generator_forward``.
"""

import os

import torch
import vllm._custom_ops as ops
from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant, rms_norm_batch_invariant
from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

from forgeasync.config import ModelFacts
from forgeasync.trainer.generator_operators import Operators, PagedKeys


class GpuOperators(Operators):
    """Operators of vLLM's batch-invariant mode, with attention ``TRITON_ATTN``."""

    block_tokens = 16

    def __init__(self, facts: ModelFacts) -> None:
        # Kernels of vLLM read it, here as in the engine's process.
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
        super().__init__(facts)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear_batch_invariant(x, weight, bias)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed = rms_norm_batch_invariant(x, weight, eps)
        assert isinstance(normed, torch.Tensor), "it gets no residual"
        return normed

    def sum_norm(
        self, x_LD: torch.Tensor, residual_LD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # In place.
        x_LD, residual_LD = x_LD.clone(), residual_LD.clone()
        ops.fused_add_rms_norm(x_LD, residual_LD, weight_D, eps)
        return x_LD, residual_LD

    def attend(
        self, q_LNH: torch.Tensor, k_LNH: torch.Tensor, v_LNH: torch.Tensor, keys: PagedKeys
    ) -> torch.Tensor:
        _, num_kv_heads, head_dim = k_LNH.shape
        cache = k_LNH.new_zeros(keys.num_blocks, self.block_tokens, num_kv_heads, 2 * head_dim)
        key_cache, value_cache = cache.split(head_dim, dim=-1)
        k_PNH, v_PNH = k_LNH[keys.places_P], v_LNH[keys.places_P]
        one = torch.ones((), device=k_LNH.device)
        triton_reshape_and_cache_flash(k_PNH, v_PNH, key_cache, value_cache, keys.slots_P, "auto", one, one)
        out_LNH = torch.empty_like(q_LNH)
        unified_attention(
            q=q_LNH,
            k=key_cache,
            v=value_cache,
            out=out_LNH,
            cu_seqlens_q=keys.query_starts,
            max_seqlen_q=keys.max_queries,
            seqused_k=keys.num_keys_S,
            max_seqlen_k=keys.max_keys,
            softmax_scale=head_dim**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=keys.block_table,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )
        return out_LNH

    def gated(self, merged_LF: torch.Tensor) -> torch.Tensor:
        out_LF = merged_LF.new_empty(len(merged_LF), merged_LF.shape[1] // 2)
        torch.ops._C.silu_and_mul(out_LF, merged_LF)
        return out_LF

    def route(self, x_LD: torch.Tensor, logits_LE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores_LK, ids_LK, _ = fused_topk(x_LD, logits_LE, self._top_k, renormalize=True)
        return scores_LK, ids_LK

    def experts(
        self,
        x_LD: torch.Tensor,
        w1_EFD: torch.Tensor,
        w3_EFD: torch.Tensor,
        w2_EDF: torch.Tensor,
        scores_LK: torch.Tensor,
        ids_LK: torch.Tensor,
    ) -> torch.Tensor:
        merged_EFD = torch.cat([w1_EFD, w3_EFD], dim=1)
        return fused_experts(x_LD, merged_EFD, w2_EDF.contiguous(), scores_LK, ids_LK)

    def scale(self, logits_TV: torch.Tensor, temperature: float) -> torch.Tensor:
        scaled_TV = logits_TV.to(torch.float32, copy=True)
        of_request = torch.zeros(len(scaled_TV), dtype=torch.int32, device=scaled_TV.device)
        apply_temperature(scaled_TV, of_request, torch.full((1,), temperature, device=scaled_TV.device))
        return scaled_TV

    def logprobs(self, scaled_TV: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        return compute_token_logprobs(scaled_TV, ids_T[:, None])[:, 0]
