"""An installed package adds kinds to configs: an environment, a reward, a source and a transport."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forgeasync.config import load_config
from forgeasync.schema import ConfigError

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "guessing"
version = "1.0"

[project.entry-points."forgeasync.environments"]
guessing = "guessing:Guessing"

[project.entry-points."forgeasync.environment_sections"]
twice = "guessing:TwiceSection"
broken = "guessing:nothing"

[project.entry-points."forgeasync.rewards"]
brevity = "guessing:brevity"

[project.entry-points."forgeasync.sources"]
sums = "guessing:sums"

[project.entry-points."forgeasync.transports"]
pigeons = "guessing:Pigeons"

[tool.setuptools]
py-modules = ["guessing"]
"""

MODULE = """
from collections.abc import Iterator
from typing import Literal

import forgeasync as fa
from forgeasync.config import InstalledEnvironment
from forgeasync.schema import Problem
from pydantic import Field

class TwiceSection(InstalledEnvironment):
    kind: Literal["twice"]
    worth: float = Field(default=1.0, lt=9)
    names: tuple[str, ...] = ()

    def check(self, config) -> Iterator[Problem]:
        if config.max_steps > 10_000:
            yield Problem(field="max_steps", value=config.max_steps, remedy="is too much for twice")

    def check_here(self, sandbox) -> Iterator[Problem]:
        yield Problem(field="environment.names", value=self.names, remedy=f"sandbox {sandbox.kind}")

    def build(self, sandbox):
        return Guessing(2 * self.worth)

class Guessing(fa.Environment):
    def __init__(self, worth: float = 1.0) -> None:
        self.worth = worth

    async def rollout(self, task: fa.Task, agent: fa.Agent) -> fa.Score:
        turn = await agent.respond(task.prompt)
        return fa.Score(self.worth * (turn.text == task.answer), turn.text == task.answer)

def brevity(task, response, most=10):
    return float(len(response.text) < most)

def sums(split, seed, num=4):
    return [{"question": f"{seed} + {index} =", "answer": str(seed + index)} for index in range(num)]

class Pigeons:
    pass
"""

USE = """
import json, sys
import forgeasync as fa
from forgeasync.config import check_without_model, load_config, dump_config
from forgeasync.environments import build_environment, check_environment
from forgeasync.testing import run_episode

try:
    config = load_config(sys.argv[1], sys.argv[2:])
except fa.ConfigError as error:
    print(error)
    sys.exit(2)
environment = build_environment(config.environment)
task = fa.Task(task_id="0", prompt="1 + 3 =", answer="4", source_index=0, source="sums")
outcome = run_episode(environment, task, "4")
print(json.dumps({
    "rules": [str(one) for one in check_without_model(config)],
    "problems": [str(one) for one in check_environment(config.environment)],
    "score": outcome.agents[0].score.value,
    "config": config.model_dump(mode="json"),
    "is_same": type(config).model_validate(config.model_dump(mode="json")) == config,
}))
"""

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "tiny_moe_cpu.yaml"
KINDS = [
    "environment={kind: guessing, worth: 0.5}",
    "data.reward={kind: brevity, most: 5, weight: 2.0}",
    "data.source={kind: sums, num: 600}",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed the package."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "guessing.py").write_text(MODULE)
    options = ["--quiet", "--no-index", "--no-build-isolation", "--no-deps", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    return target


def use(site: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", USE, str(CONFIG), *overrides],
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("transport", ["pigeons", "{kind: pigeons}"])
def test_the_kinds_of_an_installed_package_are_those_of_a_config(site: Path, transport: str) -> None:
    done = use(site, *KINDS, f"weights.transport={transport}")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["problems"] == [] and said["score"] == 0.5
    config = said["config"]
    for found, factory, options in (
        (config["environment"], "guessing.Guessing", {"worth": 0.5}),
        (config["data"]["reward"], "guessing.brevity", {"most": 5}),
        (config["data"]["source"], "guessing.sums", {"num": 600}),
        (config["weights"]["transport"], "guessing.Pigeons", {}),
    ):
        assert (found["kind"], found["factory"], found["options"]) == ("python", factory, options)
    assert config["data"]["reward"]["weight"] == 2.0, "a key of all rewards"


def test_a_kind_can_bring_a_section_that_checks_and_builds_itself(site: Path) -> None:
    twice = "environment={kind: twice, worth: 3, names: [a]}"
    done = use(site, twice, *KINDS[1:], "weights.transport={kind: pigeons}", "max_steps=20000")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (
        said["config"]["environment"] == {"kind": "twice", "worth": 3.0, "names": ["a"]} and said["is_same"]
    )
    assert said["score"] == 6.0
    assert "max_steps = 20000: is too much for twice" in said["rules"]
    assert said["problems"] == ["environment.names = ('a',): sandbox bubblewrap"]


@pytest.mark.parametrize("field", ["environment", "data.reward", "data.source", "weights.transport"])
def test_a_kind_that_is_no_text_is_refused_as_one(field: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(field)):
        load_config(CONFIG, [f"{field}={{kind: [a]}}"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("environment={kind: guesing}", "'remote', 'python', 'guessing'"),
        ("environment={kind: twice, wroth: 3}", "did you mean environment.worth?"),
        ("environment={kind: twice, worth: 9}", "environment.worth = 9: must be less than 9"),
        ("environment={kind: twice, factory: a.b}", "environment.factory = 'a.b': unknown key"),
        ("environment={kind: broken}", "guessing:nothing cannot be imported (AttributeError"),
        ("data.reward={kind: brevty}", "'brevity'"),
        ("environment={kind: guessing, options: {worth: 0.5}}", "options"),
        (
            "weights.transport=doves",
            "one of auto, shared_memory, rdma, tcp, torchstore, pigeons, or a section",
        ),
    ],
)
def test_what_is_wrong_is_said(site: Path, override: str, words: str) -> None:
    done = use(site, override)
    assert done.returncode == 2 and words in done.stdout, done.stdout + done.stderr
