"""Splits of GPUs: the best of all that are legal is found, and stated hardware is arithmetic."""

from pathlib import Path

import pytest

from apps.profile import main
from forgeasync.config import RunConfig, load_config
from forgeasync.models import read_model_facts
from forgeasync.planning import GPU_GIB
from forgeasync.plugins.simulator import (
    DecodeTable,
    Origin,
    Profile,
    SplitPlan,
    TrainTable,
    choose,
    plan_splits,
    stated_profile,
    write_profile,
)
from forgeasync.schema import ConfigError
from tests.support.config_samples import CONFIGS, FACTS, minimal_config
from tests.support.profiles import simple_profile

GPU_BYTES = round(GPU_GIB * 2**30)


@pytest.fixture
def config() -> RunConfig:
    overrides = ["max_off_policy_steps=4", "generator.max_num_seqs=4", "algorithm.groups_per_step=4"]
    return minimal_config(*overrides, "max_steps=100")


def _plan(config: RunConfig, profile: Profile, *, num_gpus: int = 4) -> SplitPlan:
    return plan_splits(
        config, FACTS, lambda split: profile, num_gpus=num_gpus, num_steps=9, gpu_bytes=GPU_BYTES
    )


def test_slow_generators_get_the_procs_and_a_slow_trainer_does(config: RunConfig) -> None:
    slow_generators = _plan(config, simple_profile(lengths=(10.0, 30.0), token_s=1e-6))
    assert (slow_generators.chosen.num_trainer, slow_generators.chosen.num_generating) == (1, 3)
    slow_trainer = _plan(config, simple_profile(lengths=(10.0, 30.0), decode_s=1e-4, token_s=1e-2))
    assert slow_trainer.chosen.num_trainer >= 2
    for plan in (slow_generators, slow_trainer):
        assert {one.num_gpus for one in plan.splits} <= set(range(2, 5))
        assert "waits" in plan.reason


def test_no_split_of_the_front_is_beaten_and_the_chosen_one_is_fast_enough(config: RunConfig) -> None:
    plan = _plan(config, simple_profile(lengths=(10.0, 30.0), token_s=5e-4))
    fastest = max(one.tokens_per_s for one in plan.splits)
    assert plan.chosen.tokens_per_s >= 0.97 * fastest
    for one in plan.front:
        for other in plan.splits:
            better = (
                other.tokens_per_s >= one.tokens_per_s,
                other.prediction.mean_age <= one.prediction.mean_age,
                other.num_gpus <= one.num_gpus,
            )
            strictly = (
                other.tokens_per_s > one.tokens_per_s
                or other.prediction.mean_age < one.prediction.mean_age
                or other.num_gpus < one.num_gpus
            )
            assert not (all(better) and strictly)
    assert len(plan.front) < len(plan.splits)


def test_of_splits_that_are_as_fast_the_one_with_the_youngest_data_is_taken(config: RunConfig) -> None:
    """The trainer bounds: every bound from 1 on is as fast, and 1 has the youngest data."""
    plan = _plan(config, simple_profile(lengths=(10.0, 30.0), decode_s=1e-4, token_s=1e-2), num_gpus=2)
    assert plan.chosen.config.max_off_policy_steps < 4
    as_fast = [one for one in plan.splits if one.tokens_per_s >= 0.97 * plan.splits[0].tokens_per_s]
    assert len(as_fast) > 1
    assert plan.chosen.prediction.mean_age <= min(one.prediction.mean_age for one in as_fast) + 0.05
    assert choose(as_fast) is plan.chosen


def test_where_nothing_fits_the_reason_is_said(config: RunConfig) -> None:
    parallel = config.trainer.parallel.model_copy(update={"tensor": 8})
    changed = config.model_copy(update={"trainer": config.trainer.model_copy(update={"parallel": parallel})})
    with pytest.raises(ConfigError, match=r"--gpus = 4: must be more: none of 0 splits is legal"):
        _plan(changed, simple_profile())


def test_a_profile_without_the_config_s_data_is_refused(config: RunConfig) -> None:
    profile = simple_profile()
    other = profile.model_copy(update={"lengths": {"other": profile.lengths["chain_sum"]}})
    with pytest.raises(ConfigError, match=r"lengths = \['other'\].*chain_sum"):
        _plan(config, other)


BIG = CONFIGS / "qwen3_30b_a3b.yaml"


def test_a_stated_profile_agrees_with_arithmetic_by_hand() -> None:
    """The config's comments compute the same by hand: 30 ms a decode step of 96 sequences of 8k tokens, and
    41 s for a batch of 256 x 12.3k tokens on 16 GPUs."""
    config = load_config(BIG)
    facts = read_model_facts(config.model.path)
    profile = stated_profile(config, facts, mean_response_tokens=12_000)
    assert profile.origin is Origin.STATED
    assert any("data sheet" in source for source in profile.sources)
    decode_s = DecodeTable(profile.decode).step_s(96, 8_192)
    assert decode_s == pytest.approx(0.030 + 0.003, rel=0.05)
    per_rank = 256 * 12_300 / 16
    train_s = TrainTable(profile.train).step_s(6, round(per_rank))
    assert train_s == pytest.approx(41.0, rel=0.12)
    (lengths,) = profile.lengths.values()
    assert lengths.response.mean.mean == pytest.approx(12_000, rel=0.01)


def test_a_stated_profile_refuses_a_mean_that_no_response_can_have() -> None:
    config = load_config(BIG)
    facts = read_model_facts(config.model.path)
    with pytest.raises(ValueError, match="mean_response_tokens = 40000 must be from 1 to 30720"):
        stated_profile(config, facts, mean_response_tokens=40_000)


def test_the_app_prints_its_plan_and_refuses_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, profile = CONFIGS / "tiny_moe_cpu.yaml", tmp_path / "profile.json"
    write_profile(simple_profile(token_s=1e-5), profile)
    arguments = ["--plan", "--gpus", "3", "--config", str(config), "algorithm.groups_per_step=2"]
    arguments += ["model.path=Qwen/Qwen3-30B-A3B", "payload.capacity_gib=8"]
    code = main([*arguments, "--profile", str(profile), "trainer.parallel={num_procs: 2, expert: 1}"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "recommended: trainer.parallel.num_procs=1 generator.num_replicas=2" in printed.out
    assert main([*arguments, "--profile", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    assert main([*arguments, "--response-tokens", "1e9"]) == 2
    assert "--response-tokens = 1000000000.0: must be from 1 to 128" in capsys.readouterr().err


def test_of_refused_splits_one_is_explained(config: RunConfig) -> None:
    trainer = config.trainer.model_copy(update={"tokens_per_row": 32})
    changed = config.model_copy(update={"trainer": trainer})
    with pytest.raises(ConfigError, match=r"none of \d+ splits is legal.*tokens_per_row = 32"):
        _plan(changed, simple_profile())
