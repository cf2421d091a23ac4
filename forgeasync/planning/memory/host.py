"""Computes the shared memory of hosts: weights being published, and rollouts that wait for training."""

from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.run import RunConfig, longest_response
from forgeasync.models.sizes import (
    BYTES_PER_ELEMENT,
    kept_bytes_per_token,
    num_adapter_parameters,
    published_weight_bytes,
    routing_bytes_per_token,
    sampled_mark_bytes_per_token,
)
from forgeasync.planning.memory.items import Machine, MemoryItem
from forgeasync.planning.memory.parameters import count_merged, merges_adapters

PAYLOAD_HEADER_BYTES = 256
"""Header, table and alignment of the arrays of one payload."""


def host_memory(config: RunConfig, facts: ModelFacts, machine: Machine) -> list[MemoryItem]:
    """Staging buffers of all trainer ranks together, one replica's receive buffer, and the payload store."""
    element, dtype = BYTES_PER_ELEMENT[config.generator.dtype], config.generator.dtype.value
    version, what = published_weight_bytes(config, facts), "version"
    merged = []
    if config.lora is not None:
        version, what = num_adapter_parameters(facts, config.lora) * element, "version of the adapters"
        if merges_adapters(config, machine):
            size = count_merged(facts, config.lora) * element
            how = "what adapters are merged into"
            merged = [MemoryItem(name="merged weights, each replica", num_bytes=size, how=how)]
    return [
        MemoryItem(
            name="staging buffers, all ranks",
            num_bytes=2 * version,
            how=f"2 x one {what} in {dtype}: one read, one written",
        ),
        MemoryItem(
            name="fetched weights, each replica",
            num_bytes=version,
            how=f"one {what}, before it is swapped in",
        ),
        *merged,
        _payload_store(config, facts),
    ]


def _payload_store(config: RunConfig, facts: ModelFacts) -> MemoryItem:
    capacity = round(config.payload.capacity_gib * 2**30)
    num_groups = groups_outstanding(config)
    group = group_payload_bytes(config, facts)
    how = f"{num_groups:,} groups of {group / 2**20:.3g} MiB, if all responses are as long as can be"
    if num_groups * group > capacity:
        how = f"payload.capacity_gib; {how} would take {num_groups * group / 2**30:.3g} GiB"
    return MemoryItem(name="payload store", num_bytes=min(capacity, num_groups * group), how=how)


def groups_outstanding(config: RunConfig) -> int:
    """Most groups started and not yet trained on."""
    outstanding = (config.max_off_policy_steps + 1) * config.algorithm.groups_per_step
    return min(outstanding, config.buffer.max_groups or outstanding)


def group_payload_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the bytes of one group's file, with the longest responses and kept sets as large as top-k.

    Unlike ``largest_group_payload_bytes``, which nothing may exceed, this counts the prompt's record once:
    rollouts of a group share it unless weights were swapped in between their first steps.
    """
    # A model without experts has no routing to record, whatever the setting.
    routing = routing_bytes_per_token(config, facts) if facts.num_experts else 0
    kept = kept_bytes_per_token(config, facts)
    response = longest_response(config)
    prompt = config.model.max_context_length - response
    # int32 ids; of responses float32 log-probabilities too.
    of_prompt = prompt * (4 + routing) + PAYLOAD_HEADER_BYTES
    marks = sampled_mark_bytes_per_token(config)
    of_response = response * (4 + 4 + routing + kept + marks) + PAYLOAD_HEADER_BYTES
    return of_prompt + config.algorithm.group_size * of_response
