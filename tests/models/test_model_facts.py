"""Reading a model's shape, and comparing a checkpoint with it, from files and without a network."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError
from safetensors.numpy import load_file, save_file

from forgeasync.models import (
    MAX_PROBLEMS,
    check_checkpoint_shapes,
    expected_shapes,
    model_config_file,
    model_folder,
    read_model_facts,
)
from forgeasync.models import facts as model_facts_module
from forgeasync.schema import ConfigError
from tests.support.config_samples import CONFIGS, FACTS, HF_CONFIG, only


def model_dir(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    values = {key: value for key, value in (HF_CONFIG | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": "absent", "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
        {"num_experts": "absent", "num_local_experts": 8},
        {"rope_theta": 7.0, "rope_scaling": {"rope_theta": 10000.0, "type": "default"}},
    ],
    ids=["transformers4", "transformers5-rope", "transformers5-experts", "settings-of-scaling-first"],
)
def test_model_facts_of_a_folder(tmp_path: Path, changes: dict[str, object]) -> None:
    assert read_model_facts(str(model_dir(tmp_path / "model", **changes))) == FACTS


def test_missing_models_are_explained(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    cases: list[tuple[str, Callable[[str], object], str]] = [
        ("models/does/not/exist", read_model_facts, "no such folder"),
        ("models/does/not/exist", model_folder, "no such folder"),
        (str(tmp_path / "empty"), read_model_facts, "has no config.json"),
        (str(tmp_path / "broken"), read_model_facts, "not a readable JSON file"),
    ]
    for path, function, words in cases:
        with pytest.raises(ConfigError) as caught:
            function(path)
        assert f"model.path = {path!r}" in str(caught.value)
        assert words in str(caught.value)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hub is out of reach and nothing is cached; collects what was asked of the hub."""
    asked: list[str] = []

    def unreachable(hub_id: str) -> None:
        asked.append(hub_id)
        raise ConnectionError("no network")

    monkeypatch.setattr(model_facts_module, "_probe_hub", unreachable)
    monkeypatch.setattr(model_facts_module, "try_to_load_from_cache", Mock(return_value=None))
    return asked


def test_published_model_without_network_has_its_shipped_shape(no_network: list[str]) -> None:
    file = model_config_file("Qwen/Qwen3-30B-A3B")
    assert file == CONFIGS / "models" / "Qwen--Qwen3-30B-A3B" / "config.json"
    assert read_model_facts("Qwen/Qwen3-30B-A3B").num_experts == 128
    assert no_network == ["Qwen/Qwen3-30B-A3B"] * 2


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ConnectionError, "ConnectionError.*hf download forgeasync-tests/no-such-model"),
        (OfflineModeIsEnabled, "HF_HUB_OFFLINE=1 is set"),
        (GatedRepoError, "accept the model's license"),
        (RepositoryNotFoundError, "check the name, or log in"),
    ],
)
@pytest.mark.usefixtures("no_network")
def test_why_the_hub_gives_no_model_is_explained(
    kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = kind.__new__(kind)
    monkeypatch.setattr(model_facts_module, "_probe_hub", Mock(side_effect=refusal))
    for function in (model_config_file, model_folder):
        with pytest.raises(ConfigError, match=f"model.path = 'forgeasync-tests/no-such-model': .*{words}"):
            function("forgeasync-tests/no-such-model")


def write_checkpoint(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    save_file(
        {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_matching_checkpoint_is_accepted(tmp_path: Path, tied: bool) -> None:
    facts = dataclasses.replace(FACTS, tie_word_embeddings=tied)
    shapes = expected_shapes(facts)
    assert ("lm_head.weight" in shapes) != tied
    assert check_checkpoint_shapes(write_checkpoint(tmp_path, shapes), facts) == []


def test_a_tied_output_layer_with_other_values_is_refused(tmp_path: Path) -> None:
    """transformers would not tie it, and vLLM would not read it."""
    facts = dataclasses.replace(FACTS, tie_word_embeddings=True)
    folder = write_checkpoint(tmp_path, expected_shapes(FACTS))
    assert check_checkpoint_shapes(folder, facts) == []
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][1, 2] = 1.0
    save_file(tensors, folder / "model.safetensors")
    found = only(check_checkpoint_shapes(folder, facts))
    assert re.search(r"tie_word_embeddings = True; must be false: lm_head.weight differs from model", found)


def test_checkpoint_that_disagrees_is_explained(tmp_path: Path) -> None:
    shapes = expected_shapes(FACTS)
    del shapes["model.norm.weight"]
    shapes["model.layers.1.mlp.experts.3.up_proj.weight"] = (95, 64)
    shapes["model.layers.2.input_layernorm.weight"] = (64,)
    folder = write_checkpoint(tmp_path, shapes)
    problems = check_checkpoint_shapes(folder, FACTS)
    assert {problem.field for problem in problems} == {"model.path"}
    messages = "\n".join(map(str, problems))
    assert len(problems) == 3
    assert str(folder) in messages
    assert "lacks tensor model.norm.weight of shape (64,)" in messages
    assert (
        "layers.1.mlp.experts.3.up_proj.weight has shape (95, 64), its config.json says (96, 64)" in messages
    )
    assert "model.layers.2.input_layernorm.weight of shape (64,) has no place" in messages


def test_checkpoint_of_another_size_is_summed_up(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, expected_shapes(FACTS))
    problems = check_checkpoint_shapes(folder, dataclasses.replace(FACTS, hidden_size=32))
    assert len(problems) == MAX_PROBLEMS + 1
    assert "more tensors that disagree" in str(problems[-1])


def test_broken_checkpoints_are_explained(tmp_path: Path) -> None:
    assert "no model.safetensors" in only(check_checkpoint_shapes(tmp_path, FACTS))
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    assert "not a readable safetensors file" in only(check_checkpoint_shapes(tmp_path, FACTS))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert "lacks gone.safetensors" in only(check_checkpoint_shapes(tmp_path, FACTS))
    index.write_text("[]")
    assert "not a JSON file with a weight_map" in only(check_checkpoint_shapes(tmp_path, FACTS))
