"""The loss in a run's config: recipes, what is refused and in which words, files merged over files."""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from forgeasync.algorithms import RowTokens
from forgeasync.config import RunConfig, check_without_model, dump_config, load_config
from forgeasync.models import read_model_facts
from forgeasync.schema import ConfigError
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import TrainingSequence, pack_row
from tests.support.config_samples import CONFIGS, MINIMAL, only
from tests.support.processes import run_ranks
from tests.support.trainers import make_sequences

TINY = CONFIGS / "tiny_moe_cpu.yaml"
RECIPES = sorted((CONFIGS / "algorithms").glob("*.yaml"))


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL)
    return file


def algorithm(config_file: Path, **parts: str) -> RunConfig:
    return load_config(config_file, [f"algorithm.{name}={text}" for name, text in parts.items()])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_recipes_go_with_a_run(recipe: Path, tmp_path: Path) -> None:
    config = load_config([TINY, recipe], [])
    assert check_without_model(config) == []
    assert config.algorithm.group_size == load_config(TINY).algorithm.group_size
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config


def _steps(folder: Path, sequences: list[TrainingSequence]) -> list[tuple[str, dict[str, float], bool]]:
    # TorchTitan takes seconds to import: only the process that trains pays for it.
    from forgeasync.trainer import PolicyTrainer, TrainerSetup

    outcomes = []
    for recipe in RECIPES:
        config = load_config([TINY, recipe], ["trainer.parallel={num_procs: 1, expert: 1}"])
        setup = TrainerSetup(
            section=config.trainer,
            facts=read_model_facts(str(folder)),
            temperature=1.0,
            loss=config.algorithm,
            seed=0,
            checkpoint=folder,
        )
        trainer = PolicyTrainer(setup)
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


REINFORCE = "{kind: reinforce}"
GSPO_MEAN = "{kind: sequence_mean_of_token_mean}"


@pytest.mark.parametrize("objective", ["ppo_clip", "cispo, clip_high: 3", "decoupled_ppo", "topr", "gspo"])
@pytest.mark.parametrize("correction", ["truncated_is", "masked_is, low: 0.5, high: 2", "icepop"])
def test_the_ratio_counts_once(config_file: Path, objective: str, correction: str) -> None:
    config = algorithm(
        config_file,
        objective=f"{{kind: {objective}}}",
        corrections=f"[{{kind: {correction}}}]",
        aggregation=GSPO_MEAN,
    )
    kind, name = correction.partition(",")[0], objective.partition(",")[0]
    message = only(check_without_model(config))
    assert message.startswith(f"algorithm.corrections.0 = '{kind}': would count the importance ratio twice")
    assert f"with objective '{name}'" in message and f"Use objective 'reinforce' with '{kind}'" in message


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"objective": "{kind: kimi15, tau: 0.1}", "corrections": "[{kind: icepop}]"},
            ["corrections.0 = 'icepop'", "'kimi15' is defined on whole sequences", "level 'sequence'"],
        ),
        (
            {"objective": REINFORCE, "corrections": "[{kind: icepop}, {kind: truncated_is}]"},
            ["corrections.1 = 'truncated_is'", "'icepop' is the same ratio"],
        ),
        (
            {"corrections": "[{kind: age_weight, half_life: 2}, {kind: age_weight, half_life: 3}]"},
            ["corrections.1 = 'age_weight'", "is listed twice"],
        ),
        (
            {"objective": REINFORCE, "corrections": "[{kind: masked_is, low: 2, high: 1}]"},
            ["corrections.0.low = 2.0", "must be below high = 1.0"],
        ),
        (
            {"objective": "{kind: gspo}"},
            ["aggregation.kind = 'token_mean'", "must be 'sequence_mean_of_token_mean'"],
        ),
        (
            {"aggregation": "{kind: constant_length, length: 31}"},
            ["aggregation.length = 31", "at least sampling.max_response_tokens = 32"],
        ),
        ({"kl": "{estimator: k1, coefficient: 0.1}"}, ["kl.estimator = 'k1'", "gradient of mean zero"]),
        (
            {"kl": "{estimator: unbiased_k3, coefficient: 0.1, where: reward}"},
            ["kl.estimator = 'unbiased_k3'", "Use 'k1', 'k2' or 'k3'"],
        ),
        (
            {"objective": "{kind: topr}", "kl": "{estimator: k1, coefficient: 0.1, where: reward}"},
            ["kl.where = 'reward'", "one per sequence", "where: loss"],
        ),
        ({"objective": "{kind: supervised}"}, ["objective.kind = 'supervised'", "wrong answers"]),
        (
            {"objective": "{kind: python, factory: nowhere.at_all.loss}"},
            ["objective.factory = 'nowhere.at_all.loss'", "cannot be imported", "No module named 'nowhere'"],
        ),
        (
            {"objective": "{kind: python, factory: math.cosine}"},
            ["factory = 'math.cosine'", "has no 'cosine'"],
        ),
        (
            {"objective": "{kind: python, factory: math.pi}"},
            ["factory = 'math.pi'", "is a float; must be a class or a function"],
        ),
        ({"objective": "{kind: python, factory: loss}"}, ["factory = 'loss'", "package.module.name"]),
        (
            {
                "objective": "{kind: python, factory: forgeasync.algorithms.objectives.Kimi15, "
                "options: {tow: 1}}"
            },
            ["objective.factory = 'forgeasync.algorithms.objectives.Kimi15'", "tau", "tow"],
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    config_file: Path, parts: dict[str, str], words: list[str]
) -> None:
    message = only(check_without_model(algorithm(config_file, **parts)))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "parts",
    [
        {
            "corrections": "[{kind: off_policy_sequence_mask, threshold: 0.1}, "
            "{kind: age_weight, half_life: 2}]"
        },
        {"objective": REINFORCE, "corrections": "[{kind: truncated_is, level: sequence}]"},
        {
            "objective": "{kind: kimi15, tau: 0.1}",
            "corrections": "[{kind: masked_is, low: 0, high: 2, level: geometric}]",
        },
        {"aggregation": "{kind: constant_length, length: 32}"},
        {"kl": "{estimator: unbiased_k3, coefficient: 0.1}"},
        {"objective": REINFORCE, "kl": "{estimator: k1, coefficient: 0.1, where: reward}"},
    ],
)
def test_what_goes_together_is_not(config_file: Path, parts: dict[str, str]) -> None:
    config = algorithm(config_file, **parts)
    assert check_without_model(config) == []


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
        ("kl=0.1", ["kl = 0.1", "expected a section with the keys estimator, coefficient, where"]),
    ],
)
def test_a_bad_part_is_explained(config_file: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config_file, [f"algorithm.{override}"])
    message = only(list(caught.value.problems))
    for word in words:
        assert word in message


def test_later_files_go_over_earlier_ones(config_file: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("name: first\nseed: 3\nalgorithm: {objective: {kind: ppo_clip, clip_low: 0.1}}\n")
    second.write_text("name: second\nalgorithm: {objective: {kind: ppo_clip, clip_high: 0.4}}\n")
    config = load_config([config_file, first, second], ["max_steps=7"])
    assert (config.name, config.seed, config.max_steps) == ("second", 3, 7)
    objective = {"kind": "ppo_clip", "clip_low": 0.1, "clip_high": 0.4, "dual_clip": None}
    assert config.algorithm.objective.model_dump() == objective
    assert config.algorithm.group_size == 4


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.objective={kind: gspo, clip_high: 0.5}"],
        ["algorithm.objective.kind=gspo", "algorithm.objective.clip_high=0.5"],
        ["algorithm.objective.clip_high=0.5", "algorithm.objective.kind=gspo"],
    ],
)
def test_another_kind_replaces_the_whole_section(
    config_file: Path, tmp_path: Path, overrides: list[str]
) -> None:
    """ppo_clip's clip_low means something else to gspo."""
    other = tmp_path / "other.yaml"
    other.write_text("algorithm: {objective: {kind: ppo_clip, clip_low: 0.1, dual_clip: 3}}\n")
    config = load_config([config_file, other], overrides)
    expected = {"kind": "gspo", "clip_low": 3e-4, "clip_high": 0.5}
    assert config.algorithm.objective.model_dump() == expected


def test_every_unreadable_file_is_named(config_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([tmp_path / "a.yaml", config_file, tmp_path / "b.yaml"])
    values = [problem.value for problem in caught.value.problems]
    assert values == [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]


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
    tokens = RowTokens(
        logprobs_T=logprobs_T,
        behavior_logprobs_T=torch.tensor([-1.5, -2.0, torch.nan]),
        advantages_T=torch.tensor([2.0, -1.0, 1.0]),
        mask_T=torch.tensor([True, True, False]),
        sequence_ids_T=torch.tensor([0, 1, 1]),
        ages_T=torch.zeros(3, dtype=torch.int32),
        sample_weights_T=torch.ones(3),
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
