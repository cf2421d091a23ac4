"""Sections for environments: built-in ones, installed ones and your own."""

import re
from enum import StrEnum
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from forgeasync.config.data import AnswerPart
from forgeasync.config.plugin_sections import InstalledEnvironment
from forgeasync.schema import PluginGroup, PythonCode, Seconds, Section, WithPlugins

Rounds = Annotated[int, Field(gt=0, le=10_000)]

FieldName = Annotated[str, Field(min_length=1, max_length=100)]

TaskColumn = Annotated[str, Field(pattern=r"^(task_id|prompt|answer|index|record\.[^\s.][^\s]*)$")]
"""Part of a task to send: ``task_id``, ``prompt``, ``answer``, ``index`` (the position in its source), or
``record.<column>``, a column of its record."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class AnswerMatch(StrEnum):
    """Comparison that decides whether an answer equals the reference."""

    EXACT = "exact"
    """Both are the same text, except for leading and trailing white space."""
    NUMBER = "number"
    """Both are decimal numbers of the same value: ``1,200.50`` and ``1200.5``."""


class AnswerCheck(Section):
    """Rules that find the answer in the model's last turn and compare it with the task's answer.

    The answer is never evaluated as code.
    """

    prefix: str = ""
    """Prefix of the answer, which is the text after its last occurrence; empty: the whole turn."""
    part: AnswerPart = AnswerPart.ALL
    """Part of the text after ``prefix`` that is the answer."""
    match: AnswerMatch = AnswerMatch.EXACT


class PlainCalls(Section):
    """Format of tool calls for a model without a chat template.

    The model writes the code between two marks, and the result follows as text:

        [7+8]15          with call_prefix "[" and call_suffix "]"
    """

    call_prefix: Annotated[str, Field(min_length=1, max_length=100)]
    """Text that starts a call; everything after its first occurrence in a turn is the call."""
    call_suffix: Annotated[str, Field(min_length=1, max_length=100)]
    """Text that ends a call and the turn. The model's end-of-turn token also ends a call."""
    result_prefix: str = ""
    """Text before a result. A newline precedes it if the tokenizer has one."""
    result_suffix: str = ""
    """Text after a result."""
    error_text: str | None = None
    """Text in place of the result of a failed call, for a model whose vocabulary cannot express an error
    message; null: the error message."""

    def call(self, code: str) -> str:
        """Return the text that a model writes to run ``code``."""
        return f"{self.call_prefix}{code}{self.call_suffix}"

    def result(self, text: str) -> str:
        """Return the text that the model receives for a result or an error message."""
        return f"{self.result_prefix}{text}{self.result_suffix}"

    @model_validator(mode="after")
    def _can_begin(self) -> Self:
        if self.call_suffix in self.call_prefix:
            raise PydanticCustomError(
                "key_of_section",
                "is {suffix}; must not occur in call_prefix, where it would end the turn",
                {"key": "call_suffix", "suffix": repr(self.call_suffix)},
            )
        return self


class PythonTool(Section):
    """Environment in which the model answers a task and may run Python in a sandbox.

    The tool is ``python(code)``; variables persist between calls. The score is 1 if the answer matches the
    task's, else 0.
    """

    kind: Literal["python_tool"]
    system_prompt: str | None = None
    """Text of a system message before every task."""
    max_rounds: Rounds = 8
    """Maximum number of turns that call the tool; after them the model gets one more turn."""
    max_result_characters: Annotated[int, Field(gt=0, le=10_000_000)] = 4000
    """Maximum number of characters that the model receives for one call."""
    answer: AnswerCheck = AnswerCheck()
    plain_calls: PlainCalls | None = None
    """Calls as plain text, for models without a chat template; null: calls in the chat template's format."""


_SERVER_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
_SERVER_URL = re.compile(r"https?://[^\s/]+[^\s]*")


def _check_server_name(name: str) -> str:
    if not _SERVER_NAME.fullmatch(name):
        raise PydanticCustomError(
            "server_name",
            "is the name of a server; must have up to 31 small letters, digits and '_', the first a letter",
        )
    return name


def _check_server_url(url: str) -> str:
    if not _SERVER_URL.fullmatch(url):
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
    url: Annotated[str, AfterValidator(_check_server_url)]
    """URL of the endpoint, such as ``http://127.0.0.1:8000/mcp``. Proxy environment variables are ignored."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of all requests. They are written to the run's folder with the config."""


McpServerSection = Annotated[StdioServer | HttpServer, Field(discriminator="kind")]

McpServerName = Annotated[str, AfterValidator(_check_server_name)]


class McpEnvironment(Section):
    """Environment in which the model answers a task with the tools of MCP servers.

    The score is 1 if the answer matches the task's, else 0.
    """

    kind: Literal["mcp"]
    servers: Annotated[dict[McpServerName, McpServerSection], Field(min_length=1)]
    """Servers by name. With several servers, a tool's name is ``<server>__<tool>``."""
    start_s: Seconds = 30.0
    """Time limit for a server to start."""
    system_prompt: str | None = None
    """Text of a system message before every task."""
    max_rounds: Rounds = 20
    """Maximum number of turns that call tools; after them the model gets one more turn."""
    max_result_characters: Annotated[int, Field(gt=0, le=10_000_000)] = 20_000
    """Maximum number of characters that the model receives for one call."""
    answer: AnswerCheck = AnswerCheck()


def _checked_url(url: str) -> str:
    example = "http://127.0.0.1:9000"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = None, None
    if parts is None or parts.scheme != "http" or not port or parts.netloc != url.removeprefix("http://"):
        raise PydanticCustomError(
            "url", "is {url}; must read {example}, without a path", {"url": url, "example": example}
        )
    if parts.hostname not in _LOOPBACK:
        raise PydanticCustomError(
            "url_elsewhere",
            "is {url}; must be on the host of the environment workers, such as {example}: sessions listen on "
            "127.0.0.1 only",
            {"url": url, "example": example},
        )
    return url


class RemoteEnvironment(Section):
    """Environment whose episodes run on your own server, written in any language (docs/remote.md).

    The server's agent samples through the episode's session, and its reply contains the score.
    """

    kind: Literal["remote"]
    url: Annotated[str, AfterValidator(_checked_url)]
    """URL of the server without a path, such as ``http://127.0.0.1:9000``."""
    task_fields: dict[FieldName, TaskColumn] | None = Field(
        default_factory=lambda: {"prompt": "prompt", "answer": "answer"}
    )
    """Fields of the task that the server receives, each with the part of the run's task that it contains;
    null: all columns of the task's record."""
    model: FieldName = "policy"
    """Model name for the server's agent; sessions accept any name."""
    health_s: Seconds = 30.0
    """Seconds between two health checks of the server while it runs an episode, and the time limit of
    each."""
    correct_at: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """Minimum score that counts as correct if the server does not say whether the answer is correct."""


EnvironmentSection = Annotated[
    PythonTool | McpEnvironment | RemoteEnvironment | PythonCode | InstalledEnvironment,
    WithPlugins(PluginGroup.ENVIRONMENTS),
]


def environment_name(section: EnvironmentSection) -> str:
    """Return the name of an environment for messages."""
    return section.factory if isinstance(section, PythonCode) else section.kind
