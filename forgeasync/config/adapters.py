"""The sections on environments that run in servers of other projects."""

from enum import StrEnum
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from forgeasync.schema import Seconds, Section

TaskColumn = Annotated[str, Field(pattern=r"^(task_id|prompt|answer|index|record\.[^\s.][^\s]*)$")]
"""What of a task is sent: ``task_id``, ``prompt``, ``answer``, ``index`` (its place in its source), or
``record.<column>``, a column of its record."""

FieldName = Annotated[str, Field(min_length=1, max_length=100)]

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _checked_address(address: str) -> str:
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        return address
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        parts, port = None, None
    if parts is None or scheme != "tcp" or not port or parts.netloc != rest or parts.username is not None:
        raise PydanticCustomError(
            "address", "is {address}; must read tcp://127.0.0.1:<port> or ipc://<path>", {"address": address}
        )
    if parts.hostname not in LOOPBACK:
        raise PydanticCustomError(
            "address_elsewhere",
            "is {address}; must be on the host of the environment workers, such as tcp://127.0.0.1:<port>: "
            "the server samples through sessions that listen there on 127.0.0.1 only",
            {"address": address},
        )
    return address


class VerifiersServer(Section):
    """A server of Verifiers runs the episodes: its harness samples through the episode's own session, and
    its rewards are the score (docs/adapters.md)."""

    kind: Literal["verifiers"]
    address: Annotated[str, AfterValidator(_checked_address)]
    """Where the server listens: ``tcp://127.0.0.1:5000`` or ``ipc:///run/env.sock``."""
    task_fields: dict[FieldName, TaskColumn] | None = Field(
        default_factory=lambda: {"prompt": "prompt", "answer": "answer"}
    )
    """Fields of the server's TaskData, and what of a task each is; null: all columns of the task's record
    under their own names."""
    model: FieldName = "policy"
    """What the server calls the model. Our sessions take any name; an endpoint of others, which
    ``apps.evaluate`` may ask instead, takes its own."""
    health_s: Seconds = 30.0
    """A server that has been silent for so long is asked for its health; one that then stays silent for as
    long again is gone."""
    correct_at: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """The least reward of an episode that counts as correct."""


class StepTool(Section):
    """The model calls one tool, ``step``, whose arguments are the action, by the server's own schema."""

    kind: Literal["step"] = "step"


class McpActions(Section):
    """The model calls the tools that the environment lists (OpenEnv's ``list_tools`` and ``call_tool``)."""

    kind: Literal["tools"]


class TextAction(Section):
    """What the model says is the action; it needs no tools."""

    kind: Literal["text"]
    field: FieldName
    """Field of the action that holds the text; all others keep the server's defaults."""


class Opening(StrEnum):
    """What the model is told first."""

    PROMPT = "prompt"
    """The task's prompt."""
    OBSERVATION = "observation"
    """The observation of the reset."""
    BOTH = "both"
    """The task's prompt, an empty line, and the observation."""


class EpisodeReward(StrEnum):
    """What the reward of an episode is."""

    SUM = "sum"
    """The sum of the rewards of all steps."""
    LAST = "last"
    """The last reward that a step has given."""


class OpenEnvServer(Section):
    """A server of OpenEnv is the environment: it is reset with the task, and every action of the model is a
    step (docs/adapters.md)."""

    kind: Literal["openenv"]
    url: Annotated[str, Field(pattern=r"^wss?://[^\s/?#]+(/[^\s?#]*)?/ws$")]
    """Its websocket, such as ``ws://127.0.0.1:8000/ws``. Proxies of the environment are not used."""
    action: Annotated[StepTool | McpActions | TextAction, Field(discriminator="kind")] = StepTool()
    """How a turn of the model becomes an action."""
    observation_field: FieldName | None = None
    """Field of an observation whose value the model is told; null: all fields but ``metadata``, as JSON, or
    with ``action.kind: tools`` what the tool has returned."""
    reset_fields: dict[FieldName, TaskColumn] = Field(default_factory=lambda: {"seed": "index"})
    """Arguments of the server's ``reset``, and what of a task each is. The server drops those that its
    environment does not take."""
    opening: Opening = Opening.BOTH
    """What the first message says."""
    system_prompt: str | None = None
    """Text of a system message before it."""
    max_rounds: Annotated[int, Field(gt=0, le=10_000)] = 50
    """Most turns of the model; after them the episode ends with the rewards that it has."""
    max_result_characters: Annotated[int, Field(gt=0, le=10_000_000)] = 20_000
    """Most characters of one observation that the model is told."""
    open_s: Seconds = 30.0
    """Time to reach the server and to get one of its sessions, all of which may be in use."""
    reward: EpisodeReward = EpisodeReward.SUM
    """What the score of an episode is."""
    correct_at: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """The least reward of an episode that counts as correct."""
