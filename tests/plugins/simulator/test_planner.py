"""Splits of GPUs: the best of all that are legal is found, and stated hardware is arithmetic."""

import operator
from pathlib import Path

import pytest

from apps.profile import main
from forgeasync.config import RunConfig, load_config
from forgeasync.models import read_model_facts
from forgeasync.planning import GPU_GIB
from forgeasync.plugins.simulator import (
    DecodeTable,
    Profile,
    SplitPlan,
    TrainTable,
    choose,
    of_config,
    plan_splits,
    stated_profile,
    write_profile,
)
from forgeasync.schema import ConfigError
from tests.support.config_samples import CONFIGS, FACTS, minimal_config
from tests.support.profiles import simple_profile

GPU_BYTES = round(GPU_GIB * 2**30)


OVERRIDES = (
    *("max_off_policy_steps=4", "generator.max_num_seqs=4"),
    *("algorithm.groups_per_step=4", "max_steps=100"),
)


@pytest.fixture
def config() -> RunConfig:
    return minimal_config(*OVERRIDES)


def _plan(config: RunConfig, profile: Profile, *, num_gpus: int = 4) -> SplitPlan:
    return plan_splits(
        config, FACTS, lambda split: profile, num_gpus=num_gpus, num_steps=9, gpu_bytes=GPU_BYTES
    )


def test_slow_generators_get_the_procs_and_a_slow_trainer_does(config: RunConfig) -> None:
    slow_generators = _plan(config, simple_profile(lengths=(10.0, 30.0), token_s=1e-6))
    assert (slow_generators.chosen.num_trainer, slow_generators.chosen.num_generating) == (1, 3)
    slow_trainer = _plan(config, simple_profile(lengths=(10.0, 30.0), decode_s=1e-4, token_s=1e-2))
    assert slow_trainer.chosen.num_trainer >= 2
    assert {one.num_gpus for one in slow_trainer.splits} <= set(range(2, 5))


def test_no_split_of_the_front_is_beaten_and_the_chosen_one_is_fast_enough(config: RunConfig) -> None:
    plan = _plan(config, simple_profile(lengths=(10.0, 30.0), token_s=5e-4))
    fastest = max(one.tokens_per_s for one in plan.splits)
    assert plan.chosen.tokens_per_s >= 0.97 * fastest
    for one in plan.front:
        for other in plan.splits:
            mine, others = ((-it.tokens_per_s, it.prediction.mean_age, it.num_gpus) for it in (one, other))
            is_beaten = all(map(operator.le, others, mine)) and any(map(operator.lt, others, mine))
            assert not is_beaten
    assert len(plan.front) < len(plan.splits)


def test_of_splits_that_are_as_fast_the_one_with_the_youngest_data_is_taken(config: RunConfig) -> None:
    """The trainer bounds: every bound from 1 on is as fast, and 1 has the youngest data."""
    plan = _plan(config, simple_profile(lengths=(10.0, 30.0), decode_s=1e-4, token_s=1e-2), num_gpus=2)
    assert plan.chosen.config.max_off_policy_steps < 4
    as_fast = [one for one in plan.splits if one.tokens_per_s >= 0.97 * plan.splits[0].tokens_per_s]
    assert len(as_fast) > 1
    assert plan.chosen.prediction.mean_age <= min(one.prediction.mean_age for one in as_fast) + 0.05
    assert choose(as_fast) is plan.chosen


@pytest.mark.parametrize(
    ("overrides", "source", "problem"),
    [
        (["trainer.parallel.tensor=8"], "chain_sum", r"--gpus = 4: must be more: none of 0 splits is legal"),
        (["trainer.tokens_per_row=32"], "chain_sum", r"none of \d+ splits is legal.*tokens_per_row = 32"),
        ([], "other", r"lengths = \['other'\].*chain_sum"),
    ],
)
def test_what_cannot_be_planned_is_refused(overrides: list[str], source: str, problem: str) -> None:
    (lengths,) = simple_profile().lengths.values()
    profile = simple_profile().model_copy(update={"lengths": {source: lengths}})
    with pytest.raises(ConfigError, match=problem):
        _plan(minimal_config(*OVERRIDES, *overrides), profile)


@pytest.mark.parametrize(
    ("name", "overrides", "problem"),
    [
        ("game_cpu", [], "environment: must be left out: a profile has no"),
        (
            "tiny_moe_cpu",
            ["weights.interruption=drain"],
            "weights.interruption = 'drain': must be 'in_flight'",
        ),
    ],
)
def test_runs_that_are_not_simulated_are_refused(name: str, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        of_config(load_config(CONFIGS / f"{name}.yaml", overrides), FACTS, simple_profile())


BIG = CONFIGS / "qwen3_30b_a3b.yaml"


def test_a_stated_profile_agrees_with_arithmetic_by_hand() -> None:
    """The config's comments compute the same by hand: 30 ms a decode step of 96 sequences of 8k tokens, and
    41 s for a batch of 256 x 12.3k tokens on 16 GPUs."""
    config = load_config(BIG)
    facts = read_model_facts(config.model.path)
    profile = stated_profile(config, facts, mean_response_tokens=12_000)
    assert profile.sources and not profile.measured_at
    assert any("data sheet" in source for source in profile.sources)
    decode_s = DecodeTable(profile.decode).step_s(96, 8_192)
    assert decode_s == pytest.approx(0.030 + 0.003, rel=0.05)
    per_rank = 256 * 12_300 / 16
    # FLOPs of attention over those of 3.35 billion parameters: 48 layers, 32 heads of 128, half a sequence.
    attention = 4 * 48 * 32 * 128 * 12_300 / 2 / (2 * 3.35e9)
    train_s = TrainTable(profile.train).step_s(6, per_rank * (1 + attention))
    assert train_s == pytest.approx(41.0, rel=0.12)
    (lengths,) = profile.lengths.values()
    assert lengths.response.mean == pytest.approx(12_000, rel=0.01)
    with pytest.raises(ValueError, match="mean_response_tokens = 40000 must be from 1 to 30720"):
        stated_profile(config, facts, mean_response_tokens=40_000)


def test_the_app_prints_plans_and_refuses_mistakes(
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
