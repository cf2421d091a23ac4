"""Environments of the package in whole runs, by the configs that ship with it."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from apps.show import shown
from examples.agents.model import write_model
from examples.agents.repositories import main as write_repositories
from forgeasync.config import check_without_model, load_config
from forgeasync.environments import build_source
from tests.support.app_runs import REPOSITORY, finish_well, read_lines, start

KINDS = ("game", "mcp", "coding")


def config_file(kind: str) -> Path:
    return REPOSITORY / "configs" / f"{kind}_cpu.yaml"


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model that has practised for seconds, and what the coding tasks are about."""
    folder = tmp_path_factory.mktemp("shipped")
    write_model(folder / "model", num_steps=40)
    return [f"model.path={folder / 'model'}", "evaluation.num_problems=2"]


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coding") / "repositories"
    write_repositories(folder)
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_shipped_config_runs_through_all_rooms(
    kind: str,
    overrides: Sequence[str],
    repositories: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As activating the environment does: the MCP server is started by `python`.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    run_dir = tmp_path / "run"
    more = [*overrides, "max_steps=2", f"run_dir={run_dir}", "logging.rollouts_per_step=100"]
    if kind == "coding":
        more.append(f"data.source.path={repositories / 'records.jsonl'}")
    out = finish_well(start(config_file(kind), *more))
    assert "environment ready" in out
    _, *steps = read_lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2]
    last = steps[-1]
    assert last["episode/ended_completed"] > 0
    for ending in ("environment_crash", "infrastructure", "timeout", "parse_error", "tool_error"):
        assert last[f"episode/ended_{ending}"] == 0, ending
    num_calls = sum(num for key, num in last.items() if key.startswith("episode/num_tool_calls_"))
    assert (num_calls > 0) == (kind != "game")
    assert last["routing/recorded_share"] == 1.0 and last["payload/num_bytes_held"] == 0
    assert last["environment/num_restarted_workers"] == 0
    rollouts: list[dict[str, Any]] = [
        json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()
    ]
    assert len(shown(run_dir, None, as_json=False)) == len(rollouts) + 1
    roles = {message["role"] for one in rollouts for message in messages(one)}
    assert roles >= {"user", "assistant"} and ("tool" in roles) == (kind != "game")
    if kind == "coding":
        assert "has_changes" in rollouts[0]["parts"]
        for kept in rollouts[0]["episode_record"]["artifacts"]:
            assert (run_dir / kept).is_file()


def messages(rollout: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        one for agent in rollout["episode_record"]["agents"] for path in agent["branches"] for one in path
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_shipped_config_has_nothing_wrong_and_has_its_tasks(kind: str, repositories: Path) -> None:
    config = load_config([config_file(kind)], [])
    assert check_without_model(config) == []
    if kind == "coding":
        config = load_config([config_file(kind)], [f"data.source.path={repositories / 'records.jsonl'}"])
    split = build_source(config.data, seed=config.seed)
    assert len(split.train) == config.data.num_train and len(split.held_out) == config.data.num_held_out
    assert not {task.prompt for task in split.train} & {task.prompt for task in split.held_out}
