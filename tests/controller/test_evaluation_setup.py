"""What is wrong with an evaluation is said before anything starts; what it leaves can be read."""

import asyncio
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from forgeasync.actors import (
    EndpointResponses,
    GroupScoring,
    HeldOutRollout,
    ScoredResponses,
    ScorerPool,
    Unscored,
)
from forgeasync.config import Ending, RunConfig, SamplingSection, ScorerSection, load_config
from forgeasync.controller import (
    EvaluationFolder,
    find_endpoint,
    prepare_evaluation,
    problem_scores,
    rollout_record,
    sample_problems,
    summary_table,
    without_trainer,
)
from forgeasync.environments import EndpointModel, Response
from forgeasync.observability import read_episodes, summarize
from forgeasync.rollouts import Score, Task, VerifierCounts, VersionRange
from forgeasync.schema import ConfigError
from tests.support.buffer_world import make_task
from tests.support.chat_server import Reply, completion, error, serving
from tests.support.config_samples import MINIMAL

ENDPOINT = EndpointModel(base_url="http://127.0.0.1:1/v1", model="served")
SAMPLING = SamplingSection(max_response_tokens=9)


def config_of(folder: Path, *overrides: str) -> RunConfig:
    file = folder / "run.yaml"
    file.write_text(re.sub(r"options: {[^}]*}", "options: {min_terms: 2}", MINIMAL))
    return load_config([file], list(overrides))


def prepare(folder: Path, *overrides: str, **changes: Any) -> Any:
    settings = {"model": None, "endpoint": ENDPOINT, "num_samples": None, "out": folder / "out"}
    return prepare_evaluation(config_of(folder, *overrides), **(settings | changes))


def test_an_endpoint_needs_neither_a_model_nor_a_trainer(tmp_path: Path) -> None:
    source = "{kind: reasoning_gym, task: chain_sum}"
    sets = f"evaluation.sets=[{{name: more, source: {source}, num_problems: 4, num_samples: 3}}]"
    prepared = prepare(tmp_path, sets, "sampling.top_k=7", "evaluation.num_problems=5", "model.path=/nowhere")
    assert {name: (len(one.tasks), one.num_samples) for name, one in prepared.sets.items()} == {
        "held_out": (5, 1),
        "more": (4, 3),
    }
    assert prepared.warnings == ("sampling.top_k = 7 is not sent: Chat Completions have no such field",)
    assert not (tmp_path / "out").exists()
    again = prepare(tmp_path, sets, num_samples=8)
    assert [one.num_samples for one in again.sets.values()] == [8, 8]


def test_the_sandbox_of_the_config_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the default one: this one needs a program that is in no folder of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    plain = "environment={kind: python_tool, plain_calls: {call_prefix: '[', call_suffix: ']'}}"
    with pytest.raises(ConfigError) as refused:
        prepare(tmp_path, plain, "sandbox={kind: docker, image: 'python:3.11'}")
    (problem,) = [one for one in refused.value.problems if one.field.startswith("sandbox")]
    assert "docker" in str(problem)


def test_only_what_samples_is_left_of_a_config(tmp_path: Path) -> None:
    config = without_trainer(config_of(tmp_path, "lora={rank: 8, alpha: 16, targets: [q_proj]}"), "/other")
    assert config.lora is None and config.model.path == "/other"
    assert not config.trainer.keep_sampling_mask and config.trainer.routing_replay == "off"


@pytest.mark.parametrize(
    ("overrides", "changes", "words"),
    [
        ((), {"num_samples": 0}, r"--samples = 0: must be 1 to 4096"),
        ((), {"endpoint": None}, r"model\.path"),
        ((), {"endpoint": None, "model": "/nowhere/at/all"}, r"model\.path = ./nowhere/at/all"),
        (("sampling.top_k=1",), {}, r"sampling\.top_k"),
        (("launcher.kind=process",), {"endpoint": None}, r"launcher\.kind = .process.: .*this machine"),
        (
            ("environment={kind: python, factory: tests.nothing.Here}",),
            {},
            r"environment\.factory = .*tests\.nothing",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    tmp_path: Path, overrides: tuple[str, ...], changes: Mapping[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(tmp_path, *overrides, **changes)
    assert [one.name for one in tmp_path.iterdir()] == ["run.yaml"]


def test_a_folder_that_is_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "episodes.jsonl").touch()
    with pytest.raises(ConfigError, match=r"--out = .*holds files already"):
        prepare(tmp_path)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x/v1", "http://", "file:///etc/passwd"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        find_endpoint(url, model="x", api_key_variable=None)


def test_the_only_model_of_an_endpoint_is_found() -> None:
    with serving(lambda body: completion("x")) as server:
        found = find_endpoint(server.url, model=None, api_key_variable=None)
    assert found == EndpointModel(base_url=server.url, model="served")
    with pytest.raises(ConfigError, match=r"does not list its models .*; give --endpoint-model"):
        find_endpoint(server.url, model=None, api_key_variable=None)
    with pytest.raises(ConfigError, match=r"--api-key-env = .*NO_SUCH.*is not set"):
        find_endpoint(server.url, model="x", api_key_variable="NO_SUCH")


async def score_by_text(task: Task, responses: Sequence[Response], first: int) -> ScoredResponses:
    scores = tuple(Score(1.0, True) if one.text == task.answer else Score(0.0, False) for one in responses)
    return ScoredResponses(scores=scores, counts=VerifierCounts())


def test_every_sample_of_an_endpoint_is_kept_and_counted(tmp_path: Path) -> None:
    """Of three problems the first is answered rightly every other time, the last has no room."""
    tasks = [dataclasses.replace(make_task(number), prompt=str(number), answer="yes") for number in range(3)]
    numbers = {"0": iter(range(4))}
    most = [0, 0]

    def answer(body: Mapping[str, Any]) -> Reply:
        system, user = body["messages"]
        assert system == {"role": "system", "content": "be brief"}
        if user["content"] == "2":
            return error(400, "too long", "context_length_exceeded")
        return completion("yes" if user["content"] == "0" and next(numbers["0"]) % 2 else "no")

    folder = EvaluationFolder.create(tmp_path / "out", "name: x\n")

    async def go(url: str) -> list[HeldOutRollout]:
        groups = EndpointResponses(
            EndpointModel(base_url=url, model="served", max_retries=0),
            GroupScoring(ScorerPool([score_by_text], ScorerSection()), ScorerSection()),
            system_prompt="be brief",
            limit_s=20.0,
        )
        score = groups.score

        async def counted(*arguments: Any, **keywords: Any) -> HeldOutRollout:
            most[0] += 1
            most[1] = max(most)
            try:
                return await score(*arguments, **keywords)
            finally:
                most[0] -= 1

        groups.score = counted  # type: ignore[method-assign]
        try:
            return await sample_problems(
                tasks,
                groups,
                sampling=SAMPLING,
                num_samples=4,
                on_ended=lambda problem, sample, rollout: folder.write(
                    "held_out", problem, sample, tasks[problem], rollout
                ),
                max_concurrent=3,
                keeps_record=True,
            )
        finally:
            await groups.close()

    with serving(answer) as server, folder:
        rollouts = asyncio.run(go(server.url))
    summary = summarize(problem_scores(rollouts, 3), num_samples=4)
    assert (summary.accuracy.value, summary.num_unscored, most[1]) == (0.25, 4, 3)
    assert summary.pass_at[2].value == pytest.approx((5 / 6 + 0.0) / 2)
    episodes = read_episodes(folder.episodes)
    assert {(one["problem"], one["sample"]) for one in episodes} == {
        (p, s) for p in range(3) for s in range(4)
    }
    unscored = [one for one in episodes if one["unscored"] is not None]
    assert {one["problem"] for one in unscored} == {2} and "too long" in unscored[0]["unscored"]
    assert all(one["reward"] is None and one["is_correct"] is None for one in unscored)
    (branch,) = next(one for one in episodes if one["problem"] == 1)["episode_record"]["agents"][0][
        "branches"
    ]
    assert [one["content"] for one in branch] == ["1", "no"]
    folder.write_summary("served", {"held_out": summary}, wall_s=1.0, warnings=())
    written = json.loads((folder.path / "summary.json").read_text())
    assert written["sets"]["held_out"]["num_unscored"] == 4 and "bootstrap" in written["methods"]["score"]
    shown = summary_table({"held_out": summary})
    assert "held_out" in shown and "pass@4" in shown and "of 2 problems" in shown


def test_a_rollout_says_how_it_was_sampled() -> None:
    record = rollout_record(
        make_task(0),
        HeldOutRollout(
            result=Unscored(reason="it hung"),
            versions=VersionRange(first=2, last=4),
            ending=Ending.TIMEOUT,
            num_turns=3,
        ),
    )
    assert (record["ending"], record["versions"], record["num_turns"]) == ("timeout", [2, 4], 3)
    assert record["unscored"] == "it hung" and record["reward"] is None
