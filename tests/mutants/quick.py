"""A plugin of pytest for runs over many changes: quick tests first, and no search for a smaller example."""

import json
from pathlib import Path

import pytest
from hypothesis import Phase, settings

settings.register_profile("mutants", deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))

STATS = Path("mutmut-stats.json")
"""Where mutmut keeps how long every test took, in the folder that it runs tests in."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if STATS.exists():
        took_s = json.loads(STATS.read_text())["duration_by_test"]
        items.sort(key=lambda item: took_s.get(item.nodeid, 0.0))
