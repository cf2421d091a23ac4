"""The public names: complete, documented, free to import; what users call keeps working."""

import ast
import asyncio
import doctest
import inspect
import re
import subprocess
import sys
import textwrap
from difflib import unified_diff
from pathlib import Path

import pytest
import torch

import forgeasync as fa
from tests.support.public_signatures import RECORD, public_signatures, shown

API = Path(__file__).resolve().parents[1] / "docs" / "api.md"


def test_the_documented_names_are_the_public_ones() -> None:
    documented = re.findall(r"^\| `(\w+)` \|", API.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(documented) == sorted(fa.__all__)
    assert set(fa.__all__) <= set(dir(fa))


@pytest.mark.parametrize("name", fa.__all__)
def test_a_public_name_is_there_and_says_what_it_is(name: str) -> None:
    assert getattr(fa, name).__doc__


def test_examples_with_a_prompt_give_what_they_show() -> None:
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    names = {"fa": fa, "asyncio": asyncio, "torch": torch}
    for name in fa.__all__:
        for example in finder.find(getattr(fa, name), name, globs=names):
            runner.run(example)
    assert runner.tries > 10 and runner.failures == 0


def test_examples_with_imports_define_what_they_show() -> None:
    """Their imports, classes and functions are executed. What they call may start a run."""
    executed = set()
    for name in fa.__all__:
        blocks = re.findall(
            r"\n((?:    import .*\n)+(?:    .*\n|\n)+)", f"{inspect.getdoc(getattr(fa, name))}\n"
        )
        for block in blocks:
            tree = ast.parse(textwrap.dedent(block))
            tree.body = [one for one in tree.body if not isinstance(one, ast.Assign | ast.Expr)]
            exec(compile(tree, name, "exec"), {})
            executed.add(name)
    assert executed > {"Environment", "Objective", "Reward", "Tool", "Transport", "train"}


def test_there_is_no_other_name() -> None:
    with pytest.raises(AttributeError):
        fa.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("forgeasync", {"torch", "vllm", "monarch", "transformers", "numpy", "pydantic"}),
        # Processes that verify answers read parts of a config, and a run starts many of them.
        ("forgeasync.config.rules, forgeasync.scoring.worker", {"torch", "numpy"}),
        ("forgeasync.plugins.simulator.run", {"torch", "vllm", "monarch"}),
        ("apps.grpo", {"vllm", "openai"}),
    ],
)
def test_what_is_to_start_quickly_loads_nothing_heavy(modules: str, heavy: set[str]) -> None:
    code = f"import {modules}, sys; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_users_call_is_what_is_recorded() -> None:
    """Parameters that go, lose their defaults or move break the code of users; new ones have defaults."""
    signatures = public_signatures()
    assert {"RowTokens", "Turn", "Score", "RunConfig", "train", "math_reward"} <= signatures.keys()
    recorded, found = RECORD.read_text("utf-8").splitlines(), shown(signatures).splitlines()
    changed = "\n".join(unified_diff(recorded, found, n=0))
    assert not changed, f"{changed}\n\nIf no user's code breaks: python -m tests.support.public_signatures"
