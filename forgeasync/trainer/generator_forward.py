"""The generator's forward pass in the trainer, bit for bit (``fidelity: bitwise``).

With ``generator.batch_invariant``, an engine computes a token with the same bits whatever else is in its
batch. ``GeneratorForward`` runs the engine's operators (``generator_operators``) in the engine's order on the
trainer's weights. Log-probabilities of tokens that were sampled under the weights that train are then equal.

Each layer also runs as usual. The result has the generator's values and the gradient of the trainer's own
layer at the same input, so a forward pass takes twice as long and a backward pass is unchanged.

Written against vLLM 0.32: ``Qwen3MoeDecoderLayer``, ``Qwen3DecoderLayer``, ``LlamaDecoderLayer`` and
``Sampler``. A release that computes something else is found by the trainer's comparison with the generator.

Shape suffixes: B batch (one row); L packed row length; D model dim; N heads; H head size; E experts; K top-k;
F dim of an expert; T targets; V vocabulary; S segments of the row; P keys of all segments, one path after the
other.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx
from torchtitan.models.common.decoder import Decoder, TransformerBlock

from forgeasync.config import ModelFacts
from forgeasync.models import DEVICE_TYPE, LOGITS_CHUNK_TOKENS
from forgeasync.trainer.generator_operators import Operators, PagedKeys
from forgeasync.trainer.host_copies import to_device
from forgeasync.trainer.logprobs import Predictions, Targets, VocabularySlice, cut_away
from forgeasync.trainer.packing import PackedRow
from forgeasync.trainer.workarounds.attention import tree_metadata

Found = TypeVar("Found", torch.Tensor, tuple[torch.Tensor, ...])

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
        """Replace the ``forward`` of the model's layers, last norm and output layer."""
        self._facts = facts
        self._operators = Operators(facts)
        if DEVICE_TYPE != "cpu":
            # It imports Triton's kernels, which the CPU build does without.
            from forgeasync.trainer.gpu_operators import GpuOperators

            self._operators = GpuOperators(facts)
        self.vectors: dict[str, np.ndarray] | None = None
        """Set to {} to trace a row with one target: vectors of its input after each operator, by the names of
        vLLM's modules."""
        self._summands: tuple[torch.Tensor, torch.Tensor]
        for key, layer in model.layers.items():
            layer.forward = partial(self._layer, f"model.layers.{key}", layer, layer.forward)
        model.norm.forward = partial(self._norm, model.norm, model.norm.forward)
        model.lm_head.forward = partial(self._head, model.lm_head, model.lm_head.forward)

    def begin(self, row: PackedRow) -> None:
        """Prepare for a row: the keys that each of its segments sees."""
        if self.vectors is not None:
            self._place = int(row.places_T[0])
        metadata = tree_metadata(row.visible_until_L)
        places_P, block_tokens = metadata.key_places_K, self._operators.block_tokens
        assert places_P is not None
        num_keys_S, total = metadata.cu_seq_k.diff(), len(places_P)
        num_blocks_S = (num_keys_S + block_tokens - 1) // block_tokens
        first_blocks_S = num_blocks_S.cumsum(0) - num_blocks_S
        within_P = torch.arange(total, device=places_P.device)
        within_P -= metadata.cu_seq_k[:-1].repeat_interleave(num_keys_S, output_size=total)
        first_slots_S = first_blocks_S * block_tokens
        most_blocks = torch.arange(-(-metadata.max_k // block_tokens), device=places_P.device)
        self._keys = PagedKeys(
            places_P=places_P,
            slots_P=first_slots_S.repeat_interleave(num_keys_S, output_size=total) + within_P,
            # At most, because the sum of the blocks is on the device.
            num_blocks=total // block_tokens + len(num_keys_S),
            block_table=(first_blocks_S[:, None] + most_blocks).int(),
            query_starts=metadata.cu_seq_q,
            num_keys_S=num_keys_S,
            max_queries=metadata.max_q,
            max_keys=metadata.max_k,
        )
        self._positions_L = to_device(row.positions_L.astype(np.int64))

    def _note(self, name: str, found: Found) -> Found:
        """Return what an operator returns; with tracing, keep the vector of the traced place."""
        if self.vectors is not None:
            parts = found if isinstance(found, tuple) else (found,)
            # Copied, because the rotary embedding overwrites its input. A head has the only target.
            rows = [one[min(self._place, len(one) - 1)].flatten() for one in parts]
            self.vectors[name] = torch.cat(rows).float().cpu().numpy()
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
            if name == "model.layers.0":
                residual_LD = self._note("model.embed_tokens", x_BLD[0])
                inner_LD = self._normalized(layer.attention_norm, residual_LD)
            else:
                inner_LD, residual_LD = self._sum_normalized(layer.attention_norm, *self._summands)
            self._note(f"{name}.input_layernorm", inner_LD)
            inner_LD = self._attention(f"{name}.self_attn", layer, inner_LD)
            inner_LD, residual_LD = self._sum_normalized(layer.ffn_norm, inner_LD, residual_LD)
            self._note(f"{name}.post_attention_layernorm", inner_LD)
            network = self._experts if getattr(layer, "moe_enabled", False) else self._feed_forward
            inner_LD = network(f"{name}.mlp", layer, inner_LD)
            # vLLM's next norm adds them.
            self._summands = inner_LD, residual_LD
        return _WithValue.apply(own_BLD, (inner_LD + residual_LD)[None])

    def _normalized(self, norm: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        assert norm.eps is not None
        return self._operators.norm(x, norm.weight, norm.eps)

    def _sum_normalized(
        self, norm: torch.nn.RMSNorm, x_LD: torch.Tensor, residual_LD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of the sum, and the sum."""
        assert norm.eps is not None
        return self._operators.sum_norm(x_LD, residual_LD, norm.weight, norm.eps)

    def _merged(
        self, x_LD: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None]
    ) -> torch.Tensor:
        """Return the outputs of linear layers that vLLM computes as one."""
        given = [bias for bias in biases if bias is not None]
        return self._operators.linear(x_LD, torch.cat(weights), torch.cat(given) if given else None)

    def _attention(self, name: str, layer: TransformerBlock, x_LD: torch.Tensor) -> torch.Tensor:
        attention, head_dim = layer.attention, self._facts.head_dim
        qkv, length = attention.qkv_linear, len(x_LD)
        parts = (qkv.wq, qkv.wk, qkv.wv)
        merged = self._merged(x_LD, [part.weight for part in parts], [part.bias for part in parts])
        found = self._note(f"{name}.qkv_proj", merged).split([len(part.weight) for part in parts], dim=-1)
        q_LNH, k_LNH, v_LNH = (part.reshape(length, -1, head_dim) for part in found)
        if attention.q_norm is not None:
            q_LNH = self._note(f"{name}.q_norm", self._normalized(attention.q_norm, q_LNH))
            k_LNH = self._note(f"{name}.k_norm", self._normalized(attention.k_norm, k_LNH))
        q_LNH, k_LNH = q_LNH.contiguous(), k_LNH.contiguous()
        cache = _cosines_and_sines(attention.rope.cache).to(q_LNH.dtype)
        self._operators.rotate(self._positions_L, q_LNH, k_LNH, cache)
        self._note(f"{name}.rotary_emb", (q_LNH, k_LNH))
        x_LNH = self._operators.attend(q_LNH, k_LNH, v_LNH, self._keys)
        x_LD = self._note(f"{name}.attn", x_LNH.flatten(1))
        return self._note(
            f"{name}.o_proj", self._operators.linear(x_LD, attention.wo.weight, attention.wo.bias)
        )

    def _experts(self, name: str, layer: TransformerBlock, x_LD: torch.Tensor) -> torch.Tensor:
        router, experts = layer.moe.router, layer.moe.routed_experts.inner_experts
        logits_LE = self._note(f"{name}.gate", self._operators.linear(x_LD, router.gate.weight))
        scores_LK, ids_LK = self._operators.route(x_LD, logits_LE)
        if router.replayed_BLK is not None:
            recorded_LK = router.replayed_BLK[0]
            is_same_L1 = (recorded_LK.sort().values == ids_LK.sort().values).all(-1, keepdim=True)
            is_recorded_L1 = (recorded_LK >= 0).all(-1, keepdim=True)
            # Kernels add experts in the router's order or that of ids, and records do not keep the router's.
            is_own_L1 = is_same_L1 | ~is_recorded_L1
            of_recorded_LK = logits_LE.gather(-1, recorded_LK.clamp(min=0)).float().softmax(dim=-1)
            scores_LK = torch.where(is_own_L1, scores_LK, of_recorded_LK)
            ids_LK = torch.where(is_own_L1, ids_LK, recorded_LK.to(ids_LK.dtype))
        weights = (experts.w1_EFD, experts.w3_EFD, experts.w2_EDF)
        return self._note(f"{name}.experts", self._operators.experts(x_LD, *weights, scores_LK, ids_LK))

    def _feed_forward(self, name: str, layer: TransformerBlock, x_LD: torch.Tensor) -> torch.Tensor:
        network = layer.feed_forward
        merged_LF = self._merged(x_LD, [network.w1.weight, network.w3.weight], [None, None])
        self._note(f"{name}.gate_up_proj", merged_LF)
        x_LF = self._note(f"{name}.act_fn", self._operators.gated(merged_LF))
        return self._note(f"{name}.down_proj", self._operators.linear(x_LF, network.w2.weight))

    def _norm(
        self, norm: torch.nn.RMSNorm, own: Callable[..., torch.Tensor], x_BLD: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            value_LD, _ = self._sum_normalized(norm, *self._summands)
            self._note("model.norm", value_LD)
        return _WithValue.apply(own(x_BLD), value_LD[None])

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
                logits_TV = self._operators.linear(hidden, weight_VD)[:, : len(head.weight)]
                self._note("lm_head", logits_TV)
                values.append(self._logprobs(logits_TV, part, temperature))
        logprobs_T = _WithValue.apply(found.logprobs_T, torch.cat(values))
        return found._replace(logprobs_T=logprobs_T)

    def _logprobs(self, logits_TV: torch.Tensor, targets: Targets, temperature: float) -> torch.Tensor:
        """Return the log-probabilities of the targets, float32 [T], as the sampler does: over whole rows."""
        scaled_TV = self._operators.scale(logits_TV, temperature)
        vocabulary = VocabularySlice.of(scaled_TV, dim=1)
        is_cut_away_TV = cut_away(targets.kept_offsets, targets.kept_ids, vocabulary)
        if is_cut_away_TV is not None:
            scaled_TV = scaled_TV.masked_fill(is_cut_away_TV, -torch.inf)
        return self._operators.logprobs(scaled_TV, targets.token_ids_T.long())


def _cosines_and_sines(cache: torch.Tensor) -> torch.Tensor:
    """Return vLLM's cache, which has each frequency once, of TorchTitan's (cosines twice, sines twice)."""
    cosines, _, sines, _ = cache.chunk(4, dim=-1)
    return torch.cat([cosines, sines], dim=-1)
