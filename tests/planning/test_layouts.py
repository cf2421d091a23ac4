"""The layout that the dry run proposes where a trainer rank does not fit its GPU."""

import pytest

from forgeasync.config import ActivationCheckpointing, ModelFacts, RunConfig, load_config
from forgeasync.models import check_config, read_model_facts
from forgeasync.planning import (
    GPU_GIB,
    USABLE_SHARE,
    Machine,
    changed_config,
    count_parameters,
    fit_rows,
    fit_trainer,
    memory_plan,
    overrides,
    trainer_gpu_share,
    trainer_memory,
)
from tests.support.config_samples import CONFIGS

H100 = round(GPU_GIB * 2**30)
LONG_MODEL = "Qwen/Qwen3-30B-A3B-Instruct-2507"


def long_overrides(length: int, *changes: str) -> list[str]:
    """Sequences of ``length`` tokens, one to a row."""
    return [
        f"model.path={LONG_MODEL}",
        f"model.max_context_length={length}",
        f"trainer.tokens_per_row={length}",
        f"sampling.max_response_tokens={length - 2048}",
        "payload.capacity_gib=64",
        *changes,
    ]


def long_run(length: int, *changes: str) -> tuple[RunConfig, ModelFacts]:
    """The 30B run with long sequences."""
    config = load_config(CONFIGS / "qwen3_30b_a3b.yaml", long_overrides(length, *changes))
    facts = read_model_facts(config.model.path)
    assert check_config(config, facts) == []
    return config, facts


def with_context(config: RunConfig, degree: int) -> RunConfig:
    full = ActivationCheckpointing.FULL
    changes = {"trainer.parallel.context": degree, "trainer.activation_checkpointing": full}
    return changed_config(config, changes)


def planned_bytes(config: RunConfig, facts: ModelFacts) -> int:
    return trainer_memory(config, facts, count_parameters(facts), Machine.GPU).total_bytes


@pytest.mark.parametrize("length", [131072, 262144])
def test_longer_sequences_need_context_parallelism(length: int) -> None:
    config, facts = long_run(length)
    fit = fit_trainer(config, facts, gpu_bytes=H100)
    assert not fit.fits and fit.proposal is not None
    degree = fit.proposal["trainer.parallel.context"]
    assert fit.proposal["trainer.tokens_per_row"] == length and isinstance(degree, int) and degree > 1
    proposed, _ = long_run(length, *overrides(config, fit.proposal).split())
    assert planned_bytes(proposed, facts) == fit.smallest <= USABLE_SHARE * H100
    # One context degree less does not fit.
    less = with_context(config, degree // 2)
    assert planned_bytes(less, facts) > USABLE_SHARE * H100
    assert fit_trainer(proposed, facts, gpu_bytes=H100).fits


def test_checkpointing_comes_before_context_parallelism_and_shorter_rows() -> None:
    config, facts = long_run(32768, "trainer.activation_checkpointing=none", "trainer.tokens_per_row=65536")
    fit = fit_trainer(config, facts, gpu_bytes=H100)
    assert fit.proposal is not None
    assert overrides(config, fit.proposal).startswith("trainer.activation_checkpointing=full")
    assert fit.proposal["trainer.parallel.context"] == 1
    _, (name, size, words), *_ = fit_rows(config, facts, gpu_bytes=H100)
    assert name == "trainer layout that fits" and size.endswith("GiB")
    assert words == overrides(config, fit.proposal)


@pytest.mark.parametrize(
    ("name", "gib", "begin"),
    [
        ("0.6b", 24, None),
        ("0.6b", 20, "generator.kv_cache_gib="),
        ("0.6b", 16, "trainer.cpu_offload=true"),
        ("1.7b", 16, "trainer.activation_checkpointing=full generator.kv_cache_gib="),
        ("0.6b", 8, "generator.colocated=sleep max_off_policy_steps=1 trainer.cpu_offload=true"),
        ("0.6b", 4, "none"),
    ],
)
def test_a_shared_gpu_that_is_too_small_is_told_what_fits(name: str, gib: int, begin: str | None) -> None:
    file = CONFIGS / f"qwen3_{name}_1gpu.yaml"
    config = load_config(file)
    facts = read_model_facts(config.model.path)
    *_, (fits, found, words) = fit_rows(config, facts, gpu_bytes=gib * 2**30)
    if begin is None:
        assert (fits, found) == ("both roles on one GPU: fit", "yes")
        return
    assert fits == "overrides with which both fit"
    if begin == "none":
        assert (found, words) == ("none", "")
    else:
        assert words.startswith(begin)
        changed = load_config(file, words.split())
        assert check_config(changed, facts) == []
        assert fit_rows(changed, facts, gpu_bytes=gib * 2**30)[-1][1] == "yes"


def test_an_engine_that_sleeps_takes_the_memory_of_a_step() -> None:
    """Without it the same config needs 20 GB."""
    sleep = ["generator.colocated=sleep", "max_off_policy_steps=1"]
    config = load_config(CONFIGS / "qwen3_1.7b_1gpu.yaml", sleep)
    facts = read_model_facts(config.model.path)
    assert fit_rows(config, facts, gpu_bytes=16 * 2**30)[-1][:2] == ("both roles on one GPU: fit", "yes")
    trainer, generator, shared, *_ = memory_plan(config, facts)
    constant = sum(item.num_bytes for item in trainer.items[:4])
    engine = generator.total.num_bytes
    assert trainer.total.num_bytes - constant < engine
    assert shared.total.num_bytes == constant + engine + 2 * 2**30
    share = trainer_gpu_share(config, facts)
    assert share == trainer.total.num_bytes / shared.total.num_bytes
    (asleep,) = (item for item in memory_plan(config, facts)[-1].items if "sleep" in item.name)
    assert asleep.num_bytes == generator.items[0].num_bytes, "its weights are in host memory meanwhile"


def test_illegal_layouts_are_not_proposed() -> None:
    """With 4 tensor-parallel ranks at most 16 can share a row: rows are padded to multiples of 64."""
    config, facts = long_run(262144, "trainer.parallel={num_procs: 256, expert: 8, tensor: 4}")
    of_degree = {degree: planned_bytes(with_context(config, degree), facts) for degree in (16, 32)}
    assert of_degree[32] < of_degree[16]
    too_small = int((of_degree[16] - 1) / USABLE_SHARE)
    fit = fit_trainer(config, facts, gpu_bytes=too_small)
    assert fit.proposal is None and fit.smallest == of_degree[16]


def test_context_parallel_ranks_hold_a_part_and_keys_of_the_whole_row() -> None:
    """By hand: a part of every layer's input, and in the last layer keys and values of the others' parts."""
    config, facts = long_run(131072)
    counts = count_parameters(facts)
    whole = {
        degree: trainer_memory(with_context(config, degree), facts, counts, Machine.GPU)
        .come_and_go[0]
        .num_bytes
        for degree in (1, 2, 4)
    }
    # In bfloat16.
    keys_and_values = 2 * facts.num_kv_heads * facts.head_dim * 2
    for degree in (2, 4):
        gathered = 131072 * (1 - 1 / degree) * keys_and_values
        assert whole[degree] == pytest.approx(whole[1] / degree + gathered, rel=1e-9)


def test_the_shadow_of_weights_fits_or_not() -> None:
    """A GPU holds 28.45 GiB of weights, the cache and a forward pass; with a shadow the weights twice."""
    config, facts = long_run(32768, "generator.kv_cache_gib=40")
    found = {name: (fits, words) for name, fits, words in fit_rows(config, facts, gpu_bytes=H100)}
    fits, words = found["generator rank: fits, shadow: host"]
    host_gib = float(words.split()[0])
    assert fits == "yes" and 28.45 + 40 < host_gib < 79 * USABLE_SHARE
    fits, words = found["generator rank: fits, shadow: device"]
    assert fits == "no" and float(words.split()[0]) == pytest.approx(host_gib + 28.45, abs=0.02)
