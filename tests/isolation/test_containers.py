"""Boxes of Docker and Podman: the client's command lines, and what happens where no engine answers.

There is no engine here. ``client`` stands for the client's program: it notes its arguments and runs what
``exec`` is given as a plain process, so that all that is ours is used as it is.
"""

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest

import forgeasync as fa
from forgeasync.isolation import check_sandbox, exec_command, kill_command, remove_command, run_command

SECTION = fa.Docker(
    image="python:3.11-slim",
    memory_mib=100,
    disk_mib=16,
    max_files=77,
    max_processes=9,
    max_open_files=33,
    cpu_s=5,
    mounts={"/host/data": "/data"},
    env={"A": "b c"},
)

CLIENT = """#!{python}
import json, os, subprocess, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "exec" and "--interactive" in sys.argv:
    command = sys.argv[4:]
    os.chdir({folder!r})
    os.execvp(command[0], command)
"""


@pytest.fixture
def client(tmp_path: Path) -> Path:
    program = tmp_path / "client"
    (tmp_path / "work").mkdir()
    program.write_text(
        CLIENT.format(python="/usr/bin/env python3", log=str(tmp_path / "log"), folder=str(tmp_path / "work"))
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def calls(client: Path) -> list[list[str]]:
    return [json.loads(line) for line in (client.parent / "log").read_text().splitlines()]


def test_a_docker_box_is_closed_and_limited() -> None:
    expected = (
        "docker run --detach --rm --init --name n --hostname box --network none --ipc private --read-only "
        "--user 65534:65534 --cap-drop ALL --security-opt no-new-privileges "
        "--tmpfs /work:rw,exec,nosuid,nodev,size=16m,mode=1777,nr_inodes=77 "
        "--tmpfs /tmp:rw,exec,nosuid,nodev,size=16m,mode=1777,nr_inodes=77 "
        "--shm-size 2m --memory 100m --memory-swap 100m --pids-limit 9 "
        "--ulimit core=0:0 --ulimit cpu=5:5 --ulimit nofile=33:33 --ulimit fsize=16777216:16777216 "
        "--mount type=bind,source=/host/data,target=/data,readonly "
        "--env HOME=/tmp --env LANG=C.UTF-8"
    ).split(" ")
    expected += [
        "--env",
        "A=b c",
        "--workdir",
        "/work",
        "--entrypoint",
        "sleep",
        "python:3.11-slim",
        "infinity",
    ]
    assert run_command("docker", SECTION, "n") == expected


def test_a_podman_box_is_the_same_but_for_the_number_of_files() -> None:
    podman = fa.Podman(**SECTION.model_dump(exclude={"kind"}))
    expected = [one.replace(",nr_inodes=77", "") for one in run_command("podman", SECTION, "n")]
    assert run_command("podman", podman, "n") == expected


def test_commands_go_through_the_client_as_they_are() -> None:
    assert exec_command("docker", "n", ["sh", "-c", "a; b"]) == [
        *("docker", "exec", "--interactive", "n"),
        *("sh", "-c", "a; b"),
    ]
    assert kill_command("docker", "n") == ["docker", "exec", "n", "sh", "-c", "kill -9 -1"]
    assert remove_command("docker", "n") == ["docker", "rm", "--force", "--volumes", "n"]


def test_a_box_is_started_used_and_removed_by_the_client(client: Path) -> None:
    async def run() -> None:
        async with fa.Sandbox(SECTION.model_copy(update={"program": str(client)})) as box:
            assert (await box.exec("echo out; exit 4", timeout_s=300)).exit_code == 4
            await box.write("a/b", b"data")
            assert await box.read("a/b") == b"data"
            assert (await (await box.python()).run("6 * 7", timeout_s=300)).value == "42"
            assert (await box.exec("sleep 600", timeout_s=0.1)).timed_out

    asyncio.run(run())
    found = calls(client)
    name = found[0][found[0].index("--name") + 1]
    assert found[0] == run_command("x", SECTION, name)[1:]
    assert found[1] == ["exec", "--interactive", name, "sh", "-c", "echo out; exit 4"]
    # A client that is killed leaves its command running: all processes of the container are killed.
    assert found[-2] == kill_command("x", name)[1:] and found[-1] == remove_command("x", name)[1:]


def test_a_container_that_does_not_start_is_removed(client: Path) -> None:
    client.write_text(client.read_text() + "if sys.argv[1] == 'run': sys.exit('no such image')\n")
    (problem,) = check_sandbox(SECTION.model_copy(update={"program": str(client)}))
    assert "no such image" in str(problem)
    assert [one[0] for one in calls(client)] == ["run", "rm"]


@pytest.mark.parametrize("kind", [fa.Docker, fa.Podman])
def test_without_a_client_the_section_is_refused(kind, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (problem,) = check_sandbox(kind(image="a"))
    assert (
        problem.field == "sandbox.kind"
        and f"no program {kind.model_fields['kind'].default} in PATH" in str(problem)
    )


def test_without_an_engine_the_section_is_refused(monkeypatch) -> None:
    from shutil import which

    if which("docker") is None:
        pytest.skip("there is no docker client here")
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/socket")
    (problem,) = check_sandbox(SECTION)
    assert "docker run failed" in str(problem) and os.path.exists("/no/such/socket") is False
