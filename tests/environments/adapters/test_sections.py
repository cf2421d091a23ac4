"""Sections on servers of others: what is refused before anything starts, and how."""

from pathlib import Path

import pytest

from forgeasync.config import RunConfig, check_without_model, load_config
from forgeasync.schema import ConfigError
from tests.support.config_samples import MINIMAL

URL = "url: 'ws://127.0.0.1:8000/ws'"
TEXT = "action: {kind: text, field: message}"


def load(tmp_path: Path, environment: str, *overrides: str) -> RunConfig:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    return load_config(path, [f"environment={environment}", *overrides])


@pytest.mark.parametrize(
    ("environment", "field", "words"),
    [
        ("{kind: verifiers}", "environment.address", ""),
        (
            "{kind: verifiers, address: 'http://127.0.0.1:5000'}",
            "environment.address",
            "tcp://127.0.0.1:<port>",
        ),
        ("{kind: verifiers, address: 'tcp://127.0.0.1'}", "environment.address", "tcp://127.0.0.1:<port>"),
        ("{kind: verifiers, address: 'tcp://127.0.0.1:99999'}", "environment.address", "127.0.0.1:<port>"),
        ("{kind: verifiers, address: 'tcp://a@localhost:1'}", "environment.address", "127.0.0.1:<port>"),
        ("{kind: verifiers, address: 'tcp://localhost:1/x'}", "environment.address", "127.0.0.1:<port>"),
        ("{kind: verifiers, address: 'ipc://'}", "environment.address", "ipc://<path>"),
        (
            "{kind: verifiers, address: 'tcp://node7:5000'}",
            "environment.address",
            "on the host of the environment",
        ),
        (
            "{kind: verifiers, address: 'ipc:///e', task_fields: {a: text}}",
            "environment.task_fields.a",
            "record",
        ),
        ("{kind: openenv}", "environment.url", ""),
        ("{kind: openenv, url: 'http://127.0.0.1:8000'}", "environment.url", "ws"),
        ("{kind: openenv, url: 'ws://127.0.0.1:8000/'}", "environment.url", "/ws"),
        ("{kind: openenv, url: 'ws://h/ws?session_id=a'}", "environment.url", "/ws"),
        (f"{{kind: openenv, {URL}, action: {{kind: text}}}}", "environment.action.field", ""),
        (f"{{kind: openenv, {URL}, action: {{kind: click}}}}", "environment.action.kind", "'tools'"),
        (
            f"{{kind: openenv, {URL}, reset_fields: {{seed: record}}}}",
            "environment.reset_fields.seed",
            "record",
        ),
        (f"{{kind: openenv, {URL}, max_rounds: 0}}", "environment.max_rounds", "greater than 0"),
    ],
)
def test_wrong_sections_are_named(environment: str, field: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, environment)
    (problem,) = caught.value.problems
    assert problem.field == field and words in problem.remedy, problem


@pytest.mark.parametrize(
    ("environment", "overrides", "fields"),
    [
        ("{kind: verifiers, address: 'tcp://[::1]:5000'}", [], []),
        (
            "{kind: verifiers, address: 'ipc:///run/a.sock', task_fields: null}",
            ["agents={a: {}, b: {}}"],
            ["agents"],
        ),
        (f"{{kind: openenv, {URL}}}", [], ["data.chat_template"]),
        (f"{{kind: openenv, {URL}, action: {{kind: tools}}}}", [], ["data.chat_template"]),
        (f"{{kind: openenv, {URL}}}", ["data.chat_template=true"], []),
        (f"{{kind: openenv, {URL}, {TEXT}}}", [], []),
        (f"{{kind: openenv, {URL}, {TEXT}, max_rounds: 5}}", ["episodes.max_turns=5"], []),
        (
            f"{{kind: openenv, {URL}, {TEXT}, max_rounds: 6}}",
            ["episodes.max_turns=5"],
            ["environment.max_rounds"],
        ),
    ],
)
def test_what_a_server_needs_of_the_config(
    environment: str, overrides: list[str], fields: list[str], tmp_path: Path
) -> None:
    config = load(tmp_path, environment, *overrides)
    assert [problem.field for problem in check_without_model(config)] == fields
    assert type(config).model_validate(config.model_dump(mode="json")) == config
