"""Sizes that follow from a run's config and its model, in bytes and tokens."""

import math

from forgeasync.config import (
    Dtype,
    LoraSection,
    ModelFacts,
    RoutingReplay,
    RunConfig,
    longest_response,
    num_averages,
)
from forgeasync.models.checkpoint_shapes import expected_shapes

LOGITS_CHUNK_TOKENS = 1024
"""Tokens of a row whose logits exist at the same time in the trainer."""


GATHER_COST = 64
"""A logit read row by row from the output matrix takes about as long as this many out of a matrix product, in
forward and backward pass together: 55 to 75 on a CPU core, rows of 1,024 in float32."""


GATHER_BLOCK_BYTES = 8 * 2**20
"""Rows of the output matrix and of hidden states that are gathered at once for kept logits. Blocks that fit
into the caches take a fifth of the time, and memory that is given back to the system is slow to get again."""


PAYLOAD_OVERHEAD_BYTES = 1024
"""Header, table, alignment and its share of the file's last page of one payload, generously."""


BYTES_PER_ELEMENT = {Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2}


def kv_bytes_per_token(config: RunConfig, facts: ModelFacts) -> int:
    """Bytes of KV cache that one token takes on one generator rank.

    With more ranks than KV heads every rank still holds one head. Latents are the same on every rank (vLLM's
    CPU build expands them: it says so itself where the cache is too small for that).
    """
    if facts.latent is not None:
        latent_size = facts.latent.kv_rank + facts.latent.rope_head_dim
        return facts.num_layers * latent_size * BYTES_PER_ELEMENT[config.generator.dtype]
    heads_per_rank = max(1, facts.num_kv_heads // config.generator.tensor_parallel)
    element = BYTES_PER_ELEMENT[config.generator.dtype]
    return 2 * facts.num_layers * heads_per_rank * facts.head_dim * element


def published_weight_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Bytes of one version of the weights on its way to the generators."""
    num_elements = sum(math.prod(shape) for shape in expected_shapes(facts).values())
    return num_elements * BYTES_PER_ELEMENT[config.generator.dtype]


def num_adapter_parameters(facts: ModelFacts, lora: LoraSection) -> int:
    """Parameters of all adapters: rank * (inputs + outputs) of every adapted matrix."""
    return sum(
        lora.rank * sum(shape)
        for name, shape in expected_shapes(facts).items()
        if name.removesuffix(".weight").rpartition(".")[2] in lora.targets
    )


def weight_copies_in_shared_memory(config: RunConfig) -> int:
    """Versions of all weights in shared memory: two staged, and one that each generator fetches.

    An average is staged beside each version, and every teacher that moves fetches one too. With adapters,
    only what each generator or teacher's engine makes of them counts.
    """
    moving = [one for one in config.teachers.values() if one.moves]
    if config.lora is not None:
        return config.generator.num_replicas + sum(one.num_engines for one in moving)
    return 2 * (1 + num_averages(config.teachers)) + config.generator.num_replicas + len(moving)


def largest_group_payload_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the bytes reserved for the recorded arrays of one group in the payload store.

    Longest prompt and response in every rollout, no prompt record shared, kept sets of top_k. Only sets with
    ties can take more: CPU engines keep all logits that tie at rank top_k. A teacher writes the group once
    more, with what it says of it, before the first file is freed.
    """
    context, response = config.model.max_context_length, longest_response(config)
    per_token = 4 + routing_bytes_per_token(config, facts)
    per_response_token = 4 + kept_bytes_per_token(config, facts) + sampled_mark_bytes_per_token(config)
    rollout = context * per_token + response * per_response_token + 2 * PAYLOAD_OVERHEAD_BYTES
    if config.algorithm.needs_teacher:
        rollout = 2 * rollout + response * teacher_bytes_per_token(config) + PAYLOAD_OVERHEAD_BYTES
    return config.algorithm.group_size * rollout


def teacher_bytes_per_token(config: RunConfig) -> int:
    """Return the bytes of a payload that hold what a teacher says of one response token; 0 without one."""
    if not config.algorithm.needs_teacher:
        return 0
    return 4 + 4 + config.algorithm.num_teacher_ids * (4 + 4)


def sampled_mark_bytes_per_token(config: RunConfig) -> int:
    """Return the bytes per response token that mark it as sampled in a payload; 0 if all are."""
    return 0 if config.environment is None else 1


def routing_bytes_per_token(config: RunConfig, facts: ModelFacts) -> int:
    """Return the bytes that one token's experts take in a payload; 0 if they are not recorded."""
    if config.trainer.routing_replay is RoutingReplay.OFF:
        return 0
    bytes_per_id = 1 if facts.num_experts <= 256 else 2
    return facts.num_moe_layers * facts.top_k * bytes_per_id + 1


def kept_bytes_per_token(config: RunConfig, facts: ModelFacts) -> int:
    """Return the most bytes that a response token's kept set takes in a payload; 0 if it is not recorded.

    Ties at rank top_k aside (``largest_group_payload_bytes``).
    """
    if not (config.trainer.keep_sampling_mask and config.sampling.cuts_vocabulary):
        return 0
    return 4 + 4 * (config.sampling.top_k or facts.vocab_size)
