"""Small repositories with one bug each, and the records of their coding tasks, for configs/coding_cpu.yaml.

    python -m examples.agents.repositories data/repositories

writes a folder for every repository, with the bug, and ``records.jsonl``.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("prices", "weights", "ages", "marks", "steps", "votes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A bug: a function with a wrong expression, and the right expression."""

    function: str
    wrong: str
    right: str
    issue: str
    examples: tuple[tuple[list[int], int], ...]
    """Arguments and results of the fixed function; the first example also passes with the bug."""


FAULTS = (
    Fault(
        function="total",
        wrong="sum(numbers[1:])",
        right="sum(numbers)",
        issue="leaves out the first number",
        examples=(([], 0), ([1, 2], 3), ([5], 5)),
    ),
    Fault(
        function="largest",
        wrong="min(numbers)",
        right="max(numbers)",
        issue="returns the smallest number",
        examples=(([4], 4), ([1, 2], 2), ([-1, -3, 7], 7)),
    ),
    Fault(
        function="num_even",
        wrong="sum(n % 2 == 1 for n in numbers)",
        right="sum(n % 2 == 0 for n in numbers)",
        issue="counts the odd numbers",
        examples=(([], 0), ([2, 4, 5], 2), ([8], 1)),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository with one module that has a bug."""

    name: str
    fault: Fault

    @property
    def issue(self) -> str:
        """Prompt of the task: the description of the bug."""
        return f"{self.fault.function} in {self.name}.py {self.fault.issue}."

    @property
    def source(self) -> str:
        """Source of the module with the bug."""
        return f"def {self.fault.function}(numbers):\n    return {self.fault.wrong}\n"

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the checkout to a subfolder of ``folder``, and return the record of its task."""
        fault = self.fault
        checkout = folder / f"{self.name}-{fault.function}"
        (checkout / "tests").mkdir(parents=True)
        (checkout / "tests" / "__init__.py").write_text("")
        (checkout / f"{self.name}.py").write_text(self.source)
        lines = [
            "import unittest",
            "",
            f"from {self.name} import {fault.function}",
            "",
            "",
            f"class Test{self.name.title()}(unittest.TestCase):",
        ]
        for number, (given, expected) in enumerate(fault.examples):
            lines += [
                f"    def test_{number}(self):",
                f"        self.assertEqual({fault.function}({given}), {expected})",
                "",
            ]
        lines.pop()
        path = f"tests/test_{self.name}.py"
        patch = [
            "--- /dev/null",
            f"+++ b/{path}",
            f"@@ -0,0 +1,{len(lines)} @@",
            *(f"+{one}" for one in lines),
        ]
        prefix = f"tests.test_{self.name}.Test{self.name.title()}.test_"
        return {
            "instance_id": checkout.name,
            "problem_statement": self.issue,
            "test_patch": "\n".join(patch) + "\n",
            "FAIL_TO_PASS": [f"{prefix}{number}" for number in range(1, len(fault.examples))],
            "PASS_TO_PASS": [f"{prefix}0"],
            "checkout": checkout.name,
            "runner": "unittest",
        }


def repositories() -> Iterator[Repository]:
    """Yield a repository for every name and bug."""
    return (Repository(name=name, fault=fault) for name in NAMES for fault in FAULTS)


def main(folder: Path) -> None:
    """Write all repositories and ``records.jsonl``, unless the folder exists."""
    if folder.exists():
        print(f"{folder} exists already")
        return
    folder.mkdir(parents=True)
    records = [json.dumps(one.write(folder)) for one in repositories()]
    (folder / "records.jsonl").write_text("\n".join(records) + "\n")
    print(f"wrote {len(records)} repositories into {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
