"""What a config may say of agents and of endings."""

from pathlib import Path

import pytest

from forgeasync.config import AgeOf, check_without_model, load_config
from forgeasync.schema import ConfigError
from tests.support.config_samples import MINIMAL

ENVIRONMENT = "environment={kind: python, factory: tests.support.environments.TryAgain}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL)
    return file


@pytest.mark.parametrize(
    ("overrides", "field", "problem"),
    [
        (["agents={solver: {}}"], "agents", "needs an environment"),
        ([ENVIRONMENT, "agents={judge: {trainable: false}}"], "agents", "at least one agent with trainable"),
        (
            [ENVIRONMENT, "agents={a: {}, b: {}}", "buffer.age_of=newest_token"],
            "buffer.age_of",
            "with agents: one of them",
        ),
        *(
            (
                [ENVIRONMENT, f"episodes.endings.infrastructure={policy}"],
                "episodes.endings.infrastructure",
                "must be one of run_again, mask",
            )
            for policy in ("zero", "score")
        ),
    ],
)
def test_what_cannot_be_is_refused(file: Path, overrides: list[str], field: str, problem: str) -> None:
    found = check_without_model(load_config(file, overrides))
    assert [one.field for one in found] == [field] and problem in str(found[0])


def test_several_agents_are_fine(file: Path) -> None:
    agents = "agents={solver: {}, judge: {trainable: false}}"
    config = load_config(file, [ENVIRONMENT, agents, "episodes.endings.infrastructure=mask"])
    assert check_without_model(config) == []
    with pytest.raises(ConfigError, match="agents"):
        load_config(file, [ENVIRONMENT, "agents={Not A Name: {}}"])


@pytest.mark.parametrize(
    ("overrides", "age_of"),
    [
        ([], AgeOf.OLDEST_TOKEN),
        ([ENVIRONMENT], AgeOf.TOKEN),
        ([ENVIRONMENT, "buffer.age_of=mean"], AgeOf.MEAN),
        ([ENVIRONMENT, "buffer.max_groups=20"], AgeOf.TOKEN),
        ([ENVIRONMENT, "weights.interruption=cancel_stale"], AgeOf.OLDEST_TOKEN),
    ],
)
def test_ages_are_of_tokens_where_episodes_can_be_long(
    file: Path, overrides: list[str], age_of: AgeOf
) -> None:
    assert load_config(file, overrides).buffer.age_of is age_of
