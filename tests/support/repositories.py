"""Two tiny repositories with a fault each, their records, and agents that work on them by script."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from forgeasync.environments import ToolCall, Turn
from forgeasync.rollouts import Task
from forgeasync.testing import scripted_turn

_PYTEST_NEEDS = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")

WRONG = """def total(numbers):
    result = 0
    for number in numbers[1:]:
        result += number
    return result
"""
RIGHT = WRONG.replace("numbers[1:]", "numbers")

_OLD_PYTEST = """from shop.prices import total


def test_nothing():
    assert total([]) == 0
"""
_NEW_PYTEST = """import pytest

from shop.prices import total


def test_nothing():
    assert total([]) == 0


@pytest.mark.parametrize("numbers", [[1, 2], [5]], ids=["two", "one"])
def test_all_count(numbers):
    assert total(numbers) == sum(numbers)
"""
_OLD_UNITTEST = """import unittest

from shop.prices import total


class TestTotal(unittest.TestCase):
    def test_nothing(self):
        self.assertEqual(total([]), 0)
"""
_NEW_UNITTEST = (
    _OLD_UNITTEST
    + """
    def test_all_count(self):
        self.assertEqual(total([1, 2]), 3)

    def test_one(self):
        self.assertEqual(total([5]), 5)
"""
)


def copy_pytest(folder: Path) -> Path:
    """A folder with pytest and nothing else: plugins of this test run stay outside."""
    packages = folder / "packages"
    if not packages.exists():
        for name in _PYTEST_NEEDS:
            source = Path(pytest.__file__).parents[1] / name
            # With compiled files: boxes see it read-only and would compile it every time.
            shutil.copytree(source, packages / name)
    return packages


def patch_of(path: str, before: str, after: str) -> str:
    """A unified diff that replaces a file's whole text."""
    old, new = before.splitlines(), after.splitlines()
    lines = [f"diff --git a/{path} b/{path}", f"--- a/{path}", f"+++ b/{path}"]
    lines += [f"@@ -1,{len(old)} +1,{len(new)} @@", *(f"-{one}" for one in old), *(f"+{one}" for one in new)]
    return "\n".join(lines) + "\n"


def make_repository(folder: Path, runner: str) -> dict[str, Any]:
    """Write a repository and return its record, with paths relative to ``folder``."""
    root = folder / f"{runner}-repository"
    files = {
        "README.md": "A shop.\n",
        "shop/__init__.py": "",
        "shop/prices.py": WRONG,
        "shop/logo.bin": "\0logo",
        "tests/__init__.py": "",
        "tests/test_prices.py": _OLD_PYTEST if runner == "pytest" else _OLD_UNITTEST,
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "shop" / "current").symlink_to("prices.py")
    record: dict[str, Any] = {
        "instance_id": f"shop-{runner}",
        "repo": "people/shop",
        "base_commit": "0" * 40,
        "problem_statement": f"total leaves out the first number ({runner})",
        "patch": patch_of("shop/prices.py", WRONG, RIGHT),
        "checkout": root.name,
        "runner": runner,
        "version": 1,
    }
    if runner == "pytest":
        new, prefix = _NEW_PYTEST, "tests/test_prices.py::"
        record["FAIL_TO_PASS"] = [f"{prefix}test_all_count[two]", f"{prefix}test_all_count[one]"]
        record["PASS_TO_PASS"] = json.dumps([f"{prefix}test_nothing"])
        record["packages"] = copy_pytest(folder).name
    else:
        new, prefix = _NEW_UNITTEST, "tests.test_prices.TestTotal."
        record["FAIL_TO_PASS"] = [f"{prefix}test_all_count", f"{prefix}test_one"]
        record["PASS_TO_PASS"] = [f"{prefix}test_nothing"]
    record["test_patch"] = patch_of("tests/test_prices.py", files["tests/test_prices.py"], new)
    return record


def task_of(raw: Mapping[str, Any], folder: Path) -> Task:
    """The task that a source makes of a record."""
    paths = {key: str(folder / raw[key]) for key in ("checkout", "packages") if key in raw}
    return Task(
        task_id=raw["instance_id"],
        prompt=raw["problem_statement"],
        answer="",
        source_index=0,
        source="coding",
        record={**raw, **paths},
    )


def calls(*tools: tuple[str, Mapping[str, Any]]) -> Turn:
    """A turn that calls tools."""
    return scripted_turn(
        "", *(ToolCall(id=f"call_{i}", name=name, arguments=given) for i, (name, given) in enumerate(tools))
    )


def script(*commands: str, writes: Sequence[tuple[str, str]] = ()) -> list[Turn]:
    """Turns that write files, run commands and submit."""
    written = [calls(("write", {"path": path, "content": text})) for path, text in writes]
    return [*written, *(calls(("run", {"command": one})) for one in commands), calls(("submit", {}))]
