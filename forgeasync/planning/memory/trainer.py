"""What one trainer rank holds at the fullest moment of an optimizer step.

Gradients of earlier rows, weights and optimizer state are always there; the rest comes and goes. The moments
that can be the fullest are compared, and the items are those of the fullest one.
"""

import math

from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.schema import LoraSection, RunConfig
from forgeasync.config.sizes import BYTES_PER_ELEMENT, LOGITS_CHUNK_TOKENS
from forgeasync.planning.memory.items import FLOAT32_BYTES, Machine, MemoryItem
from forgeasync.planning.memory.moments import step_moments
from forgeasync.planning.memory.parameters import (
    ParameterCounts,
    count_adapters,
    trainer_parameters_per_rank,
)


def trainer_memory(
    config: RunConfig, facts: ModelFacts, counts: ParameterCounts, machine: Machine
) -> list[MemoryItem]:
    """Items of the fullest moment; their sum is the rank's peak."""
    moment = max(step_moments(config, facts, counts, machine), key=lambda one: one.total)
    checkpointing = config.trainer.activation_checkpointing.value
    chunk = min(config.trainer.tokens_per_row, LOGITS_CHUNK_TOKENS)
    come_and_go = (
        ("activations", moment.activations, f"one row, activation_checkpointing {checkpointing}"),
        ("logits chunk", moment.logits, f"{chunk:,} tokens, with gradients"),
        ("gathered weights", moment.gathered_weights, f"in {config.trainer.dtype.value}, by FSDP2"),
        ("gathered gradients", moment.gathered_gradients, "before they are reduced, and float32 buffers"),
        ("optimizer's intermediates", moment.optimizer, "of AdamW"),
    )
    items = _always(config, facts, counts)
    items += [
        MemoryItem(name=name, num_bytes=math.ceil(size), how=how if size else f"freed in the {moment.name}")
        for name, size, how in come_and_go
    ]
    return items


def _always(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> list[MemoryItem]:
    owned = trainer_parameters_per_rank(config, counts)
    trained, dtype = owned, config.trainer.dtype.value
    element = BYTES_PER_ELEMENT[config.trainer.dtype]
    items = [MemoryItem(name="parameters", num_bytes=owned * FLOAT32_BYTES, how="float32 masters, own shard")]
    if config.lora is not None:
        trained = _adapters_per_rank(config, facts, config.lora)
        frozen = MemoryItem(
            name="parameters", num_bytes=owned * element, how=f"frozen, in {dtype}, own shard"
        )
        adapters = MemoryItem(
            name="adapters", num_bytes=trained * FLOAT32_BYTES, how="float32 masters, own shard"
        )
        items = [frozen, adapters]
    items += [
        MemoryItem(name="gradients", num_bytes=trained * FLOAT32_BYTES, how="float32, own shard"),
        MemoryItem(name="optimizer", num_bytes=2 * trained * FLOAT32_BYTES, how="2 x float32, own shard"),
    ]
    # With adapters the reference is the trained model without them.
    if config.algorithm.kl is not None and config.lora is None:
        how = f"for algorithm.kl: frozen, in {dtype}, own shard"
        items.append(MemoryItem(name="reference model", num_bytes=owned * element, how=how))
    return items


def _adapters_per_rank(config: RunConfig, facts: ModelFacts, lora: LoraSection) -> int:
    parallel = config.trainer.parallel
    return math.ceil(count_adapters(facts, lora) / (parallel.data_shard * parallel.context * parallel.tensor))
