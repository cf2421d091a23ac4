"""Computes the memory of one trainer rank: its constant part, and the peak within a step.

Activations are the tensors that autograd saves, counted on TorchTitan 0.3.0's layers as this repository
runs them, in bytes per token of a rank. CPUs differ in two ways. Norms in lower precision, or on
tensor-parallel ranks, are computed step by step and also keep x / rms(x). Attention works on copies that are
laid out by sequence (``forgeasync.trainer.workarounds.attention``). With context parallelism a rank has
the activations of its part of a row, but keys and values of the whole row.

FSDP2 (torch 2.13) gathers a layer's weights before the layer runs, and prefetches those of the next layer. In
the backward pass a layer's full gradients exist until they are reduced, in float32, to the rank's shard. The
output layer (with tied weights also the embedding) stays gathered from its forward to its backward pass,
while no other layer is gathered.
"""

import math
from dataclasses import dataclass

from forgeasync.config import (
    ActivationCheckpointing,
    Dtype,
    LinearAttention,
    ModelFacts,
    RunConfig,
    num_averages,
)
from forgeasync.models import (
    BYTES_PER_ELEMENT,
    GATHER_BLOCK_BYTES,
    GATHER_COST,
    LOGITS_CHUNK_TOKENS,
    expected_shapes,
    kept_bytes_per_token,
)
from forgeasync.planning.parameters import (
    FLOAT32_BYTES,
    Machine,
    MemoryItem,
    ParameterCounts,
    longest_prompt,
    total_bytes,
    trained_parameters_per_rank,
    trainer_parameters_per_rank,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Temporary memory of one rank at one moment of a step, in bytes."""

    name: str
    activations: float = 0.0
    logits: float = 0.0
    gathered_weights: float = 0.0
    gathered_gradients: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all parts in bytes."""
        return self.activations + self.logits + self.gathered_weights + self.gathered_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Memory of one rank in an optimizer step of at least two rows."""

    always: tuple[MemoryItem, ...]
    """Constant memory."""
    is_offloaded: bool
    """Whether the constant memory is the host's (``trainer.cpu_offload``), not the GPU's."""
    come_and_go: tuple[MemoryItem, ...]
    """Temporary memory: the peak of each kind; the peaks are at different moments."""
    fullest: Moment
    """Moment with the most temporary memory."""

    @property
    def total_bytes(self) -> int:
        """Peak memory of the rank's device, in bytes."""
        constant = 0 if self.is_offloaded else total_bytes(self.always)
        return constant + math.ceil(self.fullest.total)


def trainer_memory(
    config: RunConfig, facts: ModelFacts, counts: ParameterCounts, machine: Machine
) -> TrainerMemory:
    """Return a trainer rank's memory; ``counts`` is the result of ``count_parameters(facts)``."""
    moments = step_moments(config, facts, counts, machine)
    trainer = config.trainer
    is_offloaded = trainer.cpu_offload and machine is Machine.GPU
    chunk = min(trainer.tokens_per_row // trainer.parallel.context, LOGITS_CHUNK_TOKENS)
    how = {
        "activations": f"one row, activation_checkpointing {trainer.activation_checkpointing.value}"
        + ", keys of shared prompts for each sequence" * (trainer.shares_prefixes and machine is Machine.GPU),
        "logits chunk": f"{chunk:,} tokens, with gradients and what kept sets take",
        "gathered weights": f"in {trainer.dtype.value}, by FSDP2",
        "gathered gradients": "before they are reduced, and float32 buffers",
    }
    kinds = ("activations", "logits", "gathered_weights", "gathered_gradients")
    largest = [max(getattr(moment, kind) for moment in moments) for kind in kinds]
    return TrainerMemory(
        always=tuple(_always(config, facts, counts, is_offloaded=is_offloaded)),
        is_offloaded=is_offloaded,
        come_and_go=tuple(
            MemoryItem(name=name, num_bytes=math.ceil(size), how=how[name])
            for name, size in zip(how, largest, strict=True)
        ),
        fullest=max(moments, key=lambda moment: moment.total),
    )


def _always(
    config: RunConfig, facts: ModelFacts, counts: ParameterCounts, *, is_offloaded: bool
) -> list[MemoryItem]:
    owned = trainer_parameters_per_rank(config, counts)
    trained = trained_parameters_per_rank(config, facts, counts) * FLOAT32_BYTES
    frozen, dtype = owned * BYTES_PER_ELEMENT[config.trainer.dtype], config.trainer.dtype.value
    masters = "float32 masters, own shard"
    if config.lora is None:
        items = [("parameters", trained, masters)]
    else:
        items = [("parameters", frozen, f"frozen, in {dtype}, own shard"), ("adapters", trained, masters)]
    items += [
        ("gradients", trained, "float32, own shard"),
        ("optimizer", 2 * trained, "2 x float32, own shard"),
    ]
    if num_averages(config.teachers):
        items.append(("average", trained, "for teachers with ema: float32, own shard"))
    # With adapters, the reference is the base model, which needs no copy.
    if config.algorithm.kl is not None and config.lora is None:
        items.append(("reference model", frozen, f"for algorithm.kl: frozen, in {dtype}, own shard"))
    where = "in host memory: " if is_offloaded else ""
    return [MemoryItem(name=name, num_bytes=size, how=f"{where}{how}") for name, size, how in items]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """Bytes that FSDP2 handles at once, of the largest layer and of the output layer (``head``)."""

    layer_weights: float
    """Gathered weights of the layer that runs, in the compute dtype."""
    next_weights: float
    """Prefetched weights of the next layer; unsharded weights are copied, but not prefetched."""
    head_weights: float
    layer_gradients: float
    """Full gradients of a layer, in the compute dtype; 0 with adapters."""
    head_gradients: float
    layer_reduced: float
    """Float32 buffer in which a layer's gradients are reduced; unsharded gradients have one too."""
    head_reduced: float


def step_moments(
    config: RunConfig, facts: ModelFacts, counts: ParameterCounts, machine: Machine
) -> tuple[Moment, ...]:
    """Return the candidates for the peak of a step, without the constant memory."""
    layers = [
        layer_activations(config, facts, index=index, machine=machine) for index in range(facts.num_layers)
    ]
    choice = config.trainer.activation_checkpointing
    kept = sum(layer.kept(choice) for layer in layers)
    last, earlier = layers[-1], layers[-2:][0]
    units = _units(config, facts, counts)
    is_tied = facts.tie_word_embeddings
    # With tied weights, the output layer stays gathered until the embedding's backward pass.
    head_weights = units.head_weights if is_tied else 0.0
    head_gradients = units.head_gradients if is_tied else 0.0
    row = kept - last.kept(choice)
    return (
        *_output_layer(config, facts, units, kept + outside_activations(config, facts, machine=machine)),
        Moment(
            name="backward pass of the last layer",
            activations=row + last.whole + last.passing,
            gathered_weights=head_weights + units.layer_weights + units.next_weights,
            gathered_gradients=units.head_gradients if is_tied else units.head_reduced,
        ),
        Moment(
            name="backward pass of a layer, while the gradients of the one after it are reduced",
            activations=row - earlier.kept(choice) + earlier.whole + earlier.passing,
            gathered_weights=head_weights + units.layer_weights + units.next_weights,
            gathered_gradients=head_gradients + units.layer_reduced,
        ),
        Moment(
            name="reduction of a layer's gradients",
            activations=row,
            gathered_weights=head_weights + units.layer_weights + units.next_weights,
            gathered_gradients=head_gradients + units.layer_gradients + units.layer_reduced,
        ),
        Moment(
            name="backward pass of the embedding",
            gathered_weights=units.head_weights,
            # With tied weights, the output layer's gradient still exists, and the embedding's is added to it.
            gathered_gradients=units.head_gradients * (2 if is_tied else 1)
            + units.head_reduced
            + units.layer_reduced,
        ),
    )


def _output_layer(
    config: RunConfig, facts: ModelFacts, units: _Units, activations: float
) -> tuple[Moment, Moment]:
    """Return two moments of a chunk's backward pass: gradients of the logits, and those of the weight.

    If only the logits in kept sets are computed, as on CPUs, the former need less memory: the logits of the
    uncut tokens, and lists of at most one id for every ``GATHER_COST`` logits.
    """
    trainer = config.trainer
    tokens = trainer.tokens_per_row // trainer.parallel.context
    chunk = min(tokens, LOGITS_CHUNK_TOKENS)
    num_logits = chunk * facts.vocab_size / trainer.parallel.tensor
    logits = num_logits * FLOAT32_BYTES
    mask, block = 0.0, 0.0
    if kept_bytes_per_token(config, facts):
        mask = num_logits
        rows = num_logits / GATHER_COST * 2 * facts.hidden_size * FLOAT32_BYTES
        block = min(rows, GATHER_BLOCK_BYTES)
    # Gradients of several chunks or terms are summed in float32. A float32 product is added in place.
    is_summed = tokens > LOGITS_CHUNK_TOKENS or bool(config.algorithm.terms)
    earlier = units.head_reduced if is_summed else 0.0
    is_in_place = is_summed and trainer.dtype is Dtype.FLOAT32
    return (
        Moment(
            name="backward pass of the output layer",
            activations=activations,
            # Scaled logits, the gradient through the sampled token's logit, two tensors for the gradient of
            # the log-sum-exp, and the mask of logits that are cut.
            logits=4 * logits + mask,
            gathered_weights=units.head_weights,
            gathered_gradients=earlier,
        ),
        Moment(
            name="gradient of the output layer",
            activations=activations,
            logits=2 * logits + block,
            gathered_weights=units.head_weights,
            gathered_gradients=earlier + (0.0 if is_in_place else units.head_gradients),
        ),
    )


def _units(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> _Units:
    parallel = config.trainer.parallel
    element = BYTES_PER_ELEMENT[config.trainer.dtype]
    shards = parallel.data_shard * parallel.context
    # Expert parallelism uses some of the FSDP and tensor ranks; the remaining factor shards each expert.
    expert_shards = shards * parallel.tensor // parallel.expert if parallel.expert > 1 else shards
    rest = (counts.in_layers / parallel.tensor + counts.replicated) / facts.num_layers
    experts = counts.experts / max(1, facts.num_moe_layers)
    experts /= parallel.expert if parallel.expert > 1 else parallel.tensor
    head = counts.vocabulary / parallel.tensor
    trained = 1.0 if config.lora is None else 0.0
    return _Units(
        layer_weights=(rest + experts) * element,
        next_weights=(rest * (shards > 1) + experts * (expert_shards > 1)) * element,
        head_weights=head * element,
        layer_gradients=(rest + experts) * element * trained,
        head_gradients=head * element * trained,
        layer_reduced=(rest + experts) * FLOAT32_BYTES * trained,
        head_reduced=head * FLOAT32_BYTES * trained,
    )


INT64_BYTES = 8

CHUNK_TOKENS = 64
"""Tokens of a chunk of linear attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations:
    """Bytes of one layer's activations for one row on one rank."""

    whole: float
    """Bytes that autograd saves without checkpointing."""
    selective: float
    """Bytes that TorchTitan's selective checkpointing saves; the rest is recomputed."""
    boundary: float
    """Bytes of the layer's input, which full checkpointing saves."""
    passing: float
    """Peak of the temporary bytes besides ``whole`` in a pass over the layer.

    These are gradients of activations in the backward pass, or tensors freed at the end of the forward pass.
    """

    def kept(self, choice: ActivationCheckpointing) -> float:
        """Return the bytes kept from the forward to the backward pass."""
        match choice:
            case ActivationCheckpointing.NONE:
                return self.whole
            case ActivationCheckpointing.SELECTIVE:
                return self.selective
            case ActivationCheckpointing.FULL:
                return self.boundary


def layer_activations(
    config: RunConfig, facts: ModelFacts, *, index: int, machine: Machine
) -> LayerActivations:
    """Return the activations of a layer."""
    count = _Count(config, facts, machine=machine)
    if facts.linear is None or index in facts.linear.full_layers:
        attention = count.attention()
    else:
        attention = count.linear_attention(facts.linear)
    network = count.experts() if index >= facts.num_dense_layers else count.dense()
    boundary = count.local_tokens * facts.hidden_size * count.element
    # The residual stream: the layer's input and the sum after attention.
    whole = 2 * boundary + attention.whole + network.whole
    return LayerActivations(
        whole=whole,
        selective=boundary + attention.selective + network.selective,
        boundary=boundary,
        # The network's backward pass runs first and frees the network's activations.
        passing=max(attention.passing - network.whole, network.passing),
    )


def outside_activations(config: RunConfig, facts: ModelFacts, *, machine: Machine) -> float:
    """Return the bytes kept between the last layer and the output layer.

    These are the last layer's output, the norm's extra tensors and the hidden states of the targets.
    """
    count = _Count(config, facts, machine=machine)
    hidden = facts.hidden_size
    # All tokens of the rank's row, because sequence parallelism ends before the output layer.
    targets = count.tokens * hidden * count.element
    return count.local_tokens * hidden * count.element + targets + count.norm_extra(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Bytes of a part of a layer, as in ``LayerActivations``."""

    whole: float
    selective: float
    passing: float


def _prompt_keys(config: RunConfig) -> int:
    """Return the prompt tokens of a row's sequences, if sequences share prompts.

    They are computed once, but on GPUs keys and values are gathered for each sequence. The row is one of
    whole groups of sequences that are as long as the config allows; it can have more shorter ones.
    """
    size, prompt = config.algorithm.group_size, longest_prompt(config)
    of_group = size * config.model.max_context_length - (size - 1) * prompt
    num_sequences = config.trainer.tokens_per_row * size // of_group
    return num_sequences * prompt if config.trainer.shares_prefixes and num_sequences > 1 else 0


class _Count:
    """Counts the bytes of the tensors of one row on one rank."""

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
        """Tokens that the attention kernel processes; on CPUs every rank pads its part to the whole row."""
        if self._on_cpus:
            self.kernel_tokens = float(config.trainer.tokens_per_row)
        self.key_tokens = float(config.trainer.tokens_per_row + _prompt_keys(config))
        """Tokens whose keys and values attention keeps on GPUs: gathered from all context-parallel ranks, or
        for each sequence that shares its prompt."""
        self._gathers_keys = self.key_tokens > self.tokens and not self._on_cpus
        self.local_tokens = self.tokens / (parallel.tensor if parallel.sequence else 1)
        """Tokens of this rank between two tensor-parallel matrix products."""
        self._keeps_products = config.trainer.compile or config.lora is not None
        self._has_head_norms = any(
            name.endswith("self_attn.q_norm.weight") for name in expected_shapes(facts)
        )

    def norm_extra(self, size: int, *, tokens: float | None = None) -> float:
        """Return the float32 bytes that a norm keeps besides its input and output."""
        copies = 0
        if self._on_cpus:
            # x / rms(x), which a float32 norm recomputes (``trainer.workarounds.rms_norm``) unless x is a
            # DTensor; in lower precision also x in float32.
            copies = 2 if self.element != FLOAT32_BYTES else int(self._tensor > 1)
        return (self.local_tokens if tokens is None else tokens) * (copies * size + 1) * FLOAT32_BYTES

    def attention(self) -> _Part:
        facts, element = self._facts, self.element
        heads = facts.num_heads / self._tensor
        kv_heads = facts.num_kv_heads / self._tensor
        queries, keys = heads * facts.head_dim, kv_heads * facts.head_dim
        values, out = kv_heads * facts.value_head_dim, heads * facts.value_head_dim
        # Inputs and output of the kernel.
        kernel = queries + keys + values + out
        # Keys and values of the other ranks' parts; on CPUs the kernel's tokens already are whole rows.
        gathered = (self.key_tokens - self.tokens) * (keys + values) * element if self._gathers_keys else 0.0
        if self._on_cpus and facts.value_head_dim != facts.head_dim:
            # On CPUs values and output are padded to the kernel's head size, and cut afterwards.
            kernel += values / facts.value_head_dim * facts.head_dim - values
            kernel += queries
        kept = float(facts.hidden_size)
        extra = self.norm_extra(facts.hidden_size)
        if facts.linear is not None:
            # The gate after its sigmoid, and the gated output.
            kept += 2 * out
        if self._has_head_norms:
            kept += queries + keys
            extra += self.norm_extra(round(queries + keys), tokens=self.tokens)
        if facts.latent is not None:
            latent = facts.latent
            rotated = latent.kv_rank + latent.rope_head_dim
            kept += rotated + latent.kv_rank + 2 * latent.query_rank
            extra += self.norm_extra(latent.kv_rank + latent.query_rank)
            if not self._on_cpus:
                # The values are a view of the product that also contains keys, so the whole product is kept.
                kept += heads * latent.nope_head_dim
        # Cosines and sines; the kernel's sums of exponentials.
        return _Part(
            whole=self.tokens * (kept * element + 2 * facts.rotary_dim * FLOAT32_BYTES)
            + self.kernel_tokens * (kernel * element + heads * FLOAT32_BYTES)
            + gathered
            + extra,
            selective=self.tokens * element * self._selective_attention(queries, values, out),
            # Gradients of the kernel's inputs and output; on CPUs with float32 copies of all of these.
            passing=self.kernel_tokens
            * (3 * kernel * FLOAT32_BYTES if self._on_cpus else (2 * queries + keys + values + out) * element)
            # Gradients of gathered keys and values, twice: of the part, and of whole rows before the sum; or
            # of each sequence, and in float32 before the sum, of keys and then of values.
            + 2 * gathered,
        )

    def _selective_attention(self, queries: float, values: float, out: float) -> float:
        """Return the elements per token that selective checkpointing saves of attention.

        It saves every second matrix product and, except on CPUs, the attention kernel's output: the CPU
        kernel is not in TorchTitan's list.
        """
        latent = self._facts.latent
        if latent is None:
            saved = queries + values
        elif latent.query_rank:
            saved = latent.query_rank + latent.kv_rank + latent.rope_head_dim
        else:
            saved = queries + queries / self._facts.head_dim * (latent.nope_head_dim + latent.value_head_dim)
        return saved if self._on_cpus else saved + out

    def linear_attention(self, linear: LinearAttention) -> _Part:
        """Count the gated delta rule, in chunks, with the convolution before it and the gated norm after it.

        On GPUs as flash-linear-attention 0.5.2 saves tensors, on CPUs as ``forgeasync.models`` does.
        """
        hidden, heads = self._facts.hidden_size, linear.num_value_heads
        # Queries and keys are repeated for all heads of values.
        keys, values = heads * linear.key_head_dim, heads * linear.value_head_dim
        state, scores = keys * linear.value_head_dim / CHUNK_TOKENS, heads * CHUNK_TOKENS
        # The input of the convolution, queries, keys and values, and the inverse that corrects a chunk.
        rule: float = (linear.num_channels + 2 * keys + values + scores) * self.element
        # States and corrections are computed again, and gradients are of these, too.
        passing = (5 * keys + 4 * values + 2 * state) * self.element
        if self._on_cpus:
            rule = (5 * linear.num_channels + 9 * keys + 3 * values + 6 * scores + state) * FLOAT32_BYTES
            passing = rule
        # In float32 the norm's input and result, the gate and its activation; the scaled and gated result.
        norm = values * (4 * FLOAT32_BYTES + 2 * self.element)
        return _Part(
            whole=self.tokens * (hidden * self.element + rule + norm) + self.norm_extra(hidden),
            selective=self.tokens * self.element * (linear.num_channels + heads + hidden),
            passing=self.tokens * passing,
        )

    def dense(self) -> _Part:
        """Count a dense network: its input, gate, up, the gate's activation and the product."""
        hidden, inner = self._facts.hidden_size, self._facts.dense_hidden_size / self._tensor
        return _Part(
            whole=self.tokens * self.element * (hidden + 4 * inner) + self.norm_extra(hidden),
            selective=self.tokens * self.element * self._selective_network(inner),
            # Gradients of the product and of the activated gate.
            passing=self.tokens * self.element * 2 * inner,
        )

    def _selective_network(self, inner: float) -> float:
        """Return the elements per token that selective checkpointing saves of a network.

        These are one of gate and up, and the last projection, of the network or of attention.
        """
        return inner + self._facts.hidden_size

    def experts(self) -> _Part:
        """Count routed and shared experts with even loads: each rank computes as many tokens as it sends."""
        facts, element = self._facts, self.element
        hidden = facts.hidden_size
        # With expert parallelism, tokens are split over tensor-parallel ranks and experts are whole.
        # Without it, every rank has all tokens and a slice of each expert.
        split = 1 if self._expert > 1 else self._tensor
        tokens = self.local_tokens if self._expert > 1 else self.tokens
        inner = facts.expert_hidden_size / split
        # Input, gate, up, and the output, which is scaled in float32. The gate's activation and the product
        # are recomputed, unless the layer is compiled or the product is an input of adapters.
        num_inner = 4 if self._keeps_products else 2
        routed = facts.top_k * ((hidden + num_inner * inner) * element + hidden * FLOAT32_BYTES)
        if self._expert > 1:
            # A second copy of the tokens as received from other ranks, before they are sorted by expert.
            routed += facts.top_k * hidden * element
        # Scores of all experts, and five lists of ids and four of scores for the chosen ones.
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
            # Tokens exchanged between ranks, in both directions.
            selective += tokens * facts.top_k * 2 * hidden * element
        # Gradients of the scaled output, the unscaled output and the scores; after these, the recomputed
        # activation of the gate, and the gradients of the product and the gate.
        passing: float = facts.top_k * hidden * (element + 2 * FLOAT32_BYTES)
        if not self._keeps_products:
            # gpt-oss recomputes with autograd: nine tensors of clamped gates, products and their gradients.
            passing = max(passing, facts.top_k * (9 if facts.window else 3) * inner * element)
        if self._expert > 1:
            # At the end of the forward pass: the output sorted by expert, as sent, as received and scaled in
            # float32; and the sum over a token's experts.
            passing = max(passing, facts.top_k * hidden * (3 * element + FLOAT32_BYTES) + hidden * element)
        return _Part(
            whole=whole,
            selective=selective,
            passing=tokens * passing,
        )
