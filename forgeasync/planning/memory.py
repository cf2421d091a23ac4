"""What a run holds in memory, by rank: parameters counted on the real model, the rest by formulas.

The counts are exact but for rounding; activations and logits are estimates meant to be within a third.
Allocator fragmentation, NCCL buffers and CUDA graphs come on top. The unit is bytes everywhere.
"""

import math
from dataclasses import dataclass

from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.schema import ActivationCheckpointing, RunConfig
from forgeasync.config.sizes import BYTES_PER_ELEMENT, LOGITS_CHUNK_TOKENS

FLOAT32_BYTES = 4

_REPLICATED = (".router.gate.", ".attention.wkv_a.", ".attention.wq_a.")
"""Matrices that every tensor-parallel rank has whole, by parts of their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Parameters of the whole model, by how tensor parallelism treats them.

    ``experts`` are split by expert parallelism (or without it by tensor parallelism), ``split`` (attention
    projections, dense networks, embedding, output layer) by tensor parallelism; ``replicated`` (norms, gates,
    projections to latents) by neither.
    """

    experts: int
    split: int
    replicated: int
    vocabulary: int
    """The embedding matrix, part of ``split``: the largest unit that FSDP gathers besides a layer."""

    @property
    def total(self) -> int:
        return self.experts + self.split + self.replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """One thing a rank holds; ``how`` says in a few words how the number comes about."""

    name: str
    num_bytes: int
    how: str


def count_parameters(facts: ModelFacts) -> ParameterCounts:
    """Builds the model without memory (meta device) from TorchTitan's own config and counts it."""
    # Here, because planning is otherwise free of torch, and TorchTitan takes seconds to import.
    from forgeasync.trainer.model import build_meta_model

    experts = split = replicated = vocabulary = 0
    for name, parameter in build_meta_model(facts).named_parameters():
        if ".inner_experts." in name:
            experts += parameter.numel()
        elif parameter.dim() == 1 or any(part in name for part in _REPLICATED):
            replicated += parameter.numel()
        else:
            split += parameter.numel()
            if name.startswith(("tok_embeddings.", "lm_head.")):
                vocabulary = parameter.numel()
    return ParameterCounts(experts=experts, split=split, replicated=replicated, vocabulary=vocabulary)


def trainer_parameters_per_rank(config: RunConfig, counts: ParameterCounts) -> int:
    """Parameters that one trainer rank owns: its shard under FSDP, tensor and expert parallelism."""
    parallel = config.trainer.parallel
    fsdp = parallel.data_shard * parallel.context
    # Experts: over ep ranks and then over the fsdp * tensor / ep that are left, or over tensor and fsdp.
    owned = (counts.experts + counts.split) / (fsdp * parallel.tensor) + counts.replicated / fsdp
    return math.ceil(owned)


def generator_parameters_per_rank(config: RunConfig, counts: ParameterCounts) -> int:
    """Parameters on one GPU of an engine: vLLM splits every expert's hidden size, heads and vocabulary."""
    tensor = config.generator.tensor_parallel
    return math.ceil((counts.experts + counts.split) / tensor) + counts.replicated


def trainer_memory(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> list[MemoryItem]:
    """What one trainer rank holds at its peak, between the forward and the backward pass of a row."""
    owned = trainer_parameters_per_rank(config, counts)
    element = BYTES_PER_ELEMENT[config.trainer.dtype]
    parallel = config.trainer.parallel
    experts_over = parallel.expert if parallel.expert > 1 else parallel.tensor
    in_layers = counts.split - counts.vocabulary * (1 if facts.tie_word_embeddings else 2)
    layers = counts.experts / experts_over + in_layers / parallel.tensor + counts.replicated
    largest = math.ceil(max(layers / facts.num_layers, counts.vocabulary / parallel.tensor))
    activations, how_activations = _activations(config, facts)
    # The logits of one chunk: in the compute dtype, scaled in float32, and two float32 gradients (of the
    # chosen token and of the log-sum-exp) before they are added up.
    chunk = min(config.trainer.tokens_per_row, LOGITS_CHUNK_TOKENS)
    slice_size = math.ceil(facts.vocab_size / parallel.tensor)
    logits = chunk * slice_size * (element + 3 * FLOAT32_BYTES)
    items = [
        MemoryItem(name="master weights", num_bytes=owned * FLOAT32_BYTES, how="float32, own shard"),
        MemoryItem(name="gradients", num_bytes=owned * FLOAT32_BYTES, how="float32, own shard"),
        MemoryItem(name="Adam state", num_bytes=2 * owned * FLOAT32_BYTES, how="2 x float32, own shard"),
        MemoryItem(
            name="gathered weights",
            num_bytes=2 * largest * element,
            how=f"largest layer in {config.trainer.dtype.value}, and the next one prefetched",
        ),
        MemoryItem(
            name="gathered gradients",
            num_bytes=largest * (element + FLOAT32_BYTES),
            how="largest layer, and its float32 buffer to reduce",
        ),
        MemoryItem(name="activations", num_bytes=activations, how=how_activations),
        MemoryItem(
            name="logits",
            num_bytes=logits,
            how=f"a chunk of {chunk:,} tokens x {slice_size:,}, with float32 copies",
        ),
    ]
    # With adapters the reference is the trained model without them.
    if config.algorithm.kl is not None and config.lora is None:
        how = f"for algorithm.kl: frozen, in {config.trainer.dtype.value}, own shard"
        items.append(MemoryItem(name="reference model", num_bytes=owned * element, how=how))
    return items


def _activations(config: RunConfig, facts: ModelFacts) -> tuple[int, str]:
    """What one row's forward pass keeps for its backward pass.

    A layer keeps per token: its input, both norms' outputs and the sum after attention (4 hidden); queries,
    keys and values before and after norm and rotation, and the attention output; for each selected expert
    its input and output (2 hidden) and gate, up and their product (3 expert hidden), the latter also for
    shared experts and dense networks.
    """
    element = BYTES_PER_ELEMENT[config.trainer.dtype]
    parallel = config.trainer.parallel
    tokens = config.trainer.tokens_per_row / (parallel.tensor * parallel.context)
    heads = 2 * (facts.num_heads + 2 * facts.num_kv_heads) + facts.num_heads
    experts = facts.top_k * (2 * facts.hidden_size + 3 * facts.expert_hidden_size)
    experts += 3 * facts.shared_hidden_size
    dense_share = facts.num_dense_layers / facts.num_layers
    networks = (1 - dense_share) * experts + dense_share * 3 * facts.dense_hidden_size
    layer = tokens * element * (4 * facts.hidden_size + heads * facts.head_dim + networks)
    layer_input = tokens * element * facts.hidden_size
    match config.trainer.activation_checkpointing:
        case ActivationCheckpointing.NONE:
            return math.ceil(facts.num_layers * layer), "one row, everything kept"
        case ActivationCheckpointing.SELECTIVE:
            # It recomputes element-wise operations and every second matrix product: about half.
            return math.ceil(facts.num_layers * layer / 2), "one row, about half kept (selective)"
        case ActivationCheckpointing.FULL:
            kept = facts.num_layers * layer_input + layer
            return math.ceil(kept), "one row, inputs of all layers and one whole layer (full)"


def generator_memory(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> list[MemoryItem]:
    """What one GPU (or CPU process) of an engine holds."""
    generator = config.generator
    element = BYTES_PER_ELEMENT[generator.dtype]
    weights = generator_parameters_per_rank(config, counts) * element
    # Without a backward pass one layer's activations live at a time; the sampler works on float32 logits
    # of one token per sequence, and sorts them where top-k or top-p is on.
    experts = facts.top_k * (facts.hidden_size + 3 * facts.expert_hidden_size // generator.tensor_parallel)
    experts += 3 * facts.shared_hidden_size // generator.tensor_parallel
    network = max(experts, 3 * facts.dense_hidden_size // generator.tensor_parallel)
    forward = generator.max_num_batched_tokens * (4 * facts.hidden_size + network) * element
    sampler = 2 * generator.max_num_seqs * facts.vocab_size * FLOAT32_BYTES
    return [
        MemoryItem(name="weights", num_bytes=weights, how=generator.dtype.value),
        MemoryItem(
            name="KV cache", num_bytes=round(generator.kv_cache_gib * 2**30), how="generator.kv_cache_gib"
        ),
        MemoryItem(
            name="forward pass",
            num_bytes=forward + sampler,
            how=f"{generator.max_num_batched_tokens:,} tokens, {generator.max_num_seqs} sequences' logits",
        ),
    ]


def staging_memory(config: RunConfig, counts: ParameterCounts) -> list[MemoryItem]:
    """Shared memory of hosts: weights on their way, on the trainer's side and in every generator."""
    version = counts.total * BYTES_PER_ELEMENT[config.generator.dtype]
    return [
        MemoryItem(
            name="staged weights",
            num_bytes=2 * version,
            how=f"2 versions in {config.generator.dtype.value}, over all ranks: one read, one written",
        ),
        MemoryItem(
            name="fetched weights, each replica",
            num_bytes=version,
            how="one version, before it is swapped in",
        ),
        MemoryItem(
            name="payload store",
            num_bytes=round(config.payload.capacity_gib * 2**30),
            how="payload.capacity_gib, in shared memory",
        ),
    ]
