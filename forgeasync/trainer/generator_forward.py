"""The generator's forward pass in the trainer, bit for bit (``fidelity: bitwise``), on CPUs in float32.

With ``generator.batch_invariant``, an engine computes a token with the same bits whatever else is in its
batch. ``GeneratorForward`` runs the engine's operators in the engine's order on the trainer's weights: linear
layers in blocks of rows, vLLM's kernels of rotary embedding, attention and experts, and its formula of
RMSNorm. Log-probabilities of tokens that were sampled under the weights that train are then equal.

Each layer also runs as usual. The result has the generator's values and the gradient of the trainer's own
layer at the same input, so a forward pass takes twice as long and a backward pass is unchanged.

Written against vLLM 0.32: ``Qwen3MoeDecoderLayer``, ``Qwen3DecoderLayer``, ``LlamaDecoderLayer``,
``CPURouter``, ``CPUAttentionBackendImpl``, ``CPUUnquantizedExperts`` and ``Sampler``. A release that computes
something else is found by the trainer's comparison with the generator.

Shape suffixes: B batch (one row), L packed row length, D model dim, N heads, H head size, E experts, K top-k,
F dim of an expert, T targets, V vocabulary, S segments of the row, P keys of all segments, one path after the
other.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
import vllm._custom_ops as ops
from torch.autograd.function import FunctionCtx
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from vllm.platforms import current_platform

from forgeasync.config import ModelFacts
from forgeasync.models import DEVICE_TYPE, LOGITS_CHUNK_TOKENS, linear_by_blocks
from forgeasync.trainer.logprobs import Predictions, Targets, VocabularySlice, cut_away
from forgeasync.trainer.packing import PackedRow
from forgeasync.trainer.workarounds.attention import tree_metadata

Found = TypeVar("Found", torch.Tensor, tuple[torch.Tensor, ...])

KV_BLOCK_TOKENS = 128
"""Tokens of a block of vLLM's KV cache on CPUs."""

ALIGNMENT = 32
"""vLLM pads the inner dim of experts to a multiple of this."""

VOCABULARY_ALIGNMENT = 64
"""vLLM pads the vocabulary to a multiple of this."""


class _WithValue(torch.autograd.Function):
    """Returns ``value`` with the gradient of ``own``."""

    @staticmethod
    def forward(ctx: FunctionCtx, own: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class GeneratorForward:
    """Gives the layers of a model the generator's values. Call ``begin`` before each row."""

    def __init__(self, model: Decoder, facts: ModelFacts) -> None:
        """Replace the ``forward`` of the model's layers, last norm and output layer.

        Raises:
            ValueError: The trainer computes on GPUs.
        """
        if DEVICE_TYPE != "cpu":
            raise ValueError("fidelity = 'bitwise' runs on CPUs; on GPUs it must be 'replay'")
        current_platform.import_kernels()
        self._facts = facts
        self._isa = "vec" if facts.head_dim % 32 == 0 else "vec16"
        self.vectors: dict[str, np.ndarray] | None = None
        """Set to {} to trace a row with one target: vectors of its input after each operator, by the names of
        vLLM's modules."""
        for key, layer in model.layers.items():
            layer.forward = partial(self._layer, f"model.layers.{key}", layer, layer.forward)
        model.norm.forward = partial(self._norm, model.norm, model.norm.forward)
        model.lm_head.forward = partial(self._head, model.lm_head, model.lm_head.forward)

    def begin(self, row: PackedRow) -> None:
        """Prepare for a row: the keys that each of its segments sees."""
        if self.vectors is not None:
            self._place = int(row.places_T[0])
        metadata = tree_metadata(row.visible_until_L)
        assert metadata.key_places_K is not None
        self._key_places_P = metadata.key_places_K
        self._query_starts, self._num_keys_S = metadata.cu_seq_q, metadata.cu_seq_k.diff()
        num_blocks_S = (self._num_keys_S + KV_BLOCK_TOKENS - 1) // KV_BLOCK_TOKENS
        first_blocks_S = num_blocks_S.cumsum(0) - num_blocks_S
        self._num_blocks = int(num_blocks_S.sum())
        # Entries after a segment's last block are not read.
        self._block_table = (first_blocks_S[:, None] + torch.arange(int(num_blocks_S.max()))).int()
        within_P = torch.arange(len(self._key_places_P)) - metadata.cu_seq_k[:-1].repeat_interleave(
            self._num_keys_S
        )
        self._slots_P = first_blocks_S.repeat_interleave(self._num_keys_S) * KV_BLOCK_TOKENS + within_P
        self._positions_L = torch.from_numpy(row.positions_L.astype(np.int64))

    def _note(self, name: str, found: Found) -> Found:
        """Return what an operator returns; with tracing, keep the vector of the traced place."""
        if self.vectors is not None:
            parts = found if isinstance(found, tuple) else (found,)
            # Copied, because the rotary embedding overwrites its input. A head has the only target.
            rows = [one[min(self._place, len(one) - 1)].flatten() for one in parts]
            self.vectors[name] = torch.cat(rows).numpy()
        return found

    def _layer(
        self,
        name: str,
        layer: TransformerBlock,
        own: Callable[..., torch.Tensor],
        x_BLD: torch.Tensor,
        *arguments: object,
    ) -> torch.Tensor:
        own_BLD = own(x_BLD, *arguments)
        with torch.no_grad():
            x_LD = x_BLD[0]
            if name == "model.layers.0":
                self._note("model.embed_tokens", x_LD)
            inner_LD = self._note(f"{name}.input_layernorm", _normalized(layer.attention_norm, x_LD))
            x_LD = self._attention(f"{name}.self_attn", layer, inner_LD) + x_LD
            inner_LD = self._note(f"{name}.post_attention_layernorm", _normalized(layer.ffn_norm, x_LD))
            network = self._experts if getattr(layer, "moe_enabled", False) else self._feed_forward
            value_LD = network(f"{name}.mlp", layer, inner_LD) + x_LD
        return _WithValue.apply(own_BLD, value_LD[None])

    def _attention(self, name: str, layer: TransformerBlock, x_LD: torch.Tensor) -> torch.Tensor:
        attention, head_dim = layer.attention, self._facts.head_dim
        qkv, length = attention.qkv_linear, len(x_LD)
        parts = (qkv.wq, qkv.wk, qkv.wv)
        found = _merged(x_LD, [part.weight for part in parts], [part.bias for part in parts])
        self._note(f"{name}.qkv_proj", found)
        q_LNH, k_LNH, v_LNH = (part.reshape(length, -1, head_dim) for part in found)
        if attention.q_norm is not None:
            q_LNH = self._note(f"{name}.q_norm", _normalized(attention.q_norm, q_LNH))
            k_LNH = self._note(f"{name}.k_norm", _normalized(attention.k_norm, k_LNH))
        q_LNH, k_LNH = q_LNH.contiguous(), k_LNH.contiguous()
        ops.rotary_embedding(
            self._positions_L,
            q_LNH.view(length, -1),
            k_LNH.view(length, -1),
            head_dim,
            _cosines_and_sines(attention.rope.cache),
            True,
        )
        self._note(f"{name}.rotary_emb", (q_LNH, k_LNH))
        x_LD = self._note(f"{name}.attn", self._attend(q_LNH, k_LNH, v_LNH))
        return self._note(f"{name}.o_proj", linear_by_blocks(x_LD, attention.wo.weight, attention.wo.bias))

    def _attend(self, q_LNH: torch.Tensor, k_LNH: torch.Tensor, v_LNH: torch.Tensor) -> torch.Tensor:
        """Return [L, N * H]. Each segment is a request whose keys are those of its path."""
        _, num_kv_heads, head_dim = k_LNH.shape
        cache = k_LNH.new_zeros(self._num_blocks, num_kv_heads, 2 * KV_BLOCK_TOKENS, head_dim)
        keys, values = cache.chunk(2, dim=2)
        places_P = self._key_places_P
        ops.cpu_attn_reshape_and_cache(
            k_LNH[places_P], v_LNH[places_P], keys, values, self._slots_P, self._isa
        )
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(self._num_keys_S),
            num_heads=q_LNH.shape[1],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            seq_lens=self._num_keys_S,
            dtype=q_LNH.dtype,
            query_start_loc=self._query_starts,
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
            key_cache=keys,
            value_cache=values,
            output=out_LNH,
            query_start_loc=self._query_starts,
            seq_lens=self._num_keys_S,
            scale=head_dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self._block_table,
            softcap=0.0,
            scheduler_metadata=schedule,
            s_aux=None,
            dynamic_causal=None,
        )
        return out_LNH.flatten(1)

    def _experts(self, name: str, layer: TransformerBlock, x_LD: torch.Tensor) -> torch.Tensor:
        router, experts = layer.moe.router, layer.moe.routed_experts.inner_experts
        logits_LE = self._note(f"{name}.gate", linear_by_blocks(x_LD, router.gate.weight))
        ids_LK = logits_LE.topk(self._facts.top_k, dim=-1, sorted=False).indices
        if router.replayed_BLK is not None:
            recorded_LK = router.replayed_BLK[0]
            is_same_L1 = (recorded_LK.sort().values == ids_LK.sort().values).all(-1, keepdim=True)
            is_recorded_L1 = (recorded_LK >= 0).all(-1, keepdim=True)
            # The kernel adds experts in the order of their ids, and records do not keep the router's.
            ids_LK = torch.where(is_same_L1 | ~is_recorded_L1, ids_LK, recorded_LK)
        scores_LK = logits_LE.gather(-1, ids_LK).softmax(dim=-1)
        padding = -experts.w1_EFD.shape[1] % ALIGNMENT
        w1_EFD, w3_EFD = (F.pad(one, (0, 0, 0, padding)) for one in (experts.w1_EFD, experts.w3_EFD))
        out_LD = torch.empty_like(x_LD)
        ops.cpu_fused_moe(
            out_LD,
            x_LD,
            ops.cpu_prepack_moe_weight(torch.cat([w1_EFD, w3_EFD], dim=1), "vec"),
            ops.cpu_prepack_moe_weight(F.pad(experts.w2_EDF, (0, padding)).contiguous(), "vec"),
            None,
            None,
            scores_LK,
            ids_LK.int(),
            "silu",
            "vec",
        )
        return self._note(f"{name}.experts", out_LD)

    def _feed_forward(self, name: str, layer: TransformerBlock, x_LD: torch.Tensor) -> torch.Tensor:
        network = layer.feed_forward
        found = _merged(x_LD, [network.w1.weight, network.w3.weight], [None, None])
        gate_LF, up_LF = self._note(f"{name}.gate_up_proj", found)
        x_LF = self._note(f"{name}.act_fn", F.silu(gate_LF) * up_LF)
        return self._note(f"{name}.down_proj", linear_by_blocks(x_LF, network.w2.weight))

    def _norm(
        self, norm: torch.nn.RMSNorm, own: Callable[..., torch.Tensor], x_BLD: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            value_BLD = _normalized(norm, x_BLD)
            self._note("model.norm", value_BLD[0])
        return _WithValue.apply(own(x_BLD), value_BLD)

    def _head(
        self,
        head: torch.nn.Linear,
        own: Callable[..., Predictions],
        hidden_TD: torch.Tensor,
        targets: Targets,
        temperature: float,
        with_entropies: bool,
    ) -> Predictions:
        found = own(hidden_TD, targets, temperature, with_entropies)
        with torch.no_grad():
            weight_VD = F.pad(head.weight, (0, 0, 0, -len(head.weight) % VOCABULARY_ALIGNMENT))
            values = []
            for hidden, part in zip(
                hidden_TD.split(LOGITS_CHUNK_TOKENS), targets.chunks(LOGITS_CHUNK_TOKENS), strict=True
            ):
                logits_TV = linear_by_blocks(hidden, weight_VD)[:, : len(head.weight)]
                self._note("lm_head", logits_TV)
                values.append(_logprobs(logits_TV, part, temperature))
        logprobs_T = _WithValue.apply(found.logprobs_T, torch.cat(values))
        return found._replace(logprobs_T=logprobs_T)


def _normalized(norm: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """Return what vLLM's ``rms_norm`` returns without a kernel of its own."""
    assert norm.eps is not None
    mean = x.pow(2).mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(mean + norm.eps) * norm.weight


def _merged(
    x_LD: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of linear layers that vLLM computes as one."""
    given = [bias for bias in biases if bias is not None]
    merged = linear_by_blocks(x_LD, torch.cat(weights), torch.cat(given) if given else None)
    return merged.split([len(weight) for weight in weights], dim=-1)


def _cosines_and_sines(cache: torch.Tensor) -> torch.Tensor:
    """Return vLLM's cache, which has each frequency once, of TorchTitan's (cosines twice, sines twice)."""
    cosines, _, sines, _ = cache.chunk(4, dim=-1)
    return torch.cat([cosines, sines], dim=-1)


def _logprobs(logits_TV: torch.Tensor, targets: Targets, temperature: float) -> torch.Tensor:
    """Return the log-probabilities of the targets, float32 [T], as the sampler does: over whole rows."""
    scaled_TV = logits_TV.float() / torch.tensor(temperature, dtype=torch.float32)
    vocabulary = VocabularySlice.of(scaled_TV, dim=1)
    is_cut_away_TV = cut_away(targets.kept_offsets, targets.kept_ids, vocabulary)
    if is_cut_away_TV is not None:
        scaled_TV = scaled_TV.masked_fill(is_cut_away_TV, -torch.inf)
    return scaled_TV.log_softmax(dim=-1).gather(-1, targets.token_ids_T.long()[:, None])[:, 0]
