"""The algorithm section as YAML has it: short forms, keys beside them, and what they are written as."""

import subprocess
import sys
from pathlib import Path

import pytest

from forgeasync.algorithms import K3, DrGrpo, GroupPassAtK, Grpo, ReinforcePlusPlus
from forgeasync.config import dump_config, load_config
from forgeasync.schema import ConfigError
from tests.support.config_samples import MINIMAL, only


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL)
    return file


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
    config = load_config(config_file, overrides)
    assert config.algorithm.advantage == advantage and config.algorithm.pass_at_k is None
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config
    assert load_config(tmp_path / "dumped.yaml", ["algorithm.advantage=grpo"]).algorithm.advantage == Grpo()


def test_a_kind_without_other_keys_is_written_as_its_name(config_file: Path) -> None:
    overrides = ["algorithm.kl={estimator: k3, coefficient: 0.1}"]
    algorithm = load_config(config_file, overrides).algorithm
    assert algorithm.kl is not None and algorithm.kl.estimator == K3()
    dumped = algorithm.model_dump(mode="json")
    assert dumped["advantage"] == "grpo" and dumped["kl"]["estimator"] == "k3"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["advantage=gropo"], ["algorithm.advantage = 'gropo'", "expected one of 'grpo', 'dr_grpo'"]),
        (["advantage=group_pass_at_k"], ["algorithm.pass_at_k: required key is missing"]),
        (["advantage=group_pass_at_k", "pass_at_k=0"], ["algorithm.pass_at_k = 0", "greater than 0"]),
        (["advantage={kind: grpoo}"], ["algorithm.advantage.kind = 'grpoo'", "expected one of"]),
        (["advantage={kind: grpo, k: 3}"], ["algorithm.advantage.k = 3", "unknown key"]),
        (["advantage=3"], ["algorithm.advantage = 3", "a section with the keys kind (one of 'grpo'"]),
    ],
)
def test_a_bad_advantage_is_explained(config_file: Path, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config_file, [f"algorithm.{override}" for override in overrides])
    message = only(list(caught.value.problems))
    for word in words:
        assert word in message


def test_reading_a_config_loads_neither_torch_nor_numpy() -> None:
    """Processes that verify answers read parts of it: a run starts many of them."""
    modules = ("forgeasync.config.rules", "forgeasync.scoring.worker")
    code = f"import {', '.join(modules)}, sys; print({{'torch', 'numpy'}} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
