"""Parameters of a model and of one rank, counted on the tensors that its config.json describes.

Also what every part of a memory plan shares: the machine that it is for, and one line of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from forgeasync.config import EXPERT_TARGETS, ModelFacts, RunConfig
from forgeasync.models import (
    BYTES_PER_ELEMENT,
    expected_shapes,
    num_adapter_parameters,
    published_weight_bytes,
)

FLOAT32_BYTES = 4

PLAN_ERROR = 0.1
"""Error of the memory plan (``planning.memory.NOTE``): what it may overstate refuses no GPU."""


class Machine(StrEnum):
    """Kind of machine that a run's ranks compute on."""

    GPU = "GPU"
    CPU = "CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """One thing a rank holds; ``how`` says in a few words how the number comes about."""

    name: str
    num_bytes: int
    how: str


def least_bytes(num_bytes: int) -> int:
    """Bytes that a rank takes for certain where the plan says ``num_bytes``: the plan less its error."""
    return int(num_bytes * (1.0 - PLAN_ERROR))


def total_bytes(items: Sequence[MemoryItem]) -> int:
    """Sum up the bytes that a rank holds."""
    return sum(item.num_bytes for item in items)


_REPLICATED = (".mlp.gate.", ".kv_a_proj_with_mqa.", ".q_a_proj.")
"""Matrices that every tensor-parallel rank has whole, by parts of their names."""

_FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Projections that are one parameter of vLLM's."""

VOCABULARY_MULTIPLE = 64
"""vLLM pads the rows of embedding and output layer to a multiple of this."""


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
    """The embedding matrix, part of ``split`` (twice with an output layer of its own)."""
    vocabulary_tensors: int
    """1 or 2: whether the output layer has a matrix of its own."""

    @property
    def total(self) -> int:
        return self.experts + self.split + self.replicated

    @property
    def in_layers(self) -> int:
        """The part of ``split`` without embedding and output layer."""
        return self.split - self.vocabulary * self.vocabulary_tensors


def count_parameters(facts: ModelFacts) -> ParameterCounts:
    """Trained parameters by kind; biases that only correct a router's choice are none."""
    experts = split = replicated = 0
    for name, shape in expected_shapes(facts).items():
        size = math.prod(shape)
        if ".mlp.experts." in name:
            experts += size
        elif name.endswith("e_score_correction_bias"):
            continue
        elif len(shape) == 1 or any(part in name for part in _REPLICATED):
            replicated += size
        else:
            split += size
    return ParameterCounts(
        experts=experts,
        split=split,
        replicated=replicated,
        vocabulary=facts.vocab_size * facts.hidden_size,
        vocabulary_tensors=1 if facts.tie_word_embeddings else 2,
    )


def version_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Bytes of one version as generators fetch it: all weights, or the adapters."""
    if config.lora is None:
        return published_weight_bytes(config, facts)
    return num_adapter_parameters(facts, config.lora) * BYTES_PER_ELEMENT[config.generator.dtype]


def merged_bytes(config: RunConfig, facts: ModelFacts, machine: Machine) -> int:
    """Bytes of the weights that a replica merges adapters into; 0 where it merges none.

    vLLM's CPU build cannot serve adapters of experts, so replicas on CPUs merge them. Weights that vLLM fuses
    with adapted ones count too.
    """
    targets = set[str]() if config.lora is None else set[str](config.lora.targets)
    if machine is not Machine.CPU or not targets & set(EXPERT_TARGETS):
        return 0
    for fused in _FUSED:
        if targets & fused:
            targets |= fused
    num_elements = sum(
        math.prod(shape)
        for name, shape in expected_shapes(facts).items()
        if name.removesuffix(".weight").rsplit(".", 1)[-1] in targets
    )
    return num_elements * BYTES_PER_ELEMENT[config.generator.dtype]


def trainer_parameters_per_rank(config: RunConfig, counts: ParameterCounts) -> int:
    """Parameters that one trainer rank owns: its shard under FSDP, tensor and expert parallelism."""
    parallel = config.trainer.parallel
    fsdp = parallel.data_shard * parallel.context
    # Experts: over ep ranks and then over the fsdp * tensor / ep that are left, or over tensor and fsdp.
    owned = (counts.experts + counts.split) / (fsdp * parallel.tensor) + counts.replicated / fsdp
    return math.ceil(owned)


def trained_parameters_per_rank(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> int:
    """Parameters that one trainer rank trains: its shard, or its part of the adapters."""
    if config.lora is None:
        return trainer_parameters_per_rank(config, counts)
    parallel = config.trainer.parallel
    num_shards = parallel.data_shard * parallel.context * parallel.tensor
    return math.ceil(num_adapter_parameters(facts, config.lora) / num_shards)


def generator_parameters_per_rank(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> int:
    """Parameters on one GPU of an engine: vLLM splits heads, networks, vocabulary, and experts.

    Every rank has a slice of each expert or, with expert parallelism, some whole experts: equally much.
    """
    tensor = config.generator.tensor_parallel
    padded = -(-facts.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    padding = (padded - facts.vocab_size) * facts.hidden_size * counts.vocabulary_tensors
    return math.ceil((counts.experts + counts.split + padding) / tensor) + counts.replicated
