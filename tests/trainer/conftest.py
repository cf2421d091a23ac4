"""A model and sequences that many tests of the trainer share."""

from pathlib import Path

import pytest

from forgeasync.models import read_model_facts
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import TrainingSequence
from tests.support.trainers import make_sequences


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with three of eight experts for a token; its weights are large, so that mistakes show."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "hf", scale=4.0, num_experts=8, top_k=3)


@pytest.fixture(scope="session")
def sequences(folder: Path) -> list[TrainingSequence]:
    return make_sequences(11, read_model_facts(str(folder)))
