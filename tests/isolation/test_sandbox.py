"""A box as those see it who write environments: commands, files, limits, ends."""

import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import forgeasync as fa
from forgeasync.config import SandboxSection
from forgeasync.isolation import FileTooLarge, SandboxClosed
from tests.support.resource_scenarios import processes_with

DEFAULT = fa.Bubblewrap()
SECTIONS = [fa.Bubblewrap(output_kib=1), fa.UnsafeSubprocess(output_kib=1)]
by_kind = pytest.mark.parametrize("section", SECTIONS, ids=lambda one: one.kind)


async def run_in_box(
    command: str | list[str], section: SandboxSection = DEFAULT, *, timeout_s: float = 300, **options: Path
) -> fa.ExecResult:
    """What a command does that is all that a box is used for."""
    async with fa.Sandbox(section, **options) as box:
        return await box.exec(command, timeout_s=timeout_s)


def new_mark() -> str:
    """A word for a command line, by which its processes are found."""
    return "mark-" + os.urandom(8).hex()


async def until_seen(mark: str, *, is_there: bool) -> None:
    """Wait until processes with a mark have begun, or are gone."""
    while bool(processes_with(mark)) is not is_there:
        await asyncio.sleep(0.01)


async def check_works(box: fa.Sandbox) -> None:
    assert (await box.exec("echo works", timeout_s=300)).stdout == "works\n"


@by_kind
@pytest.mark.parametrize(
    ("command", "exit_code", "stdout", "stderr"),
    [
        ("echo a; echo b >&2; exit 3", 3, "a\n", "b\n"),
        (["printf", "%s|", "a b", "$HOME", "*", ""], 0, "a b|$HOME|*||", ""),
        ("cat", 0, "", ""),
        ("kill -TERM $$", -15, "", ""),
        (["no-such-program"], 127, "", "no-such-program: No such file or directory\n"),
        (["/etc"], 127, "", "/etc: Permission denied\n"),
        ("printf '\\377\\303\\251'", 0, "\N{REPLACEMENT CHARACTER}é", ""),
    ],
)
async def test_a_command_ends_as_it_would_anywhere(section, command, exit_code, stdout, stderr) -> None:
    done = await run_in_box(command, section)
    assert (done.exit_code, done.stdout, done.stderr) == (exit_code, stdout, stderr)
    assert not done.timed_out and done.killed_by is None and 0 < done.duration_s


@by_kind
async def test_output_beyond_the_limit_is_counted(section) -> None:
    command = "head -c 5000 /dev/zero | tr '\\0' x; head -c 1024 /dev/zero >&2"
    done = await run_in_box(command, section)
    assert done.stdout == "x" * 1024 and done.num_stdout_bytes_cut == 5000 - 1024
    assert len(done.stderr) == 1024 and done.num_stderr_bytes_cut == 0


@by_kind
@pytest.mark.parametrize(
    ("timeout_s", "stdout"),
    [(0.1, ""), pytest.param(10.0, "begun\n", marks=pytest.mark.exhaustive)],
    ids=["soon", "after_it_printed"],
)
async def test_a_deadline_ends_the_whole_tree(section, timeout_s: float, stdout: str) -> None:
    mark = new_mark()
    command = ["sh", "-c", 'setsid sh -c "sleep 600; :" "$0" & (sleep 600; :) & echo begun; sleep 600', mark]
    async with fa.Sandbox(section) as box:
        done = await box.exec(command, timeout_s=timeout_s)
        assert processes_with(mark) == 0
        await check_works(box)
    assert done.timed_out and done.killed_by is fa.KilledBy.DEADLINE and done.exit_code == -9
    assert done.stdout in (stdout, "begun\n")


@by_kind
async def test_a_cancelled_call_is_killed_and_the_box_goes_on(section) -> None:
    mark = new_mark()
    async with fa.Sandbox(section) as box:
        call = asyncio.create_task(box.exec(["sh", "-c", "sleep 600; :", mark], timeout_s=600))
        await until_seen(mark, is_there=True)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until_seen(mark, is_there=False)
        await check_works(box)


async def test_a_box_that_is_cancelled_while_it_starts_leaves_nothing(tmp_path) -> None:
    mark = new_mark()
    folder = tmp_path / mark
    folder.mkdir()
    for delay_s in (0.0, 0.001, 0.002, 0.004, 0.006, 0.01):
        # Its name is in the command of the box's first process.
        box = fa.Sandbox(fa.Bubblewrap(mounts={str(folder): "/marked"}))
        starting = asyncio.create_task(box.__aenter__())
        await asyncio.sleep(delay_s)
        starting.cancel()
        # In a warm process the last ones may have started by now, and are the caller's to close.
        if not isinstance((await asyncio.gather(starting, return_exceptions=True))[0], BaseException):
            await box.close()
    async with fa.Sandbox() as box:
        await check_works(box)
    await until_seen(mark, is_there=False)


@by_kind
async def test_files_go_in_and_out_unchanged(section) -> None:
    data = os.urandom(3_000_001)
    async with fa.Sandbox(section) as box:
        for written in (data, b""):
            await box.write("a b/'c'/data", written)
            assert await box.read("a b/'c'/data") == written
        await box.write("-n", b"x")
        assert (await box.exec("cat ./-n", timeout_s=300)).stdout == "x" and await box.read("-n") == b"x"
        with pytest.raises(FileNotFoundError, match="missing"):
            await box.read("missing")
        await box.exec("mkfifo pipe", timeout_s=300)
        for path in ("a b", "pipe"):
            with pytest.raises(fa.SandboxError, match="not a file"):
                await box.read(path)
        await box.write("large", b"x" * 1001)
        assert len(await box.read("large", max_bytes=1001)) == 1001
        with pytest.raises(FileTooLarge, match="1000"):
            await box.read("large", max_bytes=1000)


async def test_a_file_that_does_not_fit_is_refused() -> None:
    async with fa.Sandbox(fa.Bubblewrap(disk_mib=2)) as box:
        with pytest.raises(fa.SandboxError, match=r"No space left"):
            await box.write("large", bytes(3 * 2**20))


@by_kind
async def test_a_box_starts_with_a_copy_of_a_folder(section, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "run.sh").write_text("echo ran; echo changed > input")
    (tmp_path / "src" / "run.sh").chmod(0o700)
    (tmp_path / "src" / "input").write_text("as prepared")
    async with fa.Sandbox(section, workspace=tmp_path) as box:
        assert (await box.exec("cd src && ./run.sh && cat input", timeout_s=300)).stdout == "ran\nchanged\n"
    assert (tmp_path / "src" / "input").read_text() == "as prepared"


@pytest.mark.parametrize(
    ("limits", "match"),
    [({"disk_mib": 1}, "disk_mib"), ({"max_files": 16}, "max_files"), ({}, "pipe is neither file")],
)
async def test_a_folder_that_cannot_be_copied_is_refused(tmp_path: Path, limits, match) -> None:
    for index in range(20):
        (tmp_path / f"{index}").write_bytes(bytes(100_000))
    if not limits:
        os.mkfifo(tmp_path / "pipe")
    with pytest.raises(fa.SandboxError, match=match):
        await run_in_box("true", fa.Bubblewrap(**limits), workspace=tmp_path)


async def test_mounts_are_seen_and_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("mounted")
    (tmp_path / "data.txt").chmod(0o666)
    tmp_path.chmod(0o777)
    section = fa.Bubblewrap(mounts={str(tmp_path): "/data/set"}, env={"PLACE": "/data/set"})
    command = "cat $PLACE/data.txt; echo x > $PLACE/data.txt; touch $PLACE/new; true"
    done = await run_in_box(command, section)
    assert done.stdout == "mounted" and done.stderr.count("Read-only file system") == 2
    assert os.listdir(tmp_path) == ["data.txt"]


async def test_boxes_know_nothing_of_each_other() -> None:
    async with fa.Sandbox() as one, fa.Sandbox() as other:
        await one.write("file", b"x")
        await one.exec("touch /tmp/a /dev/shm/b", timeout_s=300)
        seen = await other.exec("ls /work /tmp /dev/shm", timeout_s=300)
        assert seen.stdout.split() == ["/dev/shm:", "/tmp:", "/work:"]


async def test_calls_of_a_box_run_side_by_side() -> None:
    async with fa.Sandbox() as box:
        # Each waits until all of them are there.
        meet = "touch $0; until set -- *; [ $# -eq 12 ]; do sleep 0.01; done; echo $0"
        calls = (box.exec(["sh", "-c", meet, str(number)], timeout_s=300) for number in range(12))
        done = await asyncio.gather(*calls)
        assert [one.stdout for one in done] == [f"{number}\n" for number in range(12)]


def test_boxes_work_on_any_thread_with_a_loop() -> None:
    with ThreadPoolExecutor(4) as threads:
        done = list(threads.map(lambda _: asyncio.run(run_in_box("echo works")), range(4)))
    assert [one.stdout for one in done] == ["works\n"] * 4


async def test_a_box_is_used_between_entering_and_closing() -> None:
    mark = new_mark()
    box = fa.Sandbox()
    with pytest.raises(SandboxClosed, match="not been entered"):
        await box.exec("true", timeout_s=1)
    async with box:
        call = asyncio.create_task(box.exec(["sh", "-c", "sleep 600; :", mark], timeout_s=600))
        await until_seen(mark, is_there=True)
        await box.close()
        with pytest.raises(SandboxClosed):
            await call
    with pytest.raises(SandboxClosed, match="ended"):
        await box.exec("true", timeout_s=1)
    with pytest.raises(SandboxClosed, match="entered once"):
        await box.__aenter__()
    await box.close()


@pytest.mark.parametrize(
    ("command", "timeout_s", "match"),
    [
        ("true", 0, "timeout_s"),
        ("true", float("nan"), "timeout_s"),
        ("true", float("inf"), "timeout_s"),
        ([], 1, "command"),
        (["a\0b"], 1, "zero byte"),
        ("x" * 200_000, 1, "100000 bytes"),
    ],
)
async def test_a_call_that_cannot_be_made_is_refused(command, timeout_s, match) -> None:
    with pytest.raises(ValueError, match=match):
        await run_in_box(command, timeout_s=timeout_s)


async def test_a_killed_launcher_is_replaced() -> None:
    await run_in_box("true")
    (launcher,) = (one for one in psutil.Process().children() if one.name() == "forgeasync-box")
    launcher.kill()
    # It stays a zombie until the next box finds it gone.
    while launcher.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.001)
    assert (await run_in_box("echo works")).stdout == "works\n"


async def test_a_host_that_is_killed_leaves_no_box_behind() -> None:
    mark = new_mark()
    code = (
        "import asyncio, sys, forgeasync as fa\n"
        "async def main():\n"
        "    async with fa.Sandbox(fa.Bubblewrap(env={'MARK': sys.argv[1]})) as box:\n"
        "        await (await box.python()).run('x = 1', timeout_s=300)\n"
        "        command = ['sh', '-c', 'sleep 600; :', sys.argv[1] + '-in-box']\n"
        "        await box.exec(command, timeout_s=600)\n"
        "asyncio.run(main())\n"
    )
    host = subprocess.Popen([sys.executable, "-c", code, mark])
    try:
        while not processes_with(mark + "-in-box"):
            assert host.poll() is None
            await asyncio.sleep(0.01)
    finally:
        host.kill()
        host.wait()
    await until_seen(mark, is_there=False)


async def test_killing_every_python_spares_the_supervisor() -> None:
    kill = (
        "import os, signal\n"
        "for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):\n"
        "    if b'python' in open(f'/proc/{pid}/cmdline', 'rb').read() and pid != os.getpid():\n"
        "        os.kill(pid, signal.SIGKILL)\n"
    )
    async with fa.Sandbox() as box:
        session = await box.python()
        assert (await box.exec(["python3", "-c", kill], timeout_s=300)).exit_code == 0
        assert (await session.run("1", timeout_s=300)).session_ended
        await check_works(box)
