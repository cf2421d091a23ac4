"""The algorithm section: recipes, short forms, what is wrong with a part, and the code in the docs."""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from forgeasync.algorithms import K3, DrGrpo, GroupPassAtK, Grpo, ReinforcePlusPlus
from forgeasync.config import check_without_model, dump_config, load_config
from forgeasync.models import read_model_facts
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import PolicyTrainer, TrainingSequence, pack_row
from tests.support.config_samples import CONFIGS
from tests.support.processes import run_ranks
from tests.support.tokens import make_tokens
from tests.support.trainers import make_sequences, make_setup

TINY = CONFIGS / "tiny_moe_cpu.yaml"
RECIPES = sorted((CONFIGS / "algorithms").glob("*.yaml"))


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
    ("overrides", "advantage"),
    [
        ([], Grpo()),
        (["algorithm.advantage=dr_grpo"], DrGrpo()),
        (["algorithm.advantage={kind: dr_grpo}"], DrGrpo()),
        (["algorithm.advantage=reinforce_pp"], ReinforcePlusPlus()),
        (["algorithm.advantage={kind: group_pass_at_k, pass_at_k: 3}"], GroupPassAtK(pass_at_k=3)),
    ],
)
def test_an_advantage_is_read_by_its_name_or_as_a_section(
    config_file: Path, tmp_path: Path, overrides: list[str], advantage: object
) -> None:
    config = load_config(config_file, [*overrides, "algorithm.kl={estimator: k3, coefficient: 0.1}"])
    assert config.algorithm.advantage == advantage
    assert config.algorithm.kl is not None and config.algorithm.kl.estimator == K3()
    dumped = config.algorithm.model_dump(mode="json")
    assert dumped["kl"]["estimator"] == "k3", "a kind without other keys is written as its name"
    assert (dumped["advantage"] == "grpo") is (advantage == Grpo())
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config
    assert load_config(tmp_path / "dumped.yaml", ["algorithm.advantage=grpo"]).algorithm.advantage == Grpo()


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
