"""The device that tests without data pretend to have."""

from pathlib import Path

import pytest

from tests.support.without_data import build_device


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_device(tmp_path_factory.mktemp("device"))
