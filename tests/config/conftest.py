from pathlib import Path

import pytest

from tests.support.config_samples import MINIMAL


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A small valid run, which a test can write to."""
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL)
    return file
