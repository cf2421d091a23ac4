"""Processes that start warm are what the same program would be, and end with whoever wants them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.app_runs import REPOSITORY, session_processes
from tests.support.processes import wait_until_gone
from tests.support.warm_python import REAL_PYTHON, wait_until_imported, warm_python
from tests.support.warm_python.executable import PROC, PROGRAM

pytestmark = pytest.mark.processes

MARK = "0123456789abcdef" * 2


def start(
    *arguments: str, python: str | None = None, folder: Path = REPOSITORY, **options: Any
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [warm_python() if python is None else python, "-m", PROGRAM, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        **options,
    )


def facts_of(process: "subprocess.Popen[str]", word: str = "") -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def waiting(**options: Any) -> "tuple[subprocess.Popen[str], int]":
    """A process that waits, and the process id of its fork."""
    process = start("wait", **options)
    pid = facts_of(process)["pid"]
    assert process.stdout is not None and process.stdout.readline() == "waits\n"
    return process, pid


def test_a_fork_is_what_the_program_would_be() -> None:
    variables = os.environ | {"FORGEASYNC_TEST": "ä"}
    facts, ends = [], []
    for python in (warm_python(), REAL_PYTHON):
        process = start("exit", "3", "x y", python=python, env=variables)
        facts.append(facts_of(process, "said"))
        ends.append((process.communicate()[1], process.returncode))
    warm, plain = facts
    assert warm["has_torch"] and not plain["has_torch"]
    own = {"pid", "has_torch", "drawn"}
    assert {name: warm[name] for name in warm if name not in own} == {
        name: plain[name] for name in plain if name not in own
    }
    assert ends[0] == ends[1] == ("to stderr\n", 3)


def test_forks_draw_other_numbers_and_find_other_folders_and_modules(tmp_path: Path) -> None:
    (tmp_path / "tests").symlink_to(REPOSITORY / "tests")
    first, second = (facts_of(start("exit", "0", folder=folder)) for folder in (tmp_path, REPOSITORY))
    assert first["drawn"] != second["drawn"]
    assert first["folder"] == first["search_path"] == str(tmp_path)
    (tmp_path / "sitecustomize.py").write_text("print('customized', flush=True)\n")
    process = start("exit", "0", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert process.communicate("\n")[0].startswith("customized\n")


def test_a_fork_does_at_its_end_what_was_registered_and_takes_nothing_apart() -> None:
    process = start("at_exit")
    out, _ = process.communicate("\n")
    assert process.returncode == 0
    # A program of its own would say "collected" too.
    assert out.splitlines()[1:] == ["thread ended", "at exit"]


def test_inherited_descriptors_have_the_same_numbers() -> None:
    reading, writing = os.pipe()
    process = start("write", str(writing), pass_fds=[writing])
    os.close(writing)
    process.communicate("\n")
    assert os.read(reading, 100) == b"kept" and os.read(reading, 100) == b""
    os.close(reading)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["at_work", "stopped"])
def test_a_fork_ends_with_the_started_process(is_stopped: bool) -> None:
    process, pid = waiting()
    assert pid != process.pid
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    wait_until_gone(pid)


def test_a_proc_ends_with_the_process_that_has_started_it(tmp_path: Path) -> None:
    """The proc comes from the server, whose end tells it nothing."""
    wait_until_imported("torchtitan")
    # In the place of Monarch, which waits for whoever has started it.
    folder = tmp_path / "monarch" / "_src" / "actor"
    folder.mkdir(parents=True)
    text = "import os, time\nprint(os.getpid(), os.getppid(), flush=True)\ntime.sleep(600)\n"
    (folder / "bootstrap_main.py").write_text(text)
    for package in (folder, *folder.parents[:2]):
        (package / "__init__.py").touch()
    variables = {"PYTHONPATH": str(tmp_path), "HYPERACTOR_PROCESS_NAME": "trainer-0", "FORGEASYNC_GPUS": ""}
    program = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    parent = subprocess.Popen(
        [sys.executable, "-c", program, warm_python(), "-m", PROC],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
        cwd=REPOSITORY,
    )
    assert parent.stdout is not None
    pid, told = map(int, parent.stdout.readline().split())
    assert told == parent.pid
    parent.kill()
    parent.wait()
    wait_until_gone(pid)


def test_a_session_has_its_forks_and_what_they_have_started() -> None:
    process = start("starts", start_new_session=True)
    facts = facts_of(process)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert {one.pid for one in session_processes(process.pid)} == {process.pid, facts["pid"], child}
    process.kill()
    process.wait()
    wait_until_gone(facts["pid"])
    assert {one.pid for one in session_processes(process.pid)} == {child}, "also when its parents are gone"
    os.kill(child, signal.SIGKILL)


def test_anything_else_is_run_by_the_real_python() -> None:
    code = "import sys; print(sys.executable, 'torch' in sys.modules)"
    done = subprocess.run([warm_python(), "-P", "-c", code], capture_output=True, text=True, check=True)
    found, has_torch = done.stdout.split()
    assert Path(found).parent.parent == Path(sys.prefix) and has_torch == "False"
