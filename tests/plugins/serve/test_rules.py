"""What a run that serves people must be, where they come, and commands that have no use for them."""

import json
import socket
from pathlib import Path

import pytest

from apps.serve import require_people
from forgeasync.config import RunConfig, ServingSection, check_without_model, dump_config, load_config
from forgeasync.controller import prepare_evaluation, rehearse
from forgeasync.environments import (
    EndpointModel,
    ServingAddress,
    check_address,
    check_environment,
)
from forgeasync.schema import ConfigError, PythonCode
from tests.support.config_samples import CONFIGS, minimal_config

SERVED = (
    "data={source: {kind: served}, num_train: 1, num_held_out: 0}",
    "environment={kind: served}",
    "episodes.num_workers=1",
    "algorithm={advantage: reinforce_pp, group_size: 1, groups_per_step: 2}",
    "buffer.stale_groups=drop",
    "evaluation={num_problems: 0}",
)
SOURCE = "{kind: reasoning_gym, task: chain_sum}"
JUDGED = "serving.score_from=[feedback, judge]"


@pytest.fixture
def served() -> RunConfig:
    return load_config(CONFIGS / "serve_cpu.yaml")


def problems(*overrides: str) -> dict[str, str]:
    return {problem.field: str(problem) for problem in check_without_model(minimal_config(*overrides))}


def test_the_config_that_comes_with_the_package(served: RunConfig) -> None:
    assert not check_without_model(served)
    assert "token:" not in dump_config(served)


def test_a_served_run() -> None:
    assert not problems(*SERVED)
    own = "environment={kind: python, factory: tests.plugins.serve.test_sessions_of_people.Counting}"
    assert not problems(*SERVED, own, "serving.score_from=[environment, feedback]")
    assert not problems(*SERVED, JUDGED, "agents={policy: {}, judge: {trainable: false}}")
    assert not problems(*SERVED, "serving.host=0.0.0.0", "serving.token_env=T", "serving.public_host=h")


def test_people_are_the_only_source() -> None:
    sources = f"[{{source: {SOURCE}}}, {{source: {{kind: served}}}}]"
    several = f"data={{source: null, sources: {sources}, num_train: 9, num_held_out: 9}}"
    found = problems(several, "evaluation.num_problems=9")
    assert "only source" in found["data.sources.1.source.kind"]


# ---- where people come


def test_the_file_has_a_token_of_its_own_and_is_for_its_owner(tmp_path: Path) -> None:
    file, told = tmp_path / "serving.json", list[str]()
    address = ServingAddress(ServingSection(), file, told.append)
    first = address.setup()
    assert first.port == 0 and len(first.token) >= 32 and first.token not in repr(first)
    address.opened("http://127.0.0.1:4711", 4711)
    # The worker was replaced.
    again = address.setup()
    assert (again.port, again.token) == (4711, first.token)
    address.opened("http://127.0.0.1:4711", 4711)
    assert json.loads(file.read_text()) == {"url": "http://127.0.0.1:4711", "token": first.token}
    assert file.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["serving.json"]
    assert "http://127.0.0.1:4711/sessions" in told[0] and first.token not in " ".join(told)
    assert ServingAddress(ServingSection(), file, told.append).setup().token != first.token


def test_a_token_of_a_variable_is_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "from the environment"
    section = ServingSection(token_env="MY_TOKEN")
    monkeypatch.setenv("MY_TOKEN", token)
    assert not list(check_address(section))
    file = tmp_path / "serving.json"
    address = ServingAddress(section, file, lambda _: None)
    address.opened("http://h:1", 1)
    assert address.setup().token == token
    assert token not in file.read_text() and token not in section.model_dump_json()
    for bad, what in ((None, "is not set"), ("short", "has 5 characters"), ("\u00e9" * 20, "ASCII")):
        monkeypatch.delenv("MY_TOKEN") if bad is None else monkeypatch.setenv("MY_TOKEN", bad)
        (problem,) = check_address(section)
        assert problem.field == "serving.token_env" and what in problem.remedy
        assert bad is None or bad not in problem.remedy


def test_an_address_that_cannot_be_listened_on_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (problem,) = check_address(ServingSection(port=port))
        assert (problem.field, problem.value) == ("serving.port", port)
    for host in ("203.0.113.7", "no such host"):
        (problem,) = check_address(ServingSection(host=host))
        assert (problem.field, problem.value) == ("serving.host", host)


def test_your_own_environment_serves_people_or_does_not() -> None:
    options = {"hint": "", "failing_digit": 1}
    other = PythonCode(kind="python", factory="tests.support.environments.TryAgain", options=options)
    factory = "tests.plugins.serve.test_sessions_of_people.Counting"
    serving = PythonCode(kind="python", factory=factory, options={})
    (problem,) = check_environment(other, is_served=True)
    assert problem.field == "environment.factory" and "derived from ServedSessions" in problem.remedy
    (problem,) = check_environment(serving, is_served=False)
    assert problem.field == "environment.factory" and "data.source.kind = 'served'" in problem.remedy
    assert not list(check_environment(serving, is_served=True))
    assert not list(check_environment(other, is_served=False))


# ---- commands that have no use for people


def test_serve_needs_people(served: RunConfig) -> None:
    require_people(served)
    with pytest.raises(ConfigError, match=r"data\.source\.kind = 'reasoning_gym': must be 'served'"):
        require_people(minimal_config())


def test_nobody_comes_to_a_rehearsal_or_an_evaluation(served: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.source\.kind = 'served': a rehearsal has no clients"):
        rehearse(served, lambda config: None, on_hosts=False)
    endpoint = EndpointModel(base_url="http://127.0.0.1:1/v1", model="m")
    with pytest.raises(ConfigError, match=r"data\.source\.kind = 'served': its tasks come from clients"):
        prepare_evaluation(served, model=None, endpoint=endpoint, num_samples=None, out=tmp_path / "out")
