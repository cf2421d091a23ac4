"""The configs for GPUs: their size, what every GPU would hold, how their figures follow from each other."""

import json
import re

import pytest

from forgeasync.config import ModelFacts, RunConfig, load_config, num_gpus_needed, resolve
from forgeasync.models import (
    SHIPPED_MODELS,
    check_config,
    kv_bytes_per_token,
    largest_group_payload_bytes,
    parse_model_facts,
)
from forgeasync.planning import groups_outstanding, least_bytes, memory_plan
from tests.support.config_samples import CONFIGS

NUM_GPUS = {
    "qwen3_8b": 8,
    "qwen3_30b_a3b": 32,
    "qwen3_32b": 32,
    "glm_4_5_air": 64,
    "gpt_oss_120b": 64,
    "qwen3_235b_a22b": 192,
}

GPU_BYTES = 79 * 2**30
"""What torch sees of an H100 or A100 of 80 GB is a little more."""

RUNNING_TOKENS = 8192
MEAN_RESPONSE_TOKENS = 12288
"""What the configs say that they assume: tokens of a running sequence and of a response, on average."""


def large(name: str, *overrides: str) -> tuple[RunConfig, ModelFacts]:
    """A config and its model's shape, without a look at the hub."""
    config = load_config(CONFIGS / f"{name}.yaml", overrides)
    file = SHIPPED_MODELS / config.model.path.replace("/", "--") / "config.json"
    return config, parse_model_facts(json.loads(file.read_text(encoding="utf-8")), config.model.path)


@pytest.mark.parametrize("name", ["qwen3_0.6b_1gpu", "qwen3_1.7b_1gpu", "qwen3_0.6b_2gpu"])
def test_small_configs_need_what_the_page_on_gpus_says(name: str) -> None:
    config, facts = large(name)
    assert check_config(config, facts) == []
    page = (CONFIGS.parent / "docs" / "gpu.md").read_text(encoding="utf-8")
    row = re.search(rf"\| `{name}` \| (\d) of 24 GB \| [^|]+ \| ([\d.]+) GiB", page)
    assert row is not None and num_gpus_needed(config) == int(row[1])
    sections = memory_plan(resolve(config, facts), facts)
    most = max(one.total.num_bytes for one in sections if one.total is not None)
    assert f"{most / 2**30:.1f}" == row[2]


@pytest.mark.parametrize("name", NUM_GPUS)
def test_every_gpu_and_the_figures_in_the_comments(name: str) -> None:
    config, facts = large(name)
    assert check_config(config, facts) == []
    assert num_gpus_needed(config) == NUM_GPUS[name]
    trainer, generator, _ = memory_plan(resolve(config, facts), facts)
    for role in (trainer, generator):
        assert role.total is not None and role.total.num_bytes < least_bytes(GPU_BYTES), role.owner

    section = config.generator
    held = section.kv_cache_gib * 2**30 / kv_bytes_per_token(config, facts)
    assert held / RUNNING_TOKENS - 1 < section.max_num_seqs <= held / RUNNING_TOKENS
    # One sequence of full length has room at least.
    assert held >= config.model.max_context_length
    slots = section.num_replicas * section.max_num_seqs
    assert config.buffer.max_in_flight == 2 * slots // config.algorithm.group_size
    assert config.buffer.max_in_flight <= groups_outstanding(config)
    # By Little's law a response of mean length takes slots / batch steps.
    batch = config.algorithm.group_size * config.algorithm.groups_per_step
    longest_steps = slots / batch * config.sampling.max_response_tokens / MEAN_RESPONSE_TOKENS
    assert longest_steps <= config.max_off_policy_steps

    # The store holds no group back: those in flight reserve the largest size, the others have an average one.
    group_gib = largest_group_payload_bytes(resolve(config, facts), facts) / 2**30
    waiting = groups_outstanding(config) - config.buffer.max_in_flight
    needed_gib = group_gib * (
        config.buffer.max_in_flight + waiting * MEAN_RESPONSE_TOKENS / config.sampling.max_response_tokens
    )
    assert needed_gib <= config.payload.capacity_gib <= 2 * group_gib * groups_outstanding(config)
    # The longest response of a group that waited for the longest of another, at 30 ms a token.
    assert config.timeouts.generate_s > 2 * config.sampling.max_response_tokens * 0.030


def test_trainers_on_fewer_gpus_would_not_fit() -> None:
    """What the comments say of half as many."""
    of_half = {
        "qwen3_8b": 2,
        "qwen3_30b_a3b": 8,
        "qwen3_32b": 8,
        "glm_4_5_air": 16,
        "gpt_oss_120b": 16,
        "qwen3_235b_a22b": 32,
    }
    for name, change in of_half.items():
        config, _ = large(name)
        fewer, facts = large(name, f"trainer.parallel.num_procs={change}")
        trainer, _, _ = memory_plan(resolve(fewer, facts), facts)
        assert fewer.trainer.parallel.num_procs * 2 == config.trainer.parallel.num_procs
        assert trainer.total is not None and trainer.total.num_bytes > least_bytes(GPU_BYTES), name
