"""An MCP server for tests: ``python -m tests.support.mcp_server`` over its standard input and output, with
``--port N`` over HTTP. Its tools do what servers do that go wrong."""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")
memory: list[str] = []


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def remember(word: str) -> str:
    """Remember a word and say all of them."""
    memory.append(word)
    return " ".join(memory)


@server.tool()
def environment() -> str:
    """Say the names of all environment variables."""
    return " ".join(sorted(os.environ))


@server.tool()
def fail() -> str:
    """Raise an error."""
    raise ValueError("no such row")


@server.tool()
def die() -> str:
    """End the server."""
    print("out of memory", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
async def hang(marker: str) -> str:
    """Stop answering."""
    Path(marker).touch()
    time.sleep(600.0)
    return ""


@server.tool()
async def wait() -> str:
    """Take long; the server goes on answering."""
    import anyio

    await anyio.sleep(600.0)
    return ""


@server.tool()
def flood(num: int) -> str:
    """Say much."""
    return "x" * num


@server.tool()
def spawn() -> str:
    """Start a process that leaves the server's session and parent; say its number."""
    code = (
        "import subprocess; null = subprocess.DEVNULL; print(subprocess.Popen(['sleep', '600'], "
        "stdin=null, stdout=null, stderr=null, start_new_session=True).pid)"
    )
    # It must not read what is sent to the server.
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    return found.stdout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    port = parser.parse_args().port
    if port is None:
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=port)


if __name__ == "__main__":
    main()
