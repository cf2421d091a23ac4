"""Small runs for tests of the simulation."""

from typing import Any

from forgeasync.config import AccountingSection, BufferSection, ScorerSection, WeightsSection
from forgeasync.plugins.simulator import SimulatedRun


def small_run(**changes: Any) -> SimulatedRun:
    """A run of 12 steps of 4 groups of 4, with one generator and nothing that bounds it but the age."""
    values: dict[str, Any] = {
        "num_steps": 12,
        "groups_per_step": 4,
        "group_size": 4,
        "max_off_policy_steps": 2,
        "buffer": BufferSection(),
        "accounting": AccountingSection(),
        "scorer": ScorerSection(),
        "weights": WeightsSection(),
        "num_replicas": 1,
        "num_generator_hosts": 1,
        "max_num_seqs": 64,
        "max_kv_tokens": 1_000_000,
        "num_data_ranks": 1,
        "tokens_per_row": 4_096,
        "steps_per_batch": 1,
        "payload_capacity_bytes": 10**9,
        "largest_group_bytes": 10**6,
        "longest_group_tokens": 10_000,
        "num_groups_held": 4,
        "max_response_tokens": 1_000,
        "source_weights": {"chain_sum": 1.0},
        "num_prompts": 1_000,
    }
    return SimulatedRun(**(values | changes))
