"""Models, prompts and a witness that many tests of engines share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from forgeasync.config import ModelFacts
from forgeasync.generator import SequenceReader
from forgeasync.models import read_model_facts
from forgeasync.testing import write_tiny_model


class Seen(SimpleNamespace):
    """What scenarios in a process of their own have shown."""


Models = Mapping[int, torch.nn.Module]
"""By version."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models of one shape, each with random weights of its own: by version, what an engine is updated to."""
    root = tmp_path_factory.mktemp("models")
    return [
        write_tiny_model(root / str(seed), seed=seed, scale=12.0, num_experts=8, top_k=3) for seed in range(3)
    ]


@pytest.fixture(scope="session")
def tokenizer(folders: list[Path]) -> PreTrainedTokenizerBase:
    """One token per character."""
    return AutoTokenizer.from_pretrained(folders[0])


@pytest.fixture(scope="session")
def reader(tokenizer: PreTrainedTokenizerBase) -> SequenceReader:
    return SequenceReader(tokenizer=tokenizer, vocab_size=len(tokenizer), num_experts=300, num_dense_layers=0)


@pytest.fixture(scope="session")
def facts(folders: list[Path]) -> ModelFacts:
    """What all the models have in common."""
    return read_model_facts(str(folders[0]))


@pytest.fixture(scope="session")
def models(folders: list[Path]) -> Models:
    """transformers' models of the folders."""
    return {
        version: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for version, folder in enumerate(folders)
    }


def make_prompts(vocab_size: int, lengths: Sequence[int], *, num_shared: int) -> list[np.ndarray]:
    """Prompts of these lengths, and some that share a cache block of 128 tokens."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, vocab_size, 128)
    prompts = [rng.integers(3, vocab_size, length) for length in lengths]
    prompts += [np.concatenate([shared, rng.integers(3, vocab_size, 2 + i)]) for i in range(num_shared)]
    return [prompt.astype(np.int32) for prompt in prompts]


def collected(holder: object, method: str) -> list[object]:
    """What a method answers from now on."""
    answers, ask = [], getattr(holder, method)

    def collect(*arguments: object, **keywords: object) -> object:
        answers.append(ask(*arguments, **keywords))
        return answers[-1]

    setattr(holder, method, collect)
    return answers
