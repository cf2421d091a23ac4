"""Writes the tiny model: its family's config.json with other sizes, random weights, a tokenizer."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from forgeasync.config import ModelFacts
from forgeasync.models import (
    FAMILIES,
    Shape,
    character_tokenizer,
    expected_shapes,
    parse_model_facts,
    save_tokenizer,
)

_OF_OTHER_SIZES = frozenset({"layer_types", "torch_dtype", "quantization_config"})
"""Keys of a config.json that have one entry for each layer, or speak of the weights' files."""


def write_model(
    folder: Path,
    raw: Mapping[str, object],
    facts: ModelFacts,
    *,
    chat_template: bool,
    template_arguments: Iterable[str],
    seed: int,
) -> None:
    """Write a Hugging Face folder with a model of shape ``facts``; ``raw`` is the real model's config.json.

    What ``raw`` says besides sizes stays. Weights are float32: normal with a variance of one over the inputs,
    norms 1, biases of routers normal with a deviation of 0.1.
    """
    folder.mkdir(parents=True)
    tokenizer = character_tokenizer(chat_template=chat_template, template_arguments=template_arguments)
    assert len(tokenizer) == facts.vocab_size
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    kept = {key: value for key, value in raw.items() if key not in _OF_OTHER_SIZES}
    sizes = FAMILIES[facts.model_type].sizes(facts)
    small = kept | dict(sizes) | ends | {"bos_token_id": None, "dtype": "float32"}
    assert parse_model_facts(small, str(folder)) == facts
    (folder / "config.json").write_text(json.dumps(small, indent=2), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2), encoding="utf-8")
    save_tokenizer(tokenizer, folder)
    rng = np.random.default_rng(seed)
    tensors = {name: _random(name, shape, rng) for name, shape in expected_shapes(facts).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _random(name: str, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    if name.endswith("bias"):
        return rng.normal(0.0, 0.1, shape).astype(np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return rng.normal(0.0, shape[-1] ** -0.5, shape).astype(np.float32)
