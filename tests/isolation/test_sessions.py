"""Shell and Python sessions: what lasts, what a deadline ends, and what hostile code can do to them."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forgeasync as fa
from forgeasync.config import SandboxSection
from tests.isolation.test_sandbox import DEFAULT, by_kind, new_mark
from tests.support.resource_scenarios import processes_with


@contextlib.asynccontextmanager
async def in_python(section: SandboxSection = DEFAULT) -> AsyncIterator[tuple[Any, fa.Sandbox]]:
    async with fa.Sandbox(section) as box:
        yield await box.python(), box


@contextlib.asynccontextmanager
async def in_shell(section: SandboxSection = DEFAULT) -> AsyncIterator[tuple[Any, fa.Sandbox]]:
    async with fa.Sandbox(section) as box:
        yield await box.shell(), box


async def said(box: fa.Sandbox) -> None:
    """Wait until the code in a box has made the file of this name."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            await box.read("said")
            return


@by_kind
async def test_directory_variables_and_background_processes_last_in_a_shell(section) -> None:
    async with in_shell(section) as (shell, box):
        await shell.run("mkdir d; cd d; export A=1; B=2; f() { echo f$1; }", timeout_s=300)
        done = await shell.run("basename $PWD; echo $A$B; f 3; echo to stderr >&2; (exit 7)", timeout_s=300)
        assert (done.stdout, done.stderr, done.exit_code) == ("d\n12\nf3\n", "to stderr\n", 7)
        await shell.run("sleep 600 & echo $! > pid", timeout_s=300)
        assert (await shell.run("kill -0 $(cat pid) && echo runs", timeout_s=300)).stdout == "runs\n"
        assert (await box.read("d/pid")).strip().isdigit()


@by_kind
@pytest.mark.parametrize(
    ("command", "exit_code"), [("echo 'open", 2), ("if true", 2), (")", 2), ("no-such-program", 127), ("", 0)]
)
async def test_a_shell_survives_bad_commands(section, command, exit_code) -> None:
    async with in_shell(section) as (shell, _):
        done = await shell.run(command, timeout_s=300)
        assert done.exit_code in (exit_code, 1) and not done.session_ended, done
        assert (await shell.run("echo on", timeout_s=300)).stdout == "on\n"


async def test_commands_of_a_shell_cannot_read_what_comes_next() -> None:
    async with in_shell() as (shell, _):
        assert (await shell.run('cat; read line; echo "got $line"', timeout_s=300)).stdout == "got \n"
        assert (await shell.run("echo on", timeout_s=300)).stdout == "on\n"


@by_kind
async def test_a_shell_that_is_left_says_so(section) -> None:
    async with in_shell(section) as (shell, _):
        done = await shell.run("echo bye; exit 5", timeout_s=300)
        assert (done.stdout, done.exit_code, done.session_ended) == ("bye\n", 5, True)
        assert not done.timed_out and done.killed_by is None
        with pytest.raises(fa.SessionEnded, match="exit code 5"):
            await shell.run("true", timeout_s=300)


@by_kind
async def test_a_deadline_ends_a_session_and_what_it_has_started(section) -> None:
    mark = new_mark()
    async with in_shell(section) as (shell, box):
        await shell.run(f"setsid sh -c 'sleep 600; :' {mark} &", timeout_s=300)
        # What it prints is there when the run begins: a deadline that soon lets it do nothing more.
        await shell.run("{ until [ -e go ]; do sleep 0.01; done; echo before; touch said; } &", timeout_s=300)
        await box.write("go", b"")
        await said(box)
        done = await shell.run("sleep 600", timeout_s=0.1)
        assert done.timed_out and done.session_ended and done.killed_by is fa.KilledBy.DEADLINE
        assert done.stdout == "before\n" and processes_with(mark) == 0
        with pytest.raises(fa.SessionEnded, match="deadline"):
            await shell.run("true", timeout_s=300)
        assert (await (await box.shell()).run("echo new", timeout_s=300)).stdout == "new\n"


@by_kind
async def test_variables_last_in_python_and_the_last_value_is_returned(section) -> None:
    async with in_python(section) as (session, box):
        first = await session.run("import os\nx = [1]\nprint('out')\nx", timeout_s=300)
        assert (first.stdout, first.value, first.traceback) == ("out\n", "[1]", "")
        assert (await session.run("x.append(2)", timeout_s=300)).value is None
        assert (await session.run("def f(): return sum(x)\nf() + _[0]", timeout_s=300)).value == "4"
        child = await session.run("os.system('echo from a child >&2')", timeout_s=300)
        assert child.stderr == "from a child\n"
        wrong = await session.run("y = 1\n1 / 0", timeout_s=300)
        assert wrong.value is None and "line 2" in wrong.traceback and "ZeroDivisionError" in wrong.traceback
        assert "SyntaxError" in (await session.run("x ==", timeout_s=300)).traceback
        assert (await session.run("y, '\\ud800'", timeout_s=300)).value == "(1, '\\ud800')"
        assert "EOFError: EOF when" in (await session.run("input()", timeout_s=300)).traceback
        await box.write("own.py", b"value = 3")
        assert (await session.run("import own; own.value", timeout_s=300)).value == "3"


@by_kind
@pytest.mark.parametrize(
    "code", ["import os; os._exit(3)", "raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)"]
)
async def test_an_interpreter_that_ends_says_so(section, code) -> None:
    async with in_python(section) as (session, _):
        done = await session.run("print('before', flush=True)\n" + code, timeout_s=300)
        assert done.session_ended and done.exit_code in (3, -9) and not done.timed_out
        assert done.stdout == "before\n"
        with pytest.raises(fa.SessionEnded):
            await session.run("1", timeout_s=300)


@pytest.mark.parametrize(
    ("code", "timeout_s"),
    [
        ("while True: pass", 0.1),
        ("import time; time.sleep(600)", 0.1),
        ("x = 'a' * 10**6\nwhile True: print(x)", 0.1),
        pytest.param("x = 'a' * 10**6\nwhile True: print(x)", 10.0, marks=pytest.mark.exhaustive),
    ],
    ids=["loop", "sleep", "flood", "long_flood"],
)
async def test_endless_code_is_ended(code: str, timeout_s: float) -> None:
    async with in_python(fa.Bubblewrap(output_kib=1)) as (session, _):
        done = await session.run(code, timeout_s=timeout_s)
    assert done.timed_out and done.session_ended and len(done.stdout) <= 1024
    if timeout_s > 1.0:
        assert done.num_stdout_bytes_cut > 10**6


async def test_long_values_and_tracebacks_are_cut_and_counted() -> None:
    async with in_python(fa.Bubblewrap(output_kib=1)) as (session, _):
        done = await session.run("'a' * 5000", timeout_s=300)
        assert done.value == "'" + "a" * 1023 and done.num_report_bytes_cut == 5002 - 1024
        done = await session.run("raise ValueError('b' * 5000)", timeout_s=300)
        assert len(done.traceback) == 1024 and done.num_report_bytes_cut > 3000


FIND_NONCE = (
    "import sys, os\nframe = sys._getframe()\nwhile 'nonce' not in frame.f_locals: frame = frame.f_back\n"
    "nonce = frame.f_locals['nonce']\nos.write(2, nonce)\n"
)


@pytest.mark.parametrize(
    "code",
    [
        # The interpreter's own descriptors are open in it: its code can write what looks like a mark.
        "import os\nopen_ones = map(int, os.listdir('/proc/self/fd'))\n"
        "for fd in {4, 5, 6} & set(open_ones): os.write(fd, b'0' * 40)\n",
        FIND_NONCE + "os.write(1, nonce + b'ffffffff' + b'x' * 100)\nimport time; time.sleep(600)",
        FIND_NONCE + "os.write(1, nonce + b'00000003' + b'abc')\n",
        "import os\nos.close(1); os.close(2)",
        "import sys\nsys.stdout = None; sys.stderr = 7",
        "import builtins\nbuiltins.compile = builtins.len = None",
    ],
)
async def test_code_that_breaks_its_interpreter_breaks_nothing_else(code) -> None:
    async with in_python() as (session, box):
        # A forged report is refused.
        with contextlib.suppress(fa.SandboxError):
            await session.run(code, timeout_s=0.5)
        assert (await box.exec("echo works", timeout_s=300)).stdout == "works\n"
        assert (await (await box.python()).run("1", timeout_s=300)).value == "1"


async def test_a_cancelled_run_ends_its_session() -> None:
    async with in_python() as (session, box):
        code = "open('said', 'w').close()\nimport time; time.sleep(600)"
        run = asyncio.create_task(session.run(code, timeout_s=600))
        await said(box)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        with pytest.raises(fa.SessionEnded, match="cancelled"):
            await session.run("1", timeout_s=300)


async def test_runs_of_a_session_wait_for_each_other() -> None:
    async with in_python() as (session, _):
        codes = (f"import time; time.sleep(0.01); {number}" for number in range(9))
        done = await asyncio.gather(*(session.run(code, timeout_s=300) for code in codes))
        assert [one.value for one in done] == [str(index) for index in range(9)]


async def test_what_a_command_prints_comes_back_as_it_is() -> None:
    """Any text, among it what looks like parts of marks, in pieces of any size."""
    word = st.sampled_from(["0", "a", "\n", " ", "00000001", "é", "\\", "'", "$x", "f" * 40])
    words = st.lists(word, max_size=30)
    async with in_shell() as (shell, box):
        python = await box.python()
        loop = asyncio.get_running_loop()

        def run(call) -> object:
            return asyncio.run_coroutine_threadsafe(call, loop).result()

        @settings(max_examples=40, deadline=None)
        @given(words.map("".join), words.map("".join))
        def check(out: str, err: str) -> None:
            code = f"import sys\nfor c in {out!r}: print(end=c, flush=True)\n"
            code += f"print(end={err!r}, file=sys.stderr)"
            done = run(python.run(code, timeout_s=300))
            assert (done.stdout, done.stderr) == (out, err)
            quoted = "'" + out.replace("'", "'\\''") + "'"
            assert run(shell.run(f"printf %s {quoted}", timeout_s=300)).stdout == out

        await asyncio.to_thread(check)


@pytest.mark.exhaustive
async def test_a_thousand_runs_cost_what_the_first_did() -> None:
    taken = []
    async with in_python() as (session, _):
        for _ in range(1000):
            begin = time.perf_counter()
            await session.run("1", timeout_s=300)
            taken.append(time.perf_counter() - begin)
    # The least of them: other processes make any of these tenths of a millisecond longer, none shorter.
    assert min(taken[900:]) < 10 * statistics.median(taken[:100])
