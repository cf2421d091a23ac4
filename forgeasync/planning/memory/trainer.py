"""Memory of one trainer rank: what it always holds, and the most that it holds for a time."""

import math
from dataclasses import dataclass

from forgeasync.config import ModelFacts, RunConfig, num_averages
from forgeasync.models import BYTES_PER_ELEMENT, LOGITS_CHUNK_TOKENS
from forgeasync.planning.memory.items import FLOAT32_BYTES, Machine, MemoryItem, total_bytes
from forgeasync.planning.memory.moments import Moment, step_moments
from forgeasync.planning.memory.parameters import (
    ParameterCounts,
    trained_parameters_per_rank,
    trainer_parameters_per_rank,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Memory of one rank in an optimizer step of at least two rows."""

    always: tuple[MemoryItem, ...]
    come_and_go: tuple[MemoryItem, ...]
    """Each at its largest, which is not at the same time."""
    fullest: Moment

    @property
    def total_bytes(self) -> int:
        """Bytes at the fullest moment."""
        return total_bytes(self.always) + math.ceil(self.fullest.total)


def trainer_memory(
    config: RunConfig, facts: ModelFacts, counts: ParameterCounts, machine: Machine
) -> TrainerMemory:
    """Count memory by formulas over config and model shape; ``counts`` comes from ``count_parameters``."""
    moments = step_moments(config, facts, counts, machine)
    trainer = config.trainer
    chunk = min(trainer.tokens_per_row // trainer.parallel.context, LOGITS_CHUNK_TOKENS)
    how = {
        "activations": f"one row, activation_checkpointing {trainer.activation_checkpointing.value}",
        "logits chunk": f"{chunk:,} tokens, with gradients and what kept sets take",
        "gathered weights": f"in {trainer.dtype.value}, by FSDP2",
        "gathered gradients": "before they are reduced, and float32 buffers",
        "optimizer's intermediates": "square roots of AdamW",
    }
    largest = (
        max(moment.activations for moment in moments),
        max(moment.logits for moment in moments),
        max(moment.gathered_weights for moment in moments),
        max(moment.gathered_gradients for moment in moments),
        max(moment.optimizer for moment in moments),
    )
    return TrainerMemory(
        always=tuple(_always(config, facts, counts)),
        come_and_go=tuple(
            MemoryItem(name=name, num_bytes=math.ceil(size), how=how[name])
            for name, size in zip(how, largest, strict=True)
        ),
        fullest=max(moments, key=lambda moment: moment.total),
    )


def _always(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> list[MemoryItem]:
    owned = trainer_parameters_per_rank(config, counts)
    trained, dtype = owned, config.trainer.dtype.value
    element = BYTES_PER_ELEMENT[config.trainer.dtype]
    items = [MemoryItem(name="parameters", num_bytes=owned * FLOAT32_BYTES, how="float32 masters, own shard")]
    if config.lora is not None:
        trained = trained_parameters_per_rank(config, facts, counts)
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
    if num_averages(config.teachers):
        how = "for teachers with ema: float32, own shard"
        items.append(MemoryItem(name="average", num_bytes=trained * FLOAT32_BYTES, how=how))
    # With adapters the reference is the trained model without them.
    if config.algorithm.kl is not None and config.lora is None:
        how = f"for algorithm.kl: frozen, in {dtype}, own shard"
        items.append(MemoryItem(name="reference model", num_bytes=owned * element, how=how))
    return items
