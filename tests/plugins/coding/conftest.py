from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.repositories import make_repository


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("coding")


@pytest.fixture(scope="session")
def record(folder: Path) -> Callable[[str], dict[str, Any]]:
    """Records of the two repositories, by their test runner."""
    made = {runner: make_repository(folder, runner) for runner in ("pytest", "unittest")}
    return lambda runner: dict(made[runner])
