"""Boxes of Docker and Podman: with an engine where one answers, and by what was recorded of one.

recorded_docker.json has, for each command of a box's life, what Docker's client has asked of the engine by
its API, and what it has said itself (``tests/support/record_docker.py``). A command line that is not recorded
is not known to work: record anew when you change one.
"""

import asyncio
import contextlib
import functools
import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

import forgeasync as fa
from forgeasync.isolation import SandboxClosed, check_sandbox, run_command
from tests.support.record_docker import NAME, SECTION, commands

RECORDED = json.loads((Path(__file__).parent / "recorded_docker.json").read_text())["commands"]
IMAGE = os.environ.get("FORGEASYNC_TEST_IMAGE", SECTION.image)

CLIENT = """#!/usr/bin/env python3
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
for kind, exit_code, text in {failures!r}:
    if sys.argv[1] == kind:
        sys.stderr.write(text)
        sys.exit(exit_code)
if "--interactive" in sys.argv:
    command = sys.argv[6:]
    os.chdir({folder!r})
    os.execvp(command[0], command)
"""


class Client:
    """A program in the place of Docker's: notes its arguments, runs what it is given as a plain process."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "client"
        self._log = folder / "log"
        (folder / "work").mkdir()
        self.fail_as()

    def fail_as(self, *names: str) -> None:
        """Fail from here on as the recorded commands of these names did."""
        found = [RECORDED[name] for name in names]
        failures = [(one["command"][1], one["exit_code"], "\n".join(one["stderr"])) for one in found]
        folder = self.program.parent / "work"
        self.program.write_text(CLIENT.format(log=str(self._log), folder=str(folder), failures=failures))
        self.program.chmod(self.program.stat().st_mode | stat.S_IXUSR)

    @property
    def section(self) -> fa.Docker:
        return SECTION.model_copy(update={"program": str(self.program)})

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path)


@pytest.mark.parametrize("name", list(commands(SECTION)))
def test_every_command_line_is_one_that_an_engine_has_seen(name: str) -> None:
    assert commands(SECTION)[name] == RECORDED[name]["command"]


def told(name: str, asked: str) -> dict[str, Any]:
    """What the engine was told in a recorded request."""
    return next(one["body"] for one in RECORDED[name]["requests"] if one["asked"].startswith(asked))


def test_the_engine_was_told_to_close_the_box_and_to_limit_it() -> None:
    container = told("run", "POST /containers/create")
    host = container["HostConfig"]
    assert host["NetworkMode"] == "none" and host["IpcMode"] == "private"
    assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert {"Privileged", "CapAdd", "Binds", "PidMode", "Devices"} & host.keys() == set()
    assert host["Mounts"] == [{"Type": "bind", "Source": "/usr", "Target": "/data", "ReadOnly": True}]
    assert host["Memory"] == host["MemorySwap"] == 100 * 2**20
    assert host["PidsLimit"] == 9
    limits = {one["Name"]: (one["Soft"], one["Hard"]) for one in host["Ulimits"]}
    assert limits == {"core": (0, 0), "cpu": (5, 5), "nofile": (33, 33), "fsize": (16 * 2**20, 16 * 2**20)}
    for folder in ("/work", "/tmp"):
        assert {"size=16m", "nr_inodes=77", "nosuid", "nodev"} <= set(host["Tmpfs"][folder].split(","))
    assert container["Env"] == ["HOME=/tmp", "LANG=C.UTF-8", "A=b c"]


def test_commands_have_a_user_that_can_kill_all_of_them_and_nothing_else() -> None:
    users = {name: told(name, f"POST /containers/{NAME}/exec")["User"] for name in ("exec", "kill")}
    assert users["exec"] == users["kill"] not in (told("run", "POST /containers/create")["User"], "0:0")


def test_a_podman_box_is_the_same_but_for_the_number_of_files() -> None:
    podman = fa.Podman(**SECTION.model_dump(exclude={"kind"}))
    expected = [one.replace(",nr_inodes=77", "") for one in run_command("podman", SECTION, "n")]
    assert run_command("podman", podman, "n") == expected


async def test_a_box_is_started_used_and_removed_by_the_client(client: Client) -> None:
    async with fa.Sandbox(client.section) as box:
        assert (await box.exec("echo out; exit 4", timeout_s=300)).exit_code == 4
        await box.write("a/b", b"data")
        assert await box.read("a/b") == b"data"
        assert (await (await box.python()).run("6 * 7", timeout_s=300)).value == "42"
        assert (await box.exec("sleep 600", timeout_s=0.1)).timed_out
        assert (await (await box.shell()).run("sleep 600", timeout_s=0.1)).timed_out
    found = client.calls
    name = found[0][found[0].index("--name") + 1]
    expected = commands(client.section)
    expected = {kind: [one.replace(NAME, name) for one in expected[kind][1:]] for kind in expected}
    assert found[:3] == [expected[kind] for kind in ("run", "open", "exec")]
    # A client that is killed leaves its command running: all processes of calls are killed.
    assert found.count(expected["kill"]) == 2
    assert found[-2:] == [expected[kind] for kind in ("kill", "remove")]


def test_a_container_that_does_not_start_is_removed_and_says_why(client: Client) -> None:
    client.fail_as("run without mount")
    (problem,) = check_sandbox(client.section)
    assert "run failed with exit code 125" in str(problem) and "/no/such/folder" in str(problem)
    assert [one[0] for one in client.calls] == ["run", "rm"]


async def test_a_container_that_has_ended_is_no_result_of_a_command(client: Client) -> None:
    async with fa.Sandbox(client.section) as box:
        # A command may say so too.
        assert (await box.exec("echo Error: none >&2; exit 1", timeout_s=300)).exit_code == 1
        client.fail_as("exec without container")
        with pytest.raises(SandboxClosed, match="No such container"):
            await box.exec("true", timeout_s=300)


async def test_a_box_whose_processes_cannot_be_killed_ends(client: Client) -> None:
    async with fa.Sandbox(client.section) as box:
        running = asyncio.create_task(box.exec("touch begun; sleep 600", timeout_s=600))
        while not (client.program.parent / "work" / "begun").exists():
            await asyncio.sleep(0.01)
        client.fail_as("exec without container")
        running.cancel()
        await asyncio.wait([running])
        assert client.calls[-1][0] == "rm"
        with pytest.raises(SandboxClosed):
            await box.exec("true", timeout_s=300)


@functools.cache
def why_no_engine(kind: str) -> str | None:
    """Why there is no box of this kind here; None if there can be one."""
    if shutil.which(kind) is None:
        return f"there is no client {kind} in PATH"
    no_image = f"{kind} has no image {IMAGE}: pull it, or set FORGEASYNC_TEST_IMAGE"
    no_engine = f"no engine of {kind} answers"
    for arguments, problem in ((["version"], no_engine), (["image", "inspect", IMAGE], no_image)):
        ran = subprocess.run([kind, *arguments], capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            return f"{problem} ({ran.stderr.strip()[-200:]})"
    return None


@pytest.fixture(params=[fa.Docker, fa.Podman], ids=lambda one: one.model_fields["kind"].default)
def real(request: pytest.FixtureRequest) -> fa.Docker | fa.Podman:
    """A section for an engine that answers here."""
    section = request.param(image=IMAGE, memory_mib=128, disk_mib=16, max_processes=40, output_kib=16)
    if (problem := why_no_engine(section.kind)) is not None:
        pytest.skip(problem)
    return section


async def test_an_engine_runs_a_box(real: fa.Docker | fa.Podman, tmp_path: Path) -> None:
    (tmp_path / "prepared").write_text("hello")
    async with fa.Sandbox(real, workspace=tmp_path) as box:
        done = await box.exec("cat prepared; id -u; pwd; echo err >&2; exit 4", timeout_s=300)
        assert (done.exit_code, done.stdout, done.stderr) == (4, "hello65534\n/work\n", "err\n")
        await box.write("a/b", b"data")
        assert await box.read("a/b") == b"data"
        with pytest.raises(FileNotFoundError):
            await box.read("none")
        assert (await (await box.python()).run("x = 6\nx * 7", timeout_s=300)).value == "42"
        shell = await box.shell()
        await shell.run("cd /tmp; export A=1", timeout_s=300)
        assert (await shell.run("pwd; echo $A", timeout_s=300)).stdout == "/tmp\n1\n"
        closed = "import socket; socket.create_connection(('1.1.1.1', 53), 5)"
        assert (await box.exec(["python3", "-c", closed], timeout_s=300)).exit_code == 1
        for path in ("/written", "/usr/written", "/etc/written"):
            assert (await box.exec(["touch", path], timeout_s=300)).exit_code == 1


FORKS = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"


async def test_what_takes_too_much_in_a_container_ends(real: fa.Docker | fa.Podman) -> None:
    async with fa.Sandbox(real) as box:
        await box.write("kept", b"data")
        done = await box.exec(["python3", "-c", "import time; time.sleep(600)"], timeout_s=1)
        assert done.killed_by is fa.KilledBy.DEADLINE
        assert await left_by_calls(box) == []
        session = await box.python()
        assert (await session.run("while True: pass", timeout_s=1)).killed_by is fa.KilledBy.DEADLINE
        assert await left_by_calls(box) == []
        assert await box.read("kept") == b"data"
        done = await box.exec(["python3", "-c", "bytearray(300 * 2**20)"], timeout_s=300)
        assert done.exit_code == 137, "killed by the kernel"
        writing = "open('big', 'wb').write(bytes(40 * 2**20))"
        done = await box.exec(["python3", "-c", writing], timeout_s=300)
        assert done.exit_code == 1 and "No space left on device" in done.stderr
        done = await box.exec(["python3", "-c", FORKS], timeout_s=2)
        assert done.killed_by is fa.KilledBy.DEADLINE
        # The box ends where the bomb has left no room for the process that kills.
        with contextlib.suppress(SandboxClosed):
            assert await left_by_calls(box) == []


async def left_by_calls(box: fa.Sandbox) -> list[str]:
    """Command lines of programs that calls have left running."""
    done = await box.exec("for one in /proc/[0-9]*; do cat $one/cmdline; echo; done", timeout_s=300)
    assert done.exit_code == 0
    return [line for line in done.stdout.splitlines() if "python3" in line]
