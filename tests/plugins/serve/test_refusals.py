"""Commands that have no use for people, and the one that needs them."""

from pathlib import Path

import pytest

from apps.serve import require_people
from forgeasync.config import RunConfig, load_config
from forgeasync.controller import prepare_evaluation, rehearse
from forgeasync.environments import EndpointModel, build_source, look_at_data
from forgeasync.schema import ConfigError
from tests.support.config_samples import CONFIGS, minimal_config


@pytest.fixture
def served() -> RunConfig:
    return load_config(CONFIGS / "serve_cpu.yaml")


def test_serve_needs_people(served: RunConfig) -> None:
    require_people(served)
    with pytest.raises(ConfigError, match=r"data\.source\.kind = 'reasoning_gym': must be 'served'"):
        require_people(minimal_config())


def test_nobody_comes_to_a_rehearsal_or_an_evaluation(served: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.source\.kind = 'served': nobody comes"):
        rehearse(served, lambda config: None, on_hosts=False)
    endpoint = EndpointModel(base_url="http://127.0.0.1:1/v1", model="m")
    with pytest.raises(ConfigError, match=r"data\.source\.kind = 'served': people bring"):
        prepare_evaluation(served, model=None, endpoint=endpoint, num_samples=None, out=tmp_path / "out")


def test_tasks_stand_for_people(served: RunConfig) -> None:
    source = build_source(served.data, seed=0)
    assert [task.task_id for task in source.train] == ["served/0"] and not source.held_out
    assert "people bring the tasks" in look_at_data(served.data, seed=0).words
