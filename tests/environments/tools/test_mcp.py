"""Tools of real MCP servers over pipes and HTTP, and servers that die, hang and flood."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forgeasync.config import HttpServer, McpServerSection, StdioServer
from forgeasync.environments import EpisodeInterrupted, McpTools, Toolbox, ToolCall, ToolResult, mcp_servers
from forgeasync.files import RUN_MARK
from forgeasync.processes import is_running
from forgeasync.rollouts import ToolStatus
from forgeasync.testing import HandTime
from tests.support.processes import free_port, wait_until

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, "-m", "tests.support.mcp_server")
STDIO = StdioServer(command=COMMAND, env={"PYTHONPATH": str(REPOSITORY)})

LONG_S = 1e6
"""No test waits so long, by whatever hand_time."""

Call = Callable[..., Awaitable[ToolResult]]


@contextlib.asynccontextmanager
async def tools_of(servers: dict[str, McpServerSection], **options: Any) -> AsyncIterator[Call]:
    """What calls the tools of servers; ``options`` are those of a toolbox."""
    async with McpTools(servers, start_s=LONG_S) as mcp:
        toolbox = Toolbox(mcp.tools, **options)

        async def call(name: str, *, limit_s: float = LONG_S, **arguments: Any) -> ToolResult:
            return await toolbox.call(ToolCall(id="call_0", name=name, arguments=arguments), limit_s=limit_s)

        yield call


@contextlib.contextmanager
def http_server() -> Iterator[tuple[HttpServer, subprocess.Popen[bytes]]]:
    port = free_port()
    process = subprocess.Popen(
        [*COMMAND, "--port", str(port)], cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            assert process.poll() is None, "the server does not come up"
            time.sleep(0.01)
        yield HttpServer(kind="http", url=f"http://127.0.0.1:{port}/mcp"), process
    finally:
        process.kill()
        process.wait()


async def test_calls_of_a_server_over_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv(RUN_MARK, "0" * 32)
    monkeypatch.setattr(mcp_servers, "PROBE_S", LONG_S)
    async with tools_of({"tests": STDIO}, max_characters=1000) as call:
        added = await call("add", a=2, b=3)
        assert (added.status, added.content) == (ToolStatus.OK, "5")
        wrong = await call("add", a="two")
        assert wrong.status is ToolStatus.FAILED and "valid integer" in wrong.content
        failed = await call("fail")
        assert failed.status is ToolStatus.FAILED and "Traceback" not in failed.content
        unknown = await call("none")
        assert unknown.status is ToolStatus.UNKNOWN_TOOL and "tools: add, remember" in unknown.content
        names = (await call("environment")).content.split()
        expected = {"FORGEASYNC_MCP_SERVER", RUN_MARK, "HOME", "LANG", "PATH", "PYTHONPATH", "TMPDIR"}
        assert set(names) == expected
        # The state of a server lasts.
        assert (await call("remember", word="a")).content == "a"
        cut = await call("flood", num=5000)
        assert cut.status is ToolStatus.CUT and cut.num_cut_characters == 4000
        # A call that takes too long leaves a server that still answers as it is.
        assert (await call("wait", limit_s=0.3)).status is ToolStatus.TIMEOUT
        assert (await call("remember", word="b")).content == "a b"


async def test_all_processes_of_a_server_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A place of its own: servers of other tests have folders among temporary files, too.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pids: list[int] = []
    async with tools_of({"tests": STDIO}) as call:
        pids.append(int((await call("spawn")).content))
        assert is_running(pids[0])
        assert list(tmp_path.glob("forgeasync-mcp-*"))
    assert not is_running(pids[0])
    assert not list(tmp_path.glob("forgeasync-mcp-*"))


def test_a_process_that_a_server_leaves_behind_holds_no_pipes_of_ours(tmp_path: Path) -> None:
    """Nothing says whose it is: it has another parent, session and environment."""
    left, server = tmp_path / "pid", " ".join(COMMAND)
    leave = f"(setsid env -i sh -c 'echo $$ > {left}; exec sleep 600' &)"
    stdio = StdioServer(command=("sh", "-c", f"{leave}; exec {server}"), env=STDIO.env)

    def sleeps() -> bool:
        """Whether the process has left the server's session and environment, and is what it stays."""
        pid = left.read_text().strip() if left.exists() else ""
        return bool(pid) and Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"

    async def conversation() -> None:
        async with tools_of({"tests": stdio}) as call:
            assert (await call("remember", word="a")).content == "a"
            wait_until(sleeps)

    # What earlier tests left open is theirs.
    gc.collect()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            asyncio.run(conversation())
            gc.collect()
        assert is_running(int(left.read_text()))
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)
    assert [str(one.message) for one in caught if issubclass(one.category, ResourceWarning)] == []


async def test_a_server_that_dies_is_started_again_once() -> None:
    seen: list[ToolResult] = []
    with pytest.raises(EpisodeInterrupted, match=r"'tests' was lost again: .*exit code 3: out of memory"):
        async with tools_of({"tests": STDIO}) as call:
            await call("remember", word="a")
            # Both calls are answered, and one restart serves both.
            seen.extend(await asyncio.gather(call("wait"), call("die")))
            assert {result.status for result in seen} == {ToolStatus.SERVER_LOST}
            after = await asyncio.gather(call("remember", word="b"), call("add", a=1, b=1))
            assert [result.content for result in after] == ["b", "2"]
            seen.extend(after)
            assert (await call("die")).status is ToolStatus.SERVER_LOST
            await call("add", a=1, b=1)
    assert len(seen) == 4
    assert "nothing that it held in memory" in seen[0].content


async def test_a_server_that_hangs_is_started_again(tmp_path: Path, hand_time: HandTime) -> None:
    async with tools_of({"tests": STDIO}) as call:
        await call("remember", word="a")
        hanging = asyncio.ensure_future(call("hang", marker=str(tmp_path / "hangs"), limit_s=3.0))
        await hand_time.stand_until((tmp_path / "hangs").exists)
        await hand_time.pass_until(hanging.done)
        assert (await hanging).status is ToolStatus.TIMEOUT
        again = asyncio.ensure_future(call("remember", word="b"))
        await hand_time.pass_until(again.done)
        assert (await again).content == "b"


async def test_a_server_that_floods_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "MAX_MESSAGE_BYTES", 100_000)
    async with tools_of({"tests": STDIO}, max_characters=10**9) as call:
        assert (await call("flood", num=30_000)).status is ToolStatus.OK
        assert (await call("flood", num=200_000)).status is ToolStatus.SERVER_LOST
        assert (await call("add", a=1, b=1)).content == "2"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("/no/such/program",), "FileNotFoundError"),
        ((sys.executable, "-c", "raise SystemExit('no licence')"), "exit code 1: no licence"),
        (("cat", "/dev/zero"), "it wrote a message of more than"),
        (("yes",), "it wrote more than 1000 lines that are not messages"),
        ((sys.executable, "-c", "import time; time.sleep(600)"), "did not come up within 1 s"),
    ],
)
async def test_a_server_that_does_not_come_up_interrupts_the_episode(
    command: tuple[str, ...], told: str
) -> None:
    start_s = 1.0 if "sleep" in command[-1] else LONG_S
    with pytest.raises(EpisodeInterrupted, match="'tests' cannot be used: ") as caught:
        async with McpTools({"tests": StdioServer(command=command)}, start_s=start_s):
            pass
    assert told in str(caught.value)


async def test_calls_of_two_servers_one_of_them_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "MAX_RESPONSE_BYTES", 200_000)
    monkeypatch.setattr(mcp_servers, "PROBE_S", LONG_S)
    with http_server() as (section, process):
        with pytest.raises(EpisodeInterrupted, match="'far' cannot be used: ConnectError"):
            async with tools_of({"far": section, "near": STDIO}) as call:
                assert (await call("far__remember", word="a")).content == "a"
                assert (await call("near__remember", word="b")).content == "b"
                assert (await call("far__wait", limit_s=0.3)).status is ToolStatus.TIMEOUT
                assert (await call("far__remember", word="c")).content == "a c"
                assert (await call("far__flood", num=1_000_000)).status is ToolStatus.SERVER_LOST
                process.kill()
                process.wait()
                await call("far__add", a=1, b=1)
                await call("far__add", a=1, b=1)
