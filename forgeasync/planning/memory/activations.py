"""Counts what a layer's forward pass keeps for its backward pass, by the tensors that autograd saves.

Counted on TorchTitan 0.3.0's layers as this repository runs them, in bytes per token of a rank. Two things
differ without an accelerator: norms of lower precision, or of tensor-parallel ranks, are computed step by
step and keep x / rms(x) too, and attention works on copies that are laid out by sequence
(``forgeasync.trainer.workarounds.cpu_attention``). With context
parallelism a rank has the activations of its part of a row, but keys and values of the whole row.
"""

from dataclasses import dataclass

from forgeasync.config import ActivationCheckpointing, ModelFacts, RunConfig
from forgeasync.models import BYTES_PER_ELEMENT, expected_shapes
from forgeasync.planning.memory.items import FLOAT32_BYTES, Machine

INT64_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations:
    """Bytes of one layer and one row on one rank."""

    whole: float
    """Bytes that autograd saves without checkpointing."""
    selective: float
    """Bytes that TorchTitan's selective checkpointing saves; the rest is computed again."""
    boundary: float
    """The layer's input: what full checkpointing saves."""
    passing: float
    """Bytes besides ``whole`` that live at the same time, where a pass over the layer has most of them.

    These are gradients of activations in the backward pass, or what the forward pass frees at its end.
    """

    def kept(self, choice: ActivationCheckpointing) -> float:
        """Bytes kept from the forward to the backward pass."""
        match choice:
            case ActivationCheckpointing.NONE:
                return self.whole
            case ActivationCheckpointing.SELECTIVE:
                return self.selective
            case ActivationCheckpointing.FULL:
                return self.boundary


def layer_activations(
    config: RunConfig, facts: ModelFacts, *, has_experts: bool, machine: Machine
) -> LayerActivations:
    """Count the activations of a layer with experts or with one dense network."""
    count = _Count(config, facts, machine=machine)
    attention = count.attention()
    network = count.experts() if has_experts else count.dense()
    boundary = count.local_tokens * facts.hidden_size * count.element
    # Its input and the sum after attention: the residual stream.
    whole = 2 * boundary + attention.whole + network.whole
    return LayerActivations(
        whole=whole,
        selective=boundary + attention.selective + network.selective,
        boundary=boundary,
        # The network's backward pass comes first and frees what the network has kept.
        passing=max(attention.passing - network.whole, network.passing),
    )


def outside_activations(config: RunConfig, facts: ModelFacts, *, machine: Machine) -> float:
    """Bytes kept between the last layer and the output layer: its output, and hidden states of targets."""
    count = _Count(config, facts, machine=machine)
    hidden = facts.hidden_size
    # Whole rows of the rank: sequence parallelism ends before the output layer.
    targets = count.tokens * hidden * count.element
    return count.local_tokens * hidden * count.element + targets + count.norm_extra(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Bytes of a part of a layer; as in ``LayerActivations``."""

    whole: float
    selective: float
    passing: float


class _Count:
    """Counts tensors of one row on one rank."""

    def __init__(self, config: RunConfig, facts: ModelFacts, *, machine: Machine) -> None:
        parallel = config.trainer.parallel
        self._facts = facts
        self._on_cpus = machine is Machine.CPU
        self._tensor = parallel.tensor
        self._expert = parallel.expert
        self.element = BYTES_PER_ELEMENT[config.trainer.dtype]
        self.tokens = config.trainer.tokens_per_row / parallel.context
        """Tokens of the row on this context-parallel rank."""
        self.kernel_tokens = self.tokens
        """Tokens that attention's kernel works on: on CPUs every rank pads its part to the whole row."""
        if self._on_cpus:
            self.kernel_tokens = float(config.trainer.tokens_per_row)
        self.key_tokens = float(config.trainer.tokens_per_row)
        """Tokens whose keys and values attention keeps: gathered from all context-parallel ranks."""
        self._gathers_keys = parallel.context > 1 and not self._on_cpus
        self.local_tokens = self.tokens / (parallel.tensor if parallel.sequence else 1)
        """Tokens of this rank between two tensor-parallel matrix products."""
        self._keeps_products = config.trainer.compile or config.lora is not None
        self._has_head_norms = "model.layers.0.self_attn.q_norm.weight" in expected_shapes(facts)

    def norm_extra(self, size: int, *, tokens: float | None = None) -> float:
        """Bytes that a norm keeps besides input and output: in float32, whatever the compute dtype."""
        copies = 0
        if self._on_cpus:
            # x / rms(x), which float32 computes again (``trainer.workarounds.rms_norm``) unless it is a
            # DTensor; of lower precision also x in float32.
            copies = 2 if self.element != FLOAT32_BYTES else int(self._tensor > 1)
        return (self.local_tokens if tokens is None else tokens) * (copies * size + 1) * FLOAT32_BYTES

    def attention(self) -> _Part:
        facts, element = self._facts, self.element
        heads = facts.num_heads / self._tensor
        kv_heads = facts.num_kv_heads / self._tensor
        queries, keys = heads * facts.head_dim, kv_heads * facts.head_dim
        values, out = kv_heads * facts.value_head_dim, heads * facts.value_head_dim
        # What the kernel takes and gives.
        kernel = queries + keys + values + out
        # Keys and values of the other ranks' parts; on CPUs the kernel's tokens are whole rows anyway.
        gathered = (self.key_tokens - self.tokens) * (keys + values) * element if self._gathers_keys else 0.0
        if self._on_cpus and facts.value_head_dim != facts.head_dim:
            # Values and output are of its head size there, and cut to their own afterwards.
            kernel += values / facts.value_head_dim * facts.head_dim - values
            kernel += queries
        kept = float(facts.hidden_size)
        extra = self.norm_extra(facts.hidden_size)
        if self._has_head_norms:
            kept += queries + keys
            extra += self.norm_extra(round(queries + keys), tokens=self.tokens)
        if facts.latent is not None:
            latent = facts.latent
            rotated = latent.kv_rank + latent.rope_head_dim
            kept += rotated + latent.kv_rank + 2 * latent.query_rank
            extra += self.norm_extra(latent.kv_rank + latent.query_rank)
            if not self._on_cpus:
                # Values are a part of the product that keys come from.
                kept += heads * latent.nope_head_dim
        # Cosines and sines; the kernel's sums of exponentials.
        rope_dim = facts.head_dim if facts.latent is None else facts.latent.rope_head_dim
        return _Part(
            whole=self.tokens * (kept * element + 2 * rope_dim * FLOAT32_BYTES)
            + self.kernel_tokens * (kernel * element + heads * FLOAT32_BYTES)
            + gathered
            + extra,
            selective=self.tokens * element * self._selective_attention(queries, values, out),
            # On CPUs copies in float32 of all that the kernel takes and gives come with them.
            passing=self.kernel_tokens
            * (3 * kernel * FLOAT32_BYTES if self._on_cpus else (2 * queries + keys + values + out) * element)
            # Their gradients twice: of the keys that a part sees, and of whole rows, before they are summed.
            + 2 * gathered,
        )

    def _selective_attention(self, queries: float, values: float, out: float) -> float:
        """Elements per token. Every second matrix product is saved, and the attention kernel's output.

        The kernel of CPUs is not in TorchTitan's list.
        """
        latent = self._facts.latent
        if latent is None:
            saved = queries + values
        elif latent.query_rank:
            saved = latent.query_rank + latent.kv_rank + latent.rope_head_dim
        else:
            saved = queries + queries / self._facts.head_dim * (latent.nope_head_dim + latent.value_head_dim)
        return saved if self._on_cpus else saved + out

    def dense(self) -> _Part:
        """Input; gate and up, the gate's activation and the product of both."""
        hidden, inner = self._facts.hidden_size, self._facts.dense_hidden_size / self._tensor
        return _Part(
            whole=self.tokens * self.element * (hidden + 4 * inner) + self.norm_extra(hidden),
            selective=self.tokens * self.element * self._selective_network(inner),
            # Gradients of the product and of the activated gate.
            passing=self.tokens * self.element * 2 * inner,
        )

    def _selective_network(self, inner: float) -> float:
        """Elements per token: of gate and up one is saved, and the last (or attention's last) projection."""
        return inner + self._facts.hidden_size

    def experts(self) -> _Part:
        """Routed and shared experts, with even loads; expert parallelism moves tokens, not their number."""
        facts, element = self._facts, self.element
        hidden = facts.hidden_size
        # With expert parallelism tokens are split over tensor-parallel ranks and experts are whole;
        # without, every rank has all tokens and a slice of each expert.
        split = 1 if self._expert > 1 else self._tensor
        tokens = self.local_tokens if self._expert > 1 else self.tokens
        inner = facts.expert_hidden_size / split
        # Input, gate and up, and the output, scaled in float32. The gate's activation and the product are
        # computed again, unless the layer is compiled or the product is an input of adapters.
        num_inner = 4 if self._keeps_products else 2
        routed = facts.top_k * ((hidden + num_inner * inner) * element + hidden * FLOAT32_BYTES)
        if self._expert > 1:
            # A second copy as tokens come in from other ranks, before they are sorted by expert.
            routed += facts.top_k * hidden * element
        # Scores of all experts; of the chosen ones five lists of ids and four of scores.
        router = facts.num_experts * FLOAT32_BYTES + facts.top_k * (5 * INT64_BYTES + 4 * FLOAT32_BYTES)
        if element != FLOAT32_BYTES:
            # The gate computes in float32.
            router += hidden * FLOAT32_BYTES
        shared = facts.shared_hidden_size / self._tensor
        whole = tokens * (hidden * element + routed + router) + self.norm_extra(hidden)
        selective = tokens * facts.top_k * (INT64_BYTES + FLOAT32_BYTES)
        if shared:
            whole += self.tokens * 4 * shared * element
            selective += self.tokens * element * self._selective_network(shared)
        if self._expert > 1:
            # What was exchanged, there and back.
            selective += tokens * facts.top_k * 2 * hidden * element
        # Gradients of the output, scaled and not, and of the scores. After these, the gate's activation
        # again, and the gradients of the product and of the gate.
        passing: float = facts.top_k * hidden * (element + 2 * FLOAT32_BYTES)
        if not self._keeps_products:
            passing = max(passing, facts.top_k * 3 * inner * element)
        if self._expert > 1:
            # The end of the forward pass: the output by expert, by rank as it is sent, as it comes back, and
            # scaled in float32; and the sum over a token's experts.
            passing = max(passing, facts.top_k * hidden * (3 * element + FLOAT32_BYTES) + hidden * element)
        return _Part(
            whole=whole,
            selective=selective,
            passing=tokens * passing,
        )
