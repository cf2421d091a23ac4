"""The configs for GPUs: their size, what every GPU would hold, how their figures follow from each other."""

import json
import math
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torchtitan.models.common.attention import VarlenAttention

from forgeasync.config import ModelFacts, RunConfig, load_config, num_gpus_needed, resolve
from forgeasync.controller import check_plan
from forgeasync.models import (
    SHIPPED_MODELS,
    check_config,
    kv_bytes_per_token,
    largest_group_payload_bytes,
    parse_model_facts,
)
from forgeasync.models import facts as facts_module
from forgeasync.models.workarounds import titan_utils
from forgeasync.planning import dry_run_report, groups_outstanding, least_bytes, memory_plan
from forgeasync.trainer import model as trainer_model
from tests.support.config_samples import CONFIGS

SIZES = {
    "qwen3_8b": (8, 128),
    "qwen3_30b_a3b": (32, 256),
    "qwen3_32b": (32, 512),
    "qwen3_235b_a22b": (192, 512),
}
"""GPUs, and rollouts a step, of every config."""

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


@pytest.mark.parametrize("name", SIZES)
def test_every_gpu_and_the_figures_in_the_comments(name: str) -> None:
    config, facts = large(name)
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
    for name, change in (("qwen3_8b", 2), ("qwen3_30b_a3b", 8), ("qwen3_32b", 8), ("qwen3_235b_a22b", 32)):
        config, _ = large(name)
        fewer, facts = large(name, f"trainer.parallel.num_procs={change}")
        trainer, _, _ = memory_plan(resolve(fewer, facts), facts)
        assert fewer.trainer.parallel.num_procs * 2 == config.trainer.parallel.num_procs
        assert trainer.total is not None and trainer.total.num_bytes > least_bytes(GPU_BYTES), name


@pytest.mark.parametrize("name", SIZES)
def test_dry_run_and_model_on_a_pretended_hopper(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same plan as without a GPU, and the model that a trainer rank there would build, without FA3."""
    monkeypatch.setattr(facts_module, "_probe_hub", Mock(side_effect=ConnectionError("no network")))
    monkeypatch.setattr(facts_module, "try_to_load_from_cache", lambda hub_id, file: None)
    config = load_config(CONFIGS / f"{name}.yaml", [f"run_dir={tmp_path / 'run'}"])
    reports = []
    for pretends in (False, True):
        if pretends:
            titan_utils._is_installed.cache_clear()
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
            monkeypatch.setattr(trainer_model, "DEVICE_TYPE", "cuda")
        facts, looked_at = check_plan(config)
        table = dry_run_report(config, facts, looked_at=looked_at)
        reports.append([list(column.cells) for column in table.columns])
    assert reports[0] == reports[1]
    assert str(SIZES[name][0]) in reports[0][1]
    model = trainer_model.build_meta_model(facts)
    kernels = [module for module in model.modules() if isinstance(module, VarlenAttention)]
    assert len(kernels) == facts.num_layers
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert f"{num_parameters:,}" in reports[0][1]
    assert math.isclose(num_parameters, float(name.split("_")[1].removesuffix("b")) * 1e9, rel_tol=0.03)
