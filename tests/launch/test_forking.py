"""Processes that are forked from a server are what the same program would be, and end with whoever wants
them."""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from forgeasync.faults import RUN_MARK
from forgeasync.launch import ADDRESS, MAX_LOST, MODULES, ForkServer, ImportSet, fork_app, own_life
from forgeasync.launch.forking import client, proxy
from forgeasync.rollouts import is_running
from tests.support.processes import run_apart

pytestmark = pytest.mark.procs

PROGRAM = "tests.support.forked_program"
MARK = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer.start(())
    server.wait(ImportSet.COMMON)
    yield server
    server.end()


def start(
    server: ForkServer,
    *arguments: str,
    lives: Sequence[int] = (),
    kept: Sequence[int] = (),
    variables: dict[str, str] | None = None,
    folder: Path | None = None,
    import_set: ImportSet = ImportSet.COMMON,
    process_group: int | None = None,
) -> "subprocess.Popen[str]":
    # The tests' own folder, from wherever it is started.
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [
            sys.executable,
            *server.arguments(import_set, lives=lives, kept=kept),
            *("-m", PROGRAM, *arguments),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[*lives, *kept],
        cwd=root if folder is None else folder,
        env=os.environ | (variables or {}),
        process_group=process_group,
    )


def facts_of(process: "subprocess.Popen[str]", word: str = "") -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def assert_gone(pid: int) -> None:
    while is_running(pid):
        time.sleep(0.01)


def waiting(server: ForkServer, **options: Any) -> "tuple[subprocess.Popen[str], int]":
    """A fork that waits, with its process id."""
    process = start(server, "wait", **options)
    pid = facts_of(process)["pid"]
    assert process.stdout is not None and process.stdout.readline() == "waits\n"
    return process, pid


def test_a_fork_is_what_the_program_would_be(server: ForkServer) -> None:
    process = start(server, "exit", "0", "x y", variables={"FORGEASYNC_TEST": "ä"})
    facts = facts_of(process, "said")
    _, err = process.communicate()
    plain = subprocess.run(
        [sys.executable, "-m", PROGRAM, "exit", "0", "x y"],
        input="said\n",
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"FORGEASYNC_TEST": "ä"},
        check=True,
    )
    alone = json.loads(plain.stdout)
    assert facts["has_torch"] and not alone["has_torch"]
    own = {"pid", "group", "has_torch", "drawn"}
    assert {name: facts[name] for name in facts if name not in own} == {
        name: alone[name] for name in alone if name not in own
    }
    assert (err, process.returncode) == (plain.stderr, 0) == ("to stderr\n", 0)
    assert facts["pid"] != process.pid, "a fork"


def test_forks_draw_other_numbers_and_find_other_folders(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "tests").symlink_to(Path(__file__).parents[1])
    first, second = (facts_of(start(server, "exit", "0", folder=folder)) for folder in (tmp_path, None))
    assert first["drawn"] != second["drawn"]
    assert first["folder"] == first["search_path"] == str(tmp_path)


def test_lines_come_at_once_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    server = ForkServer.start(())
    server.wait(ImportSet.COMMON)
    here, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, *server.arguments(ImportSet.COMMON), "-m", PROGRAM, "terminal"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=Path(__file__).parents[2],
    )
    os.close(terminal)
    assert os.read(here, 100) == b"is one: True\r\n"
    process.kill()
    process.wait()
    os.close(here)
    server.end()


@pytest.mark.parametrize("code", [0, 3])
def test_a_proxy_ends_with_the_exit_code(server: ForkServer, code: int) -> None:
    process = start(server, "exit", str(code))
    process.communicate("\n")
    assert process.returncode == code


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("text", 1, "what went wrong\n"),
        ("error", 1, "RuntimeError: what went wrong\n"),
        ("interrupted", -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_a_fork_ends_as_a_program_does(server: ForkServer, how: str, code: int, words: str) -> None:
    process = start(server, how)
    _, err = process.communicate("\n")
    assert process.returncode == code and err.endswith(words)


def test_a_fork_does_at_its_end_what_was_registered_and_takes_nothing_apart(server: ForkServer) -> None:
    process = start(server, "at_exit")
    out, _ = process.communicate("\n")
    assert process.returncode == 0
    # A program of its own would say "collected" too.
    assert out.splitlines()[1:] == ["thread ended", "at exit"]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM])
def test_a_proxy_ends_by_the_signal(server: ForkServer, number: signal.Signals) -> None:
    process = start(server, "signal", str(int(number)))
    process.communicate("\n")
    assert process.returncode == -number


def test_descriptors_have_the_same_numbers(server: ForkServer) -> None:
    reading, writing = os.pipe()
    # Low ones are used by the server for something else.
    process = start(server, "write", str(writing), kept=[writing])
    os.close(writing)
    process.communicate("\n")
    assert os.read(reading, 100) == b"kept" and os.read(reading, 100) == b""
    os.close(reading)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["at_work", "stopped"])
def test_a_fork_ends_with_its_proxy(server: ForkServer, is_stopped: bool) -> None:
    process, pid = waiting(server)
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    assert_gone(pid)


def test_a_fork_with_low_descriptors_ends_with_its_proxy(server: ForkServer) -> None:
    """The servers use these numbers for something else."""
    kept = range(3, 10)
    files = " ".join(f"{number}</dev/null" for number in kept)
    arguments = [*server.arguments(ImportSet.COMMON, kept=kept), "-m", PROGRAM, "wait"]
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" {files}', "sh", sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    pid = facts_of(process)["pid"]
    process.kill()
    assert pid != process.pid
    assert_gone(pid)


def test_a_fork_ends_with_whoever_started_it(server: ForkServer) -> None:
    life, other_end = os.pipe()
    process, pid = waiting(server, lives=[life])
    assert is_running(pid)
    os.close(other_end)
    assert_gone(pid)
    assert process.wait() == -signal.SIGKILL
    os.close(life)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["at_work", "stopped"])
def test_a_fork_ends_with_the_worker_that_has_started_its_proxy(server: ForkServer, is_stopped: bool) -> None:
    """Also when the fork and the proxy are stopped."""
    program = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    arguments = [*server.arguments(ImportSet.COMMON, lives=None), "-m", PROGRAM, "wait"]
    worker = subprocess.Popen(
        [sys.executable, "-c", program, sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    facts = facts_of(worker)
    (proxy,) = psutil.Process(worker.pid).children()
    assert facts["starter"] == worker.pid and facts["pid"] != proxy.pid, "a fork"
    if is_stopped:
        for pid in (facts["pid"], proxy.pid):
            os.kill(pid, signal.SIGSTOP)
    worker.kill()
    worker.wait()
    for pid in (proxy.pid, facts["pid"]):
        assert_gone(pid)


def test_signals_to_a_proxy_reach_the_fork(server: ForkServer) -> None:
    process, _ = waiting(server)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 17


def test_a_signal_before_there_is_a_fork_reaches_it() -> None:
    """The server is still importing."""
    server = ForkServer.start(())
    process = start(server, "wait")
    until_handled(process.pid)
    process.send_signal(signal.SIGTERM)
    server.wait(ImportSet.COMMON)
    process.communicate("\n")
    assert process.returncode == -signal.SIGTERM
    server.end()


def test_a_signal_before_there_is_no_fork_to_be_had_ends_the_process() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + (address := f"forgeasync-test-{os.getpid()}"))
        listener.listen()
        command = [*("-I", "-S", proxy.__file__), address, "-", "-", "-m", PROGRAM, "exit", "0"]
        process = subprocess.Popen([sys.executable, *command])
        until_handled(process.pid)
        process.send_signal(signal.SIGTERM)
        link, _ = listener.accept()
        link.close()
        assert process.wait() == -signal.SIGTERM


def until_handled(pid: int) -> None:
    """Wait until a process has a handler for SIGTERM."""
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.005)


@pytest.mark.parametrize("leads_group", [False, True], ids=["in_a_group", "leads_one"])
def test_a_fork_leads_a_process_group_where_its_proxy_does(server: ForkServer, leads_group: bool) -> None:
    process, pid = waiting(server, process_group=0 if leads_group else None)
    assert (os.getpgid(pid) == pid) is leads_group
    process.kill()


APP = "tests.support.forked_app"


def start_app(
    *arguments: str,
    options: Sequence[str] = (),
    variables: dict[str, str] | None = None,
    process_group: int | None = None,
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *options, "-m", APP, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        process_group=process_group,
        env=os.environ | (variables or {}),
    )


def descendants(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_an_app_is_a_fork_that_nothing_is_left_of() -> None:
    # A shell has what it starts lead a group, which Ctrl-C and Ctrl-Z are for.
    process = start_app("exit", "3", "x y", process_group=0)
    assert process.stdin is not None and process.stdout is not None
    # Two servers, one of generators, and the app.
    while len(found := descendants(process)) < 3:
        time.sleep(0.05)
    process.stdin.write("\n")
    process.stdin.flush()
    facts = json.loads(process.stdout.readline())
    assert facts["has_torch"] and facts["pid"] != process.pid
    assert facts["group"] == process.pid, "it stays in the group"
    assert facts["arguments"] == ["3", "x y"] and facts["original"] == ["-m", APP, "exit", "3", "x y"]
    assert process.wait() == 3
    assert not [one for one in found if is_running(one.pid)]


def test_an_app_that_is_killed_takes_its_fork_and_its_servers_with_it() -> None:
    process = start_app("wait")
    facts = facts_of(process)
    found = descendants(process)
    assert facts["pid"] in {one.pid for one in found}
    process.kill()
    process.wait()
    for one in found:
        assert_gone(one.pid)


@pytest.mark.parametrize("options", [("-B",), ("-m", "pdb", "-c", "continue")], ids=["option", "debugger"])
def test_an_app_that_was_started_in_another_way_is_no_fork(options: Sequence[str]) -> None:
    process = start_app("exit", "0", options=options)
    out, _ = process.communicate("\n")
    (facts,) = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
    assert facts["pid"] == process.pid and not facts["has_torch"]


def test_an_app_without_a_fork_to_be_had_says_so_and_goes_on(tmp_path: Path) -> None:
    text = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    process = start_app("exit", "3", variables={"PYTHONPATH": str(tmp_path)})
    out, err = process.communicate("\n")
    assert json.loads(out)["pid"] == process.pid and process.returncode == 3
    assert "this process imports its libraries itself: importing has started threads: " in err


def test_the_mark_of_a_run_is_shown(server: ForkServer) -> None:
    process, pid = waiting(server, variables={RUN_MARK: MARK})
    assert psutil.Process(pid).environ()[RUN_MARK] == MARK
    assert psutil.Process(pid).name() == "python"
    for one in server.processes():
        assert MARK not in psutil.Process(one).environ().values()
    process.kill()


def test_without_its_server_a_fork_goes_on_and_others_import_by_themselves() -> None:
    server = ForkServer.start(())
    server.wait(ImportSet.COMMON)
    process, pid = waiting(server)
    assert server.can_be_used
    for one in server.processes():
        os.kill(one, signal.SIGKILL)
        assert_gone(one)
    assert not server.can_be_used
    assert is_running(pid) and process.poll() is None
    late = start(server, "exit", "4")
    facts = facts_of(late)
    _, err = late.communicate()
    assert not facts["has_torch"] and facts["pid"] == late.pid and late.returncode == 4
    assert f"no fork of {server.address}-common: it is not there" in err
    assert "this process imports its libraries itself" in err
    os.kill(pid, signal.SIGKILL)
    _, err = process.communicate()
    assert "so has the server that it was forked from" in err and process.returncode == 1
    server.end()


def test_a_server_of_a_set_that_is_lost_is_begun_again_until_it_is_given_up() -> None:
    server = ForkServer.start(())
    for num_lost in range(MAX_LOST + 1):
        server.wait(ImportSet.EPISODES)
        process = start(server, "exit", "0", import_set=ImportSet.EPISODES)
        pid = facts_of(process)["pid"]
        _, err = process.communicate()
        if num_lost == MAX_LOST:
            assert pid == process.pid and f"its server has ended {MAX_LOST} times, at last with wait" in err
            break
        assert pid != process.pid and err == "to stderr\n"
        first, *others = sorted(server.processes())
        for one in others:
            os.kill(one, signal.SIGKILL)
            assert_gone(one)
        assert others and is_running(first)
    server.end()


@pytest.mark.parametrize(
    ("module", "text", "reason"),
    [
        (
            "sitecustomize.py",
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
            "importing has started threads: ",
        ),
        (
            "openai.py",
            "raise ImportError('a broken package')\n",
            "importing has failed (ImportError: a broken",
        ),
    ],
    ids=["threads", "failure"],
)
def test_what_cannot_be_forked_is_said_and_started(
    module: str, text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / module).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ForkServer.start(())
    for one in (ImportSet.COMMON, ImportSet.TRAINER):
        server.wait(one)
        process = start(server, "exit", "0", import_set=one)
        facts = facts_of(process)
        _, err = process.communicate()
        assert facts["pid"] == process.pid and process.returncode == 0
        assert f"no fork of {server.address}-{one}: {reason}" in err
    server.end()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_nobody_else_gets_a_fork(server: ForkServer) -> None:
    asking = f"""
import os, socket
os.setuid(65534)
link = socket.socket(socket.AF_UNIX)
link.connect("\\0{server.address}-common")
body = b'{{"environment": {{}}, "folder": "/", "arguments": [], "num_lives": 0, "kept": []}}'
try:
    socket.send_fds(link, [len(body).to_bytes(4, "big")], [0, 1, 2])
    link.sendall(body)
    print(link.recv(100))
except (ConnectionResetError, BrokenPipeError):
    print(b"")
"""
    before = set(psutil.Process(min(server.processes())).children())
    told = subprocess.run([sys.executable, "-c", asking], capture_output=True, text=True, check=True)
    assert told.stdout == "b''\n"
    # Forks of other tests may have ended meanwhile.
    assert set(psutil.Process(min(server.processes())).children()) <= before


def test_a_server_is_for_the_environment_that_it_has_imported_with(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert server.can_be_used
    monkeypatch.setenv("FORGEASYNC_ANYTHING", "1")
    assert server.can_be_used, "no import reads it"
    assert not caplog.messages
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    assert not server.can_be_used
    assert caplog.messages == ["procs are forked from a new server: these variables differ: HF_HOME"]


def test_imports_that_do_not_end_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "IMPORT_S", 0.1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0{MARK}-{ImportSet.COMMON}")
        silent.listen(1)
        ForkServer(MARK).wait(ImportSet.COMMON)
    assert caplog.messages == [f"the imports of {ImportSet.COMMON} procs have not ended after 0 s"]


def test_a_server_that_was_given_is_used(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_server", None)
    monkeypatch.setenv(ADDRESS, server.address)
    assert client.fork_server().address == server.address
    assert ADDRESS not in os.environ, "it is not for what this process starts"
    assert not client.server_processes(), "they are another process's to end"


@pytest.mark.parametrize("option", ["--dry-run", "--help", "--supervise"])
def test_nothing_is_imported_ahead_for_a_command_without_procs(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_server", None)
    fork_app(["python", "-m", "apps.grpo", "--config", "file.yaml", option])
    assert client._server is None


def test_nothing_is_imported_ahead_with_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_server", None)
    monkeypatch.setattr(client, "NVIDIA_DEVICE", tmp_path)
    fork_app(["python", "-m", "apps.grpo", "--config", "file.yaml"])
    assert client._server is None


def test_a_server_ends_with_the_process_that_started_it() -> None:
    text = """
import os, sys
from forgeasync.launch.forking.client import ForkServer
server = ForkServer.start(())
print(*server.processes(), flush=True)
sys.stdin.readline()
os._exit(0)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    (pid,) = map(int, process.stdout.readline().split())
    process.kill()
    process.wait()
    assert_gone(pid)


def test_a_process_that_ends_by_itself_waits_for_its_servers() -> None:
    text = """
from forgeasync.launch.forking.client import fork_server
from forgeasync.launch.forking.import_sets import ImportSet
server = fork_server((ImportSet.GENERATOR,))
server.wait(ImportSet.GENERATOR)
print(*server.processes(), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    servers = [int(word) for word in done.stdout.split()]
    assert len(servers) == 2, done.stderr
    # At once, without waiting: nothing of a run is to be found after it.
    assert not [pid for pid in servers if is_running(pid)]


def test_the_pipe_of_this_process_is_one() -> None:
    assert own_life() == own_life() and os.get_inheritable(own_life())


def test_a_controller_reads_no_docstrings_that_its_server_could_have_read() -> None:
    assert run_apart(_classes_with_docstrings) == []


def _classes_with_docstrings() -> list[str]:
    """Classes of which pydantic looks for the source, among all modules, while a controller imports."""
    from pydantic._internal import _docs_extraction

    for name in (ImportSet.COMMON, ImportSet.CONTROLLER):
        for module in MODULES[name]:
            importlib.import_module(module)
    found = []
    extract = _docs_extraction._extract_source_from_frame

    def noted(of: type) -> list[str] | None:
        found.append(of.__qualname__)
        return extract(of)

    _docs_extraction._extract_source_from_frame = noted
    importlib.import_module("apps.grpo")
    return found
