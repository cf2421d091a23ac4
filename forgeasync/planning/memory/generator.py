"""Computes the memory of one GPU (or CPU process) of a vLLM engine."""

from forgeasync.config import ModelFacts, RunConfig, ShadowMemory
from forgeasync.models import BYTES_PER_ELEMENT, num_adapter_parameters
from forgeasync.planning.memory.items import FLOAT32_BYTES, Machine, MemoryItem
from forgeasync.planning.memory.parameters import (
    ParameterCounts,
    count_merged,
    generator_parameters_per_rank,
    merges_adapters,
)


def generator_memory(
    config: RunConfig,
    facts: ModelFacts,
    counts: ParameterCounts,
    machine: Machine,
    *,
    section: str = "generator",
) -> list[MemoryItem]:
    """Items of one rank of an engine that takes new weights; see ``engine_memory``."""
    return [
        *engine_memory(config, facts, counts, section=section),
        *_update_memory(config, facts, counts, machine),
    ]


def engine_memory(
    config: RunConfig, facts: ModelFacts, counts: ParameterCounts, *, section: str
) -> list[MemoryItem]:
    """Items of one engine rank; the forward pass is an upper estimate, the rest what is allocated.

    ``config.generator`` says what the engine is like, ``section`` where that stands in the user's config.
    """
    generator = config.generator
    return [
        MemoryItem(
            name="weights",
            num_bytes=_weights(config, facts, counts),
            how=generator.dtype.value,
        ),
        MemoryItem(
            name="KV cache", num_bytes=round(generator.kv_cache_gib * 2**30), how=f"{section}.kv_cache_gib"
        ),
        MemoryItem(
            name="forward pass",
            num_bytes=_forward_pass(config, facts),
            how=f"{generator.max_num_batched_tokens:,} tokens, {generator.max_num_seqs} sequences' logits",
        ),
    ]


def _weights(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> int:
    return generator_parameters_per_rank(config, facts, counts) * BYTES_PER_ELEMENT[config.generator.dtype]


def _update_memory(
    config: RunConfig, facts: ModelFacts, counts: ParameterCounts, machine: Machine
) -> list[MemoryItem]:
    """What the next version takes beside the one in use."""
    generator = config.generator
    element = BYTES_PER_ELEMENT[generator.dtype]
    if config.lora is not None and not merges_adapters(config, machine):
        adapters = num_adapter_parameters(facts, config.lora) // generator.tensor_parallel * element
        return [MemoryItem(name="adapters", num_bytes=adapters, how="served beside the base model")]
    if machine is Machine.CPU:
        changed = _weights(config, facts, counts)
        if config.lora is not None:
            changed = count_merged(facts, config.lora) // generator.tensor_parallel * element
        shadows = changed + _largest_packed_parameter(config, facts)
        how = "the next version, and its largest experts before packing"
        return [MemoryItem(name="shadow weights", num_bytes=shadows, how=how)]
    if config.lora is None and config.weights.shadow is ShadowMemory.DEVICE:
        weights = _weights(config, facts, counts)
        return [MemoryItem(name="shadow weights", num_bytes=weights, how="weights.shadow: device")]
    return []


def _forward_pass(config: RunConfig, facts: ModelFacts) -> int:
    """Count a forward pass: without a backward pass one layer's activations exist at a time.

    Sampling works on float32 logits of one token per sequence, and sorts them where top-k or top-p is on.
    """
    generator = config.generator
    tensor = generator.tensor_parallel
    experts = facts.top_k * (facts.hidden_size + 3 * facts.expert_hidden_size // tensor)
    experts += 3 * facts.shared_hidden_size // tensor
    network = max(experts, 3 * facts.dense_hidden_size // tensor)
    element = BYTES_PER_ELEMENT[generator.dtype]
    forward = generator.max_num_batched_tokens * (4 * facts.hidden_size + network) * element
    return forward + 2 * generator.max_num_seqs * facts.vocab_size * FLOAT32_BYTES


def _largest_packed_parameter(config: RunConfig, facts: ModelFacts) -> int:
    """Bytes of one layer's gate and up projections of all experts of a rank, which are one parameter."""
    elements = facts.num_experts * 2 * facts.expert_hidden_size * facts.hidden_size
    return elements // config.generator.tensor_parallel * BYTES_PER_ELEMENT[config.generator.dtype]
