"""Sections for MCP servers, whose tools a model may call."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from forgeasync.schema import Section

_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
_URL = re.compile(r"https?://[^\s/]+[^\s]*")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise PydanticCustomError(
            "server_name",
            "is the name of a server; must have up to 31 small letters, digits and '_', the first a letter",
        )
    return name


def _check_url(url: str) -> str:
    if not _URL.fullmatch(url):
        raise PydanticCustomError(
            "server_url", "must be a URL of http or https, such as http://127.0.0.1:8000/mcp"
        )
    return url


def _check_command(command: tuple[str, ...]) -> tuple[str, ...]:
    if not command or not command[0].strip() or any("\0" in part for part in command):
        raise PydanticCustomError(
            "server_command",
            "must be a program and its arguments, without zero bytes: [python, -m, my.server]",
        )
    return command


def _check_env(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not name or set(name) & set("=\0") or "\0" in value:
            raise PydanticCustomError(
                "server_env",
                "{name} cannot be set: a name must have neither '=' nor zero bytes, a value no zero bytes",
                {"name": repr(name)},
            )
    return env


class StdioServer(Section):
    """MCP server that is started for each episode and communicates over its standard input and output."""

    kind: Literal["stdio"] = "stdio"
    command: Annotated[tuple[str, ...], AfterValidator(_check_command)]
    """Program and arguments. The program is searched in PATH."""
    env: Annotated[dict[str, str], AfterValidator(_check_env)] = Field(default_factory=dict)
    """Environment variables in addition to PATH, LANG, HOME and TMPDIR; no others are inherited from the
    host."""
    cwd: str | None = None
    """Working directory; null: a new empty folder, which is also HOME and TMPDIR."""


class HttpServer(Section):
    """Running MCP server that speaks streamable HTTP; each episode opens its own session."""

    kind: Literal["http"]
    url: Annotated[str, AfterValidator(_check_url)]
    """URL of the endpoint, such as ``http://127.0.0.1:8000/mcp``. Proxy environment variables are ignored."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of all requests. They are written to the run's folder with the config."""


McpServerSection = Annotated[StdioServer | HttpServer, Field(discriminator="kind")]

McpServerName = Annotated[str, AfterValidator(_check_name)]
