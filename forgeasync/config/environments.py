"""Sections for environments, their episodes and agents, and for serving people.

Environments are built in, installed or your own. The plug-in ``serve`` has the data source and the
environment of runs that serve people.
"""

import ipaddress
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from forgeasync.config.data import AnswerPart
from forgeasync.config.plugin_sections import InstalledEnvironment
from forgeasync.schema import Count, PluginGroup, PythonCode, Refusal, Seconds, Section, WithPlugins


class Ending(StrEnum):
    """Cause of the end of an episode."""

    COMPLETED = "completed"
    """The environment returned a score."""
    MAX_TURNS = "max_turns"
    """The environment requested another turn after ``episodes.max_turns`` turns."""
    LENGTH = "length"
    """Another turn did not fit in ``model.max_context_length``."""
    PARSE_ERROR = "parse_error"
    """The environment raised ``ParseError``: it could not parse the model's output."""
    TOOL_ERROR = "tool_error"
    """The environment raised ``ToolError``: a tool of the model failed."""
    TIMEOUT = "timeout"
    """The deadline of the set-up, a step, a tool, a judge or the episode passed."""
    ENVIRONMENT_CRASH = "environment_crash"
    """The environment raised any other exception, or did not return a score or a turn."""
    NO_SCORE = "no_score"
    """The environment raised ``NoScore``: the episode was not judged."""
    INFRASTRUCTURE = "infrastructure"
    """A worker, a sandbox or a server was lost; neither the model nor the environment caused it."""


class EndingPolicy(StrEnum):
    """Policy for episodes with a certain ending."""

    SCORE = "score"
    """Train on the episode with the environment's score, or with 0 if there is none."""
    ZERO = "zero"
    """Train on the episode with score 0, whatever the environment's score."""
    MASK = "mask"
    """Do not train on the episode, and leave it out of its group's advantages."""
    RUN_AGAIN = "run_again"
    """Run the same prompt again, up to ``episodes.max_attempts`` attempts; after that, as ``mask``."""


class EndingsSection(Section):
    """Policy for each ending of an episode."""

    completed: EndingPolicy = EndingPolicy.SCORE
    max_turns: EndingPolicy = EndingPolicy.SCORE
    length: EndingPolicy = EndingPolicy.SCORE
    parse_error: EndingPolicy = EndingPolicy.ZERO
    tool_error: EndingPolicy = EndingPolicy.ZERO
    timeout: EndingPolicy = EndingPolicy.MASK
    environment_crash: EndingPolicy = EndingPolicy.RUN_AGAIN
    no_score: EndingPolicy = EndingPolicy.MASK
    """``run_again`` or ``mask``, since an episode without a verdict has no score to train on."""
    infrastructure: EndingPolicy = EndingPolicy.RUN_AGAIN
    """``run_again`` or ``mask``, since a failure of the infrastructure says nothing about the model."""

    def of(self, ending: Ending) -> EndingPolicy:
        """Return the policy of an ending."""
        policy: EndingPolicy = getattr(self, ending.value)
        return policy

    def find_problems(self) -> Iterator[Refusal]:
        """Yield endings that would count as scores although they say nothing about the model."""
        never_a_score = (EndingPolicy.RUN_AGAIN, EndingPolicy.MASK)
        for ending, what in (
            (Ending.INFRASTRUCTURE, "an episode of a lost worker or server"),
            (Ending.NO_SCORE, "an episode without a verdict"),
        ):
            if self.of(ending) not in never_a_score:
                yield (
                    ending.value,
                    f"must be one of {', '.join(never_a_score)}: {what} says nothing about the model, so it "
                    "is never a score",
                )


class EpisodesSection(Section):
    """Settings of the episodes of an environment: worker processes, bounds and deadlines."""

    num_workers: int = Field(default=2, gt=0, le=1024)
    """Number of processes that run episodes. A process that dies or stops answering is replaced."""
    max_live_per_worker: int = Field(default=256, gt=0, le=4096)
    """Maximum number of episodes that a worker runs at once, each on its own thread; others wait."""
    max_turns: Count = 100
    """Maximum number of turns in an episode, for each agent."""
    max_attempts: int = Field(default=3, gt=0, le=100)
    """Maximum number of attempts at an episode whose ending has the policy ``run_again``."""
    setup_s: Seconds = 120.0
    """Time limit from the start of an episode to its first turn."""
    step_s: Seconds = 120.0
    """Time limit for the environment between two turns of the model, and after the last turn."""
    tool_s: Seconds = 60.0
    """Time limit for one tool call."""
    heartbeat_s: Seconds = 8.0
    """Time without an answer after which a worker is stopped and replaced."""
    endings: EndingsSection = EndingsSection()


class AgentSection(Section):
    """Settings of one agent of an environment."""

    trainable: bool = True
    """Train on the tokens of this agent, with advantages relative to the same agent in the other episodes of
    the group. false: The agent samples from the same weights but is not trained on, such as a judge."""


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
            "must be a server name: a lowercase letter, then at most 30 lowercase letters, digits and '_'",
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
"""An MCP server of ``environment: {kind: mcp}``."""

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
"""Section ``environment`` of a config, also of an installed package."""


def environment_name(section: EnvironmentSection) -> str:
    """Return the name of an environment for messages."""
    return section.factory if isinstance(section, PythonCode) else section.kind


class ScoreSource(StrEnum):
    """Source of a session's score."""

    FEEDBACK = "feedback"
    """The last feedback that was posted."""
    ENVIRONMENT = "environment"
    """The method ``verdict`` of your own environment, which is derived from ``ServedSessions``."""
    JUDGE = "judge"
    """The agent ``agents.judge``, which reads each reply together with the person's next message."""


class ServingSection(Section):
    """Settings for serving people; used with ``data.source: {kind: served}``."""

    host: str = "127.0.0.1"
    """Address to listen on. All addresses except loopback (127.0.0.1, ::1, localhost) require
    ``token_env``."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0: any free port. The console and serving.json in the run's folder show it. A worker
    that is replaced uses the same port again."""
    public_host: str | None = None
    """Name or address by which clients reach the machine; null: ``host``."""
    token_env: str | None = None
    """Name of an environment variable with the token for ``POST /sessions``, at least 16 characters. null: a
    random token, which is written to serving.json (readable by its owner only)."""
    idle_session_s: Seconds = 900.0
    """Time without a turn after which a session is ended."""
    session_s: Seconds = 7200.0
    """Age at which a session is ended."""
    max_open_sessions: Count = 256
    """Maximum number of open sessions; requests for more get HTTP status 429."""
    max_turns_at_once: int = Field(default=4, gt=0, le=1024)
    """Maximum number of turns of one session that are sampled at once; requests for more get HTTP status
    429."""
    score_from: tuple[ScoreSource, ...] = (ScoreSource.FEEDBACK,)
    """Sources of a session's score, in order of priority: the first one that gives a score counts. A session
    without a score is not trained on."""
    keep_texts: bool = False
    """Write the messages of people and the model to rollouts.jsonl. false: rollouts.jsonl has numbers
    only."""

    @model_validator(mode="after")
    def _has_different_sources(self) -> Self:
        if not self.score_from or len(set(self.score_from)) < len(self.score_from):
            raise PydanticCustomError(
                "key_of_section",
                "is {given}; must be one or more of {all}, each once",
                {
                    "key": "score_from",
                    "given": ", ".join(self.score_from) or "empty",
                    "all": ", ".join(ScoreSource),
                },
            )
        return self


WILDCARDS = ("", "0.0.0.0", "::")
"""Values of ``host`` that mean all addresses of a machine."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
