"""Models that many tests of engines share."""

from pathlib import Path

import pytest
import torch

from tests.support.models import load_versions, write_versions


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_versions(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def models(folders: list[Path]) -> dict[int, torch.nn.Module]:
    return load_versions(folders)
