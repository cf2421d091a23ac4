"""Records of coding tasks: what a source makes of a file, and what it refuses."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forgeasync.plugins.coding import CodingProblems, CodingSource, hidden_tests, is_protected, read_record
from forgeasync.schema import ConfigError
from tests.support.repositories import patch_of

CaptureSpec = Callable[[str], dict[str, Any]]


def problems(folder: Path, records: list[dict[str, Any]], name: str, **numbers: int) -> CodingProblems:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    source = CodingSource(kind="coding", path=str(path))
    return CodingProblems(source, **{"num_train": 1, "num_held_out": 1, "seed": 0, **numbers})


def test_a_file_becomes_tasks_that_find_their_checkouts(folder: Path, record: CaptureSpec) -> None:
    records = [record("pytest"), record("unittest")]
    issues = ({"instance_id": f"shop-{i}", "problem_statement": f"issue {i}"} for i in range(8))
    records += [record("unittest") | one for one in issues]
    found = problems(folder, records, "all", num_train=6, num_held_out=3)
    held_out = found.held_out()
    train = found.train({task.prompt for task in held_out})
    assert len(held_out) == 3 and len(train) == 6
    assert not {task.prompt for task in held_out} & {task.prompt for task in train}
    again = problems(folder, records, "all", num_train=6, num_held_out=3, seed=1)
    assert again.held_out() == held_out and list(again.train({held_out[0].prompt})) != list(train)
    other_order = problems(folder, records[::-1], "reversed", num_train=6, num_held_out=3).held_out()
    assert [task.task_id for task in other_order] == [task.task_id for task in held_out]
    for task in (*held_out, *train):
        read = read_record(task.record, Path("/"))
        assert read.checkout.is_absolute() and (read.checkout / "shop").is_dir()
        assert task.task_id == read.instance_id and task.record["repo"] == "people/shop"


def test_held_out_texts_are_not_trained_on(folder: Path, record: CaptureSpec) -> None:
    twice = [record("unittest"), record("unittest") | {"instance_id": "other"}]
    found = problems(folder, twice, "twice")
    with pytest.raises(ConfigError, match=r"data.num_train = 1: .* gave only 0"):
        found.train({task.prompt for task in found.held_out()})


def test_hidden_tests_are_what_the_patch_makes_of_the_checkout(folder: Path, record: CaptureSpec) -> None:
    raw = record("unittest")
    raw["test_patch"] += (
        "diff --git a/README.md b/docs/README.md\nsimilarity index 100%\n"
        "rename from README.md\nrename to docs/README.md\n"
        "diff --git a/tests/new file.txt b/tests/new file.txt\nnew file mode 100644\n--- /dev/null\n"
        "+++ b/tests/new file.txt\t\n@@ -0,0 +1 @@\n+one\n"
        "diff --git a/shop/__init__.py b/shop/__init__.py\ndeleted file mode 100644\n"
    )
    tests = hidden_tests(read_record(raw, folder))
    assert set(tests.files) == {"tests/test_prices.py", "docs/README.md", "tests/new file.txt"}
    assert tests.files["tests/new file.txt"] == b"one\n" and tests.files["docs/README.md"] == b"A shop.\n"
    assert b"test_all_count" in tests.files["tests/test_prices.py"]
    assert set(tests.deleted) == {"README.md", "shop/__init__.py"}
    assert (folder / raw["checkout"] / "README.md").exists()


def test_files_of_listed_tests_are_protected(folder: Path, record: CaptureSpec) -> None:
    """Also where their names do not look like tests and the patch does not change them."""
    raw = record("unittest")
    raw["PASS_TO_PASS"] = ["shop.prices.TestOfItself.test_all"]
    assert {"shop/prices.py", "shop/prices/__init__.py"} <= hidden_tests(read_record(raw, folder)).paths
    assert "shop/prices.py" not in hidden_tests(read_record(record("unittest"), folder)).paths


TEST_ONE = "tests.test_prices.TestTotal.test_one"
LINK_OUT = (
    "diff --git a/tests/link b/tests/link\nnew file mode 120000\n--- /dev/null\n+++ b/tests/link\n"
    "@@ -0,0 +1 @@\n+/etc/hostname\n\\ No newline at end of file\n"
)
"""What it leads to is a file of the host."""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"instance_id": None}, "instance_id is None; must be a text"),
        ({"FAIL_TO_PASS": "tests.a.B.c"}, "FAIL_TO_PASS is 'tests.a.B.c'; must be a list of texts"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS is empty"),
        ({"FAIL_TO_PASS": ["test_one"]}, "'test_one'; must read like 'tests.test_sum.TestSum.test_two'"),
        ({"PASS_TO_PASS": [TEST_ONE]}, "is in FAIL_TO_PASS and in PASS_TO_PASS"),
        ({"PASS_TO_PASS": ["tests.none.Test.one"]}, "'tests.none.Test.one' is in no file of the checkout"),
        ({"runner": "nose"}, "runner is 'nose'; must be one of pytest, unittest"),
        ({"runner": "pytest"}, "must read like 'tests/test_sum.py::test_two'"),
        ({"checkout": "nowhere"}, "nowhere': there is no such folder"),
        ({"protected": ["../x"]}, "protected has '../x'; must be a path relative to the repository"),
        ({"test_patch": "no patch"}, "test_patch does not apply to the checkout: error"),
        ({"test_patch": patch_of("../x", "", "x\n")}, "test_patch"),
        ({"test_patch": patch_of("shop/current", "a\n", "x\n")}, "which is or lies behind a symbolic link"),
        ({"test_patch": LINK_OUT}, "test_patch makes a symbolic link of 'tests/link'; must make files only"),
        ({"problem_statement": "half \ud800"}, "problem_statement is 'half \\ud800'; has a lone surrogate"),
        ({"FAIL_TO_PASS": "[" * 100_000}, "; must be a list of texts, or one as JSON"),
        ({"checkout": "."}, "has the file of records in it, with the hidden tests"),
    ],
)
def test_a_wrong_record_is_refused_with_its_line(folder: Path, record: CaptureSpec, changed, message) -> None:
    with pytest.raises(ConfigError) as refused:
        problems(folder, [record("pytest"), record("unittest") | changed], "wrong")
    text = str(refused.value)
    assert "data.source.path = " in text and "line 2: " in text and message in text


def test_a_checkout_with_history_or_pipe_is_refused(
    folder: Path, record: CaptureSpec, tmp_path: Path
) -> None:
    (tmp_path / ".git").mkdir()
    with pytest.raises(ConfigError, match=r"has \.git, whose history can hold the solution"):
        problems(folder, [record("unittest") | {"checkout": str(tmp_path)}], "history")
    # Reading a pipe would last for ever.
    shutil.copytree(folder / record("unittest")["checkout"], tmp_path / "shop", symlinks=True)
    os.mkfifo(tmp_path / "shop" / "tests" / "pipe")
    with pytest.raises(ConfigError, match="'tests/pipe' is a pipe, a socket or a device; must have files"):
        problems(folder, [record("unittest") | {"checkout": str(tmp_path / "shop")}], "pipe")


def test_an_id_twice_and_a_missing_file_are_refused(folder: Path, record: CaptureSpec) -> None:
    with pytest.raises(ConfigError, match="line 2: line 1 has instance_id 'shop-unittest' too"):
        problems(folder, [record("unittest")] * 2, "ids")
    with pytest.raises(ConfigError, match="there is no such file"):
        source = CodingSource(kind="coding", path=str(folder / "none"))
        CodingProblems(source, num_train=1, num_held_out=1, seed=0)


def test_what_is_protected() -> None:
    paths = ["shop/prices.py", "shop/testing/tools.py", "shop/test/case.py", "shop/contest.py", "setup.py"]
    protected = ["test/case.py", "shop/tests/tools.py", "tests", "shop/test_prices.py", "shop/prices_test.py"]
    protected += ["deep/down/conftest.py", "pyproject.toml", "evil.pth", "evil.egg-info/entry_points.txt"]
    protected += ["data/numbers.json", "data", "spec/a/b.py"]
    hidden = frozenset({"data/numbers.json"})
    found = [path for path in paths + protected if is_protected(path, hidden=hidden, patterns=("spec",))]
    assert found == protected
