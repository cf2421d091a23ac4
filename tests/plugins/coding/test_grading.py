"""A coding task solved by a scripted model, honestly and otherwise."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import forgeasync as fa
from forgeasync.environments import ContextFull, Turn
from forgeasync.plugins.coding import Attempt, CodingAgent, CodingEnvironment, Refusal
from forgeasync.testing import ScriptedAgent, scripted_turn
from tests.support.repositories import RIGHT, WRONG, calls, script, task_of

RUNNERS = ("pytest", "unittest")
PRICES = "shop/prices.py"

Attempted = Callable[..., Attempt]


@pytest.fixture
def attempt(folder: Path, record: Callable[[str], dict[str, Any]]) -> Attempted:
    def run(
        runner: str, turns: Sequence[Turn], changed: dict[str, Any] | None = None, **options: Any
    ) -> Attempt:
        section = CodingAgent(kind="coding", **{"tests_s": 120.0, **options})
        # Plugins of pytest that the machine happens to have take their time.
        sandbox = fa.Bubblewrap(env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
        environment = CodingEnvironment(section, sandbox)
        task = task_of(record(runner) | (changed or {}), folder)
        return asyncio.run(environment.attempt(task, ScriptedAgent(*turns)))

    return run


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_right_patch_scores_one(attempt: Attempted, runner: str) -> None:
    edit = {"path": PRICES, "old": "numbers[1:]", "new": "numbers"}
    done = attempt(runner, [calls(("view", {"path": PRICES})), calls(("edit", edit), ("submit", {}))])
    assert done.score.value == 1.0 and done.score.is_correct, done.test_log
    all_passed = {"has_changes": 1.0, "fail_to_pass": 1.0, "pass_to_pass": 1.0}
    assert done.score.parts == all_passed | {"num_refused_changes": 0.0, "num_tampered": 0.0}
    assert f"--- a/{PRICES}\n+++ b/{PRICES}\n" in done.patch
    assert "-    for number in numbers[1:]:\n+    for number in numbers:\n" in done.patch
    assert "3 of 3 passed" in done.test_log
    assert done.artifacts == {"changes.patch": done.patch, "tests.log": done.test_log}


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_wrong_patch_scores_zero_and_shares_of_tests_are_told(attempt: Attempted, runner: str) -> None:
    wrong = attempt(runner, script(writes=[(PRICES, WRONG.replace("[1:]", "[:-1]"))])).score
    assert (wrong.value, wrong.is_correct) == (0.0, False)
    assert (wrong.parts["fail_to_pass"], wrong.parts["pass_to_pass"]) == (0.0, 1.0)
    half = WRONG.replace("numbers[1:]", "numbers if len(numbers) > 1 else numbers[1:]")
    half_right = attempt(runner, script(writes=[(PRICES, half)])).score
    assert (half_right.value, half_right.parts["fail_to_pass"]) == (0.0, 0.5)


def test_nothing_changed_runs_no_tests(attempt: Attempted) -> None:
    done = attempt("unittest", [scripted_turn("I give up")])
    assert done.score.value == 0.0 and not done.score.has_answer
    assert done.score.parts == {"has_changes": 0.0, "num_refused_changes": 0.0, "num_tampered": 0.0}


_PASSES = "import unittest\nclass TestTotal(unittest.TestCase):\n    def test_nothing(self):\n        pass\n"
_ALL_PASS = _PASSES + "    test_all_count = test_one = test_nothing\n"
_PATCHED_CONFTEST = "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n"


@pytest.mark.parametrize(
    ("runner", "commands", "writes"),
    [
        ("unittest", (), [("tests/test_prices.py", _ALL_PASS)]),
        ("pytest", (), [("tests/test_prices.py", "def test_nothing(): pass\n")]),
        ("pytest", ("rm -r tests",), []),
        ("pytest", ("rm -r tests; ln -s shop tests",), []),
        ("pytest", ("rm -r tests; echo > tests",), []),
        ("pytest", (), [("conftest.py", _PATCHED_CONFTEST), ("shop/conftest.py", _PATCHED_CONFTEST)]),
        ("pytest", (), [("pytest.ini", "[pytest]\naddopts = --collect-only\n")]),
        ("unittest", (), [("sitecustomize.py", "import os; os._exit(0)\n"), ("shop/x.pth", "import os\n")]),
    ],
    ids=["unittest", "pytest", "deleted", "link", "file", "conftest", "settings", "sitecustomize"],
)
def test_tampering_is_undone(attempt: Attempted, runner: str, commands, writes) -> None:
    """Tests run as the record has them, whatever else the model has changed."""
    done = attempt(runner, script(*commands, writes=[*writes, ("shop/added.py", "")]))
    assert done.score.value == 0.0 and done.score.parts["fail_to_pass"] == 0.0
    assert done.score.parts["pass_to_pass"] == 1.0, done.test_log
    assert done.score.parts["num_tampered"] >= 1.0
    assert "# not judged (protected): " in done.patch


def test_a_solution_that_changes_tests_too_is_judged_without_that(attempt: Attempted) -> None:
    done = attempt("unittest", script(writes=[("tests/test_prices.py", _PASSES), (PRICES, RIGHT)]))
    assert done.score.value == 1.0 and done.score.parts["num_tampered"] == 1.0, done.test_log


_FORGED = """
import os
TESTS = ["tests.test_prices.TestTotal." + name for name in ("test_nothing", "test_all_count", "test_one")]
TESTS += ["tests/test_prices.py::" + name
          for name in ("test_nothing", "test_all_count[two]", "test_all_count[one]")]
for channel in range(1, 64):
    for nonce in ("", "0" * 32, os.environ.get("NONCE", "")):
        for test in TESTS:
            line = '\\n%s {"test": "%s", "outcome": "passed", "replaced": null}\\n' % (nonce, test)
            try:
                os.write(channel, line.encode())
                os.write(channel, ('\\n%s {"end": true, "status": 0, "replaced": null}\\n' % nonce).encode())
            except OSError:
                pass
os._exit(0)
"""

_HOSTILE = {
    "exit": "raise SystemExit(0)\n",
    "exit when called": "import sys\ndef total(numbers):\n    sys.exit(0)\n",
    "end of the process": "import os\nos._exit(0)\n",
    "end when called": "import os\ndef total(numbers):\n    os._exit(0)\n",
    "forged report": _FORGED,
    "forged when called": "def total(numbers):\n" + "".join(f"    {one}\n" for one in _FORGED.split("\n")),
    "skipped": "import unittest\ndef total(numbers):\n    raise unittest.SkipTest('no')\n",
    "assertions replaced": "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n" + WRONG,
    "code replaced": (
        "import unittest\ndef ignore(self, first, second, msg=None):\n    pass\n"
        "unittest.TestCase.assertEqual.__code__ = ignore.__code__\n" + WRONG
    ),
    "run replaced": (
        "import unittest\ndef run(self, result=None):\n    result.startTest(self)\n"
        "    result.addSuccess(self)\nunittest.TestCase.run = run\n" + WRONG
    ),
    "module replaced": "import sys, types\nsys.modules['unittest'] = types.ModuleType('unittest')\n" + WRONG,
    "tests rewritten": (
        "import pathlib\npathlib.Path(__file__).parents[1].joinpath('tests/test_prices.py')"
        f".write_text({_ALL_PASS!r})\n" + WRONG
    ),
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "memory": "x = [bytearray(2**26) for _ in range(10**4)]\n",
    "end of the process at the end": "import atexit, os\natexit.register(os._exit, 0)\n" + WRONG,
}
_WHEN_CALLED = ("exit when called", "end when called", "forged when called")
_PYTEST_HOSTILE = {
    **{name: _HOSTILE[name] for name in ("exit", *_WHEN_CALLED)},
    "skipped": "import pytest\ndef total(numbers):\n    pytest.skip('no')\n",
    "expected": "import pytest\ndef total(numbers):\n    pytest.xfail('no')\n",
    "left": "import pytest\ndef total(numbers):\n    pytest.exit('no', returncode=0)\n",
    "run replaced": "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n" + WRONG,
    "reports replaced": (
        "import _pytest.reports\nmade = _pytest.reports.TestReport.from_item_and_call\n"
        "def passed(item, call):\n    call.excinfo = None\n    return made(item, call)\n"
        "_pytest.reports.TestReport.from_item_and_call = passed\n" + WRONG
    ),
}


_MORE = {
    "unittest": (*_WHEN_CALLED, "end of the process at the end"),
    "pytest": ("exit", "expected", "skipped"),
}
"""What differs from another case in little."""


@pytest.mark.parametrize(
    ("runner", "name"),
    [
        pytest.param(runner, name, marks=pytest.mark.exhaustive if name in _MORE[runner] else ())
        for runner, solutions in (("unittest", _HOSTILE), ("pytest", _PYTEST_HOSTILE))
        for name in solutions
    ],
)
def test_a_hostile_solution_scores_zero(attempt: Attempted, runner: str, name: str) -> None:
    solution = (_HOSTILE if runner == "unittest" else _PYTEST_HOSTILE)[name]
    done = attempt(runner, script(writes=[(PRICES, solution)]))
    assert done.score.value == 0.0 and done.score.parts["fail_to_pass"] == 0.0, done.test_log


def test_modules_of_python_and_of_the_runner_cannot_be_hidden(attempt: Attempted) -> None:
    passes = "class TestCase:\n    pass\n"
    hidden = [("unittest.py", passes), ("unittest/__init__.py", passes), ("json.py", ""), ("pytest/a.py", "")]
    done = attempt("unittest", script("rm unittest.py", writes=[*hidden, ("shop/json.py", "")]))
    found = {path for path, why in done.changes.refused.items() if why is Refusal.HIDES_MODULE}
    assert found == {"unittest/__init__.py", "json.py", "pytest/a.py"}
    assert set(done.changes.files) == {"shop/json.py"} and done.score.parts["pass_to_pass"] == 1.0


def test_an_endless_solution_ends_at_the_deadline(attempt: Attempted) -> None:
    done = attempt("unittest", script(writes=[(PRICES, "while True:\n    pass\n")]), tests_s=0.2)
    assert done.score.value == 0.0 and "environment.tests_s had passed" in done.test_log


def test_a_flood_of_output_is_cut(attempt: Attempted) -> None:
    solution = "for _ in range(9):\n    print('x' * 10**6)\n"
    done = attempt("unittest", script(writes=[(PRICES, solution)]))
    assert done.score.value == 0.0 and len(done.test_log) < 2**20 + 100
    assert done.test_log.endswith(" more characters were cut]\n")


def test_huge_changes_are_not_judged(attempt: Attempted) -> None:
    many = "for i in $(seq 300); do echo $i > shop/f$i.txt; done"
    for command in ("head -c 2000000 /dev/zero | tr '\\0' x > big.txt", many):
        done = attempt("unittest", script(command, writes=[(PRICES, RIGHT)]))
        assert done.score.value == 0.0 and done.score.parts["has_changes"] == 0.0
        assert "max_patch_kib = 1024 or max_changed_files = 200" in done.test_log


def test_what_is_no_text_does_not_count(attempt: Attempted) -> None:
    commands = [
        "ln -s /etc/passwd shop/passwd; ln -s ../../outside shop/outside; mkfifo shop/pipe",
        "printf 'a\\0b' > shop/logo.bin; printf '\\377' > shop/bytes.txt",
        "ln -sf __init__.py shop/current; touch \"$(printf 'shop/new\\nline')\"",
        "mkdir -p shop/__pycache__ .git; echo x > shop/__pycache__/a.pyc; echo x > .git/config",
    ]
    done = attempt("unittest", script(*commands, writes=[(PRICES, RIGHT)]))
    assert done.score.value == 1.0, done.test_log
    links = ("shop/passwd", "shop/outside", "shop/pipe", "shop/current")
    binary = ("shop/logo.bin", "shop/bytes.txt")
    refused = dict.fromkeys(links, Refusal.LINK) | dict.fromkeys(binary, Refusal.BINARY)
    assert dict(done.changes.refused) == refused | {"shop/new\nline": Refusal.NAME}
    assert done.score.parts["num_refused_changes"] == 7.0 and done.score.parts["num_tampered"] == 0.0
    assert "root:" not in done.patch


def test_everything_deleted_scores_zero(attempt: Attempted) -> None:
    done = attempt("unittest", script("rm -rf /work/* /work/.[a-z]*"))
    assert done.score.value == 0.0 and done.score.parts["has_changes"] == 1.0
    assert "deleted file mode" in done.patch
    assert set(done.changes.deleted) >= {PRICES, "README.md", "shop/__init__.py"}


def test_a_box_that_the_model_has_ended_scores_zero(attempt: Attempted) -> None:
    turns = script("head -c 100000000 /dev/zero > full; kill -9 -1", writes=[(PRICES, RIGHT)])
    full = attempt("unittest", script("head -c 900000000 /dev/zero > full", writes=[(PRICES, RIGHT)]))
    assert full.score.value == 0.0 and full.changes.problem is not None
    assert attempt("unittest", turns).score.value == 0.0


def test_what_was_done_when_turns_or_context_end_is_judged(attempt: Attempted, monkeypatch) -> None:
    write = calls(("write", {"path": PRICES, "content": RIGHT}))
    assert attempt("unittest", [write], max_rounds=1).score.value == 1.0
    respond = ScriptedAgent.respond

    async def full(agent: ScriptedAgent, *given: Any, **options: Any) -> Turn:
        if agent.heard:
            raise ContextFull("full")
        return await respond(agent, *given, **options)

    monkeypatch.setattr(ScriptedAgent, "respond", full)
    assert attempt("unittest", [write]).score.value == 1.0
