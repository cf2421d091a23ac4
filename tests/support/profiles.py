"""Profiles of machines that do not exist, for tests."""

from typing import Any

from forgeasync.config import AccountingSection, BufferSection, ScorerSection, WeightsSection
from forgeasync.plugins.simulator import (
    DecodePoint,
    Distribution,
    Lengths,
    Profile,
    SimulatedRun,
    TrainPoint,
    WeightTimes,
)


def simple_profile(
    *,
    decode_s: float = 0.01,
    decode_per_sequence_s: float = 0.0,
    token_s: float = 1e-4,
    fixed_s: float = 0.0,
    lengths: tuple[float, ...] = (20.0, 40.0, 80.0),
    prompt_share: float = 0.0,
    score_s: float = 0.0,
    score_places: int = 1,
    swap_s: float = 0.0,
    fetch_s: float = 0.0,
    publish_s: float = 0.0,
    between_s: float = 0.0,
    filtered_share: float = 0.0,
) -> Profile:
    """A machine whose steps take ``decode_s`` and whose trainer takes ``token_s`` a token of a rank."""
    return Profile(
        hardware="none",
        model="none",
        kv_block_tokens=1,
        decode=tuple(
            DecodePoint(
                num_running=num,
                num_context_tokens=0,
                step_s=decode_s + num * decode_per_sequence_s,
            )
            for num in (1, 64)
        ),
        prefill_tokens_per_s=1e9,
        train=tuple(
            TrainPoint(num_rows=1, cost=num, step_s=fixed_s + num * token_s) for num in (1_000, 2_000)
        ),
        between_steps_s=Distribution.point(between_s),
        weights=WeightTimes(
            wait_s=Distribution.point(0.0),
            publish_s=Distribution.point(publish_s),
            fetch_s=Distribution.point(fetch_s),
            swap_s=Distribution.point(swap_s),
        ),
        score_s=Distribution.point(score_s),
        score_places=score_places,
        lengths={
            "chain_sum": Lengths(
                prompt=Distribution.point(10.0),
                response=Distribution(mean=sum(lengths) / len(lengths), quantiles=tuple(lengths)),
                prompt_share=prompt_share,
            )
        },
        filtered_share=filtered_share,
        start_s=1.0,
    )


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
