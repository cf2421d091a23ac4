"""Where people are served: the token, the file that says so, and what is refused before the start."""

import json
import socket
from pathlib import Path

import pytest

from forgeasync.config import ServingSection
from forgeasync.environments import ServingAddress, check_address, check_environment
from forgeasync.schema import PythonCode


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
