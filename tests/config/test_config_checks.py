"""Rules across fields and between a run and its model: every message names field, value and remedy."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from forgeasync.config import ModelFacts, RunConfig, load_config
from forgeasync.models import check_config
from tests.support.config_samples import FACTS, MINIMAL, WARMUP, only


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL)
    return file


def test_minimal_config_has_no_problems(config_file: Path) -> None:
    assert check_config(load_config(config_file, [WARMUP]), FACTS) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sampling.max_response_tokens=64"], ["max_response_tokens = 64", "max_context_length = 64"]),
        (["trainer.tokens_per_row=63"], ["trainer.tokens_per_row = 63", "model.max_context_length = 64"]),
        (["algorithm.group_size=1"], ["algorithm.group_size = 1", "at least 2", "'grpo'"]),
        (["evaluation.num_problems=21"], ["evaluation.num_problems = 21", "data.num_held_out = 20"]),
        (
            ["weights.interruption=cancel_stale"],
            ["weights.interruption = 'cancel_stale'", "needs buffer.stale_groups = 'drop'"],
        ),
        (
            ["scorer.answer_limit_s=30"],
            [
                "timeouts.score_s = 60.0",
                "must be more than 60",
                "4 answers",
                "group_size",
                "scorer.num_workers",
            ],
        ),
        (["timeouts.score_s=6", "scorer.num_workers=2"], ["timeouts.score_s = 6", "must be more than 6:"]),
        (["buffer.max_groups=1"], ["buffer.max_groups = 1", "groups_per_step = 2, one batch"]),
        (
            ["buffer.order=completion"],
            ["buffer.order = 'completion'", "needs buffer.stale_groups = 'drop'", "'deadline'"],
        ),
        (
            [
                "weights.interruption=cancel_stale",
                "buffer.stale_groups=drop",
                "buffer.age_of=mean",
            ],
            ["buffer.age_of = 'mean'", "'oldest_token'", "'cancel_stale'"],
        ),
        (
            ["accounting.policy=windowed_fifo"],
            ["accounting.window_groups", "groups_per_step = 2"],
        ),
        (
            ["accounting={policy: windowed_fifo, window_groups: 1}"],
            ["accounting.window_groups = 1", "at least algorithm.groups_per_step = 2"],
        ),
        (
            ["accounting={policy: windowed_fifo, window_groups: 9}", "max_off_policy_steps=3"],
            ["accounting.window_groups = 9", "at most 8", "(max_off_policy_steps + 1) * groups_per_step = 8"],
        ),
        (
            [
                "accounting={policy: windowed_fifo, window_groups: 4}",
                "max_off_policy_steps=3",
                "buffer.age_of=newest_token",
            ],
            ["buffer.age_of = 'newest_token'", "'oldest_token'", "'windowed_fifo'"],
        ),
        (
            ["accounting.window_groups=4"],
            ["accounting.window_groups = 4", "accounting.policy = 'windowed_fifo'"],
        ),
        (
            [
                "accounting.replacement=weight",
                "weights.interruption=cancel_stale",
                "buffer.stale_groups=drop",
            ],
            ["accounting.replacement = 'weight'", "'cancel_stale'", "use 'reissue'"],
        ),
        (
            ["accounting.metric_groups=1"],
            ["accounting.metric_groups = 1", "groups_per_step = 2, one batch"],
        ),
        (
            [
                "algorithm={group_size: 1, groups_per_step: 2, advantage: reinforce_pp, "
                "filters: [{kind: dynamic_sampling}]}"
            ],
            ["algorithm.group_size = 1", "algorithm.filters.0", "starve"],
        ),
        (
            ["algorithm.pass_at_k=2"],
            ["algorithm.pass_at_k = 2", "needs algorithm.advantage = 'group_pass_at_k'"],
        ),
        (
            ["algorithm.advantage=group_pass_at_k", "algorithm.pass_at_k=5"],
            ["algorithm.pass_at_k = 5", "from 1 to 4"],
        ),
        (
            [
                "algorithm.advantage=group_pass_at_k",
                "algorithm.pass_at_k=3",
                "algorithm.filters=[{kind: overlong_filter}]",
            ],
            ["algorithm.pass_at_k = 3", "from 1 to 2"],
        ),
        (
            ["algorithm.filters=[{kind: resample_on_correct, num_kept: 4}]"],
            ["algorithm.filters.0.num_kept = 4", "less than algorithm.group_size = 4"],
        ),
        (
            ["weights.prefix_cache_across_versions=true", "weights.kv_cache=recompute"],
            ["weights.prefix_cache_across_versions = True", "must be false", "'recompute'"],
        ),
        (
            ["trainer.parallel.num_procs=16"],
            ["algorithm.groups_per_step = 2", "at least 16, one for each data-parallel"],
        ),
        (
            ["trainer.parallel.num_procs=3", "trainer.parallel.tensor=2", "trainer.parallel.expert=2"],
            ["trainer.parallel.num_procs = 3", "multiple of data_replicate * tensor * context = 2"],
        ),
        (
            ["trainer.parallel.num_procs=3", "trainer.parallel.context=3"],
            ["trainer.parallel.context = 3", "tensor * context = 3 must divide 64"],
        ),
        (
            ["trainer.bad_steps.on_nan=rollback", "trainer.recovery.snapshot_every_steps=2"],
            ["trainer.bad_steps.on_nan = 'rollback'", "snapshot_every_steps = 1, which is 2"],
        ),
        (
            ["trainer.bad_steps.on_spike=rollback", "trainer.recovery.snapshot_every_steps=null"],
            ["trainer.bad_steps.on_spike = 'rollback'", "snapshot_every_steps = 1, which is null"],
        ),
        (["trainer.parallel.expert=2"], ["trainer.parallel.expert = 2", "data_shard * tensor * context = 1"]),
        (
            ["trainer.parallel.num_procs=6", "trainer.parallel.expert=3"],
            ["trainer.parallel.expert = 3", "num_experts = 8"],
        ),
        (
            ["trainer.parallel.num_procs=2", "trainer.parallel.tensor=2"],
            ["trainer.parallel.sequence = True", "false if it is 1; it is 1"],
        ),
        (
            [
                "trainer.parallel.num_procs=2",
                "trainer.parallel.tensor=2",
                "trainer.parallel.expert=2",
                "trainer.parallel.sequence=false",
            ],
            ["trainer.parallel.sequence = False", "must be true", "it is 2"],
        ),
        (
            ["trainer.parallel.num_procs=4", "trainer.parallel.tensor=4", "trainer.parallel.expert=4"],
            ["trainer.parallel.tensor = 4", "num_key_value_heads = 2"],
        ),
        (["buffer.max_groups=1"], ["buffer.max_groups = 1", "groups_per_step = 2"]),
        (
            ["trainer.optimizer.decay_steps=[9,9]"],
            ["trainer.optimizer.decay_steps = [9, 9]", "the first less than the second"],
        ),
        (
            ["trainer.cpu_offload=true", "lora={rank: 4, alpha: 8.0, targets: [q_proj]}"],
            ["trainer.cpu_offload = True", "must be false with a lora section"],
        ),
        (
            ["payload.capacity_gib=1e-6"],
            ["payload.capacity_gib = 1e-06", "must be at least", "groups at their largest"],
        ),
        (
            ["payload.capacity_gib=1e-6", "sampling.top_p=0.9"],
            ["payload.capacity_gib = 1e-06", "sampling.top_k > 0 would bound"],
        ),
        (["generator.tensor_parallel=8"], ["generator.tensor_parallel = 8", "num_attention_heads = 4"]),
        (["generator.max_num_batched_tokens=32"], ["max_num_batched_tokens = 32", "max_num_seqs = 64"]),
        (["generator.kv_cache_gib=1e-5"], ["generator.kv_cache_gib = 1e-05", "max_context_length = 64"]),
        (["sampling.top_k=101"], ["sampling.top_k = 101", "100 tokens"]),
        (
            ["model.max_context_length=257", "trainer.tokens_per_row=512"],
            ["model.max_context_length = 257", "max_position_embeddings = 256"],
        ),
        (["lora={rank: 2, alpha: 4, targets: [q_proj, gate]}"], ["lora.targets = 'gate'", "q_proj, k_proj"]),
        (["lora={rank: 2, alpha: 4, targets: [q_proj, q_proj]}"], ["lora.targets = 'q_proj'", "listed once"]),
        (
            [
                "lora={rank: 3, alpha: 4, targets: [q_proj, up_proj]}",
                "trainer.parallel.num_procs=32",
                "trainer.parallel.expert=8",
                "algorithm.groups_per_step=8",
            ],
            ["lora.rank = 3", "multiple of 4", "32 ranks share", "8 experts"],
        ),
        ([WARMUP, "warmup.shape.top_k=5"], ["warmup.shape.top_k = 5", "warmup.shape.num_experts = 4"]),
        (
            [WARMUP, "warmup.wrong_step_share=0.3"],
            ["warmup.wrong_step_share = 0.3", "must be 0 with warmup.guess_error = 0"],
        ),
        ([WARMUP, "warmup.guesses_per_step=1"], ["guesses_per_step = 1", "left out", "direct_share = 0"]),
        (
            [WARMUP, "warmup.examples_per_step=8", "warmup.direct_share=0.5", "warmup.guesses_per_step=8"],
            ["guesses_per_step = 8", "less than warmup.examples_per_step = 8", "direct_share = 0.5"],
        ),
        (
            [WARMUP, "warmup.examples_per_step=8", "warmup.direct_share=0.01"],
            ["guesses_per_step = 0", "at least 1", "direct_share = 0.01"],
        ),
        ([WARMUP, "warmup.shape.num_kv_heads=3"], ["warmup.shape.num_kv_heads = 3", "num_heads = 2"]),
    ],
)
def test_cross_field_rule(config_file: Path, overrides: list[str], words: list[str]) -> None:
    message = only(check_config(load_config(config_file, overrides), FACTS))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (dataclasses.replace(FACTS, top_k=9), ["num_experts_per_tok = 9", "at most num_experts = 8"]),
        (
            dataclasses.replace(FACTS, num_kv_heads=3),
            ["num_key_value_heads = 3", "must divide num_attention_heads = 4"],
        ),
    ],
)
def test_model_that_contradicts_itself(config_file: Path, facts: ModelFacts, words: list[str]) -> None:
    message = only(check_config(load_config(config_file, []), facts))
    for word in ["model.path = 'models/none'", *words]:
        assert word in message


def test_replicated_data_parallelism_leaves_expert_ranks(config_file: Path) -> None:
    # Experts are laid over one replica's ranks: 8 procs in 2 replicas leave 4.
    overrides = ["trainer.parallel.num_procs=8", "trainer.parallel.data_replicate=2"]
    assert check_config(load_config(config_file, [*overrides, "trainer.parallel.expert=4"]), FACTS) == []
    config = load_config(config_file, [*overrides, "trainer.parallel.expert=8"])
    assert "= 4, the ranks that experts" in only(check_config(config, FACTS))


def test_group_size_one_is_fine_for_batch_advantages(config_file: Path) -> None:
    overrides = ["algorithm.group_size=1", "algorithm.advantage=reinforce_pp"]
    assert check_config(load_config(config_file, overrides), FACTS) == []


@given(
    num_procs=st.integers(1, 16),
    replicate=st.integers(1, 4),
    tensor=st.integers(1, 4),
    expert=st.integers(1, 16),
)
@settings(max_examples=60, deadline=None)
def test_accepted_meshes_are_torchtitans(num_procs: int, replicate: int, tensor: int, expert: int) -> None:
    values = OmegaConf.to_container(OmegaConf.create(MINIMAL))
    assert isinstance(values, dict)
    values["algorithm"]["groups_per_step"] = 64
    values["trainer"]["parallel"] = {
        "num_procs": num_procs,
        "data_replicate": replicate,
        "tensor": tensor,
        "expert": expert,
    }
    config = RunConfig.model_validate(values)
    problems = check_config(config, dataclasses.replace(FACTS, num_experts=16))
    shard = config.trainer.parallel.data_shard
    fits = replicate * shard * tensor == num_procs and (shard * tensor) % expert == 0
    divides = 2 % tensor == 0 and 16 % expert == 0 and 128 % tensor == 0
    exact = tensor == 1 or expert > 1
    assert (problems == []) == (fits and divides and exact)
