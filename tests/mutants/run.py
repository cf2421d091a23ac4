"""Changes the code in small ways, one at a time, and says which changes no fast test sees.

    python -m tests.mutants.run [--sample N | --all] [--seed S] [--only GLOB ...] [--jobs N] [--table FILE]

What is changed and which tests run is in pyproject.toml under ``tool.mutmut``; mutmut makes the changes and
runs for each the tests that reach it. Changes that no test need see are in accepted.toml, with the reason.
The exit code is 1 if others survive. An entry of accepted.toml that fits no change is refused at once.
"""

import argparse
import difflib
import fnmatch
import json
import random
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.utils.format_utils import get_mutant_name, mangled_name_from_mutant_name

WORK = Path("mutants")
"""Where mutmut keeps its copy of the code, its changes and their results."""

ACCEPTED = Path(__file__).with_name("accepted.toml")

FUNCTIONS = {"forgeasync/trainer/optimizer.py": ("x_scheduled_learning_rate",)}
"""Of these modules only these functions, under mutmut's names: the rest needs real models."""


class Fate(StrEnum):
    """What became of a change."""

    KILLED = "killed"
    TIMEOUT = "timeout"
    """Tests went on for so long that mutmut ended them: seen too."""
    SURVIVED = "survived"
    NO_TESTS = "no tests"
    """No fast test calls the function."""
    OTHER = "other"
    """Anything else: the process that tested it died."""


FATES = {1: Fate.KILLED, 3: Fate.KILLED, 0: Fate.SURVIVED, 5: Fate.NO_TESTS, 33: Fate.NO_TESTS}
FATES |= {code: Fate.TIMEOUT for code in (-24, 24, 36, 152, 255)}
"""By mutmut's exit codes."""

UNSEEN = (Fate.SURVIVED, Fate.NO_TESTS, Fate.OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change: ``old`` and ``new`` are the lines that differ, joined and without indentation."""

    name: str
    module: str
    function: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Changes that no fast test need see: all of a function, or those whose "old => new" has a pattern."""

    module: str
    reason: str
    function: str | None = None
    pattern: str | None = None

    def covers(self, mutant: Mutant) -> bool:
        return (
            fnmatch.fnmatch(mutant.module, self.module)
            and (self.function is None or self.function == mutant.function)
            and (self.pattern is None or re.search(self.pattern, f"{mutant.old} => {mutant.new}") is not None)
        )


def read_acceptances(path: Path) -> list[Acceptance]:
    """What the file accepts.

    Raises:
        ValueError: an entry would accept a whole module.
    """
    entries = [Acceptance(**entry) for entry in tomllib.loads(path.read_text())["accepted"]]
    for entry in entries:
        if entry.function is None and entry.pattern is None:
            raise ValueError(f"{path}: {entry}: must name a function or a pattern")
    return entries


def mutants_of(module: str) -> list[Mutant]:
    """Every change that mutmut makes to a module."""
    made = mutate_file_contents(module, Path(module).read_text())
    lines = made.code.splitlines()

    def body(function: str) -> list[str]:
        span = made.line_span_by_function_name[function]
        # The name of the changed copy is no change.
        return [re.sub(r"__mutmut_\w+", "", line.strip()) for line in lines[span.start - 1 : span.end]]

    found = []
    for function in made.mutant_names:
        mangled = mangled_name_from_mutant_name(function)
        if module in FUNCTIONS and mangled not in FUNCTIONS[module]:
            continue
        difference = difflib.ndiff(body(f"{mangled}__mutmut_orig"), body(function))
        changed = [line for line in difference if line.startswith(("- ", "+ "))]
        found.append(
            Mutant(
                name=get_mutant_name(Path(module), function),
                module=module,
                function=mangled.removeprefix("x_").removeprefix("xǁ").replace("ǁ", "."),
                old=" ".join(line[2:] for line in changed if line.startswith("- ")),
                new=" ".join(line[2:] for line in changed if line.startswith("+ ")),
            )
        )
    return found


def idle(acceptances: Sequence[Acceptance], mutants: Mapping[str, Sequence[Mutant]]) -> list[Acceptance]:
    """What is accepted of modules but fits none of their changes, which are given by module."""
    every = [mutant for of_module in mutants.values() for mutant in of_module]
    named = (one for one in acceptances if fnmatch.filter(mutants, one.module))
    return [one for one in named if not any(map(one.covers, every))]


def run_mutmut(mutants: Sequence[Mutant], jobs: int) -> dict[str, Fate]:
    """What became of each change, by name; from a clean start, so that nothing old is believed."""
    shutil.rmtree(WORK, ignore_errors=True)
    names = [mutant.name for mutant in mutants]
    mutmut = Path(sys.executable).with_name("mutmut")
    finished = subprocess.run([mutmut, "run", "--max-children", str(jobs), *names], check=False)
    if finished.returncode:
        raise SystemExit(f"mutmut ended with exit code {finished.returncode}")
    codes: dict[str, int | None] = {}
    for module in {mutant.module for mutant in mutants}:
        codes |= json.loads((WORK / f"{module}.meta").read_text())["exit_code_by_key"]
    return {name: FATES.get(codes[name], Fate.OTHER) for name in names}


def table(mutants: Sequence[Mutant], fates: Mapping[str, Fate], totals: Mapping[str, Counter[str]]) -> str:
    """In Markdown: one line a module, and the sums."""
    rows = []
    sums: Counter[str] = Counter()
    for module, total in totals.items():
        counts = Counter(fates[mutant.name].value for mutant in mutants if mutant.module == module) + total
        sums += counts
        rows.append((module, counts))
    columns = ("mutants", "accepted", "run", *(fate.value for fate in Fate))
    head = [f"| module | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    body = [
        f"| {name} | {' | '.join(str(counts[column]) for column in columns)} |"
        for name, counts in (*rows, ("**all**", sums))
    ]
    return "\n".join([*head, *body])


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=40, help="changes tried of each module (default 40)")
    parser.add_argument("--all", action="store_true", help="try every change")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", action="append", default=[], help="modules, by pattern; may be repeated")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--table", type=Path, help="file to write the table to")
    arguments = parser.parse_args()

    acceptances = read_acceptances(ACCEPTED)
    section = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["mutmut"]
    patterns = arguments.only or ["*"]
    modules = [m for m in section["only_mutate"] if any(fnmatch.fnmatch(m, p) for p in patterns)]
    mutants = {module: mutants_of(module) for module in modules}
    if stale := idle(acceptances, mutants):
        print("\n".join(f"accepted.toml: nothing is like this: {one}" for one in stale))
        return 1
    chosen: list[Mutant] = []
    totals: dict[str, Counter[str]] = {}
    for module, every in mutants.items():
        open_ones = [mutant for mutant in every if not any(one.covers(mutant) for one in acceptances)]
        count = len(open_ones) if arguments.all else min(arguments.sample, len(open_ones))
        picked = random.Random(f"{arguments.seed}:{module}").sample(open_ones, count)
        chosen += picked
        totals[module] = Counter(
            {"mutants": len(every), "accepted": len(every) - len(open_ones), "run": len(picked)}
        )
    fates = run_mutmut(chosen, arguments.jobs)

    unseen = [mutant for mutant in chosen if fates[mutant.name] in UNSEEN]
    for mutant in unseen:
        print(f"\n{fates[mutant.name].value}: {mutant.module} {mutant.function}")
        print(f"- {mutant.old}\n+ {mutant.new}")
    text = table(chosen, fates, totals)
    print(f"\n{text}\n\n{len(chosen) - len(unseen)} of {len(chosen)} changes were seen.")
    if arguments.table is not None:
        arguments.table.write_text(text + "\n")
    return int(bool(unseen))


if __name__ == "__main__":
    sys.exit(main())
