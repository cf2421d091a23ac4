"""The command that evaluates, as a user starts it: with engines of ours, and against a server of others."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.app_runs import finish, finish_well, start, write_tiny_run
from tests.support.chat_server import Reply, completion, error, serving

ENVIRONMENT = "tests.support.environments.KeepsAndFails"


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six held-out problems."""
    return write_tiny_run(tmp_path_factory.mktemp("evaluate"), "evaluation.num_problems=6", scale=8.0)


def run_evaluation(config_file: Path, *arguments: str) -> subprocess.Popen[str]:
    return start(config_file, *arguments, app="apps.evaluate")


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    summary = json.loads((folder / "summary.json").read_text())["sets"]["held_out"]
    return summary, [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]


def with_environment(**options: object) -> str:
    return f"environment={{kind: python, factory: {ENVIRONMENT}, options: {json.dumps(options)}}}"


def test_episodes_run_against_a_server_of_others(config_file: Path, tmp_path: Path) -> None:
    """No engine and no GPU; one problem of six is one that the server refuses, whatever is tried."""

    def answer(body: Mapping[str, Any]) -> Reply:
        number = body["messages"][0]["content"]
        return error(400, "no such thing") if "= 3" in number else completion("right")

    with serving(answer) as server:
        process = run_evaluation(
            config_file,
            f"--base-url={server.url}",
            "--samples=2",
            f"--out={tmp_path / 'out'}",
            "model.path=/nowhere",
            "episodes={num_workers: 1, max_attempts: 2}",
            with_environment(refused=3),
        )
        out = finish_well(process)
    summary, episodes = read(tmp_path / "out")
    assert (summary["num_problems"], summary["num_samples"], summary["num_unscored"]) == (6, 2, 2)
    assert summary["accuracy"]["value"] == summary["pass_at"]["2"]["value"] == 1.0
    assert summary["accuracy"]["num_problems"] == 5 and summary["accuracy"]["low"] < 1.0
    assert len(episodes) == 12 and "pass@2" in out and "apps.show" in out
    lost = [one for one in episodes if one["unscored"] is not None]
    assert len({one["problem"] for one in lost}) == 1 and len(lost) == 2
    assert {one["ending"] for one in lost} == {"infrastructure"}
    assert [one["ending"] for one in lost[0]["episode_record"]["attempts"]] == ["infrastructure"] * 2
    for episode in episodes:
        if episode not in lost:
            assert episode["num_turns"] == 2 and episode["versions"] is None
            (kept,) = episode["episode_record"]["artifacts"]
            assert (tmp_path / "out" / kept).read_text() == "right"


@pytest.mark.exhaustive
def test_a_folder_is_evaluated_by_engines_of_ours(config_file: Path, tmp_path: Path) -> None:
    """Single responses; without a trainer everything is of version 0."""
    finish_well(run_evaluation(config_file, "--samples=4", f"--out={tmp_path / 'out'}"))
    summary, episodes = read(tmp_path / "out")
    assert summary["num_unscored"] == 0 and set(summary["pass_at"]) == {"1", "2", "4"}
    assert len(episodes) == 24 and all(one["versions"] == [0, 0] for one in episodes)
    assert summary["score"]["value"] == pytest.approx(sum(one["reward"] for one in episodes) / 24)
    texts = {one["episode_record"]["agents"][0]["branches"][0][1]["content"] for one in episodes}
    assert len(texts) > 12, "every sample has a seed of its own"


@pytest.mark.exhaustive
def test_episodes_of_engines_of_ours(config_file: Path, tmp_path: Path) -> None:
    overrides = ("episodes.num_workers=1", with_environment(refused=99))
    finish_well(run_evaluation(config_file, "--samples=2", f"--out={tmp_path / 'out'}", *overrides))
    summary, episodes = read(tmp_path / "out")
    assert summary["num_unscored"] == 0 and len(episodes) == 12
    assert all(one["versions"] == [0, 0] and one["num_turns"] == 2 for one in episodes)
    branch = episodes[0]["episode_record"]["agents"][0]["branches"][0]
    assert [one["role"] for one in branch] == ["user", "assistant", "user", "assistant"]
    assert branch[1]["version"] == 0


@pytest.mark.exhaustive
def test_an_evaluation_without_any_score_fails(config_file: Path, tmp_path: Path) -> None:
    with serving(lambda body: error(400, "no such thing")) as server:
        arguments = (f"--base-url={server.url}", "--endpoint-model=x", f"--out={tmp_path / 'out'}")
        code, _, err = finish(run_evaluation(config_file, *arguments, "model.path=/nowhere"))
    assert code == 1 and "no response was scored" in err
    summary, episodes = read(tmp_path / "out")
    assert summary["accuracy"] is None and summary["num_unscored"] == len(episodes) == 6
    assert "no such thing" in episodes[0]["unscored"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "a", "--base-url", "b"), "not allowed with argument"),
        (("--api-key-env", "X"), "--api-key-env: needs --base-url"),
        (("--endpoint-model", "X"), "--endpoint-model: needs --base-url"),
        (("--concurrency", "0"), "--concurrency 0: must be at least 1"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from apps.evaluate import read_arguments

    monkeypatch.setattr(sys, "argv", ["evaluate", "--config", "x.yaml", *arguments])
    with pytest.raises(SystemExit) as ended:
        read_arguments()
    assert ended.value.code == 2 and words in capsys.readouterr().err
