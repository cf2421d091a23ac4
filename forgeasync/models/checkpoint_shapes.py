"""Whether the weights in a Hugging Face folder are the ones its config.json describes.

Reads file headers only, so that a 60 GB checkpoint is checked before anything is loaded.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from forgeasync.config import ModelFacts
from forgeasync.models.family import Shape
from forgeasync.models.registry import FAMILIES
from forgeasync.schema import Problem

MAX_PROBLEMS = 8
"""A wrong config.json is wrong for thousands of tensors; the first few say enough."""


def check_checkpoint_shapes(folder: Path, facts: ModelFacts) -> list[Problem]:
    """Missing, unexpected and wrongly shaped tensors: ``MAX_PROBLEMS`` of them and a count of the rest."""
    found: dict[str, Shape] = {}
    problems: list[Problem] = []
    for file in _weight_files(folder, problems):
        try:
            with safe_open(file, framework="np") as tensors:
                # get_slice reads the header, not the tensor.
                found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
        except (OSError, SafetensorError) as error:
            problems.append(_problem(folder, f"{file.name} is not a readable safetensors file: {error}"))
    if problems:
        return problems
    return _compare(folder, found, facts)


def expected_shapes(facts: ModelFacts) -> dict[str, Shape]:
    """Hugging Face names and shapes of all weights of a model."""
    layer_shapes = FAMILIES[facts.model_type].layer_shapes
    vocabulary = (facts.vocab_size, facts.hidden_size)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": vocabulary}
    for index in range(facts.num_layers):
        of_layer = layer_shapes(facts, index)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in of_layer.items()}
    shapes["model.norm.weight"] = (facts.hidden_size,)
    if not facts.tie_word_embeddings:
        shapes["lm_head.weight"] = vocabulary
    return shapes


def _problem(folder: Path, remedy: str) -> Problem:
    return Problem(field="model.path", value=str(folder), remedy=remedy)


def _weight_files(folder: Path, problems: list[Problem]) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if (folder / "model.safetensors").is_file():
            yield folder / "model.safetensors"
        else:
            problems.append(_problem(folder, "has no model.safetensors and no model.safetensors.index.json"))
        return
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        problems.append(_problem(folder, f"{index.name} is not a JSON file with a weight_map"))
        return
    for name in names:
        if (folder / name).is_file():
            yield folder / name
        else:
            problems.append(_problem(folder, f"lacks {name}, which {index.name} lists; download it again"))


def _compare(folder: Path, found: dict[str, Shape], facts: ModelFacts) -> list[Problem]:
    expected = expected_shapes(facts)
    remedies: list[str] = []
    for name, shape in expected.items():
        if name not in found:
            remedies.append(f"lacks tensor {name} of shape {shape}, which its config.json asks for")
        elif found[name] != shape:
            remedies.append(f"tensor {name} has shape {found[name]}, its config.json says {shape}")
    # Some exporters write the tied output layer a second time; it is the embedding and not read.
    ignored = {"lm_head.weight"} if facts.tie_word_embeddings else set()
    for name in sorted(found.keys() - expected.keys() - ignored):
        remedies.append(f"tensor {name} of shape {found[name]} has no place in its config.json")
    problems = [_problem(folder, remedy) for remedy in remedies[:MAX_PROBLEMS]]
    if len(remedies) > MAX_PROBLEMS:
        problems.append(_problem(folder, f"and {len(remedies) - MAX_PROBLEMS} more tensors that disagree"))
    return problems
