"""The algorithm section: recipes, short forms, what is wrong with a part, and the code in the docs."""

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from forgeasync.algorithms import K3, DrGrpo, GroupPassAtK, Grpo, ReinforcePlusPlus
from forgeasync.config import check_without_model, dump_config, load_config
from forgeasync.models import read_model_facts
from forgeasync.schema import ConfigError
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import PolicyTrainer, TrainingSequence, pack_row
from tests.support.config_samples import CONFIGS, only
from tests.support.processes import run_ranks
from tests.support.tokens import make_tokens
from tests.support.trainers import make_sequences, make_setup

TINY = CONFIGS / "tiny_moe_cpu.yaml"
RECIPES = sorted((CONFIGS / "algorithms").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_recipes_go_with_a_run(recipe: Path, tmp_path: Path) -> None:
    config = load_config([TINY, recipe], [])
    assert check_without_model(config) == []
    assert config.algorithm.group_size == load_config(TINY).algorithm.group_size
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config


def _steps(folder: Path, sequences: list[TrainingSequence]) -> list[tuple[str, dict[str, float], bool]]:
    outcomes = []
    for recipe in RECIPES:
        config = load_config([TINY, recipe], ["trainer.parallel={num_procs: 1, expert: 1}"])
        trainer = PolicyTrainer(make_setup(folder, config.trainer, loss=config.algorithm))
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        metrics = trainer.train_step([pack_row(sequences)]).metrics
        has_moved = any(
            bool((old != new).any()) for old, new in zip(before, trainer.model.parameters(), strict=True)
        )
        outcomes.append((recipe.stem, metrics, has_moved))
    return outcomes


def test_every_recipe_makes_a_step(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    sequences = make_sequences(4, read_model_facts(str(folder)))
    sequences = [
        dataclasses.replace(s, behavior_logprobs_T=np.full(len(s.response_ids_T), -3.0, np.float32))
        for s in sequences
    ]
    outcomes = run_ranks(1, _steps, folder, sequences)[0]
    assert [name for name, _, _ in outcomes] == [recipe.stem for recipe in RECIPES]
    for name, metrics, has_moved in outcomes:
        assert has_moved and np.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0, name
        assert ("kl/k3" in metrics) == (name == "grpo")
        assert ("correction/weight_max" in metrics) == (name == "icepop")


def test_dr_grpo_divides_by_the_runs_own_budget() -> None:
    recipe = CONFIGS / "algorithms" / "dr_grpo.yaml"
    config = load_config([TINY, recipe], ["sampling.max_response_tokens=100"])
    assert config.algorithm.aggregation.model_dump() == {"kind": "constant_length", "length": 100}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("objective={kind: ppo}", ["objective.kind = 'ppo'", "expected one of 'ppo_clip', 'cispo'"]),
        ("objective={clip_low: 0.1}", ["objective.kind: required key is missing: one of 'ppo_clip'"]),
        ("objective=gspo", ["objective = 'gspo'", "the keys kind (one of 'ppo_clip', 'cispo'"]),
        ("objective={kind: kimi15}", ["objective.tau: required key is missing"]),
        ("objective={kind: gspo, clip: 1}", ["objective.clip = 1", "did you mean algorithm.objective.clip_"]),
        ("corrections=[{kind: tis}]", ["corrections.0.kind = 'tis'", "expected one of 'truncated_is'"]),
        ("corrections=[{kind: icepop, hi: 2}]", ["corrections.0.hi = 2", "algorithm.corrections.0.high?"]),
        ("corrections=[{kind: truncated_is, cap: 0}]", ["corrections.0.cap = 0", "at least 1e-30"]),
        ("corrections=[{kind: age_weight}]", ["corrections.0.half_life: required", "(In policy versions.)"]),
        ("corrections={kind: icepop}", ["corrections = {'kind': 'icepop'}", "expected a list"]),
        ("kl={estimator: k4, coefficient: 1}", ["kl.estimator = 'k4'", "'k1', 'k2', 'k3', 'unbiased_k3'"]),
        ("kl={estimator: k3, coefficient: 0}", ["kl.coefficient = 0", "must be at least 1e-30"]),
        ("advantage=gropo", ["advantage = 'gropo'", "expected one of 'grpo', 'dr_grpo'"]),
        ("advantage=group_pass_at_k", ["algorithm.pass_at_k: required key is missing"]),
        ("advantage={kind: group_pass_at_k, pass_at_k: 0}", ["advantage.pass_at_k = 0", "greater than 0"]),
        ("advantage={kind: grpoo}", ["advantage.kind = 'grpoo'", "expected one of"]),
        ("advantage={kind: grpo, k: 3}", ["advantage.k = 3", "unknown key"]),
        ("advantage=3", ["advantage = 3", "a section with the keys kind (one of 'grpo'"]),
        ("kl=0.1", ["kl = 0.1", "expected a section with the keys estimator, coefficient, where"]),
    ],
)
def test_a_bad_part_is_explained(config_file: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config_file, [f"algorithm.{override}"])
    message = only(list(caught.value.problems))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("overrides", "advantage"),
    [
        ([], Grpo()),
        (["algorithm.advantage=dr_grpo"], DrGrpo()),
        (["algorithm.advantage={kind: dr_grpo}"], DrGrpo()),
        (["algorithm.advantage=reinforce_pp", "algorithm.pass_at_k=null"], ReinforcePlusPlus()),
        (["algorithm.advantage=group_pass_at_k", "algorithm.pass_at_k=3"], GroupPassAtK(pass_at_k=3)),
        (["algorithm.advantage={kind: group_pass_at_k, pass_at_k: 3}"], GroupPassAtK(pass_at_k=3)),
    ],
)
def test_an_advantage_is_read_by_its_name_or_as_a_section(
    config_file: Path, tmp_path: Path, overrides: list[str], advantage: object
) -> None:
    config = load_config(config_file, [*overrides, "algorithm.kl={estimator: k3, coefficient: 0.1}"])
    assert config.algorithm.advantage == advantage and config.algorithm.pass_at_k is None
    assert config.algorithm.kl is not None and config.algorithm.kl.estimator == K3()
    dumped = config.algorithm.model_dump(mode="json")
    assert dumped["kl"]["estimator"] == "k3", "a kind without other keys is written as its name"
    assert (dumped["advantage"] == "grpo") is (advantage == Grpo())
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config
    assert load_config(tmp_path / "dumped.yaml", ["algorithm.advantage=grpo"]).algorithm.advantage == Grpo()


def test_reading_a_config_loads_neither_torch_nor_numpy() -> None:
    """Processes that verify answers read parts of it: a run starts many of them."""
    modules = ("forgeasync.config.rules", "forgeasync.scoring.worker")
    code = f"import {', '.join(modules)}, sys; print({{'torch', 'numpy'}} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


def _blocks(language: str) -> list[str]:
    """The code blocks of docs/algorithms.md in a language."""
    text = (CONFIGS.parent / "docs" / "algorithms.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_the_loss_in_the_docs(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = _blocks("python")
    (tmp_path / "my_losses.py").write_text(code)
    (tmp_path / "own.yaml").write_text(_blocks("yaml")[-1])
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config([config_file, tmp_path / "own.yaml"])
    assert check_without_model(config) == []
    logprobs_T = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    tokens = make_tokens(
        logprobs_T,
        behavior_logprobs_T=torch.tensor([-1.5, -2.0, torch.nan]),
        advantages_T=torch.tensor([2.0, -1.0, 1.0]),
        mask_T=torch.tensor([True, True, False]),
        sequence_ids_T=torch.tensor([0, 1, 1]),
    )
    result = config.algorithm(tokens, total=2.0)
    # Where the ratio is 1 the gate is 2 / temperature and its slope 1, as PPO's.
    gate = 2.0 / (1.0 + math.exp(-2.0 * (math.exp(0.5) - 1.0)))
    assert result.loss.item() == pytest.approx((-2.0 * gate + 1.0) / 2)
    assert result.sums["objective/gate"].item() == pytest.approx(gate + 1.0)
    result.loss.backward()
    assert logprobs_T.grad is not None
    assert logprobs_T.grad[1:].tolist() == pytest.approx([0.5, 0.0])


def test_the_section_in_the_docs(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "docs.yaml").write_text(_blocks("yaml")[0])
    config = load_config([config_file, tmp_path / "docs.yaml"])
    assert check_without_model(config) == []
    assert [correction.kind for correction in config.algorithm.corrections] == ["truncated_is", "age_weight"]
