"""Counts the parameters of a model and of one rank, from the tensors that its config.json describes.

Also has ``Machine`` and ``MemoryItem``, which all parts of a memory plan share.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from pydantic import BaseModel

from forgeasync.config import EXPERT_TARGETS, ModelFacts, RunConfig, longest_response
from forgeasync.models import (
    BYTES_PER_ELEMENT,
    CPU_KV_BLOCK_TOKENS,
    expected_shapes,
    num_adapter_parameters,
)

FLOAT32_BYTES = 4
"""Bytes of a float32 number."""

PLAN_ERROR = 0.1
"""Relative error of the memory plan (``planning.memory.NOTE``); no GPU is refused within this margin."""


class Machine(StrEnum):
    """Kind of device that a run's ranks compute on."""

    GPU = "GPU"
    CPU = "CPU"


KV_BLOCK_TOKENS = {Machine.GPU: 16, Machine.CPU: CPU_KV_BLOCK_TOKENS}
"""Tokens of a block of the KV cache: vLLM's default on GPUs (``CacheConfig.DEFAULT_BLOCK_SIZE`` of 0.32), and
that of its CPU build."""


S = TypeVar("S", bound=BaseModel)


def changed_config(section: S, changes: Mapping[str, object]) -> S:
    """Return a config or a section with other values, given by dotted key."""
    for key, value in changes.items():
        first, _, rest = key.partition(".")
        new = changed_config(getattr(section, first), {rest: value}) if rest else value
        section = section.model_copy(update={first: new})
    return section


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """One entry of a memory plan; ``how`` explains the number in a few words."""

    name: str
    num_bytes: int
    how: str


def least_bytes(num_bytes: int) -> int:
    """Return a lower bound of planned bytes: ``num_bytes`` less the plan's error."""
    return int(num_bytes * (1.0 - PLAN_ERROR))


def total_bytes(items: Sequence[MemoryItem]) -> int:
    """Return the sum of the items' bytes."""
    return sum(item.num_bytes for item in items)


_REPLICATED = (".mlp.gate.", ".mlp.router.", ".kv_a_proj_with_mqa.", ".q_a_proj.")
"""Parts of the names of matrices that are replicated on every tensor-parallel rank."""

_FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Sets of projections that vLLM fuses into one parameter."""

VOCABULARY_MULTIPLE = 64
"""Multiple to which vLLM pads the rows of embedding and output layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Number of parameters of the whole model, by how they are split over ranks.

    Expert parallelism, or else tensor parallelism, splits ``experts``. Tensor parallelism splits ``split``:
    attention projections, dense networks, embedding and output layer. Neither splits ``replicated``: norms,
    gates and projections to latents.
    """

    experts: int
    split: int
    replicated: int
    vocabulary: int
    """Parameters of the embedding matrix, which is part of ``split``."""
    vocabulary_tensors: int
    """Matrices of that size in ``split``: 1 if the output layer is tied to the embedding, otherwise 2."""

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.experts + self.split + self.replicated

    @property
    def in_layers(self) -> int:
        """Parameters of ``split`` without embedding and output layer."""
        return self.split - self.vocabulary * self.vocabulary_tensors


def count_parameters(facts: ModelFacts) -> ParameterCounts:
    """Count the trained parameters by kind; biases that only correct a router's choice are not trained."""
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


def active_parameters(facts: ModelFacts, counts: ParameterCounts) -> int:
    """Return the number of parameters that a token uses."""
    if not facts.num_experts:
        return counts.total
    return counts.split + counts.replicated + counts.experts * facts.top_k // facts.num_experts


@functools.cache
def pair_cost(facts: ModelFacts) -> float:
    """Return the work for a pair of a query and a key, relative to the other work on a token.

    A forward pass needs 2 FLOPs for each parameter that a token uses. A pair needs 2 for each layer, head and
    dimension of a key and of a value. Source: Kaplan et al., 2020, section 2.1. A backward pass needs twice
    as many of both. Layers with windows have few pairs.
    """
    num_layers = facts.num_layers - facts.num_windowed_layers
    of_pair = num_layers * facts.num_heads * (facts.head_dim + facts.value_head_dim)
    return of_pair / active_parameters(facts, count_parameters(facts))


def longest_prompt(config: RunConfig) -> int:
    """Return the tokens that the longest response leaves to a prompt; of episodes it is not known: 0."""
    return config.model.max_context_length - longest_response(config)


def merged_bytes(config: RunConfig, facts: ModelFacts, machine: Machine) -> int:
    """Return the bytes of the weights that a replica merges adapters into; 0 if it merges none.

    Replicas on CPUs merge adapters of experts, because vLLM's CPU build cannot serve them. Weights that vLLM
    fuses with adapted ones are included.
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
    """Return the parameters of one trainer rank's shard under FSDP, tensor and expert parallelism."""
    parallel = config.trainer.parallel
    fsdp = parallel.data_shard * parallel.context
    # Experts are split over ep ranks and then fsdp * tensor / ep ranks, or over tensor and fsdp: the same.
    owned = (counts.experts + counts.split) / (fsdp * parallel.tensor) + counts.replicated / fsdp
    return math.ceil(owned)


def trained_parameters_per_rank(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> int:
    """Return the parameters that one trainer rank trains: its shard of the weights or of the adapters."""
    if config.lora is None:
        return trainer_parameters_per_rank(config, counts)
    parallel = config.trainer.parallel
    num_shards = parallel.data_shard * parallel.context * parallel.tensor
    return math.ceil(num_adapter_parameters(facts, config.lora) / num_shards)


def generator_parameters_per_rank(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> int:
    """Return the parameters on one GPU of an engine; vLLM splits heads, networks, vocabulary and experts.

    A rank has a slice of each expert or, with expert parallelism, some whole experts; the size is the same.
    """
    tensor = config.generator.tensor_parallel
    padded = -(-facts.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    padding = (padded - facts.vocab_size) * facts.hidden_size * counts.vocabulary_tensors
    return math.ceil((counts.experts + counts.split + padding) / tensor) + counts.replicated
