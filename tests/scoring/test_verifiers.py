"""Processes that verify answers: hostile ones reach nothing, and nothing of one answer reaches the next."""

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from forgeasync.config import ReasoningGymSource, ScorerSection
from forgeasync.environments import ReasoningGymProblems
from forgeasync.isolation import (
    ContainedProcess,
    FoundBubblewrap,
    find_bubblewrap,
    landlock_version,
    python_command,
    python_environment,
)
from forgeasync.processes import is_running
from forgeasync.rollouts import Score, Task
from forgeasync.scoring import (
    MAX_ANSWER_BYTES,
    MAX_ANSWERS,
    GymVerifierChoice,
    MathVerifierChoice,
    ProblemDiffers,
    VerifierFailure,
    VerifierPool,
    plain_bytes,
)
from tests.support.hostile_answers import hostile_answers
from tests.support.processes import wait_until_gone

# Workers are processes of their own.
pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).parents[2]
RIGHT = Score(value=1.0, is_correct=True)
WRONG = Score(value=0.0, is_correct=False)
HALF = {"value": 0.5, "is_correct": False, "has_answer": True}
NOTHING = {"value": 0.0, "is_correct": False, "has_answer": True}
FOUR = Task(task_id="four", prompt="", answer="4", source_index=0, source="s")
WEAKER = ScorerSection(num_workers=1, allow_weaker_isolation=True)
NO_BUBBLEWRAP = FoundBubblewrap(path=None, problem="the test wants none")

both_isolations = pytest.mark.parametrize(
    "bubblewrap", [pytest.param(find_bubblewrap(), id="bubblewrap"), pytest.param(NO_BUBBLEWRAP, id="none")]
)


def gym_choice(task: str) -> GymVerifierChoice:
    source = ReasoningGymSource(kind="reasoning_gym", task=task)
    return GymVerifierChoice(source=source, num_train=2, num_held_out=2, seed=3)


def gym_tasks(choice: GymVerifierChoice) -> list[tuple[Task, str]]:
    """All tasks that are trained on, with their answers."""
    problems = ReasoningGymProblems(choice.source, num_train=choice.num_train, num_held_out=2, seed=3)
    return [(task, task.answer) for task in itertools.islice(problems.candidates(held_out=False), 2)]


@pytest.fixture
def patient() -> Iterator[VerifierPool]:
    pool = VerifierPool(MathVerifierChoice(), ScorerSection(num_workers=1))
    yield pool
    pool.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def assert_nothing_happened(folder: Path, listener: socket.socket) -> None:
    assert list(folder.iterdir()) == []
    with pytest.raises(BlockingIOError):
        listener.accept()
    # A process that an answer starts is called like the folder.
    running = [one.info["cmdline"] or [""] for one in psutil.process_iter(["cmdline"])]
    assert str(folder) not in [command[0] for command in running]


@pytest.mark.exhaustive
def test_hostile_answers_to_every_data_set_have_no_effect(tmp_path: Path, listener: socket.socket) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.hostile_answers", str(folder), str(listener.getsockname()[1])],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report = json.loads(ran.stdout.splitlines()[-1])
    assert_nothing_happened(folder, listener)
    assert report["num_data_sets"] > 100
    # Reference answers scored the same before and after all of it.
    assert report["reference_failed"] == []
    became = report["became"]
    assert sum(became.values()) == report["num_data_sets"] * report["num_answers"]
    assert became.keys() <= {"value", "timeout", "crash", "error"}
    # Those that evaluate answers would otherwise go on for ever.
    for name in ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"):
        assert f"{name}: endless" in report["cut_off"]
    # This one takes whatever is not "True" for "False", which is right here.
    assert {one.partition(":")[0] for one in report["solved"]} <= {"game_of_life_halting"}


@both_isolations
@pytest.mark.parametrize("task", ["spiral_matrix", "countdown"])
def test_a_pool_survives_hostile_answers(
    tmp_path: Path, listener: socket.socket, task: str, bubblewrap: FoundBubblewrap
) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    choice = gym_choice(task)
    problem, reference = gym_tasks(choice)[1]
    section = ScorerSection(
        num_workers=1,
        answer_limit_s=2.0,
        answer_memory_mib=256,
        allow_weaker_isolation=bubblewrap.path is None,
    )
    pool = VerifierPool(choice, section, bubblewrap=bubblewrap)
    description = pool.start()
    assert ("no bubblewrap: the test wants none" in description) == (bubblewrap.path is None)
    (pid,) = pool.pids
    for kind, answer in hostile_answers(folder, listener.getsockname()[1]).items():
        assert not pool.score(problem, answer).is_correct, kind
    assert pool.score(problem, reference) == RIGHT
    assert pool.counts["scoring/num_timeouts"] >= 1
    assert pool.pids == (pid,), "answers die, their process is reused"
    left = [one for one in psutil.Process(pid).children(recursive=True) if is_running(one.pid)]
    pool.close()
    assert len(left) <= 3, f"bubblewrap's second process, the worker and one fork: {left}"
    assert_nothing_happened(folder, listener)


class TestLimits:
    def test_an_oversized_answer_is_refused_unread_and_the_longest_is_read(
        self, patient: VerifierPool
    ) -> None:
        for answer in (
            "4" * 10 * 2**20,
            "é" * (MAX_ANSWER_BYTES // 2 + 1),
            "\ud800" * (MAX_ANSWER_BYTES + 1),
        ):
            assert patient.score(FOUR, answer) == WRONG
        assert patient.counts == Counter({"scoring/num_oversized": 3})
        assert patient.pids == (), "no process was asked"
        answer = r"\boxed{4}"
        assert patient.score(FOUR, " " * (MAX_ANSWER_BYTES - len(answer)) + answer) == RIGHT
        assert patient.counts == Counter({"scoring/num_oversized": 3})

    def test_memory_is_limited_and_what_ends_of_it_scores_zero(self) -> None:
        choice = gym_choice("spiral_matrix")
        problem, reference = gym_tasks(choice)[1]
        # The time for it is ample: memory is what ends it.
        section = ScorerSection(num_workers=1, answer_limit_s=300.0, answer_memory_mib=64)
        pool = VerifierPool(choice, section)
        grows = "[x for a in [[]] for i in iter(int, 1) for x in [a.append([i] * 1000)]]"
        assert not pool.score(problem, grows).is_correct
        assert pool.counts["scoring/num_timeouts"] == 0
        assert pool.score(problem, reference) == RIGHT
        pool.close()

    @pytest.mark.exhaustive
    def test_start_up_does_not_count_against_the_limit(self) -> None:
        # Importing sympy alone takes longer than this limit.
        pool = VerifierPool(MathVerifierChoice(), ScorerSection(num_workers=1, answer_limit_s=0.25))
        assert pool.score(FOUR, "4") == RIGHT
        pool.close()


class TestProcess:
    def test_another_problem_than_the_one_sampled_for_is_an_error(self) -> None:
        choice = gym_choice("chain_sum")
        problem, answer = gym_tasks(choice)[1]
        pool = VerifierPool(choice, ScorerSection(num_workers=1))
        other = dataclasses.replace(problem, prompt=problem.prompt + " ")
        with pytest.raises(
            ProblemDiffers, match=r"data\.source\.task.*another problem than task 'chain_sum/.*/1'"
        ):
            pool.score(other, answer)
        assert pool.score(problem, answer) == RIGHT
        with pytest.raises(ProblemDiffers):
            pool.score(other, answer)
        pool.close()

    def test_an_impossible_choice_names_the_config_field(self) -> None:
        pool = VerifierPool(gym_choice("chain_sums"), ScorerSection(num_workers=1))
        with pytest.raises(ValueError, match=r"data\.source\.task.*'chain_sums'"):
            pool.start()

    def test_a_process_that_cannot_start_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = VerifierPool(MathVerifierChoice(), WEAKER, bubblewrap=NO_BUBBLEWRAP)
        monkeypatch.setattr(sys, "executable", shutil.which("false"))
        with pytest.raises(VerifierFailure, match="did not start"):
            pool.score(FOUR, "4")

    def test_a_process_that_dies_idle_is_replaced(self, patient: VerifierPool) -> None:
        assert patient.score(FOUR, "4") == RIGHT
        (first,) = patient.pids
        os.kill(first, signal.SIGKILL)
        wait_until_gone(first)
        assert patient.score(FOUR, "4") == RIGHT
        assert patient.pids != (first,)
        assert patient.counts == Counter()

    def test_it_dies_with_its_parent(self, tmp_path: Path) -> None:
        script = """
            import os
            from forgeasync.config import ScorerSection
            from forgeasync.rollouts import Task
            from forgeasync.scoring import MathVerifierChoice, VerifierPool

            pool = VerifierPool(MathVerifierChoice(), ScorerSection(num_workers=1))
            task = Task(task_id="four", prompt="", answer="4", source_index=0, source="s")
            assert pool.score(task, "4").is_correct
            print(*pool.pids, flush=True)
            os._exit(0)
        """
        # stdout goes to a file, not a pipe: a survivor would keep a pipe open.
        with open(tmp_path / "pid", "w+") as output:
            subprocess.run([sys.executable, "-c", textwrap.dedent(script)], stdout=output, check=True)
            output.seek(0)
            wait_until_gone(int(output.read()))

    def test_it_gets_no_environment_variable_of_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("A_SECRET", "hunter2")
        pool = VerifierPool(MathVerifierChoice(), WEAKER, bubblewrap=NO_BUBBLEWRAP)
        pool.start()
        (pid,) = pool.pids
        variables = psutil.Process(pid).environ()
        assert "A_SECRET" not in variables
        assert not Path(variables["HOME"]).exists(), "what it wrote while it started is gone"
        pool.close()


def forks_of(pool: VerifierPool) -> set[int]:
    """Process ids of the forks in which the one worker of a pool verifies answers."""
    (pid,) = pool.pids
    # In bubblewrap the worker is a descendant of this process, else it is the process itself.
    parents: dict[int, int] = {}
    for one in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        # One may end meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.name() != "bwrap" and "worker" in " ".join(one.cmdline()):
                parents[one.pid] = one.ppid()
    return {child for child, parent in parents.items() if parent in parents}


class TestForks:
    """chain_sum's verifier compares texts and runs no code."""

    @pytest.fixture
    def sums(self) -> Iterator[tuple[VerifierPool, list[tuple[Task, str]]]]:
        """A pool with one worker, and problems with their answers."""
        choice = gym_choice("chain_sum")
        pool = VerifierPool(choice, ScorerSection(num_workers=1))
        yield pool, gym_tasks(choice)
        pool.close()

    def test_problems_in_turns_share_one(self, sums: Any) -> None:
        pool, ((one, first), (other, second)) = sums
        assert first != second
        assert pool.score(one, first) == RIGHT
        before = forks_of(pool)
        assert len(before) == 1
        for _ in range(2):
            assert pool.score(other, second) == RIGHT
            assert not pool.score(other, first).is_correct
            assert pool.score(one, first) == RIGHT
            assert not pool.score(one, second).is_correct
        assert forks_of(pool) == before

    def test_one_ends_after_so_many_answers(self, sums: Any) -> None:
        pool, ((one, first), (other, second)) = sums
        for _ in range(MAX_ANSWERS // 2):
            assert pool.score(one, first) == pool.score(other, second) == RIGHT
        assert forks_of(pool) == set()

    def test_one_that_died_between_two_answers_costs_none(self, sums: Any) -> None:
        pool, ((problem, answer), (other, second)) = sums
        assert pool.score(problem, answer) == RIGHT
        (fork,) = forks_of(pool)
        os.kill(fork, signal.SIGKILL)
        wait_until_gone(fork)
        assert pool.score(other, second) == RIGHT
        assert pool.counts == Counter()

    def test_a_problem_that_is_not_plain_gets_its_own(self) -> None:
        """Records of knights_knaves have objects of a class of their own."""
        choice = gym_choice("knights_knaves")
        (one, first), (other, second) = gym_tasks(choice)
        pool = VerifierPool(choice, ScorerSection(num_workers=1))
        forks = []
        for problem, answer in ((one, first), (one, first), (other, second)):
            assert pool.score(problem, answer) == RIGHT
            forks.append(forks_of(pool))
        assert len(forks[0]) == 1
        assert forks[0] == forks[1] != forks[2]
        pool.close()


class Marks:
    """Its bytes would write a file when they are read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)


def test_only_plain_values_have_bytes(tmp_path: Path) -> None:
    plain = {"question": "é", "answer": None, "metadata": [1, 2.5, (True, b"x"), {3, 4}, {5: "six"}]}
    content = plain_bytes(plain)
    assert content is not None and pickle.loads(content) == plain
    assert plain_bytes({"metadata": FOUR}) is None
    assert plain_bytes(Marks(tmp_path / "x")) is None
    assert plain_bytes(lambda: None) is None
    assert list(tmp_path.iterdir()) == []


FORK_SCRIPT = """
    import json, os, sys
    from forgeasync.scoring.worker import AnswerFork, ForkLimits
    from forgeasync.isolation import layers
    from forgeasync.isolation import enter_isolation, read_only_roots
    from forgeasync.rollouts.score import Score

    class Runs:
        def score(self, loaded, response):
            kind, _, code = response.partition(" ")
            found = {"value": 0.0}
            if kind == "run":
                exec(code, found)
            return Score(value=float(found["value"]), is_correct=False)

    # Which of the layers is to be seen: the kernel's denials and the hook's are hard to tell apart.
    if "no-hook" in sys.argv:
        layers._audit_hook = lambda roots, report: lambda event, arguments: None
    if "no-landlock" in sys.argv:
        layers.landlock_version = lambda: 0
    enter_isolation(in_bubblewrap=False)
    limits = ForkLimits(
        answer_limit_s=5.0, answer_memory_bytes=2**28, read_roots=read_only_roots(), in_bubblewrap=False
    )
    fork, results = None, []
    for answer in json.loads(sys.stdin.read()):
        fork = fork or AnswerFork(Runs(), None, limits)
        verdict, is_clean = fork.verify(answer)
        results.append([verdict, is_clean, fork._pid])
        if not is_clean:
            fork.close()
            fork = None
    print(json.dumps(results))
"""


def run_in_forks(answers: list[str], *without: str) -> list[tuple[dict[str, Any], bool, int]]:
    """What comes of answers whose verifier executes them: verdict, whether the fork stays, its pid.

    ``without`` takes layers away: "no-hook", "no-landlock".
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORK_SCRIPT), *without],
        input=json.dumps(answers),
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        check=True,
    )
    return [tuple(one) for one in json.loads(ran.stdout)]


DENIED = {
    "read a file": "open('/etc/passwd')",
    "read past a root": "import sys; open(sys.prefix + '/../../../../../../../../etc/passwd')",
    "write a file": "open('{folder}/x', 'w')",
    "write below Python": "import sys; open(sys.prefix + '/x', 'a')",
    "list a folder": "import os; os.listdir('/tmp')",
    "make a folder": "import os; os.mkdir('{folder}/y')",
    "remove a file": "import os; os.remove('{folder}/here')",
    "rename": "import os; os.rename('{folder}/here', '{folder}/y')",
    "socket": "import socket; socket.socket()",
    "system": "import os; os.system('true')",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "fork": "import os; os.fork()",
    "kill": "import os; os.kill(os.getppid(), 9)",
    "ctypes": "import ctypes; ctypes.CDLL(None)",
    "raise a limit": "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))",
    "look for the hook": "import gc; gc.get_objects()",
}
FILES = [kind for kind, code in DENIED.items() if "open(" in code or "{folder}" in code or "exec" in code]
"""What the kernel denies too."""


@pytest.mark.parametrize(
    ("kinds", "without"),
    [
        pytest.param([*DENIED], "no-landlock", id="hook"),
        pytest.param(
            [*FILES, "list a folder"],
            "no-hook",
            marks=pytest.mark.skipif(landlock_version() == 0, reason="this kernel has no Landlock"),
            id="kernel",
        ),
    ],
)
def test_code_in_an_answer_is_denied_what_is_not_needed_and_ends_its_fork(
    tmp_path: Path, kinds: list[str], without: str
) -> None:
    (tmp_path / "here").touch()
    answers = [f"run {DENIED[kind].format(folder=tmp_path)}" for kind in kinds]
    for kind, (verdict, is_clean, _) in zip(kinds, run_in_forks(answers, without), strict=True):
        assert verdict.get("error", "").startswith("PermissionError"), (kind, verdict)
        # It is the hook that tells of code.
        assert not is_clean or without == "no-hook", kind
    assert [entry.name for entry in tmp_path.iterdir()] == ["here"]


def test_the_kernel_allows_python_its_own_modules_also_those_with_libraries_of_the_system() -> None:
    ((verdict, _, _),) = run_in_forks(["run import sqlite3, xml.dom.minidom, curses; value = 0.5"], "no-hook")
    assert verdict == HALF


def test_bubblewrap_alone_hides_network_files_and_processes(tmp_path: Path, listener: socket.socket) -> None:
    here = tmp_path / "here"
    here.write_text("a secret")
    script = f"""
        import json, os, socket, sys

        def errors(what):
            try:
                what()
            except OSError as error:
                return error.errno
            return None

        print(json.dumps({{
            "read": errors(lambda: open({str(here)!r})),
            "passwd": errors(lambda: open("/etc/passwd")),
            "write": [errors(lambda: open(folder + "/x", "w")) for folder in ("/", "/dev", sys.prefix)],
            "connect": errors(lambda: socket.create_connection(("127.0.0.1", {listener.getsockname()[1]}))),
            "pids": [name for name in os.listdir("/proc") if name.isdigit()],
            "repository": os.listdir({str(REPOSITORY)!r}),
        }}))
    """
    command = python_command(["-c", textwrap.dedent(script)])
    process = ContainedProcess(command, env=python_environment(), bubblewrap=find_bubblewrap().path)
    found = process.ask({}, limit_s=300.0)
    process.stop()
    assert found["read"] == found["passwd"] == errno.ENOENT
    assert found["write"] == [errno.EROFS] * 3
    assert found["connect"] is not None
    with pytest.raises(BlockingIOError):
        listener.accept()
    assert len(found["pids"]) == 2, "bubblewrap and Python"
    # The environment's folder, where it lies in the repository, and the package; nothing else of it.
    assert "forgeasync" in found["repository"] and len(found["repository"]) <= 2


@pytest.mark.skipif(landlock_version() < 4, reason="this kernel's Landlock knows no TCP")
def test_the_kernel_denies_tcp_too(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    code = f"run import socket; socket.create_connection(('127.0.0.1', {port}))"
    ((verdict, _, _),) = run_in_forks([code], "no-hook")
    assert verdict.get("error", "").startswith("PermissionError"), verdict
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_an_answer_cannot_change_what_the_next_one_meets() -> None:
    tampering = "import forgeasync.rollouts.score as s; s.Score.__post_init__ = lambda self: 1 / 0"
    before, tampered, after = run_in_forks(["plain", f"run {tampering}", "plain"])
    assert before[0] == after[0] == NOTHING
    assert tampered[0]["error"].startswith("ZeroDivisionError")
    assert after[2] != tampered[2]


def test_a_fork_serves_on_until_an_answer_runs_code() -> None:
    results = run_in_forks(["plain", "plain", "run value = 0.5", "plain"])
    assert [is_clean for _, is_clean, _ in results] == [True, True, False, True]
    assert results[0][2] == results[1][2] == results[2][2] != results[3][2]
    assert results[2][0] == HALF


SAYS = "import os\nfor _ in range(40): os.write(4, {!r})\nos.write(4, b'\\n'); os._exit(0)"


@pytest.mark.parametrize(
    ("code", "becomes"),
    [
        (SAYS.format(b"not json"), {"error", "crash"}),
        (SAYS.format(b'{"value": 1e999, "is_correct": true, "has_answer": true}'), {"error", "crash"}),
        (SAYS.format(b'{"value": "1", "is_correct": true, "has_answer": true}'), {"error", "crash"}),
        (SAYS.format(b"[]"), {"error", "crash"}),
        (SAYS.format(b"x" * 100_000), {"error", "crash"}),
        ("import os; os.abort()", {"crash"}),
    ],
    ids=["text", "infinite", "type", "list", "long", "death"],
)
def test_a_forged_verdict_or_a_death_is_an_error_or_a_crash(code: str, becomes: set[str]) -> None:
    (verdict, is_clean, _), (after, _, _) = run_in_forks([f"run {code}", "plain"])
    assert verdict and verdict.keys() <= becomes and not is_clean
    assert after == NOTHING
