"""Models that many tests of engines share."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forgeasync.testing import write_tiny_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models of one shape, each with random weights of its own: by version, what an engine is updated to."""
    root = tmp_path_factory.mktemp("models")
    return [
        write_tiny_model(root / str(seed), seed=seed, scale=12.0, num_experts=8, top_k=3) for seed in range(3)
    ]


@pytest.fixture(scope="session")
def models(folders: list[Path]) -> dict[int, torch.nn.Module]:
    """transformers' models of the folders, by version."""
    return {
        version: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for version, folder in enumerate(folders)
    }
